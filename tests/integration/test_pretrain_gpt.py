"""pretrain_gpt.py of the patched Megatron-LM itself: it trains with SGD_sai, stops, and goes on.

Needs the real repository under UPSTREAM_TREES; no package registry carries it. It runs on the processor, put in the GPU's
place, unless TRAINING_PYTHON names the interpreter of an environment with GPUs (docs/results/gpu.md): then the script runs as it is.

IMAGE_MEGATRON_GPT3 and IMAGE_LLAMA3_70B, tags of those stacks' images, have the stack's own commands run in them, on the processor.
"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from patch_support import (
    PROBES,
    REQUIREMENTS,
    environment_of,
    image_of,
    image_variable,
    in_image,
    patched_tree,
    venv,
    write_corpus,
)

from envbuild.stacks.load import load_stack
from envbuild.stacks.model import Stack

ARGUMENTS = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4
--mock-data --tokenizer-type NullTokenizer --vocab-size 8191 --num-workers 0 --split 100,0,0 --eval-iters 0 --log-interval 1 --train-iters 6
--lr 1e-2 --lr-decay-style constant --weight-decay 0.01 --attention-dropout 0 --hidden-dropout 0 --ckpt-format torch
"""
WITHOUT_GPU = """
--attention-backend unfused --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
--no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --distributed-backend gloo --use-cpu-initialization
"""
# What the processor can hold of the stack's own batch, in whole precision.
SMALL = "--micro-batch-size 1 --global-batch-size 2 --log-interval 1 --split 100,0,0 --eval-iters 0 --num-workers 0"
GPU = os.environ.get("TRAINING_PYTHON")
# What Megatron's deterministic mode asks for, so that losses can be compared to the last digit.
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
SGD = ("--optimizer", "sgd", "--sgd-momentum", "0.9")
MPI = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1))"
TOKENIZER = """
from transformers import GPT2TokenizerFast
GPT2TokenizerFast(vocab_file="vocab.json", merges_file="merges.txt").save_pretrained("tokenizer")
"""
STEP = re.compile(r"iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+) ")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def python() -> Path:
    packages = ("six==1.17.0", "tensorboard==2.20.0", "regex==2026.11.15", "pyyaml==6.0.3", "requests==2.34.2")
    return Path(GPU) if GPU else venv(*REQUIREMENTS, *packages)


@pytest.fixture(scope="module", params=["transformer_engine", "local"] if GPU else ["local"])
def pretrain(request, python, tmp_path_factory):
    """Run pretrain_gpt.py on some ranks; return how it ended and (step, loss, gradient norm) of each step."""
    tree = patched_tree(tmp_path_factory.mktemp("megatron"), "sgd", "fix-convert", "no-nvcc")
    script = [tree / "pretrain_gpt.py", *ARGUMENTS.split(), "--transformer-impl", request.param]
    if GPU:
        script += ["--bf16", "--deterministic-mode"]
        mode = DETERMINISTIC
    else:
        script = [PROBES / "on_processor.py", *script, *WITHOUT_GPU.split()]
        mode = {"TORCHDYNAMO_DISABLE": "1"}
    environment = environment_of(
        python, PYTHONPATH=str(tree), CUDA_DEVICE_MAX_CONNECTIONS="1", OMP_NUM_THREADS="1", **mode
    )
    helpers = ["make", "-C", str(tree / "megatron" / "core" / "datasets")]
    subprocess.run(helpers, env=environment, check=True, capture_output=True)

    def run(ranks: int, *more: object) -> tuple[subprocess.CompletedProcess[str], list[tuple[str, str, str]]]:
        launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        command = [*launch, *script, *more]
        done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=False)
        return done, STEP.findall(done.stdout)

    return run


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ()),
        (2, ()),
        (2, ("--tensor-model-parallel-size", 2)),
        (2, ("--pipeline-model-parallel-size", 2)),
    ],
    ids=["one", "DP2", "TP2", "PP2"],
)
def test_it_trains_and_a_resumed_run_continues_the_one_that_was_not_stopped(
    pretrain, tmp_path: Path, ranks: int, layout: tuple[object, ...]
) -> None:
    whole, steps = pretrain(ranks, *SGD, *layout)
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert [int(number) for number, _, _ in steps] == [1, 2, 3, 4, 5, 6]
    assert len({loss for _, loss, _ in steps}) == 6
    first, before = pretrain(ranks, *SGD, *layout, "--exit-interval", 3, "--save", tmp_path, "--save-interval", 3)
    assert first.returncode == 0, first.stderr[-3000:]
    second, after = pretrain(ranks, *SGD, *layout, "--load", tmp_path)
    assert second.returncode == 0, second.stderr[-3000:]
    assert before + after == steps


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--use-distributed-optimizer",), "does not work with --use-distributed-optimizer"),
        (("--ckpt-format", "torch_dist"), "does not work with --ckpt-format torch_dist"),
        (("--optimizer-cpu-offload",), "must be used in conjunction with `--use-precision-aware-optimizer`"),
        (("--optimizer-cpu-offload", "--use-precision-aware-optimizer"), "only supported with adam"),
    ],
)
def test_what_sgd_cannot_do_is_refused(pretrain, flags: tuple[str, ...], says: str) -> None:
    """CPU offload meets Megatron's own check of arguments first; test_patch_sgd has the patch's."""
    done, steps = pretrain(1, *SGD, *flags)
    assert done.returncode == 1
    assert says in done.stderr
    assert not steps


def test_adam_is_as_it_was(pretrain) -> None:
    done, steps = pretrain(1, "--optimizer", "adam")
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(steps) == 6


def test_the_profiler_sees_the_optimizer_in_the_steps_that_were_asked_for(pretrain, tmp_path: Path) -> None:
    window = ("--profile-step-start", 2, "--profile-step-end", 4, "--tensorboard-dir", tmp_path)
    done, _ = pretrain(1, *SGD, "--profile", "--use-pytorch-profiler", *window)
    assert done.returncode == 0, done.stderr[-3000:]
    (trace,) = tmp_path.glob("*.trace.json")
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert {"Optimizer.step#SGD_sai.step", "ProfilerStep#2", "ProfilerStep#3"} <= names
    assert "ProfilerStep#1" not in names
    assert bool(GPU) == any(event.get("cat") == "kernel" for event in events)


def run_in(image: str, tree: str, workdir: Path, *words: object) -> str:
    """Run a command of the stack's in its image, the repository's own scripts by their paths; return what it printed."""
    named = [f"{tree}/{w}" if str(w).startswith(("tools/", "pretrain_gpt")) else w for w in words]
    variables = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    line = in_image(image, *named, workdir=workdir, folders=(workdir, PROBES), variables=variables)
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def own(name: str) -> tuple[Stack, str]:
    """Return the stack, and the tag of its image; where the environment names none, the test is skipped."""
    image = image_of(name)
    if not image:
        pytest.skip(f"{image_variable(name)} names no image")
    return load_stack(name), image


def test_megatron_gpt3_prepares_tokenises_and_trains_by_its_own_commands(tmp_path: Path) -> None:
    stack, image = own("megatron-gpt3")
    tree = stack.repository.path
    write_corpus(tmp_path)

    def inside(command: str, *more: str) -> str:
        return run_in(image, tree, tmp_path, *shlex.split(command), *more)

    uses = {use.name: use.run for use in stack.uses}
    read = "pandas.read_json('corpus.jsonl', lines=True)"
    inside(f"python -c \"import pandas; {read}.to_parquet('wikitext-2-raw-v1.parquet')\"")
    inside(uses["jsonl"])
    inside(uses["tokenise"])
    (launcher,) = stack.launchers
    command = launcher.command.format(nproc=2).replace("--bf16 ", "")
    command = command.replace(" pretrain_gpt.py", f" {PROBES}/on_processor.py pretrain_gpt.py")
    printed = inside(command, *SMALL.split(), *WITHOUT_GPU.split(), "--transformer-impl", "local")
    losses = [float(loss) for _, loss, _ in STEP.findall(printed)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_llama3_70b_trains_with_sgd_and_resumes_in_its_own_image(tmp_path: Path) -> None:
    stack, image = own("llama3-70b")
    tree = stack.repository.path
    launcher = next(each for each in stack.launchers if each.name == "torchrun").command
    command = launcher.replace("--rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29500", "--standalone")
    command = command.format(nodes=1, nproc=2).replace(
        " pretrain_gpt.py ...", f" {PROBES}/on_processor.py pretrain_gpt.py"
    )
    flags = (*ARGUMENTS.split(), *WITHOUT_GPU.split(), *SGD, "--transformer-impl", "local")

    def steps(*more: object) -> list[tuple[str, str, str]]:
        return STEP.findall(run_in(image, tree, tmp_path, *shlex.split(command), *flags, *more))

    whole = steps()
    assert [int(number) for number, _, _ in whole] == [1, 2, 3, 4, 5, 6]
    before = steps("--exit-interval", 3, "--save", tmp_path / "kept", "--save-interval", 3)
    assert before + steps("--load", tmp_path / "kept") == whole

    mpirun = ("mpirun", "-n", 2, "--oversubscribe", "--bind-to", "none")  # the stack's own Open MPI, and mpi4py on it
    printed = run_in(image, tree, tmp_path, *mpirun, "python", "-c", MPI)
    assert sorted(printed.split()) == ["3", "3"]
    write_corpus(tmp_path)
    (tokenise,) = [use.run for use in stack.uses if use.name == "tokenise"]
    run_in(image, tree, tmp_path, "python", "-c", TOKENIZER)
    run_in(image, tree, tmp_path, *shlex.split(tokenise.replace("$TOKENIZER", str(tmp_path / "tokenizer"))))
    assert (tmp_path / "corpus_text_document.idx").stat().st_size > 0

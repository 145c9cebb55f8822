"""The own training scripts of llm-jp, gpt2-3d and alcf under DeepSpeed, on the processor: five steps by each launcher.

Needs Open MPI and the real repositories under UPSTREAM_TREES; no package registry carries those. With IMAGE_LLM_JP or
IMAGE_GPT2_3D, tags of those stacks' images, the script runs there instead, in the image's own tree and environment. alcf's, which
starts through ezpz and MPICH, runs in its image alone (IMAGE_ALCF).

With TRAINING_PYTHON, the interpreter of an environment with GPUs (docs/results/gpu.md), the scripts run on those, in BF16 and with
their fused kernels: llm-jp's as it is on two, gpt2-3d's on four with what torch and NumPy have dropped since 2020.
"""

import base64
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from patch_support import (
    PROBES,
    WORDS,
    environment_of,
    image_of,
    image_variable,
    in_image,
    patched_tree,
    venv,
    write_corpus,
)

from envbuild.paths import data_dir
from envbuild.stacks.load import load_stack

# The newest DeepSpeed that still has the compression that these trees import. The older NumPy is the trees' own wish.
REQUIREMENTS = (
    "torch==2.13.0",
    "numpy==1.26.4",
    "deepspeed==0.16.9",
    "mpi4py==4.1.2",
    "pybind11==3.1.0",
    "six==1.17.0",
    "regex==2026.11.15",
    "nltk==3.10.4",
    "sentencepiece==0.2.3",
    "setuptools==80.9.0",
    "tensorboard==2.21.0",
    "wandb==0.31.0",
)
GPU = os.environ.get("TRAINING_PYTHON")
# Where a tree compiles its kernels as it starts. Today's torch leaves them out of sys.modules, and apex has some by the same names.
KERNELS = "megatron/fused_kernels/build"
BACKEND = "nccl" if GPU else "gloo"
MODEL = f"""
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --train-iters 5 --lr 1e-3
--data-impl mmap --split 100,0,0 --eval-iters 0 --log-interval 1 --distributed-backend {BACKEND} --num-workers 0
"""
LOSS = re.compile(r"iteration +(\d+)/.*lm loss: (\S+)")
RATE = re.compile(r"iteration +\d+/.*learning rate: (\S+)")

# Neither of the trees' fused kernels runs on a processor; on a GPU they are what is looked for.
WITHOUT_KERNELS = """
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion
"""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A folder with a corpus as json lines and as plain text, a GPT-2 vocabulary of bytes, one of words, and DeepSpeed's configuration."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = write_corpus(folder)
    (folder / "corpus.txt").write_text("".join(text + "\n" for text in texts))
    (folder / "words.json").write_text(json.dumps({word: number for number, word in enumerate((*WORDS, "<eod>"))}))
    settings = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    (folder / "one.json").write_text(json.dumps(settings | {"bf16": {"enabled": bool(GPU)}}))
    (folder / "two.json").write_text(json.dumps(settings | {"gradient_accumulation_steps": 2}))
    return folder


@dataclass(frozen=True)
class Place:
    """A patched tree with its helpers, on this machine in an environment of today's packages, or in a stack's image."""

    tree: Path
    image: str | None = None

    def run(self, ranks: int, launcher: str, *words: object, mount: Path | None = None) -> str:
        """Run the probe with these words by the launcher; return what it printed. An image sees the folder `mount`, too."""
        python = Path("python") if self.image else interpreter()
        front: dict[str, list[object]] = {
            "none": [python],
            "torchrun": [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks],
            "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", ranks, python],
            "deepspeed": [python.parent / "deepspeed", "--num_gpus", ranks],
            "mpiexec": ["mpiexec", "-n", ranks, python],
        }
        if self.image:
            # what `deepspeed` starts on each host: the older ones themselves count GPUs first, and find none here
            hosts = base64.urlsafe_b64encode(json.dumps({"localhost": [*range(ranks)]}).encode()).decode()
            address = ("--master_addr=127.0.0.1", "--master_port=24779")
            front["deepspeed"] = [python, "-m", "deepspeed.launcher.launch", *address, f"--world_info={hosts}"]
        variables = {
            "PYTHONPATH": f"{self.tree}:{self.tree / KERNELS}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "24779",
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
        }
        if GPU:
            variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
            if words[0] == "--2020":
                words = (PROBES / "of_2020.py", *words[1:])
        else:
            # the first says how many devices DeepSpeed's CPU accelerator has
            variables |= {"LOCAL_SIZE": str(ranks), "TORCHDYNAMO_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
            words = (PROBES / "deepspeed_on_processor.py", *words)
        command = [*front[launcher], *words]
        if self.image:
            variables.pop("DS_ACCELERATOR", None)  # the older launchers would look for Intel's extension
            folders = filter(None, (PROBES, mount))
            command = in_image(self.image, *command, workdir=self.tree, folders=folders, variables=variables)
            environment = dict(os.environ)
        else:
            environment = environment_of(python, **variables)
        done = subprocess.run(
            [*map(str, command)],
            cwd=None if self.image else self.tree,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout + done.stderr


def interpreter() -> Path:
    return Path(GPU) if GPU else venv(*REQUIREMENTS)


def place(stack: str, folder: Path, inner: str = ".") -> Place:
    """Where the tree of a stack lies: in the image that the environment names, or here, patched and compiled."""
    loaded = load_stack(stack)
    image = image_of(stack)
    if image:
        return Place(tree=Path(loaded.repository.path), image=image)
    tree = patched_tree(folder, *loaded.patches) / inner
    # who has no tree has skipped by now, and needs no environment
    command = ["make", "-C", str(tree / "megatron" / "data")]
    subprocess.run(command, env=environment_of(interpreter()), check=True, capture_output=True)
    if GPU:
        (tree / KERNELS).mkdir(exist_ok=True)  # a search path that is not there yet is not looked at again
    return Place(tree=tree)


def vocabulary(corpus: Path) -> str:
    return f"--vocab-file {corpus}/vocab.json --merge-file {corpus}/merges.txt"


@pytest.fixture(scope="module")
def llm_jp(tmp_path_factory) -> Place:
    return place("llm-jp", tmp_path_factory.mktemp("llm-jp"))


def tokenised(at: Place, corpus: Path) -> Path:
    """Have the tree's own preprocess_data.py make tokens of the corpus; return their prefix."""
    flags = f"""--input {corpus}/corpus.jsonl --output-prefix {corpus}/tokens --dataset-impl mmap --append-eod --workers 1
        --tokenizer-type GPT2BPETokenizer {vocabulary(corpus)}"""
    at.run(1, "none", "tools/preprocess_data.py", *flags.split(), mount=corpus)
    return corpus / "tokens_text_document"


@pytest.fixture(scope="module")
def tokens(llm_jp, corpus) -> Path:
    return tokenised(llm_jp, corpus)


def training(corpus: Path, tokens: Path) -> str:
    """Return the arguments of llm-jp's and alcf's scripts: both come from one Megatron-DeepSpeed."""
    return f"""{MODEL} {vocabulary(corpus)} --data-path {tokens} --micro-batch-size 2 --global-batch-size 4 --lr-decay-style constant
        {"--bf16" if GPU else WITHOUT_KERNELS} --no-pipeline-parallel --use-cpu-initialization --deepspeed --deepspeed_config {corpus}/one.json --zero-stage 0"""


def test_llm_jp_trains_alike_by_every_launcher(llm_jp, corpus, tokens) -> None:
    flags = training(corpus, tokens)
    losses = {}
    for launcher, more in (("torchrun", []), ("deepspeed", []), ("mpirun", ["--use-mpi"])):
        printed = llm_jp.run(2, launcher, "pretrain_gpt.py", *flags.split(), *more, mount=corpus)
        losses[launcher] = LOSS.findall(printed)
        if GPU:
            assert ">>> done with compiling and loading fused kernels." in printed
            assert "We default back to unfused kernel invocations" not in printed
    assert [step for step, _ in losses["torchrun"]] == ["1", "2", "3", "4", "5"]
    assert float(losses["torchrun"][-1][1]) < float(losses["torchrun"][0][1])
    for other in losses.values():
        assert [float(loss) for _, loss in other] == pytest.approx(
            [float(loss) for _, loss in losses["torchrun"]], rel=1e-3 if GPU else 0
        )


def test_alcf_trains_through_ezpz_under_its_own_mpich(corpus) -> None:
    if not image_of("alcf"):
        pytest.skip(f"{image_variable('alcf')} names no image")
    alcf = place("alcf", corpus)
    flags = training(corpus, tokenised(alcf, corpus))
    for ranks, more in ((1, []), (2, []), (2, ["--tensor-model-parallel-size", "2"])):
        printed = alcf.run(ranks, "mpiexec", "pretrain_gpt.py", *flags.split(), *more, mount=corpus)
        for rank in range(ranks):  # ezpz has DeepSpeed ask MPI
            assert f"Discovered MPI settings of world_rank={rank}, local_rank={rank}, world_size={ranks}," in printed
        losses = [float(loss) for _, loss in LOSS.findall(printed)]
        assert len(losses) == 5
        assert losses[-1] < losses[0]


def test_gpt2_3d_trains_in_three_dimensions_on_encoded_text(corpus, tmp_path_factory) -> None:
    gpt2_3d = place("gpt2-3d", tmp_path_factory.mktemp("gpt2-3d"), "Megatron-LM-v1.1.5-3D_parallelism")
    flags = f"{corpus}/corpus.txt --vocab {corpus}/words.json --output {corpus}/encoded --append-eod <eod>"
    encode = [sys.executable, data_dir("dockerfiles") / "tools" / "encode-text", *flags.split()]
    subprocess.run([*map(str, encode)], check=True, capture_output=True)
    flags = f"""{MODEL} {vocabulary(corpus)} --data-path {corpus}/encoded --model-parallel-size 2 --pipe-parallel-size 2
        --batch-size 2 --gas 2 --lr-decay-style cosine --warmup 0.2 --lr-decay-iters 5
        --deepspeed --deepspeed_config {corpus}/two.json"""
    printed = gpt2_3d.run(4, "deepspeed", "--2020", "pretrain_gpt2.py", *flags.split(), mount=corpus)
    losses = [float(loss) for _, loss in LOSS.findall(printed)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    # the patched scheduler, as deepspeed.initialize took it: one step of warm-up, then the cosine
    assert RATE.findall(printed) == ["1.000E-03", "9.045E-04", "6.545E-04", "3.455E-04", "3.455E-04"]


@pytest.mark.skipif(not GPU, reason="TRAINING_PYTHON names no environment with GPUs")
def test_llm_jp_proves_its_fused_kernels_by_its_own_command(llm_jp) -> None:
    (command,) = [use.run for use in load_stack("llm-jp").proof if use.name == "fused-kernels"]
    environment = environment_of(interpreter(), PYTHONPATH=str(llm_jp.tree))
    done = subprocess.run(
        ["sh", "-c", command], cwd=llm_jp.tree, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

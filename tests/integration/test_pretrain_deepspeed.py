"""The own training scripts of llm-jp and gpt2-3d under DeepSpeed, on the processor: five steps by each launcher.

Needs Open MPI and the real repositories under UPSTREAM_TREES; no package registry carries those.
"""

import json
import random
import re
import subprocess
from pathlib import Path

import pytest
from patch_support import PROBES, environment_of, patched_tree, venv

from envbuild.paths import data_dir

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
MODEL = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --train-iters 5 --lr 1e-3
--data-impl mmap --split 100,0,0 --eval-iters 0 --log-interval 1 --distributed-backend gloo --num-workers 0
"""
WORDS = ("alpha", "beta", "gamma", "delta", "one", "two", "three")
LOSS = re.compile(r"iteration +(\d+)/.*lm loss: (\S+)")
RATE = re.compile(r"iteration +\d+/.*learning rate: (\S+)")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A folder with a corpus as json lines and as plain text, a GPT-2 vocabulary of bytes, one of words, and DeepSpeed's configuration."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [" ".join(random.Random(number).choices(WORDS, k=60)) for number in range(100)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "corpus.txt").write_text("".join(text + "\n" for text in texts))
    (folder / "words.json").write_text(json.dumps({word: number for number, word in enumerate((*WORDS, "<eod>"))}))
    # GPT-2's alphabet of bytes: those that print stand for themselves, the others for what follows 256
    printed = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = [*map(chr, printed), *(chr(256 + number) for number in range(256 - len(printed)))]
    (folder / "vocab.json").write_text(json.dumps({s: n for n, s in enumerate([*symbols, "<|endoftext|>", "al"])}))
    (folder / "merges.txt").write_text("#version: 0.2\na l\n")
    settings = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    (folder / "one.json").write_text(json.dumps(settings))
    (folder / "two.json").write_text(json.dumps(settings | {"gradient_accumulation_steps": 2}))
    return folder


def run(tree: Path, ranks: int, launcher: str, *words: object) -> str:
    """Run the probe with these words by the launcher; return what it printed."""
    python = venv(*REQUIREMENTS)
    front: dict[str, list[object]] = {
        "none": [python],
        "torchrun": [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks],
        "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", ranks, python],
        "deepspeed": [python.parent / "deepspeed", "--num_gpus", ranks],
    }
    environment = environment_of(
        python,
        PYTHONPATH=str(tree),
        DS_ACCELERATOR="cpu",
        LOCAL_SIZE=str(ranks),  # how many devices DeepSpeed's CPU accelerator says there are
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="24779",
        OMP_NUM_THREADS="1",
        TORCHDYNAMO_DISABLE="1",
        WANDB_MODE="disabled",
    )
    command = [*front[launcher], PROBES / "deepspeed_on_processor.py", *words]
    done = subprocess.run([*map(str, command)], cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def prepared(tree: Path) -> Path:
    """Compile the tree's helpers; whoever has no tree has skipped by now, and needs no environment."""
    command = ["make", "-C", str(tree / "megatron" / "data")]
    subprocess.run(command, env=environment_of(venv(*REQUIREMENTS)), check=True, capture_output=True)
    return tree


def vocabulary(corpus: Path) -> str:
    return f"--vocab-file {corpus}/vocab.json --merge-file {corpus}/merges.txt"


@pytest.fixture(scope="module")
def llm_jp(tmp_path_factory) -> Path:
    return prepared(patched_tree(tmp_path_factory.mktemp("llm-jp"), "makefile"))


@pytest.fixture(scope="module")
def tokens(llm_jp, corpus) -> Path:
    """The corpus as the tree's own preprocess_data.py leaves it."""
    flags = f"""--input {corpus}/corpus.jsonl --output-prefix {corpus}/tokens --dataset-impl mmap --append-eod --workers 1
        --tokenizer-type GPT2BPETokenizer {vocabulary(corpus)}"""
    run(llm_jp, 1, "none", "tools/preprocess_data.py", *flags.split())
    return corpus / "tokens_text_document"


def test_llm_jp_trains_alike_by_every_launcher(llm_jp, corpus, tokens) -> None:
    flags = f"""{MODEL} {vocabulary(corpus)} --data-path {tokens} --micro-batch-size 2 --global-batch-size 4 --lr-decay-style constant
        --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion
        --no-pipeline-parallel --use-cpu-initialization --deepspeed --deepspeed_config {corpus}/one.json --zero-stage 0"""
    losses = {}
    for launcher, more in (("torchrun", []), ("deepspeed", []), ("mpirun", ["--use-mpi"])):
        said = run(llm_jp, 2, launcher, "pretrain_gpt.py", *flags.split(), *more)
        losses[launcher] = LOSS.findall(said)
    assert [step for step, _ in losses["torchrun"]] == ["1", "2", "3", "4", "5"]
    assert float(losses["torchrun"][-1][1]) < float(losses["torchrun"][0][1])
    assert all(other == losses["torchrun"] for other in losses.values())


def test_gpt2_3d_trains_in_three_dimensions_on_encoded_text(corpus, tmp_path_factory) -> None:
    tree = patched_tree(tmp_path_factory.mktemp("gpt2-3d"), "lr-scheduler") / "Megatron-LM-v1.1.5-3D_parallelism"
    prepared(tree)
    flags = f"{corpus}/corpus.txt --vocab {corpus}/words.json --output {corpus}/encoded --append-eod <eod>"
    encode = [venv(*REQUIREMENTS), data_dir("dockerfiles") / "tools" / "encode-text", *flags.split()]
    subprocess.run([*map(str, encode)], check=True, capture_output=True)
    flags = f"""{MODEL} {vocabulary(corpus)} --data-path {corpus}/encoded --model-parallel-size 2 --pipe-parallel-size 2
        --batch-size 2 --gas 2 --lr-decay-style cosine --warmup 0.2 --lr-decay-iters 5
        --deepspeed --deepspeed_config {corpus}/two.json"""
    said = run(tree, 4, "deepspeed", "--2020", "pretrain_gpt2.py", *flags.split())
    losses = [float(loss) for _, loss in LOSS.findall(said)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    # the patched scheduler, as deepspeed.initialize took it: one step of warm-up, then the cosine
    assert RATE.findall(said) == ["1.000E-03", "9.045E-04", "6.545E-04", "3.455E-04", "3.455E-04"]

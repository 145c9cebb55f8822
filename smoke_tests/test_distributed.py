"""Level distributed: ranks start under each launcher, agree where they must, and train what one rank trains."""

import os
import shutil
import tempfile

import pytest

from smokelib import data, launch
from smokelib.counts import batch_of, layouts, worlds
from smokelib.launch import hostfile
from test_step import BATCH, LR, MEGATRON, MODEL, STEPS, falling, took_fused_paths


def _same_data(results, seed, batch, seq):
    strangers = data.name_strangers(results, seed, 0, batch, seq)
    assert not strangers, (
        "rank {} was given other data: its first batch is not the one that seed {} gives the others".format(
            ", ".join(str(r) for r in strangers), seed
        )
    )


def _all_equal(results, key, what):
    values = [str(r[key]) for r in results]
    common = max(set(values), key=values.count)
    odd = [i for i, value in enumerate(values) if value != common]
    assert not odd, "{} differ: rank {} has {}, the others {}".format(what, odd[0], values[odd[0]], common)


def _ddp(device, seed, world, launcher="torchrun", **more):
    args = dict({"device": device, "seed": seed, "model": MODEL, "batch": BATCH, "steps": STEPS, "lr": LR}, **more)
    assert args["batch"] % world == 0, "{} ranks cannot share a batch of {}".format(world, args["batch"])
    return launch.run_ranks(
        "ddp",
        world,
        launcher=launcher,
        args=args,
        timeout=300,
        stall=90,
        nodes=hostfile() if launcher != "env" else None,
    )


@pytest.fixture(scope="module")
def alone(device, seed, nproc):
    """The losses of one rank on the whole batch: what every other count of ranks must give."""
    return _ddp(device, seed, 1, launcher="env", batch=batch_of(nproc, BATCH))[0]["losses"]


@pytest.fixture
def kept(tmp_path):
    """A folder that every rank sees: beside the hostfile, which is where every host looks, else a temporary one."""
    if not hostfile():
        yield tmp_path
        return
    folder = tempfile.mkdtemp(prefix="smoke-kept-", dir=os.path.dirname(hostfile()))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "env"])
def test_distributed_ddp(launcher, device, nproc, seed, expected, figure, alone):
    """torch DDP on every rank count: same data, parameters equal to the bit, losses as on one rank."""
    if launcher == "mpirun" and not expected.lists("mpi") and not launch.available("mpirun"):
        pytest.skip("the lock lists no mpi, and this host has none")
    if nproc < 2:
        pytest.skip("one rank only: nothing to distribute")
    if launcher == "env" and hostfile():
        pytest.skip("plain processes start on one host")
    falling(alone)
    for world in worlds(nproc):
        results = _ddp(device, seed, world, launcher, batch=batch_of(nproc, BATCH))
        _same_data(results, seed, batch_of(nproc, BATCH), MODEL["seq"])
        assert {r["world"] for r in results} == {world}
        assert {r["backend"] for r in results} == {"nccl" if device == "cuda" else "gloo"}
        _all_equal(results, "losses", "the mean losses")
        _all_equal(results, "parameters", "the parameters after training")
        worst = max(abs(a - b) for a, b in zip(results[0]["losses"], alone))
        figure("{} ranks against one, largest loss difference".format(world), worst, bound=2e-3)
        assert worst <= 2e-3, "{} ranks leave one rank's losses by {:.4f}".format(world, worst)


def test_distributed_ddp_resume(device, nproc, seed, kept, figure):
    """Stopped half way and resumed, the losses are those of the run that was not stopped."""
    if nproc < 2:
        pytest.skip("one rank only: nothing to distribute")
    half = STEPS // 2
    whole = _ddp(device, seed, 2, save=str(kept), save_at=half)
    rest = _ddp(device, seed, 2, load=str(kept))
    worst = max(abs(a - b) for a, b in zip(whole[0]["losses"][half:], rest[0]["losses"]))
    bound = 1e-4 if device == "cuda" else 0.0
    figure("resumed against uninterrupted, largest loss difference", worst, bound=bound)
    assert len(rest[0]["losses"]) == STEPS - half
    assert worst <= bound, "resumed losses differ by {}".format(worst)


def test_distributed_allreduce_exact(device, nproc, seed, figure):
    """An all-reduce of integers is exact, and the same on every rank."""
    if nproc < 2:
        pytest.skip("one rank only: nothing to reduce")
    for world in worlds(nproc):
        results = launch.run_ranks(
            "allreduce", world, args={"device": device, "seed": seed, "bytes": 1 << 22, "warmup": 1, "turns": 3},
            timeout=180, stall=60, nodes=hostfile(),
        )  # fmt: skip
        assert all(r["exact"] for r in results), "the all-reduce is wrong on rank {}".format(
            [i for i, r in enumerate(results) if not r["exact"]]
        )
        _all_equal(results, "digest", "the reduced tensors")
        figure("{} ranks, 4 MiB".format(world), round(results[0]["bus_gb_s"], 2), unit="GB/s")


def _megatron(device, seed, tp=1, pp=1, dp=1, **more):
    args = dict(MEGATRON, device=device, seed=seed, tp=tp, pp=pp, **more)
    if tp * pp * dp > 1:
        args["distributed_optimizer"] = more.get("distributed_optimizer", device == "cuda")
    return launch.run_ranks(
        "megatron_gpt", tp * pp * dp, args=args, timeout=300, stall=120, nodes=hostfile() if tp * pp * dp > 1 else None
    )


def _ranks_agree(results):
    """Bit for bit: losses on every last stage, shared parameters across TP, all parameters across DP."""
    losses = [r["losses"] for r in results if r["losses"]]
    assert losses and all(value == losses[0] for value in losses), "the ranks' losses differ: {}".format(losses)
    for key, group in (("shared", ("pp",)), ("parameters", ("pp", "tp"))):
        seen = {}
        for rank, said in enumerate(results):
            place = tuple(said[axis] for axis in group)
            first = seen.setdefault(place, (rank, said[key]))
            assert first[1] == said[key], (
                "{} parameters differ between rank {} and rank {}, which must hold the same".format(key, first[0], rank)
            )
    return losses[0]


@pytest.mark.parametrize("layers", ["local", "te"])
def test_distributed_megatron(layers, device, nproc, seed, need, expected, figure):
    """Megatron-core at every TP x PP x DP that fits: ranks agree, and the losses are those of one rank."""
    need("megatron")
    if layers == "te":
        need("te")
        if device != "cuda":
            pytest.skip("TE's layers need a GPU")
    if nproc < 2:
        pytest.skip("one rank only: nothing to distribute")
    one = _megatron(device, seed, layers=layers)[0]["losses"]
    falling(one)
    tried = layouts(nproc, MEGATRON["batch"])
    if device == "cpu":
        tried = [(2, 1, 1), (1, 1, 2)]  # megatron-core's pipeline schedules need a GPU
    for tp, pp, dp in tried:
        results = _megatron(device, seed, tp, pp, dp, layers=layers)
        _same_data(results, seed, MEGATRON["batch"], MEGATRON["seq"])
        losses = _ranks_agree(results)
        if device == "cuda":
            took_fused_paths(results, layers, expected)
        worst = max(abs(a - b) for a, b in zip(one, losses))
        bound = 0.03 if device == "cuda" else 1e-3  # bfloat16 sums in another order; float32 on a CPU
        name = "TP{} PP{} DP{}".format(tp, pp, dp)
        figure("{} against one rank, largest loss difference".format(name), worst, bound=bound)
        assert worst <= bound, "{} leaves one rank's losses by {:.4f}: {} against {}".format(name, worst, losses, one)


def test_distributed_megatron_resume(device, nproc, seed, need, expected, kept, figure):
    """Megatron-core with Adam and its distributed optimizer, saved as a distributed checkpoint and resumed."""
    need("megatron")
    need("te")
    if device != "cuda":
        pytest.skip("the distributed optimizer needs a GPU")
    tp, dp = (2, 2) if nproc >= 4 else (1, 2) if nproc >= 2 else (1, 1)
    half = MEGATRON["steps"] // 2
    whole = _megatron(device, seed, tp, 1, dp, layers="te", distributed_optimizer=True, save=str(kept), save_at=half)
    rest = _megatron(device, seed, tp, 1, dp, layers="te", distributed_optimizer=True, load=str(kept))
    took_fused_paths(rest, "te", expected)
    before, after = whole[0]["losses"][half:], rest[0]["losses"]
    assert len(after) == len(before)
    worst = max(abs(a - b) for a, b in zip(before, after))
    figure("resumed against uninterrupted, largest loss difference", worst, bound=1e-3)
    assert worst <= 1e-3, "resumed losses differ by {}: {} against {}".format(worst, after, before)


def test_distributed_megatron_sgd(device, nproc, seed, need, kept, figure):
    """The patched Megatron with `sgd`: SGD_sai is what runs, it learns, and a resumed run continues it."""
    need("sgd-sai")
    spec = need("megatron")
    if "sgd" not in spec.get("patches", []):
        pytest.skip("the lock's Megatron does not carry the sgd patch")
    if device != "cuda":
        pytest.skip("megatron-core's optimizer setup needs a GPU")
    half = MEGATRON["steps"] // 2
    dp = 2 if nproc >= 2 else 1
    more = {"layers": "local", "optimizer": "sgd", "lr": 2e-3, "distributed_optimizer": False}
    whole = _megatron(device, seed, 1, 1, dp, save=str(kept), save_at=half, **more)
    assert all(r["optimizer_class"] == "sgd_sai.sgd_sai.SGD_sai" for r in whole), "--optimizer sgd built {}".format(
        whole[0]["optimizer_class"]
    )
    losses = whole[0]["losses"]
    assert losses[-1] < losses[0], "the loss does not fall: {}".format(losses)
    rest = _megatron(device, seed, 1, 1, dp, load=str(kept), **more)
    worst = max(abs(a - b) for a, b in zip(losses[half:], rest[0]["losses"]))
    figure("resumed against uninterrupted, largest loss difference", worst, bound=1e-3)
    assert worst <= 1e-3, "a resumed run leaves the uninterrupted one by {}: was the warm-up state kept?".format(worst)

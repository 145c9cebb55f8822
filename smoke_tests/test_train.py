"""Level train: 200 steps of a tiny GPT in the deterministic mode: the same bits twice, and the curve is kept.

`envbuild compare` compares the curves of two records. What it compares is of SEEDS[0]; the other seeds show how far apart
two right runs may be.
"""

import math

import pytest

from smokelib import launch

LEVEL = "train"
MODEL = {"hidden": 64, "layers": 2, "heads": 4, "seq": 64}
STEPS, BATCH, LR, DATA_SEED = 200, 8, 3e-3, 1
SEEDS = [1, 2, 3, 4, 5]
# One thread: how a CPU splits its sums must not depend on how many cores it has.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "OMP_NUM_THREADS": "1"}
VARIANTS = {
    "float32": {"layers": "torch", "autocast": False, "ranks": 1},
    "float32, 2 ranks": {"layers": "torch", "autocast": False, "ranks": 2},
    "bfloat16": {"layers": "torch", "autocast": True, "ranks": 1},
    "TE bfloat16": {"layers": "te", "autocast": False, "ranks": 1},
}


def curves_of(said, seed):
    """Return the losses and the gradient norms of a seed, and the digest of its parameters."""
    found = []
    for kind in ("losses", "norms"):
        parts = sorted(key for key in said if key.startswith("{}/{}/".format(seed, kind)))
        found.append([float(value) for key in parts for value in said[key]])
    return found[0], found[1], said["{}/parameters".format(seed)]


def first_difference(one, other):
    """Return the first step in which two lists differ in any bit, or None."""
    return next((step for step, (a, b) in enumerate(zip(one, other)) if a != b), None)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_train_curve(variant, device, nproc, need, figure, table):
    """Five seeds in one process, the first of them again in another: not a bit may differ."""
    import torch

    how = VARIANTS[variant]
    if how["layers"] == "te":
        need("te")
    if device != "cuda" and (how["layers"] == "te" or how["autocast"]):
        pytest.skip("bfloat16 is trained on a GPU")
    if how["autocast"] and not hasattr(torch, "autocast"):
        pytest.skip("this torch has no torch.autocast")
    if how["ranks"] > nproc:
        pytest.skip("one rank only: nothing to distribute")
    training = {
        "layers": how["layers"], "autocast": how["autocast"], "model": MODEL, "steps": STEPS, "batch": BATCH, "lr": LR,
        "data_seed": DATA_SEED,
    }  # fmt: skip

    def ran(seeds):
        return launch.run_ranks(
            "train", how["ranks"], launcher="env", args=dict(training, device=device, seeds=seeds), env=ENVIRONMENT,
            timeout=900,
        )[0]  # fmt: skip

    said = ran(SEEDS)
    rows = []
    for seed in SEEDS:
        losses, norms, parameters = curves_of(said, seed)
        bad = next((step for step, value in enumerate(losses) if not math.isfinite(value)), None)
        assert bad is None, "seed {}: the loss of step {} is not finite".format(seed, bad)
        assert len(losses) == len(norms) == STEPS
        figure("seed {}, losses".format(seed), losses)
        if seed == SEEDS[0]:
            figure("seed {}, gradient norms".format(seed), norms)
            figure("seed {}, parameters".format(seed), parameters)
        rows.append([seed] + ["{:.4f}".format(v) for v in (losses[0], losses[STEPS // 2], losses[-1], norms[-1])])
    figure("training", dict(training, ranks=how["ranks"], seeds=SEEDS))
    table(
        "{}: {} steps of a tiny GPT, deterministic".format(variant, STEPS),
        ["seed", "loss of step 0", "of step {}".format(STEPS // 2), "of the last step", "its gradient norm"],
        rows,
    )
    losses, norms, parameters = curves_of(said, SEEDS[0])
    assert sum(losses[-10:]) / 10 < losses[0] - 0.5, "the loss does not fall: {:.3f} to {:.3f}".format(
        losses[0], losses[-1]
    )
    again = curves_of(ran(SEEDS[:1]), SEEDS[0])
    for what, one, other in (("loss", losses, again[0]), ("gradient norm", norms, again[1])):
        step = first_difference(one, other)
        assert step is None, "the same seed twice: the {} of step {} is {!r} and then {!r}".format(
            what, step, one[step], other[step]
        )
    assert parameters == again[2], "the same seed twice: the parameters after training differ"
    figure("the same seed twice", "equal to the bit")

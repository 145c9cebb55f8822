"""Level step: a tiny GPT trains on one device: losses finite, falling, and the same again from the same seed."""

import contextlib
import math

import pytest

from smokelib import data, launch
from smokelib.traces import assert_kernel, attention_switches, short

MODEL = {"hidden": 64, "layers": 2, "heads": 4, "seq": 64}
STEPS, BATCH, LR = 12, 8, 3e-3


def falling(losses):
    """Assert that a training run went the way a right one goes; the start is the entropy of a uniform guess."""
    assert all(math.isfinite(value) for value in losses), "a loss is not finite: {}".format(losses)
    assert abs(losses[0] - math.log(data.VOCAB)) < 0.5, "the first loss {:.3f} is far from ln({})".format(
        losses[0], data.VOCAB
    )
    assert losses[-1] < losses[0] - 0.3, "the loss does not fall: {}".format(["{:.3f}".format(v) for v in losses])


def took_fused_paths(results, layers, expected):
    """Assert on every rank of a Megatron run on GPUs that its last step ran what the lock's components are there for."""
    for rank, said in enumerate(results):
        if layers == "te":
            switches = attention_switches()
            assert said["attention"] != "unfused", "Megatron's TE layers ran unfused attention on rank {}: {}".format(
                rank, "{} set in the environment".format(switches) if switches else short(said["fused"])
            )
            if said["reported"] is not None:
                assert said["reported"]["kind"] == said["attention"], (
                    "rank {}: TE reports {}, the profiler saw {}".format(rank, said["reported"], said["attention"])
                )
        if expected.lists("te") or expected.lists("apex"):
            assert "FusedAdam" in said["optimizer_class"], (
                "rank {}: Megatron took {} for Adam, and not TE's or apex'".format(rank, said["optimizer_class"])
            )


def _train(seed, device, dtype):
    import torch

    from smokelib import gpt

    model = gpt.seeded(seed, vocab=data.VOCAB, **MODEL).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        rows = data.batch(seed, step, BATCH, MODEL["seq"]).to(device)
        # torch before 1.10 has no autocast that a whole-precision run could switch off
        with contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype=dtype):
            loss = gpt.loss_of(model, rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_step_plain_torch(device, seed, figure):
    """The plain model in float32, twice: the same losses."""
    import torch

    losses = _train(seed, device, torch.float32)
    falling(losses)
    again = _train(seed, device, torch.float32)
    figure("first", losses[0])
    figure("last", losses[-1])
    worst = max(abs(a - b) for a, b in zip(losses, again))
    # Atomics in the embedding's backward may reorder sums on a GPU; on a CPU nothing may.
    bound = 1e-4 if device == "cuda" else 0.0
    figure("same seed, largest difference", worst, bound=bound)
    assert worst <= bound, "the same seed gave losses that differ by {}".format(worst)


def test_step_bf16_tracks_float32(device, seed, figure):
    """Autocast to bfloat16 stays near float32."""
    import torch

    if not hasattr(torch, "autocast"):
        pytest.skip("this torch has no torch.autocast")
    exact, rounded = _train(seed, device, torch.float32), _train(seed, device, torch.bfloat16)
    falling(rounded)
    worst = max(abs(a - b) for a, b in zip(exact, rounded))
    figure("bf16 against float32, largest loss difference", worst, bound=0.05)
    assert worst <= 0.05, "bfloat16 losses leave float32's by {:.3f}".format(worst)


def test_step_torch_compile(device, expected, seed, figure):
    """torch.compile makes its kernels here (a C compiler, and Triton on a GPU) and they agree with eager."""
    import torch

    if not hasattr(torch, "compile"):
        pytest.skip("this torch has no torch.compile")
    if device != "cuda":
        pytest.skip("on a CPU torch.compile needs a C++ compiler, which a runtime image does not carry")
    from smokelib.numerics import relative_error

    torch._dynamo.reset()

    def function(x, w):
        return torch.nn.functional.gelu(x @ w).softmax(-1)

    torch.manual_seed(seed)
    x, w = torch.randn(256, 256, device=device), torch.randn(256, 256, device=device)
    out = torch.compile(function)(x, w)
    error = relative_error(out, function(x.double(), w.double()))
    figure("compiled against float64", error, bound=1e-3)
    assert error <= 1e-3, "torch.compile leaves float64 by {:.3g}".format(error)
    assert torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) >= 1, "torch.compile compiled nothing"


@pytest.mark.parametrize("layers", ["local", "te"])
def test_step_megatron(layers, device, seed, need, expected, figure):
    """Megatron-core's GPT on one rank, with its own layers and with TE's."""
    need("megatron")
    if layers == "te":
        need("te")
        if device != "cuda":
            pytest.skip("TE's layers need a GPU")
    args = dict(MEGATRON, seed=seed, device=device, layers=layers)
    softmax = "scaled_upper_triang_masked_softmax_cuda"
    built = expected.component("apex").get("extensions", []) if device == "cuda" and layers == "local" else []
    if softmax in built:
        args["config"] = {"masked_softmax_fusion": True}
    result = launch.run_ranks("megatron_gpt", 1, launcher="env", args=args, timeout=240)[0]
    falling(result["losses"])
    figure("first", result["losses"][0])
    figure("last", result["losses"][-1])
    if device != "cuda":
        return
    figure("attention", result["attention"])
    figure("optimizer", result["optimizer_class"])
    took_fused_paths([result], layers, expected)
    if softmax in built:
        assert_kernel(result["fused"], "scaled_upper_triang_masked_softmax_warp_forward", "apex' softmax in Megatron")
    if "fused_layer_norm_cuda" in built:
        assert_kernel(result["fused"], "cuApplyLayerNorm", "apex' LayerNorm in Megatron")


@pytest.mark.parametrize("fp8", ["delayed", "current"])
def test_step_megatron_fp8_tracks_bf16(fp8, gpu, seed, need, figure):
    """Megatron-core's GPT in FP8 follows the same run in bfloat16, and is not that run."""
    import torch

    need("megatron")
    need("te")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9 or higher")
    args = dict(MEGATRON, seed=seed, device="cuda", layers="te")
    wide = launch.run_ranks("megatron_gpt", 1, launcher="env", args=args, timeout=240)[0]
    narrow = launch.run_ranks("megatron_gpt", 1, launcher="env", args=dict(args, fp8=fp8), timeout=240)[0]
    bf16, low = wide["losses"], narrow["losses"]
    falling(low)
    worst = max(abs(a - b) for a, b in zip(bf16, low))
    figure("FP8 against BF16, largest loss difference", worst, bound=0.15)
    products = set(narrow["products"]) - set(wide["products"])
    assert products, "the FP8 run multiplied with BF16's kernels: {}".format(short(narrow["products"]))
    assert low != bf16, "the FP8 run equals the BF16 run to the last bit: FP8 was not used"
    assert worst <= 0.15, "FP8 losses leave BF16's by {:.3f}".format(worst)


# Sizes that FP8 GEMMs (multiples of 16) and every attention backend take.
MEGATRON = {
    "hidden": 256, "layers_count": 2, "heads": 4, "seq": 64, "batch": 8, "microbatch": 4, "steps": 8, "lr": 2e-3,
    "tp": 1, "pp": 1, "optimizer": "adam", "distributed_optimizer": False,
}  # fmt: skip

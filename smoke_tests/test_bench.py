"""Level bench: what this GPU gives, and how near a GPT step comes to it. A mis-built image shows as a slow one."""

import pytest

from smokelib import launch
from smokelib.counts import worlds
from smokelib.launch import hostfile
from smokelib.traces import matching, short

# One H200 does such a step in about 0.1 s; the model and its optimizer state take 10 GiB.
MODEL = {"hidden": 4096, "layers": 4, "heads": 32, "seq": 2048}
BATCH, TURNS = 4, 12
GEMM = [4096, 8192, 12288, 16384]
FUSED = r"(?i)FlashAttn(Fwd|Bwd)Sm|flash_(fwd|bwd)|sdpa|fmha|mha_"


@pytest.fixture(scope="module")
def ceiling(device):
    """The best bf16 GEMM rate of this GPU in TFLOP/s, over some sizes and rounds: what every share is of."""
    if device != "cuda":
        pytest.skip("needs a GPU, and the run is on a CPU")
    return launch.run_ranks("speed", 1, launcher="env", args={"what": "gemm", "sizes": GEMM}, timeout=180)[0]


def test_bench_gemm_ceiling(ceiling, figure):
    """The matrix product through torch."""
    for size, rate in zip(GEMM, ceiling["rates"]):
        figure("bf16 GEMM {}".format(size), round(rate, 1), unit="TFLOP/s")
    figure("kernel", ceiling["kernels"][ceiling["rates"].index(ceiling["tflops"])])
    assert ceiling["tflops"] > 1.0, "a bf16 matrix product runs at {:.2f} TFLOP/s: not on tensor cores".format(
        ceiling["tflops"]
    )


def test_bench_allreduce(gpu, nproc, seed, figure, table):
    """Bus bandwidth of a large all-reduce, at every count of ranks."""
    if nproc < 2:
        pytest.skip("one rank only: nothing to reduce")
    rows = []
    for world in worlds(nproc):
        for size in (1 << 24, 1 << 28):
            found = launch.run_ranks(
                "allreduce",
                world,
                args={"device": "cuda", "seed": seed, "bytes": size, "warmup": 3, "turns": 10},
                timeout=180,
                nodes=hostfile(),
            )[0]
            figure("{} ranks, {} MiB".format(world, size >> 20), round(found["bus_gb_s"], 1), unit="GB/s")
            rows.append(
                [world, size >> 20, "{:.2f}".format(found["seconds"] * 1e3), "{:.1f}".format(found["bus_gb_s"])]
            )
    table("all-reduce, float32", ["ranks", "MiB", "ms", "bus GB/s"], rows)


def test_bench_gpt_step(gpu, ceiling, nproc, seed, expected, figure, table):
    """The same GPT step in plain torch (SDPA, eager) and through TE in BF16, FP8 and with FA3, in one run."""
    import torch

    adam = "apex" if expected.lists("apex") and "amp_C" in expected.component("apex").get("extensions", []) else "torch"
    hopper = torch.cuda.get_device_capability() == (9, 0)
    variants = [("torch SDPA eager", {"kind": "eager", "optimizer": "torch"}, {})]
    if expected.lists("te"):
        variants.append(("TE BF16", {"kind": "te", "optimizer": adam}, {}))
        if torch.cuda.get_device_capability() >= (8, 9):
            variants.append(("TE FP8", {"kind": "te", "optimizer": adam, "fp8": True}, {}))
        if expected.lists("flash-attn-hopper") and hopper:
            variants.append(
                ("TE BF16, FA3", {"kind": "te", "optimizer": adam}, {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "1"})
            )
    found = {}
    for name, more, env in variants:
        args = dict({"what": "step", "model": MODEL, "batch": BATCH, "turns": TURNS, "seed": seed}, **more)
        found[name] = launch.run_ranks("speed", 1, launcher="env", args=args, env=env, timeout=300)[0]
        if nproc > 1 and name in ("torch SDPA eager", "TE BF16"):
            found["{}, DDP x{}".format(name, nproc)] = launch.run_ranks(
                "speed", nproc, args=args, env=env, timeout=300, nodes=hostfile()
            )[0]
    base = found["torch SDPA eager"]["tokens_per_second"]
    rows = []
    for name, said in found.items():
        share = said["tflops"] / ceiling["tflops"]
        ratio = said["tokens_per_second"] / base
        figure(name + ", tokens per second", round(said["tokens_per_second"]))
        figure(name + ", share of the GEMM ceiling", round(share, 3))
        rows.append(
            [name, "{:,.0f}".format(said["tokens_per_second"]), "{:.1f}".format(said["step_ms"]), "{:.0f}".format(said["tflops"]),
             "{:.1%}".format(share), "{:.2f}".format(ratio), "{:.1f}".format(said["peak_gib"]), (matching(said["attention"], FUSED) or ["-"])[0][:48]]
        )  # fmt: skip
    table(
        "GPT step: {layers} layers, hidden {hidden}, sequence {seq}".format(**MODEL)
        + ", batch {}, {:.2f} B parameters; ceiling {:.0f} TFLOP/s".format(
            BATCH, list(found.values())[0]["parameters"] / 1e9, ceiling["tflops"]
        ),
        ["implementation", "tokens/s", "ms", "TFLOP/s per GPU", "of ceiling", "vs eager", "GiB", "attention kernel"],
        rows,
    )
    for name, said in found.items():
        assert said["last"] < said["first"], "{}: the loss does not fall ({:.3f} to {:.3f})".format(
            name, said["first"], said["last"]
        )
    if "TE BF16, FA3" in found:
        ran = found["TE BF16, FA3"]["attention"]
        assert matching(ran, "FlashAttnFwdSm90"), "the row of FA3 did not run FA3, but {}".format(
            short(ran) or "unfused attention"
        )
    # Far below what a right build gives; below them something fell back.
    if "TE BF16" in found:
        assert found["TE BF16"]["tokens_per_second"] > 0.9 * base, (
            "TE in BF16 is slower than eager torch: a fused path fell back"
        )
    if "TE FP8" in found:
        assert found["TE FP8"]["tokens_per_second"] > found["TE BF16"]["tokens_per_second"], (
            "FP8 is not faster than BF16 at these sizes"
        )

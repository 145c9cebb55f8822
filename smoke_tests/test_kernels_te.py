"""Level kernels, Transformer Engine: modules in BF16 and FP8 against float64, and which attention and cast kernels ran."""

import json
import os

import pytest

from smokelib import launch
from smokelib.installed import release_of
from smokelib.te import autocast, load_failure, must_have_fp8_attention
from smokelib.traces import GEMM, assert_kernel, attention_switches, kernel_names, loaded_libraries, matching, short


@pytest.fixture
def te(need, gpu):
    """Transformer Engine's torch module; its own core library must be the one that is loaded."""
    need("te")
    try:
        import transformer_engine.pytorch as module
    except (ImportError, OSError, RuntimeError) as error:
        pytest.fail("Transformer Engine does not load: {}".format(load_failure(error)), pytrace=False)
    assert loaded_libraries(r"libtransformer_engine.*\.so"), (
        "libtransformer_engine.so is not loaded: TE runs without its kernels"
    )
    return module


def _need_fp8():
    import torch

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9 or higher")


def _recipe(name):
    from transformer_engine.common import recipe

    if name == "delayed":
        return recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=4, amax_compute_algo="max")
    if not hasattr(recipe, "Float8CurrentScaling"):
        pytest.skip("this Transformer Engine has no current scaling")
    return recipe.Float8CurrentScaling()


def _fp8(te, name):
    return autocast(te, _recipe(name))


def _linear(te, gpu):
    import torch

    module = te.Linear(512, 768, bias=True, params_dtype=torch.bfloat16, device=gpu)

    def reference(x, p):
        return torch.nn.functional.linear(x, p["weight"], p["bias"])

    return module, reference


def _layernorm_mlp(te, gpu):
    import torch

    module = te.LayerNormMLP(512, 2048, activation="gelu", params_dtype=torch.bfloat16, device=gpu)

    def reference(x, p):
        functional = torch.nn.functional
        x = functional.layer_norm(x, (512,), p["layer_norm_weight"], p["layer_norm_bias"], module.eps)
        x = functional.gelu(functional.linear(x, p["fc1_weight"], p["fc1_bias"]), approximate="tanh")
        return functional.linear(x, p["fc2_weight"], p["fc2_bias"])

    return module, reference


MODULES = {"Linear": _linear, "LayerNormMLP": _layernorm_mlp}


def _run(module, x, grad, context=None):
    """One forward and backward from clean gradients; returns output, input gradient and parameter gradients."""
    import contextlib

    for parameter in module.parameters():
        parameter.grad = None
    mine = x.detach().clone().requires_grad_()
    with context() if context else contextlib.nullcontext():
        out = module(mine)
    out.backward(grad)
    return out.detach(), mine.grad, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def _prepare(te, gpu, which):
    import torch

    module, reference = MODULES[which](te, gpu)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * (0.05 if parameter.dim() > 1 else 0.5) + (parameter.dim() == 1)
            )
    x = torch.randn(256, 512, device=gpu, dtype=torch.bfloat16)
    exact = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    xr = x.double().requires_grad_()
    right = reference(xr, exact)
    grad = torch.randn(right.shape, device=gpu, dtype=torch.bfloat16)
    right.backward(grad.double())
    return module, x, grad, (right.detach(), xr.grad, {name: p.grad for name, p in exact.items()})


@pytest.mark.parametrize("which", sorted(MODULES))
def test_kernels_te_bf16(which, te, gpu, close):
    """BF16 modules, forward and backward."""
    module, x, grad, right = _prepare(te, gpu, which)
    _run(module, x, grad)
    found = []
    names = kernel_names(lambda: found.append(_run(module, x, grad)))
    out, dx, gradients = found[0]
    close("forward", out, right[0], 8e-3)
    close("input gradient", dx, right[1], 1.2e-2)
    for name, value in gradients.items():
        close("{} gradient".format(name), value, right[2][name], 1.2e-2)
    assert_kernel(names, GEMM, "TE {}".format(which))
    if which == "LayerNormMLP":
        assert_kernel(names, r"transformer_engine::normalization|ln_fwd|cudnn.*norm", "TE's own LayerNorm")


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("which", sorted(MODULES))
def test_kernels_te_fp8_tracks_bf16(which, recipe, te, gpu, close, figure):
    """FP8 modules stay within FP8's rounding of BF16, and differ from it: a silent fall-back would be equal."""
    from smokelib.numerics import relative_error

    _need_fp8()
    module, x, grad, right = _prepare(te, gpu, which)
    _run(module, x, grad)
    plain = []
    before = kernel_names(lambda: plain.append(_run(module, x, grad)))
    bf16 = plain[0]
    context = lambda: _fp8(te, recipe)  # noqa: E731
    for _ in range(3):  # delayed scaling takes its scales from earlier steps
        _run(module, x, grad, context)
    found = []
    names = kernel_names(lambda: found.append(_run(module, x, grad, context)))
    out, dx, gradients = found[0]
    # E4M3 keeps 3 bits after the point (2.6 % rounding per operand), E5M2 gradients keep 2 (5 %).
    # LayerNormMLP multiplies twice.
    scale = 1.0 if which == "Linear" else 1.5
    close("FP8 forward against BF16", out, bf16[0], 0.07 * scale)
    close("FP8 input gradient against BF16", dx, bf16[1], 0.12 * scale)
    for name, value in gradients.items():
        close("FP8 {} gradient against BF16".format(name), value, bf16[2][name], 0.14 * scale)
    error = relative_error(out, right[0])
    figure("FP8 forward against float64", error)
    assert error > 1e-2, "an error of {:.4f} against float64 is BF16's: FP8 was not used".format(error)
    assert_kernel(names, r"(?i)e4m3|e5m2|fp8|cast|quant", "TE's casts to FP8 in {}".format(which))
    products = set(matching(names, GEMM)) - set(matching(before, GEMM))
    assert products, "the FP8 run multiplied with BF16's kernels: {}".format(short(matching(names, GEMM)))
    figure("FP8 GEMM kernels", short(sorted(products), limit=4))


def test_kernels_te_nvrtc(te, gpu, figure):
    """TE compiles its transposing cast at run time, with CUDA headers; without them it falls back in silence."""
    _need_fp8()
    module, x, grad, _ = _prepare(te, gpu, "Linear")
    context = lambda: _fp8(te, "delayed")  # noqa: E731
    _run(module, x, grad, context)
    names = kernel_names(lambda: _run(module, x, grad, context))
    compiled, general = (
        matching(names, "cast_transpose_optimized_kernel|transpose_optimized_kernel"),
        matching(names, "transpose_general_kernel"),
    )
    figure("NVRTC kernels", short(compiled))
    named = [os.environ.get(name) for name in ("NVTE_CUDA_INCLUDE_DIR", "CUDA_HOME", "CUDA_DIR")]
    asked = ", ".join([folder for folder in named if folder] + ["/usr/local/cuda"])
    why = (
        "NVTE_DISABLE_NVRTC is set"
        if os.environ.get("NVTE_DISABLE_NVRTC", "0") not in ("", "0")
        else "it looked for the CUDA headers under {}; set NVTE_CUDA_INCLUDE_DIR to the folder that holds cuda_runtime.h".format(
            asked
        )
    )
    assert compiled, "TE's run-time compiled kernels did not run ({}): {}".format(why, short(general or names))


def _attention(variant, env, args):
    """Run attention in a process of its own: TE reads its switches once."""
    full = dict(env)
    return launch.run_ranks("te_attention", 1, launcher="env", args=args, env=full, timeout=180)[0]


def _check(result, figure, bound=1.5e-2):
    for name, error in sorted(result["errors"].items()):
        figure("{}".format(name), error, bound=bound)
        assert error <= bound, "{}: relative error {:.3g} where {:.3g} is allowed".format(name, error, bound)
    figure("backend", json.dumps(result["backend"]))
    figure("kernels", short(result["kernels"], limit=4))


@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_te_attention_default(dim, te, gpu, seed, figure):
    """What TE chooses by itself, here, with this environment: never the unfused path."""
    result = _attention("default", {}, {"seed": seed, "dim": dim})
    set_here = attention_switches()
    assert result["path"] != "unfused", "TE ran its unfused attention: {}".format(
        "{} set in the environment".format(set_here)
        if set_here
        else "no fused backend took head dimension {}".format(dim)
    )
    if result["backend"] is not None:
        assert result["backend"]["kind"] == result["path"], "TE reports {} and the profiler saw {}: {}".format(
            result["backend"], result["path"], short(result["kernels"])
        )
    _check(result, figure)


@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_te_attention_fused(dim, te, gpu, seed, figure):
    """cuDNN's fused attention, asked for alone."""
    result = _attention("fused", {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1"}, {"seed": seed, "dim": dim})
    assert result["path"] == "fused", "cuDNN's fused attention did not run; TE ran {} ({})".format(
        result["path"], short(result["kernels"])
    )
    _check(result, figure)


@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_te_attention_flash(dim, te, gpu, seed, expected, figure):
    """flash-attention through TE, asked for alone: FA3 on Hopper when the lock lists it, else FA2."""
    import torch

    hopper = torch.cuda.get_device_capability() == (9, 0) and expected.lists("flash-attn-hopper")
    if hopper and dim not in expected.component("flash-attn-hopper").get("head_dims", [64, 128]):
        pytest.skip("the lock's FA3 is built without head dimension {}".format(dim))
    if not hopper and not expected.lists("flash-attn"):
        pytest.skip("the lock lists no flash-attention for this GPU")
    result = _attention("flash", {"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "0"}, {"seed": seed, "dim": dim})
    name = "FA3" if hopper else "FA2"
    assert result["path"] == "flash", "{} is listed, and TE did not use it: it ran {} ({})".format(
        name, result["path"], short(result["kernels"])
    )
    kernels = "FlashAttnFwdSm90" if hopper else "flash_fwd"
    assert_kernel(result["kernels"], kernels, "TE through {}".format(name))
    if result["backend"] is not None:
        assert str(result["backend"]["detail"]).startswith("3" if hopper else "2"), (
            "TE reports flash-attention {}".format(result["backend"]["detail"])
        )
    _check(result, figure)


@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_te_attention_fp8(dim, te, gpu, seed, figure):
    """Attention in FP8 (cuDNN or FA3): near float64 as FP8 is, and not BF16."""
    import torch

    _need_fp8()
    result = _attention(
        "fp8", {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1"}, {"seed": seed, "dim": dim, "fp8": True}
    )
    if result.get("refused"):
        there = must_have_fp8_attention(
            torch.cuda.get_device_capability(), dim, release_of("transformer-engine"), torch.backends.cudnn.version()
        )
        assert not there, "TE has no FP8 attention at head dimension {} here: {}".format(dim, result["refused"])
        pytest.skip("this Transformer Engine has no FP8 attention here: {}".format(result["refused"]))
    assert result["path"] in ("fused", "flash"), "FP8 attention ran {} ({})".format(
        result["path"], short(result["kernels"])
    )
    _check(result, figure, bound=0.2)
    assert result["errors"]["forward"] > 8e-3, "an error of {:.4f} is BF16's: FP8 was not used".format(
        result["errors"]["forward"]
    )

"""Level kernels, flash-attention: FA2 and FA3 against float64, forward and backward, BF16 and FP8."""

import pytest

from smokelib.traces import assert_kernel, kernel_names


def _inputs(gpu, dim, heads=4, groups=2, batch=2, seq=384):
    import torch

    q = torch.randn(batch, seq, heads, dim, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(batch, seq, groups, dim, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    v = torch.randn(batch, seq, groups, dim, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    return q, k, v


def _reference(q, k, v, grad=None):
    from smokelib.numerics import attention

    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    repeat = q.shape[2] // k.shape[2]
    out = attention(exact[0], exact[1].repeat_interleave(repeat, 2), exact[2].repeat_interleave(repeat, 2))
    if grad is not None:
        out.backward(grad.double())
    return out, exact


def _check(function, gpu, dim, close, kernels):
    import torch

    q, k, v = _inputs(gpu, dim)
    grad = torch.randn_like(q)
    out = []

    def run():
        found = function(q, k, v, causal=True)
        out[:] = [found[0] if isinstance(found, tuple) else found]
        out[0].backward(grad)

    run()  # the first call loads and chooses
    for tensor in (q, k, v):
        tensor.grad = None
    names = kernel_names(run)
    right, exact = _reference(q, k, v, grad)
    close("forward", out[0], right, 8e-3)
    for name, mine, reference in zip("qkv", (q, k, v), exact):
        close("d{}".format(name), mine.grad, reference.grad, 1.5e-2)
    assert_kernel(names, kernels[0], "forward")
    assert_kernel(names, kernels[1], "backward")


@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_flash_attn(dim, need, gpu, close):
    """FA2, causal, grouped heads."""
    need("flash-attn")
    try:
        from flash_attn import flash_attn_func
    except ImportError as error:
        pytest.fail("flash-attn is listed and does not import: {}".format(error), pytrace=False)
    _check(flash_attn_func, gpu, dim, close, ("flash_fwd_kernel|flash_fwd_splitkv_kernel", "flash_bwd"))


def _fa3(need, dim):
    import importlib

    import torch

    spec = need("flash-attn-hopper")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FA3 runs on Hopper (compute capability 9.0)")
    if dim not in spec.get("head_dims", [64, 128]):
        pytest.skip("the lock's FA3 is built without head dimension {}".format(dim))
    try:
        return spec, importlib.import_module(spec.get("module", "flash_attn_interface"))
    except ImportError as error:
        pytest.fail("FA3 is absent: the lock lists flash-attn-hopper, and {}".format(error), pytrace=False)


@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_flash_attn_hopper(dim, need, gpu, close):
    """FA3 in BF16, causal, grouped heads: Hopper's own kernels."""
    _, module = _fa3(need, dim)
    _check(module.flash_attn_func, gpu, dim, close, ("FlashAttnFwdSm90", "FlashAttnBwdSm90"))


@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_flash_attn_hopper_fp8(dim, need, gpu, close, figure):
    """FA3 in FP8 (E4M3, forward only): near its BF16 self on the same numbers, and not that."""
    import torch

    from smokelib.numerics import relative_error

    spec, module = _fa3(need, dim)
    if not spec.get("fp8", True):
        pytest.skip("the lock's FA3 is built without FP8")
    q, k, v = (t.detach() for t in _inputs(gpu, dim))
    with torch.no_grad():
        low = [t.to(torch.float8_e4m3fn) for t in (q, k, v)]
        one = torch.ones(q.shape[0], k.shape[2], device=gpu)
        out = []

        def run():
            found = module.flash_attn_func(*low, causal=True, q_descale=one, k_descale=one, v_descale=one)
            out[:] = [found[0] if isinstance(found, tuple) else found]

        run()
        names = kernel_names(run)
        rounded, _ = _reference(*[t.float() for t in low])
        exact, _ = _reference(q, k, v)
        close(
            "against float64 on the rounded inputs", out[0], rounded, 0.05
        )  # the probabilities are rounded to E4M3 too
        error = relative_error(out[0], exact)
        figure("against float64 on the BF16 inputs", error, bound=0.10)
        assert error <= 0.10, "FP8 attention is {:.3f} off".format(error)
        assert error > 5e-3, "an error of {:.4f} is BF16's: FP8 was not used".format(error)
    found = assert_kernel(names, "FlashAttnFwdSm90", "FA3 FP8 forward")
    assert any("e4m3" in name or "float_e4m3" in name for name in found), "the FA3 kernel is not an FP8 one: {}".format(
        found[0][:200]
    )

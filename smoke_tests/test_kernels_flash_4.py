"""Level kernels, flash-attention 4: compiled for this GPU as it is called, forward and backward, against float64."""

import pytest

from smokelib.traces import assert_kernel, kernel_names

# The hash of the suite counts this file for cells that have it.
COMPONENT = "flash-attn-4"


def _reference(q, k, v, grad):
    """Return causal attention of float64 copies of the inputs, and those copies with their gradients."""
    from smokelib.numerics import attention

    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    repeat = q.shape[2] // k.shape[2]
    out = attention(exact[0], exact[1].repeat_interleave(repeat, 2), exact[2].repeat_interleave(repeat, 2))
    out.backward(grad.double())
    return out, exact


@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_flash_attn_4(dim, need, gpu, close):
    """FA4 in BF16, causal, grouped heads: kernels that CUTLASS' DSL compiles for this GPU's architecture."""
    need("flash-attn-4")
    import torch

    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("FA4's backward runs on Hopper and newer (compute capability 9.0)")
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError as error:
        pytest.fail("flash-attn-4 is listed and does not import: {}".format(error), pytrace=False)

    batch, seq, heads, groups = 2, 384, 4, 2
    q = torch.randn(batch, seq, heads, dim, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(batch, seq, groups, dim, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    v = torch.randn(batch, seq, groups, dim, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(q)
    out = []

    def run():
        found = flash_attn_func(q, k, v, causal=True)
        out[:] = [found[0] if isinstance(found, tuple) else found]
        out[0].backward(grad)

    run()  # the first call compiles
    for tensor in (q, k, v):
        tensor.grad = None
    names = kernel_names(run)
    right, exact = _reference(q, k, v, grad)
    close("forward", out[0], right, 8e-3)
    for name, mine, reference in zip("qkv", (q, k, v), exact):
        close("d{}".format(name), mine.grad, reference.grad, 1.5e-2)
    assert_kernel(names, r"FlashAttentionForwardSm\d+", "FA4 forward")
    assert_kernel(names, r"FlashAttentionBackwardSm\d+", "FA4 backward")

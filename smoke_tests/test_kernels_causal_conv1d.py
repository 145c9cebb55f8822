"""Level kernels, causal-conv1d: both memory layouts, forward and backward, against float64."""

import pytest

from smokelib.traces import assert_kernel, kernel_names

# The hash of the suite counts this file for cells that have it.
COMPONENT = "causal-conv1d"


def _reference(x, weight, bias, grad):
    """Return the convolution with SiLU of float64 copies of the inputs, and those copies with their gradients."""
    import torch.nn.functional as F

    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    width = weight.shape[1]
    padded = F.pad(exact[0], (width - 1, 0))
    out = F.silu(F.conv1d(padded, exact[1].unsqueeze(1), exact[2], groups=weight.shape[0]))
    out.backward(grad.double())
    return out, exact


@pytest.mark.parametrize("layout", ["channelfirst", "channellast"])
def test_kernels_causal_conv1d(layout, need, gpu, close):
    """The causal depthwise convolution with bias and SiLU, width 4; each layout has kernels of its own."""
    need("causal-conv1d")
    import torch

    try:
        import causal_conv1d_cuda
        from causal_conv1d import causal_conv1d_fn
    except ImportError as error:
        pytest.fail("causal-conv1d is listed and does not import: {}".format(error), pytrace=False)
    assert causal_conv1d_cuda.__file__.endswith(".so"), "{} is no compiled extension".format(
        causal_conv1d_cuda.__file__
    )

    batch, dim, seq, width = 2, 192, 519, 4
    if layout == "channellast":
        stored = torch.randn(batch, seq, dim, device=gpu, dtype=torch.bfloat16)
        x = stored.transpose(1, 2).requires_grad_()
        forward, backward = "causal_conv1d_channellast_fwd_kernel", "causal_conv1d_channellast_bwd_kernel"
    else:
        x = torch.randn(batch, dim, seq, device=gpu, dtype=torch.bfloat16, requires_grad=True)
        forward, backward = "causal_conv1d_fwd_kernel", "causal_conv1d_bwd_kernel"
    weight = torch.randn(dim, width, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(dim, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    out = []

    def run():
        out[:] = [causal_conv1d_fn(x, weight, bias, activation="silu")]
        out[0].backward(grad)

    run()
    for tensor in (x, weight, bias):
        tensor.grad = None
    names = kernel_names(run)
    right, exact = _reference(x, weight, bias, grad)
    close("forward", out[0], right, 8e-3)
    for name, mine, reference in zip(("x", "weight", "bias"), (x, weight, bias), exact):
        close("d{}".format(name), mine.grad, reference.grad, 8e-3)
    assert_kernel(names, forward, "causal-conv1d forward")
    assert_kernel(names, backward, "causal-conv1d backward")

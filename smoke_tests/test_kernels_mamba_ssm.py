"""Level kernels, mamba-ssm: the compiled selective scan of Mamba 1, Triton's chunked scan of Mamba 2, and a whole layer."""

import pytest

from smokelib.traces import assert_kernel, kernel_names

# The hash of the suite counts this file for cells that have it.
COMPONENT = "mamba-ssm"


@pytest.fixture
def mamba(need, gpu):
    """Skip unless the lock lists mamba-ssm; fail where it is listed and its extension does not load."""
    need("mamba-ssm")
    try:
        import mamba_ssm
        import selective_scan_cuda
    except ImportError as error:
        pytest.fail("mamba-ssm is listed and does not import: {}".format(error), pytrace=False)
    assert selective_scan_cuda.__file__.endswith(".so"), "{} is no compiled extension".format(
        selective_scan_cuda.__file__
    )
    return mamba_ssm


def _check(run, inputs, reference, close, bounds, kernels):
    """Run twice, compare output and every gradient with float64, and assert the kernels.

    `run` returns the output of the fast path; `reference` the same of float64 inputs, in the order of `inputs`.
    """
    import torch

    out = []
    grad = torch.randn_like(run())

    def both():
        out[:] = [run()]
        out[0].backward(grad)

    both()  # the first call compiles and chooses
    for tensor in inputs.values():
        tensor.grad = None
    names = kernel_names(both)
    exact = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    right = reference(**exact)
    right.backward(grad.double())
    close("forward", out[0], right, bounds[0])
    for name, tensor in inputs.items():
        close("d{}".format(name), tensor.grad, exact[name].grad, bounds[1])
    for pattern, what in kernels:
        assert_kernel(names, pattern, what)


def _scan(u, delta, A, B, C, D, z, delta_bias):
    """Reference: the recurrence of Mamba 1, one step after the other, in the precision of its inputs."""
    import torch
    import torch.nn.functional as F

    step = F.softplus(delta + delta_bias[:, None])
    state = torch.zeros(u.shape[0], *A.shape, dtype=u.dtype, device=u.device)
    out = []
    for t in range(u.shape[2]):
        decay = torch.exp(step[:, :, t, None] * A)
        state = decay * state + (step[:, :, t] * u[:, :, t])[..., None] * B[:, None, :, t]
        out.append((state * C[:, None, :, t]).sum(-1))
    return (torch.stack(out, -1) + u * D[:, None]) * F.silu(z)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_mamba_ssm_selective_scan(dtype, mamba, gpu, close):
    """The compiled scan with gate, skip and softplus, against the recurrence in float64."""
    import torch
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    batch, dim, state, seq = 2, 24, 16, 131
    kind = getattr(torch, dtype)
    shapes = {
        "u": (batch, dim, seq),
        "delta": (batch, dim, seq),
        "B": (batch, state, seq),
        "C": (batch, state, seq),
        "z": (batch, dim, seq),
    }
    inputs = {name: torch.randn(shape, device=gpu).to(kind).requires_grad_() for name, shape in shapes.items()}
    inputs["A"] = (-torch.rand(dim, state, device=gpu) - 0.1).requires_grad_()
    inputs["D"] = torch.randn(dim, device=gpu, requires_grad=True)
    inputs["delta_bias"] = (torch.rand(dim, device=gpu) - 3).requires_grad_()

    def run():
        return selective_scan_fn(delta_softplus=True, **inputs)

    # fast-math exponentials in FP32; BF16 keeps 8 bits
    bounds = (2e-5, 2e-4) if dtype == "float32" else (8e-3, 1e-2)
    kernels = (("selective_scan_fwd_kernel", "scan forward"), ("selective_scan_bwd_kernel", "scan backward"))
    _check(run, inputs, _scan, close, bounds, kernels)


def _chunked(x, dt, A, B, C, D):
    """Reference: the recurrence of Mamba 2 on [batch, seq, heads, dim], one step after the other."""
    import torch
    import torch.nn.functional as F

    step = F.softplus(dt)
    heads = x.shape[2] // B.shape[2]
    wide_b, wide_c = (t.repeat_interleave(heads, 2) for t in (B, C))
    state = torch.zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[3], dtype=x.dtype, device=x.device)
    out = []
    for t in range(x.shape[1]):
        decay = torch.exp(step[:, t] * A)[..., None, None]
        fed = (step[:, t, :, None] * x[:, t])[..., None] * wide_b[:, t, :, None, :]
        state = decay * state + fed
        out.append((state * wide_c[:, t, :, None, :]).sum(-1) + x[:, t] * D[:, None])
    return torch.stack(out, 1)


def test_kernels_mamba_ssm_chunk_scan(mamba, gpu, close):
    """Triton's chunked scan, which Megatron's Mamba layers run, against the recurrence in float64."""
    import torch
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    batch, seq, heads, dim, groups, state = 2, 192, 4, 64, 2, 64
    shapes = {
        "x": (batch, seq, heads, dim),
        "dt": (batch, seq, heads),
        "B": (batch, seq, groups, state),
        "C": (batch, seq, groups, state),
    }
    inputs = {n: torch.randn(s, device=gpu).bfloat16().requires_grad_() for n, s in shapes.items()}
    inputs["A"] = (-torch.rand(heads, device=gpu) - 0.1).requires_grad_()
    inputs["D"] = torch.randn(heads, device=gpu, requires_grad=True)

    def run():
        return mamba_chunk_scan_combined(chunk_size=64, dt_softplus=True, **inputs)

    kernels = (("_chunk_scan_fwd_kernel", "chunked scan forward"), ("_chunk_(scan|state).*_bwd_", "its backward"))
    _check(run, inputs, _chunked, close, (1e-2, 2e-2), kernels)


def _layer(x, in_proj, conv, conv_bias, dt_bias, A_log, D, norm, out_proj):
    """Reference: a Mamba 2 layer of one group, in plain torch and in the precision of its inputs."""
    import torch
    import torch.nn.functional as F

    heads, inner, width = A_log.shape[0], norm.shape[0], conv.shape[-1]
    state = (in_proj.shape[0] - 2 * inner - heads) // 2
    gate, mixed, dt = (x @ in_proj.t()).split([inner, inner + 2 * state, heads], -1)
    padded = F.pad(mixed.transpose(1, 2), (width - 1, 0))
    mixed = F.silu(F.conv1d(padded, conv, conv_bias, groups=conv.shape[0])).transpose(1, 2)
    fed, B, C = mixed.split([inner, state, state], -1)
    shape = (*fed.shape[:2], heads, inner // heads)
    y = _chunked(fed.reshape(shape), dt + dt_bias, -torch.exp(A_log), B[:, :, None], C[:, :, None], D)
    y = y.reshape(fed.shape) * F.silu(gate)
    return (y * (y.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * norm) @ out_proj.t()


def test_kernels_mamba_ssm_takes_causal_conv1d(mamba, need, gpu, close):
    """A Mamba 2 layer on its fused path, against the layer in float64; the convolution in it is causal-conv1d's."""
    need("causal-conv1d")
    import torch

    # every size that Triton tunes for is that of the scan's own test, which tunes for a minute
    layer = mamba.Mamba2(d_model=128, d_state=64, headdim=64, chunk_size=64, device=gpu)
    inputs = {
        "x": torch.randn(2, 192, 128, device=gpu, requires_grad=True),
        "in_proj": layer.in_proj.weight,
        "conv": layer.conv1d.weight,
        "conv_bias": layer.conv1d.bias,
        "dt_bias": layer.dt_bias,
        "A_log": layer.A_log,
        "D": layer.D,
        "norm": layer.norm.weight,
        "out_proj": layer.out_proj.weight,
    }
    kernels = (
        ("causal_conv1d_.*fwd_kernel", "the layer's convolution forward"),
        ("causal_conv1d_.*bwd_kernel", "the layer's convolution backward"),
        ("_chunk_scan_fwd_kernel", "the layer's scan"),
    )
    # Triton's products of FP32 are TF32, 10 bits
    _check(lambda: layer(inputs["x"]), inputs, _layer, close, (3e-3, 1e-2), kernels)

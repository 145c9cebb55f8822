"""Level kernels, apex: each fused kernel against a float64 reference, and proof that it is the kernel that ran."""

import pytest

from smokelib.traces import assert_kernel, kernel_names

# Relative errors, norm over norm. bfloat16 keeps 8 bits: rounding alone gives about 2e-3.
BF16, FP32 = 8e-3, 1e-5


@pytest.fixture
def apex_extension(need, gpu):
    """Skip unless the lock lists apex with this extension; fail where it is listed and does not load."""

    def check(name):
        import importlib.util

        listed = need("apex").get("extensions", [])
        if name not in listed and importlib.util.find_spec(name) is None:
            pytest.skip("the lock's apex has no extension {}".format(name))
        try:
            return importlib.import_module(name)
        except ImportError as error:
            pytest.fail("apex was built without its CUDA extension {}: {}".format(name, error), pytrace=False)

    return check


def _from_extension(module):
    """The extension must be the one that apex's build made, not a module of the same name."""
    assert module.__file__ and module.__file__.endswith(".so"), "{} is no compiled extension: {}".format(
        module.__name__, module.__file__
    )


def test_kernels_apex_fused_adam(apex_extension, gpu, close):
    """FusedAdam against AdamW in float64, five steps, odd sizes."""
    import torch

    _from_extension(apex_extension("amp_C"))
    from apex.optimizers import FusedAdam

    shapes = [(1031,), (257, 129), (64, 3, 7)]
    start = [torch.randn(s, device=gpu) for s in shapes]
    ours = [p.clone().requires_grad_() for p in start]
    exact = [p.double().requires_grad_() for p in start]
    settings = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    fused, reference = FusedAdam(ours, adam_w_mode=True, **settings), torch.optim.AdamW(exact, **settings)
    for turn in range(5):
        for mine, right in zip(ours, exact):
            mine.grad = torch.randn_like(mine)
            right.grad = mine.grad.double()
        if turn == 4:
            names = kernel_names(fused.step)
        else:
            fused.step()
        reference.step()
    for index, (mine, right, first) in enumerate(zip(ours, exact, start)):
        # The change, not the value: the value would hide an optimizer that does nothing.
        close("update of tensor {}".format(index), mine.double() - first.double(), right - first.double(), 1e-4)
    assert_kernel(names, "multi_tensor_apply_kernel.*Adam", "apex FusedAdam")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_kernels_apex_fused_norm(kind, dtype, apex_extension, gpu, close):
    """FusedLayerNorm and FusedRMSNorm, forward and backward."""
    import torch

    _from_extension(apex_extension("fused_layer_norm_cuda"))
    from apex import normalization

    name = {"layer": "FusedLayerNorm", "rms": "FusedRMSNorm"}[kind]
    if not hasattr(normalization, name):
        pytest.skip("this apex has no {}".format(name))
    width, kept = 1280, getattr(torch, dtype)
    module = getattr(normalization, name)(width).to(gpu, kept)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x = torch.randn(96, width, device=gpu, dtype=kept, requires_grad=True)
    grad = torch.randn(96, width, device=gpu, dtype=kept)
    out = []

    def run():
        out[:] = [module(x)]
        out[0].backward(grad)

    names = kernel_names(run)
    xr = x.detach().double().requires_grad_()
    wr = module.weight.detach().double().requires_grad_()
    parameters = [wr]
    if kind == "layer":
        br = module.bias.detach().double().requires_grad_()
        parameters.append(br)
        right = torch.nn.functional.layer_norm(xr, (width,), wr, br, module.eps)
    else:
        right = xr * torch.rsqrt(xr.pow(2).mean(-1, keepdim=True) + module.eps) * wr
    right.backward(grad.double())
    bound = FP32 if dtype == "float32" else BF16
    close("forward", out[0], right, bound)
    close("input gradient", x.grad, xr.grad, bound)
    for which, mine, exact in zip(("weight", "bias"), module.parameters(), parameters):
        close("{} gradient".format(which), mine.grad, exact.grad, bound)
    assert_kernel(names, "cuApplyLayerNorm|cuApplyRMSNorm", "apex {} forward".format(name))
    assert_kernel(names, "cuComputeGradInput", "apex {} backward".format(name))


def test_kernels_apex_fused_rope(apex_extension, gpu, close):
    """Fused rotary embedding, forward and backward, on part of the head's channels."""
    import torch

    _from_extension(apex_extension("fused_rotary_positional_embedding"))
    from apex.transformer.functional import fused_apply_rotary_pos_emb

    from smokelib.numerics import rotate

    seq, batch, heads, dim, width = 130, 2, 4, 96, 64
    angles = torch.arange(seq, device=gpu)[:, None] * (10000.0 ** (-torch.arange(0, width, 2, device=gpu) / width))
    freqs = torch.cat((angles, angles), -1)[:, None, None, :]
    t = torch.randn(seq, batch, heads, dim, device=gpu, requires_grad=True)
    grad = torch.randn_like(t)
    out = []

    def run():
        out[:] = [fused_apply_rotary_pos_emb(t, freqs)]
        out[0].backward(grad)

    names = kernel_names(run)
    exact = t.detach().double().requires_grad_()
    right = rotate(exact, freqs.double())
    right.backward(grad.double())
    close("forward", out[0], right, FP32)
    close("backward", t.grad, exact.grad, FP32)
    assert_kernel(names, "fused_rope", "apex fused RoPE")


@pytest.mark.parametrize("kind", ["causal", "masked", "plain"])
def test_kernels_apex_scaled_softmax(kind, apex_extension, gpu, close):
    """The scaled softmax kernels: causal, with a mask, without one."""
    import torch

    extension, kernel, symbol = {
        "causal": (
            "scaled_upper_triang_masked_softmax_cuda",
            "scaled_upper_triang_masked_softmax_warp",
            "ScaledUpperTriangMaskedSoftmax",
        ),
        "masked": ("scaled_masked_softmax_cuda", "scaled_masked_softmax_warp", "ScaledMaskedSoftmax"),
        "plain": ("scaled_softmax_cuda", "scaled_softmax_warp", "ScaledSoftmax"),
    }[kind]
    _from_extension(apex_extension(extension))
    from apex.transformer.functional import fused_softmax

    function, scale = getattr(fused_softmax, symbol), 0.37
    shape = (16, 256, 256) if kind == "causal" else (2, 3, 256, 256)  # the causal kernel takes several matrices at once
    x = torch.randn(shape, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    mask = torch.rand(2, 1, 256, 256, device=gpu) < 0.4
    mask[..., 0] = False  # no row may be masked away whole
    inputs = {"causal": (x, scale), "masked": (x, mask, scale), "plain": (x, scale)}[kind]
    out = []

    def run():
        out[:] = [function.apply(*inputs)]
        out[0].backward(grad.clone())  # two of the three write their result over the gradient they are given

    names = kernel_names(run)
    exact = x.detach().double().requires_grad_()
    scores = exact * scale
    if kind == "causal":
        scores = scores.masked_fill(torch.ones(256, 256, dtype=torch.bool, device=gpu).triu(1), float("-inf"))
    elif kind == "masked":
        scores = scores.masked_fill(mask, float("-inf"))
    right = scores.softmax(-1)
    right.backward(grad.double())
    close("forward", out[0], right, BF16)
    close("backward", x.grad, exact.grad, 1.5e-2)  # made from the rounded forward
    assert_kernel(names, kernel + "_forward", "apex {} forward".format(symbol))
    # ScaledSoftmax goes back through the masked kernel's backward at some commits.
    backward = "scaled_(masked_)?softmax_warp" if kind == "plain" else kernel
    assert_kernel(names, backward + "_backward", "apex {} backward".format(symbol))


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_kernels_apex_weight_gradient(kept, apex_extension, gpu, close):
    """fused_weight_gradient_mlp_cuda: the weight gradient is added onto main_grad, in float32 or 16 bits."""
    import torch

    extension = apex_extension("fused_weight_gradient_mlp_cuda")
    _from_extension(extension)
    x = torch.randn(384, 256, device=gpu, dtype=torch.bfloat16)
    d = torch.randn(384, 512, device=gpu, dtype=torch.bfloat16)
    main = torch.randn(512, 256, device=gpu, dtype=getattr(torch, kept))
    right = main.double() + d.double().t() @ x.double()
    function = extension.wgrad_gemm_accum_fp32 if kept == "float32" else extension.wgrad_gemm_accum_fp16
    names = kernel_names(lambda: function(x, d, main))
    close("accumulated weight gradient", main, right, FP32 if kept == "float32" else BF16)
    assert_kernel(names, "(?i)gemm|nvjet|cutlass", "apex weight gradient")

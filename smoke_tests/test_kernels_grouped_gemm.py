"""Level kernels, grouped_gemm: grouped products and token permutation for mixtures of experts, against float64."""

import pytest

from smokelib.traces import GEMM, assert_kernel, kernel_names

BF16 = 8e-3

# The hash of the suite counts this file for cells that have it.
COMPONENT = "grouped-gemm"


@pytest.fixture
def ops(need, gpu):
    """Skip unless the lock lists grouped_gemm; fail where it is listed and its extension does not load."""
    need("grouped-gemm")
    try:
        from grouped_gemm import backend, ops
    except ImportError as error:
        pytest.fail("grouped_gemm is listed and does not import: {}".format(error), pytrace=False)
    extension = backend.backend.__file__
    assert extension.endswith(".so"), "{} is no compiled extension".format(extension)
    return ops


@pytest.mark.parametrize("transposed", [False, True])
def test_kernels_grouped_gemm(transposed, ops, gpu, close):
    """One product per expert, of unequal sizes, forward and both gradients."""
    import torch

    sizes = torch.tensor([96, 33, 255, 1], dtype=torch.int64)  # the extension reads it on the CPU
    hidden, wide = 128, 192
    a = torch.randn(int(sizes.sum()), hidden, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    shape = (len(sizes), wide, hidden) if transposed else (len(sizes), hidden, wide)
    b = torch.randn(shape, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(a.shape[0], wide, device=gpu, dtype=torch.bfloat16)
    out = []

    def run():
        out[:] = [ops.gmm(a, b, sizes, trans_b=transposed)]
        out[0].backward(grad)

    run()
    a.grad = b.grad = None
    names = kernel_names(run)
    exact_a, exact_b = (t.detach().double().requires_grad_() for t in (a, b))
    experts = exact_b.transpose(1, 2) if transposed else exact_b
    right = torch.cat([rows @ expert for rows, expert in zip(exact_a.split(sizes.tolist()), experts)])
    right.backward(grad.double())
    close("forward", out[0], right, BF16)
    close("da", a.grad, exact_a.grad, BF16)
    close("db", b.grad, exact_b.grad, BF16)
    assert_kernel(names, GEMM, "grouped product")


def test_kernels_grouped_gemm_permute(ops, gpu, close):
    """Tokens to their two experts and back with weights: rows in the experts' order, and every gradient."""
    import torch

    tokens, hidden, top, experts = 257, 128, 2, 8
    x = torch.randn(tokens, hidden, device=gpu, dtype=torch.bfloat16, requires_grad=True)
    chosen = torch.rand(tokens, experts, device=gpu).topk(top, dim=1).indices.int()
    weights = torch.rand(tokens, top, device=gpu, requires_grad=True)
    grad = torch.randn_like(x)
    kept = {}

    def run():
        kept["rows"], place = ops.permute(x, chosen)
        kept["rows"].retain_grad()
        kept["out"] = ops.unpermute(kept["rows"], place, weights)
        kept["out"].backward(grad)

    run()
    x.grad = weights.grad = None
    names = kernel_names(run)
    order = torch.sort(chosen.view(-1), stable=True).indices
    assert torch.equal(kept["rows"], x[order // top]), "the rows are not in the order of their experts"
    exact, exact_weights = (t.detach().double().requires_grad_() for t in (x, weights))
    right = (exact[:, None, :] * exact_weights[:, :, None]).sum(1)
    right.backward(grad.double())
    close("forward", kept["out"], right, BF16)
    close("dx", x.grad, exact.grad, BF16)
    close("dweights", weights.grad, exact_weights.grad, BF16)
    assert_kernel(names, "moe_permute_topK_row_map", "the map of rows")
    assert_kernel(names, "moe_recover_topK_kernel", "unpermute")
    assert_kernel(names, "moe_permute_topK_kernel", "permute and the gradient of unpermute")

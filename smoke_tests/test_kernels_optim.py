"""Level kernels, optimizers that come with a stack: SGD_sai through the patched Megatron."""

import pytest

from smokelib import launch
from test_step import MEGATRON


def _sai_reference(parameters, grads, lr, momentum, eps, decay):
    """SGD_sai as its authors define it (1.0.3), in float64: the step scale is set once, from the first gradient."""
    values = [p.double() for p in parameters]
    scales = [g[0].double().norm() / (g[0].double().std() + eps) for g in zip(*grads)]
    buffers = [g.double() for g in grads[0]]
    for turn, step in enumerate(grads):
        for index, grad in enumerate(step):
            if turn:
                buffers[index] = momentum * buffers[index] + (1 - momentum) * grad.double()
            values[index] = values[index] * (1 - decay * lr) - lr * scales[index] * buffers[index]
    return values


def test_kernels_sgd_sai(need, device, seed, close):
    """SGD_sai itself against its definition in float64."""
    import torch

    need("sgd-sai")
    from sgd_sai import SGD_sai

    torch.manual_seed(seed)
    start = [torch.randn(64, 33, device=device), torch.randn(257, device=device)]
    grads = [[torch.randn_like(p) for p in start] for _ in range(4)]
    ours = [p.clone().requires_grad_() for p in start]
    optimizer = SGD_sai(ours, lr=1e-2, momentum=0.9, eps=1e-8, weight_decay=0.1)
    for step in grads:
        for parameter, grad in zip(ours, step):
            parameter.grad = grad.clone()
        optimizer.step()
    for index, (mine, right) in enumerate(zip(ours, _sai_reference(start, grads, 1e-2, 0.9, 1e-8, 0.1))):
        close(
            "update of tensor {}".format(index),
            mine.double() - start[index].double(),
            right - start[index].double(),
            1e-4,
        )


def test_kernels_sgd_through_megatron(need, gpu, seed, figure):
    """The patched Megatron's `sgd` builds SGD_sai, and its updates are those of its definition in float64."""
    spec = need("megatron")
    need("sgd-sai")
    if "sgd" not in spec.get("patches", []):
        pytest.skip("the lock's Megatron does not carry the sgd patch")
    args = dict(MEGATRON, seed=seed, device="cuda", layers="local", optimizer="sgd", steps=3)
    said = launch.run_ranks("megatron_gpt", 1, launcher="env", args=args, timeout=240)[0]
    assert said["optimizer_class"] == "sgd_sai.sgd_sai.SGD_sai", "`sgd` built {}".format(said["optimizer_class"])
    figure("largest error of an update", said["update_error"], bound=1e-4)
    assert said["update_error"] <= 1e-4, "an update is {:.3g} off SGD_sai's definition".format(said["update_error"])

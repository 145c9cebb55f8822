"""Train a tiny model through a patched megatron-core on one CPU process; print what happened as JSON.

Runs in its own virtual environment, with the patched tree on PYTHONPATH: sgd.py MODE CHECKPOINT.
"""

import json
import logging
import math
import sys
import tempfile
import warnings
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402

STEPS, WARMUP, LR, MIN_LR, DECAY, MOMENTUM = 12, 3, 0.02, 0.002, 0.1, 0.9


class OnCpu(TorchFunctionMode):
    """Put on the CPU what Megatron asks to have on the GPU, whether there is one or not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.ddp_config = DistributedDataParallelConfig()
        # no parameter of one element: its gradient has no deviation, and SGD_sai would divide by its eps
        self.body = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
        )

    def loss(self, step: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(100 + step)
        x = torch.randn(32, 8, generator=draw) * (1 + step / 4)  # later batches differ, so a late warm-up would too
        y = torch.sin(x[:, :4] + x[:, 4:])
        return torch.nn.functional.mse_loss(self.body(x), y)


def learning_rate(step: int) -> float:
    """Linear warm-up, then cosine: the schedule written once more, not taken from Megatron."""
    if step <= WARMUP:
        return LR * step / WARMUP
    return MIN_LR + 0.5 * (math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)) + 1) * (LR - MIN_LR)


def config(**more: object) -> OptimizerConfig:
    # the way Megatron's training makes it: whatever argument has the name of a field
    args = Namespace(optimizer="sgd", lr=LR, min_lr=MIN_LR, weight_decay=DECAY, sgd_momentum=MOMENTUM, clip_grad=0.0)
    args.ckpt_format = "torch"
    vars(args).update(more)
    return OptimizerConfig(**{f.name: getattr(args, f.name) for f in fields(OptimizerConfig) if hasattr(args, f.name)})


def megatron(model: Model):
    optimizer = get_megatron_optimizer(config(), [model])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LR,
        min_lr=MIN_LR,
        lr_warmup_steps=WARMUP,
        lr_decay_steps=STEPS,
        lr_decay_style="cosine",
        start_wd=DECAY,
        end_wd=DECAY,
        wd_incr_steps=STEPS,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def train(model: Model, optimizer, scheduler, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model.loss(step)
        loss.backward()
        for parameter in model.parameters():
            parameter.main_grad = parameter.grad
        success, _, _ = optimizer.step()
        assert success
        scheduler.step(increment=1)
        losses.append(loss.item())
    return losses


def plain(model: Model) -> list[float]:
    from sgd_sai import SGD_sai

    named = list(model.named_parameters())
    decayed = [p for n, p in named if not n.endswith("bias") and p.dim() > 1]
    others = [p for n, p in named if n.endswith("bias") or p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = SGD_sai(groups, lr=LR, momentum=MOMENTUM)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.zero_grad()
        loss = model.loss(step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def load(path: str, *, drop_warmup: bool = False):
    model = Model()
    optimizer, scheduler = megatron(model)
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    if drop_warmup:
        optimizer.optimizer.has_warmup = False
    return model, optimizer, scheduler


def refusal(**more: object) -> str:
    try:
        optimizer = get_megatron_optimizer(config(**more), [Model()])
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    try:
        optimizer.sharded_state_dict({}, **({"is_loading": True} if more.get("lr") == 1.0 else {}))
    except Exception as error:  # noqa: BLE001
        return f"sharded: {type(error).__name__}: {error}"
    return "accepted"


def main(mode: str, checkpoint: str) -> object:
    half = STEPS // 2
    if mode == "full":
        model = Model()
        megatron_losses = train(model, *megatron(model), range(STEPS))
        other = Model()
        other_losses = plain(other)
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        return {"megatron": megatron_losses, "plain": other_losses, "same_weights": same}
    if mode == "first":
        model = Model()
        optimizer, scheduler = megatron(model)
        losses = train(model, optimizer, scheduler, range(half))
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save(saved, checkpoint)
        states = optimizer.optimizer.state.values()
        return {"losses": losses, "dims": sorted({state["gsnr"].dim() for state in states})}
    if mode == "resumed":
        fresh = megatron(Model())[0]
        fresh.load_state_dict(fresh.state_dict())
        return {
            "losses": train(*load(checkpoint), range(half, STEPS)),
            "warmup_lost": train(*load(checkpoint, drop_warmup=True), range(half, STEPS)),
            "before_the_first_step": fresh.optimizer.has_warmup,
        }
    if mode == "refusals":
        return {
            "cpu offload": refusal(optimizer_cpu_offload=True, optimizer_offload_fraction=1.0),
            "distributed optimizer": refusal(use_distributed_optimizer=True),
            "torch_dist": refusal(ckpt_format="torch_dist"),
            "zarr": refusal(ckpt_format="zarr"),
            "momentum": refusal(sgd_momentum=0.0),
            "sharded save": refusal(ckpt_format=None),
            "sharded load": refusal(ckpt_format=None, lr=1.0),
            "imported": "sgd_sai" in sys.modules,
            "adam": type(
                get_megatron_optimizer(config(optimizer="adam", ckpt_format="torch_dist"), [Model()]).optimizer
            ).__name__,
        }
    raise SystemExit(f"no mode {mode}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, OnCpu():
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", world_size=1, rank=0)
        parallel_state.initialize_model_parallel()
        result = main(*sys.argv[1:])
        torch.distributed.destroy_process_group()
    Path(sys.argv[2] + f".{sys.argv[1]}.json").write_text(json.dumps(result))

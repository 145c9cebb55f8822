"""Run a training script of a Megatron-DeepSpeed on the processor: `deepspeed_on_processor.py [--2020] SCRIPT [its arguments]`.

DeepSpeed's own CPU accelerator does the work. Stood in for: torchvision, which these scripts import for other models than
GPT; and with --2020, for a tree that speaks to torch.cuda itself, the GPU, apex, and what torch and NumPy have dropped since.
"""

import collections.abc
import contextlib
import sys
import types
from unittest.mock import MagicMock

import deepspeed
import deepspeed.ops.op_builder.cpu.no_impl as absent
import numpy as np
import on_processor
import torch


def module(name: str, **content) -> None:
    sys.modules[name] = made = types.ModuleType(name)
    vars(made).update(content)


def norm(_overflow, lists, _per_tensor=False):
    return torch.stack([tensor.float().norm() for tensor in lists[0]]).norm(), None


def scale(_overflow, lists, factor):
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)


def as_in_2020() -> None:
    vars(np)["float"] = float
    module("torch._six", inf=float("inf"), container_abcs=collections.abc, int_classes=int, string_classes=str)
    module("apex")
    module("apex.normalization")
    module("apex.normalization.fused_layer_norm", FusedLayerNorm=torch.nn.LayerNorm)
    module("apex.optimizers", FusedAdam=torch.optim.Adam)
    module("apex.multi_tensor_apply", multi_tensor_applier=lambda function, *rest: function(*rest))
    module("amp_C", multi_tensor_l2norm=norm, multi_tensor_scale=scale)
    first = torch.distributed.init_process_group

    def init_process_group(*args, **kwargs):
        torch.distributed.init_process_group = first
        first(*args, **kwargs)
        # DeepSpeed 0.5.1 spoke through torch.distributed; today's wants to be told
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)

    torch.distributed.init_process_group = init_process_group
    on_processor.stand_in()


def no_kernel(*_, **__):
    raise TypeError("what a DeepSpeed that does not know the kernel answers")


if __name__ == "__main__":
    # the deepspeed launcher puts --local_rank in front of everything
    launcher = [word for word in sys.argv[1:] if word.startswith("--local_rank=")]
    sys.argv = [word for word in sys.argv[1:] if word not in launcher] + launcher
    absent.NotImplementedBuilder.load = no_kernel
    for name in ("torchvision", "torchvision.transforms", "torchvision.datasets"):
        sys.modules[name] = MagicMock()
    place = contextlib.nullcontext()
    if sys.argv[0] == "--2020":
        sys.argv = sys.argv[1:]
        as_in_2020()
        place = on_processor.OnProcessor()
    with place:
        on_processor.run_script()

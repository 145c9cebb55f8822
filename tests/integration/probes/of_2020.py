"""Run a training script of 2020 with today's torch, NumPy and DeepSpeed: `of_2020.py SCRIPT [its arguments]`.

Stood in for: what torch and NumPy have dropped since, and the one call that DeepSpeed's own communication asks for today.
"""

import collections.abc
import sys
import types

import deepspeed
import numpy as np
import on_processor
import torch


def module(name: str, **content) -> None:
    """Make a module with this content, for whoever imports it from now on."""
    sys.modules[name] = made = types.ModuleType(name)
    vars(made).update(content)


def stand_in(backend: str) -> None:
    """Restore what is missing; `backend` is what DeepSpeed communicates by."""
    vars(np)["float"] = float
    if not hasattr(torch, "_six"):
        module("torch._six", inf=float("inf"), container_abcs=collections.abc, int_classes=int, string_classes=str)
    if hasattr(deepspeed, "comm"):
        set_up_deepspeed(backend)


def set_up_deepspeed(backend: str) -> None:
    """Have DeepSpeed's own communication start with torch's; 0.5.1 spoke through torch.distributed, today's needs a call."""
    first = torch.distributed.init_process_group

    def init_process_group(*args, **kwargs):
        torch.distributed.init_process_group = first
        first(*args, **kwargs)
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)

    torch.distributed.init_process_group = init_process_group


def take_arguments() -> None:
    """Have sys.argv begin with what came first here: the deepspeed launcher puts --local_rank in front of everything."""
    launcher = [word for word in sys.argv[1:] if word.startswith("--local_rank=")]
    sys.argv = [word for word in sys.argv[1:] if word not in launcher] + launcher


if __name__ == "__main__":
    take_arguments()
    stand_in("nccl")
    on_processor.run_script()

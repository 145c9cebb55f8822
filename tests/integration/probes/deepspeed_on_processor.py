"""Run a training script of a Megatron-DeepSpeed on the processor: `deepspeed_on_processor.py [--2020] SCRIPT [its arguments]`.

DeepSpeed's own CPU accelerator does the work. Stood in for: torchvision, which these scripts import for other models than
GPT; what DeepSpeed before 0.11 wants besides that accelerator, Intel's extension and oneCCL; and with --2020, for a tree that
speaks to torch.cuda itself, the GPU, apex, and what torch and NumPy have dropped since.
"""

import contextlib
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from unittest.mock import MagicMock

with contextlib.suppress(ImportError):
    import ezpz.dist  # noqa: F401 - before the stand-ins, which it would take for an Intel GPU
INTEL = version("deepspeed").startswith("0.10.")
if INTEL:
    for absentee in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"):
        sys.modules[absentee] = MagicMock(__spec__=ModuleSpec(absentee, None))  # torch looks for it
# of the ranks alone: their launcher would look for Intel's extension, too
os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: E402
import of_2020  # noqa: E402
import on_processor  # noqa: E402
import torch  # noqa: E402
from of_2020 import module  # noqa: E402


def norm(_overflow, lists, _per_tensor=False):
    return torch.stack([tensor.float().norm() for tensor in lists[0]]).norm(), None


def scale(_overflow, lists, factor):
    for source, target in zip(*lists):  # noqa: B905 - Python 3.8
        target.copy_(source * factor)


def as_in_2020() -> None:
    module("apex")
    module("apex.normalization")
    module("apex.normalization.fused_layer_norm", FusedLayerNorm=torch.nn.LayerNorm)
    module("apex.optimizers", FusedAdam=torch.optim.Adam)
    module("apex.multi_tensor_apply", multi_tensor_applier=lambda function, *rest: function(*rest))
    module("amp_C", multi_tensor_l2norm=norm, multi_tensor_scale=scale)
    of_2020.stand_in("gloo")
    on_processor.stand_in()


def all_gather_base(whole, part, group=None, async_op=False):
    """What is missing in torch 2.0's gloo."""
    parts = list(whole.chunk(torch.distributed.get_world_size(group)))
    return torch.distributed.all_gather(parts, part, group=group, async_op=async_op)


def type_of(tensor, *args, first=torch.Tensor.type, **kwargs):
    """What that accelerator looks for among gradients has its name in it, as a GPU's has."""
    result = first(tensor, *args, **kwargs)
    return result.replace("torch.", "torch.cpu.", 1) if isinstance(result, str) else result


def no_kernel(*_, **__):
    raise TypeError("what a DeepSpeed that does not know the kernel answers")


if __name__ == "__main__":
    of_2020.take_arguments()
    with contextlib.suppress(ImportError):  # 0.5.1 has no CPU accelerator
        from deepspeed.ops.op_builder.cpu import no_impl

        no_impl.NotImplementedBuilder.load = no_kernel
    if INTEL:
        deepspeed.accelerator.get_accelerator()._communication_backend_name = "gloo"
        torch.distributed._all_gather_base = torch.distributed.all_gather_into_tensor = all_gather_base
        torch.Tensor.type = type_of
    for name in ("torchvision", "torchvision.transforms", "torchvision.datasets"):
        sys.modules[name] = MagicMock()
    place = contextlib.nullcontext()
    if sys.argv[0] == "--2020":
        sys.argv = sys.argv[1:]
        as_in_2020()
        place = on_processor.OnProcessor()
    with place:
        on_processor.run_script()

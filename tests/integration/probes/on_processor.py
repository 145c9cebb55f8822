"""Run a training script that asks for CUDA on the processor: `on_processor.py SCRIPT [its arguments]`.

What torch.cuda would do is left out or done by the processor; everything else is the script's own. It proves the script's
whole way (arguments, optimizer, loop, checkpoints), not a kernel, a stream, or memory. Runs on torch 1.8 and Python 3.8, too.
"""

import contextlib
import runpy
import sys
import time
import types
from pathlib import Path

import torch

with contextlib.suppress(ImportError):  # torch 2.0 and older
    import torch._dynamo.trace_rules
try:
    from torch.overrides import TorchFunctionMode
except ImportError:  # torch 1.12 and older: the functions that take a device are replaced one by one
    TorchFunctionMode = object

PROCESSOR = torch.device("cpu")
FACTORIES = ("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros")
METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to", "type")


class Event:
    def __init__(self, *_, **__):
        self.time = 0.0

    def record(self, *_):
        self.time = time.perf_counter()

    def elapsed_time(self, later):
        return (later.time - self.time) * 1e3

    def nothing(self, *_):
        pass

    synchronize = wait = nothing


class Stream:
    def __init__(self, *_, **__):
        pass

    def nothing(self, *_):
        pass

    wait_stream = wait_event = synchronize = nothing


def answers(value):
    """Return a new function that gives `value` to whoever calls it; torch's tracer wants each to be another."""
    return lambda *_, **__: value


def on_processor(device):
    return PROCESSOR if str(device).startswith("cuda") else device


def call(name, function, args, kwargs):
    if "device" in kwargs:
        kwargs = dict(kwargs, device=on_processor(kwargs["device"]))
    if name == "to":
        args = tuple(on_processor(arg) if isinstance(arg, (str, torch.device)) else arg for arg in args)
    result = function(*args, **kwargs)
    if name == "type" and isinstance(result, str):
        return result.replace("torch.", "torch.cuda.", 1)
    return result


def replacement(name, function):
    return lambda *args, **kwargs: call(name, function, args, kwargs)


class OnProcessor(TorchFunctionMode):
    """Tensors asked for on CUDA are made on the processor, and say that they are CUDA's to who asks for their type."""

    def __torch_function__(self, function, _types, args=(), kwargs=None):
        return call(getattr(function, "__name__", ""), function, args, kwargs or {})

    if TorchFunctionMode is object:

        def __enter__(self):
            for place, names in ((torch, FACTORIES), (torch.Tensor, METHODS)):
                for name in names:
                    setattr(place, name, replacement(name, getattr(place, name)))

        def __exit__(self, *_):
            pass  # the process ends with the script


def stand_in() -> None:
    """Put the processor in the GPU's place in this process."""
    if hasattr(torch, "_dynamo") and hasattr(torch._dynamo, "trace_rules"):
        torch._dynamo.trace_rules.get_torch_obj_rule_map()  # it lists torch's functions: before they are replaced
    cuda = torch.cuda
    properties = types.SimpleNamespace(
        major=9, minor=0, multi_processor_count=1, total_memory=1 << 33, name="processor"
    )
    for name, value in {
        "is_available": True,
        "is_current_stream_capturing": False,
        "current_device": PROCESSOR,
        "device_count": 8,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "memory_stats": {},
    }.items():
        setattr(cuda, name, answers(value))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, answers(0))
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed", "reset_peak_memory_stats", "set_rng_state"):
        setattr(cuda, name, answers(None))
    for place in (cuda, cuda.random):
        place.get_rng_state = lambda *_, **__: torch.get_rng_state()
    for kind in ("Float", "Long", "Int", "BFloat16", "Half", "Byte"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    cuda.Event, cuda.Stream = Event, Stream
    cuda.current_stream, cuda.default_stream = answers(Stream()), answers(Stream())
    cuda.stream = lambda *_: contextlib.nullcontext()
    torch.Tensor.cuda = torch.Tensor.pin_memory = torch.nn.Module.cuda = lambda self, *_, **__: self


def run_script() -> None:
    """Run the script that sys.argv now begins with, as Python itself would."""
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    stand_in()
    for package in ("apex", "transformer_engine"):  # an image's: their optimizers and norms are kernels
        sys.modules[package] = None
    sys.argv = sys.argv[1:]
    with OnProcessor():
        run_script()

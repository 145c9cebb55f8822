"""Note which code the processes of a training command run, for `envbuild smoke TAG -- COMMAND`.

Python imports this file as each process starts, because its folder is on PYTHONPATH for that one run. A process that
imports torch writes one JSON file: its rank, the steps of its optimizer, the kernels of one step, what Transformer Engine
says of attention, FP8, torch.distributed's backends, libraries, network adapters. After the wanted number of steps it ends.

Standard library of Python 3.8 on. Nothing that goes wrong here may change the command, so each part notes its errors and
goes on.
"""
# ruff: noqa: BLE001, ARG001, UP032 - it must survive any error, its callbacks have fixed arguments, and Python may be old

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import re
import sys

OUT = os.environ.get("ENVBUILD_WATCH_OUT")
STEPS = int(os.environ.get("ENVBUILD_WATCH_STEPS") or 0)
PROFILED = 3  # the step whose kernels are noted: the first two compile, tune and allocate
MOST = 600  # names that are kept
LENGTH = 300  # characters of each

# Which of torch's own operators say something: on a CPU there are no kernels to see.
OPERATORS = re.compile(r"scaled_dot_product|flash_attention|efficient_attention|fused|layer_norm|rms_norm|adam|sgd")
LIBRARIES = re.compile(r"/(lib(nccl|rccl|fabric|ibverbs|efa|mlx5|cudnn|cublasLt)[^/]*\.so[^/]*)$")
VARIABLES = re.compile(r"^(NCCL_|NVTE_|FI_|OFI_NCCL_|GLOO_|LD_LIBRARY_PATH$)")


class State:
    """What this process has done."""

    def __init__(self):
        self.steps = 0
        self.by_optimizer = {}
        self.profiler = None
        self.profiled = False
        self.kernels = {}
        self.operators = {}
        self.selected = {}
        self.disabled = {}
        self.fp8 = {}
        self.backends = []
        self.rank = None
        self.world = None
        self.problems = []
        self.torch = False


state = State()


def attempt(function):
    """Return `function` with its errors noted and not raised."""

    def run(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            text = "{}: {}: {}".format(function.__name__, type(error).__name__, error)
            if len(state.problems) < 20 and text not in state.problems:
                state.problems.append(text[:LENGTH])
            return None

    return run


def count(table, name, more=1):
    """Add to a table of names that cannot grow without bound."""
    name = name[:LENGTH]
    if name in table or len(table) < MOST:
        table[name] = table.get(name, 0) + more


def number(*names):
    """Return the first of these variables that is a number."""
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def line(path):
    """Return the first line of a file, or nothing."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""


def adapters():
    """Return the RDMA adapters of the kernel: mlx5 has a link layer of InfiniBand or Ethernet, EFA's driver is `efa`."""
    root = "/sys/class/infiniband"
    found = []
    for name in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        port = os.path.join(root, name, "ports", "1")
        driver = os.path.join(root, name, "device", "driver")
        found.append(
            {
                "name": name,
                "layer": line(os.path.join(port, "link_layer")),
                "state": line(os.path.join(port, "state")),
                "driver": os.path.basename(os.path.realpath(driver)) if os.path.exists(driver) else "",
            }
        )
    return found[:64]


def libraries():
    """Return the paths of the communication libraries that are mapped into this process."""
    found = set()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for text in maps:
            path = text.split(None, 5)[5].strip() if len(text.split(None, 5)) == 6 else ""
            if LIBRARIES.search(path):
                found.add(path)
    return sorted(found)[:64]


def device():
    """Return the GPU that this process uses, or None where it uses none."""
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.cuda.get_device_name(torch.cuda.current_device())


def versions():
    """Return the versions of what the report names."""
    import torch

    found = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
    nccl = getattr(torch.cuda, "nccl", None) if "nccl" in state.backends else None
    if nccl is not None:
        version = nccl.version()
        found["nccl"] = ".".join(str(part) for part in version) if isinstance(version, tuple) else str(version)
    te = sys.modules.get("transformer_engine")
    if te is not None:
        found["te"] = str(getattr(te, "__version__", ""))
    return found


@attempt
def write():
    """Write what is known of this process; the file appears whole or not at all."""
    if not state.torch:
        return
    rank, world = state.rank, state.world
    if rank is None:
        rank = number("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
        world = number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
    facts = {
        "pid": os.getpid(),
        "rank": rank,
        "world": world,
        "program": os.path.basename(getattr(sys, "argv", [""])[0] or "")[:LENGTH],
        "steps": state.steps,
        "profiled": state.profiled,
        "kernels": state.kernels,
        "operators": state.operators,
        "selected": state.selected,
        "disabled": state.disabled,
        "fp8": state.fp8,
        "backends": state.backends,
        "versions": attempt(versions)() or {},
        "gpu": attempt(device)(),
        "libraries": attempt(libraries)() or [],
        "adapters": attempt(adapters)() or [],
        "verbs": sorted(os.listdir("/dev/infiniband"))[:64] if os.path.isdir("/dev/infiniband") else [],
        "variables": {
            name: value[: 4 * LENGTH] for name, value in sorted(os.environ.items()) if VARIABLES.search(name)
        },
        "problems": state.problems,
    }
    name = os.path.join(OUT, "process-{}.json".format(os.getpid()))
    with open(name + ".new", "w", encoding="utf-8") as file:
        json.dump(facts, file)
    os.replace(name + ".new", name)


@attempt
def start_profile():
    from torch import cuda
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda.is_available() else [])
    profiler = profile(activities=kinds)
    profiler.__enter__()
    state.profiler = profiler


@attempt
def stop_profile():
    from torch import cuda

    profiler, state.profiler = state.profiler, None
    if profiler is None:
        return
    if cuda.is_initialized():
        cuda.synchronize()
    profiler.__exit__(None, None, None)
    inner = getattr(profiler, "profiler", None)
    raw = getattr(inner, "kineto_results", None)
    if raw is not None:  # torch's list of these events as objects takes minutes for a large model
        events = ((event.name(), str(event.device_type())) for event in raw.events())
    else:
        events = ((event.name, str(event.device_type)) for event in profiler.events())
    for name, where in events:
        if "cuda" in where.lower():
            if not name.startswith(("Memcpy", "Memset")):
                count(state.kernels, name)
        elif OPERATORS.search(name):
            count(state.operators, name)
    state.profiled = True


def stepped(optimizer, args, kwargs):
    """Count a step: torch calls this after `step` of every optimizer. Several of them take turns in one step."""
    done = state.by_optimizer[id(optimizer)] = state.by_optimizer.get(id(optimizer), 0) + 1
    if done <= state.steps:
        return
    state.steps = done
    if done == PROFILED - 1:
        start_profile()
    elif done == PROFILED:
        stop_profile()
        write()
    if STEPS and done >= STEPS:
        finish()


@attempt
def synchronize():
    from torch import cuda

    if cuda.is_initialized():
        cuda.synchronize()  # other ranks wait for what this one still has to send


def finish():
    """End this rank: every rank reaches the same step, and a normal exit can wait for ranks that are gone."""
    synchronize()
    write()
    for stream in (sys.stdout, sys.stderr):
        attempt(stream.flush)()
    os._exit(0)


@attempt
def watch_torch(torch):
    """Count steps, note the process groups, and write the file at the end."""
    if state.torch:
        return
    state.torch = True
    atexit.register(write)
    watch_groups(torch)
    from torch.optim import optimizer

    if hasattr(optimizer, "register_optimizer_step_post_hook"):
        optimizer.register_optimizer_step_post_hook(stepped)
    else:
        state.problems.append("this torch cannot count steps (before 2.0): the command runs to its end")


@attempt
def watch_groups(torch):
    import torch.distributed as dist

    inner = sys.modules.get("torch.distributed.distributed_c10d")
    if inner is None or not dist.is_available():
        return
    original = inner.init_process_group

    def init_process_group(*args, **kwargs):
        result = original(*args, **kwargs)
        note_group(dist)
        return result

    init_process_group.__doc__, init_process_group.__wrapped__ = original.__doc__, original
    for module in (inner, dist):
        if getattr(module, "init_process_group", None) is original:
            module.init_process_group = init_process_group


@attempt
def note_group(dist):
    state.rank, state.world = dist.get_rank(), dist.get_world_size()
    config = getattr(dist.distributed_c10d, "get_backend_config", None)
    # `cpu:gloo,cuda:nccl`: a newer torch has a backend per kind of device
    for part in str(config() if config is not None else dist.get_backend()).split(","):
        name = part.rpartition(":")[2]
        if name not in state.backends and len(state.backends) < 8:
            state.backends.append(name)
    write()


class Listener(logging.Handler):
    """Takes what Transformer Engine says of the attention that it chose, and why not another."""

    def emit(self, record):
        try:
            text = record.getMessage()
        except Exception:
            return
        if text.startswith("Selected backend = "):
            count(state.selected, text[len("Selected backend = ") :].rstrip("."))
        elif text.startswith("Disabling "):
            count(state.disabled, text)


@attempt
def watch_te(module):
    logger = logging.getLogger("DotProductAttention")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(Listener(logging.DEBUG))


@attempt
def watch_fp8(module):
    """Note each entry of TE's low-precision context; the class moved and its method was renamed between releases."""
    manager = getattr(module, "FP8GlobalStateManager", None)
    for name in ("fp8_autocast_enter", "autocast_enter"):
        method = vars(manager).get(name) if manager is not None else None
        if not isinstance(method, classmethod) or hasattr(method.__func__, "__wrapped__"):
            continue
        setattr(manager, name, classmethod(_noting(method.__func__)))


def _noting(original):
    def enter(cls, *args, **kwargs):
        result = original(cls, *args, **kwargs)
        note_fp8(cls)
        return result

    enter.__wrapped__ = original
    return enter


@attempt
def note_fp8(manager):
    on = manager.is_fp8_enabled()
    count(state.fp8, type(manager.get_fp8_recipe()).__name__ if on else "off")


ACTIONS = {
    "torch": watch_torch,
    "transformer_engine": watch_te,
    "transformer_engine.pytorch.fp8": watch_fp8,
    "transformer_engine.pytorch.quantization": watch_fp8,
}


class AfterImport(importlib.abc.MetaPathFinder):
    """Runs an action once a module has been imported."""

    def find_spec(self, name, path=None, target=None):
        action = ACTIONS.get(name)
        if action is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                attempt(self.follow)(spec, action)
                return spec
        return None

    @staticmethod
    def follow(spec, action):
        original = spec.loader.exec_module

        def exec_module(module):
            original(module)
            action(module)

        spec.loader.exec_module = exec_module


def own_sitecustomize():
    """Run the environment's own sitecustomize, which this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    rest = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if OUT:
    # a script that sets these for itself would take the report's lines away
    os.environ["NCCL_DEBUG"] = "INFO"
    os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,ENV,NET"
    os.environ["NCCL_DEBUG_FILE"] = os.path.join(OUT, "nccl-%p.log")
    os.environ["NVTE_DEBUG"], os.environ["NVTE_DEBUG_LEVEL"] = "1", "2"
    sys.meta_path.insert(0, AfterImport())
own_sitecustomize()

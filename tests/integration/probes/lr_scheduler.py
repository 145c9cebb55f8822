"""Compare a learning-rate schedule before and after the patch; print what differs as JSON.

Runs in its own virtual environment: lr_scheduler.py BEFORE AFTER ENGINE RESULT, where ENGINE is deepspeed's
runtime/engine.py, or - where that deepspeed can be imported.
"""

import ast
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import _LRScheduler

STYLES = ("linear", "cosine", "exponential", "constant")


def load(path: str):
    """Import the file, with the one function that it takes from Megatron."""
    megatron = types.ModuleType("megatron")
    megatron.print_rank_0 = lambda message: None
    sys.modules["megatron"] = megatron
    spec = importlib.util.spec_from_file_location("learning_rates", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.AnnealingLR


def deepspeed_engine(path: str):
    """Return deepspeed's engine, or its two methods that judge a scheduler: on a newer torch the rest does not import."""
    if path == "-":
        from deepspeed.runtime.engine import DeepSpeedEngine

        return DeepSpeedEngine
    names = {"Optimizer": Optimizer, "Callable": Callable, "_LRScheduler": _LRScheduler, "torch": torch}
    names |= {"LAMB_OPTIMIZER": "lamb", "ONEBIT_LAMB_OPTIMIZER": "onebitlamb", "log_dist": lambda *a, **k: None}
    names["logger"] = types.SimpleNamespace(info=lambda *a: None, warning=lambda *a: None)
    (engine,) = (
        node
        for node in ast.parse(Path(path).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "DeepSpeedEngine"
    )
    wanted = {"_do_sanity_check", "_configure_lr_scheduler"}
    engine.body = [node for node in engine.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    engine.bases = []
    assert len(engine.body) == 2
    exec(compile(ast.Module([engine], []), path, "exec"), names)
    return names["DeepSpeedEngine"]


def judged(engine, scheduler, optimizer) -> str:
    fields = {"client_lr_scheduler": scheduler, "client_optimizer": optimizer, "optimizer": optimizer}
    calls = {"optimizer_name": lambda: None, "_scheduler_from_config": lambda optimizer: None, "global_rank": 1}
    one = types.SimpleNamespace(**fields, **calls)
    try:
        engine._do_sanity_check(one)
        engine._configure_lr_scheduler(one, scheduler)
    except AssertionError as error:
        return f"refused: {error}"
    return "accepted" if one.lr_scheduler is scheduler else f"took {one.lr_scheduler}"


def schedule(cls, style: str, warmup: int, last: int = 0, **more):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=9.0)
    return cls(optimizer, 0.3, warmup, 40, style, last, min_lr=0.01, **more), optimizer


def rates(optimizer) -> list:
    return [group["lr"] for group in optimizer.param_groups]


def curve(cls, style: str, warmup: int, last: int) -> list:
    one, optimizer = schedule(cls, style, warmup, last)
    points = [rates(optimizer)]
    for _ in range(60):
        one.step()
        points.append(rates(optimizer))
    one.step(7)
    points.append(rates(optimizer))
    return points


def round_trip(cls, state: dict) -> dict:
    one, optimizer = schedule(cls, "linear", 3)
    one.load_state_dict(state)
    after = {"state": one.state_dict(), "rates": rates(optimizer)}
    if hasattr(one, "get_last_lr"):
        assert one.get_last_lr() == rates(optimizer)
        assert one.base_lrs == [state["start_lr"]] * 2
        assert one.last_epoch == state["num_iters"]
    one.step()
    return {**after, "next": rates(optimizer)}


def main(before: str, after: str, engine: str) -> dict:
    old, new, judge = load(before), load(after), deepspeed_engine(engine)
    result = {"points": 0, "different": [], "last_lr_wrong": 0}
    for style in STYLES:
        for warmup in (0, 10):
            for last in (0, 5, 20):
                ours, theirs = curve(new, style, warmup, last), curve(old, style, warmup, last)
                result["points"] += len(ours)
                result["different"] += [[style, warmup, last, n] for n, p in enumerate(ours) if p != theirs[n]]
    one, optimizer = schedule(new, "cosine", 10)
    for step in range(30):
        wrong = one.get_last_lr() != rates(optimizer) or one.last_epoch != step or one.base_lrs != [0.3, 0.3]
        result["last_lr_wrong"] += wrong
        one.step()
    state = one.state_dict()
    result["is_a"] = isinstance(one, _LRScheduler)
    result["state"] = state
    other, _ = schedule(old, "cosine", 10, 30)
    result["old_state"] = other.state_dict()
    result["round_trip"] = [round_trip(new, state), round_trip(old, state)]
    kept, _ = schedule(new, "linear", 3, use_checkpoint_lr_scheduler=False, override_lr_scheduler=True)
    kept.load_state_dict(state)
    result["overridden"] = [kept.decay_style, kept.num_iters]
    result["deepspeed"] = {
        "before": judged(judge, *schedule(old, "cosine", 10)),
        "after": judged(judge, *schedule(new, "cosine", 10)),
    }
    return result


if __name__ == "__main__":
    Path(sys.argv[4]).write_text(json.dumps(main(*sys.argv[1:4])))

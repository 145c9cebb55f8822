"""What the processes of a watched command wrote of themselves, and the report on each rank that follows.

`dockerfiles/watch/sitecustomize.py` writes a file per process, NCCL a log per process. Both come from an untrusted container.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envbuild.util.below import OutsideError, read_below
from envbuild.util.foreign_json import parse_json
from envbuild.util.names import shown
from envbuild.verify.nccl_log import SOCKETS, NcclLog, read_log, why_sockets

_PROCESSES = 1024
"""Processes of one run that are read."""
_FACTS = 1 << 20
_LOG = 16 << 20
_FILE = re.compile(r"process-(\d{1,10})\.json")

_Text = Annotated[str, Field(max_length=4000)]
# The patterns below take the square of a name's length; the hook cuts names off there.
_Name = Annotated[str, Field(max_length=300)]
_Count = Annotated[int, Field(ge=0, lt=1 << 53)]
_Counts = Annotated[dict[_Name, _Count], Field(max_length=1000)]


class _Adapter(BaseModel):
    model_config = ConfigDict(strict=True)
    name: _Text
    layer: _Text = ""
    state: _Text = ""
    driver: _Text = ""


class _Facts(BaseModel):
    """One process, as it wrote it."""

    model_config = ConfigDict(strict=True)
    pid: int = Field(ge=0, lt=1 << 32)
    rank: int | None = Field(None, ge=0, lt=1 << 20)
    world: int | None = Field(None, ge=0, le=1 << 20)
    program: _Text = ""
    steps: _Count = 0
    profiled: bool = False
    kernels: _Counts = {}
    operators: _Counts = {}
    selected: _Counts = {}
    disabled: _Counts = {}
    fp8: _Counts = {}
    backends: list[_Text] = Field([], max_length=16)
    versions: Annotated[dict[_Text, _Text], Field(max_length=16)] = {}
    gpu: _Text | None = None
    libraries: list[_Text] = Field([], max_length=64)
    adapters: list[_Adapter] = Field([], max_length=64)
    verbs: list[_Text] = Field([], max_length=64)
    variables: Annotated[dict[_Text, _Text], Field(max_length=400)] = {}
    problems: list[_Text] = Field([], max_length=32)


# What a kernel's name says. The first pattern of a group that matches names the kernel.
_KERNELS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "attention",
        (
            ("cuDNN fused", r"cudnn_generated.*(sdpa|fmha|attention|flash)|fort_native_sdpa|mha_(fprop|bprop|fwd|bwd)"),
            ("FlashAttention", r"FlashAttn(Fwd|Bwd)Sm\d+|flash_(fwd|bwd)|flash::"),
            ("memory-efficient", r"fmha_cutlass|AttentionKernel|attention_kernel_batched"),
        ),
    ),
    (
        "fused kernels",
        (
            ("fused softmax", r"scaled_(upper_triang_|aligned_causal_)?masked_softmax|scaled_softmax_warp"),
            ("fused norm", r"transformer_engine::normalization|(ln|rmsnorm)_(fwd|bwd)|cuApplyLayerNorm|cuApplyRMSNorm"),
            ("fused rotary embedding", r"fused_rope"),
            ("fused Adam", r"multi_tensor_apply_kernel.*Adam|FusedAdam|fused_adam"),
            ("fused SGD", r"multi_tensor_apply_kernel.*SGD|fused_sgd"),
            ("multi-tensor", r"multi_tensor_apply_kernel"),
            ("fused activation", r"transformer_engine::.*(gelu|swiglu|silu|geglu)|gated_act|act_fn"),
            ("fused cross entropy", r"cross_entropy_kernel|online_softmax"),
            ("grouped GEMM", r"(?i)grouped.*gemm|gemmgrouped"),
        ),
    ),
    (
        "fp8",
        (
            ("FP8 attention", r"(?i)(flash|sdpa|fmha).*(e4m3|e5m2|fp8)"),
            ("FP8 GEMM", r"(?i)^(?=.*(gemm|cutlass|xmma))(?=.*(e4m3|e5m2|fp8))|nvjet_qq"),
            ("FP8 cast", r"(?i)cast_transpose|quantize|__nv_fp8|e4m3|e5m2"),
        ),
    ),
    ("communication", (("NCCL", r"nccl(Dev)?Kernel"),)),
)
_PATTERNS = {group: tuple((label, re.compile(text)) for label, text in patterns) for group, patterns in _KERNELS}

# torch's operators of `scaled_dot_product_attention`, by the backend that it chose.
_SDP = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "memory-efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash for CPUs",
    "aten::_scaled_dot_product_fused_attention_overrideable": "of another device",
    "aten::_scaled_dot_product_attention_math": "math (unfused)",
}


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank did."""

    rank: int
    world: int
    program: str
    gpu: str | None
    versions: Mapping[str, str]
    steps: int
    profiled: bool
    """Whether the kernels of a step were seen."""
    attention: tuple[str, ...]
    """The backends, each with who chose it: `Transformer Engine: FusedAttention (sub-backend 1)`, `torch: flash`."""
    not_taken: tuple[str, ...]
    """What Transformer Engine says of the backends that it did not choose."""
    fused: Mapping[str, int]
    """Fused kernels of the profiled step, and how often each ran."""
    fp8: Mapping[str, Any]
    """`{"on": whether a low-precision context was entered, "recipes": […], "kernels": {…}}`."""
    transport: Mapping[str, Any]
    """`{"backends": […], "networks": […], "links": {…}, "nccl", "plugin", "plugin_path", "plugin_version"}`."""
    adapters: tuple[str, ...]
    """The network adapters that the rank's kernel has: `mlx5_0 (InfiniBand, active)`, `rdmap0s6 (EFA, active)`."""
    sockets: str
    """Why NCCL takes sockets although InfiniBand or EFA is there; empty where it does not, or none is there."""
    problems: tuple[str, ...]
    """What could not be seen."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The RDMA adapters of the host, as the host's own look has them: name -> (link layer, whether active)."""

    adapters: Mapping[str, tuple[str, bool]] = field(default_factory=dict)


def read_ranks(folder: Path, fabric: Fabric = Fabric()) -> tuple[list[RankReport], list[str]]:
    """Read what a run left in `folder`; return a report per rank, and what could not be read.

    A process that neither stepped nor belongs to a process group is a rank only where no other process is one.
    """
    faults: list[str] = []
    found: list[_Facts] = []
    for name in sorted(entry.name for entry in os.scandir(folder) if _FILE.fullmatch(entry.name))[:_PROCESSES]:
        try:
            found.append(_Facts.model_validate(parse_json(read_below(folder, name, limit=_FACTS), limit=_FACTS)))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            faults.append(shown(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}"))
        except (OSError, OutsideError, ValueError) as error:
            faults.append(shown(f"{name}: {error}"))
    working = [each for each in found if each.steps or each.backends] or found
    best: dict[int, _Facts] = {}
    for facts in working:
        rank = facts.rank or 0
        if rank not in best or _weight(facts) > _weight(best[rank]):
            best[rank] = facts
    return [_report(best[rank], _log_of(folder, best[rank].pid, faults), fabric) for rank in sorted(best)], faults


def _weight(facts: _Facts) -> tuple[int, int, int]:
    return facts.steps, len(facts.backends), len(facts.selected)


def _log_of(folder: Path, pid: int, faults: list[str]) -> NcclLog | None:
    name = f"nccl-{pid}.log"
    try:
        return read_log(read_below(folder, name, limit=_LOG).decode("utf-8", "replace"))
    except FileNotFoundError:
        return None
    except (OSError, OutsideError) as error:
        faults.append(shown(f"{name}: {error}"))
        return None


def _report(facts: _Facts, log: NcclLog | None, fabric: Fabric) -> RankReport:
    kernels = {group: _named(facts.kernels, patterns) for group, patterns in _PATTERNS.items()}
    adapters = _adapters(facts, fabric)
    problems = [shown(text) for text in facts.problems]
    if "nccl" in facts.backends and log is None:
        problems.append("NCCL wrote no log: it was not used, or the command sets NCCL_DEBUG_FILE for itself")
    if facts.steps and not facts.profiled:
        problems.append("no kernels were seen: fewer than three steps ran")
    elif not facts.steps:
        problems.append("no step of a torch optimizer was seen")
    return RankReport(
        rank=facts.rank or 0,
        world=facts.world or 1,
        program=shown(facts.program, 80),
        gpu=shown(facts.gpu, 80) if facts.gpu else None,
        versions={shown(name, 20): shown(value, 60) for name, value in facts.versions.items()},
        steps=facts.steps,
        profiled=facts.profiled,
        attention=_attention(facts, kernels["attention"]),
        not_taken=tuple(shown(text, 300) for text in list(facts.disabled)[:20]),
        fused=kernels["fused kernels"],
        fp8={
            "on": any(name != "off" for name in facts.fp8),
            "recipes": [shown(name, 60) for name in facts.fp8 if name != "off"],
            "kernels": kernels["fp8"],
        },
        transport=_transport(facts, log),
        adapters=tuple(text for text, _, _ in adapters),
        sockets=_sockets(facts, log, adapters),
        problems=tuple(problems),
    )


def _named(kernels: Mapping[str, int], patterns: Iterable[tuple[str, re.Pattern[str]]]) -> dict[str, int]:
    """Return how often kernels ran, by the first label whose pattern their name matches."""
    found: dict[str, int] = {}
    for name, times in kernels.items():
        label = next((label for label, pattern in patterns if pattern.search(name)), None)
        if label is not None:
            found[label] = found.get(label, 0) + times
    return found


def _attention(facts: _Facts, kernels: Mapping[str, int]) -> tuple[str, ...]:
    """Return the backends of attention: Transformer Engine's word, torch's operators, and the kernels that ran."""
    found = [f"Transformer Engine: {shown(name, 80)}" for name in facts.selected]
    found += [f"torch: {backend}" for operator, backend in _SDP.items() if operator in facts.operators]
    found += [f"kernel: {label}" for label in kernels]
    if not found and facts.profiled:
        return ("unfused: no fused attention ran in the profiled step",)
    return tuple(found)


def _transport(facts: _Facts, log: NcclLog | None) -> dict[str, Any]:
    stated = log or NcclLog()
    loaded = next((path for path in facts.libraries if "/libnccl-net" in path), "")
    return {
        "backends": [shown(name, 40) for name in facts.backends],
        "networks": list(stated.networks),
        "links": dict(stated.links),
        "nccl": stated.version or shown(facts.versions.get("nccl", ""), 40),
        "plugin": stated.plugin,
        "plugin_path": stated.plugin_path or shown(loaded, 160),
        "plugin_version": stated.plugin_version,
    }


def _adapters(facts: _Facts, fabric: Fabric) -> list[tuple[str, str, bool]]:
    """Return each adapter in words, its kind (`InfiniBand`, `EFA`, `Ethernet`), and whether its port is active."""
    found: dict[str, tuple[str, bool]] = {name: (layer, active) for name, (layer, active) in fabric.adapters.items()}
    for each in facts.adapters:
        kind = "EFA" if each.driver == "efa" else each.layer or "unknown"
        found[each.name] = (kind, "ACTIVE" in each.state)
    return [
        (shown(f"{name} ({kind}, {'active' if active else 'not active'})", 120), kind, active)
        for name, (kind, active) in sorted(found.items())
    ]


def _sockets(facts: _Facts, log: NcclLog | None, adapters: Sequence[tuple[str, str, bool]]) -> str:
    """Return why NCCL takes sockets past an adapter that it should use; an Ethernet adapter (RoCE) may be no use for it."""
    if log is None or SOCKETS not in log.networks:
        return ""
    passed = [(text, kind) for text, kind, active in adapters if active and kind in {"InfiniBand", "EFA"}]
    if not passed:
        return ""
    why = why_sockets(
        log,
        efa=all(kind == "EFA" for _, kind in passed),
        verbs=facts.verbs,
        variables=facts.variables,
        library_path=facts.variables.get("LD_LIBRARY_PATH", ""),
    )
    names = ", ".join(text for text, _ in passed[:4]) + (f" and {len(passed) - 4} more" if len(passed) > 4 else "")
    version = log.version or facts.versions.get("nccl", "")
    return f"NCCL {shown(version, 40)} uses sockets past {names}: {why}"

"""Proposals for new releases, read from package indexes and upstream tags, for a person to complete and merge.

What is listed already is never touched: a release of the same version, or one that a person wrote in another form, is
left as it is.
"""

import datetime as dt
import functools
import re
from collections.abc import Callable, Iterator, Sequence

from packaging.version import Version

from envbuild.components import COMPONENTS
from envbuild.curate.proposals import Proposal, Proposals
from envbuild.curate.torch_builds import torch_builds
from envbuild.curate.upstreams import Asking
from envbuild.curate.wheels import metadata_of
from envbuild.errors import HostError, UsageError
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.settings import Settings

TE_REPOSITORY = "https://github.com/NVIDIA/TransformerEngine.git"
APEX_REPOSITORY = "https://github.com/NVIDIA/apex.git"
MEGATRON_REPOSITORY = "https://github.com/NVIDIA/Megatron-LM.git"
_APEX_TAG = re.compile(r"[0-9]{2}\.(?:0[1-9]|1[0-2])(?:\.[0-9]{2})?")


def _torch(asking: Asking) -> Iterator[Proposal]:
    if asking.torch is None:
        asking.torch = tuple(torch_builds(asking))
    yield from asking.torch


def _te(asking: Asking) -> Iterator[Proposal]:
    cores = {major: set(asking.releases(f"transformer-engine-cu{major}")) for major in ("12", "13")}
    for distribution, day in asking.newer("te", "transformer-engine"):
        version = distribution.version
        tag = "v" + str(version).removesuffix(".0") if version.micro == 0 else f"v{version}"
        commit = asking.commits(TE_REPOSITORY).get(tag)
        metadata = metadata_of(asking.settings, distribution.wheels[0]) if distribution.wheels else None
        remarks = (f"Requires-Python {metadata.requires_python}",) if metadata and metadata.requires_python else ()
        core = {major: f"transformer-engine-cu{major}" for major, has in cores.items() if version in has}
        if not core:
            continue  # 0.0.0: a name kept free
        yield Proposal(
            axis="te",
            version=str(version),
            release={
                "version": str(version),
                "source": f"PyPI:transformer-engine=={version}",
                "date": day,
                "commit": commit,
                "facts": {"core": core, "pypi": str(version)},
            },
            to_fill_in=(
                "the cap on flash-attention in rules.toml (attention/dot_product_attention/utils.py)",
                "facts.fa3_distribution and fa3_module (attention/dot_product_attention/backends.py)",
                "whether its CUDA and cuDNN floors still hold (docs/installation.rst)",
                *(() if commit else (f"commit, of the tag {tag}",)),
                *(() if day else ("date",)),
            ),
            remarks=remarks,
        )


def _component(asking: Asking, axis: AxisName) -> Iterator[Proposal]:
    """Propose what the distribution of a component has, where the index has its version and day and no more."""
    upstream = COMPONENTS[axis].upstream
    if upstream.distribution is None:
        return
    for distribution, day in asking.newer(axis, upstream.distribution, chosen=upstream.chosen):
        version = str(distribution.version)
        yield Proposal(
            axis=axis,
            version=version,
            release={
                "version": version,
                "source": f"PyPI:{upstream.distribution}=={version}",
                "date": day,
                "facts": dict.fromkeys(upstream.facts, version),
            },
            to_fill_in=(*upstream.to_fill_in, *(() if day else ("date",))),
        )


def _megatron(asking: Asking) -> Iterator[Proposal]:
    for distribution, day in asking.newer("megatron", "megatron-core", chosen=True):
        version = str(distribution.version)
        tag = f"core_v{version}"
        commit = asking.commits(MEGATRON_REPOSITORY).get(tag)
        remarks: tuple[str, ...] = ()
        if distribution.wheels:
            metadata = metadata_of(asking.settings, distribution.wheels[0])
            remarks = tuple(
                f"requires {r.name}{r.specifier}"
                for r in metadata.requires
                if r.specifier and r.name in {"torch", "numpy"}
            )
            if metadata.requires_python:
                remarks = (f"Requires-Python {metadata.requires_python}", *remarks)
        yield Proposal(
            axis="megatron",
            version=version,
            release={
                "version": version,
                "source": f"PyPI:megatron-core=={version}",
                "date": day,
                "commit": commit,
                "facts": {"pypi": version},
            },
            to_fill_in=(
                "a tested-with rule from its uv.lock: TE and torch",
                *(() if commit else (f"commit, of the tag {tag} if there is one",)),
                *(() if day else ("date",)),
            ),
            remarks=remarks,
        )


def _nvcc(asking: Asking) -> Iterator[Proposal]:
    compilers = asking.releases("nvidia-cuda-nvcc")
    listed = {Version(r.version): r for r in asking.matrix.releases["nvcc"]}
    for distribution, day in asking.newer("nvcc", "cuda-toolkit"):
        # the toolkits of CUDA 12 have no nvcc on PyPI, so only those of CUDA 13 and newer are releases here
        if distribution.version.major < 13:
            continue
        version = str(distribution.version)
        like = max(v for v in listed if v < distribution.version)
        facts = listed[like].facts
        compiler = [str(v) for v in compilers if v.release[:2] == distribution.version.release[:2]]
        uploaded = (f"uploaded {day}",) if day else ()
        yield Proposal(
            axis="nvcc",
            version=version,
            release={
                "version": version,
                "source": f"PyPI:cuda-toolkit=={version}",
                "facts": {"archs": getattr(facts, "archs", ()), "pypi": version},
            },
            to_fill_in=(
                f"facts.archs, copied from {like}: what `ptxas --help` of this one lists",
                f"a release of toolchain.toml that fixes it: pypi-{version}",
                "the highest gcc of crt/host_config.h, as a rule of topic gcc-cuda",
            ),
            remarks=(f"nvidia-cuda-nvcc of its minor on the index: {', '.join(compiler) or 'none'}", *uploaded),
        )


def _bundled(asking: Asking, axis: AxisName) -> Iterator[Proposal]:
    """Propose the cuDNN or NCCL that new torch builds pin: they are releases where a build fixes them."""
    known = {release.version for release in asking.matrix.releases[axis]}
    for torch in _torch(asking):
        pinned = torch.release["fixes"].get(axis)
        if pinned and pinned not in known:
            known.add(pinned)
            source = torch.release["source"]
            yield Proposal(axis=axis, version=pinned, release={"version": pinned, "source": source})


def _apex(asking: Asking) -> Iterator[Proposal]:
    known = {release.version for release in asking.matrix.releases["apex"]}
    for tag, commit in sorted(asking.commits(APEX_REPOSITORY).items()):
        if _APEX_TAG.fullmatch(tag) and tag not in known:
            yield Proposal(
                axis="apex",
                version=tag,
                release={
                    "version": tag,
                    "source": f"NVIDIA/apex@{tag}",
                    "date": dt.date(2000 + int(tag[:2]), int(tag[3:5]), 1),
                    "commit": commit,
                    "facts": {"build": "environment"},
                },
                to_fill_in=(
                    "facts.fused_rope: whether apex/transformer is in the tree",
                    "CUDA versions of setup.py's lists",
                ),
            )


_OWN: dict[AxisName, Callable[[Asking], Iterator[Proposal]]] = {
    "apex": _apex,
    "cudnn": lambda asking: _bundled(asking, "cudnn"),
    "megatron": _megatron,
    "nccl": lambda asking: _bundled(asking, "nccl"),
    "nvcc": _nvcc,
    "te": _te,
    "torch": _torch,
}
_LISTED = {
    axis: functools.partial(_component, axis=axis)
    for axis, component in COMPONENTS.items()
    if component.upstream.distribution and axis not in _OWN
}
_AXES: dict[AxisName, Callable[[Asking], Iterator[Proposal]]] = dict(sorted((_OWN | _LISTED).items()))


def propose(matrix: Matrix, axes: Sequence[AxisName], settings: Settings) -> Proposals:
    """Return the releases of `axes` (all that can be asked by default) that upstream has and `matrix` has not.

    An upstream that cannot be reached is listed in the answer, which is then without what it has.

    Raises:
        UsageError: an axis has no upstream to ask.
        HostError: no upstream can be reached, so that there is no answer at all.
        LockError: the index does not have a distribution, or its answer is no page of an index.

    """
    unknown = [axis for axis in axes if axis not in _AXES]
    if unknown:
        raise UsageError(
            f"the axis {unknown[0]!r} has no upstream to ask",
            where="envbuild matrix update",
            hint="axes with one: " + ", ".join(_AXES),
        )
    asking = Asking(matrix=matrix, settings=settings)
    found: list[Proposal] = []
    for axis in axes or tuple(axis for axis in _AXES if axis in matrix.axes):
        found += _AXES[axis](asking)
    if not asking.answered:
        raise HostError(
            "no upstream can be reached: nothing is known of new releases",
            where=", ".join(asking.unreachable),
            hint="check the network, or name a mirror, proxy or CA bundle in your settings (docs/reference/settings.md)",
        )
    return Proposals(found=tuple(found), asked=tuple(asking.answered), unreachable=tuple(asking.unreachable))

"""Proposals for new releases, read from package indexes and upstream tags, for a person to complete and merge.

A proposal is TOML for the end of an axis file, with what no metadata states marked `# to fill in:`. What is listed
already is never touched: a release of the same version, or one that a person wrote in another form, is left as it is.
"""

import datetime as dt
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

from envbuild.components import COMPONENTS
from envbuild.curate.wheels import (
    Distribution,
    Metadata,
    distributions,
    member,
    metadata_of,
    python_tags,
    uploads,
)
from envbuild.errors import DataError, EnvbuildError, HostError, LockError, UsageError
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.matrix.spec import version_key
from envbuild.settings import Settings
from envbuild.util.git import Reach, empty_repository, run_git
from envbuild.util.names import Commit, SafeName, checked
from envbuild.util.quote import comment

TE_REPOSITORY = "https://github.com/NVIDIA/TransformerEngine.git"
APEX_REPOSITORY = "https://github.com/NVIDIA/apex.git"
MEGATRON_REPOSITORY = "https://github.com/NVIDIA/Megatron-LM.git"
_GIT_TIMEOUT_S = 60
_APEX_TAG = re.compile(r"[0-9]{2}\.(?:0[1-9]|1[0-2])(?:\.[0-9]{2})?")


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One release that an upstream has and the matrix has not."""

    axis: AxisName
    version: str
    release: Mapping[str, Any]
    to_fill_in: tuple[str, ...] = ()
    """What no metadata states, for a person."""
    remarks: tuple[str, ...] = ()
    """What metadata states and no release holds: a rule or a cap to write."""

    def toml(self) -> str:
        """Return the release as TOML, what is missing as comments above it."""
        lines = [f"# to fill in: {comment(text)}" for text in self.to_fill_in]
        lines += [f"# metadata: {comment(text)}" for text in self.remarks]
        lines += ["[[release]]", *(f"{key} = {_value(value)}" for key, value in self.release.items() if value)]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, kw_only=True)
class Proposals:
    """Everything that was found, and the upstreams that could not be asked."""

    found: tuple[Proposal, ...]
    unreachable: tuple[str, ...] = ()


@dataclass(kw_only=True)
class _Asking:
    """One run: the matrix, the index, and tags asked once per repository."""

    matrix: Matrix
    settings: Settings
    unreachable: list[str] = field(default_factory=list)
    tags: dict[str, dict[str, str]] = field(default_factory=dict)
    torch: tuple["Proposal", ...] | None = None
    """New torch builds, once asked for: cuDNN and NCCL follow from them."""

    def listed(self, axis: AxisName) -> set[Version]:
        known = set()
        for release in self.matrix.releases[axis]:
            for text in (release.version, getattr(release.facts, "pypi", None)):
                version = version_key(text) if text else None
                if version is not None:
                    known.add(Version(version.public))
        return known

    def newer(
        self, axis: AxisName, name: str, *, chosen: bool = False
    ) -> Iterator[tuple[Distribution, dt.date | None]]:
        """Yield the releases of `name` that are not listed and not yanked, with their day.

        Args:
            axis: whose releases are known.
            name: the distribution.
            chosen: the axis lists a choice of the releases, so only what is newer than all of them is news; else what is
                newer than the oldest.

        """
        known = self.listed(axis)
        oldest = max(known) if chosen else min(known)
        said = uploads(self.settings, name)
        for version, distribution in distributions(self.settings, name).items():
            # 2.6.0.post1 is the matrix' 2.6.0 on PyPI: a person states that, so it is no release of its own
            rebuilt = version.is_postrelease and Version(version.base_version) in known and not chosen
            if version in known or version < oldest or rebuilt:
                continue
            upload = said.get(version)
            if upload is None or not upload.yanked:
                yield distribution, distribution.date or (upload.day if upload else None)

    def commits(self, repository: str) -> dict[str, str]:
        """Return tag -> commit of `repository`; {} and a remark when it cannot be asked."""
        if repository not in self.tags:
            self.tags[repository] = {}
            reach = Reach(
                ca_bundle=self.settings.ca_bundle,
                https_proxy=self.settings.https_proxy,
                no_proxy=self.settings.no_proxy,
            )
            try:
                with empty_repository() as ours:
                    answer = run_git(
                        ours, "ls-remote", "--tags", operands=(repository,), reach=reach, limit_s=_GIT_TIMEOUT_S
                    )
            except (EnvbuildError, OSError):
                self.unreachable.append(repository)
            else:
                if answer.code:
                    self.unreachable.append(repository)
                self.tags[repository] = _tags(answer.stdout.decode("utf-8", "replace"))
        return self.tags[repository]


def _tags(text: str) -> dict[str, str]:
    """Read `git ls-remote --tags`: an annotated tag's commit is on its `^{}` line. Other lines are left out."""
    tags: dict[str, str] = {}
    for line in text.splitlines():
        commit, _, ref = line.partition("\t")
        if not ref.startswith("refs/tags/"):
            continue
        name = ref.removeprefix("refs/tags/")
        try:
            checked(Commit, commit)
            checked(SafeName, name.removesuffix("^{}"))
        except ValueError:
            continue
        if name.endswith("^{}"):
            tags[name.removesuffix("^{}")] = commit
        else:
            tags.setdefault(name, commit)
    return tags


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return str(value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _cuda_of(metadata: Metadata) -> str | None:
    """Return the CUDA major.minor that a torch wheel pins, from its runtime or its toolkit."""
    for prefix in ("cuda-toolkit", "nvidia-cuda-runtime"):
        pinned = metadata.pin(prefix)
        if pinned is not None:
            return ".".join(pinned.split(".")[:2])
    return None


def _torch_builds(asking: _Asking) -> Iterator[Proposal]:
    for distribution, day in asking.newer("torch", "torch"):
        public = str(distribution.version)
        if not distribution.wheels:
            continue
        wheel = distribution.wheels[-1]
        metadata = metadata_of(asking.settings, wheel)
        cuda = _cuda_of(metadata)
        if cuda is None:
            continue
        standard = re.findall(r"-std=c\+\+([0-9]{2})\b", member(asking.settings, wheel, "torch/utils/cpp_extension.py"))
        platform = next((m[0] for m in re.finditer(r"manylinux(?:_\d+_\d+|\d+)", wheel.filename)), None)
        pythons = sorted(python_tags(distribution), key=Version)
        fixes = {axis: metadata.pin(f"nvidia-{axis}-cu") for axis in ("cudnn", "nccl")}
        toolkit = metadata.pin("cuda-toolkit")
        remarks = [f"wheels for Python {', '.join(pythons)}: a rule of topic python-range says so"]
        remarks += [
            f"requires {r.name}{r.specifier}: a cap says so"
            for r in metadata.requires
            if r.name in {"setuptools", "numpy"} and r.specifier
        ]
        yield Proposal(
            axis="torch",
            version=f"{public}+cu{cuda.replace('.', '')}",
            release={
                "version": f"{public}+cu{cuda.replace('.', '')}",
                "source": f"PyPI:torch=={public}",
                "date": day,
                "needs": {"cuda": cuda},
                "fixes": fixes,
                "facts": {
                    "index": "pypi",
                    "toolkit": toolkit,
                    "manylinux": platform,
                    "cxx_standard": int(min(standard)) if standard else None,
                },
            },
            to_fill_in=(
                "facts.archs, the SM numbers of its kernels (RELEASE.md, or cuobjdump on libtorch_cuda.so)",
                "the builds for other CUDA versions, and the CPU's, from PyTorch's own indexes",
                *(() if day else ("date",)),
            ),
            remarks=tuple(remarks),
        )


def _torch(asking: _Asking) -> Iterator[Proposal]:
    if asking.torch is None:
        asking.torch = tuple(_torch_builds(asking))
    yield from asking.torch


def _te(asking: _Asking) -> Iterator[Proposal]:
    cores = {major: set(distributions(asking.settings, f"transformer-engine-cu{major}")) for major in ("12", "13")}
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


def _component(asking: _Asking, axis: AxisName) -> Iterator[Proposal]:
    """Propose what the distribution of a component has, where the index tells its version and day and no more."""
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


def _megatron(asking: _Asking) -> Iterator[Proposal]:
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


def _nvcc(asking: _Asking) -> Iterator[Proposal]:
    compilers = distributions(asking.settings, "nvidia-cuda-nvcc")
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


def _bundled(asking: _Asking, axis: AxisName) -> Iterator[Proposal]:
    """Propose the cuDNN or NCCL that new torch builds pin: they are releases where a build fixes them."""
    known = {release.version for release in asking.matrix.releases[axis]}
    for torch in _torch(asking):
        pinned = torch.release["fixes"].get(axis)
        if pinned and pinned not in known:
            known.add(pinned)
            source = torch.release["source"]
            yield Proposal(axis=axis, version=pinned, release={"version": pinned, "source": source})


def _apex(asking: _Asking) -> Iterator[Proposal]:
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


_OWN: dict[AxisName, Callable[[_Asking], Iterator[Proposal]]] = {
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
_AXES: dict[AxisName, Callable[[_Asking], Iterator[Proposal]]] = dict(sorted((_OWN | _LISTED).items()))


def propose(matrix: Matrix, axes: Sequence[AxisName], settings: Settings) -> Proposals:
    """Return the releases of `axes` (all that can be asked by default) that upstream has and `matrix` has not.

    Raises:
        UsageError: an axis has no upstream to ask.
        HostError: the package index cannot be reached. A git host that cannot be reached is only remarked.

    """
    unknown = [axis for axis in axes if axis not in _AXES]
    if unknown:
        raise UsageError(
            f"the axis {unknown[0]!r} has no upstream to ask",
            where="envbuild matrix update",
            hint="axes with one: " + ", ".join(_AXES),
        )
    asking = _Asking(matrix=matrix, settings=settings)
    found: list[Proposal] = []
    for axis in axes or tuple(axis for axis in _AXES if axis in matrix.axes):
        try:
            found += _AXES[axis](asking)
        except LockError as error:
            raise HostError(error.what, where=error.where, hint=error.hint) from error
    return Proposals(found=tuple(found), unreachable=tuple(asking.unreachable))


def append(folder: Path, proposals: Sequence[Proposal]) -> list[Path]:
    """Append `proposals` to the axis files of `folder`, changing no line that is there; return the files.

    Raises:
        DataError: an axis has no file, or its file lists the version already.

    """
    by_axis: dict[AxisName, list[Proposal]] = {}
    for proposal in proposals:
        by_axis.setdefault(proposal.axis, []).append(proposal)
    changed = []
    for axis, several in by_axis.items():
        path = folder / f"{axis}.toml"
        if not path.is_file():
            raise DataError(
                f"there is no file for the axis {axis}", where=str(path), hint="name the folder of a matrix"
            )
        text = path.read_text(encoding="utf-8")
        if re.search(r"^\[\[rule\]\]", text.partition("[[release]]")[2], re.MULTILINE):
            raise DataError(
                "the file has rules after its releases, so releases cannot be appended",
                where=str(path),
                hint="move its rules to rules.toml, or paste the proposals by hand",
            )
        for proposal in several:
            if f'version = "{proposal.version}"' in text:
                raise DataError(
                    f"{axis} {proposal.version} is listed already", where=str(path), hint="run the update again"
                )
        path.write_text(text.rstrip("\n") + "\n\n" + "\n".join(p.toml() for p in several), encoding="utf-8")
        changed.append(path)
    return changed

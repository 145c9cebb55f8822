"""New builds of torch: PyPI's, and each CUDA variant's and the CPU's on PyTorch's own indexes."""

import re
from collections.abc import Iterator

from packaging.version import Version

from envbuild.curate.proposals import Proposal
from envbuild.curate.upstreams import Asking
from envbuild.curate.wheels import Distribution, Metadata, member, metadata_of, python_tags
from envbuild.errors import LockError
from envbuild.lock.python import PYTORCH, torch_index

_VARIANT = re.compile(r"cu(?P<major>[0-9]{2})(?P<minor>[0-9])")
_TO_FILL_IN = "facts.archs, the SM numbers of its kernels (RELEASE.md, or cuobjdump on libtorch_cuda.so)"


def torch_builds(asking: Asking) -> Iterator[Proposal]:
    """Yield the builds that an index has and the matrix has not, PyPI's first, then variant by variant.

    Raises:
        LockError: an index that the matrix names has no torch, or a wheel of its cannot be looked into.

    """
    days = {}
    for distribution, day in asking.newer("torch", "torch"):
        days[distribution.version] = day
        if distribution.wheels:
            metadata = metadata_of(asking.settings, distribution.wheels[-1])
            cuda = _cuda_of(metadata)
            if cuda is not None:
                label = f"cu{cuda.replace('.', '')}"
                yield _proposal(asking, distribution, metadata, label=label, cuda=cuda, index="pypi", day=day)
    listed = {Version(r.version) for r in asking.matrix.releases["torch"]}
    oldest = min(asking.listed("torch"))
    uploads = None
    for label, named in variants(asking).items():
        index = f"{PYTORCH}/{label}"
        try:
            found = asking.releases("torch", index=torch_index(asking.settings, index))
        except LockError:
            if named:
                raise
            continue  # a CUDA that torch is not built for
        for version, distribution in found.items():
            # 2.0.0+cu118.with.pypi.cudnn and its like are other files of the same build
            if (
                version.local != label
                or version in listed
                or Version(version.public) < oldest
                or not distribution.wheels
            ):
                continue
            if uploads is None:
                uploads = asking.days("torch")
            public = Version(version.public)
            upload = uploads.get(public)
            match = _VARIANT.fullmatch(label)
            yield _proposal(
                asking,
                distribution,
                metadata_of(asking.settings, distribution.wheels[-1]),
                label=label,
                cuda=f"{match['major']}.{match['minor']}" if match else label,
                index=index,
                day=distribution.date or days.get(public) or (upload.day if upload else None),
            )


def variants(asking: Asking) -> dict[str, bool]:
    """Return the labels of torch's variants to ask for, and whether the matrix names an index of that label.

    Besides those that it names they are the CUDA releases that it lists and that are newer than any of these.
    """
    prefix = f"{PYTORCH}/"
    urls = {str(getattr(release.facts, "index", "")) for release in asking.matrix.releases["torch"]}
    named = {url.removeprefix(prefix) for url in urls if url.startswith(prefix)}
    newest = max((_number(label) for label in named), default=0)
    listed = {f"cu{release.version.replace('.', '')}" for release in asking.matrix.releases["cuda"]}
    later = {label for label in listed if _VARIANT.fullmatch(label) and _number(label) > newest > 0}
    return {label: label in named for label in sorted(named | later, key=lambda label: (_number(label), label))}


def _number(label: str) -> int:
    """Return 126 for `cu126`, and 0 for `cpu`."""
    return int(label[2:]) if _VARIANT.fullmatch(label) else 0


def _cuda_of(metadata: Metadata) -> str | None:
    """Return the CUDA major.minor that a torch wheel pins, from its runtime or its toolkit."""
    for prefix in ("cuda-toolkit", "nvidia-cuda-runtime"):
        pinned = metadata.pin(prefix)
        if pinned is not None:
            return ".".join(pinned.split(".")[:2])
    return None


def _proposal(
    asking: Asking, distribution: Distribution, metadata: Metadata, *, label: str, cuda: str, index: str, day: object
) -> Proposal:
    wheel = distribution.wheels[-1]
    public = distribution.version.public
    standard = re.findall(r"-std=c\+\+([0-9]{2})\b", member(asking.settings, wheel, "torch/utils/cpp_extension.py"))
    platform = next((m[0] for m in re.finditer(r"manylinux(?:_\d+_\d+|\d+)", wheel.filename)), None)
    pythons = sorted(python_tags(distribution), key=Version)
    remarks = [f"wheels for Python {', '.join(pythons)}: a rule of topic python-range says so"]
    remarks += [
        f"requires {r.name}{r.specifier}: a cap says so"
        for r in metadata.requires
        if r.name in {"setuptools", "numpy"} and r.specifier
    ]
    return Proposal(
        axis="torch",
        version=f"{public}+{label}",
        release={
            "version": f"{public}+{label}",
            "source": f"PyPI:torch=={public}" if index == "pypi" else f"{index}/torch/",
            "date": day,
            "needs": {"cuda": cuda},
            "fixes": {axis: metadata.pin(f"nvidia-{axis}-cu") for axis in ("cudnn", "nccl")},
            "facts": {
                "index": index,
                "toolkit": metadata.pin("cuda-toolkit"),
                "manylinux": platform,
                "cxx_standard": int(min(standard)) if standard else None,
            },
        },
        to_fill_in=(*(() if cuda == "cpu" else (_TO_FILL_IN,)), *(() if day else ("date",))),
        remarks=tuple(remarks),
    )

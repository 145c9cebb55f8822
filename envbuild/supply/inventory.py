"""Every input of a lock as one list: what it is, its version, its hash, where it comes from."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from envbuild import __version__
from envbuild.lock.model import COMPAT, FileSource, GitSource, Lock, OsPackage, PythonPackage
from envbuild.util.names import Sha256, checked

Kind = Literal["os-package", "base-image", "wheel", "compiled-wheel", "source", "file", "envbuild"]

ENVBUILD = "envbuild"
"""The input that the files belong to which envbuild itself writes."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """One locked input."""

    kind: Kind
    name: str
    version: str
    sha256: tuple[str, ...] = ()
    """Of the file. Several where the lock takes any of them."""
    commit: str = ""
    """Of a source tree."""
    tree: str = ""
    """git tree id of a source tree: it says what the commit's files are."""
    uri: str = ""
    """Where it comes from, where the lock says so."""
    arch: str = ""
    """Of an OS package."""
    in_image: bool = True
    """Whether it is installed in the image. One that is not takes part in the build alone."""
    made_from: tuple[str, ...] = ()
    """`ref` of the inputs that it was compiled from."""

    @property
    def ref(self) -> str:
        """What names it among the inputs of a lock."""
        return f"{self.kind}:{self.name}@{self.version}" + (f"?arch={self.arch}" if self.arch else "")


def inventory(lock: Lock, built: Mapping[str, Mapping[str, Any]] | None = None) -> tuple[Input, ...]:
    """Return the inputs of a lock, each once, sorted by what they are.

    Args:
        lock: any lock; inputs without a hash have none here, too.
        built: axis -> the record of the wheel that was compiled for it, which the image carries. Without it, compiled
            wheels have no hash: only a build gives them one.

    """
    found: dict[str, Input] = {}
    for each in _inputs(lock, built or {}):
        known = found.get(each.ref)
        if known is None or (each.in_image and not known.in_image):
            found[each.ref] = each
    order = {name: number for number, name in enumerate(_ORDER)}
    return tuple(sorted(found.values(), key=lambda each: (order[each.kind], each.ref)))


# uv makes the environment in the image; a Python, an MPI and NVIDIA's package for older drivers are unpacked there.
_INSTALLED = ("uv", "python", "mpi", COMPAT)
_ORDER: tuple[Kind, ...] = ("base-image", "os-package", "wheel", "compiled-wheel", "source", "file", "envbuild")


def _inputs(lock: Lock, built: Mapping[str, Mapping[str, Any]]) -> Iterator[Input]:
    for image in lock.images:
        hex_digest = (image.digest or "").removeprefix("sha256:")
        yield Input(
            kind="base-image",
            name=image.reference,
            version=image.digest or image.reference.rpartition(":")[2],
            sha256=(hex_digest,) if hex_digest else (),
            uri=image.reference,
            in_image=image.stage == "base" or lock.flavor == "devel",
        )
    for package in lock.root.packages if lock.root else ():
        yield _of_os(package, in_image=True)
    for os_set in lock.os:
        for package in (*os_set.packages, *os_set.renewed):
            yield _of_os(package, in_image=os_set.name == "runtime")
    for python_set in lock.python:
        installed = python_set.name in {"torch", "env"}
        for wheel in python_set.packages:
            yield _of_python(wheel, python_set.index or "", in_image=installed)
    for source in lock.sources:
        yield _of_source(lock, source)
        for submodule in source.submodules:
            if submodule.used:
                yield Input(
                    kind="source",
                    name=f"{source.name}/{submodule.path}",
                    version=submodule.commit,
                    commit=submodule.commit,
                    tree=submodule.tree or "",
                    uri=submodule.url,
                    in_image=not _is_compiled(lock, source.name),
                )
    for file in (lock.uv, *lock.files):
        yield _of_file(file)
    for axis in lock.components:
        yield _of_compiled(lock, axis, built.get(axis, {}))
    yield Input(kind="envbuild", name=ENVBUILD, version=__version__)


def _is_compiled(lock: Lock, name: str) -> bool:
    return name in lock.components


def _of_os(package: OsPackage, *, in_image: bool) -> Input:
    return Input(
        kind="os-package",
        name=package.name,
        version=package.version,
        sha256=(package.sha256,),
        uri=package.filename,
        arch=package.arch,
        in_image=in_image,
    )


def _of_python(package: PythonPackage, index: str, *, in_image: bool) -> Input:
    return Input(
        kind="wheel", name=package.name, version=package.version, sha256=package.hashes, uri=index, in_image=in_image
    )


def _of_source(lock: Lock, source: GitSource) -> Input:
    return Input(
        kind="source",
        name=source.name,
        version=source.commit,
        commit=source.commit,
        tree=source.tree or "",
        uri=source.url,
        in_image=not _is_compiled(lock, source.name),
    )


def _of_file(file: FileSource) -> Input:
    return Input(
        kind="file",
        name=file.name,
        version=file.url.rsplit("/", 1)[-1],
        sha256=(file.sha256,) if file.sha256 else (),
        uri=file.url,
        in_image=file.name in _INSTALLED,
    )


def _of_compiled(lock: Lock, axis: str, record: Mapping[str, Any]) -> Input:
    sha256: tuple[str, ...] = ()
    with contextlib.suppress(ValueError):  # the image's own word: what is no hash stays out
        sha256 = (checked(Sha256, record.get("sha256")),)
    source = lock.source(axis)
    of: tuple[str, ...] = ()
    if isinstance(source, GitSource):
        of = (_of_source(lock, source).ref,)
    elif isinstance(source, FileSource):
        of = (_of_file(source).ref,)
    return Input(
        kind="compiled-wheel",
        name=axis,
        version=lock.cell.get(axis, lock.commits.get(axis, "")) or "locked",
        sha256=sha256,
        made_from=of,
    )

"""NVIDIA's package cuda-compat as an input of a lock: which file of its repository, by hash."""

import contextlib
import re
import zlib
from urllib.parse import urljoin

from packaging.version import InvalidVersion, Version
from pydantic import ValidationError

from envbuild.errors import LockError
from envbuild.lock.apt_answers import split_stanzas
from envbuild.lock.model import COMPAT, FileSource
from envbuild.matrix.cell import DEBIAN_ARCH
from envbuild.matrix.driver import Compat
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import CudaFacts
from envbuild.settings import Settings, redact
from envbuild.util.names import shown

# Ubuntu 22.04's repository has cuda-compat of every CUDA since 11.7. The package holds NVIDIA's driver libraries and scripts
# nothing, so it is the same for every distribution. https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2204/
_FOLDER = {"x86_64": "ubuntu2204/x86_64", "aarch64": "ubuntu2204/sbsa"}
_INDEX_BYTES = 256 << 20
"""Bytes of an unpacked index of packages; NVIDIA's has 7 MiB."""


def find_file(settings: Settings, compat: Compat, arch: str) -> FileSource:
    """Return the newest file of the package whose driver is of the CUDA's own branch, as the repository's index lists it.

    A version of another branch holds no libraries: cuda-compat-12-8 at 575.57.08 is an empty package.

    Args:
        settings: where the repository is.
        compat: which package.
        arch: architecture of the image, `x86_64` or `aarch64`.

    Raises:
        HostError: the repository cannot be reached or cannot serve now.
        LockError: its index cannot be read, or lists no such file.

    """
    from envbuild.net.fetch import fetch

    place = f"{settings.cuda_repository.rstrip('/')}/{_FOLDER[arch]}/"
    index = urljoin(place, "Packages.gz")
    body, _ = fetch(settings, index)
    found: list[tuple[Version, str, FileSource]] = []
    for stanza in split_stanzas(_unpacked(body, index)):
        if (stanza.get("Package"), stanza.get("Architecture")) != (compat.package, DEBIAN_ARCH[arch]):
            continue
        driver, _, revision = stanza.get("Version", "").partition("-")
        try:
            version = Version(driver)
        except InvalidVersion:
            continue
        name = re.sub(r"^\./", "", stanza.get("Filename", ""))
        if str(version.major) == compat.branch:
            found.append((version, revision, _file(place, name, stanza.get("SHA256"), index)))
    if not found:
        raise LockError(
            f"the repository lists no {compat.package} of driver branch {compat.branch}",
            where=redact(index),
            hint="choose a CUDA that the driver starts by itself: leave out --cuda, or see `envbuild resolve`",
        )
    return max(found, key=lambda each: each[:2])[2]


def likely_file(matrix: Matrix, compat: Compat, arch: str) -> FileSource:
    """Return the file as NVIDIA names it, at the driver of the CUDA's last update; its hash and its revision are not known."""
    facts = matrix.release("cuda", compat.cuda).facts
    assert isinstance(facts, CudaFacts)  # noqa: S101
    newest = max(facts.driver_full.values(), key=Version)
    default = str(Settings.model_fields["cuda_repository"].default)
    name = f"{compat.package}_{newest}-0ubuntu1_{DEBIAN_ARCH[arch]}.deb"
    return FileSource(name=COMPAT, url=f"{default}/{_FOLDER[arch]}/{name}")


def _file(place: str, name: str, sha256: str | None, index: str) -> FileSource:
    if sha256 and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+~-]*\.deb", name):
        with contextlib.suppress(ValidationError):
            return FileSource(name=COMPAT, url=urljoin(place, name), sha256=sha256)
    raise LockError(
        f"the repository names no .deb with its SHA256 where it describes {shown(name, 80)!r}", where=redact(index)
    )


def _unpacked(body: bytes, index: str) -> str:
    unpack = zlib.decompressobj(wbits=31)
    try:
        text = unpack.decompress(body, _INDEX_BYTES)
    except zlib.error:
        raise LockError("the repository's index is not gzip", where=redact(index)) from None
    if not unpack.eof:
        raise LockError("the repository's index is cut short or too large", where=redact(index))
    return text.decode("utf-8", "replace")

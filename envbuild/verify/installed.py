"""What an image has installed, read from outside: its files against the RECORDs, and those against the locked wheels.

Nothing of the image runs for it. Its files come as a tar from the engine, so that neither a Python that lies nor a VOLUME
that hides something has a part in it.
"""

import base64
import binascii
import csv
import hashlib
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from packaging.utils import canonicalize_name

from envbuild.paths import data_dir
from envbuild.util.foreign_tar import Body, Member, Readable, TarError, read_tar
from envbuild.util.names import shown

VENV = "opt/venv"
CARRIED = "opt/envbuild"
COMPILERS = ("nvcc", "cicc", "cudafe++")
"""Programs that a runtime image must not hold."""
_CACHES = (
    "root/.cache/",
    "var/cache/apt/archives/",
    "var/lib/apt/lists/",
    "tmp/",
    "src/",
    "out/",
    "opt/tools/",
    "opt/toolchain/",
)
_TEXT_LIMIT = 32 << 20
"""Bytes of one RECORD or of one carried file; torch's RECORD has 1.5 MiB."""
_TEXTS_LIMIT = 256 << 20
_CARRIED_FILES = 200
_FILES_LIMIT = 600_000
"""Files of the environment whose hashes are kept; the largest that we know has 60,000."""
_PIECE = 1 << 20
# A distribution lies at the top; what lies deeper, as in setuptools' `_vendor`, is another distribution's content.
_DIST_INFO = re.compile(rf"(?P<site>{VENV}/lib(?:64)?/python[\d.]+/site-packages)/(?P<name>[^/]+)\.dist-info")
_SITE = re.compile(rf"{VENV}/lib(?:64)?/python[\d.]+/site-packages/")
# What uv writes as it makes an environment, before anything is installed.
OF_THE_ENVIRONMENT = re.compile(
    rf"{VENV}/(?:\.gitignore|\.lock|CACHEDIR\.TAG|pyvenv\.cfg"
    r"|bin/(?:activate(?:_this)?(?:\.[a-z0-9]+)?|deactivate\.bat|pydoc\.bat|python[\d.]*)"
    r"|bin/__pycache__/activate_this\.cpython-\d+\.pyc)"
)
# What the installer writes in addition to the wheel's files.
_BY_INSTALLER = re.compile(r"[^/]+\.dist-info/(?:INSTALLER|REQUESTED|RECORD|direct_url\.json)")
_HANDED_ON = hashlib.sha256(
    b"import sys\n\nimport flash_attn_interface as module\n\nsys.modules[__name__] = module\n"
).digest()
"""FA3's module where Transformer Engine imports it from."""
_HOME = ("_envbuild_home.py", "_envbuild_home.pth")
"""What gives a user whom the image does not know a home: these and FA3's module are what the build itself adds."""


_OWN_FOLDER = re.compile(rf"opt|{CARRIED}|{VENV}(?:/lib(?:/python[0-9.]{{1,8}}(?:/site-packages)?)?)?")


@dataclass(kw_only=True)
class Tree:
    """What was found in an image's file system."""

    hashes: dict[str, bytes | None] = field(default_factory=dict)
    """Path of each file below the environment -> sha256 of its content; None of what is no regular file."""
    records: dict[str, str] = field(default_factory=dict)
    """Path of each RECORD below the environment -> its text."""
    carried: dict[str, bytes] = field(default_factory=dict)
    """What envbuild put into the image, by its path below /opt/envbuild."""
    compilers: list[str] = field(default_factory=list)
    cuda_runtimes: list[str] = field(default_factory=list)
    caches: list[str] = field(default_factory=list)
    """The first of what a build leaves behind when it does not clean up."""
    caches_total: int = 0
    files: int = 0


def read_tree(stream: Readable, take: Callable[[Member], Member] = lambda member: member) -> Tree:
    """Read an image's file system from a tar of it.

    Args:
        stream: the tar.
        take: somebody else who reads each member; it hands on one that can still be read.

    Raises:
        TarError: it is damaged or out of bounds.

    """
    tree = Tree()
    texts = 0
    for member in read_tar(stream):
        if member.kind == "folder":
            continue
        if _OWN_FOLDER.fullmatch(member.path):  # a link: the packages are elsewhere, and no check reads them
            raise TarError(f"/{shown(member.path)} is a {member.kind} in place of a folder")
        tree.files += 1
        member = take(member)  # noqa: PLW2901 - with its content still to be read
        _note(tree, member)
        if member.path.startswith(f"{VENV}/"):
            texts += _installed(tree, member)
        elif member.path.startswith(f"{CARRIED}/") and member.body is not None:
            body = _text(member.body, member.path)
            tree.carried[member.path.removeprefix(f"{CARRIED}/")] = body
            texts += len(body)
            if len(tree.carried) > _CARRIED_FILES:
                raise TarError(f"more than {_CARRIED_FILES} files in /{CARRIED}")
        if texts > _TEXTS_LIMIT:
            raise TarError(f"more than {_TEXTS_LIMIT:,} bytes of RECORDs and of files in /{CARRIED}")
    return tree


def _note(tree: Tree, member: Member) -> None:
    name = member.path.rpartition("/")[2]
    if member.kind in {"file", "hard link"}:
        if name in COMPILERS:
            tree.compilers.append(f"/{member.path}")
        if name.startswith(("libcudart.so.", "libcudart-")):
            tree.cuda_runtimes.append(f"/{member.path}")
        if max(len(tree.compilers), len(tree.cuda_runtimes)) > 1000:
            raise TarError("more than 1000 compilers or CUDA runtimes")
    if member.kind == "file" and not member.size:  # apt's lock files
        return
    object_file = name.endswith(".o") and not member.path.startswith("usr/lib/")  # libc's own start files lie there
    if object_file or name in {".ninja_log", ".ninja_deps"} or member.path.startswith(_CACHES):
        tree.caches_total += 1
        if len(tree.caches) < 20:
            tree.caches.append(f"/{member.path}")


def _installed(tree: Tree, member: Member) -> int:
    if len(tree.hashes) >= _FILES_LIMIT:
        raise TarError(f"more than {_FILES_LIMIT:,} files in /{VENV}")
    if member.kind == "hard link":  # the engine names the file that it has sent already
        tree.hashes[member.path] = tree.hashes.get(member.link.lstrip("./"))
        return 0
    if member.body is None:
        tree.hashes[member.path] = None
        return 0
    folder, _, name = member.path.rpartition("/")
    if name == "RECORD" and _DIST_INFO.fullmatch(folder):
        body = _text(member.body, member.path)
        tree.records[member.path] = body.decode("utf-8", "surrogateescape")
        tree.hashes[member.path] = hashlib.sha256(body).digest()
        return len(body)
    sha = hashlib.sha256()
    while piece := member.body.read(_PIECE):
        sha.update(piece)
    tree.hashes[member.path] = sha.digest()
    return 0


def _text(body: Body, path: str) -> bytes:
    text = bytearray()
    while piece := body.read(_PIECE):
        text += piece
        if len(text) > _TEXT_LIMIT:
            raise TarError(f"{shown(path)} has more than {_TEXT_LIMIT:,} bytes")
    return bytes(text)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a RECORD."""

    path: str
    """As it is written: relative to the folder that holds the `.dist-info`."""
    sha256: bytes | None
    """None where the line has no hash."""


def read_record(text: str) -> tuple[Row, ...]:
    """Read a RECORD.

    Raises:
        ValueError: it is none, or it hashes with something else than sha256.

    """
    rows = []
    try:
        for line in csv.reader(text.splitlines()):
            if not line:
                continue
            if len(line) != 3 or not line[0] or len(line[0]) > 4096:
                raise ValueError(f"{shown(','.join(line), 80)} is not a line of a RECORD")
            algorithm, _, digest = line[1].partition("=")
            rows.append(Row(path=line[0], sha256=_sha256(algorithm, digest) if line[1] else None))
    except (csv.Error, binascii.Error) as error:
        raise ValueError(str(error)) from None
    return tuple(rows)


def _sha256(algorithm: str, digest: str) -> bytes:
    if algorithm != "sha256":
        raise ValueError(f"a hash that is not a sha256: {shown(algorithm, 40)}")
    body = base64.urlsafe_b64decode(digest.encode("utf-8", "replace") + b"=" * (-len(digest) % 4))
    if len(body) != 32:
        raise ValueError(f"{shown(digest, 60)} is not a sha256")
    return body


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """One installed distribution, as its `.dist-info` says."""

    name: str
    """Normalized."""
    version: str
    site: str
    """The folder that holds its `.dist-info`."""
    rows: tuple[Row, ...]

    def place(self, row: Row) -> str:
        """Return where a row's file lies, relative to the image's root; it may lead out of the environment."""
        return posixpath.normpath(f"{self.site}/{row.path}") if not row.path.startswith("/") else row.path[1:]


@dataclass(frozen=True, kw_only=True)
class Installed:
    """The distributions of an environment, and what contradicts their RECORDs."""

    distributions: tuple[Distribution, ...]
    changed: tuple[str, ...]
    """Faults: a file that is gone, another than its RECORD says, outside the environment; a RECORD that is none."""
    unlisted: tuple[str, ...]
    """Files of the environment that no RECORD lists and that nothing else accounts for."""
    compiled: int
    """Byte code, which no RECORD lists: nothing says from outside what it does."""
    compared: int


def hold_to_records(tree: Tree) -> Installed:
    """Hold every file of the environment against the RECORDs of the distributions in it."""
    found, faults = [], []
    for path, text in sorted(tree.records.items()):
        match = _DIST_INFO.fullmatch(path.rpartition("/")[0])
        name, _, version = (match["name"] if match else "").rpartition("-")
        if not match or not name:
            faults.append(f"/{shown(path)} is of a distribution without a version")
            continue
        try:
            rows = read_record(text)
        except ValueError as error:
            faults.append(f"/{shown(path)} is no RECORD: {error}")
            continue
        found.append(Distribution(name=canonicalize_name(name), version=version, site=match["site"], rows=rows))
    listed: dict[str, list[bytes | None]] = {}
    by: dict[str, str] = {}
    for dist in found:
        for row in dist.rows:
            place = dist.place(row)
            if not place.startswith(f"{VENV}/"):
                faults.append(f"{shown(dist.name)} lists a file outside /{VENV}: {shown(row.path)}")
                continue
            listed.setdefault(place, []).append(row.sha256)
            by.setdefault(place, dist.name)
    compared = 0
    for place, hashes in listed.items():
        if place not in tree.hashes:
            faults.append(f"/{shown(place)} of {shown(by[place])} is not there")
            continue
        actual = tree.hashes[place]
        if actual is None:
            faults.append(f"/{shown(place)} of {shown(by[place])} is not a regular file")
        elif any(hashes):
            # Two distributions may install one file (`nvidia/__init__.py`): the one that came last is there.
            compared += 1
            if actual not in hashes:
                faults.append(f"/{shown(place)} is not what {shown(by[place])} installed")
        elif not place.endswith((".pyc", ".dist-info/RECORD", "/RECORD.jws", "/RECORD.p7s")):
            faults.append(f"/{shown(place)} of {shown(by[place])} has no hash in its RECORD")
    unlisted, compiled = _unlisted(tree, listed)
    folders = {path.partition(".dist-info/")[0] + ".dist-info" for path in tree.hashes if ".dist-info/" in path}
    without = {each for each in folders if _DIST_INFO.fullmatch(each) and f"{each}/RECORD" not in tree.records}
    faults += [f"/{shown(folder)} has no RECORD" for folder in sorted(without)]
    return Installed(
        distributions=tuple(found),
        changed=tuple(faults),
        unlisted=tuple(unlisted),
        compiled=compiled,
        compared=compared,
    )


def _unlisted(tree: Tree, listed: Mapping[str, object]) -> tuple[list[str], int]:
    unlisted, compiled = [], 0
    for path, sha in sorted(tree.hashes.items()):
        if path in listed or OF_THE_ENVIRONMENT.fullmatch(path):
            continue
        if _is_byte_code(path, listed):
            compiled += 1
        elif not _is_added(path, sha) and path != f"{VENV}/lib64":
            unlisted.append(f"/{shown(path)}")
    return unlisted, compiled


def _is_added(path: str, sha: bytes | None) -> bool:
    """Return whether the build itself adds the file, with this content."""
    if path.endswith("/flash_attn_interface.py"):
        return sha == _HANDED_ON
    folder, _, name = path.rpartition("/")
    return bool(_SITE.fullmatch(f"{folder}/")) and name in _HOME and sha == _hash_of_own(name)


@cache
def _hash_of_own(name: str) -> bytes:
    """Return the sha256 of a file of dockerfiles/image."""
    return hashlib.sha256((data_dir("dockerfiles") / "image" / name).read_bytes()).digest()


def source_of_byte_code(path: str) -> str | None:
    """Return the source whose byte code Python keeps at `path`; None where it keeps none there."""
    folder, _, name = path.rpartition("/")
    above, _, last = folder.rpartition("/")
    stem = name.partition(".")[0]
    match = re.fullmatch(r"(.+)\.cpython-\d+(?:\.opt-[12])?\.pyc", name)
    if last != "__pycache__" or match is None or not stem:
        return None
    return f"{above}/{match[1]}.py"


def _is_byte_code(path: str, listed: Mapping[str, object]) -> bool:
    """Return whether `path` is where Python keeps the byte code of a source that is listed."""
    source = source_of_byte_code(path)
    added = ("/flash_attn_interface.py", f"/{_HOME[0]}")
    return source is not None and (source in listed or source.endswith(added))


def hold_to_wheel(
    dist: Distribution, wheel: Iterable[Row], tree: Tree, others: Mapping[str, Collection[bytes | None]]
) -> list[str]:
    """Hold what is installed of a distribution against the RECORD of the wheel that the lock names; return the faults.

    Its scripts are not compared: an installer writes the interpreter's path into them, and makes those of entry points.

    Args:
        dist: the distribution.
        wheel: the RECORD in its wheel.
        tree: the image's files.
        others: by path, what other distributions list there: the one that was installed last is there.

    """
    faults = []
    from_wheel = set()
    for row in wheel:
        place = _place_in(dist.site, row.path)
        if place is None or row.sha256 is None:
            continue
        from_wheel.add(place)
        actual = tree.hashes.get(place)
        if actual != row.sha256 and (actual is None or actual not in others.get(place, ())):
            faults.append(f"/{shown(place)} is not the one of the locked wheel")
    for row in dist.rows:
        place = dist.place(row)
        own = place.removeprefix(f"{dist.site}/")
        if place in from_wheel or place.startswith(f"{VENV}/bin/") or _BY_INSTALLER.fullmatch(own):
            continue
        if not _is_byte_code(place, dict.fromkeys(from_wheel)) and _SITE.match(place):
            faults.append(f"/{shown(place)} is not in the locked wheel")
    return faults


def _place_in(site: str, path: str) -> str | None:
    """Return where an installer puts a wheel's member; None where it changes it, or puts it next to the packages."""
    top, _, rest = path.partition("/")
    if not top.endswith(".data"):
        own = path.count("/") == 1 and path.endswith(".dist-info/RECORD")  # the installer adds lines to it
        return None if own else posixpath.normpath(f"{site}/{path}")
    kind, _, inner = rest.partition("/")
    if kind in {"purelib", "platlib"}:
        return posixpath.normpath(f"{site}/{inner}")
    if kind == "data":
        return posixpath.normpath(f"{VENV}/{inner}")
    return None

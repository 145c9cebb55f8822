"""Which locked input each file of an image belongs to.

The image's own lists say it: dpkg's list of each OS package, the RECORD of each Python distribution. Files that the scripts
of OS packages make are on no list; `_MADE_BY` says whose they are. What envbuild itself puts into the image follows from
the plan. What is left belongs to none, and is listed.

What this cannot show. An image's lists are its own word: `audit` compares the installed wheels with the locked ones, and
only `reproduce` ties every byte to the lock.
"""

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import IO, cast

from packaging.utils import canonicalize_name

from envbuild.lock.model import COMPAT
from envbuild.plan.plan import Plan
from envbuild.supply.inventory import ENVBUILD, Input
from envbuild.util.foreign_tar import Body, Member, TarError
from envbuild.verify.installed import CARRIED, OF_THE_ENVIRONMENT, VENV, Installed, Tree, source_of_byte_code

_LISTS = re.compile(r"var/lib/dpkg/info/(?P<name>[a-z0-9][a-z0-9+.-]*)(?::[a-z0-9]+)?\.list")
_INFO = re.compile(r"var/lib/dpkg/info/(?P<name>[a-z0-9][a-z0-9+.-]*?)(?::[a-z0-9]+)?\.[a-z0-9]+")
_LISTS_LIMIT = 16 << 20
"""Bytes of all lists of an image; those of our largest have 2 MiB."""
_PIECE = 1 << 20
_LINKS = 20
"""Links that lead from one to the next; Linux follows 40."""

# What an engine puts into every container: empty files for what it mounts there, and a link to the kernel's mounts.
_OF_THE_ENGINE = re.compile(r"\.dockerenv|dev/(?:console|pts|shm|null)|etc/(?:hostname|hosts|resolv\.conf)")

# Files that scripts of Debian's and Ubuntu's packages make, and the packages; the first that the lock names is taken. Read
# from the postinst of each (Debian 12 and 13), and from an image: tests/integration/test_image.py finds any that is new.
_MADE_BY: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(path), packages)
    for path, packages in (
        (r"var/lib/dpkg/(?:info/format|(?!info/).+)|etc/alternatives/README", ("dpkg",)),
        (r"var/(?:lib|cache)/apt/.+", ("apt",)),
        (r"var/cache/debconf/.+", ("debconf",)),
        (r"etc/ld\.so\.cache|etc/nsswitch\.conf", ("libc-bin",)),
        (r"etc/(?:passwd|group|shadow|gshadow)", ("base-passwd",)),
        (r"etc/sub[ug]id", ("login", "passwd")),
        (
            r"etc/(?:motd|profile|dpkg/origins/default)|root/\.(?:bashrc|profile)|usr/(?:share/info/dir|local/man)|var/spool/mail",
            ("base-files",),
        ),
        (r"etc/inputrc", ("readline-common", "base-files")),
        (r"etc/environment|etc/security/opasswd", ("libpam-modules",)),
        (r"etc/pam\.d/common-[a-z-]+|var/lib/pam/[a-z-]+", ("libpam-runtime",)),
        (r"etc/shells|var/lib/shells\.state", ("debianutils",)),
        (r"etc/ca-certificates\.conf|etc/ssl/certs/ca-certificates\.crt", ("ca-certificates",)),
        (r"var/lib/systemd/deb-systemd-helper-enabled/.+", ("init-system-helpers",)),
        (r"var/lib/python/python3\.\d+_installed", ("python3.11-minimal", "python3.13-minimal", "python3.12-minimal")),
    )
)
# Links that such scripts make: each belongs to the package of the file that it leads to.
_LINK_MADE = re.compile(
    r"etc/alternatives/[^/]+|etc/rc[0-6S]\.d/[^/]+|etc/systemd/[a-z]+/[^/]+\.(?:wants|requires)/[^/]+|etc/ssl/certs/[^/]+"
)
# What the bootstrap of a root writes (engine/bootstrap.py): sources, dpkg's exclusions, an empty table of file systems.
_OF_THE_ROOT = re.compile(r"etc/apt/sources\.list|etc/dpkg/dpkg\.cfg\.d/99envbuild|etc/fstab")


@dataclass(kw_only=True)
class Seen:
    """The files of an image, as far as it takes to say whose they are."""

    paths: dict[str, int] = field(default_factory=dict)
    """Path of each file, link and device, relative to the root -> bytes of a file."""
    links: dict[str, str] = field(default_factory=dict)
    """Path of each link -> where it leads, as it is written."""
    lists: list[tuple[str, bytes]] = field(default_factory=list)
    """OS package, and the paths that dpkg installed for it, a line each; a package of two architectures comes twice."""
    _read: int = 0

    def take(self, member: Member) -> Member:
        """Note a member; return it with its whole content still to be read.

        Raises:
            TarError: dpkg's lists are out of bounds.

        """
        self.paths[member.path] = member.size
        if member.kind == "link":
            self.links[member.path] = member.link
        match = _LISTS.fullmatch(member.path)
        if match is None or member.body is None:
            return member
        self._read += member.size
        if self._read > _LISTS_LIMIT:
            raise TarError(f"dpkg's lists of files have more than {_LISTS_LIMIT:,} bytes")
        text = b"".join(iter(lambda: member.body.read(_PIECE), b""))  # type: ignore[union-attr]  # checked above
        self.lists.append((match["name"], text))
        return replace(member, body=Body(cast("IO[bytes]", BytesIO(text))))


@dataclass(frozen=True, kw_only=True)
class Owned:
    """Whose the files of an image are."""

    files: Mapping[str, tuple[str, ...]]
    """`ref` of an input -> the files that belong to it, absolute and sorted. A file that several install is in each."""
    unowned: tuple[str, ...]
    """The files that belong to no locked input."""

    @property
    def count(self) -> int:
        """How many files there are."""
        return len({path for paths in self.files.values() for path in paths}) + len(self.unowned)


def owners_of(plan: Plan, inputs: tuple[Input, ...], seen: Seen, tree: Tree, installed: Installed) -> Owned:
    """Return whose each file of an image is.

    Args:
        plan: of the image.
        inputs: of its lock.
        seen: its files.
        tree: the same, as `read_tree` keeps it.
        installed: its Python distributions.

    """
    made = _Owners(plan, inputs, seen)
    made.add_packages()
    made.add_distributions(installed, tree)
    made.add_own()
    made.add_made()
    return made.result()


class _Owners:
    """Path -> the inputs that it belongs to; what is known already comes before a rule."""

    def __init__(self, plan: Plan, inputs: tuple[Input, ...], seen: Seen) -> None:
        self.plan, self.seen = plan, seen
        self.refs = {(each.kind, each.name): each.ref for each in inputs if each.in_image}
        self.owners: dict[str, set[str]] = {}
        self.aliases = {
            name: target.strip("/")
            for name, target in seen.links.items()
            if "/" not in name and name in {"bin", "sbin", "lib", "lib32", "lib64", "libx32"}
        }
        self.base = next((each.ref for each in inputs if each.kind == "base-image" and each.in_image), None)
        repository = plan.stack.repository.name if plan.stack else None
        self.stack = next((each.ref for each in inputs if (each.kind, each.name) == ("source", repository)), None)

    def add(self, path: str, ref: str | None) -> None:
        if ref is not None and path in self.seen.paths:
            self.owners.setdefault(path, set()).add(ref)

    def place(self, path: str) -> str:
        """Return where a path of a list lies: a package may name /lib, which is a link to /usr/lib."""
        top, slash, rest = path.strip("/").partition("/")
        return f"{self.aliases.get(top, top)}{slash}{rest}"

    def package(self, name: str) -> str | None:
        """Return an OS package of the lock; what else a base image holds is the base image's."""
        return self.refs.get(("os-package", name), self.base)

    def add_packages(self) -> None:
        for name, text in self.seen.lists:
            ref = self.package(name)
            for line in BytesIO(text):  # one at a time: as a list, they take many times the room
                self.add(self.place(line.rstrip(b"\n").decode("utf-8", "surrogateescape")), ref)
        for path in self.seen.paths:
            if match := _INFO.fullmatch(path):
                self.add(path, self.package(match["name"]))

    def add_distributions(self, installed: Installed, tree: Tree) -> None:
        compiled: dict[str, str] = {canonicalize_name(wheel.distribution): wheel.axis for wheel in self.plan.components}
        for dist in installed.distributions:
            wheel = self.refs.get(("wheel", dist.name))
            ref = wheel or self.refs.get(("compiled-wheel", compiled.get(dist.name, "")), self.stack)
            for row in dist.rows:
                self.add(dist.place(row), ref)
        uv = self.refs.get(("file", "uv"))
        for path in tree.hashes:
            if path not in self.owners and (OF_THE_ENVIRONMENT.fullmatch(path) or path == f"{VENV}/lib64"):
                self.add(path, uv)
        for target in (place.strip("/") for place in (*(p for _, p in self.plan.placed), *self.plan.files)):
            self.add(target, self.refs["envbuild", ENVBUILD])
        for path in self.seen.paths:  # what Python made of a source belongs where the source does
            source = source_of_byte_code(path)
            if path not in self.owners and source in self.owners:
                self.owners[path] = set(self.owners[source])

    def add_own(self) -> None:
        """Add what the plan puts into the image next to the packages."""
        own = self.refs["envbuild", ENVBUILD]
        for name in self.plan.lists:
            folder, _, rest = name.partition("/")
            if folder in {"lock", "tools"} and rest:
                self.add(f"{CARRIED if folder == 'lock' else 'usr/local/bin'}/{rest}", own)
        self.add(self.plan.constraints.strip("/"), own)
        self.add("usr/local/bin/uv", self.refs.get(("file", "uv")))
        if not self.plan.provided:
            self.add("usr/local/bin/pip", own)
        for wheel in self.plan.components:
            self.add(f"{CARRIED}/built/{wheel.axis}.json", self.refs.get(("compiled-wheel", wheel.axis)))
        folders: dict[str, str | None] = {}
        if self.plan.managed_python:
            folders["opt/python"] = self.refs.get(("file", "python"))
        if self.plan.mpi and self.plan.mpi.prefix:
            folders[self.plan.mpi.prefix.strip("/")] = self.refs.get(("file", "mpi"))
        if self.plan.compat:
            folders[self.plan.compat.folder.strip("/")] = self.refs.get(("file", COMPAT))
            folders[f"usr/share/doc/{self.plan.compat.package}"] = self.refs.get(("file", COMPAT))
        if self.plan.stack:
            folders[self.plan.stack.repository.path.strip("/")] = self.stack
            folders[VENV] = self.stack  # its steps may put files there, and the lock names the steps
        for path in self.seen.paths:
            if path in self.owners:
                continue
            for folder, ref in folders.items():
                if path.startswith(f"{folder}/"):
                    self.add(path, ref)
            merged = path in self.aliases and self.aliases[path] == f"usr/{path}"
            if self.plan.lock.root is not None and (merged or _OF_THE_ROOT.fullmatch(path)):
                self.add(path, own)

    def add_made(self) -> None:
        """Add what scripts of OS packages made, and links to what belongs to somebody."""
        for path in self.seen.paths:
            if path in self.owners:
                continue
            for pattern, packages in _MADE_BY:
                if pattern.fullmatch(path):
                    refs = (self.refs.get(("os-package", name)) for name in packages)
                    self.add(path, next((ref for ref in refs if ref), None))
        for path in self.seen.links:
            if path not in self.owners:
                self.owners[path] = set(self._linked(path))
        if self.base is not None:  # nobody can say from afar what a base image holds
            for path in self.seen.paths:
                if not self.owners.get(path) and not path.startswith((f"{VENV}/", f"{CARRIED}/")):
                    self.add(path, self.base)

    def _linked(self, path: str) -> Iterator[str]:
        """Yield whose file a link leads to, where a package's script made it."""
        for _ in range(_LINKS):
            target = self.seen.links.get(path)
            if target is None:
                break
            to = self.place(posixpath.normpath(posixpath.join("/", posixpath.dirname(path), target)))
            if not (_LINK_MADE.fullmatch(path) or to.startswith("etc/alternatives/")):
                return
            path = to
            if self.owners.get(path):
                yield from self.owners[path]
                return

    def result(self) -> Owned:
        files: dict[str, list[str]] = {}
        unowned = []
        for path, size in self.seen.paths.items():
            refs = self.owners.get(path)
            for ref in refs or ():
                files.setdefault(ref, []).append(_printed(path))
            mounted = _OF_THE_ENGINE.fullmatch(path) and not size
            if not refs and not mounted and (path, self.seen.links.get(path)) != ("etc/mtab", "/proc/mounts"):
                unowned.append(_printed(path))
        return Owned(
            files={ref: tuple(sorted(paths)) for ref, paths in sorted(files.items())}, unowned=tuple(sorted(unowned))
        )


def _printed(path: str) -> str:
    """Return a path as text: bytes that are no UTF-8 as Python writes them."""
    return "/" + path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")

"""Running git: the one place in the package that builds a command line of it.

git runs here on a repository that is ours, and nothing but our own arguments says what it does: no variable GIT_*, no
configuration of the system or the user, no hook, no monitor, no helper for logins, no transport but those asked for. What
lies in another's repository is read as objects alone (`objects_of`, `borrowed`), so that its configuration names no program.
"""

import contextlib
import os
import re
import resource
import selectors
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM
from typing import IO

from envbuild.errors import HostError, LockError
from envbuild.util.processes import end_group, guarded
from envbuild.util.scratch import scratch

_FILE_LIMIT = 32 * 2**30  # bytes of the largest file that git may write: a pack, a file of a tree
_STDERR_LIMIT = 2**16  # bytes of what git or the other side prints that are kept
_SLOW_BYTES = 1000  # per second; slower than that is no progress
_REF = re.compile(r"ref: (refs/[A-Za-z0-9][A-Za-z0-9._/@+=-]{0,500})")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# What a tree states about line ends, encodings and filters is not applied: a file is its blob, byte for byte.
_ATTRIBUTES = "* -text -eol -ident -filter -working-tree-encoding -crlf\n"
_SETTLED = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.untrackedCache": "false",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.autocrlf": "false",
    "core.fileMode": "true",
    "core.symlinks": "true",
    "core.commitGraph": "false",
    "core.alternateRefsCommand": "true",
    "credential.helper": "",
    "fetch.recurseSubmodules": "false",
    "fetch.unpackLimit": "1",
    "gc.auto": "0",
    "http.lowSpeedLimit": str(_SLOW_BYTES),
    "http.sslVerify": "true",
    "maintenance.auto": "false",
    "protocol.allow": "never",
    "submodule.recurse": "false",
    "transfer.bundleURI": "false",
}


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How an upstream is reached."""

    protocols: Collection[str] = ("https",)
    """Of https and ssh; there is no other."""
    ca_bundle: Path | None = None
    https_proxy: str | None = field(default=None, repr=False)
    no_proxy: str | None = None
    patience_s: int = 60
    """Seconds without progress after which a transfer ends."""


@dataclass(frozen=True, kw_only=True)
class GitResult:
    """What became of one run of git."""

    code: int
    stdout: bytes
    stderr: str
    """The end of its stderr, which may be the other side's words."""

    @property
    def stalled(self) -> bool:
        """Whether it ended because nothing came any more."""
        return (
            re.search(r"Operation too slow|[Oo]peration timed out|Connection timed out|Timeout, server", self.stderr)
            is not None
        )


def run_git(
    repository: Path,
    command: str,
    *options: str,
    operands: Sequence[str] = (),
    stdin: bytes | IO[bytes] = b"",
    stdout: IO[bytes] | None = None,
    index: Path | None = None,
    work_tree: Path | None = None,
    borrowed: Sequence[Path] = (),
    reach: Reach | None = None,
    limit_s: float = 1800,
    limit_bytes: int = 2**26,
) -> GitResult:
    """Run one command of git and return what became of it, whether it succeeded or not.

    Args:
        repository: the git folder it works on, made by `make_repository`; never somebody else's.
        command: such as `fetch`.
        options: ours; nothing that comes from outside.
        operands: what comes from outside: addresses and commits. They follow a `--`.
        stdin: what it reads.
        stdout: where its output goes; it is returned when None.
        index: the index file.
        work_tree: the folder that files are written to.
        borrowed: folders of objects, as `objects_of` returns them, that it reads in addition to its own.
        reach: how it reaches an upstream; without it, nothing is reached.
        limit_s: seconds that it may take.
        limit_bytes: bytes of output that it may have.

    Raises:
        HostError: git is not here, or it took longer than `limit_s`.
        LockError: it has more output than `limit_bytes`.

    """
    if any(operand.startswith("-") or "\0" in operand for operand in operands):
        raise ValueError("an operand of git starts with a dash")
    if borrowed and reach:
        raise ValueError("git asks a borrowed repository for its references while it fetches")
    settled = _SETTLED | ({f"protocol.{p}.allow": "always" for p in reach.protocols} if reach else {})
    if reach:
        settled |= {"http.lowSpeedTime": str(reach.patience_s)}
    flags = [part for key, value in settled.items() for part in ("-c", f"{key}={value}")]
    line = ["git", f"--git-dir={repository}", *flags, command, *options, *(["--", *operands] if operands else [])]
    with contextlib.ExitStack() as stack:
        if isinstance(stdin, bytes):
            given = stack.enter_context(tempfile.TemporaryFile())
            given.write(stdin)
            given.seek(0)
            stdin = given
        try:
            environment = _environment(reach, index, work_tree, borrowed)
            process = subprocess.Popen(
                guarded(line, env=environment),
                cwd=work_tree or repository,
                env=environment,
                stdin=stdin,
                stdout=subprocess.PIPE if stdout is None else stdout,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            if not (work_tree or repository).is_dir():
                raise HostError(f"there is no folder {work_tree or repository}", hint="run it again") from error
            raise HostError(
                "git is not on the PATH", where=f"git {command}", hint="install git; Debian's package is git"
            ) from error
        stack.enter_context(process)
        try:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_FILE_LIMIT, _FILE_LIMIT))
            output, stderr = _collected(process, command, time.monotonic() + limit_s, limit_bytes)
        except BaseException:
            end_group(process, first=SIGTERM, patience=5.0)
            raise
    return GitResult(code=process.returncode, stdout=output, stderr=stderr.decode("utf-8", "replace"))


def _collected(
    process: "subprocess.Popen[bytes]", command: str, deadline: float, limit_bytes: int
) -> tuple[bytes, bytes]:
    """Read what git writes until it ends."""
    output, stderr = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        for stream, to in ((process.stdout, output), (process.stderr, stderr)):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ, to)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                raise _too_long(command)
            for key, _ in ready:
                part = os.read(key.fd, 2**16)
                if not part:
                    selector.unregister(key.fileobj)
                key.data.extend(part)
            if len(output) > limit_bytes:
                raise LockError(
                    f"git {command} gives more than {limit_bytes} bytes: a tree of that size is not a source tree",
                    hint="look at the commit that is pinned",
                )
            del stderr[:-_STDERR_LIMIT]
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise _too_long(command) from None
    return bytes(output), bytes(stderr)


def _too_long(command: str) -> HostError:
    return HostError(f"git {command} did not end in time", hint="look at the disk and the network, then run it again")


def _environment(
    reach: Reach | None, index: Path | None, work_tree: Path | None, borrowed: Sequence[Path]
) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GIT_", "SSH_ASKPASS", "XDG_CONFIG_"))}
    env |= {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        # for a git before 2.32, which does not know the variable above; ssh takes its home from the account
        "HOME": "/nonexistent",
        "XDG_CONFIG_HOME": "/nonexistent",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_PROTOCOL_FROM_USER": "0",
        "GIT_ALLOW_PROTOCOL": ":".join(sorted(reach.protocols)) if reach else "none",
        "LC_ALL": "C",
    }
    if reach and "ssh" in reach.protocols:
        options = {"BatchMode": "yes", "ConnectTimeout": reach.patience_s, "ServerAliveInterval": 15}
        options |= {"ServerAliveCountMax": max(1, reach.patience_s // 15), "ControlPath": "none"}
        env["GIT_SSH_COMMAND"] = " ".join(["ssh", *(f"-o{key}={value}" for key, value in options.items())])
    if reach and reach.ca_bundle:
        env["GIT_SSL_CAINFO"] = str(reach.ca_bundle)
    if reach and reach.https_proxy:
        env["https_proxy"] = reach.https_proxy
    if reach and reach.no_proxy:
        env["no_proxy"] = reach.no_proxy
    if index:
        env["GIT_INDEX_FILE"] = str(index)
    if work_tree:
        env["GIT_WORK_TREE"] = str(work_tree)
    if borrowed:
        env["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = ":".join(map(_listed, borrowed))
    return env


def _listed(folder: Path) -> str:
    text = str(folder).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def make_repository(folder: Path) -> None:
    """Make the empty folder `folder` a bare repository without hooks, in which no file is converted."""
    for name in ("objects", "refs", "info"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "info/attributes").write_text(_ATTRIBUTES, encoding="ascii")
    (folder / "config").write_text("[core]\n\trepositoryformatversion = 0\n\tbare = true\n", encoding="ascii")
    (folder / "HEAD").write_text("ref: refs/heads/none\n", encoding="ascii")


@contextlib.contextmanager
def empty_repository() -> Iterator[Path]:
    """Give a bare repository that is removed afterwards."""
    with scratch("git") as own:
        make_repository(own)
        yield own


def object_kind(
    repository: Path, name: str, *, borrowed: Sequence[Path] = (), limit_s: float = 60
) -> tuple[str, str, int] | None:
    """Return the id, the type and the size of the object that `name` says, such as `COMMIT:PATH`, or None without one.

    Raises:
        LockError: the object or the repository cannot be read.
        HostError: as `run_git`.

    """
    if "\n" in name:
        raise ValueError("a name of an object holds a line break")
    stdin = f"{name}\n".encode()
    ran = run_git(repository, "cat-file", "--batch-check", stdin=stdin, borrowed=borrowed, limit_s=limit_s)
    found = re.fullmatch(rb"([0-9a-f]{40}) (commit|tree|blob|tag) (\d{1,18})\n", ran.stdout)
    if found:
        return found[1].decode(), found[2].decode(), int(found[3])
    if (
        ran.code == 0
        and ran.stdout.endswith(b" missing\n")
        and not re.search("corrupt|inflate|unpack|packfile", ran.stderr)
    ):
        return None
    raise LockError(
        f"git cannot read {name}: {ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else 'no answer'}",
        where=str(repository),
    )


# -- somebody else's repository: its files are read, and no git runs in it ----------------------------------------------


def _text(place: Path, limit: int) -> str | None:
    """Return a file's text, or None where it is no file, too large or no text."""
    try:
        # a FIFO without a writer would hold an open for reading for good
        handle = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            body = file.read(limit + 1) or b""
        return None if len(body) > limit else body.decode()
    except (OSError, ValueError):
        return None


def _git_folder(tree: Path) -> Path | None:
    """Return the folder with the objects and references of a checkout, a work tree or a bare repository."""
    folder = tree / ".git"
    if folder.is_file():  # of a work tree or a submodule
        line = (_text(folder, 4096) or "").strip()
        if not line.startswith("gitdir: "):
            return None
        folder = tree / line.removeprefix("gitdir: ")
    elif not folder.is_dir():
        folder = tree
    return folder if (folder / "HEAD").is_file() else None


def _common(folder: Path) -> Path:
    common = (_text(folder / "commondir", 4096) or "").strip()
    return folder / common if common else folder


def objects_of(tree: Path) -> Path | None:
    """Return the folder of objects of a clone, bare or not, or None where `tree` is none. Runs nothing."""
    folder = _git_folder(tree)
    objects = _common(folder) / "objects" if folder else None
    return objects.resolve() if objects is not None and objects.is_dir() else None


def head_of(tree: Path) -> str | None:
    """Return the commit that a clone's HEAD is at, or None where that is not known. Runs nothing."""
    folder = _git_folder(tree)
    if folder is None:
        return None
    text = (_text(folder / "HEAD", 1024) or "").strip()
    for _ in range(5):  # git's own bound on references that name one another
        if _COMMIT.fullmatch(text):
            return text
        reference = _REF.fullmatch(text)
        if reference is None or ".." in reference[1]:
            return None
        common = _common(folder)
        loose = _text(folder / reference[1], 1024) or _text(common / reference[1], 1024)
        text = (loose or _packed(common, reference[1]) or "").strip()
    return None


def _packed(folder: Path, reference: str) -> str | None:
    for line in (_text(folder / "packed-refs", 2**26) or "").splitlines():
        commit, _, name = line.partition(" ")
        if name == reference:
            return commit
    return None

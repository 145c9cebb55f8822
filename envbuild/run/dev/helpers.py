"""What a stack's repository compiles, for a tree of the host: compiled again only where the sources changed, and kept.

What is compiled goes by the hash of the tree's C, C++ and CUDA sources and of the files that build them, of the image and
of the step. Where the tree has the sources of the image, the image's own files are taken.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

from envbuild.engine.client import last_words
from envbuild.engine.guest import UNSTARTED, guest
from envbuild.engine.image import Image
from envbuild.engine.podman import engine_of
from envbuild.errors import BuildError, HostError
from envbuild.host import HostFacts
from envbuild.run.container import Container, Mount
from envbuild.run.dev.files import MOST, files_in, is_passed_over, is_source
from envbuild.run.runtime import runtime_for
from envbuild.settings import Settings
from envbuild.stacks.model import Stack, Step
from envbuild.util.below import OutsideError, path_below, read_below, read_found, write_below
from envbuild.util.foreign_json import parse_json
from envbuild.util.foreign_tar import Bounds, TarError, read_tar
from envbuild.util.frozen import Frozen
from envbuild.util.logs import new_log
from envbuild.util.names import shown
from envbuild.util.processes import bounded
from envbuild.util.scratch import scratch

_LARGEST = 16 << 20
"""Bytes of a source, and of a file that is compiled with: a checkpoint in the tree is neither."""
_COMPILED = 512 << 20
"""Bytes of a compiled file."""
_REPOSITORY = Bounds(bytes=4 << 30, members=MOST)
_SECONDS = 900.0
_OUTPUT = 16 << 20
_NOTE = "made.json"
# What a shell, make and gcc say of a program that is not there.
_NO_COMPILER = re.compile(
    r"\b(make|nvcc|[gc]\+\+): (?:command )?(?:not found|no such file)|cannot execute .(cc1plus)", re.IGNORECASE
)
_ERROR = re.compile(r"\berror\b|not found|no such file", re.IGNORECASE)

Made = dict[str, bytes]
"""Compiled files by their path in the folder that is mounted."""


def steps_of(stack: Stack) -> tuple[Step, ...]:
    """Return the steps that compile."""
    return tuple(step for step in stack.steps if step.compiles)


def sources_in(folder: Path) -> dict[str, str]:
    """Return the sources below a folder that decide what is compiled: sha256 by path.

    Raises:
        HostError: there are too many files.

    """
    found = {}
    for path, state in files_in(folder):
        if is_source(path) and state.st_size <= _LARGEST:
            with contextlib.suppress(OSError, OutsideError):  # it went, or became a link, meanwhile
                found[path] = hashlib.sha256(read_found(folder, path, limit=_LARGEST)).hexdigest()
    return found


def key_of(image: Image, steps: Iterable[Step], sources: Mapping[str, str]) -> str:
    """Return what decides what is compiled, as a sha256."""
    parts = [image.id, [[step.name, step.run, step.keep] for step in steps], sorted(sources.items())]
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()


def kept(settings: Settings, key: str) -> Made | None:
    """Return what was compiled for `key` before; None where that is not here, or not whole."""
    folder = _place(settings, key)
    try:
        note = parse_json(read_below(folder, _NOTE, limit=_LARGEST), limit=_LARGEST)
        made = {path: read_below(folder / "files", path, limit=_COMPILED) for path in dict(note)}
    except (OSError, ValueError, TypeError):
        return None
    return made if all(hashlib.sha256(body).hexdigest() == note[path] for path, body in made.items()) else None


def keep(settings: Settings, key: str, made: Made) -> None:
    """Keep what was compiled.

    Raises:
        HostError: the cache cannot be written.

    """
    place = _place(settings, key)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with scratch("helpers", place.parent) as new:
            folder = new / "made"
            for path, body in made.items():
                path_below(folder / "files", path, make=_made(folder / "files")).write_bytes(body)
            note = {path: hashlib.sha256(body).hexdigest() for path, body in made.items()}
            (folder / _NOTE).write_text(json.dumps(note, indent=1, sort_keys=True), encoding="utf-8")
            if place.exists():  # of which a file was damaged
                place.rename(new / "replaced")
            with contextlib.suppress(OSError):  # another run was faster
                folder.rename(place)
    except OutsideError as error:  # an image's own name of a file
        raise HostError(f"the compiled files cannot be kept: {error}", where=str(place)) from None
    except OSError as error:
        raise HostError(f"the compiled files cannot be kept: {error.strerror}", where=str(place)) from None


def _made(folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    return True


def _place(settings: Settings, key: str) -> Path:
    return settings.cache_dir / "helpers" / key


def of_image(settings: Settings, image: Image, stack: Stack) -> tuple[str, Made]:
    """Return the key of the repository in the image, and what the image's build compiled of it. Nothing of it runs.

    Raises:
        HostError: the engine does not hand it over, or it is not what a build makes.

    """
    client, sources, made = engine_of(settings), dict[str, str](), Made()
    keep_globs = [glob for step in steps_of(stack) for glob in step.keep]
    path = stack.repository.path
    root = path.rpartition("/")[2]
    try:
        with (
            guest(settings, "look", image.id, (), flags=UNSTARTED, seconds=_SECONDS) as name,
            client.copied(name, path, seconds=_SECONDS, damaged=(TarError,)) as stream,
        ):
            for member in read_tar(stream, _REPOSITORY):
                below = member.path.removeprefix(f"{root}/")
                folders = below.split("/")[:-1]
                if member.body is None or member.kind != "file" or below == member.path:
                    continue
                if _is_compiled(below, keep_globs) and member.size <= _COMPILED:
                    made[below] = _all(member.body.read, member.size)
                elif is_source(below) and member.size <= _LARGEST and not any(map(is_passed_over, folders)):
                    sources[below] = hashlib.sha256(_all(member.body.read, member.size)).hexdigest()
    except (TarError, TimeoutError, subprocess.CalledProcessError) as error:
        why = last_words(bytes(error.stderr).decode("utf-8", "replace")) if hasattr(error, "stderr") else str(error)
        raise HostError(f"{path} of the image cannot be read: {shown(why)}", where=shown(image.reference)) from None
    return key_of(image, steps_of(stack), sources), made


def _all(read: Callable[[int], bytes], size: int) -> bytes:
    parts = list[bytes]()
    while size and (part := read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _is_compiled(path: str, globs: Iterable[str]) -> bool:
    return any(PurePosixPath(path).match(f"/{glob}") or PurePosixPath(f"/{path}").match(f"/{glob}") for glob in globs)


def compiled(settings: Settings, image: Image, host: HostFacts, stack: Stack, folder: Path, key: str) -> Made:
    """Compile the steps' files from a copy of `folder`, in a container of the image without a network.

    Args:
        settings: say where the engine is.
        image: what compiles.
        host: this machine.
        stack: says what to run, and which files to keep.
        folder: what is mounted in the place of the image's repository. It is not written to.
        key: of what is compiled; a part of the name of the log.

    Raises:
        BuildError: a step fails, or makes no file that it is to keep.
        HostError: the container cannot be made.

    """
    steps = steps_of(stack)
    globs = [glob for step in steps for glob in step.keep]
    with scratch("dev") as place:
        copy = place / "tree"
        for path, state in files_in(folder):
            if state.st_size <= _LARGEST and not _is_compiled(path, globs):
                try:
                    body = read_found(folder, path, limit=_LARGEST)
                except (OSError, OutsideError):  # it went, or became a link, meanwhile
                    continue
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                (copy / path).write_bytes(body)
                (copy / path).chmod(state.st_mode & 0o777)
                os.utime(copy / path, ns=(state.st_atime_ns, state.st_mtime_ns))  # make compares them
        made = Made()
        for step in steps:
            _run(settings, image, host, stack, step, copy, key)
            found = [file for glob in step.keep for file in copy.glob(glob) if file.is_file()]
            if not found:
                raise BuildError(
                    f"the step {step.name} made no file of those that it keeps: {', '.join(step.keep)}",
                    where=str(folder),
                    hint=f"its command: {shown(str(step.run), 200)}",
                )
            for file in found:
                path = str(file.relative_to(copy))
                try:
                    made[path] = read_below(copy, path, limit=_COMPILED)
                except (OSError, OutsideError) as error:
                    why = error.strerror if isinstance(error, OSError) else str(error)
                    raise BuildError(
                        f"{shown(path)}, which the step {step.name} made, cannot be read: {why}",
                        where=str(folder),
                        hint="what a step keeps must be a file of less than 512 MiB, and no link",
                    ) from None
        return made


def _run(settings: Settings, image: Image, host: HostFacts, stack: Stack, step: Step, copy: Path, key: str) -> None:
    path = stack.repository.path
    container = Container(
        image=image.id,
        gpus="none",
        network="none",
        infiniband="off",
        init=True,
        mounts=(Mount(source=copy, target=path),),
        workdir=path,
    )
    # The engine's root owns what is made: whoever owns the folder must be able to remove it.
    script = f"sh -euc {shlex.quote(str(step.run))} 2>&1; code=$?; chown -R --reference=. . || :; exit $code"
    runtime = runtime_for(settings, image.reference)
    with runtime.guest("helpers", image, host, container, ["-c", script], entrypoint="sh", seconds=_SECONDS) as made:
        ran = bounded(made.line.command, seconds=_SECONDS, limit=_OUTPUT, env=made.line.environ)
    if ran.code or ran.fault:
        output = ran.out.decode("utf-8", "replace")
        first = next((line for line in output.splitlines() if _ERROR.search(line)), last_words(output))
        with new_log(settings.cache_dir / "logs", "dev", key[:8]) as log:
            log.write(output)
        hint = None
        if absent := _NO_COMPILER.search(output):
            hint = f"the image has no {absent[1] or absent[2]}: build one that has, envbuild image … --flavor devel"
        raise BuildError(
            f"the step {step.name} does not compile the tree: {ran.fault or shown(first, 300)}",
            where=log.name,
            hint=hint,
        )


class Prepared(Frozen):
    """Compiled files in a tree."""

    changed: tuple[str, ...]
    """Those that were written now."""
    origin: str
    """Where they come from, as a phrase."""


def prepare(
    settings: Settings, image: Image, host: HostFacts, stack: Stack, folder: Path, *, note: Callable[[str], object]
) -> Prepared:
    """Give a tree the compiled files that go with its sources: the image's, those kept, or new ones.

    Args:
        settings: say where the engine and the cache are.
        image: the stack's image.
        host: this machine.
        stack: says what is compiled.
        folder: what is mounted in the place of the image's repository.
        note: takes a line before something that takes time.

    Raises:
        BuildError: the tree does not compile.
        HostError: the engine, the cache or the tree cannot be used.

    """
    steps = steps_of(stack)
    if not steps:
        return Prepared(changed=(), origin="")
    key = key_of(image, steps, sources_in(folder))
    made, origin = kept(settings, key), "as compiled before"
    if made is None and _key_of_image(settings, image) in {None, key}:
        own, files = of_image(settings, image, stack)
        if files:
            keep(settings, own, files)
        _note_of(settings, image).write_text(own, encoding="ascii")
        if own == key and files:
            made, origin = files, "as in the image"
    if made is None:
        note(f"the sources changed: compiling {', '.join(step.name for step in steps)}")
        made, origin = compiled(settings, image, host, stack, folder, key), "compiled"
        keep(settings, key, made)
    return Prepared(changed=tuple(place(made, folder)), origin=origin)


def _note_of(settings: Settings, image: Image) -> Path:
    """Return where the key of an image's own repository is noted."""
    folder = settings.cache_dir / "helpers"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{image.id.removeprefix('sha256:')}.key"


def _key_of_image(settings: Settings, image: Image) -> str | None:
    """Return the key of an image's own repository; None where nobody has looked at it."""
    try:
        return _note_of(settings, image).read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return None


def place(made: Made, folder: Path) -> list[str]:
    """Write compiled files into the tree, next to their sources, where `make` leaves them, too; return those that changed.

    Raises:
        HostError: the tree cannot be written, or a link leads out of it.

    """
    changed = []
    for path, body in sorted(made.items()):
        try:
            with contextlib.suppress(FileNotFoundError):
                if read_below(folder, path, limit=_COMPILED) == body:
                    continue
            write_below(folder, path, body, mode=0o755)
        except (OSError, OutsideError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise HostError(
                f"{path} cannot be written into the tree: {why}", where=str(folder), hint="name a tree of your own"
            ) from None
        changed.append(path)
    return changed

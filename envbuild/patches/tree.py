"""What patches are to a tree: which of its files are before them, which after, and what they become."""

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from envbuild.errors import DataError, EnvbuildError, PatchError
from envbuild.patches.manifest import FILE_LIMIT, Patch, PatchedFile, blob_id, in_order
from envbuild.util.below import OutsideError, open_below, read_below
from envbuild.util.git import empty_repository, head_of, object_kind, objects_of, run_git
from envbuild.util.names import shown
from envbuild.util.scratch import scratch


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """One file of a patch in a tree: the blob id found, or None where there is no file to read."""

    path: str
    found: str | None
    pre: str
    post: str


@dataclass(frozen=True, kw_only=True)
class PatchReport:
    """What a patch is to a tree.

    `applies`: every file has its pre-image. `applied`: every file has its post-image, or that of a later patch on it.
    `refused`: anything else, and `error` says what.
    """

    name: str
    target: str
    state: Literal["applies", "applied", "refused"]
    files: tuple[FileReport, ...]
    error: PatchError | None = None

    def as_json(self) -> dict[str, object]:
        """Return the report as the object that `--json` prints."""
        files = [{"path": f.path, "found": f.found, "pre": f.pre, "post": f.post} for f in self.files]
        error = {"error": self.error.as_json()} if self.error else {}
        return {"name": self.name, "target": self.target, "state": self.state, "files": files, **error}


@dataclass(frozen=True, kw_only=True)
class Found:
    """A file of a tree as it was read."""

    content: bytes
    mode: int


def examine(
    tree: Path, patches: Iterable[Patch], *, undo: bool = False
) -> tuple[tuple[PatchReport, ...], dict[str, Found], dict[str, bytes]]:
    """Return the reports, the files as read, and the new content of those that applying changes, or undoing does.

    Raises:
        PatchError: `tree` is no folder.
        DataError: the patches contradict each other or their own ids.
        HostError: git is not here.

    """
    if not tree.is_dir():
        raise PatchError("the tree to patch is not a folder", where=str(tree), hint="name the root of a checkout")
    root = tree.resolve()
    ordered = in_order(patches)
    if undo:
        ordered.reverse()
    read: dict[str, Found] = {}
    unreadable: dict[str, PatchError] = {}
    for path in sorted({file.path for patch in ordered for file in patch.files}):
        try:
            read[path] = _read(root, path)
        except PatchError as error:
            unreadable[path] = error
    # one patched tree per target: a fork's patch must not be judged on what the original's made of a file
    content = {patch.target: {path: found.content for path, found in read.items()} for patch in ordered}
    changed: dict[str, bytes] = {}
    reports = []
    for index, patch in enumerate(ordered):
        behind = [later for later in ordered[index + 1 :] if later.target == patch.target]
        report = _judge(root, patch, content[patch.target], unreadable, behind, undo=undo)
        reports.append(report)
        if report.state == ("applied" if undo else "applies"):
            new = patched(patch, content[patch.target], undo=undo)
            content[patch.target] |= new
            changed |= new
    return tuple(reports), read, changed


def patched(patch: Patch, content: Mapping[str, bytes], *, undo: bool = False) -> dict[str, bytes]:
    """Return what the patch makes of its files' pre-images, or with `undo` of their post-images, verified by blob id.

    git works on copies, in a separate folder and with a separate repository.

    Raises:
        DataError: the diff does not turn the one stated image into the other.
        HostError: git is not here.

    """
    result = {}
    with scratch("patch") as own, empty_repository() as repository:
        stage = own / "tree"
        stage.mkdir()
        for file in patch.files:
            with os.fdopen(open_below(stage, file.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, make=True), "wb") as copy:
                copy.write(content[file.path])
        options = ["--whitespace=nowarn", *(["--reverse"] if undo else [])]
        ran = run_git(repository, "apply", *options, stdin=patch.diff, work_tree=stage, limit_s=300)
        if ran.code:
            raise DataError(
                f"the diff of patch {patch.name} does not apply: {shown(' '.join(ran.stderr.split()))}",
                where=patch.filename,
            )
        for file in patch.files:
            new, stated = read_below(stage, file.path, limit=FILE_LIMIT), file.pre if undo else file.post
            if blob_id(new) != stated:
                makes = f"undoing patch {patch.name}" if undo else f"patch {patch.name}"
                raise DataError(
                    f"{makes} makes blob {blob_id(new)} of {file.path}, its manifest states {stated}",
                    where=patch.filename,
                )
            result[file.path] = new
    return result


def _judge(
    root: Path,
    patch: Patch,
    content: Mapping[str, bytes],
    unreadable: Mapping[str, PatchError],
    behind: list[Patch],
    *,
    undo: bool,
) -> PatchReport:
    found = {f.path: blob_id(content[f.path]) if f.path in content else None for f in patch.files}
    files = tuple(FileReport(path=f.path, found=found[f.path], pre=f.pre, post=f.post) for f in patch.files)

    def report(state: Literal["applies", "applied", "refused"], error: PatchError | None = None) -> PatchReport:
        return PatchReport(name=patch.name, target=patch.target, state=state, files=files, error=error)

    before, after = [], []
    for file in patch.files:
        if file.path in unreadable:
            error = unreadable[file.path]
            return report(
                "refused", PatchError(f"patch {patch.name}: {error.what}", where=error.where, hint=error.hint)
            )
        # what comes behind in this direction may have been done already
        done = {f.pre if undo else f.post for later in behind for f in later.files if f.path == file.path}
        if found[file.path] == file.pre or (undo and found[file.path] in done):
            before.append(file.path)
        elif found[file.path] == file.post or found[file.path] in done:
            after.append(file.path)
        else:
            return report("refused", _other_image(root, patch, file, content[file.path]))
    if before and after:
        return report(
            "refused",
            PatchError(
                f"patch {patch.name} is in {', '.join(after)} already but not in {', '.join(before)}",
                where=str(root),
                hint=f"restore the files of {patch.revisions[0]}{'' if undo else ' and apply the patch again'}",
            ),
        )
    return report("applies" if before else "applied")


def _other_image(root: Path, patch: Patch, file: PatchedFile, content: bytes) -> PatchError:
    found = blob_id(content)
    known = {file.pre: "before", file.post: "after"}
    without_cr = blob_id(content.replace(b"\r\n", b"\n"))
    what = (
        f"patch {patch.name}: {file.path} has blob {found}, expected {file.pre} (before) or {file.post} (after); "
        f"the patch knows {patch.known()}"
    )
    if without_cr in known:
        return PatchError(
            f"{what}; it is the file of {known[without_cr]} the patch, with CRLF line ends",
            where=str(root / file.path),
            hint="check the tree out again with git -c core.autocrlf=false",
        )
    head = _head_blob(root, file.path)
    if head is not None and head != found:
        of = f", which is the file {known[head]} the patch" if head in known else ""
        return PatchError(
            f"{what}; the file is modified: HEAD has {head}{of}",
            where=str(root / file.path),
            hint=f"keep your change elsewhere, then git restore {file.path}",
        )
    return PatchError(
        what,
        where=str(root / file.path),
        hint=f"check out {patch.revisions[0]} of {patch.repo}, or leave the patch out",
    )


def _head_blob(root: Path, path: str) -> str | None:
    """Return the blob that HEAD has at `path`, or None where the tree is no checkout or git cannot say.

    The tree is not trusted, and its configuration may name programs. So git does not run in it: HEAD is read as a file,
    and its objects by a separate repository.
    """
    commit, objects = head_of(root), objects_of(root)
    if commit is None or objects is None:
        return None
    try:
        with empty_repository() as ours:
            found = object_kind(ours, f"{commit}:{path}", borrowed=(objects,), limit_s=30)
    except (EnvbuildError, OSError):
        return None
    return found[0] if found else None


def _read(root: Path, path: str) -> Found:
    """Read a file that lies in the tree itself, not behind a link."""
    place = root
    for part in PurePosixPath(path).parts:
        place /= part
        if place.is_symlink():
            to = os.path.realpath(place)
            out = "" if Path(to).is_relative_to(root) else ", out of the tree"
            raise PatchError(
                f"{place.relative_to(root)} is a symbolic link to {shown(to)}{out}",
                where=str(root / path),
                hint="patches change only files that lie in the tree themselves: put a copy there",
            )
    try:
        status = place.stat()
        if not stat.S_ISREG(status.st_mode):
            raise PatchError(f"{path} is no file", where=str(place))
        return Found(content=read_below(root, path, limit=FILE_LIMIT), mode=stat.S_IMODE(status.st_mode))
    except OutsideError as error:
        raise PatchError(f"{path} cannot be patched: {error}", where=str(place)) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise PatchError(f"{path} is missing", where=str(place), hint="name the root of the repository") from error
    except OSError as error:
        raise PatchError(f"{path} cannot be read: {error.strerror}", where=str(place)) from error

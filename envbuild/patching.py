"""The patches: loading their manifests, checking a tree against them, applying them to it or to none of it.

A patch fits a tree when every file that it touches has the git blob id that its manifest states, and it has worked when
every file has the stated id afterwards. Nothing else decides: not an exit status, not a tag's name, no fuzz, no offset.
"""

import fcntl
import hashlib
import os
import re
import shlex
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from envbuild.errors import DataError, EnvbuildError, PatchError, UsageError
from envbuild.paths import data_dir
from envbuild.util.below import OutsideError, read_below
from envbuild.util.bounded import read_file
from envbuild.util.git import empty_repository, head_of, object_kind, objects_of
from envbuild.util.names import shown
from envbuild.util.toml import read_toml

Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
ObjectId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,99}$")]
# no quoting is needed for such a path anywhere: in a diff's header, in a shell, on any file system
TreePath = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)*$")]

_FILE_LIMIT = 2**26  # bytes; a file that a patch changes is source text


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Revision(_Data):
    """A revision of the target that holds the pre-images."""

    name: Text
    commit: ObjectId

    def __str__(self) -> str:
        return f"{self.name} ({self.commit[:8]})"


class PatchedFile(_Data):
    """One file of a patch, with its git blob ids before and after."""

    path: TreePath
    pre: ObjectId
    post: ObjectId


class Upstream(_Data):
    """How to tell, in the newest upstream, whether the patch is still needed there.

    Exactly one of `fixed_when_present` and `fixed_when_absent` is a piece of text to look for in `path`. `state` is what
    was seen at the commit `seen`; a check reports a change from it.
    """

    ref: Text
    path: TreePath
    fixed_when_present: Text | None = None
    fixed_when_absent: Text | None = None
    state: Literal["needed", "fixed", "gone"]
    seen: ObjectId

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if (self.fixed_when_present is None) == (self.fixed_when_absent is None):
            raise ValueError("give one of fixed_when_present and fixed_when_absent")
        return self


class PatchEntry(_Data):
    """A `[[patch]]` table of a manifest; the diff lies beside it as `NAME.patch`."""

    name: Name
    revisions: tuple[Revision, ...] = Field(min_length=1)
    files: tuple[PatchedFile, ...] = Field(min_length=1)
    after: tuple[Name, ...] = ()
    """Patches of the same target that come first, because they change a file that this one changes too."""
    what: Text
    why: Text
    issue: Text
    """The upstream issue or change, as an address, or a sentence that says that there is none."""
    proof: Text
    expires: Text
    """When the patch may go."""
    stacks: tuple[Name, ...]
    upstream: Upstream

    @field_validator("files")
    @classmethod
    def _distinct(cls, files: tuple[PatchedFile, ...]) -> tuple[PatchedFile, ...]:
        if len({file.path for file in files}) != len(files):
            raise ValueError("a file is named twice")
        if any(file.pre == file.post for file in files):
            raise ValueError("a file's pre and post are the same")
        return files


class _Manifest(_Data):
    target: Name
    repo: Annotated[str, StringConstraints(pattern=r"^https://[^\s]+$")]
    patch: tuple[PatchEntry, ...] = Field(min_length=1)


class Patch(PatchEntry):
    """A patch of one target repository, with its diff."""

    target: Name
    repo: str
    diff: bytes = Field(repr=False)

    @property
    def filename(self) -> str:
        """The diff's place below the patches folder: `TARGET/NAME.patch`."""
        return f"{self.target}/{self.name}.patch"

    @cached_property
    def hunks(self) -> Mapping[str, tuple["Hunk", ...]]:
        """The diff's hunks by path."""
        return parse_diff(self.diff, where=self.filename)

    @cached_property
    def digest(self) -> str:
        """A SHA-256 over all that decides what the patch does to a tree: its diff and its blob ids."""
        ids = "".join(f"{file.path} {file.pre} {file.post}\n" for file in sorted(self.files, key=lambda f: f.path))
        return hashlib.sha256(ids.encode() + b"\0" + self.diff).hexdigest()

    def known(self) -> str:
        """The revisions that the patch knows, as a phrase."""
        return ", ".join(map(str, self.revisions))


def blob_id(content: bytes) -> str:
    """Return the id that git gives a blob of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


# -- loading ----------------------------------------------------------------------------------------------------------


def load_patches(root: Path | None = None) -> dict[str, Patch]:
    """Load every manifest below `root` (envbuild's own patches by default) and return its patches by name.

    Raises:
        DataError: a manifest does not load, or contradicts its diff, another manifest or itself.

    """
    return dict(_shipped()) if root is None else _load(root)


@cache
def _shipped() -> dict[str, Patch]:
    return _load(data_dir("patches"))


def _load(root: Path) -> dict[str, Patch]:
    patches: dict[str, Patch] = {}
    for path in sorted(root.glob("*/manifest.toml")):
        for patch in _load_manifest(path):
            if patch.name in patches:
                raise DataError(f"two patches are named {patch.name}", where=str(path), hint="give one another name")
            patches[patch.name] = patch
    for patch in patches.values():
        for name in patch.after:
            if name not in patches or patches[name].target != patch.target:
                raise DataError(
                    f"patch {patch.name} comes after {name!r}, which is no patch of {patch.target}",
                    where=patch.filename,
                )
    for repo in {patch.repo for patch in patches.values()}:
        in_order([patch for patch in patches.values() if patch.repo == repo])
    return patches


def _load_manifest(path: Path) -> list[Patch]:
    try:
        manifest = _Manifest.model_validate(read_toml(path))
    except ValidationError as error:
        # a misspelt key is two errors, and the other one says only that its right spelling is missing
        errors = error.errors(include_url=False, include_input=False)
        first = min(errors, key=lambda each: each["type"] != "extra_forbidden")
        key = ".".join(shown(str(part), 60) for part in first["loc"])
        problem = f"unknown key {key}" if first["type"] == "extra_forbidden" else f"{key}: {first['msg']}"
        raise DataError(
            f"the patch manifest does not load: {problem}",
            where=f"{path}: {key}",
            hint="docs/patches.md lists the keys",
        ) from error
    if manifest.target != path.parent.name:
        raise DataError(f"target is {manifest.target!r}, its folder {path.parent.name!r}", where=f"{path}: target")
    patches = []
    for entry in manifest.patch:
        file = path.with_name(f"{entry.name}.patch")
        if not file.is_file():
            raise DataError(f"patch {entry.name} has no diff", where=str(file), hint="write it, or drop the entry")
        try:
            head = {"target": manifest.target, "repo": manifest.repo, "diff": read_file(file)}
        except OSError as error:
            raise DataError(
                f"the diff of patch {entry.name} cannot be read: {error.strerror}", where=str(file)
            ) from None
        patch = Patch.model_validate({**dict(entry), **head})
        touched = set(patch.hunks)
        if touched != {f.path for f in patch.files}:
            odd = ", ".join(sorted(touched ^ {f.path for f in patch.files}))
            raise DataError(f"patch {entry.name}: manifest and diff do not name the same files: {odd}", where=str(path))
        patches.append(patch)
    stray = {file.stem for file in path.parent.glob("*.patch")} - {entry.name for entry in manifest.patch}
    if stray:
        raise DataError(f"{', '.join(sorted(stray))}.patch is in no entry of the manifest", where=str(path))
    return patches


def in_order(patches: Iterable[Patch]) -> list[Patch]:
    """Return patches in the order to apply them in: each behind those that its `after` names, else by name.

    Raises:
        DataError: two patches change one file of one revision and the manifest does not chain them, or `after` goes
            round in a circle.

    """
    waiting = sorted(patches, key=lambda patch: (patch.target, patch.name))
    names = {(patch.target, patch.name) for patch in waiting}
    ordered: list[Patch] = []
    done: set[tuple[str, str]] = set()
    while waiting:
        ready = [p for p in waiting if all((p.target, a) in done or (p.target, a) not in names for a in p.after)]
        if not ready:
            circle = ", ".join(patch.name for patch in waiting)
            raise DataError(f"the patches {circle} each come after the other", where=f"{waiting[0].target}: after")
        ordered.append(ready[0])
        done.add((ready[0].target, ready[0].name))
        waiting.remove(ready[0])
    last: dict[tuple[str, str], list[Patch]] = {}
    for patch in ordered:
        for file in patch.files:
            before = last.setdefault((patch.repo, file.path), [])
            for earlier in reversed(before):
                if {r.commit for r in earlier.revisions} & {r.commit for r in patch.revisions}:
                    _check_chained(earlier, patch, file)
                    break
            before.append(patch)
    return ordered


def _check_chained(earlier: Patch, later: Patch, file: PatchedFile) -> None:
    post = next(f.post for f in earlier.files if f.path == file.path)
    if earlier.name not in later.after:
        raise DataError(
            f"the patches {earlier.name} and {later.name} both change {file.path}",
            where=later.filename,
            hint=f'make one patch of them, or chain them: after = ["{earlier.name}"] and pre = "{post}" in {later.name}',
        )
    if file.pre != post:
        raise DataError(
            f"patch {later.name} comes after {earlier.name}, which makes blob {post} of {file.path}, but states {file.pre}",
            where=later.filename,
        )


def select(patches: Mapping[str, Patch], names: Sequence[str]) -> list[Patch]:
    """Return the named patches.

    Raises:
        UsageError: there is no patch of that name.

    """
    for name in names:
        if name not in patches:
            raise UsageError(
                f"there is no patch {name!r}", where="--patch", hint=f"the patches are {', '.join(patches)}"
            )
    return [patches[name] for name in dict.fromkeys(names)]


def of_tree(tree: Path, patches: Iterable[Patch]) -> list[Patch]:
    """Return the patches of the target that the tree is a checkout of, recognised by its files.

    A target counts when one of its files has a known blob id or, where none has, when all files of one of its patches are
    there, and most files of all such targets: the tree is then another revision, which a check refuses by name.

    Raises:
        PatchError: the tree is no folder, or none of the targets.

    """
    patches = list(patches)
    known, named = set(), set()
    reports = check(tree, patches)
    for report in reports:
        if any(file.found in {file.pre, file.post} for file in report.files):
            known.add(report.target)
        if all(file.found for file in report.files):
            named.add(report.target)
    targets = known or named
    if len(targets) > 1 and not known:
        # other trees have files of these names, too: the one that most files speak for
        speaking = {t: len({f.path for r in reports if r.target == t for f in r.files if f.found}) for t in targets}
        targets = {max(sorted(targets), key=speaking.__getitem__)}
    if not targets:
        # a file of theirs that is there and cannot be taken, a link for example, says more
        for report in reports:
            if report.error is not None and any(os.path.lexists(tree / file.path) for file in report.files):
                raise report.error
        raise PatchError(
            "no patch is for this tree",
            where=str(tree),
            hint=f"name the root of a checkout of {', '.join(sorted({p.repo for p in patches}))}",
        )
    return [patch for patch in patches if patch.target in targets]


# -- unified diffs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hunk:
    """One hunk: from line `start` (0-based) of the old file, the lines `old` become the lines `new`."""

    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")


def parse_diff(diff: bytes, *, where: str) -> dict[str, tuple[Hunk, ...]]:
    """Parse a unified diff that changes existing text files, with git's `a/` and `b/` before the paths.

    Raises:
        DataError: it is anything else: a new, deleted, renamed or binary file, or a hunk whose counts are wrong.

    """
    lines = diff.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    files: dict[str, list[Hunk]] = {}
    hunks: list[Hunk] | None = None
    at = 0

    def bad(problem: str) -> DataError:
        return DataError(f"the diff does not parse: {problem}", where=f"{where}:{at + 1}")

    while at < len(lines):
        line = lines[at]
        if line.startswith(b"--- "):
            if not line.startswith(b"--- a/") or at + 1 == len(lines) or lines[at + 1] != b"+++ b/" + line[6:]:
                raise bad("it must change a file in place (--- a/PATH, then +++ b/PATH)")
            path = line[6:].decode("utf-8", "replace")
            if path in files:
                raise bad(f"{path} comes twice")
            hunks = files.setdefault(path, [])
            at += 2
        elif match := _HUNK.match(line):
            if hunks is None:
                raise bad("a hunk comes before any file")
            start, old_count, new_count = int(match[1]), int(match[2] or 1), int(match[4] or 1)
            at += 1
            old: list[bytes] = []
            new: list[bytes] = []
            while at < len(lines) and (len(old) < old_count or len(new) < new_count):
                kind, text = lines[at][:1], lines[at][1:] + b"\n"
                if kind in {b" ", b"-"}:
                    old.append(text)
                if kind in {b" ", b"+"}:
                    new.append(text)
                if kind not in {b" ", b"-", b"+"}:
                    raise bad("a hunk's line starts with neither a blank, + nor -")
                at += 1
                if at < len(lines) and lines[at].startswith(b"\\"):  # no newline at the end of the file
                    if kind in {b" ", b"-"}:
                        old[-1] = text[:-1]
                    if kind in {b" ", b"+"}:
                        new[-1] = text[:-1]
                    at += 1
            if (len(old), len(new)) != (old_count, new_count):
                raise bad("a hunk has not the number of lines that its head states")
            # a hunk without old lines names the line that it goes behind
            hunks.append(Hunk(start=start - 1 if old_count else start, old=tuple(old), new=tuple(new)))
        elif line.startswith((b"diff --git ", b"index ")):
            hunks = None
            at += 1
        else:
            raise bad(f"unexpected {line[:40].decode('utf-8', 'replace')!r}")
    if not files or not all(files.values()):
        raise DataError("the diff changes nothing", where=where)
    return {path: tuple(found) for path, found in files.items()}


def apply_hunks(content: bytes, hunks: Iterable[Hunk], *, where: str) -> bytes:
    """Apply hunks at exactly the lines they name, with exactly the lines they hold.

    Raises:
        DataError: a hunk does not fit there.

    """
    lines = re.findall(rb"[^\n]*\n|[^\n]+", content)  # splitlines() would also split at a lone carriage return
    result: list[bytes] = []
    at = 0
    for hunk in hunks:
        end = hunk.start + len(hunk.old)
        if hunk.start < at or tuple(lines[hunk.start : end]) != hunk.old:
            raise DataError(f"a hunk does not fit at line {hunk.start + 1}", where=where)
        result += [*lines[at : hunk.start], *hunk.new]
        at = end
    return b"".join([*result, *lines[at:]])


# -- a tree -----------------------------------------------------------------------------------------------------------


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
class _Read:
    content: bytes
    mode: int


def check(tree: Path, patches: Iterable[Patch]) -> tuple[PatchReport, ...]:
    """Say of each patch, in the order they apply in, whether it fits the tree, is in it already, or is refused.

    A patch behind another on the same file is judged on what the other one makes of that file.

    Raises:
        PatchError: `tree` is no folder.
        DataError: the patches contradict each other or their own ids.

    """
    return _plan(tree, patches)[0]


def _plan(tree: Path, patches: Iterable[Patch]) -> tuple[tuple[PatchReport, ...], dict[str, _Read], dict[str, bytes]]:
    """Return the reports, the files as read, and the new content of those that change."""
    if not tree.is_dir():
        raise PatchError("the tree to patch is no folder", where=str(tree), hint="name the root of a checkout")
    root = tree.resolve()
    ordered = in_order(patches)
    read: dict[str, _Read] = {}
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
        report = _judge(root, patch, content[patch.target], unreadable, behind)
        reports.append(report)
        if report.state == "applies":
            new = patched(patch, content[patch.target])
            content[patch.target] |= new
            changed |= new
    return tuple(reports), read, changed


def patched(patch: Patch, content: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return what the patch makes of its files' pre-images, verified by blob id.

    Raises:
        DataError: the diff does not turn the stated pre-image into the stated post-image.

    """
    result = {}
    for file in patch.files:
        new = apply_hunks(content[file.path], patch.hunks[file.path], where=f"{patch.filename}: {file.path}")
        if blob_id(new) != file.post:
            raise DataError(
                f"patch {patch.name} makes blob {blob_id(new)} of {file.path}, its manifest states {file.post}",
                where=patch.filename,
            )
        result[file.path] = new
    return result


def _judge(
    root: Path, patch: Patch, content: Mapping[str, bytes], unreadable: Mapping[str, PatchError], behind: list[Patch]
) -> PatchReport:
    found = {f.path: blob_id(content[f.path]) if f.path in content else None for f in patch.files}
    files = tuple(FileReport(path=f.path, found=found[f.path], pre=f.pre, post=f.post) for f in patch.files)

    def report(state: Literal["applies", "applied", "refused"], error: PatchError | None = None) -> PatchReport:
        return PatchReport(name=patch.name, target=patch.target, state=state, files=files, error=error)

    before, done = [], []
    for file in patch.files:
        if file.path in unreadable:
            error = unreadable[file.path]
            return report(
                "refused", PatchError(f"patch {patch.name}: {error.what}", where=error.where, hint=error.hint)
            )
        posts = {file.post} | {f.post for later in behind for f in later.files if f.path == file.path}
        if found[file.path] == file.pre:
            before.append(file.path)
        elif found[file.path] in posts:
            done.append(file.path)
        else:
            return report("refused", _other_image(root, patch, file, content[file.path]))
    if before and done:
        return report(
            "refused",
            PatchError(
                f"patch {patch.name} is in {', '.join(done)} already but not in {', '.join(before)}",
                where=str(root),
                hint=f"restore the files of {patch.revisions[0]} and apply the patch again",
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

    The tree may be anybody's, and its configuration may name programs. So git does not run in it: HEAD is read as a file,
    and its objects by a repository of ours.
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


def _read(root: Path, path: str) -> _Read:
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
        return _Read(content=read_below(root, path, limit=_FILE_LIMIT), mode=stat.S_IMODE(status.st_mode))
    except OutsideError as error:
        raise PatchError(f"{path} cannot be patched: {error}", where=str(place)) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise PatchError(
            f"{path} is missing", where=str(place), hint="name the root of the repository, as its revision has it"
        ) from error
    except OSError as error:
        raise PatchError(f"{path} cannot be read: {error.strerror}", where=str(place)) from error


def apply(tree: Path, patches: Iterable[Patch]) -> tuple[PatchReport, ...]:
    """Apply every patch to the tree, or none of them.

    All files are verified and all new contents computed before the first is written. Each is then replaced by renaming,
    with its mode kept; when that fails or is interrupted half way, what was replaced is put back. Two calls on one tree wait
    for each other, where its file system has locks.

    Returns:
        The reports of before: `applies` means that the patch is in the tree now, `applied` that it was already.

    Raises:
        PatchError: a patch is refused, or the tree cannot be written; the tree is as it was.
        UsageError: the patches are of more than one target.
        DataError: the patches contradict each other or their own ids.

    """
    patches = list(patches)
    targets = sorted({patch.target for patch in patches})
    if len(targets) > 1:
        raise UsageError(
            f"a tree takes the patches of one target, not of {', '.join(targets)}",
            where="--patch",
            hint="name the patches of one",
        )
    with _alone(tree):
        reports, read, changed = _plan(tree, patches)
        for report in reports:
            if report.error is not None:
                raise report.error
        _replace(tree.resolve(), {path: read[path] for path in changed}, changed)
    return reports


@contextmanager
def _alone(tree: Path) -> Iterator[None]:
    """Keep other calls on this tree waiting; a tree that cannot be opened or locked is left to what comes next."""
    handle = None
    with suppress(OSError):
        handle = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _replace(root: Path, old: Mapping[str, _Read], new: Mapping[str, bytes]) -> None:
    staged: dict[str, Path] = {}
    backup: dict[str, Path] = {}
    begun: list[str] = []
    try:
        for path, content in new.items():
            staged[path] = _stage(root / path, content, old[path].mode)
            backup[path] = _stage(root / path, old[path].content, old[path].mode)
        for path in new:
            begun.append(path)  # before, since an interrupt may come as soon as it is renamed
            _swap(staged[path], root / path, old[path].content)
    except BaseException as error:
        left = [path for path in begun if not _put_back(backup[path], root / path, new[path])]
        if left:
            raise PatchError(
                f"the tree cannot be written, and {', '.join(left)} could not be put back", where=str(root)
            ) from error
        if isinstance(error, OSError):
            raise PatchError(
                f"the tree cannot be written: {error.strerror}; it is as it was",
                where=str(error.filename or root),
                hint="patch a copy that you may write to",
            ) from error
        raise
    finally:
        for place in (*staged.values(), *backup.values()):
            place.unlink(missing_ok=True)


def _swap(staged: Path, place: Path, old: bytes) -> None:
    if place.read_bytes() != old:
        raise PatchError(f"{place.name} changed while it was patched", where=str(place), hint="patch again")
    staged.replace(place)


def _put_back(backup: Path, place: Path, written: bytes) -> bool:
    """Put a file back where it is what was written, and return whether it is not any more."""
    try:
        if place.read_bytes() == written:
            backup.replace(place)
    except OSError:
        return False
    return True


def _stage(place: Path, content: bytes, mode: int) -> Path:
    """Write `content` beside `place`, ready to be renamed to it."""
    for what in (place, place.parent):
        # root may write to what is marked read-only, but the mark says that nobody should
        if not what.stat().st_mode & 0o222:
            raise PatchError(f"{what.name} is read-only", where=str(what), hint="patch a copy that you may write to")
    status = place.stat()
    handle, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        staged = Path(name)
        staged.chmod(mode)
        if (os.geteuid(), os.getegid()) != (status.st_uid, status.st_gid):
            with suppress(PermissionError):
                os.chown(name, status.st_uid, status.st_gid)
    except BaseException:
        Path(name).unlink()
        raise
    return staged


# -- inside a build ---------------------------------------------------------------------------------------------------

# The stage that patches a source has git and no envbuild. The files are patched as copies in a folder of their own, so
# that git sees no repository, no attributes and nobody's configuration, and the tree changes only once every id is right.
_SCRIPT_HEAD = r"""(
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_DEFAULT_HASH CDPATH
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null HOME=/nonexistent XDG_CONFIG_HOME=/nonexistent LC_ALL=C
fail() { printf 'envbuild: error: %s\n' "$1" >&2; exit 4; }
tree=$(pwd -P)
[ -d "${PATCHES:-}" ] || fail 'PATCHES names no folder'
command -v git >/dev/null || fail 'git is missing'
patches=$(cd "$PATCHES" && pwd -P)
stage=$(mktemp -d) && stage=$(cd "$stage" && pwd -P) || fail 'no place for temporary files'
trap 'rm -rf "$stage"' EXIT
export GIT_CEILING_DIRECTORIES="$stage"
mkdir "$stage/new" "$stage/old" && cd "$stage/new" || fail 'no place for temporary files'
changed=
blob() { git hash-object --no-filters --stdin < "$1"; }
take() {
  folder=$(dirname "$1")
  [ -e "$tree/$1" ] || [ -L "$tree/$1" ] || fail "$1 is missing in $tree"
  place=$tree
  [ "$folder" = . ] || place=${tree%/}/$folder
  [ ! -L "$tree/$1" ] && [ "$(cd "$tree/$folder" && pwd -P)" = "$place" ] || fail "$1 is or lies behind a symbolic link in $tree"
  [ -f "$tree/$1" ] || fail "$1 is no file in $tree"
  mkdir -p "./$folder" "../old/$folder" && cat "$tree/$1" > "./$1" && cp "./$1" "../old/$1" || fail "$1 cannot be read in $tree"
}
begin() { patch=$1 file=$2 known=$3 before='' after=''; }
image() {
  found=$(blob "./$1") || fail "git cannot hash $1"
  if [ "$found" = "$2" ]; then before="$before $1"; return; fi
  case " $3 $4 " in *" $found "*) after="$after $1"; return;; esac
  why=
  bare=$(tr -d '\r' < "./$1" | git hash-object --no-filters --stdin)
  case " $2 $3 " in *" $bare "*) why='; it is that file with CRLF line ends';; esac
  fail "patch $patch: $1 has blob $found, expected $2 (before) or $3 (after); the patch knows $known$why"
}
change() {
  if [ -z "$before" ]; then echo "patch $patch: already applied"; return 1; fi
  [ -z "$after" ] || fail "patch $patch is in$after already but not in$before"
  git apply --whitespace=nowarn "$patches/$file" || fail "patch $patch: $patches/$file does not apply"
}
became() {
  found=$(blob "./$1")
  [ "$found" = "$2" ] || fail "patch $patch makes blob $found of $1, its manifest states $2"
  changed="$changed $1"
}
"""

_SCRIPT_TAIL = r"""for path in $changed; do
  cp -p "$tree/$path" "$tree/$path.envbuild" && cat "./$path" > "$tree/$path.envbuild" || {
    for undo in $changed; do rm -f "$tree/$undo.envbuild"; done
    fail "$path cannot be written in $tree"
  }
done
for path in $changed; do
  [ ! -e "$tree/$path.envbuild" ] || mv -f "$tree/$path.envbuild" "$tree/$path" || {
    for undo in $changed; do cat "../old/$undo" > "$tree/$undo"; rm -f "$tree/$undo.envbuild"; done
    fail "$path cannot be replaced in $tree"
  }
done
) || exit $?
"""


def apply_script(patches: Iterable[Patch]) -> str:
    """Return POSIX shell that applies the patches to the tree in the current folder, for a stage that has git.

    It finds the diffs at `$PATCHES/TARGET/NAME.patch`, verifies every blob id before and after, says so and changes
    nothing where a patch is in already, and exits with 4 and one message, the tree untouched, where one is refused. The
    tree need not be a git checkout.

    Raises:
        DataError: the patches contradict each other.

    """
    ordered = in_order(patches)
    if not ordered:
        return ""
    lines = [f"take {path}" for path in sorted({file.path for patch in ordered for file in patch.files})]
    for index, patch in enumerate(ordered):
        behind = [later for later in ordered[index + 1 :] if later.target == patch.target]
        lines.append(f"begin {patch.name} {patch.filename} {shlex.quote(patch.known())}")
        for file in patch.files:
            posts = " ".join(f.post for later in behind for f in later.files if f.path == file.path)
            lines.append(f"image {file.path} {file.pre} {file.post} '{posts}'")
        became = "; ".join(f"became {file.path} {file.post}" for file in patch.files)
        lines.append(f"if change; then {became}; echo 'patch {patch.name}: applied'; fi")
    return _SCRIPT_HEAD + "\n".join(lines) + "\n" + _SCRIPT_TAIL


# -- upstream ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UpstreamReport:
    """Whether the newest upstream still needs a patch, and what was last known of that."""

    name: str
    path: str
    state: Literal["needed", "fixed", "gone"]
    known: Literal["needed", "fixed", "gone"]
    text: str


def check_upstream(tree: Path, patches: Iterable[Patch]) -> tuple[UpstreamReport, ...]:
    """Say of each patch whether the upstream in `tree` still needs it; such a tree need hold only the file looked at.

    Raises:
        PatchError: `tree` is no folder, or the file cannot be read.

    """
    if not tree.is_dir():
        raise PatchError("the upstream tree is no folder", where=str(tree))
    reports = []
    for patch in patches:
        rule = patch.upstream
        sign = rule.fixed_when_present or rule.fixed_when_absent
        state: Literal["needed", "fixed", "gone"]
        try:
            present = str(sign).encode() in read_below(tree, rule.path, limit=_FILE_LIMIT)
        except OutsideError as error:
            raise PatchError(f"{rule.path} cannot be read: {error}", where=str(tree / rule.path)) from error
        except (FileNotFoundError, NotADirectoryError):
            state, text = "gone", f"{rule.ref} has no {rule.path} any more"
        except OSError as error:
            raise PatchError(f"{rule.path} cannot be read: {error.strerror}", where=str(tree / rule.path)) from error
        else:
            state = "fixed" if present == (rule.fixed_when_present is not None) else "needed"
            text = f"{rule.ref}'s {rule.path} {'has' if present else 'does not have'} {sign!r}"
        reports.append(UpstreamReport(name=patch.name, path=rule.path, state=state, known=rule.state, text=text))
    return tuple(reports)

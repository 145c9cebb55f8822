"""The patches' manifests: loading them, and the order that patches apply in."""

import hashlib
import heapq
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from envbuild.errors import DataError, UsageError
from envbuild.patches.diff import paths_of
from envbuild.paths import data_dir
from envbuild.util.bounded import read_file
from envbuild.util.names import shown
from envbuild.util.toml import read_toml

Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
ObjectId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,99}$")]
# no quoting is needed for such a path anywhere: in a diff's header, in a shell, on any file system
TreePath = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)*$")]

FILE_LIMIT = 2**26
"""Bytes of a file that a patch changes, which is source text."""


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
    """How to find out, in the newest upstream, whether the patch is still needed there.

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
    """A `[[patch]]` table of a manifest; the diff is next to it as `NAME.patch`."""

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
                    f"patch {patch.name} comes after {name!r}, which is not a patch of {patch.target}",
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
            hint="docs/reference/patches.md lists the keys",
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
        touched = set(paths_of(patch.diff, where=patch.filename))
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
    given = {(patch.target, patch.name): patch for patch in patches}
    sorter = TopologicalSorter(
        {key: [(p.target, a) for a in p.after if (p.target, a) in given] for key, p in given.items()}
    )
    try:
        sorter.prepare()
    except CycleError as error:
        circle = sorted(set(error.args[1]))
        raise DataError(
            f"the patches {', '.join(name for _, name in circle)} each come after the other",
            where=f"{circle[0][0]}: after",
        ) from error
    ordered: list[Patch] = []
    ready: list[tuple[str, str]] = []
    while sorter.is_active():
        for key in sorter.get_ready():
            heapq.heappush(ready, key)
        first = heapq.heappop(ready)
        ordered.append(given[first])
        sorter.done(first)
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


def select(patches: Mapping[str, Patch], names: Sequence[str], *, flag: str = "--patch") -> list[Patch]:
    """Return the named patches; `flag` is what named them.

    Raises:
        UsageError: there is no patch of that name.

    """
    for name in names:
        if name not in patches:
            raise UsageError(f"there is no patch {name!r}", where=flag, hint=f"the patches are {', '.join(patches)}")
    return [patches[name] for name in dict.fromkeys(names)]

"""What a tree is next to the repository in an image: its commit, the stack's patches, what it asks for."""

import contextlib
from pathlib import Path

from envbuild.engine.image import Image
from envbuild.engine.podman import engine_of
from envbuild.errors import UsageError
from envbuild.lock.model import Lock
from envbuild.patches.apply import check
from envbuild.run.dev.requirements import Difference, differences
from envbuild.settings import Settings
from envbuild.stacks.model import Stack
from envbuild.stacks.parts import digest_of, patches_of
from envbuild.util.below import read_below
from envbuild.util.frozen import Frozen
from envbuild.util.git import head_of
from envbuild.util.names import Digest, checked
from envbuild.util.scratch import scratch

_LOCK_BYTES = 16 << 20
_MISSING = {"applies": "is not in the tree", "refused": "does not fit the tree"}


class State(Frozen):
    """What a tree is, compared with the repository that it is to replace."""

    tree: Path
    folder: Path
    """The part of the tree that is mounted."""
    stack: str
    commit: str | None
    """The commit that the tree is at, where that is known."""
    pinned: str
    """The commit of the image's repository."""
    changed_stack: bool
    """Whether the stack here is another than the one that the image was built from."""
    patches: tuple[tuple[str, str, str], ...]
    """Each patch of the stack: its name, `applied`, `applies` or `refused`, and why it is refused."""
    differences: tuple[Difference, ...]

    def notes(self) -> list[str]:
        """Return what the user should know, as sentences."""
        found = []
        if self.commit and self.commit != self.pinned:
            found.append(f"the tree is at {self.commit[:12]}, the image has {self.pinned[:12]}")
        if self.changed_stack:
            found.append(f"the image is of an earlier state of the stack {self.stack}")
        for name, state, why in self.patches:
            if state in _MISSING:
                do = f": {why}" if why else f": envbuild patch apply {self.tree} --patch {name}"
                found.append(f"patch {name} {_MISSING[state]}{do}")
        return found + [each.text() for each in self.differences]

    def as_json(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {
            "path": str(self.tree),
            "mounted": str(self.folder),
            "commit": self.commit,
            "pinned": self.pinned,
            "changed_stack": self.changed_stack,
            "patches": [{"name": name, "state": state, "why": why or None} for name, state, why in self.patches],
            "requirements": [each.as_json() for each in self.differences],
        }


def lock_of_image(settings: Settings, image: Image) -> Lock:
    """Return the lock that an image carries. It is kept by its digest, which the image's label states.

    Raises:
        HostError, UsageError, LockError: as `envbuild.engine.reproduce.carried_lock`.

    """
    label = image.labels.get("io.envbuild.lock", "")
    place = settings.cache_dir / "helpers" / f"{label.removeprefix('sha256:')}.lock"
    with contextlib.suppress(OSError, ValueError, RecursionError):
        checked(Digest, label)
        lock = Lock.model_validate_json(read_below(place.parent, place.name, limit=_LOCK_BYTES))
        if lock.digest == label:
            return lock
    from envbuild.engine.reproduce import carried_lock  # takes half a second, and is needed once per lock

    lock = carried_lock(engine_of(settings), image.id).lock
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with scratch("lock", place.parent) as new:
            (new / "lock").write_text(lock.model_dump_json(exclude_defaults=True), encoding="utf-8")
            (new / "lock").rename(place)
    return lock


def state_of(tree: Path, lock: Lock, stack: Stack) -> State:
    """Compare a tree with the repository that an image of `lock` holds.

    Raises:
        UsageError: the tree does not have the folder that the stack mounts.
        PatchError, DataError, HostError: the patches cannot be compared; see `envbuild.patches.apply.check`.

    """
    tree = tree.resolve()
    repository = stack.repository
    folder = tree / repository.subdirectory
    if not folder.is_dir():
        raise UsageError(
            f"the tree has no folder {repository.subdirectory}",
            where=str(tree),
            hint=f"name the root of a checkout of {repository.url}",
        )
    reports = check(tree, patches_of(stack)) if stack.patches else ()
    return State(
        tree=tree,
        folder=folder,
        stack=stack.name,
        commit=head_of(tree),
        pinned=repository.commit,
        changed_stack=lock.stack_digest != digest_of(stack),
        patches=tuple((each.name, each.state, each.error.what if each.error else "") for each in reports),
        differences=differences(folder, lock, stack),
    )

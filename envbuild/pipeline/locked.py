"""A cell's lock, found or made, and its inputs as far as this machine reaches them."""

from collections.abc import Callable, Collection
from pathlib import Path
from urllib.parse import urlsplit

from envbuild.engine.kept import kept_wheel
from envbuild.engine.shared_wheels import SharedWheels
from envbuild.errors import HostError, LockError
from envbuild.lock.files import Locked, write_lock
from envbuild.lock.find import find_lock, incomplete, own_lock, place_for
from envbuild.lock.inputs import Inputs
from envbuild.lock.make import current_os, make_lock
from envbuild.lock.model import Missing, os_packages
from envbuild.lock.sources import SourceStore
from envbuild.matrix.load import Matrix
from envbuild.plan.plan import Plan
from envbuild.settings import Settings
from envbuild.util.text import count_of

Note = Callable[[str], None]


def lock_for(
    settings: Settings,
    matrix: Matrix,
    inputs: Inputs,
    *,
    locked_only: bool,
    note: Note,
    replaced: Collection[str] = (),
    before_making: Callable[[], object] = lambda: None,
) -> tuple[Locked, Path]:
    """Return the lock of a cell: the one that exists, or a new one.

    Args:
        settings: where locks are kept, and how upstreams are reached.
        matrix: the matrix.
        inputs: what the cell is made of.
        locked_only: whether none may be made.
        note: takes a line about what is done next.
        replaced: stages that come from elsewhere; what only they would need may be missing in the lock.
        before_making: called before a lock is made, which takes minutes; what it raises is raised.

    Raises:
        LockError: with `locked_only`, when there is none or it is not complete.
        HostError: an input cannot be reached from here; the message names each, and what to supply.

    """
    found = find_lock(settings, inputs)
    if found is not None and not found[0].lock.still_missing(replaced):
        return found
    if locked_only:
        if found is not None:
            raise incomplete(found[0].lock.still_missing(replaced), str(found[1]))
        raise LockError(
            "this cell has no lock", where=inputs.cell.id, hint="`envbuild lock` with the same flags makes one"
        )
    before_making()
    note("no lock yet; pinning every input")
    locked = make_lock(settings, matrix, inputs, note=note)
    if missing := locked.lock.still_missing(replaced):
        raise UnreachableError(missing) if locked.unreached else incomplete(missing, inputs.cell.id)
    folder = place_for(own_lock(settings, inputs), locked.lock)
    write_lock(locked, folder)
    return locked, folder


def renewed(
    settings: Settings, matrix: Matrix, inputs: Inputs, locked: Locked, *, note: Note
) -> tuple[Locked, Path] | None:
    """Return the lock with today's OS packages when the archive no longer serves the pinned ones, or None when it does.

    A Debian suite keeps one version of a package: after a point release or a security update the pinned one is gone. Where
    the archive cannot be asked the lock stays as it is, and so does a build that the cache holds.
    """
    try:
        fresh = current_os(settings, matrix, inputs)
    except (HostError, LockError) as error:
        note(f"whether the archive still has the pinned OS packages is not known: {error.what.splitlines()[0]}")
        return None
    old, new = set(os_packages(locked.lock.root, locked.lock.os)), set(os_packages(fresh.root, fresh.os))
    if old == new:
        return None
    changed = sorted({p.name for p in new - old})
    note(
        f"the archive has newer versions: {count_of(len(changed), 'OS package is', 'OS packages are')} pinned again ({', '.join(changed[:4])}{', …' if len(changed) > 4 else ''})"
    )
    lock = locked.lock.model_copy(update={"os": fresh.os, "root": fresh.root})
    again = Locked(lock=lock, pylocks=locked.pylocks)
    folder = place_for(own_lock(settings, inputs), lock)
    write_lock(again, folder)
    return again, folder


class UnreachableError(HostError):
    """Inputs that this machine cannot reach, and how to supply each."""

    def __init__(self, missing: tuple[Missing, ...]) -> None:
        lines = "".join(f"\n  - {m.what}\n      held by {m.host}; {_supply(m)}" for m in missing)
        super().__init__(
            f"{count_of(len(missing), 'input')} of this cell cannot be had from here{lines}",
            hint="supply them as described, or build where these hosts can be reached; `envbuild render --unlocked` shows the build",
        )
        self.missing = missing


def require_sources(
    settings: Settings,
    plan: Plan,
    *,
    replaced: Collection[str] = (),
    note: Callable[[str], object] = lambda _: None,
    pull: bool = False,
) -> None:
    """Fetch every source tree that the build will compile into the cache.

    Args:
        settings: where clones and the cache are.
        plan: whose components it compiles.
        replaced: stages of the Dockerfile that come from elsewhere, such as `src-te`.
        note: takes a line about what was damaged in the cache.
        pull: whether the registry's wheel will do where a source cannot be reached.

    Raises:
        UnreachableError: neither the site's folder nor an upstream has one of them.
        LockError: one is not what the lock names.

    """
    store = SourceStore(settings=settings, note=note)
    missing = []
    for component in plan.components:
        source = next((s for s in plan.lock.sources if s.name == component.axis), None)
        if source is None or f"src-{source.name}" in replaced or kept_wheel(settings, plan, component.axis, replaced):
            continue
        try:
            store.checkout(source)
        except HostError as error:
            if pull and not replaced and SharedWheels(settings, note).take(plan, component):
                continue
            what = f"source tree of {source.name} at {source.commit}"
            host = urlsplit(source.url).hostname or source.url
            missing.append(Missing(what=what, host=host, why=error.what, component=source.name, kind="tree"))
    if missing:
        raise UnreachableError(tuple(missing))


def _supply(missing: Missing) -> str:
    if missing.kind == "image":
        return (
            "set a mirror for that registry in the engine, choose a base that needs no registry (--os debian12), "
            "or put an image of yours in its place: --build-context base=docker-image://…"
        )
    if missing.kind == "tree":
        return "put a clone of it under the folder that the setting `sources` names"
    if missing.kind in {"python", "sdist"}:
        return "name a mirror in `index_url`/`torch_index`, or a folder of wheels in `find_links`"
    if missing.kind == "file":
        return f"{missing.why}; or put the file in its place: --build-context {missing.stages[0]}=FOLDER"
    return "name a mirror of the archive in the settings"

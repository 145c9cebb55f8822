"""The road of `envbuild image`: a cell's lock, its image (found, pulled or built), what was proven of it."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from envbuild.engine.build import Builder, Built, find_built, kept_wheel, remember_built
from envbuild.engine.registry import find_digest, pull_verified, push
from envbuild.errors import AuditError, DataError, EnvbuildError, HostError, LockError, UsageError
from envbuild.lock.files import Locked, write_lock
from envbuild.lock.find import find_lock, incomplete, own_lock, place_for
from envbuild.lock.inputs import Inputs
from envbuild.lock.make import current_os, make_lock
from envbuild.lock.model import Lock, Missing, os_packages
from envbuild.lock.sources import SourceStore
from envbuild.matrix.load import Matrix
from envbuild.plan.plan import Plan, plan_of
from envbuild.settings import Settings

if TYPE_CHECKING:
    from python_on_whales import DockerClient

Note = Callable[[str], None]


def lock_for(
    settings: Settings,
    matrix: Matrix,
    inputs: Inputs,
    *,
    locked_only: bool,
    note: Note,
    replaced: Collection[str] = (),
) -> tuple[Locked, Path]:
    """Return the lock of a cell: the one that exists, or a new one.

    What only the stages `replaced` would need may lack in it.

    Raises:
        LockError: with `locked_only`, when there is none or it is not complete.
        HostError: an input cannot be reached from here; the message names each, and what to supply.

    """
    found = find_lock(settings, inputs)
    if found is not None and not found[0].lock.lacking(replaced):
        return found
    if locked_only:
        if found is not None:
            raise incomplete(found[0].lock.lacking(replaced), str(found[1]))
        raise LockError(
            "this cell has no lock", where=inputs.cell.id, hint="leave --locked out to make one, or run `envbuild lock`"
        )
    note("no lock yet; pinning every input")
    locked = make_lock(settings, matrix, inputs, note=note)
    if missing := locked.lock.lacking(replaced):
        raise UnreachableError(missing)
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
        f"the archive moved on: {len(changed)} OS packages are pinned anew ({', '.join(changed[:4])}{', …' if len(changed) > 4 else ''})"
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
            f"{len(missing)} inputs of this cell cannot be had from here{lines}",
            hint="supply them as said, or build where these hosts can be reached; `envbuild render --unlocked` shows the build",
        )
        self.missing = missing


def require_sources(settings: Settings, plan: Plan, *, replaced: Collection[str] = ()) -> None:
    """Bring every source tree that the build will compile into the cache.

    Args:
        settings: where clones and the cache are.
        plan: whose components it compiles.
        replaced: stages of the Dockerfile that come from elsewhere, such as `src-te`.

    Raises:
        UnreachableError: neither the site's folder nor an upstream has one of them.
        LockError: one is not what the lock names.

    """
    store = SourceStore(settings=settings)
    missing = []
    for component in plan.components:
        source = next((s for s in plan.lock.sources if s.name == component.axis), None)
        if source is None or f"src-{source.name}" in replaced or kept_wheel(settings, plan, component.axis):
            continue
        try:
            store.checkout(source)
        except HostError as error:
            what = f"source tree of {source.name} at {source.commit}"
            host = urlsplit(source.url).hostname or source.url
            missing.append(Missing(what=what, host=host, why=error.what, component=source.name))
    if missing:
        raise UnreachableError(tuple(missing))


def _supply(missing: Missing) -> str:
    what = missing.what
    if what.startswith("digest of"):
        return (
            "set a mirror for that registry in the engine, choose a base that needs no registry (--os debian12), "
            "or put an image of yours in its place: --build-context base=docker-image://…"
        )
    if what.startswith("source tree"):
        return "put a clone of it under the folder that the setting `sources` names"
    if "packages:" in what or what.startswith("source of"):
        return "name a mirror in `index_url`/`torch_index`, or a folder of wheels in `find_links`"
    if what.startswith("hash of"):
        return f"{missing.why}; or put the file in its place: --build-context {missing.stages[0]}=FOLDER"
    return "name a mirror of the archive in the settings"


@dataclass(frozen=True, kw_only=True)
class Made:
    """An image and where it came from."""

    built: Built
    plan: Plan
    locked: Locked
    lock_folder: Path
    origin: str
    """`found` in the engine, `pulled` from the registry, or `built`."""


def registry_reference(settings: Settings, lock: Lock) -> str | None:
    """Return where the registry of the settings keeps the image of `lock`, or None without a registry."""
    if not settings.registry:
        return None
    return f"{settings.registry}:{lock.as_cell.id[:90]}-{lock.digest.removeprefix('sha256:')[:16]}"


def pull_prebuilt(settings: Settings, client: "DockerClient", lock: Lock, plan: Plan, tag: str) -> Built | None:
    """Pull the image that the registry holds for exactly this lock, by digest, or return None when it holds none.

    Raises:
        AuditError: what the registry holds under that name was made from another lock.

    """
    reference = registry_reference(settings, lock)
    if reference is None:
        return None
    digest = find_digest(reference, settings=settings)
    if digest is None:
        return None
    pull_verified(client, reference, digest)
    image = client.image.inspect(reference)
    labels = (image.config.labels or {}) if image.config else {}
    if labels.get("io.envbuild.lock") != lock.digest:
        raise AuditError(
            "the registry's image was made from another lock",
            where=f"{reference}@{digest}",
            hint=f"its label says {labels.get('io.envbuild.lock')}; delete it there, or build with --no-pull",
        )
    client.image.tag(reference, tag)
    remember_built(settings, plan, image.id)
    return Built(tag=tag, digest=digest, size=image.size)


def make_image(
    settings: Settings,
    matrix: Matrix,
    inputs: Inputs,
    client: "DockerClient",
    found: tuple[Locked, Path],
    *,
    tag: str | None,
    locked_only: bool,
    pull: bool,
    cache: bool,
    display: Callable[[Plan], tuple[Callable[[str, str], None], Note]],
    substitutes: dict[str, str] | None = None,
) -> Made:
    """Have the image of a lock: the engine's own, the registry's, or a new one.

    Raises:
        UsageError: `substitutes` names a stage that this plan does not take from outside.

    """
    locked, folder = found
    plan = plan_of(matrix, locked, inputs.stack)
    for stage in substitutes or {}:
        if stage not in plan.external:
            raise UsageError(
                f"{stage} is no input of this cell",
                where="--build-context",
                hint=f"what can be replaced: {', '.join(plan.external)}",
            )
    name = tag or plan.tag
    on_change, note = display(plan)
    if cache and not substitutes:
        present = find_built(settings, client, plan, name)
        if present is not None:
            return Made(built=present, plan=plan, locked=locked, lock_folder=folder, origin="found")
        if pull:
            pulled = pull_prebuilt(settings, client, locked.lock, plan, name)
            if pulled is not None:
                return Made(built=pulled, plan=plan, locked=locked, lock_folder=folder, origin="pulled")
    installing = {"runtime", "builder"} if plan.compiles else {"runtime"}  # the stages that ask the archive
    archive_matters = not installing <= set(substitutes or {})
    if archive_matters and not locked_only and not locked.fresh and locked.lock.complete:
        anew = renewed(settings, matrix, inputs, locked, note=note)
        if anew is not None:
            locked, folder = anew
            plan = plan_of(matrix, locked, inputs.stack)
            present = find_built(settings, client, plan, name) if cache and not substitutes else None
            if present is not None:
                return Made(built=present, plan=plan, locked=locked, lock_folder=folder, origin="found")
    builder = Builder(
        settings=settings,
        plan=plan,
        client=client,
        on_change=on_change,
        note=note,
        cache=cache,
        substitutes=substitutes or {},
    )
    return Made(built=builder.build(name), plan=plan, locked=locked, lock_folder=folder, origin="built")


def push_image(settings: Settings, client: "DockerClient", made: Made) -> str:
    """Push the image to the registry of the settings under its lock's name; return `reference@digest`.

    Raises:
        DataError: the settings name no registry.
        HostError: the registry did not take it.

    """
    reference = registry_reference(settings, made.locked.lock)
    if reference is None:
        raise DataError(
            "no registry is set to push to",
            where="--push",
            hint="set `registry` in the settings, such as ghcr.io/acme/envbuild",
        )
    client.image.tag(made.built.tag, reference)
    digest = push(client, reference)
    if digest != made.built.digest:
        raise EnvbuildError(f"the registry holds {digest}, not {made.built.digest}", where=reference, hint="push again")
    return f"{reference}@{digest}"

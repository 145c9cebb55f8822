"""The road of `envbuild image`: a cell's lock, its image (found, pulled or built), what was proven of it."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from envbuild.engine.build import Builder, Built, find_built, find_image, kept_wheel
from envbuild.engine.registry import pull_verified, push
from envbuild.engine.trust import Expected, Pulled, Verified, pulled_for, remember_pulled
from envbuild.errors import DataError, HostError, LockError, UsageError
from envbuild.lock.files import Locked, write_lock
from envbuild.lock.find import find_lock, incomplete, own_lock, place_for
from envbuild.lock.inputs import Inputs
from envbuild.lock.make import current_os, make_lock
from envbuild.lock.model import Lock, Missing, os_packages
from envbuild.lock.sources import SourceStore
from envbuild.matrix.load import Matrix
from envbuild.net.registry import find_digest
from envbuild.plan.plan import Plan, plan_of
from envbuild.settings import Settings
from envbuild.util.names import shown

if TYPE_CHECKING:
    from python_on_whales import DockerClient

Note = Callable[[str], None]

_OTHER_BUILD = (
    "an image follows from its lock and from envbuild's own release: take the lock and the release that the digest is of, "
    "or leave --digest out"
)


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


def require_sources(
    settings: Settings, plan: Plan, *, replaced: Collection[str] = (), note: Callable[[str], object] = lambda _: None
) -> None:
    """Bring every source tree that the build will compile into the cache.

    Args:
        settings: where clones and the cache are.
        plan: whose components it compiles.
        replaced: stages of the Dockerfile that come from elsewhere, such as `src-te`.
        note: takes a line about what was damaged in the cache.

    Raises:
        UnreachableError: neither the site's folder nor an upstream has one of them.
        LockError: one is not what the lock names.

    """
    store = SourceStore(settings=settings, note=note)
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


@dataclass(frozen=True, kw_only=True)
class Made:
    """An image and where it came from."""

    built: Built
    plan: Plan
    locked: Locked
    lock_folder: Path
    origin: str
    """`found` in the engine, `pulled` from the registry, or `built`."""
    verified: Verified
    """Who vouches for the image's digest."""
    reference: str | None = None
    """Where it was pulled from, now or earlier; None when this machine built it."""


def registry_reference(settings: Settings, lock: Lock) -> str | None:
    """Return where the registry of the settings keeps the image of `lock`, or None without a registry."""
    if not settings.registry:
        return None
    return f"{settings.registry}:{lock.as_cell.id[:90]}-{lock.digest.removeprefix('sha256:')[:16]}"


def pull_prebuilt(
    settings: Settings, client: "DockerClient", plan: Plan, tag: str, *, expected: Expected | None
) -> tuple[Built, Pulled] | None:
    """Pull the image that the registry holds for the lock of `plan`, by digest, or return None when it holds none.

    The image must have an expected digest where there is one. Its labels and the lock that it carries must be those of
    the plan: that shows that it is meant to be this lock's image, and says nothing of what else it holds. The image is
    remembered as pulled, never as built.

    Args:
        settings: which registry.
        client: the engine.
        plan: what the image is to be.
        tag: the name that it gets when all of it fits; otherwise nothing is tagged.
        expected: the digests that somebody else than the registry named.

    Raises:
        LockError: the registry holds another digest than the expected one, something else than this lock's image, or
            something damaged.
        HostError: the registry cannot be reached or refuses.

    """
    reference = registry_reference(settings, plan.lock)
    if reference is None:
        return None
    digest = find_digest(reference, settings=settings)
    if digest is None:
        return None
    where = f"{reference}@{digest}"
    verified = (
        Verified(by="nobody", digest=digest)
        if expected is None
        else expected.verify(digest, where=where, what="the registry's image")
    )
    pinned = pull_verified(client, reference, digest, check=lambda name: require_fit(client, name, plan))
    image = client.image.inspect(pinned)
    client.image.tag(pinned, tag)
    pulled = Pulled(verified=verified, reference=where)
    remember_pulled(settings, plan, pulled)
    return Built(tag=tag, digest=digest, size=image.size), pulled


def require_fit(client: "DockerClient", image: str, plan: Plan) -> None:
    """Check that an image says of itself that it is the plan's, in its labels and in the lock that it carries.

    Raises:
        LockError: it says otherwise, or its lock cannot be read.

    """
    from envbuild.engine.reproduce import carried_lock

    hint = "have it deleted or pushed again there, or build it here: envbuild image --no-pull"
    config = client.image.inspect(image).config
    labels = (config.labels if config else None) or {}
    own = {name: text for name, text in labels.items() if name.startswith("io.envbuild.") or name in plan.labels}
    for name in sorted(own.keys() | plan.labels.keys()):
        if own.get(name) != plan.labels.get(name):
            other = name == "io.envbuild.lock"
            raise LockError(
                "the registry's image was made from another lock" if other else "the registry's image is another one",
                where=shown(image),
                hint=f"its label {shown(name, 80)} says {shown(str(own.get(name)))}, not {plan.labels.get(name)}; {hint}",
            )
    carried = carried_lock(client, image)
    if carried.lock.digest != plan.lock.digest:
        raise LockError(
            f"the registry's image carries another lock: {carried.lock.digest}, not {plan.lock.digest}",
            where=shown(image),
            hint=hint,
        )


def find_present(
    settings: Settings, client: "DockerClient", plan: Plan, tag: str, *, pull: bool, expected: Expected | None
) -> tuple[Built, Verified, str | None] | None:
    """Return the engine's image `tag` when it is the plan's, who vouches for it, and where it was pulled from.

    Args:
        settings: where the notes are kept.
        client: the engine.
        plan: what the image is to be.
        tag: the image's name.
        pull: whether an image that was pulled earlier will do.
        expected: the digests that the image may have, where somebody named them.

    Raises:
        LockError: this machine built it, and a person expects another digest.

    """
    built = find_built(settings, client, plan, tag)
    if built is not None:
        own = Verified(by="build", digest=built.digest)
        if expected is not None and expected.by == "flag":
            own = expected.verify(built.digest, where=tag, what="the image that this machine built", hint=_OTHER_BUILD)
        return built, own, None
    note = pulled_for(settings, plan) if pull else None
    image = find_image(client, tag, note.verified.digest) if note else None
    if note is None or image is None or (expected is not None and image.digest not in expected.records):
        return None
    if expected is not None:
        verified = expected.verify(image.digest, where=tag, what="the image")
        remember_pulled(settings, plan, Pulled(verified=verified, reference=note.reference))
    elif note.verified.by == "flag":
        verified = note.verified
    else:  # whoever vouched then does so no more
        verified = Verified(by="nobody", digest=image.digest)
    return image, verified, note.reference


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
    digest: str | None = None,
) -> Made:
    """Have the image of a lock: the engine's own, the registry's, or a new one.

    `digest` is the one that the image must have, where a person named it.

    Raises:
        UsageError: `substitutes` names a stage that this plan does not take from outside.
        LockError: the image has another digest than the expected one.

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

    def present(plan: Plan, expected: Expected | None) -> Made | None:
        there = find_present(settings, client, plan, name, pull=pull, expected=expected)
        if there is None:
            return None
        built, verified, reference = there
        return Made(
            built=built,
            plan=plan,
            locked=locked,
            lock_folder=folder,
            origin="found",
            verified=verified,
            reference=reference,
        )

    if cache and not substitutes:
        expected = expected_of(settings, plan, digest)
        if (made := present(plan, expected)) is not None:
            return made
        pulled = _pulled_or_hint(settings, client, plan, name, expected) if pull else None
        if pulled is not None:
            built, noted = pulled
            return Made(
                built=built,
                plan=plan,
                locked=locked,
                lock_folder=folder,
                origin="pulled",
                verified=noted.verified,
                reference=noted.reference,
            )
    installing = {"runtime", "builder"} if plan.compiles else {"runtime"}  # the stages that ask the archive
    archive_matters = not installing <= set(substitutes or {})
    if archive_matters and not locked_only and not locked.fresh and locked.lock.complete:
        anew = renewed(settings, matrix, inputs, locked, note=note)
        if anew is not None:
            locked, folder = anew
            plan = plan_of(matrix, locked, inputs.stack)
            if cache and not substitutes and (made := present(plan, expected_of(settings, plan, digest))) is not None:
                return made
    builder = Builder(
        settings=settings,
        plan=plan,
        client=client,
        on_change=on_change,
        note=note,
        cache=cache,
        substitutes=substitutes or {},
    )
    built = builder.build(name)
    verified = Verified(by="build", digest=built.digest)
    if digest is not None:
        try:
            verified = Expected(by="flag", records={digest: None}).verify(
                built.digest, where=name, what="the image that was built", hint=_OTHER_BUILD
            )
        except LockError:
            client.image.remove(name)
            raise
    return Made(built=built, plan=plan, locked=locked, lock_folder=folder, origin="built", verified=verified)


def expected_of(settings: Settings, plan: Plan, digest: str | None) -> Expected | None:
    """Return the digests that the image of `plan` may have, from all that this installation knows.

    Raises:
        DataError: an evidence record was edited.

    """
    from envbuild.engine.trust import expected_digests
    from envbuild.evidence.refs import committed_evidence

    return expected_digests(settings, plan, committed_evidence(), flag=digest)


def _pulled_or_hint(
    settings: Settings, client: "DockerClient", plan: Plan, tag: str, expected: Expected | None
) -> tuple[Built, Pulled] | None:
    try:
        return pull_prebuilt(settings, client, plan, tag, expected=expected)
    except HostError as error:
        way = "--no-pull builds the image without the registry"
        raise HostError(error.what, where=error.where, hint=f"{error.hint}; {way}" if error.hint else way) from error


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
    client.image.tag(made.built.digest, reference)  # the tag may have moved since
    digest = push(client, reference)
    if digest != made.built.digest:
        raise LockError(f"the registry holds {digest}, not {made.built.digest}", where=reference, hint="push again")
    return f"{reference}@{digest}"

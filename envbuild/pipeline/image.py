"""The image of a lock: the engine's own, the registry's, or a new one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.engine.build import Builder, Change
from envbuild.engine.built import Built, find_built, own_build
from envbuild.engine.client import EngineClient
from envbuild.engine.details import Details
from envbuild.engine.trust import (
    Expected,
    Pulled,
    UnknownImageError,
    Verified,
    pulled_for,
    remember_pulled,
    verified_build,
)
from envbuild.errors import HostError, LockError, UsageError
from envbuild.lock.files import Locked
from envbuild.lock.inputs import Inputs
from envbuild.matrix.load import Matrix
from envbuild.pipeline.locked import Note, renewed
from envbuild.pipeline.prebuilt import expected_of, pull_prebuilt
from envbuild.plan.plan import Plan, plan_of

_OTHER_BUILD = (
    "an image follows from its lock and from envbuild's own release: take the lock and the release that the digest is of, "
    "or leave --digest out"
)

Display = Callable[[Plan], tuple[Change, Note, Details]]
"""Takes a plan and returns what takes its stages' changes, lines for the user, and what running stages print."""


@dataclass(frozen=True, kw_only=True)
class ImageRequest:
    """What is asked of `make_image`.

    Attributes:
        matrix: the matrix.
        inputs: what the cell is made of.
        tag: the image's name; by default the plan's.
        locked_only: whether the lock is used exactly as it is.
        pull: whether the registry's image, and compiled wheels, will do.
        push: whether the image will be pushed, so that a builder elsewhere may do that itself.
        cache: whether an image, wheels and steps that are there will do.
        substitutes: external inputs that come from elsewhere, by the name of their stage.
        digest: the digest that the image must have, where a person named it.
        catalog: the digest that the signed catalogue names for the lock -> who signed; empty for a lock from elsewhere.
        layers: the digests of that image's layers, uncompressed.

    """

    matrix: Matrix
    inputs: Inputs
    tag: str | None = None
    locked_only: bool = False
    pull: bool = True
    push: bool = False
    cache: bool = True
    substitutes: Mapping[str, str] = field(default_factory=dict)
    digest: str | None = None
    catalog: Mapping[str, str] = field(default_factory=dict)
    layers: tuple[str, ...] = ()

    def require_inputs(self, plan: Plan) -> None:
        """Check that what `substitutes` names are inputs of the plan.

        Raises:
            UsageError: it names a stage that this plan does not take from outside.

        """
        for stage in self.substitutes:
            if stage not in plan.external:
                raise UsageError(
                    f"{stage} is not an input of this cell",
                    where="--build-context",
                    hint=f"what can be replaced: {', '.join(plan.external)}",
                )


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
    """Who confirmed the image's digest."""
    reference: str | None = None
    """Where it was pulled from, now or earlier; None when this machine built it."""


def _expected(client: EngineClient, plan: Plan, request: ImageRequest) -> Expected | None:
    return expected_of(client.settings, plan, request.digest, request.catalog, request.layers)


def find_present(
    client: EngineClient, plan: Plan, tag: str, *, pull: bool, expected: Expected | None
) -> tuple[Built, Verified, str | None] | None:
    """Return the engine's image `tag` when it is the plan's, who confirmed its digest, and where it was pulled from.

    Args:
        client: the engine; its settings say where the notes are kept.
        plan: what the image is to be.
        tag: the image's name.
        pull: whether an image that was pulled earlier will do.
        expected: the digests that the image may have, where somebody named them.

    Raises:
        LockError: this machine built it, and a person expects another digest.

    """
    settings = client.settings
    built = find_built(client, plan, tag)
    if built is not None:
        note = own_build(settings, plan)
        own = verified_build(built.digest, note.steps_from if note else None)
        if expected is not None and expected.by == "flag":
            own = expected.verify(built.digest, where=tag, what="the image that this machine built", hint=_OTHER_BUILD)
        return built, own, None
    pulled = pulled_for(settings, plan) if pull else None
    image = client.find_image(tag) if pulled else None
    if pulled is None or image is None or image.id != pulled.verified.digest:
        return None
    if expected is not None:
        try:
            verified = expected.verify(image.id, where=tag, what="the image", content=image.content)
        except LockError:
            return None
        remember_pulled(settings, plan, Pulled(verified=verified, reference=pulled.reference))
    elif pulled.verified.by == "flag":
        verified = pulled.verified
    else:  # whoever confirmed it then does so no more
        verified = Verified(by="nobody", digest=image.id)
    return Built(tag=tag, digest=image.id, size=image.size), verified, pulled.reference


def make_image(request: ImageRequest, client: EngineClient, found: tuple[Locked, Path], display: Display) -> Made:
    """Have the image of a lock: the engine's own, the registry's, or a new one.

    Args:
        request: what is asked.
        client: the engine.
        found: the lock, and its folder.
        display: shows how it goes.

    Raises:
        UsageError: the request replaces a stage that this plan does not take from outside.
        LockError: the image has another digest than the expected one.

    """
    locked, folder = found
    plan = plan_of(request.matrix, locked, request.inputs.stack)
    request.require_inputs(plan)
    on_change, note, details = display(plan)
    reuse = request.cache and not request.substitutes
    if reuse and (made := _ready_made(request, client, plan, found, note)) is not None:
        return made
    installing = {"runtime", "builder"} if plan.compiles else {"runtime"}  # the stages that ask the archive
    archive_matters = not installing <= set(request.substitutes)
    if archive_matters and not request.locked_only and not locked.fresh and locked.lock.complete:
        note("checking that the archive still has the pinned OS packages")
        fresh = renewed(client.settings, request.matrix, request.inputs, locked, note=note)
        if fresh is not None:
            locked, folder = fresh
            plan = plan_of(request.matrix, locked, request.inputs.stack)
            expected = _expected(client, plan, request) if reuse else None
            if reuse and (made := _present(request, client, plan, fresh, expected)) is not None:
                return made
    builder = Builder(
        client=client,
        plan=plan,
        on_change=on_change,
        note=note,
        details=details,
        cache=request.cache,
        substitutes=request.substitutes,
        pull=request.pull,
        push_to=client.settings.registry if request.push else None,
    )
    built = builder.build(request.tag or plan.tag)
    verified = _verified(client, built, request)
    return Made(built=built, plan=plan, locked=locked, lock_folder=folder, origin="built", verified=verified)


def _verified(client: EngineClient, built: Built, request: ImageRequest) -> Verified:
    """Return who confirms an image that was just built; one with another digest than a person expected loses its name."""
    if request.digest is None:
        return verified_build(built.digest, client.settings.cache_from if request.cache else None)
    try:
        return Expected(by="flag", records={request.digest: None}).verify(
            built.digest, where=built.tag, what="the image that was built", hint=_OTHER_BUILD
        )
    except LockError:
        client.untag(built.tag)
        raise


def _ready_made(
    request: ImageRequest, client: EngineClient, plan: Plan, found: tuple[Locked, Path], note: Note
) -> Made | None:
    """Return the engine's image, or the registry's. One that no trusted source confirms is not pulled."""
    locked, folder = found
    expected = _expected(client, plan, request)
    if (made := _present(request, client, plan, found, expected)) is not None:
        return made
    # With keys that must confirm images, one that nobody confirms is not run: it is built here.
    pull = request.pull and not (client.settings.trusts_signers and expected is None)
    try:
        pulled = _pulled_or_hint(client, plan, request.tag or plan.tag, expected) if pull else None
    except UnknownImageError as error:  # so it is built
        note(f"note: {error.what}; it is not pulled, and the image is built here")
        return None
    if pulled is None:
        return None
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


def _present(
    request: ImageRequest, client: EngineClient, plan: Plan, found: tuple[Locked, Path], expected: Expected | None
) -> Made | None:
    there = find_present(client, plan, request.tag or plan.tag, pull=request.pull, expected=expected)
    if there is None:
        return None
    (built, verified, reference), (locked, folder) = there, found
    return Made(
        built=built,
        plan=plan,
        locked=locked,
        lock_folder=folder,
        origin="found",
        verified=verified,
        reference=reference,
    )


def _pulled_or_hint(
    client: EngineClient, plan: Plan, tag: str, expected: Expected | None
) -> tuple[Built, Pulled] | None:
    try:
        return pull_prebuilt(client, plan, tag, expected=expected)
    except HostError as error:
        way = "--no-pull builds the image without the registry"
        raise HostError(error.what, where=error.where, hint=f"{error.hint}; {way}" if error.hint else way) from error

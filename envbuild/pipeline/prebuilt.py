"""The image of a lock in the registry of the settings: pulled when it is the right one, or pushed there."""

from collections.abc import Mapping, Sequence

from envbuild.catalog.store import repository_name
from envbuild.engine.built import Built
from envbuild.engine.client import EngineClient
from envbuild.engine.image import stated_content
from envbuild.engine.registry import pull_verified, push
from envbuild.engine.reproduce import carried_lock
from envbuild.engine.trust import Expected, Pulled, Verified, expected_digests, remember_pulled, require_own_content
from envbuild.errors import LockError, no_registry
from envbuild.evidence.content import ImageContent
from envbuild.evidence.refs import committed_evidence
from envbuild.lock.model import Lock
from envbuild.net.registry import find_digest
from envbuild.plan.plan import Plan
from envbuild.registry.manifests import Descriptor
from envbuild.registry.repository import Manifest, Repository
from envbuild.settings import Settings
from envbuild.util.names import image_tag, shown
from envbuild.util.oci_json import parse_oci

_LARGEST_CONFIG = 8 << 20
"""Bytes of an image's configuration; registries take manifests of 4 MiB."""


def registry_reference(settings: Settings, lock: Lock) -> str | None:
    """Return where the registry of the settings keeps the image of `lock`, or None without a registry."""
    return image_reference(settings.registry, lock) if settings.registry else None


def image_reference(registry: str, lock: Lock) -> str:
    """Return where `registry` keeps the image of `lock`."""
    of_lock = lock.digest.removeprefix("sha256:")[:16]
    return f"{registry}:{image_tag(f'{lock.as_cell.id[:90]}-{of_lock}')}"


def expected_of(
    settings: Settings,
    plan: Plan,
    digest: str | None,
    catalog: Mapping[str, str] | None = None,
    layers: Sequence[str] = (),
) -> Expected | None:
    """Return the digests that the image of `plan` may have, from all that this installation knows.

    Args:
        settings: where the cache is.
        plan: of the image.
        digest: the one that a person named.
        catalog: the one that the signed catalogue names -> who signed.
        layers: the digests of that image's layers, uncompressed, from the catalogue, too.

    Raises:
        DataError: an evidence record was edited.

    """
    return expected_digests(settings, plan, committed_evidence(), flag=digest, catalog=catalog, layers=layers)


def pull_prebuilt(
    client: EngineClient, plan: Plan, tag: str, *, expected: Expected | None
) -> tuple[Built, Pulled] | None:
    """Pull the image that the registry holds for the lock of `plan`, by digest, or return None when it holds none.

    The image must have an expected digest where there is one, or the layers and the configuration of an image with an expected
    one, of which it then differs in compression alone. Its labels and the lock that it carries must be those of
    the plan: that shows that it is meant to be this lock's image, and says nothing of what else it holds. Where this
    machine built the lock's image and the catalogue names another digest, the layers and the configuration must be the
    same. The image is remembered as pulled, never as built.

    Args:
        client: the engine; its settings say which registry.
        plan: what the image is to be.
        tag: the name that it gets when all of it fits; otherwise nothing is tagged.
        expected: the digests that somebody else than the registry named.

    Raises:
        UnknownImageError: nobody confirms the registry's image, and the expected digests may be by another recipe.
        LockError: the registry holds another digest than the expected one, something else than this lock's image, other
            layers or another configuration than this machine built from the lock, or something damaged.
        HostError: the registry cannot be reached or refuses.

    """
    settings = client.settings
    reference = registry_reference(settings, plan.lock)
    if reference is None:
        return None
    # What the catalogue names is asked for by that digest: nobody has to trust the tag.
    named = next(iter(expected.records)) if expected is not None and expected.by == "catalog" else None
    digest = find_digest(f"{settings.registry}@{named}" if named else reference, settings=settings)
    if digest is None:
        return None
    where = f"{reference}@{digest}"
    what = "the registry's image"
    verified = Verified(by="nobody", digest=digest)
    if expected is not None:
        asks = bool(expected.contents) and digest not in expected.records and digest not in expected.others
        stated = _stated_content(settings, digest) if asks else None
        verified = expected.verify(digest, where=where, what=what, content=stated)

    def check(name: str) -> None:
        came = client.image(name)
        if expected is not None and verified.same_as is not None:
            # The registry stated the content; the engine has computed that of what came.
            expected.verify(digest, where=where, what=what, content=came.content)
        require_own_content(settings, plan, verified, came, where=where)
        require_fit(client, name, plan)

    pinned = pull_verified(client, reference, digest, check=check)
    image = client.image(pinned)
    client.tag(pinned, tag)
    pulled = Pulled(verified=verified, reference=where)
    remember_pulled(settings, plan, pulled)
    return Built(tag=tag, digest=digest, size=image.size), pulled


def _stated_content(settings: Settings, digest: str) -> ImageContent | None:
    """Return what the registry states to be in its image, or None where it is no image for one platform."""
    with Repository(repository_name(settings), settings) as repository:
        manifest = repository.manifest(digest)
        if manifest is None:
            return None
        try:
            return content_in(repository, manifest)
        except LockError:
            return None


def content_in(repository: Repository, manifest: Manifest) -> ImageContent:
    """Return what an image of a registry is, as its configuration states it.

    Raises:
        HostError: the registry cannot be reached or refuses.
        LockError: its configuration cannot be read.

    """
    where = f"{repository.name}@{manifest.descriptor.digest}"
    try:
        config = parse_oci(manifest.body, limit=len(manifest.body))["config"]
        known = Descriptor.model_validate({name: config[name] for name in ("mediaType", "digest", "size")})
        return stated_content(parse_oci(repository.read_blob(known, limit=_LARGEST_CONFIG), limit=_LARGEST_CONFIG))
    except (ValueError, KeyError, TypeError):
        raise LockError("the image's configuration cannot be read", where=where, hint="push it again") from None


def require_fit(client: EngineClient, image: str, plan: Plan) -> None:
    """Check that an image says of itself that it is the plan's, in its labels and in the lock that it carries.

    Raises:
        LockError: it says otherwise, or its lock cannot be read.

    """
    hint = "have it deleted or pushed again there, or build it here: envbuild image --no-pull"
    labels = client.image(image).labels
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
            f"the registry's image contains another lock: {carried.lock.digest}, not {plan.lock.digest}",
            where=shown(image),
            hint=hint,
        )


def require_registry(settings: Settings) -> str:
    """Return the registry to push to.

    Raises:
        DataError: the settings name none.

    """
    if not settings.registry:
        raise no_registry("--push", "to push to")
    return settings.registry


def push_image(client: EngineClient, lock: Lock, built: Built) -> str:
    """Push an image to the registry of the settings under its lock's name; return `reference@digest`.

    An image that its builder has pushed already gets its name there, and no byte of it goes through the engine.

    Raises:
        DataError: the settings name no registry.
        HostError: the registry did not take it.
        LockError: the registry holds something else.

    """
    settings, digest = client.settings, built.digest
    reference = image_reference(require_registry(settings), lock)
    if built.pushed is not None:
        with Repository(built.pushed, settings) as repository:
            found = repository.manifest(digest)
            if found is None:
                raise LockError(
                    "the registry has lost the image that the builder pushed", where=reference, hint="push again"
                )
            repository.push_manifest(found.body, found.descriptor.mediaType, tag=reference.rpartition(":")[2])
        return f"{reference}@{digest}"
    client.tag(digest, reference)  # by its digest: the image's tag may have moved since
    pushed = push(client, reference)
    if pushed != digest:
        raise LockError(f"the registry holds {pushed}, not {digest}", where=reference, hint="push again")
    return f"{reference}@{digest}"

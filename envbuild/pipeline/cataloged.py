"""The registry's catalogue at work: the best published image for a request, and an image's entry."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild import __version__
from envbuild.catalog.builders import require_builders, sign_built
from envbuild.catalog.choose import Machine, Near, Offer, Wanted, nearest_published, offers
from envbuild.catalog.locks import keep_lock, pull_lock, push_lock
from envbuild.catalog.model import Entry
from envbuild.catalog.store import (
    Read,
    now_utc,
    policy_of,
    publish,
    read_catalog,
    repository_name,
    signed_entries,
    signing_policy,
)
from envbuild.doctor.reach import gpu_release
from envbuild.engine.built import Built, own_build
from envbuild.engine.client import EngineClient
from envbuild.engine.reproduce import carried_lock
from envbuild.errors import LockError, UsageError
from envbuild.evidence.refs import committed_evidence, evidence_refs
from envbuild.host.hardware import driver_version, gpus_of
from envbuild.host.probe import LocalProbe, Probe
from envbuild.lock.files import Locked
from envbuild.lock.model import COMPAT
from envbuild.matrix.cell import DEBIAN_ARCH
from envbuild.matrix.fleet import gpus_in
from envbuild.matrix.load import Matrix
from envbuild.pipeline.locked import Note
from envbuild.pipeline.prebuilt import content_in, expected_of, push_image, require_fit
from envbuild.plan.plan import plan_of
from envbuild.registry.keys import PrivateKey, read_private_key
from envbuild.registry.manifests import bare
from envbuild.registry.repository import Repository
from envbuild.registry.signatures import Policy
from envbuild.registry.signers import Signer
from envbuild.settings import Settings
from envbuild.stacks.load import stack_of_lock
from envbuild.supply.attached import Document, attach, require_attached
from envbuild.supply.look import look, own_provenance
from envbuild.util.foreign_json import parse_json
from envbuild.util.text import count_of

_LARGEST_IMAGE = 1 << 40
"""Bytes that an image may state to have, compressed."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published image that was chosen, and its lock, both by digests that the signed catalogue names."""

    offer: Offer
    folder: Path
    """Of the lock, in the cache."""
    signers: tuple[str, ...]

    @property
    def catalog(self) -> Mapping[str, str]:
        """The image's digest -> who signed, as `expected_of` takes it."""
        return {self.offer.entry.image: " and ".join(self.signers)}


def machine_of(matrix: Matrix, probe: Probe | None = None) -> Machine:
    """Return the GPUs and the driver of this machine, as far as they answer."""
    probe = probe or LocalProbe()
    driver = driver_version(probe)
    if driver is None:
        return Machine()
    gpus, _ = gpus_of(probe)
    releases = (gpu_release(matrix, gpu) for gpu in gpus)
    return Machine(gpus=frozenset(release.version for release in releases if release), driver=driver)


def find_published(settings: Settings, matrix: Matrix, wanted: Wanted, *, note: Note) -> Published | tuple[Near, ...]:
    """Return the best published image for what is wanted and its lock, or the nearest ones when none fits.

    Raises:
        UsageError: a pin names an unknown axis, or matches no release.
        DataError: the settings name no registry, or no key.
        HostError: the registry cannot be reached or refuses.
        LockError: the catalogue or the lock is not to be trusted.

    """
    read = read_catalog(settings)
    entries: Sequence[Entry] = read.catalog.entries if read else ()
    found = offers(matrix, wanted, entries, evidence_refs())
    if read is None or not found:
        return nearest_published(matrix, wanted, entries)
    best = found[0]
    note(f"the catalogue (version {read.catalog.version}, signed by {', '.join(read.signers)}) has {best.entry.id}")
    with Repository(repository_name(settings), settings) as repository:
        require_builders(repository, best.entry.image, settings)
        _require_documents(repository, best.entry.image, best.entry.lock, settings, policy_of(settings))
        locked = pull_lock(repository, best.entry.lock_artifact, best.entry.lock)
    _require_entry(best.entry, locked)
    return Published(offer=best, folder=keep_lock(settings, locked), signers=read.signers)


def _require_documents(
    repository: Repository,
    image: str,
    lock: str,
    settings: Settings,
    policy: Policy,
    coming: Collection[Document] = (),
) -> None:
    """Raise LockError unless an image has the documents that the settings ask for, signed and about this image and lock.

    Those of `coming` are not there yet.
    """
    for document in settings.trusted_documents:
        if document not in coming:
            require_attached(repository, image, lock, document, policy)


def _require_entry(entry: Entry, locked: Locked) -> None:
    """Raise LockError where a lock is not of what its entry says, whoever signed that."""
    own = _of_lock(locked)
    stated = {name: getattr(entry, name) for name in own}
    if own != stated:
        differing = sorted(name for name in own if own[name] != stated[name])
        raise LockError(
            f"the catalogue's entry does not describe its lock: {', '.join(differing)}",
            where=entry.id,
            hint="ask who publishes there",
        )


def _of_lock(locked: Locked) -> dict[str, object]:
    """Return what an entry says of its lock."""
    lock = locked.lock
    cell = lock.as_cell
    return {
        "id": cell.id,
        "cell": dict(lock.cell),
        "commits": dict(lock.commits),
        "flavor": lock.flavor,
        "stack": lock.stack,
        "stack_digest": lock.stack_digest,
        "te_source": lock.te_source,
        "compat": lock.source(COMPAT) is not None,
        "platform": f"linux/{DEBIAN_ARCH[cell.arch]}",
        "sms": gpus_in(lock.cell),
        "lock": lock.digest,
    }


def describe_nearest(near: Sequence[Near]) -> str:
    """Return the nearest published cells as lines; empty where there is none."""
    return "".join(
        f"\n  - {one.entry.id}"
        + "".join(
            f"\n      {axis}: {has}, {f'not {asked}' if asked else 'which was not requested'}"
            for axis, (asked, has) in sorted(one.differs.items())
        )
        for one in near
    )


def signing_keys(settings: Settings, password: Callable[[], str | None]) -> tuple[PrivateKey, ...]:
    """Return the keys that this machine signs with.

    Raises:
        UsageError: the settings name none, or the password is missing or wrong.
        DataError: one cannot be read.

    """
    if not settings.signing_keys:
        raise UsageError(
            "no key is set to sign with",
            where="signing_keys",
            hint="envbuild catalog keygen NAME makes a pair; name its .key in the setting signing_keys",
        )
    return tuple(read_private_key(path, password) for path in settings.signing_keys)


def require_publishable(
    client: EngineClient, matrix: Matrix, digest: str, named: str | None, stack_file: str | None
) -> tuple[Locked, bool]:
    """Return the lock that makes the engine's image `digest`, once somebody confirms that it does, and whether we built it.

    Whether we did is what the keys sign as a second statement: that this machine ran every step from the lock.

    Args:
        client: the engine.
        matrix: the matrix.
        digest: of the image.
        named: the digest that a person expects.
        stack_file: the file of a user's own stack, which the lock names and does not hold.

    Raises:
        HostError: the engine has no such image.
        UsageError: it carries no lock, or its stack is a user's own and `stack_file` is not its file.
        LockError: nobody confirms the image, somebody confirms another one, or it is not what its lock makes.

    """
    locked = carried_lock(client, digest)
    stack = stack_of_lock(locked.lock.stack, stack_file) if locked.lock.stack else None
    plan = plan_of(matrix, locked, stack)
    require_fit(client, digest, plan)
    expected = expected_of(client.settings, plan, named)
    if expected is None:
        raise LockError(
            "nobody confirms that this image follows from its lock",
            where=digest,
            hint="build it here (envbuild image --no-pull --no-cache, without the setting cache_from), or name the digest that you trust: --digest",
        )
    content = client.image(digest).content
    verified = expected.verify(
        digest, where=plan.cell.id, what="the image", hint="it was not published", content=content
    )
    own = own_build(client.settings, plan)
    # a signature states the digest that was built
    return locked, own is not None and own.alone and verified.by == "build" and own.digest == digest


def push_and_publish(
    client: EngineClient,
    held: Built,
    locked: Locked,
    keys: Sequence[Signer],
    *,
    built: bool,
    documents: Mapping[Document, bytes],
    doing: Callable[[str], object],
) -> tuple[str, Read]:
    """Push an image of the engine and publish it; return `reference@digest` and the catalogue.

    The documents that the settings ask for and this machine cannot write must be in the registry before anything is pushed.

    Args:
        client: the engine; its settings say which registry.
        held: the image.
        locked: the lock that makes it.
        keys: sign the catalogue.
        built: whether this machine built the image.
        documents: those of the image that this machine can write.
        doing: called with what is done now.

    Raises:
        UsageError, DataError, HostError, LockError: as `push_image` and `publish_image`.

    """
    settings = client.settings
    policy = signing_policy(settings, keys)  # first: with fewer signers than are needed, nothing is to be written
    with Repository(repository_name(settings), settings) as repository:
        _require_documents(repository, held.digest, locked.lock.digest, settings, policy, documents)
    doing("pushing the image")
    reference = push_image(client, locked.lock, held)
    doing("signing the catalogue")
    return reference, publish_image(settings, locked, held.digest, keys, built=built, documents=documents)


def publish_image(
    settings: Settings,
    locked: Locked,
    digest: str,
    keys: Sequence[Signer],
    *,
    built: bool = False,
    documents: Mapping[Document, bytes] | None = None,
) -> Read:
    """Publish an image that the registry holds: push its lock and add its entry to the catalogue.

    Args:
        settings: which registry.
        locked: the lock that makes the image.
        digest: of the image's manifest.
        keys: sign the catalogue.
        built: whether this machine built the image; the keys then sign that, too.
        documents: its SBOM and its provenance, which are attached to it and signed.

    Raises:
        UsageError, DataError, HostError, LockError: as `catalog.store.publish`; the registry does not hold the image, or
            the settings ask for a document of it that it does not have.

    """
    policy = signing_policy(settings, keys)
    with Repository(repository_name(settings), settings) as repository:
        manifest = repository.manifest(digest)
        if manifest is None:
            raise LockError(
                "the registry does not hold the image", where=f"{repository.name}@{digest}", hint="push it first"
            )
        size = _size_of(manifest.body, f"{repository.name}@{digest}")
        content = content_in(repository, manifest)
        # as those who pull do: nobody publishes what they would refuse, and nothing is signed for it
        _require_documents(repository, digest, locked.lock.digest, settings, policy, documents or ())
        lock_artifact = push_lock(repository, locked).digest
        if built:
            sign_built(repository, digest, keys)
        for document, body in (documents or {}).items():
            attach(repository, bare(manifest.descriptor), document, body, keys)
        _require_documents(repository, digest, locked.lock.digest, settings, policy)
    records = (record.id for record in committed_evidence() if record.passed and record.is_of(digest, content))
    entry = Entry.model_validate(
        {
            **_of_lock(locked),
            "lock_artifact": lock_artifact,
            "image": digest,
            "layers": content.layers,
            "size": size,
            "release": __version__,
            "evidence": tuple(sorted(records)),
            "signers": tuple(sorted({key.name for key in keys})),
            "added": now_utc(),
        }
    )
    return publish(settings, [entry], keys)


def _size_of(body: bytes, where: str) -> int:
    """Return the bytes of the layers and the configuration that a manifest of an image names."""
    sizes: list[Any] = [None]
    with contextlib.suppress(ValueError, KeyError, TypeError):
        value = parse_json(body, limit=len(body))
        sizes = [value["config"]["size"], *(layer["size"] for layer in value["layers"])]
    if not all(type(size) is int and size >= 0 for size in sizes) or sum(sizes) > _LARGEST_IMAGE:
        raise LockError(
            "the image's manifest cannot be read: it is no image for one platform", where=where, hint="push it again"
        )
    return sum(sizes)


def documents_of(
    settings: Settings,
    matrix: Matrix,
    locked: Locked,
    digest: str,
    keys: Sequence[Signer],
    *,
    stack_file: str | None,
    note: Note,
) -> dict[Document, bytes]:
    """Return the documents that this machine can write of an image of the engine: its SBOM; its provenance, if it built it.

    Raises:
        HostError: no engine, or no such image.
        LockError: its files cannot be read.
        UsageError: its stack is a user's own and `stack_file` is not its file.

    """
    stack = stack_of_lock(locked.lock.stack, stack_file) if locked.lock.stack else None
    looked = look(settings, digest, plan_of(matrix, locked, stack), note)
    if looked.owned.unowned:
        note(
            f"note: {count_of(len(looked.owned.unowned), 'file of the image belongs', 'files of the image belong')} to no locked input; its SBOM lists them"
        )
    documents: dict[Document, bytes] = {"sbom": looked.sbom()}
    statement = own_provenance(settings, looked, keys[0].verifier) if keys else None
    if statement is not None:
        documents["provenance"] = statement
    return documents


def refresh_catalog(settings: Settings, keys: Sequence[Signer]) -> Read:
    """Sign the catalogue again with today's date, once every image in it has the documents that the settings ask for.

    Raises:
        UsageError, DataError, HostError, LockError: as `catalog.store.publish`; an image does not have such a document.

    """
    if settings.trusted_documents:
        policy = signing_policy(settings, keys)
        entries = signed_entries(settings, keys)
        with Repository(repository_name(settings), settings) as repository:
            for entry in entries:
                _require_documents(repository, entry.image, entry.lock, settings, policy)
    return publish(settings, (), keys)

"""Reading a registry's catalogue, and publishing in it."""

import contextlib
import datetime as dt
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.catalog.model import ARTIFACT_TYPE, BLOB_TYPE, LARGEST, TAG, Catalog, Entry, read_body
from envbuild.errors import DataError, LockError, UsageError
from envbuild.registry.keys import PrivateKey, read_public_key
from envbuild.registry.manifests import MANIFEST, artifact_of
from envbuild.registry.repository import Repository
from envbuild.registry.signatures import KeyVerifier, Policy, require_signed, sign
from envbuild.settings import Settings

Now = Callable[[], dt.datetime]

_AHEAD = dt.timedelta(days=1)
"""By how much a publisher's clock may be ahead of ours."""
_NOT_USED = "do not use it, and ask who publishes there"


def now_utc() -> dt.datetime:
    """Return the time, in whole seconds."""
    return dt.datetime.now(dt.UTC).replace(microsecond=0)


@dataclass(frozen=True, kw_only=True)
class Read:
    """A catalogue that passed every check."""

    catalog: Catalog
    digest: str
    """Of its manifest."""
    signers: tuple[str, ...]


def repository_name(settings: Settings) -> str:
    """Return the repository of the catalogue and of its images.

    Raises:
        DataError: the settings name none.

    """
    if not settings.registry:
        raise DataError(
            "no registry is set", where="registry", hint="set `registry` in the settings, such as ghcr.io/acme/envbuild"
        )
    return settings.registry


def policy_of(settings: Settings, own: Sequence[PrivateKey] = ()) -> Policy:
    """Return who may sign the catalogue, by the settings; `own` keys count as trusted to who holds them.

    Raises:
        DataError: no key is trusted, a key cannot be read, two have one name, or more signatures are needed than keys.

    """
    keys = [read_public_key(path) for path in settings.trusted_keys]
    names = [key.name for key in keys]
    keys += [key.public for key in own if key.name not in names]
    if not keys:
        raise DataError(
            "no key is trusted to sign the catalogue",
            where="trusted_keys",
            hint='name the publisher\'s public key in the settings: trusted_keys = ["release.pub"]',
        )
    if len(set(names)) != len(names):
        raise DataError("two trusted keys have one name", where="trusted_keys", hint="rename one of the files")
    _once_each(settings)
    if settings.trusted_signatures > len(keys):
        raise DataError(
            f"{settings.trusted_signatures} signatures are needed, and {len(keys)} keys are trusted",
            where="trusted_signatures",
            hint="name more keys in trusted_keys",
        )
    return Policy(verifiers=[KeyVerifier(key=key) for key in keys], needed=settings.trusted_signatures)


def _once_each(settings: Settings) -> None:
    """Raise DataError where one key lies in two files: it would count twice."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    pem = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    bodies = [read_public_key(path).key.public_bytes(*pem) for path in settings.trusted_keys]
    if len(set(bodies)) != len(bodies):
        raise DataError("one key is trusted under two names", where="trusted_keys", hint="name it once")


def read_catalog(settings: Settings, *, now: Now = now_utc) -> Read | None:
    """Return the registry's catalogue, or None where it has none.

    Raises:
        DataError: the settings name no registry, or no key.
        HostError: the registry cannot be reached or refuses.
        LockError: the catalogue is not signed by enough trusted keys, too old, of a lower version than this machine has
            seen, or damaged.

    """
    policy = policy_of(settings)
    with Repository(repository_name(settings), settings) as repository:
        found = _read(repository, policy)
    seen = _Seen(settings)
    if found is None:
        if seen.version:
            raise LockError(
                f"the registry has no catalogue any more, and this machine has seen its version {seen.version}",
                where=f"{settings.registry}:{TAG}",
                hint=_NOT_USED,
            )
        return None
    _check_age(found.catalog, settings, now())
    if found.catalog.version < seen.version:
        raise LockError(
            f"the catalogue was rolled back: it is version {found.catalog.version}, and this machine has seen "
            f"{seen.version}",
            where=f"{settings.registry}:{TAG}",
            hint=f"{_NOT_USED}; if somebody started a new one on purpose, remove {seen.place}",
        )
    seen.remember(found.catalog.version)
    return found


def _read(repository: Repository, policy: Policy) -> Read | None:
    """Return the catalogue that the tag names, once it is signed; its age and version are not looked at."""
    found = repository.artifact(TAG, ARTIFACT_TYPE)
    if found is None:
        return None
    descriptor, artifact = found
    signers = require_signed(repository, descriptor.digest, policy, what="the catalogue")
    where = f"{repository.name}@{descriptor.digest}"
    if len(artifact.blobs) != 1 or artifact.blobs[0].mediaType != BLOB_TYPE:
        raise LockError("the catalogue's manifest has another content", where=where, hint=_NOT_USED)
    body = repository.read_blob(artifact.blobs[0], limit=LARGEST)
    try:
        catalog = read_body(body)
    except ValueError as error:
        raise LockError(f"the catalogue cannot be read: {error}", where=where, hint=_NOT_USED) from None
    return Read(catalog=catalog, digest=descriptor.digest, signers=signers)


def _check_age(catalog: Catalog, settings: Settings, now: dt.datetime) -> None:
    age = now - catalog.created
    where = f"{settings.registry}:{TAG}"
    if age > dt.timedelta(days=settings.catalog_max_age_days):
        raise LockError(
            f"the catalogue is stale: it is of {catalog.created:%Y-%m-%d}, and at most {settings.catalog_max_age_days} "
            "days are accepted",
            where=where,
            hint="ask who publishes there to sign it again (envbuild catalog refresh), or raise catalog_max_age_days",
        )
    if age < -_AHEAD:
        raise LockError(
            f"the catalogue is of {catalog.created:%Y-%m-%d %H:%M} UTC, which is still to come",
            where=where,
            hint="correct the clock of this machine or of the publisher's",
        )


class _Seen:
    """The highest version of a registry's catalogue that this machine has seen."""

    def __init__(self, settings: Settings) -> None:
        name = hashlib.sha256(str(settings.registry).encode()).hexdigest()
        self.place: Path = settings.cache_dir / "catalogs" / f"{name}.json"

    @property
    def version(self) -> int:
        """The version; 0 where none was seen."""
        note: Any = None
        with contextlib.suppress(OSError, ValueError):
            note = json.loads(self.place.read_text(encoding="utf-8"))
        version = note.get("version") if isinstance(note, dict) else None
        return version if isinstance(version, int) and not isinstance(version, bool) and version > 0 else 0

    def remember(self, version: int) -> None:
        """Note a version, unless a higher one was noted meanwhile."""
        if version <= self.version:
            return
        self.place.parent.mkdir(parents=True, exist_ok=True)
        part = self.place.with_name(f"{self.place.name}.{os.getpid()}.part")
        part.write_text(json.dumps({"version": version}), encoding="utf-8")
        part.replace(self.place)


def publish(settings: Settings, entries: Sequence[Entry], keys: Sequence[PrivateKey], *, now: Now = now_utc) -> Read:
    """Add entries to the registry's catalogue, sign its next version, and return it. Without entries, its date is renewed.

    What is there must be signed by the settings' policy, so that nobody signs what somebody else slipped in. Publishers at
    the same time do not lose each other's entries (`Repository.change_tag`).

    Raises:
        UsageError: there are fewer keys than signatures that the settings ask for.
        DataError: the settings name no registry.
        HostError: the registry cannot be reached or refuses.
        LockError: the catalogue that is there is not signed as it must be, or others changed it each time.

    """
    policy = policy_of(settings, keys)
    signing = {key.name for key in keys}
    if len(signing) < policy.needed:
        raise UsageError(
            f"{policy.needed} signatures are needed, and {len(signing)} keys are there to sign",
            where="signing_keys",
            hint="name more private keys in signing_keys",
        )
    names = tuple(sorted(signing))
    own = tuple(Entry.model_validate(entry.model_copy(update={"signers": names})) for entry in entries)
    started = now()
    with Repository(repository_name(settings), settings) as repository:

        def next_version() -> bytes | None:
            held = _read(repository, policy)
            seen = _Seen(settings).version
            current = held.catalog if held else Catalog(version=max(seen, 0) + 1, created=now(), entries=())
            if held and current.version < seen:
                raise LockError(
                    f"the catalogue was rolled back: it is version {current.version}, and this machine has seen {seen}",
                    where=f"{repository.name}:{TAG}",
                    hint="find out who changed it; nothing was published",
                )
            if held and _holds(current, own, started):
                return None
            coming = current.with_entries(own, now=max(now(), current.created))
            blob = repository.push_blob(coming.body(), BLOB_TYPE)
            artifact = artifact_of(
                ARTIFACT_TYPE, [blob], annotations={"org.opencontainers.image.title": "catalog.json"}
            )
            pushed = repository.push_artifact(artifact)
            for key in keys:
                # before the tag names it, so that no client sees it without; and nobody else signs it meanwhile
                sign(repository, pushed.digest, key, alone=True)
            return artifact.body()

        repository.change_tag(TAG, next_version, MANIFEST)
        done = _read(repository, policy)
    if done is None:  # somebody deleted it in this very moment
        raise LockError("the catalogue is gone", where=f"{settings.registry}:{TAG}", hint="publish again")
    _Seen(settings).remember(done.catalog.version)
    return done


def _holds(catalog: Catalog, entries: Sequence[Entry], since: dt.datetime) -> bool:
    """Return whether the catalogue has the entries; without any, whether it is no older than `since`."""
    return all(entry in catalog.entries for entry in entries) if entries else catalog.created >= since

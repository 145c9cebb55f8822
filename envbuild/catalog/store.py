"""Reading a registry's catalogue, and publishing in it."""

import datetime as dt
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.catalog.model import ARTIFACT_TYPE, BLOB_TYPE, LARGEST, TAG, Catalog, Entry, read_body
from envbuild.errors import DataError, LockError, UsageError, no_registry
from envbuild.registry.keyless import identities_of
from envbuild.registry.keys import KeyVerifier, read_public_key
from envbuild.registry.manifests import MANIFEST, artifact_of
from envbuild.registry.repository import Repository
from envbuild.registry.signatures import Policy, require_signed, sign
from envbuild.registry.signers import Signer, Verifier
from envbuild.settings import Settings
from envbuild.util.text import count_of

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
        raise no_registry("registry")
    return settings.registry


def policy_of(settings: Settings, own: Sequence[Signer] = ()) -> Policy:
    """Return who may sign the catalogue, by the settings; one's `own` signers count as trusted to who holds them.

    Raises:
        DataError: nobody is trusted, a key cannot be read, two have one name, or more signatures are needed than signers.
        HostError: an identity is trusted, and the library that judges its signatures is missing.

    """
    keys = [KeyVerifier(key=read_public_key(path)) for path in settings.trusted_keys]
    trusted: list[Verifier] = [*keys, *identities_of(settings)]
    if len({each.name for each in keys}) != len(keys):
        raise DataError("two trusted keys have one name", where="trusted_keys", hint="rename one of the files")
    if len({each.name for each in trusted}) != len(trusted):
        raise DataError("two of those trusted have one name", where="trusted_identities", hint="rename one")
    if len({each.body for each in keys}) != len(keys):
        raise DataError("one key is trusted under two names", where="trusted_keys", hint="name it once")
    if len({each.body for each in trusted}) != len(trusted):
        raise DataError("one identity is trusted under two names", where="trusted_identities", hint="name it once")
    if len({each.builder for each in trusted}) != len(trusted):
        raise DataError(
            "one identity is trusted of two issuers, and provenance names a builder without its issuer",
            where="trusted_identities",
            hint="keep the issuer that the builder's CI has",
        )
    for signer in own:  # by the key itself: one that counted under two names would sign for two
        if signer.verifier.body in {known.body for known in trusted}:
            continue
        if signer.name in {known.name for known in trusted}:
            raise DataError(
                f"the key that signs as {signer.name} is not the trusted key of that name",
                where="signing_keys",
                hint="rename one of the files, or sign with the trusted key",
            )
        trusted.append(signer.verifier)
    if not trusted:
        raise DataError(
            "no key is trusted to sign the catalogue",
            where="trusted_keys",
            hint="name the publisher's public key in the settings (~/.config/envbuild/config.toml): "
            'trusted_keys = ["release.pub"]; or in ENVBUILD_TRUSTED_KEYS',
        )
    if settings.trusted_signatures > len(trusted):
        raise DataError(
            f"{count_of(settings.trusted_signatures, 'signature is', 'signatures are')} needed, and "
            f"{count_of(len(trusted), 'key is', 'keys are')} trusted",
            where="trusted_signatures",
            hint="name more keys in trusted_keys",
        )
    identities = bool(settings.trusted_identities)
    return Policy(verifiers=trusted, needed=settings.trusted_signatures, identities=identities)


def signing_policy(settings: Settings, own: Sequence[Signer]) -> Policy:
    """Return who may sign, once one's `own` signers are as many as must: what they publish would be refused otherwise.

    Raises:
        UsageError: they are fewer.
        DataError, HostError: as `policy_of`.

    """
    policy = policy_of(settings, own)
    signing = {signer.verifier.body for signer in own}
    if len(signing) < policy.needed:
        raise UsageError(
            f"{count_of(policy.needed, 'signature is', 'signatures are')} needed, and "
            f"{count_of(len(signing), 'key is', 'keys are')} there to sign",
            where="signing_keys",
            hint="name more private keys in signing_keys; nothing was published",
        )
    return policy


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


def signed_entries(settings: Settings, keys: Sequence[Signer] = ()) -> tuple[Entry, ...]:
    """Return the entries of the registry's catalogue once it is signed, whatever its age; none where it has none.

    Raises:
        DataError, HostError, LockError: as `read_catalog`.

    """
    policy = policy_of(settings, keys)
    with Repository(repository_name(settings), settings) as repository:
        found = _read(repository, policy)
    return found.catalog.entries if found else ()


def claims_of(repository: Repository) -> dict[str, str]:
    """Return what a signature of the catalogue states: that this is the one of this repository, and of no other."""
    return {"io.envbuild.catalog": repository.name}


def _read(repository: Repository, policy: Policy) -> Read | None:
    """Return the catalogue that the tag names, once it is signed; its age and version are not looked at."""
    found = repository.artifact(TAG, ARTIFACT_TYPE)
    if found is None:
        return None
    descriptor, artifact = found
    claims = claims_of(repository)
    signers = require_signed(repository, descriptor.digest, policy, what="the catalogue", claims=claims)
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
            f"the catalogue is stale: it is of {catalog.created:%Y-%m-%d}, and at most "
            f"{count_of(settings.catalog_max_age_days, 'day is', 'days are')} accepted",
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
        """The version; 0 where none was seen.

        Raises:
            DataError: the note cannot be read. Without it, an old catalogue could pass.

        """
        note: Any = None
        try:
            note = json.loads(self.place.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, RecursionError):
            pass
        version = note.get("version") if isinstance(note, dict) else None
        if isinstance(version, int) and not isinstance(version, bool) and version > 0:
            return version
        raise DataError(
            "the note of the catalogue's version that this machine has seen cannot be read",
            where=str(self.place),
            hint="remove the file, if you trust what the registry shows now",
        )

    def remember(self, version: int) -> None:
        """Note a version, unless a higher one was noted meanwhile.

        Raises:
            DataError: as `version`.

        """
        self.place.parent.mkdir(parents=True, exist_ok=True)
        with self.place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process must not put a lower one over a higher one
            if version <= self.version:
                return
            part = self.place.with_name(f"{self.place.name}.{os.getpid()}.part")
            part.write_text(json.dumps({"version": version}), encoding="utf-8")
            part.replace(self.place)


def publish(settings: Settings, entries: Sequence[Entry], keys: Sequence[Signer], *, now: Now = now_utc) -> Read:
    """Add entries to the registry's catalogue, sign its next version, and return it. Without entries, its date is renewed.

    What is there must be signed by the settings' policy, so that nobody signs what somebody else slipped in. Publishers at
    the same time do not lose each other's entries (`Repository.change_tag`).

    Raises:
        UsageError: there are fewer signers than signatures that the settings ask for.
        DataError: the settings name no registry.
        HostError: the registry cannot be reached or refuses.
        LockError: the catalogue that is there is not signed as it must be, or others changed it each time.

    """
    policy = signing_policy(settings, keys)
    named = {verifier.body: verifier.name for verifier in policy.verifiers}
    names = tuple(sorted({named[key.verifier.body] for key in keys}))
    own = tuple(Entry.model_validate(entry.model_copy(update={"signers": names})) for entry in entries)
    started = now()
    with Repository(repository_name(settings), settings) as repository:

        def next_version() -> bytes | None:
            held, seen = _read(repository, policy), _Seen(settings)
            current = held.catalog if held else Catalog(version=1, created=now(), entries=())
            where = f"{repository.name}:{TAG}"
            if held is None and seen.version:
                raise LockError(
                    f"the registry has no catalogue any more, and this machine has seen its version {seen.version}",
                    where=where,
                    hint=f"nothing was published; if the registry was emptied on purpose, remove {seen.place}",
                )
            if held and current.version < seen.version:
                raise LockError(
                    f"the catalogue was rolled back: it is version {current.version}, and this machine has seen "
                    f"{seen.version}",
                    where=where,
                    hint="find out who changed it; nothing was published",
                )
            if held and (own or not seen.version):  # only a machine that has seen the catalogue may renew an old date
                _check_age(current, settings, now())
            elif held:
                _check_age(current, settings, min(now(), current.created + _AHEAD))
            if held:
                seen.remember(current.version)
            if held and _holds(current, own, started):
                return None
            try:
                coming = current.with_entries(own, now=now())
                body = coming.body()
                read_body(body)
            except ValueError as error:
                raise DataError(
                    f"the next version of the catalogue would be none: {str(error).splitlines()[0]}",
                    where=where,
                    hint="nothing was published; a new catalogue in another repository has room",
                ) from None
            blob = repository.push_blob(body, BLOB_TYPE)
            artifact = artifact_of(
                ARTIFACT_TYPE, [blob], annotations={"org.opencontainers.image.title": "catalog.json"}
            )
            pushed = repository.push_artifact(artifact)
            for key in keys:
                # before the tag names it, so that no client sees it without; and nobody else signs it meanwhile
                sign(repository, pushed.digest, key, alone=True, claims=claims_of(repository))
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

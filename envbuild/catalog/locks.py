"""A lock as an artifact of the registry: lock.json and its pylocks, each a blob with its name."""

from pathlib import Path

from envbuild.errors import DataError, LockError
from envbuild.lock.files import Locked, parse_lock, write_lock
from envbuild.registry.manifests import Descriptor, artifact_of
from envbuild.registry.repository import Repository
from envbuild.settings import Settings
from envbuild.util.names import FileName, checked, shown

ARTIFACT_TYPE = "application/vnd.envbuild.lock.v1"
_TITLE = "org.opencontainers.image.title"
_TYPES = {"json": "application/vnd.envbuild.lock.v1+json", "toml": "application/toml"}
_LARGEST_FILE = 32 << 20
_MOST_FILES = 10
_HINT = "do not use it; have the lock published again"


def push_lock(repository: Repository, locked: Locked) -> Descriptor:
    """Push a lock and return the descriptor of its manifest; the same lock has the same one."""
    texts = {"lock.json": locked.lock.model_dump_json(indent=1, exclude_defaults=True) + "\n"}
    texts |= {f"pylock.{name}.toml": text for name, text in locked.pylocks.items()}
    blobs = [
        repository.push_blob(text.encode(), _TYPES[name.rpartition(".")[2]], annotations={_TITLE: name})
        for name, text in sorted(texts.items())
    ]
    return repository.push_artifact(artifact_of(ARTIFACT_TYPE, blobs))


def pull_lock(repository: Repository, manifest: str, digest: str) -> Locked:
    """Return the lock whose manifest is `manifest`.

    Args:
        repository: where it is.
        manifest: the digest of its manifest, from the signed catalogue.
        digest: the lock's own digest, from there, too.

    Raises:
        HostError: the registry cannot be reached or refuses.
        LockError: it is not there, is another one, or cannot be read.

    """
    where = f"{repository.name}@{manifest}"
    found = repository.artifact(manifest, ARTIFACT_TYPE)
    if found is None:
        raise LockError("the registry does not hold a lock of its catalogue", where=where, hint=_HINT)
    blobs = found[1].blobs
    if len(blobs) > _MOST_FILES:
        raise LockError(f"a lock of {len(blobs)} files", where=where, hint=_HINT)
    by_name = {blob.annotations.get(_TITLE, ""): blob for blob in blobs}

    def read(name: str) -> bytes:
        blob = by_name.get(name)
        if blob is None:
            raise FileNotFoundError(2, f"no {name}")
        return repository.read_blob(blob, limit=_LARGEST_FILE)

    try:
        locked = parse_lock(read("lock.json"), lambda name: read(checked(FileName, name)), where)
    except OSError as error:
        raise LockError(f"the lock cannot be read: {error.strerror}", where=where, hint=_HINT) from None
    except DataError as error:
        raise LockError(f"the lock cannot be read: {shown(error.what, 400)}", where=where, hint=_HINT) from None
    if locked.lock.digest != digest:
        raise LockError(
            f"the lock is another one: {locked.lock.digest}, the catalogue names {digest}", where=where, hint=_HINT
        )
    if not locked.lock.complete:
        raise LockError("the lock does not pin every input", where=where, hint=_HINT)
    return locked


def keep_lock(settings: Settings, locked: Locked) -> Path:
    """Write a lock from a catalogue to the cache, apart from the locks that this machine makes; return its folder."""
    folder = settings.cache_dir / "catalog-locks" / locked.lock.digest.removeprefix("sha256:")
    write_lock(locked, folder)
    return folder

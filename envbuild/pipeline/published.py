"""Whether the registry of the settings holds the image of a cell, by the key of its lock."""

from envbuild.lock.find import find_lock
from envbuild.lock.inputs import Inputs
from envbuild.lock.model import Lock
from envbuild.net.registry import find_digest
from envbuild.pipeline.prebuilt import registry_reference
from envbuild.settings import Settings


def complete_lock(settings: Settings, inputs: Inputs) -> Lock | None:
    """Return the lock from which `envbuild image` would make the image of these inputs; None where it makes a new one.

    Raises:
        DataError, LockError: there is one, and it cannot be read.

    """
    found = find_lock(settings, inputs)
    return found[0].lock if found is not None and found[0].lock.complete else None


def published_image(settings: Settings, lock: Lock) -> tuple[str, str] | None:
    """Return the reference and the digest that the registry has for a lock, or None where it has no image of it.

    Raises:
        HostError: the registry cannot be reached, or refuses.
        LockError: what it answers is not a manifest with the digest that it states.

    """
    reference = registry_reference(settings, lock)
    if reference is None:
        return None
    digest = find_digest(reference, settings=settings)
    return None if digest is None else (reference, digest)

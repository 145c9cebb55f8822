"""Who built an image and came to its digest: signatures of the image itself, which state just that.

The catalogue's signers answer for what it lists. A builder answers for more: the same lock gave the same image on a
machine of theirs. A policy asks for several of them (`trusted_builders`), so that one machine that was broken into is
not enough.
"""

from collections.abc import Mapping, Sequence

from envbuild.catalog.store import policy_of
from envbuild.errors import DataError, LockError
from envbuild.registry.repository import Repository
from envbuild.registry.signatures import sign, signers
from envbuild.registry.signers import Signer
from envbuild.settings import Settings
from envbuild.util.text import count_of

BUILT = {"io.envbuild.built": "this signer built an image of this digest from its lock"}
"""What a builder's signature states."""
LAYERS = {"io.envbuild.built": "this signer built the layers and the configuration of this image from its lock"}
"""What it states where the builder's engine compressed the same layers in another way."""


def sign_built(
    repository: Repository, digest: str, keys: Sequence[Signer], *, claims: Mapping[str, str] = BUILT
) -> None:
    """Sign the image `digest`, which this machine built from its lock; with the claims `LAYERS`, but for the compression.

    Raises:
        HostError: the registry cannot be reached or refuses.
        LockError: it does not hold the image.

    """
    if repository.manifest(digest) is None:
        raise LockError(
            "the registry does not hold the image",
            where=f"{repository.name}@{digest}",
            hint="an image is signed where it was published: envbuild catalog publish",
        )
    for key in keys:
        sign(repository, digest, key, claims=claims)


def require_builders(repository: Repository, digest: str, settings: Settings) -> tuple[str, ...]:
    """Return which trusted keys signed that they built the image `digest`; nothing is asked for where the settings ask for none.

    Raises:
        DataError: the settings ask for more builders than they trust keys.
        HostError: the registry cannot be reached or refuses.
        LockError: too few built it.

    """
    needed = settings.trusted_builders
    if not needed:
        return ()
    verifiers = policy_of(settings).verifiers
    if needed > len(verifiers):
        raise DataError(
            f"{count_of(needed, 'builder is', 'builders are')} needed, and {count_of(len(verifiers), 'key is', 'keys are')} trusted",
            where="trusted_builders",
            hint="name more keys in trusted_keys",
        )
    found = signers(repository, digest, verifiers, claims=(BUILT, LAYERS), needed=needed)
    if len(found) < needed:
        raise LockError(
            f"{count_of(needed, 'trusted builder')} must have built this image, and {', '.join(found) or 'none'} did",
            where=f"{repository.name}@{digest}",
            hint="ask others to build it: envbuild reproduce --sign",
        )
    return found

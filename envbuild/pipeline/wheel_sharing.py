"""The compiled wheels of this machine, pushed to the registry of the settings for builds elsewhere."""

import os
from collections.abc import Callable, Sequence

from envbuild.engine.kept import kept_wheel, taken_from
from envbuild.engine.shared_wheels import NotSharedError, Pushed, push_wheel, repository_of
from envbuild.engine.wheels import KeptWheel, read_kept
from envbuild.errors import no_registry
from envbuild.plan.plan import Plan
from envbuild.registry.keyless import keyless_signer
from envbuild.registry.keys import read_private_key
from envbuild.registry.repository import Repository
from envbuild.registry.signers import Signer
from envbuild.settings import Settings
from envbuild.util.names import shown


def wheel_repository(settings: Settings) -> str:
    """Return the repository of the settings' registry that holds wheels.

    Raises:
        DataError: the settings name no registry.

    """
    name = repository_of(settings)
    if name is None:
        raise no_registry("registry", "to push to")
    return name


def wheel_signers(settings: Settings) -> tuple[Signer, ...]:
    """Return who signs wheels: this machine's keys, and in CI the job's identity; none where the settings name none.

    Raises:
        DataError: a key cannot be read, or its password is wrong.
        UsageError, HostError: as `keyless_signer`.

    """
    keys = (read_private_key(path, lambda: os.environ.get("COSIGN_PASSWORD")) for path in settings.signing_keys)
    keyless = keyless_signer(settings)
    return (*keys, *((keyless,) if keyless else ()))


def push_kept(settings: Settings, repository: Repository, wheel: KeptWheel, keys: Sequence[Signer]) -> Pushed:
    """Push and sign a wheel that this machine compiled; see `push_wheel`.

    Raises:
        NotSharedError: it, or steps that made it, came from a registry: a signature states that it was compiled here.
        LockError, HostError: as `push_wheel`.

    """
    origin = taken_from(settings, wheel.record.sha256)
    if origin is not None:
        raise NotSharedError(
            f"it is not known that {wheel.record.wheel} was compiled here: it came from {shown(origin)}",
            where=str(wheel.folder),
            hint="envbuild image --no-cache --no-pull, without the setting cache_from, compiles it here",
        )
    return push_wheel(repository, wheel, keys)


def push_wheels(
    settings: Settings, plan: Plan, keys: Sequence[Signer], *, note: Callable[[str], object]
) -> list[dict[str, object]]:
    """Push and sign the wheels of a plan that this machine compiled; return what was pushed, as JSON values.

    Args:
        settings: the registry, and where the store is.
        plan: whose wheels.
        keys: sign them. Without one nothing is pushed: nobody would take it.
        note: takes a line about a wheel that cannot be shared, and why.

    Raises:
        LockError: the registry has another wheel under the key of one.
        HostError: the registry cannot be reached or refuses.

    """
    kept = [(each.axis, kept_wheel(settings, plan, each.axis)) for each in plan.components]
    if not keys or not any(folder for _, folder in kept):
        return []
    pushed: list[dict[str, object]] = []
    with Repository(wheel_repository(settings), settings) as repository:
        for axis, folder in kept:
            if folder is None:
                continue
            try:
                done = push_kept(settings, repository, read_kept(folder), keys)
            except NotSharedError as error:
                note(f"the wheel of {axis} is not pushed: {error.what}")
                continue
            pushed.append(
                {"component": axis, "reference": f"{repository.name}:{done.tag}@{done.digest}", "new": done.new}
            )
    return pushed

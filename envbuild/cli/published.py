"""What `pull`, `image` and `catalog` share: the flags as a request to the catalogue, and the keys that sign."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envbuild.cli.axes import axis_names, keyword, request_from
from envbuild.cli.cell_options import te_source_of
from envbuild.cli.output import doing, note, use_cache

if TYPE_CHECKING:
    from envbuild.catalog.choose import Near, Wanted
    from envbuild.matrix.load import Matrix
    from envbuild.pipeline.cataloged import Published
    from envbuild.registry.keys import PrivateKey
    from envbuild.registry.signers import Signer
    from envbuild.settings import Settings


def wanted_of(flags: Mapping[str, Any], sources: tuple[str, ...], matrix: "Matrix", *, here: bool) -> "Wanted":
    """Return what the flags ask of a published image; with `here`, for this machine's GPUs and driver.

    Raises:
        UsageError, DataError, HostError: a flag is wrong, or the stack's file.

    """
    from envbuild.catalog.choose import Machine, Wanted
    from envbuild.pipeline.cataloged import machine_of
    from envbuild.stacks.load import load_stack
    from envbuild.stacks.parts import digest_of

    stack = load_stack(flags["stack"]) if flags.get("stack") is not None else None
    return Wanted(
        request=request_from(flags),
        stack=stack.name if stack else None,
        stack_digest=digest_of(stack) if stack else None,
        te_source=te_source_of(sources),
        machine=machine_of(matrix) if here else Machine(),
    )


def uses_catalog(settings: "Settings") -> bool:
    """Return whether the settings name a registry and who may sign its catalogue."""
    return bool(settings.registry and settings.trusts_signers)


def published_for(
    flags: Mapping[str, Any], sources: tuple[str, ...], settings: "Settings"
) -> "Published | tuple[Near, ...]":
    """Return the best published image for the flags and this machine, or the nearest ones.

    Raises:
        as `find_published`.

    """
    from envbuild.matrix.load import load_matrix
    from envbuild.pipeline.cataloged import find_published

    doing("reading the catalogue")
    matrix = load_matrix()
    return find_published(settings, matrix, wanted_of(flags, sources, matrix, here=True), note=note)


def published_to_take(flags: Mapping[str, Any], sources: tuple[str, ...]) -> "Published | None":
    """Return the best published image for the flags; None without a catalogue, or where nothing in it fits.

    Raises:
        as `find_published`; the hint then names the way without the registry.

    """
    from envbuild.errors import HostError, LockError
    from envbuild.pipeline.cataloged import describe_nearest
    from envbuild.settings import load_settings

    settings = load_settings()
    if not uses_catalog(settings):
        return None
    try:
        found = published_for(flags, sources, use_cache(settings))
    except (HostError, LockError) as error:
        way = "--no-pull builds the image without the registry"
        hint = f"{error.hint}; {way}" if error.hint else way
        raise type(error)(error.what, where=error.where, hint=hint) from None
    if isinstance(found, tuple):
        near = describe_nearest(found)
        note("no published image fits the flags" + (f"; the nearest are{near}" if near else ""))
        return None
    return found


def build_command(flags: Mapping[str, Any], sources: Sequence[str]) -> str:
    """Return the command that builds what the flags ask for."""
    words = ["envbuild", "image", "--no-pull"]
    if flags.get("stack"):
        words += ["--stack", str(flags["stack"])]
    for axis in sorted(axis_names()):
        if flags.get(keyword(axis)):
            words += [f"--{axis}", str(flags[keyword(axis)])]
    if flags.get("prefer") == "newest":
        words += ["--prefer", "newest"]
    for source in sources:
        words += ["--source", source]
    return shlex.join(words)


def key_password() -> str | None:
    """Return the password of a private key: from COSIGN_PASSWORD, or asked for on a terminal."""
    if (given := os.environ.get("COSIGN_PASSWORD")) is not None:
        return given or None
    if not sys.stdin.isatty():
        return None
    import click

    typed: str = click.prompt("password of the key", hide_input=True, err=True, default="", show_default=False)
    return typed or None


def keys_of(settings: "Settings") -> "tuple[PrivateKey, ...]":
    """Return the keys that this machine signs with.

    Raises:
        UsageError, DataError: as `signing_keys`.

    """
    from envbuild.pipeline.cataloged import signing_keys

    return signing_keys(settings, key_password)


def signers_of(settings: "Settings") -> "tuple[Signer, ...]":
    """Return who signs here: the keys of this machine, and in CI the job's identity.

    Raises:
        UsageError, DataError, HostError: as `signing_keys` and `keyless_signer`; there is neither.

    """
    from envbuild.registry.keyless import keyless_signer

    keyless = keyless_signer(settings)
    if keyless is None:
        return keys_of(settings)
    return (*(keys_of(settings) if settings.signing_keys else ()), keyless)

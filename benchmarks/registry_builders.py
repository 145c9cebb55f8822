"""Two builders that do not know each other: the second one builds a published image again, signs, and only then others pull it."""

import time
from collections.abc import Mapping
from typing import Any

from registry_site import SIGNER, Site, StepError

SECOND = "second"
REFUSED = 4
"""The exit code of `envbuild pull` where too few trusted builders signed."""


def _keys(site: Site) -> str:
    keys = site.folder / "keys"
    if not (keys / f"{SECOND}.pub").exists():
        site.envbuild(site.publisher, "catalog", "keygen", SECOND, "--out", str(keys))
    return f"{keys / f'{SIGNER}.pub'} {keys / f'{SECOND}.pub'}"


def _pull(site: Site, flags: list[str], keys: str, builders: int) -> dict[str, Any]:
    env = site.client | {"ENVBUILD_TRUSTED_KEYS": keys, "ENVBUILD_TRUSTED_BUILDERS": str(builders)}
    return site.envbuild(env, "pull", *flags)


def two_builders(site: Site, row: Mapping[str, Any]) -> dict[str, Any]:
    """Have a second engine build a published cell again and sign it; return what it took.

    The engine begins empty, with a separate key and no wheel of the first. Who asks for two builders is refused before,
    and gets the image after.

    Args:
        site: the registry and its engines.
        row: the published cell, as `publish` returns it.

    Raises:
        StepError: a step ended otherwise.

    """
    keys, flags = _keys(site), list(row["flags"])
    site.fresh_client()
    site.say(f"{row['name']}: two builders are asked for, and one signed")
    try:
        _pull(site, flags, keys, 2)
    except StepError as error:
        if error.code != REFUSED:
            raise
        refused = str(error)
    else:
        raise StepError(f"{row['name']}: pulled although one builder signed", 1)
    tag = _pull(site, flags, keys, 1)["tag"]
    site.say(f"{row['name']}: the second engine builds it again: envbuild reproduce --sign")
    env = site.builder | {
        "ENVBUILD_TRUSTED_KEYS": keys,
        "ENVBUILD_SIGNING_KEYS": str(site.folder / "keys" / f"{SECOND}.key"),
    }
    began = time.monotonic()
    answer = site.envbuild(env, "reproduce", tag, "--sign")
    seconds = round(time.monotonic() - began, 1)
    site.fresh_client()
    site.say(f"{row['name']}: two builders are asked for, and two signed")
    pulled = _pull(site, flags, keys, 2)
    if pulled["digest"] != row["digest"]:
        raise StepError(f"{row['name']}: pulled {pulled['digest']}", 1)
    return {
        "name": row["name"],
        "digest": row["digest"],
        "refused": refused,
        "seconds": seconds,
        "answer": answer,
        "verified": pulled["verified"]["text"],
    }

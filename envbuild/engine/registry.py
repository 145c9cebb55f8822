"""Prebuilt images in a registry: the digest of a reference there, a pull by digest, a push that returns its digest."""

import re
from collections.abc import Callable

from envbuild.engine.client import EngineClient, EngineError
from envbuild.errors import EnvbuildError, HostError, LockError, UsageError
from envbuild.net.registry import Reference, no_access, parse_reference
from envbuild.util.names import is_digest, shown
from envbuild.util.space import says_full

# Characters that are shown of a reason.
_OUTPUT_LIMIT = 300


def pull_verified(
    client: EngineClient, reference: str, digest: str, *, check: Callable[[str], object] | None = None
) -> str:
    """Pull `reference` at exactly `digest`, give it its tag, and return it as `repository@digest`.

    The engine checks each byte against the digest; a tag that has moved in the registry since makes no difference. Who
    named the digest is the caller's to know: one that the registry named itself proves nothing of what the image holds.

    Args:
        client: the engine.
        reference: where the image is.
        digest: the digest to pull.
        check: looks at the pulled image, by the name that this returns, before it gets its tag. When it raises, nothing
            is tagged, and an image that was not in the engine before is removed.

    Raises:
        LockError: `digest` is no digest, the registry does not hold it, or what it sends is damaged.
        HostError: the registry cannot be reached or refuses, or the engine gave another image.
        UsageError: `reference` is no image reference, or names another digest itself.

    """
    ref = parse_reference(reference)
    if not is_digest(digest):
        raise LockError(f"not a digest: {digest!r}", where=reference, hint="it reads sha256: and 64 hex digits")
    if ref.digest not in {None, digest}:
        raise UsageError(f"{reference} names another digest than {digest}")
    pinned = f"{ref.repository}@{digest}"
    had = client.find_image(pinned) is not None
    try:
        try:
            client.pull(pinned)
        except EngineError as error:
            raise _engine_failure(error.output, ref, f"pulling {pinned}") from None
        _require_held(client, pinned, digest)
        if check is not None:
            check(pinned)
        if ref.digest is None:
            client.tag(pinned, f"{ref.repository}:{ref.tag}")
    except BaseException:
        if not had:
            client.untag(pinned)
        raise
    return pinned


def _require_held(client: EngineClient, pinned: str, digest: str) -> None:
    held = client.image(pinned).repo_digests
    if not any(entry.endswith(f"@{digest}") for entry in held):
        raise HostError(f"the engine pulled another image than {pinned}", where=shown(", ".join(held)))


def push(client: EngineClient, reference: str) -> str:
    """Push the tag `reference` and return the digest under which the registry holds it.

    Raises:
        HostError: the registry cannot be reached or refuses, or no engine answers.
        UsageError: the engine has no such image, or `reference` is by digest.

    """
    ref = parse_reference(reference)
    if ref.digest:
        raise UsageError("an image is pushed by its tag, not by a digest", where=reference)
    name = f"{ref.repository}:{ref.tag}"
    try:
        output = client.push(name)
    except EngineError as error:
        raise _engine_failure(error.output, ref, f"pushing {name}") from None
    # The engine ends with `TAG: digest: sha256:… size: N`.
    found = re.findall(r"digest: (sha256:[0-9a-f]{64})", output)
    if not found:
        raise HostError(f"the engine pushed {name} and reported no digest", where=shown(output.strip()[-200:]))
    return str(found[-1])


# How the engine says that what it was sent is not what the manifest, or the digest that was asked for, describes.
_DAMAGED = re.compile(
    r"unexpected commit digest|short read|unexpected EOF|failed size validation|could not fetch content descriptor"
    r"|wrong diff id|archive/tar|invalid checksum|corrupt|does not match (?:the )?digest"
    r"|unsupported media type|unexpected media type|invalid (?:tar|gzip|zstd|manifest)|magic number mismatch",
    re.IGNORECASE,
)


def _engine_failure(output: str, ref: Reference, doing: str) -> EnvbuildError:
    """Return our error for docker's, by what docker says."""
    text = output.strip()
    last = text.splitlines()[-1].strip() if text else "docker gave no reason"
    last = shown(
        last if len(last) <= _OUTPUT_LIMIT else f"…{last[-_OUTPUT_LIMIT:]}", 2 * _OUTPUT_LIMIT
    )  # the reason stands at its end
    # The image's own name is no part of what is wrong: `team/not-denied` refuses nothing.
    text = text.replace(ref.repository, "")
    if says_full(text):
        return HostError(
            "the disk is full where the engine keeps images",
            where=doing,
            hint="free some (docker builder prune, docker image prune) and run again",
        )
    if re.search(r"no such image|image .* does not exist|tag does not exist", text, re.IGNORECASE):
        return UsageError(f"the engine has no image {ref.repository}:{ref.tag}", where=doing, hint="build it first")
    if re.search(r"cannot connect to the docker daemon|docker API at", text, re.IGNORECASE):
        return HostError("no Docker engine answers", where=last, hint="start it, or run scripts/install-engine")
    if doing.startswith("pulling") and _DAMAGED.search(text):
        return LockError(
            f"what the registry {ref.host} sends is damaged, or is not what the image's digest says: {last}",
            where=doing,
            hint="try once more, as a broken connection looks alike; then have the image pushed again, or build it here: "
            "envbuild image --no-pull",
        )
    if re.search(r"unauthorized|authentication required|no basic auth|denied|forbidden", text, re.IGNORECASE):
        return no_access(ref)
    if re.search(r"manifest unknown|not found", text, re.IGNORECASE):
        return LockError(
            f"the registry {ref.host} does not have this image",
            where=doing,
            hint="build it here: envbuild image --no-pull",
        )
    return HostError(f"{doing} failed: {last}", hint=f"check that this machine reaches {ref.host}")

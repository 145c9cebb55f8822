"""Prebuilt images in a registry: which digest a reference has there, a pull by digest, a push that says its digest."""

import base64
import contextlib
import hashlib
import json
import os
import re
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.errors import EnvbuildError, HostError, LockError, UsageError
from envbuild.processes import followed
from envbuild.settings import Settings
from envbuild.util.names import shown

if TYPE_CHECKING:
    from http.client import HTTPResponse
    from urllib.request import OpenerDirector, Request

    from python_on_whales import DockerClient

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# One manifest may be of any of these; a registry that is asked for none of them answers with the oldest kind.
_MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_HUB = "docker.io"
_HUB_API = "registry-1.docker.io"
# The name under which `docker login` keeps Docker Hub's credentials.
_HUB_LOGIN = "https://index.docker.io/v1/"
_TIMEOUT_S = 20
# What the engine says last tells what went wrong; a registry may have it say much more.
_SAID_LINES = 400
_SAID = 300


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An image's name taken apart: `host/path:tag` or `host/path@digest`."""

    host: str
    path: str
    tag: str
    digest: str | None

    @property
    def repository(self) -> str:
        """The reference without tag and digest."""
        return f"{self.host}/{self.path}"

    @property
    def loopback(self) -> bool:
        """Whether the registry is on this machine, where plain http is what docker speaks, too."""
        name = self.host.rpartition(":")[0] or self.host
        return name in {"localhost", "[::1]"} or name.startswith("127.")


def parse_reference(text: str) -> Reference:
    """Take `text` apart as docker does: no host is Docker Hub, one word there is `library/`, no tag is `latest`.

    Raises:
        UsageError: it is no image reference.

    """
    name, _, digest = text.partition("@")
    # A colon before the last slash belongs to a host's port.
    head, slash, last = name.rpartition("/")
    last, colon, tag = last.partition(":")
    name = head + slash + last
    first, slash, rest = name.partition("/")
    if slash and (first == "localhost" or "." in first or ":" in first):
        host, path = first, rest
    else:
        host, path = _HUB, name if slash else f"library/{name}"
    component = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
    good = (
        re.fullmatch(r"(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9a-fA-F:]+\])(?::\d+)?", host)
        and re.fullmatch(rf"{component}(?:/{component})*", path)
        and re.fullmatch(r"\w[\w.-]{0,127}", tag if colon else "latest", re.ASCII)
        and ("@" not in text or _DIGEST.fullmatch(digest))
    )
    if not good:
        raise UsageError(f"not an image reference: {text!r}", hint="write it as registry.example.org/team/image:tag")
    return Reference(host=host, path=path, tag=tag or "latest", digest=digest or None)


def find_digest(reference: str, *, settings: Settings | None = None) -> str | None:
    """Return the digest (`sha256:…`) that `reference` has in its registry now, or None when it is not there.

    Asks the registry's HTTP API v2 for the manifest's head; no engine is needed and nothing is downloaded. Logins are
    those of `docker login`: stored in docker's config.json, or by the credential helper it names.

    Args:
        reference: an image by tag or digest; a registry on loopback is asked over plain http, any other over https.
        settings: the proxies and the CA bundle to reach it with; the environment's proxies by default.

    Raises:
        HostError: the registry cannot be reached, or wants a login that is missing or wrong.
        UsageError: `reference` is no image reference.

    """
    from urllib.error import HTTPError, URLError
    from urllib.request import Request

    ref = parse_reference(reference)
    host = _HUB_API if ref.host == _HUB else ref.host
    url = f"{'http' if ref.loopback else 'https'}://{host}/v2/{ref.path}/manifests/{ref.digest or ref.tag}"
    opener = _opener(ref, settings)
    request = Request(url, method="HEAD", headers={"Accept": ", ".join(_MANIFEST_TYPES)})  # noqa: S310
    try:
        try:
            answer = _open(opener, request)
        except HTTPError as error:
            if error.code != 401:
                raise
            error.close()
            authorization = _authorization(ref, error.headers.get("WWW-Authenticate", ""), opener)
            request.add_header("Authorization", authorization)
            answer = _open(opener, request)
        with answer:
            digest = answer.headers.get("Docker-Content-Digest", "")
        if not _DIGEST.fullmatch(digest):
            # The header is optional; the digest is the hash of the manifest's bytes.
            request.method = "GET"
            with _open(opener, request) as answer:
                digest = "sha256:" + hashlib.sha256(answer.read()).hexdigest()
    except HTTPError as error:
        with error:
            if error.code == 404:
                return None
            if error.code in {401, 403}:
                raise _no_access(ref) from None
            raise HostError(f"the registry {ref.host} answered {error.code} {error.reason}", where=url) from None
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise HostError(
            f"the registry {ref.host} cannot be reached: {reason}",
            where=url,
            hint="check the address, the network, and the proxy and ca_bundle settings",
        ) from None
    return digest


def pull_verified(
    client: "DockerClient", reference: str, digest: str, *, check: Callable[[str], object] | None = None
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
    from python_on_whales.exceptions import DockerException

    ref = parse_reference(reference)
    if not _DIGEST.fullmatch(digest):
        raise LockError(f"not a digest: {digest!r}", where=reference, hint="it reads sha256: and 64 hex digits")
    if ref.digest not in {None, digest}:
        raise UsageError(f"{reference} names another digest than {digest}")
    pinned = f"{ref.repository}@{digest}"
    try:
        client.image.inspect(pinned)
        had = True
    except DockerException:
        had = False
    try:
        _docker(client, ref, f"pulling {pinned}", "pull", "--quiet", pinned)
        _require_held(client, ref, pinned)
        if check is not None:
            check(pinned)
        if ref.digest is None:
            client.image.tag(pinned, f"{ref.repository}:{ref.tag}")
    except BaseException:
        if not had:
            with contextlib.suppress(DockerException):
                client.image.remove(pinned)
        raise
    return pinned


def _require_held(client: "DockerClient", ref: Reference, pinned: str) -> None:
    from python_on_whales.exceptions import DockerException

    try:
        held = client.image.inspect(pinned).repo_digests
    except DockerException as error:
        raise _engine_failure(error.stderr or "", ref, f"pulling {pinned}") from None
    if not any(entry.endswith(pinned[pinned.index("@") :]) for entry in held):
        raise HostError(f"the engine pulled another image than {pinned}", where=shown(", ".join(held)))


def push(client: "DockerClient", reference: str) -> str:
    """Push the tag `reference` and return the digest under which the registry holds it.

    Raises:
        HostError: the registry cannot be reached or refuses, or no engine answers.
        UsageError: the engine has no such image, or `reference` is by digest.

    """
    ref = parse_reference(reference)
    if ref.digest:
        raise UsageError("an image is pushed by its tag, not by a digest", where=reference)
    name = f"{ref.repository}:{ref.tag}"
    said = _docker(client, ref, f"pushing {name}", "push", name)
    # The engine ends with `TAG: digest: sha256:… size: N`.
    found = re.findall(r"digest: (sha256:[0-9a-f]{64})", said)
    if not found:
        raise HostError(f"the engine pushed {name} and named no digest", where=shown(said.strip()[-200:]))
    return str(found[-1])


def _docker(client: "DockerClient", ref: Reference, doing: str, *words: str) -> str:
    """Run `docker image` with these words and return the end of what it said; interrupted, it ends before this raises."""
    said: deque[str] = deque(maxlen=_SAID_LINES)
    if followed([*client.client_config.docker_cmd, "image", *words], feed=said.append, stdout=True):
        raise _engine_failure("".join(said), ref, doing)
    return "".join(said)


def _opener(ref: Reference, settings: Settings | None) -> "OpenerDirector":
    from urllib.request import ProxyHandler, build_opener

    from envbuild.lock.index import opener

    if ref.loopback:  # a proxy would look for loopback on itself
        return build_opener(ProxyHandler({}))
    return opener(settings)


def _open(opener: "OpenerDirector", request: "Request") -> "HTTPResponse":
    answer: HTTPResponse = opener.open(request, timeout=_TIMEOUT_S)
    return answer


def _authorization(ref: Reference, challenge: str, opener: "OpenerDirector") -> str:
    """Return the Authorization header that answers the registry's `challenge` (RFC 6750, or HTTP Basic)."""
    from urllib.parse import urlencode
    from urllib.request import Request

    basic = _login(ref)
    scheme, _, rest = challenge.partition(" ")
    if scheme.lower() == "basic" and basic:
        return basic
    fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
    realm = fields.get("realm", "")
    if scheme.lower() != "bearer" or not realm.startswith("https://" if not ref.loopback else ("https://", "http://")):
        raise _no_access(ref)
    query = {"service": fields.get("service", ""), "scope": fields.get("scope") or f"repository:{ref.path}:pull"}
    request = Request(f"{realm}?{urlencode(query)}", headers={"Authorization": basic} if basic else {})  # noqa: S310
    with _open(opener, request) as answer:
        body = json.loads(answer.read())
    token = body.get("token") or body.get("access_token")
    if not token:
        raise _no_access(ref)
    return f"Bearer {token}"


def _login(ref: Reference) -> str | None:
    """Return what `docker login` keeps for the registry, as an HTTP Basic header, or None."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    key = _HUB_LOGIN if ref.host == _HUB else ref.host
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise HostError(f"docker's logins cannot be read: {error}", where=str(folder / "config.json")) from None
    helper = config.get("credHelpers", {}).get(key) or config.get("credsStore")
    if helper:
        try:
            done = subprocess.run(
                [f"docker-credential-{helper}", "get"], input=key, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise HostError(
                f"docker's credential helper docker-credential-{helper} is not installed",
                where=str(folder / "config.json"),
            ) from None
        if done.returncode:
            return None
        entry = json.loads(done.stdout)
        secret = f"{entry['Username']}:{entry['Secret']}"
        return "Basic " + base64.b64encode(secret.encode()).decode()
    stored = config.get("auths", {}).get(key, {}).get("auth")
    return f"Basic {stored}" if stored else None


def _no_access(ref: Reference) -> HostError:
    return HostError(
        f"the registry {ref.host} refuses access to {ref.path}",
        hint=f"docker login {'' if ref.host == _HUB else ref.host}".rstrip(),
    )


# How the engine says that what it was sent is not what the manifest, or the digest that was asked for, describes.
_DAMAGED = re.compile(
    r"unexpected commit digest|short read|unexpected EOF|failed size validation|could not fetch content descriptor"
    r"|wrong diff id|archive/tar|invalid checksum|corrupt|does not match (?:the )?digest"
    r"|unsupported media type|unexpected media type|invalid (?:tar|gzip|zstd|manifest)|magic number mismatch",
    re.IGNORECASE,
)


def _engine_failure(said: str, ref: Reference, doing: str) -> EnvbuildError:
    """Return our error for docker's, by what docker says."""
    text = said.strip()
    last = text.splitlines()[-1].strip() if text else "docker gave no reason"
    last = shown(last if len(last) <= _SAID else f"…{last[-_SAID:]}", 2 * _SAID)  # the reason stands at its end
    # The image's own name is no part of what is wrong: `team/not-denied` refuses nothing.
    text = text.replace(ref.repository, "")
    if re.search(r"no space left on device", text, re.IGNORECASE):
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
        return _no_access(ref)
    if re.search(r"manifest unknown|not found", text, re.IGNORECASE):
        return LockError(
            f"the registry {ref.host} does not hold this image",
            where=doing,
            hint="build it here: envbuild image --no-pull",
        )
    return HostError(f"{doing} failed: {last}", hint=f"check that this machine reaches {ref.host}")

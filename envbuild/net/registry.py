"""Which digest an image has in its registry, by the registry's HTTP API v2; no engine is needed."""

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from envbuild.errors import HostError, LockError, UsageError
from envbuild.settings import Settings
from envbuild.util.names import is_digest, shown

if TYPE_CHECKING:
    from envbuild.net.exchange import Bounds
    from envbuild.net.http import Client


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
    def api(self) -> str:
        """The address of the repository in the registry's HTTP API v2: plain http on loopback, https elsewhere."""
        host = _HUB_API if self.host == _HUB else self.host
        return f"{'http' if self.loopback else 'https'}://{host}/v2/{self.path}"

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
        and ("@" not in text or is_digest(digest))
    )
    if not good:
        raise UsageError(f"not an image reference: {text!r}", hint="write it as registry.example.org/team/image:tag")
    return Reference(host=host, path=path, tag=tag or "latest", digest=digest or None)


def find_digest(reference: str, *, settings: Settings | None = None) -> str | None:
    """Return the digest (`sha256:…`) that `reference` has in its registry now, or None when it is not there.

    Asks the registry's HTTP API v2 for the manifest; no engine is needed and no layer is downloaded. Logins are those of
    `docker login`: stored in docker's config.json, or by the credential helper it names.

    Args:
        reference: an image by tag or digest; a registry on loopback is asked over plain http, any other over https.
        settings: the proxies and the CA bundle to reach it with; the environment's proxies by default.

    Raises:
        HostError: the registry cannot be reached, or wants a login that is missing or wrong.
        LockError: the manifest's bytes do not have the digest that the registry states, or that `reference` names; or the
            answer is larger than a manifest, or leads nowhere.
        UsageError: `reference` is no image reference.

    """
    from envbuild.net.failures import BadAnswerError, NoAnswerError
    from envbuild.net.fetch import body_of
    from envbuild.net.http import Client

    ref = parse_reference(reference)
    url = f"{ref.api}/manifests/{ref.digest or ref.tag}"
    headers = {"Accept": ", ".join(_MANIFEST_TYPES)}
    try:
        # a proxy would look for loopback on itself
        with Client(settings, direct=ref.loopback) as client:
            answer, body = client.ask(url, body_of, bounds=_bounds(), headers=headers)
            if answer.status == 401:
                login = authorization(client, ref, answer.headers.get("www-authenticate", ""))
                answer, body = client.ask(url, body_of, bounds=_bounds(), headers=headers, login=login)
    except NoAnswerError as error:
        raise HostError(
            f"the registry {ref.host} cannot be reached: {error.reason}",
            where=url,
            hint="check the address, the network, and the proxy and ca_bundle settings",
        ) from None
    except BadAnswerError as error:
        raise LockError(
            f"the registry {ref.host} cannot be used: {error}",
            where=url,
            hint="check that the address is a registry's; `envbuild image --no-pull` asks none",
        ) from None
    if answer.status == 404:
        return None
    if answer.status in {401, 403}:
        raise no_access(ref)
    if body is None:
        raise HostError(
            f"the registry {ref.host} answered {answer.status} {answer.reason}".rstrip(),
            where=url,
            hint="try again later, or check the address and the proxy setting",
        )
    return _checked_digest(ref, body, answer.headers.get("docker-content-digest", ""), url)


def _checked_digest(ref: Reference, manifest: bytes, stated: str, url: str) -> str:
    """Return the manifest's digest, which every name that it has must agree with."""
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    for who, named in (("the registry says", stated), ("the reference says", ref.digest or "")):
        if named and named != digest:
            other = "another digest than a sha256" if not is_digest(named) else "another digest"
            raise LockError(
                f"the manifest that the registry {ref.host} sends has {other}: it is {digest}, {who} {shown(named, 100)}",
                where=url,
                hint="try once more, as a broken connection looks alike; then have the image pushed again, or build it here: "
                "envbuild image --no-pull",
            )
    return digest


def _bounds() -> "Bounds":
    from envbuild.net.exchange import Bounds

    # A manifest, or a token. Registries refuse manifests of more than 4 MiB.
    return Bounds(size=4 << 20, stall_s=20.0, total_s=90.0)


def authorization(client: "Client", ref: Reference, header: str, *, actions: str = "pull") -> str:
    """Return the Authorization header that answers the registry's challenge (RFC 6750, or HTTP Basic).

    Args:
        client: what asks for a token.
        ref: of the repository.
        header: the challenge, the registry's WWW-Authenticate.
        actions: what a token is asked for, where the challenge does not say: `pull` or `pull,push`.

    Raises:
        HostError: there is no login, or it is refused.
        NoAnswerError, BadAnswerError: the host that gives tokens cannot be reached or used.

    """
    from envbuild.net.answers import read_challenge, read_token, token_url
    from envbuild.net.docker_login import docker_login
    from envbuild.net.fetch import body_of

    challenge = read_challenge(header)
    basic = docker_login(_HUB_LOGIN if ref.host == _HUB else ref.host)
    if challenge.scheme == "basic" and basic:
        return basic
    if challenge.scheme != "bearer" or not challenge.realm:
        raise no_access(ref)
    url = token_url(challenge, scope=f"repository:{ref.path}:{actions}", plain=ref.loopback)
    # As docker does: the login for a registry goes to the realm that this registry itself names, which is often another
    # host (auth.docker.io). It goes there over https and to no further host.
    answer, body = client.ask(url, body_of, bounds=_bounds(), login=basic)
    if answer.status in {400, 401, 403}:
        raise no_access(ref)
    if body is None:
        raise HostError(
            f"the registry {ref.host} gives no token: it answered {answer.status} {answer.reason}".rstrip(),
            where=url.partition("?")[0],
            hint="try again later, or check the proxy setting",
        )
    return f"Bearer {read_token(body)}"


def no_access(ref: Reference) -> HostError:
    """Return the error of a registry that refuses access."""
    return HostError(
        f"the registry {ref.host} refuses access to {ref.path}",
        hint=f"docker login {'' if ref.host == _HUB else ref.host}".rstrip(),
    )

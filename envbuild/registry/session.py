"""Requests to one repository of a registry: its address, its login, and what went wrong as an error for the user."""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import urljoin

from envbuild.errors import EnvbuildError, HostError, LockError
from envbuild.net.address import place_of, read_address
from envbuild.net.exchange import Answer, Bounds, Upload
from envbuild.net.failures import BadAnswerError, NoAnswerError
from envbuild.net.http import Client
from envbuild.net.registry import authorization, no_access, parse_reference
from envbuild.settings import Settings

T = TypeVar("T")

SMALL = Bounds(size=4 << 20, stall_s=20.0, total_s=90.0)
"""A manifest, a list."""


class Session:
    """Requests to one repository. Connections and the login are kept until it is closed.

    Args:
        repository: `registry.example.org/team/name`, without a tag.
        settings: the proxies and the CA bundle.

    Raises:
        UsageError: `repository` is no name of one.

    """

    def __init__(self, repository: str, settings: Settings | None) -> None:
        self._ref = parse_reference(repository)
        self.name = self._ref.repository
        self._base = f"{self._ref.api}/"
        self._client = Client(settings, direct=self._ref.loopback)
        self._logins: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.__exit__(kind, error, trace)

    def url(self, path: str) -> str:
        """Return the address of `path` in the repository, such as `manifests/latest`."""
        return self._base + path

    def own_url(self, base: str, location: str) -> str:
        """Return the absolute address of `location`, which an answer from `base` names.

        Raises:
            LockError: it is none, or another host's, which has no right to what is sent or read there.

        """
        try:
            found = read_address(urljoin(base, location))
            own = found.origin == read_address(self._base).origin and not found.login
        except ValueError:
            own = False
        if not own:
            raise self.unusable(f"it refers to another host: {place_of(location)}", base)
        return found.url

    def ask(
        self,
        url: str,
        take: Callable[[Answer, Iterator[bytes]], T],
        *,
        method: str = "GET",
        accept: str | None = None,
        upload: Upload | None = None,
        bounds: Bounds = SMALL,
        hashed: bool = False,
    ) -> tuple[Answer, T | None]:
        """Ask for `url` of this registry, with a login where it wants one.

        Returns:
            The answer, whatever its status but 401, 403, 429 and 5xx, and what `take` returned for a good one.

        Raises:
            HostError: the registry cannot be reached, cannot serve now, or refuses access.
            LockError: its answer is larger than `bounds`, or leads nowhere.

        """
        actions = "pull" if method in {"GET", "HEAD"} else "pull,push"
        headers = {"Accept": accept} if accept else {}

        def once() -> tuple[Answer, T | None]:
            return self._client.ask(
                url,
                take,
                bounds=bounds,
                headers=headers,
                login=self._logins.get(actions) or self._logins.get("pull,push"),
                hashed=hashed,
                method=method,
                upload=upload,
            )

        try:
            answer, taken = once()
            if answer.status == 401:
                challenge = answer.headers.get("www-authenticate", "")
                self._logins[actions] = authorization(self._client, self._ref, challenge, actions=actions)
                answer, taken = once()
        except NoAnswerError as error:
            raise HostError(
                f"the registry {self._ref.host} cannot be reached: {error.reason}",
                where=place_of(url),
                hint="check the address, the network, and the proxy and ca_bundle settings",
            ) from None
        except BadAnswerError as error:
            raise self.unusable(str(error), url) from None
        if answer.status in {401, 403}:
            raise no_access(self._ref)
        if answer.status == 429 or answer.status >= 500:
            raise self.refused(answer, url)
        return answer, taken

    def unusable(self, why: str, url: str, *, hint: str | None = None) -> LockError:
        """Return the error of an answer that cannot be used."""
        return LockError(
            f"the registry {self._ref.host} cannot be used: {why}",
            where=place_of(url),
            hint=hint or "check that the address is a registry's, and ask who runs it",
        )

    def refused(self, answer: Answer, url: str) -> EnvbuildError:
        """Return the error of an answer that is not good."""
        return HostError(
            f"the registry {self._ref.host} answered {answer.status} {answer.reason}".rstrip(),
            where=place_of(url),
            hint="try again later, or check the address and what this login may do there",
        )

"""Asking upstreams for releases: package indexes, and the tags of a repository.

What answered and what did not is kept: an answer without news is one only of those that were asked.
"""

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass, field

from packaging.version import Version

from envbuild.curate.proposals import Proposal
from envbuild.curate.wheels import Distribution, Upload, distributions, uploads
from envbuild.errors import EnvbuildError, HostError, LockError
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.matrix.spec import version_key
from envbuild.net.address import place_of
from envbuild.settings import Settings
from envbuild.util.git import Reach, empty_repository, run_git
from envbuild.util.names import Commit, SafeName, checked

_GIT_TIMEOUT_S = 60


@dataclass(kw_only=True)
class Asking:
    """One run: the matrix, indexes that are not asked again once they did not answer, and tags asked once per repository."""

    matrix: Matrix
    settings: Settings
    answered: list[str] = field(default_factory=list)
    """The upstreams that answered, each once, without logins."""
    unreachable: list[str] = field(default_factory=list)
    """Those that could not be asked."""
    silent: set[str] = field(default_factory=set)
    """The settings' `index_url` or `torch_index` that did not answer."""
    tags: dict[str, dict[str, str]] = field(default_factory=dict)
    torch: tuple[Proposal, ...] | None = None
    """New torch builds, once asked for: cuDNN and NCCL follow from them."""

    def releases(
        self, name: str, *, index: str | None = None, prereleases: bool = False
    ) -> dict[Version, Distribution]:
        """Return the releases of `name` on `index` (the settings' own by default), oldest first.

        {} where the index cannot be reached, which `unreachable` then lists; it is not asked again.

        Raises:
            LockError: the index has no such distribution.

        """
        url = index or self.settings.index_url
        # the variants' indexes lie on one host: what waits for one in vain does not wait for each
        root = self.settings.torch_index if url.startswith(self.settings.torch_index) else url
        if root in self.silent:
            self._note(self.unreachable, place_of(url))
            return {}
        try:
            found = distributions(self.settings, name, index=index, prereleases=prereleases)
        except HostError:
            self.silent.add(root)
            self._note(self.unreachable, place_of(url))
            return {}
        except LockError:
            self._note(self.answered, place_of(url))
            raise
        self._note(self.answered, place_of(url))
        return found

    def days(self, name: str) -> dict[Version, Upload]:
        """Return when each version of `name` was uploaded, as far as the settings' index says so."""
        if self.settings.index_url in self.silent:
            return {}
        try:
            return uploads(self.settings, name)
        except HostError:
            return {}

    @staticmethod
    def _note(where: list[str], upstream: str) -> None:
        if upstream not in where:
            where.append(upstream)

    def listed(self, axis: AxisName) -> set[Version]:
        """Return the versions of `axis` that an index may have; what an image holds is on none."""
        known = set()
        for release in self.matrix.releases[axis]:
            if getattr(release.facts, "index", None) == "base":
                continue
            for text in (release.version, getattr(release.facts, "pypi", None)):
                version = version_key(text) if text else None
                if version is not None:
                    known.add(Version(version.public))
        return known

    def newer(
        self, axis: AxisName, name: str, *, chosen: bool = False
    ) -> Iterator[tuple[Distribution, dt.date | None]]:
        """Yield the releases of `name` that are not listed and not yanked, with their day.

        Args:
            axis: whose releases are known.
            name: the distribution.
            chosen: the axis lists a choice of the releases, so only what is newer than all of them is news; else what is
                newer than the oldest.

        """
        known = self.listed(axis)
        oldest = max(known) if chosen else min(known)
        # an axis of betas alone is asked for betas
        found = self.releases(name, prereleases=all(version.is_prerelease for version in known))
        days = self.days(name) if found else {}
        for version, distribution in found.items():
            # 2.6.0.post1 is the matrix' 2.6.0 on PyPI: a person states that, so it is not a separate release
            rebuilt = version.is_postrelease and Version(version.base_version) in known and not chosen
            if version in known or version < oldest or rebuilt:
                continue
            upload = days.get(version)
            if upload is None or not upload.yanked:
                yield distribution, distribution.date or (upload.day if upload else None)

    def commits(self, repository: str) -> dict[str, str]:
        """Return tag -> commit of `repository`; {} and a remark when it cannot be asked."""
        if repository not in self.tags:
            self.tags[repository] = {}
            reach = Reach(
                ca_bundle=self.settings.ca_bundle,
                https_proxy=self.settings.https_proxy,
                no_proxy=self.settings.no_proxy,
            )
            try:
                with empty_repository() as ours:
                    answer = run_git(
                        ours, "ls-remote", "--tags", operands=(repository,), reach=reach, limit_s=_GIT_TIMEOUT_S
                    )
            except (EnvbuildError, OSError):
                self.unreachable.append(repository)
            else:
                (self.unreachable if answer.code else self.answered).append(repository)
                self.tags[repository] = read_tags(answer.stdout.decode("utf-8", "replace"))
        return self.tags[repository]


def read_tags(text: str) -> dict[str, str]:
    """Read `git ls-remote --tags`: an annotated tag's commit is on its `^{}` line. Other lines are left out."""
    tags: dict[str, str] = {}
    for line in text.splitlines():
        commit, _, ref = line.partition("\t")
        if not ref.startswith("refs/tags/"):
            continue
        name = ref.removeprefix("refs/tags/")
        try:
            checked(Commit, commit)
            checked(SafeName, name.removesuffix("^{}"))
        except ValueError:
            continue
        if name.endswith("^{}"):
            tags[name.removesuffix("^{}")] = commit
        else:
            tags.setdefault(name, commit)
    return tags

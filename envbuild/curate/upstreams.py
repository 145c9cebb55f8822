"""Asking upstreams for releases: a package index, and the tags of a repository, each once a run."""

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass, field

from packaging.version import Version

from envbuild.curate.proposals import Proposal
from envbuild.curate.wheels import Distribution, distributions, uploads
from envbuild.errors import EnvbuildError
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.matrix.spec import version_key
from envbuild.settings import Settings
from envbuild.util.git import Reach, empty_repository, run_git
from envbuild.util.names import Commit, SafeName, checked

_GIT_TIMEOUT_S = 60


@dataclass(kw_only=True)
class Asking:
    """One run: the matrix, the index, and tags asked once per repository."""

    matrix: Matrix
    settings: Settings
    unreachable: list[str] = field(default_factory=list)
    tags: dict[str, dict[str, str]] = field(default_factory=dict)
    torch: tuple[Proposal, ...] | None = None
    """New torch builds, once asked for: cuDNN and NCCL follow from them."""

    def listed(self, axis: AxisName) -> set[Version]:
        known = set()
        for release in self.matrix.releases[axis]:
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
        said = uploads(self.settings, name)
        for version, distribution in distributions(self.settings, name).items():
            # 2.6.0.post1 is the matrix' 2.6.0 on PyPI: a person states that, so it is no release of its own
            rebuilt = version.is_postrelease and Version(version.base_version) in known and not chosen
            if version in known or version < oldest or rebuilt:
                continue
            upload = said.get(version)
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
                if answer.code:
                    self.unreachable.append(repository)
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

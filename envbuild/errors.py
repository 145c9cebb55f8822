"""One class per kind of failure, each with its exit code and what to do next.

Every error a user can meet is an `EnvbuildError`: the command line prints it as at most three lines (what, where, what to
do) on stderr and exits with its code, never with a traceback.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol


class Explanation(Protocol):
    """Why there is no cell, as the solver explains it."""

    @property
    def steps(self) -> Sequence[Any]:
        """From what was asked to what cannot be; each has a `text` and a `source`."""

    def nearest_text(self) -> str:
        """Return the cells that change the fewest pins, as lines."""

    def as_json(self) -> dict[str, Any]:
        """Return the steps and the nearest cells."""


class EnvbuildError(Exception):
    """A failure that the user can understand and fix.

    Args:
        what: one sentence, without a trailing full stop, that says what is wrong.
        where: the file, line, flag, stage or host that it was found at.
        hint: what to do next: a command, a setting, a value to choose.

    """

    exit_code: ClassVar[int] = 2

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.hint:
            lines.append(f"  to do: {self.hint}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """Return the error as the object that `--json` prints."""
        return {
            "error": type(self).__name__.removesuffix("Error").lower(),
            "what": self.what,
            "where": self.where,
            "hint": self.hint,
            "exit_code": self.exit_code,
        }


class UsageError(EnvbuildError):
    """A flag, axis or version that does not exist, or that is used wrongly."""


class DataError(EnvbuildError):
    """A data file (matrix, stack, lock, patch manifest, settings) that does not load or contradicts itself."""


def no_registry(where: str, purpose: str = "") -> DataError:
    """Return the error of a command that needs a registry where the settings name none; `purpose` is such as `to push to`."""
    return DataError(
        f"no registry is set {purpose}".rstrip(),
        where=where,
        hint="set `registry` in the settings (~/.config/envbuild/config.toml), or ENVBUILD_REGISTRY, such as ghcr.io/acme/envbuild",
    )


class NoCellError(EnvbuildError):
    """No cell satisfies the request; numbered steps explain the conflict."""

    exit_code = 3

    def __init__(
        self, what: str, *, where: str | None = None, hint: str | None = None, conflict: Explanation | None = None
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.conflict = conflict

    def as_json(self) -> dict[str, object]:
        """Return the steps and the nearest cells, where the error comes from the solver."""
        return super().as_json() if self.conflict is None else self.conflict.as_json()


class LockError(EnvbuildError):
    """A lock that is incomplete or stale, or an input whose hash differs from the lock."""

    exit_code = 4


class PatchError(EnvbuildError):
    """A tree that a patch does not fit: another pre-image, a missing file, a link out of the tree."""

    exit_code = 4


class BuildError(EnvbuildError):
    """A stage of the build failed; the log is kept on disk."""

    exit_code = 5


class AuditError(EnvbuildError):
    """An image without something that its lock lists, or with something that must not be in it."""

    exit_code = 6


class SmokeError(EnvbuildError):
    """A smoke test failed: a component is missing, wrong, or silently slower than it should be."""

    exit_code = 7


class HostError(EnvbuildError):
    """The machine has no engine, GPU, disk or tool that is needed, or another host does not answer or cannot serve now."""

    exit_code = 8


class InternalError(EnvbuildError):
    """A defect of envbuild itself: an exception that nothing foresaw."""

    exit_code = 70

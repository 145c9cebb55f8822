"""Whether the newest upstream still needs a patch."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from envbuild.errors import PatchError
from envbuild.patches.manifest import FILE_LIMIT, Patch
from envbuild.util.below import OutsideError, read_below


@dataclass(frozen=True, kw_only=True)
class UpstreamReport:
    """Whether the newest upstream still needs a patch, and what was last known of that."""

    name: str
    path: str
    state: Literal["needed", "fixed", "gone"]
    known: Literal["needed", "fixed", "gone"]
    text: str


def check_upstream(tree: Path, patches: Iterable[Patch]) -> tuple[UpstreamReport, ...]:
    """Say of each patch whether the upstream in `tree` still needs it; such a tree need hold only the file looked at.

    Raises:
        PatchError: `tree` is no folder, or the file cannot be read.

    """
    if not tree.is_dir():
        raise PatchError("the upstream tree is not a folder", where=str(tree))
    reports = []
    for patch in patches:
        rule = patch.upstream
        sign = rule.fixed_when_present or rule.fixed_when_absent
        state: Literal["needed", "fixed", "gone"]
        try:
            present = str(sign).encode() in read_below(tree, rule.path, limit=FILE_LIMIT)
        except OutsideError as error:
            raise PatchError(f"{rule.path} cannot be read: {error}", where=str(tree / rule.path)) from error
        except (FileNotFoundError, NotADirectoryError):
            state, text = "gone", f"{rule.ref} has no {rule.path} any more"
        except OSError as error:
            raise PatchError(f"{rule.path} cannot be read: {error.strerror}", where=str(tree / rule.path)) from error
        else:
            state = "fixed" if present == (rule.fixed_when_present is not None) else "needed"
            text = f"{rule.ref}'s {rule.path} {'has' if present else 'does not have'} {sign!r}"
        reports.append(UpstreamReport(name=patch.name, path=rule.path, state=state, known=rule.state, text=text))
    return tuple(reports)

"""Checking a tree against patches, applying them to it or undoing them: all of them, or none."""

import os
from collections.abc import Iterable
from pathlib import Path

from envbuild.errors import PatchError, UsageError
from envbuild.patches.manifest import Patch
from envbuild.patches.replace import alone, replace
from envbuild.patches.tree import PatchReport, examine
from envbuild.util.text import count_of


def check(tree: Path, patches: Iterable[Patch]) -> tuple[PatchReport, ...]:
    """Say of each patch, in the order they apply in, whether it fits the tree, is in it already, or is refused.

    A patch behind another on the same file is judged on what the other one makes of that file. What a killed run left in
    the tree is put back first.

    Raises:
        PatchError: `tree` is no folder, or what a killed run left cannot be put back.
        DataError: the patches contradict each other or their own ids.
        HostError: git is not here.

    """
    with alone(tree):
        return examine(tree, patches)[0]


def apply(tree: Path, patches: Iterable[Patch]) -> tuple[PatchReport, ...]:
    """Apply every patch to the tree, or none of them.

    All files are verified and all new contents computed before the first is written. Each is then replaced by renaming,
    with its mode kept; when that fails or is interrupted, what was replaced is put back, and when the run is killed, the
    next one on this tree does that. Two calls on one tree wait for each other, where its file system has locks.

    Returns:
        The reports of before: `applies` means that the patch is in the tree now, `applied` that it was already.

    Raises:
        PatchError: a patch is refused, or the tree cannot be written; the tree is as it was.
        UsageError: the patches are of more than one target.
        DataError: the patches contradict each other or their own ids.
        HostError: git is not here.

    """
    return _change(tree, patches, undo=False)


def undo(tree: Path, patches: Iterable[Patch]) -> tuple[PatchReport, ...]:
    """Take every patch out of the tree again, the last one first, or none of them; as `apply` in everything else.

    Returns:
        The reports of before: `applied` means that the patch was taken out, `applies` that it was not in the tree.

    Raises:
        PatchError, UsageError, DataError, HostError: as `apply`.

    """
    return _change(tree, patches, undo=True)


def _change(tree: Path, patches: Iterable[Patch], *, undo: bool) -> tuple[PatchReport, ...]:
    patches = list(patches)
    targets = sorted({patch.target for patch in patches})
    if len(targets) > 1:
        raise UsageError(
            f"a tree takes the patches of one target, not of {', '.join(targets)}",
            where="--patch",
            hint="name the patches of one",
        )
    with alone(tree):
        reports, read, changed = examine(tree, patches, undo=undo)
        for report in reports:
            if report.error is not None:
                raise report.error
        replace(tree.resolve(), {path: (read[path].content, read[path].mode) for path in changed}, changed)
    return reports


def of_tree(tree: Path, patches: Iterable[Patch]) -> list[Patch]:
    """Return the patches of the target that the tree is a checkout of, recognised by its files.

    That is the target of which the most files have a known blob id. Where no file has one, it is the target of which the
    most files are there, if all files of one of its patches are: the tree is then another revision, which a check
    refuses by name.

    Raises:
        PatchError: the tree is no folder, or none of the targets.
        UsageError: as many files speak for one target as for another.

    """
    patches = list(patches)
    reports = check(tree, patches)
    known: dict[str, set[str]] = {}
    there: dict[str, set[str]] = {}
    for report in reports:
        known.setdefault(report.target, set()).update(f.path for f in report.files if f.found in {f.pre, f.post})
        there.setdefault(report.target, set()).update(f.path for f in report.files if f.found)
    most = max(map(len, known.values()), default=0)
    targets = sorted(target for target, files in known.items() if most and len(files) == most)
    if len(targets) > 1:
        raise UsageError(
            f"the tree may be of {' or of '.join(targets)}: {count_of(most, 'file')} with a known blob id {'fits' if most == 1 else 'fit'} each",
            where=str(tree),
            hint="name the patches with --patch",
        )
    if not targets:
        whole = sorted({report.target for report in reports if all(file.found for file in report.files)})
        targets = [max(whole, key=lambda target: len(there[target]))] if whole else []
    if not targets:
        # a file of theirs that is there and cannot be taken, a link for example, says more
        for report in reports:
            if report.error is not None and any(os.path.lexists(tree / file.path) for file in report.files):
                raise report.error
        raise PatchError(
            "there is no patch for this tree",
            where=str(tree),
            hint=f"name the root of a checkout of {', '.join(sorted({p.repo for p in patches}))}",
        )
    return [patch for patch in patches if patch.target in targets]

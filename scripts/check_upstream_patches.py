"""Check the patches against the repositories that they are for, fetched with git.

    python scripts/check_upstream_patches.py TREES

makes TREES/TARGET, a checkout of each target's first pinned revision, and verifies there that every patch applies, and
applies only once. Then it looks at the newest upstream and says which patches it still needs. Run the tests of the patches
with UPSTREAM_TREES=TREES afterwards: they take the real files from there.

Exits with 4 when a patch does not fit, or when an upstream is not as the manifest last saw it.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from envbuild.errors import EnvbuildError
from envbuild.patches.apply import apply, check
from envbuild.patches.manifest import Patch, load_patches
from envbuild.patches.upstream import check_upstream


def git(folder: Path, *command: str, ok: tuple[int, ...] = (0,)) -> int:
    """Run git in `folder` and return its status, one of `ok`."""
    done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=False)
    if done.returncode not in ok:
        sys.exit(f"git {' '.join(command)} in {folder}: {done.stderr.strip()}")
    return done.returncode


def fetch(folder: Path, repo: str, ref: str, *, only: str | None = None) -> None:
    """Make `folder` a checkout of one revision, or of the one file `only` of it, if the revision has that."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    git(folder, "fetch", "-q", "--depth", "1", *(["--filter=blob:none"] if only else []), repo, ref)
    if only is None:
        git(folder, "-c", "core.autocrlf=false", "checkout", "-q", "FETCH_HEAD")
        return
    git(folder, "remote", "add", "origin", repo)  # where the one file's content comes from
    git(folder, "config", "remote.origin.promisor", "true")
    if git(folder, "cat-file", "-e", f"FETCH_HEAD:{only}", ok=(0, 1, 128)) == 0:
        git(folder, "-c", "core.autocrlf=false", "checkout", "-q", "FETCH_HEAD", "--", only)


def pinned(patches: list[Patch], trees: Path) -> None:
    """Fetch the pinned tree of a target, and try its patches on a copy."""
    first = patches[0]
    tree = trees / first.target
    if not tree.exists():
        fetch(tree, first.repo, first.revisions[0].commit)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(tree, copy, symlinks=True)
        apply(copy, patches)
        states = {report.name: report.state for report in check(copy, patches)}
    print(f"{first.target} at {first.revisions[0]}: {states}")


def upstream(patch: Patch) -> bool:
    """Look at the newest upstream of a patch and say whether it is as it was last seen."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        fetch(tree, patch.repo, patch.upstream.ref, only=patch.upstream.path)
        (report,) = check_upstream(tree, [patch])
    news = "" if report.state == report.known else f" - was {report.known}; it may go {patch.expires}"
    print(f"{patch.name}: {report.state}: {report.text}{news}")
    return not news


def main() -> int:
    """Check every patch; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path)
    trees = parser.parse_args().trees.absolute()
    patches = load_patches()
    try:
        for target in sorted({patch.target for patch in patches.values()}):
            pinned([patch for patch in patches.values() if patch.target == target], trees)
        same = [upstream(patch) for patch in patches.values()]
    except EnvbuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0 if all(same) else 4


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Check the docs without a network: lines, links and anchors, paths that code and data name, the README, the reference.

    python scripts/check_docs.py

Prints each problem as FILE:LINE: TEXT, and exits with 1 when there is one.
"""

import re
import subprocess
import sys
import tomllib
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 120
README_LINES = 90
LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+?)(?: *\{ *#([\w-]+) *\})?$")
NAMED = re.compile(r"(?<![\w./@:-])docs/[\w./-]*\w")
# Names of files that only a test's own data has, or that another repository has.
ELSEWHERE = re.compile(r"docs/(?:installation\.rst|authorized_keys\.md|admin/|pythonDSL/|latest/|datacenter/)")


def tracked() -> list[Path]:
    """Return the files of the repository that git knows, or would."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def slugs(heading: str) -> set[str]:
    """Return the anchors of a heading: the site's and the code host's, which differ where a sign stands between blanks."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    kept = re.sub(r"[^\w\s-]", "", unicodedata.normalize("NFKC", plain)).strip().lower()
    return {re.sub(r"[-\s]+", "-", kept), kept.replace(" ", "-")}


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors that lead to the same heading on the site and on the code host."""
    found: set[str] = set()
    for _, line in prose(page.read_text(encoding="utf-8")):
        if heading := HEADING.match(line):
            spelt = slugs(heading[1])
            found |= {heading[2]} if heading[2] else spelt if len(spelt) == 1 else set()
    return frozenset(found)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not in a fenced block."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if fence:
            if mark and line.strip() == fence:
                fence = ""
        elif mark:
            fence = mark[1]
        else:
            yield number, line


def repository() -> str:
    """Return the address of the repository, as the package's metadata states it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["urls"]["Repository"]).removesuffix("/")


def link_problem(page: Path, target: str) -> str | None:
    """Return what is wrong with a link of a page, or None."""
    base = f"{repository()}/"
    if target.startswith(base):
        kind, _, path = target.removeprefix(base).partition("/main/")
        if kind not in {"blob", "tree", "raw"}:
            return None
        start = ROOT
    elif re.match(r"[a-z]+:", target):
        return None
    elif page == ROOT / "README.md":
        return f"{target} is a relative link, which leads nowhere on the package index: write {base}blob/main/…"
    else:
        path, start = target, page.parent
    name, _, anchor = path.partition("#")
    file = (start / name).resolve() if name else page
    if not file.is_relative_to(ROOT) or not file.exists():
        return f"{target} leads to no file"
    if anchor and anchor not in anchors(file):
        return f"{target} leads to no heading, or to one that the site and the code host name in two ways"
    return None


def problems_of_page(page: Path) -> Iterator[str]:
    """Yield what is wrong in one page."""
    text = page.read_text(encoding="utf-8")
    where = page.relative_to(ROOT)
    if not text.startswith(("# ", "---\n")):
        yield f"{where}:1: the page does not begin with its heading"
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > LONGEST and not line.lstrip().startswith("|"):  # a row of a table cannot be broken
            yield f"{where}:{number}: {len(line)} columns, at most {LONGEST} are allowed"
    for number, line in prose(text):
        for target in LINK.findall(re.sub(r"`[^`]*`(?!\])", "", line)):
            if problem := link_problem(page, target):
                yield f"{where}:{number}: {problem}"


def problems_of_names(path: Path) -> Iterator[str]:
    """Yield each path below docs/ that a file names and that does not exist."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    if "docs/" not in text:
        return
    for number, line in enumerate(text.splitlines(), 1):
        for name in NAMED.findall(line):
            if not ELSEWHERE.match(name) and not (ROOT / name).exists():
                yield f"{path.relative_to(ROOT)}:{number}: {name} does not exist"


def main() -> int:
    """Print the problems."""
    files = tracked()
    pages = [path for path in files if path.suffix == ".md" and not path.is_relative_to(ROOT / "tests")]
    found = [problem for page in pages for problem in problems_of_page(page)]
    named = [path for path in files if path != ROOT / "tests" / "unit" / "test_docs.py"]  # names pages that are not
    found += [problem for path in named for problem in problems_of_names(path)]
    lines = len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())
    if lines > README_LINES:
        found.append(f"README.md: {lines} lines, at most {README_LINES} are allowed")
    print(*found, sep="\n", end="\n" if found else "")
    if found:
        return 1
    print(f"{len(pages)} pages: lines, links, anchors and names are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())

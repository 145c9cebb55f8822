"""What a diff is allowed to be: the heads of its files and hunks are read here, and `git apply` does the rest.

Loading a manifest starts no process, so that a plan can be made anywhere. Only the lines are counted that a hunk states.
"""

import re

from envbuild.errors import DataError

_HUNK = re.compile(rb"@@ -\d{1,9}(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@")


def paths_of(diff: bytes, *, where: str) -> tuple[str, ...]:
    """Return the paths that a unified diff changes, which has git's `a/` and `b/` before them.

    Raises:
        DataError: it does something else than change existing text files in place, or states a wrong number of lines.

    """
    lines = diff.removesuffix(b"\n").split(b"\n") if diff else []
    paths: dict[str, int] = {}  # with the number of hunks
    path: str | None = None
    old = new = at = 0

    def bad(problem: str) -> DataError:
        return DataError(f"the diff does not parse: {problem}", where=f"{where}:{at + 1}")

    while at < len(lines):
        line = lines[at]
        if line.startswith(b"\\"):  # no newline at the end of the file
            if path is None or not paths[path]:
                raise bad("a remark stands before any hunk")
        elif old or new:
            if line[:1] not in {b" ", b"-", b"+"}:
                raise bad("a hunk's line starts with neither a blank, + nor -")
            old -= line[:1] != b"+"
            new -= line[:1] != b"-"
            if min(old, new) < 0:
                raise bad("a hunk has not the number of lines that its head states")
        elif line.startswith(b"--- "):
            if not line.startswith(b"--- a/") or at + 1 == len(lines) or lines[at + 1] != b"+++ b/" + line[6:]:
                raise bad("it must change a file in place (--- a/PATH, then +++ b/PATH)")
            path = line[6:].decode("utf-8", "replace")
            if path in paths:
                raise bad(f"{path} comes twice")
            paths[path] = 0
            at += 1
        elif head := _HUNK.match(line):
            if path is None:
                raise bad("a hunk comes before any file")
            old, new = int(head[1] or 1), int(head[2] or 1)
            paths[path] += 1
        elif line.startswith((b"diff --git ", b"index ")):
            path = None
        else:
            raise bad(f"unexpected {line[:40].decode('utf-8', 'replace')!r}")
        at += 1
    if old or new:
        raise bad("a hunk has not the number of lines that its head states")
    if not paths or not all(paths.values()):
        raise DataError("the diff changes nothing", where=where)
    return tuple(paths)

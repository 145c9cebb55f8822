#!/usr/bin/env python3
"""Find words that a reader stumbles over, in code, messages and docs, and print what to write instead.

Reads every tracked text file but those of EXCLUDED, and finds the words of WORDS in prose, in strings and as parts of
names (`told`, `_told`, `told_end`, `HostBrings`), and phrases also where they go on in the next line. A line that has to
keep a word, such as a JSON field or a quote of another project's text, has a comment on it or on the line above:

    "mend": fixes,  # plain-words: allow mend - a field of the JSON answer

Exits with 1 when it finds a word, an allowance without use, or a folder in NOT_YET that has none of the words any more.

Usage: scripts/plain_words.py [--count] [PATH...]
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# The word or phrase -> what to write instead. Every form of a verb is listed: "foretell" or "blacklist" must not match.
WORDS = {
    "in one look": "at once, in one step",
    "when it was asked for by flag or stack only": "only when a flag or a stack names it",
    "the road": "the steps",
    "road": "the steps, how",
    "roads": "ways",
    "of its own": "its own X, a separate X",
    "of their own": "their own X, separate X",
    "nobody's": "not owned, free",
    "tell": "print, show, report, list",
    "tells": "prints, shows, reports",
    "told": "printed, shown, reported; 'distinguished' for 'told apart'",
    "telling": "showing, informative",
    "mend": "fix",
    "mends": "fixes",
    "mended": "fixed",
    "mending": "fixing",
    "heed": "follow, use",
    "heeds": "follows, uses",
    "heeded": "followed, used",
    "lack": "be missing, have no",
    "lacks": "is missing, has no, is without",
    "lacked": "was missing, had no",
    "lacking": "missing",
    "bring": "contain, install, download",
    "brings": "contains, installs, comes with",
    "bringing": "downloading, installing",
    "brought": "installed, included, downloaded",
    "beside": "next to, besides, with",
    "said": "reported, stated, named; the output",
    "vouch": "confirm",
    "vouches": "confirms",
    "vouched": "confirmed",
    "wherefrom": "where ... from",
    "thereby": "so",
    "hitherto": "so far",
    "anew": "again",
    "anybody's": "untrusted",
    "held against": "compared with, checked against",
}

# What stays as it is, each with the reason.
EXCLUDED = {
    "scripts/plain_words.py": "the list itself",
    "tests/unit/test_plain_words.py": "its examples",
    "LICENSE": "another's text",
    "envbuild/plan/compiled_dockerfile.py": "made from dockerfiles/Dockerfile.j2",
    "dockerfiles/": "its files are copied into images: a changed comment is another digest",
    "envbuild/plan/compiled_": "compiled from the templates of dockerfiles/",
    "smoke_tests/": "its files are copied into images, and evidence names their hash",
    "patches/": "diffs of other projects' files; a patch's hash is in the locks",
    "matrices/locks/": "made by `envbuild lock`",
    "matrices/evidence/": "records of runs",
    "tests/data/": "recorded answers and other projects' files",
    "docs/gpu/": "records of runs, and the locks that they are of",
}

# Not yet rewritten. It shrinks to nothing: what has none of the words any more is an error here.
NOT_YET: tuple[str, ...] = ()

_SUFFIXES = {".py", ".md", ".toml", ".j2", ".js", ".css", ".html", ".yml", ".yaml", ".sh", ".bash", ""}
_ALLOWANCE = re.compile(r"plain-words: allow (?P<words>[a-z' ]+(?:, [a-z' ]+)*) - \S")
# What may stand between the words of a phrase: blanks, or a line's end with the next line's comment sign.
_GAP = r"(?:[^\S\n]+|[^\S\n]*\n[^\S\n]*(?:(?:#|//|\*)[^\S\n]*)?)"


class Found(NamedTuple):
    """A word to replace."""

    path: str
    line: int
    word: str
    text: str

    def __str__(self) -> str:
        instead = WORDS.get(self.word)
        return f"{self.path}:{self.line}: {self.text}" + (
            f' (write instead of "{self.word}": {instead})' if instead else ""
        )


def _pattern() -> re.Pattern[str]:
    """Return what matches each word in three cases: lower, Capitalised (a hump of a name, too) and UPPER."""
    phrases = sorted(WORDS, key=len, reverse=True)

    def any_of(form: Sequence[str]) -> str:
        return "|".join(_GAP.join(re.escape(part) for part in phrase.split()) for phrase in form)

    lower = rf"(?<![A-Za-z])(?:{any_of(phrases)})(?![a-z])"
    hump = rf"(?<![A-Z])(?:{any_of([phrase[0].upper() + phrase[1:] for phrase in phrases])})(?![a-z])"
    upper = rf"(?<![A-Za-z])(?:{any_of([phrase.upper() for phrase in phrases])})(?![A-Za-z])"
    return re.compile(f"{lower}|{hump}|{upper}")


_PATTERN = _pattern()


def words_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line, from 1, and the word or phrase, in lower case, of each match in `text`."""
    for match in _PATTERN.finditer(text):
        word = " ".join(re.sub(r"[#*]|//", " ", match.group()).lower().split())
        yield text.count("\n", 0, match.start()) + 1, word


def findings(path: str, text: str) -> Iterator[Found]:
    """Yield what is wrong in the text of one file: words of the list, and allowances that allow nothing."""
    lines = text.split("\n")
    allowed: dict[int, set[str]] = {}
    unused: dict[tuple[int, str], None] = {}
    for number, line in enumerate(lines, 1):
        if (match := _ALLOWANCE.search(line)) is None:
            if "plain-words: allow" in line:
                yield Found(path, number, "", "an allowance has the form `plain-words: allow WORD, WORD - REASON`")
            continue
        alone = not line[: match.start()].strip(" \t#/*<!-")
        for word in match["words"].split(", "):
            allowed.setdefault(number + alone, set()).add(word)
            unused[number, word] = None
    for number, word in words_in(text):
        if "plain-words: allow" in lines[number - 1] and word not in lines[number - 1].split("plain-words:")[0].lower():
            continue  # the allowance's own text
        if word in allowed.get(number, ()):
            for at in (number, number - 1):
                unused.pop((at, word), None)
            continue
        yield Found(path, number, word, lines[number - 1].strip()[:160])
    for number, word in unused:
        yield Found(path, number, "", f'"{word}" is allowed and not there')


def tracked() -> list[str]:
    """Return the paths, below the root, of the files to read."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [
        path
        for path in listed.split("\0")
        if path
        and not path.startswith(tuple(EXCLUDED))
        and Path(path).suffix in _SUFFIXES
        and (ROOT / path).is_file()
        and not (ROOT / path).is_symlink()
    ]


def main(arguments: Sequence[str]) -> int:
    """Print every finding, or with --count how many each file has; return the exit code."""
    chosen = [argument.removeprefix("./") for argument in arguments if not argument.startswith("-")]
    found: list[Found] = []
    waiting: Counter[str] = Counter()
    for path in tracked():
        if chosen and not path.startswith(tuple(chosen)):
            continue
        here = list(findings(path, (ROOT / path).read_text(encoding="utf-8")))
        group = next((prefix for prefix in NOT_YET if path.startswith(prefix)), None)
        if group is None or chosen:
            found += here
        else:
            waiting[group] += len(here)
    if "--count" in arguments:
        for path, count in sorted(Counter(each.path for each in found).items()):
            print(f"{count:5} {path}")
    else:
        print(*found, sep="\n", end="\n" if found else "")
    clean = [] if chosen else [prefix for prefix in NOT_YET if not waiting[prefix]]
    for prefix in clean:
        print(f"scripts/plain_words.py: {prefix} has none of the words any more: remove it from NOT_YET")
    if found:
        print(
            f"{len(found)} words to replace; docs/reference/glossary.md lists the project's own words", file=sys.stderr
        )
    return 1 if found or clean else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

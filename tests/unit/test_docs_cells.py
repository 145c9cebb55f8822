"""The cells that the pages show are those that their commands choose."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from envbuild.cli import cli, main

ROOT = Path(__file__).resolve().parents[2]
CELL = re.compile(r"\b(?:cu\d+|cpu)-py3\d+-[a-z0-9.-]*?-[0-9a-f]{8}\b")
COMMAND = re.compile(r"^(?:\$|    \$?) ?(envbuild (?:resolve|explain|image|pull|lock) .*?)(?:\s+#.*)?$", re.MULTILINE)
STACK = re.compile(r"^```toml\n(name = .([\w-]+).\n.*?)^```", re.MULTILINE | re.DOTALL)
# The results list what ran, with the cells of that day.
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "results" not in page.parts and CELL.search(page.read_text(encoding="utf-8"))
]


def axes_of(words: list[str]) -> list[str]:
    """Return the flags of a command that choose a cell."""
    resolve = cli.get_command(None, "resolve")
    known = {name: option for option in resolve.params for name in option.opts if name not in {"--json", "--help"}}
    found = []
    for at, word in enumerate(words):
        if word in known:
            found += [word] if known[word].is_flag else [word, words[at + 1]]
    return found


def chosen(command: str, capsys) -> set[str]:
    """Return the cells that a command's flags choose, or that are near; none where they name this machine."""
    _, name, *words = shlex.split(command)
    flags = axes_of(words)
    if ("--driver", "auto") in pairwise(flags):
        return set()
    with pytest.raises(SystemExit):
        main([*(["explain", "--nearest"] if name == "explain" and "--nearest" in words else ["resolve"]), *flags])
    printed = capsys.readouterr()
    return set(CELL.findall(printed.out + printed.err))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_the_cells_that_its_commands_choose(page, tmp_path, monkeypatch, capsys):
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for stack, name in STACK.findall(text):
        Path(f"{name}.toml").write_text(stack, encoding="utf-8")
    found = {cell for command in sorted(set(COMMAND.findall(text))) for cell in chosen(command, capsys)}
    assert sorted(set(CELL.findall(text)) - found) == []

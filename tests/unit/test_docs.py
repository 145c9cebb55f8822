"""The docs: pages, links and the parts that are made from the code."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def check(tmp_path, monkeypatch):
    """The check, over a small repository."""
    module = script("check_docs")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "repository", lambda: "https://example.org/a/b")
    (tmp_path / "docs" / "howto").mkdir(parents=True)
    (tmp_path / "README.md").write_text("# It\n")
    (tmp_path / "docs" / "page.md").write_text("# Page\n\n## A `part` of it\n\n## One: two - three\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    def problems(text, name="docs/howto/new.md"):
        (tmp_path / name).write_text(text)
        return list(module.problems_of_page(tmp_path / name))

    problems.module = module
    return problems


def test_the_docs_of_this_repository_are_right(capsys):
    assert script("check_docs").main() == 0, capsys.readouterr().out


def test_the_generated_parts_are_those_of_the_code():
    reference = script("write_reference")
    stale = [name for name in reference.PARTS if reference.page_with(name, page := page_of(reference, name)) != page]
    assert stale == [], "run: python scripts/write_reference.py"


def page_of(reference, name):
    return (reference.PAGES / f"{name}.md").read_text(encoding="utf-8")


def test_a_stale_part_is_seen_and_written(tmp_path, monkeypatch, capsys):
    reference = script("write_reference")
    for name in reference.PARTS:
        shutil.copy(reference.PAGES / f"{name}.md", tmp_path)
    page = tmp_path / "exit-codes.md"
    good = page.read_text()
    page.write_text(good.replace("`LockError`", "`Lock`"))
    monkeypatch.setattr(reference, "PAGES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["write_reference.py", "--check"])
    assert reference.main() == 1
    assert capsys.readouterr().out.startswith("stale: docs/reference/exit-codes.md\n")
    monkeypatch.setattr(sys, "argv", ["write_reference.py"])
    assert reference.main() == 0
    assert page.read_text() == good


def test_the_readme_names_each_command():
    from envbuild.cli import COMMANDS

    table = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert [name for name in COMMANDS if f"`{name}`" not in " ".join(row.split("|")[1] for row in table)] == []


def test_each_command_and_each_key_is_in_the_reference():
    from envbuild.cli import COMMANDS
    from envbuild.lock.model import Lock
    from envbuild.stacks.model import Stack

    reference = script("write_reference")
    commands = page_of(reference, "commands")
    assert [name for name in COMMANDS if f"\n## `envbuild {name}`\n" not in commands] == []
    assert "| `--cuda SPEC` |" in commands
    for name, model in (("lock", Lock), ("stack-file", Stack)):
        page = page_of(reference, name)
        assert [key for key in model.model_fields if f"\n| `{key}` |" not in page] == []


def test_the_page_of_the_cache_names_each_kind_and_what_goes_by_itself():
    from envbuild.engine.cache import KINDS

    rows = [line.split("|") for line in (ROOT / "docs/howto/cache.md").read_text().splitlines() if line[:3] == "| `"]
    stated = {name: goes.strip() == "yes" for _, names, _, goes, _ in rows for name in names.split("`")[1::2]}
    assert stated == {kind.name: kind.made_again for kind in KINDS}


@pytest.mark.parametrize(
    "link",
    [
        "../page.md",
        "../page.md#a-part-of-it",
        "#here",
        "https://example.org/a/b/blob/main/docs/page.md",
        "https://x.org",
    ],
)
def test_a_good_link(check, link):
    assert check(f"# Here\n\nSee [it]({link}).\n") == []


@pytest.mark.parametrize(
    ("link", "what"),
    [
        ("../pages.md", "leads to no file"),
        ("../page.md#part", "leads to no heading"),
        ("../page.md#one-two-three", "two ways"),
        ("../../../etc/passwd", "leads to no file"),
        ("https://example.org/a/b/blob/main/docs/gone.md", "leads to no file"),
        ("https://example.org/a/b/blob/main/docs/page.md#gone", "leads to no heading"),
    ],
)
def test_a_link_that_leads_nowhere(check, link, what):
    (problem,) = check(f"# Here\n\nSee [it]({link}).\n")
    assert problem.startswith("docs/howto/new.md:3: ")
    assert what in problem


def test_the_readme_has_no_relative_link(check):
    (problem,) = check("# It\n\n[page](docs/page.md)\n", "README.md")
    assert "the package index" in problem


def test_a_page_begins_with_its_heading(check):
    assert check("| # A page whose lines were broken\n") == [
        "docs/howto/new.md:1: the page does not begin with its heading"
    ]


def test_a_long_line_is_a_problem_and_a_row_of_a_table_is_not(check):
    assert check(f"# It\n\n| {'a ' * 70}|\n") == []
    assert check(f"# It\n{'a ' * 61}\n") == ["docs/howto/new.md:2: 122 columns, at most 120 are allowed"]


def test_a_link_in_a_code_block_is_text(check):
    assert check("# It\n```\n[it](nowhere.md)\n```\nand `[it](nowhere.md)`\n") == []


def test_a_name_of_a_page_that_has_moved_is_a_problem(check):
    module = check.module
    code = module.ROOT / "code.py"
    code.write_text('HINT = "see docs/old.md"\nGOOD = "docs/page.md"\n')
    assert list(module.problems_of_names(code)) == ["code.py:1: docs/old.md does not exist"]

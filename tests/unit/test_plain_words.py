"""The word list of `make lint`: what it finds, what it must not find, and what an allowance does."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/plain_words.py"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("plain_words", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('"""What the machine lacks."""', "lacks"),
        ("# nobody told it", "told"),
        ("def _told(report):", "told"),
        ("told_end = False", "told"),
        ("self._last_said.append(x)", "said"),
        ("class HostBrings:", "brings"),
        ("class Said:", "said"),
        ("HOST_BRINGS = ()", "brings"),
        ("def test_a_host_that_lacks_it_is_told():", "lacks"),
        ("const told = (cell) =>", "told"),
        ("Mend it.", "mend"),
        ("in a folder of its own", "of its own"),
        ("in a folder of\n    # its own", "of its own"),
        ("in a folder of its\nown", "of its own"),
    ],
)
def test_a_word_is_found_in_prose_and_in_names(check, text, word):
    assert word in [found for _, found in check.words_in(text)]


@pytest.mark.parametrize(
    "text",
    [
        "a blacklist, slack, lackey, the black box",
        "besides, all besides that",
        "amend, amends, recommend, commended",
        "foretold, untold, retell, stellar, atoll",
        "aforesaid",
        "broadcast, railroad, roadmap",
        "its own folder",
        "of its owner",
        "BLACK, SLACKER, AMENDS",
    ],
)
def test_other_words_are_not_found(check, text):
    assert list(check.words_in(text)) == []


def test_every_phrase_of_the_list_finds_itself(check):
    for phrase in check.WORDS:
        assert [word for _, word in check.words_in(f"x {phrase} x")], phrase
        assert [word for _, word in check.words_in(f"x {phrase.capitalize()} x")], phrase


def test_the_line_of_a_finding_is_that_of_its_first_word(check):
    (found,) = check.findings("a.py", "one\ntwo\nin a folder of\nits own\n")
    assert (found.line, found.word) == (3, "of its own")
    assert "a separate X" in str(found)


def test_an_allowance_with_a_reason_keeps_the_word_in_its_line_or_the_next(check):
    inside = '"mend": fixes,  # plain-words: allow mend - a field of the JSON answer'
    above = '# plain-words: allow mend, lack - fields of the JSON answer\n"mend": "lack"'
    for text in (inside, above):
        assert list(check.findings("a.py", text)) == []


@pytest.mark.parametrize(
    "text",
    [
        '"mend": fixes,  # plain-words: allow mend',
        '"fix": fixes,  # plain-words: allow mend - it was here once',
        "# plain-words: allow mend - only the next line\n\nmend\n",
    ],
)
def test_an_allowance_without_a_reason_or_a_use_is_an_error(check, text):
    assert list(check.findings("a.py", text))


def test_what_is_read_are_code_messages_and_docs(check):
    files = check.tracked()
    for path in (
        "envbuild/cli/__init__.py",
        "docs/reference/glossary.md",
        "README.md",
        "Makefile",
        "matrices/rules.toml",
    ):
        assert path in files
    assert not [path for path in files if path.startswith(("dockerfiles/", "matrices/locks/", "tests/data/"))]


def test_the_tree_has_none_of_the_words(check, capsys):
    assert check.main([]) == 0, capsys.readouterr().out

"""The readers of `git ls-tree` and `.gitmodules`: any bytes are read or refused with an EnvbuildError."""

import contextlib
import subprocess
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envbuild.errors import DataError, LockError
from envbuild.lock.gitfiles import read_gitmodules, read_listing, submodule_url
from envbuild.lock.trees import tree_id

OID = "0123456789abcdef0123456789abcdef01234567"


def line(path, mode="100644", kind="blob", size="1"):
    return f"{mode} {kind} {OID} {size:>7}\t{path}\0".encode()


def test_a_listing_is_read():
    listing = read_listing(
        line("a/é b\n") + line("run", "100755") + line("link", "120000") + line("deps/x", "160000", "commit", "-")
        + line(".gitmodules") + line("old", "100664"),
        what="lib",
    )  # fmt: skip
    assert listing.links == {"deps/x": OID}
    assert listing.modules == OID
    assert (listing.files, listing.size) == (6, 5)
    assert listing.odd_modes == {b"old": b"100664"}


@pytest.mark.parametrize(
    "text",
    [
        b"x",
        b"x\0",
        line("a")[:-1],
        line("../a"),
        line("a/../b"),
        line("/a"),
        line("a//b"),
        line(".git/config"),
        line("a/.Git/hooks/x"),
        line("x" * 256),
        line("/".join("x" * 2500)),
        line("a") + line("a"),
        line("a", "120000") + line("a/b"),
        line("a/b") + line("a", "120000"),
        line("a", "160000", "commit", "-") + line("a/b"),
        line("a b", "160000", "commit", "-"),
        line("-x", "160000", "commit", "-"),
        line("a\x1b[2J", "160000", "commit", "-"),
        line("a", "010644"),
        line("a", "040000"),
        line("a", size=str(2**40)),
        b"".join(line(f"s{n}", "160000", "commit", "-") for n in range(501)),
    ],
)
def test_a_hostile_listing_is_one_error(text):
    with pytest.raises(LockError, match="cannot be used") as refused:
        read_listing(text, what="lib\x1b[2J")
    assert "\x1b" not in str(refused.value)


def test_a_long_listing_is_read_in_time():
    text = b"".join(line(f"a/b/c/d/e/f/g/{n}") for n in range(100_000))
    begun = time.monotonic()
    assert read_listing(text, what="lib").files == 100_000
    assert time.monotonic() - begun < 5


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.one_of(st.binary(max_size=60), st.sampled_from([line("a"), line("b/c"), line("..")]))).map(b"\0".join)
)
def test_any_listing_is_read_or_refused(text):
    with contextlib.suppress(LockError):
        read_listing(text, what="lib")


MODULES = """\
# a comment
[submodule "deps/x"] ; another
\tpath = deps/x
\turl = https://example.org/x.git
[core]
\tanything
[submodule "quoted \\"name"]
  path = "third"
  url = https://example.org/y.git  # a comment
  branch = main
  url = https://example.org/y.git
[submodule "without"]
\tpath = z
"""


def test_gitmodules_is_read_as_git_reads_it(tmp_path):
    found = read_gitmodules(MODULES.replace("\n", "\r\n").encode(), what="lib")
    assert found == {"deps/x": "https://example.org/x.git", "third": "https://example.org/y.git"}
    (tmp_path / "m").write_text(MODULES)
    printed = subprocess.run(
        ["git", "config", "-f", "m", "--get", "submodule.deps/x.url"],
        cwd=tmp_path, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert printed.stdout.strip() == found["deps/x"]


VALUES = ["a", '"a b"', "a \\\n b", 'a "#" b', "a ; c", '"\\"x"', "a\\\\b", '" a "', "a\\tb", ""]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_gits(tmp_path, value):
    text = f'[submodule "x"]\n\tpath = p\n\turl = {value}\n'
    (tmp_path / "m").write_text(text)
    printed = subprocess.run(
        ["git", "config", "-f", "m", "-z", "--get", "submodule.x.url"], cwd=tmp_path, check=True, capture_output=True
    )
    assert read_gitmodules(text.encode(), what="lib") == {"p": printed.stdout.rstrip(b"\0").decode()}


@pytest.mark.parametrize(
    "text",
    [
        b"\xff",
        b"[submodule",
        b"x y z",
        b'[submodule "x"]\npath = ../a\nurl = y',
        b'[submodule "x"]\npath = /a\nurl = y',
        b'[submodule "x"]\npath = .git\nurl = y',
        b'[submodule "x"]\npath = a\nurl = y\n[submodule "y"]\npath = a\nurl = z',
        b'[submodule "x"]\npath = a\npath = b',
        b'[submodule "x"]\nurl = "y',
        b'[submodule "x"]\nurl = \\q',
        b"#" * (2**20 + 1),
    ],
)
def test_an_odd_gitmodules_is_one_error(text):
    with pytest.raises(DataError, match="cannot be read"):
        read_gitmodules(text, what="lib")


@settings(max_examples=200, deadline=None)  # tests/fuzz has this reader, too
@given(
    st.one_of(
        st.binary(max_size=200),
        st.lists(
            st.sampled_from(['[submodule "x"]', "[core]", "path=a", "path = ../b", 'url="', "\\", "[", '"', "#", "\n"])
        ).map(lambda parts: "\n".join(parts).encode()),
    )
)
@example(b'[submodule "' + b"\\" * 1000)
def test_any_gitmodules_is_read_or_refused(text):
    with contextlib.suppress(DataError):
        read_gitmodules(text, what="lib")


def test_a_large_gitmodules_is_read_in_time():
    begun = time.monotonic()
    for text in (b"\\\n" * 2**19, b'[submodule "' + b"\\a" * 2**18, b'[submodule "x"]\n' * 2**15, b"a=" + b'"' * 2**19):
        with contextlib.suppress(DataError):
            read_gitmodules(text, what="lib")
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("stated", "url"),
    [
        ("../part.git", "https://example.org/a/part.git"),
        ("../../b/part.git", "https://example.org/b/part.git"),
        ("./part", "https://example.org/a/lib.git/part"),
        ("https://example.org/x", "https://example.org/x"),
    ],
)
def test_an_address_from_the_parents(stated, url):
    assert submodule_url("https://example.org/a/lib.git", stated, what="part") == url


@pytest.mark.parametrize("stated", ["../../../../x", "../-x y", "-x", "git@example.org:x", "", "../x\n"])
def test_an_address_that_is_none(stated):
    with pytest.raises(DataError):
        submodule_url("https://example.org/a/lib.git", stated, what="part")


def test_a_tree_of_files_has_gits_id(tmp_path):
    def git(*args):
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *args]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    for name in ("a", "a-b", "a.c", "a0/run", "é", "deep/er/x", "deep.x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a0/run").chmod(0o755)
    (tmp_path / "link").symlink_to("/nowhere")
    (tmp_path / "empty/er").mkdir(parents=True)
    git("add", "-A")
    for path in ("deps/part", "deep/er/y", "other"):
        git("update-index", "--add", "--cacheinfo", f"160000,{OID},{path}")
    links = dict.fromkeys(("deps/part", "deep/er/y", "other"), OID)
    assert tree_id(tmp_path, links) == git("write-tree")
    (tmp_path / "deps/part").mkdir(parents=True)
    (tmp_path / "deps/part/unread").write_text("x")
    assert tree_id(tmp_path, links) == git("write-tree")
    (tmp_path / "other").symlink_to("deps")
    with pytest.raises(LockError, match="in the place of a submodule"):
        tree_id(tmp_path, links)

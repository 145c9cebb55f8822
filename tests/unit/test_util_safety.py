"""What a name from outside may be, and where it can lead."""

import os
import re
import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.util import below, names, quote
from envbuild.util.below import OutsideError, open_below, path_below, read_below, remove_below
from envbuild.util.text import count_of

HOSTILE = (
    "..",
    "../x",
    "a/../../b",
    "/etc/passwd",
    "-x",
    "a\nb",
    "a\0b",
    "a/.git/config",
    ".GIT/hooks/x",
    "",
    "a//b",
    "a/./b",
    "a\\b",
    "é" * 300,
)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_path_is_refused_everywhere(tmp_path, name):
    for call in (open_below, path_below, remove_below):
        with pytest.raises(OutsideError):
            call(tmp_path, name)
    with pytest.raises(OutsideError):
        read_below(tmp_path, name, limit=10)


@pytest.mark.parametrize("name", [*HOSTILE, "a/b", "a b", "$x", "a;b", "x" * 300])
def test_a_safe_name_is_one_component(name):
    with pytest.raises(ValueError, match="not a name"):
        names.checked(names.SafeName, name)


@pytest.mark.parametrize("name", ["cu126-py312-torch2.8.0-te2.6.0-sm90-00112233", "_x", "A.b_c-d", "a" * 128])
def test_a_name_that_is_a_tag_stays_one(name):
    assert names.image_tag(name) == name


def test_a_name_that_is_no_tag_gets_one_that_only_it_has():
    long = "cu130-py312-" + "-".join(f"part{n}" for n in range(20))
    odd = [*HOSTILE, "a b", "torch2.8.0+cu126", "torch2.8.0_cu126+", "1!2", f"{long}-a", f"{long}-b", "a" * 129]
    tags = [names.image_tag(name) for name in odd]
    for tag in tags:
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", tag), tag
    assert len(set(tags)) == len(odd)
    assert tags == [names.image_tag(name) for name in odd]
    assert names.image_tag(f"{long}-a").startswith("cu130-py312-part0-part1-")


@pytest.mark.parametrize("name", [*HOSTILE, "a/b", "%2e%2e%2fx", "a b.whl", ".hidden"])
def test_a_file_name_is_one_component(name):
    with pytest.raises(ValueError, match="not a file name"):
        names.checked(names.FileName, name)


@pytest.mark.parametrize(
    "url",
    [
        "--upload-pack=touch /tmp/x",
        "-oProxyCommand=x",
        "http://example.org/x.git",
        "git://example.org/x.git",
        "ext::sh -c id",
        "user:secret@example.org:x",
        "https://user:secret@example.org/x.git",
        "https://example.org/x.git\nRUN id",
        "https://-x/y",
        "ssh://-oProxyCommand=x/y",
        "file://host/x",
        "https://example.org/$(id)",
        "",
    ],
)
def test_a_source_url_is_https_ssh_or_file(url):
    with pytest.raises(ValueError, match="git repository"):
        names.checked(names.SourceUrl, url)


@pytest.mark.parametrize(
    "url", ["https://github.com/NVIDIA/apex.git", "ssh://git@example.org:22/a/b.git", "file:///srv/git/apex"]
)
def test_a_usual_source_url_passes(url):
    assert names.checked(names.SourceUrl, url) == url


def test_a_link_on_the_way_is_refused(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(outside)
    for relative in ("link", "link/kept"):
        with pytest.raises(OutsideError):
            open_below(root, relative)
        with pytest.raises(OutsideError):
            path_below(root, relative)
    with pytest.raises(OutsideError):
        open_below(root, "link/new", os.O_WRONLY | os.O_CREAT, make=True)
    remove_below(root, "link")  # the link itself goes
    assert (outside / "kept").read_text() == "kept"
    assert not (root / "link").exists()


def test_a_folder_is_removed_and_not_what_its_links_name(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "root/x/y").mkdir(parents=True)
    (tmp_path / "root/x/y/link").symlink_to(tmp_path / "kept")
    remove_below(tmp_path / "root", "x")
    assert (tmp_path / "kept").is_dir()
    assert not (tmp_path / "root/x").exists()
    remove_below(tmp_path / "root", "x")  # nothing there


def test_a_fifo_does_not_hang_and_a_large_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OutsideError, match="neither a file"):
        read_below(tmp_path, "fifo", limit=10)
    (tmp_path / "large").write_bytes(b"x" * 11)
    with pytest.raises(OutsideError, match="more than 10 bytes"):
        read_below(tmp_path, "large", limit=10)
    assert read_below(tmp_path, "large", limit=11) == b"x" * 11


@given(st.text())
def test_a_shell_word_is_read_back(value):
    try:
        word = quote.shell(value)
    except ValueError:
        assert not names.is_one_line(value)
        return
    assert shlex.split(word) == [value]
    assert "\n" not in word


@given(st.text(alphabet="ab\"'\\$`{} #\t"))
def test_what_is_quoted_for_a_shell_is_one_argument(value):
    if "\t" in value:
        return
    done = subprocess.run(["sh", "-c", f"printf %s {quote.shell(value)}"], capture_output=True, text=True, check=True)
    assert done.stdout == value


@pytest.mark.parametrize("text", ["envbuild_end", "a\nenvbuild_end\nRUN id", "a\n envbuild_end \n", "a\0b", "a\rb"])
def test_a_heredoc_does_not_end_early(text):
    with pytest.raises(ValueError, match="would end it"):
        quote.heredoc(text, "envbuild_end")


@pytest.mark.parametrize("value", ['a"b', "a\\b", "a\nb", 'x"; APT::Update::Pre-Invoke {"id"'])
def test_apt_conf_takes_no_quote(value):
    with pytest.raises(ValueError):
        quote.apt_conf(value)


@pytest.mark.parametrize("value", ["a b", "a\nb", "[trusted=yes]", "", "a#b"])
def test_a_source_of_apt_is_one_word(value):
    with pytest.raises(ValueError):
        quote.apt_source(value)


@pytest.mark.parametrize("value", ["a b", "a\nRUN id", "$x", "`id`", "'a'", '"a"', "--from=x", "a\\"])
def test_an_argument_of_a_dockerfile_instruction_is_one_word(value):
    with pytest.raises(ValueError):
        quote.dockerfile_word(value)


def test_a_bake_string_is_not_evaluated():
    assert quote.bake("${x} %{if} $y") == "$${x} %%{if} $y"


@given(st.text())
def test_what_is_shown_has_no_control_character(text):
    assert names.shown(text).isprintable()


@given(st.dictionaries(st.sampled_from(["type", "dest", "name", "id", "src"]), st.text(), min_size=1))
def test_fields_are_read_back_as_they_were(fields):
    """As buildx reads them: one record of comma-separated values."""
    import csv

    try:
        line = quote.csv_fields(**fields)
    except ValueError:
        return
    (record,) = csv.reader([line], strict=True)
    assert dict(each.split("=", 1) for each in record) == fields


@pytest.mark.parametrize(
    ("number", "words", "text"),
    [
        (1, ("input",), "1 input"),
        (0, ("input",), "0 inputs"),
        (1200, ("input",), "1200 inputs"),
        (1, ("index", "indexes"), "1 index"),
        (2, ("input is", "inputs are"), "2 inputs are"),
    ],
)
def test_one_is_counted_in_the_singular(number, words, text):
    assert count_of(number, *words) == text


def test_a_file_that_a_walk_found_is_read_by_any_name_and_not_through_a_link(tmp_path):
    tree = tmp_path / "tree"
    (tree / "a b").mkdir(parents=True)
    (tree / "a b" / "é (1).cpp").write_bytes(b"x")
    assert below.read_found(tree, "a b/é (1).cpp", limit=9) == b"x"
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.h").write_bytes(b"secret")
    (tree / "link.h").symlink_to(tmp_path / "secret" / "key.h")
    (tree / "folder").symlink_to(tmp_path / "secret")
    os.mkfifo(tree / "fifo.h")
    for name in ("link.h", "folder/key.h", "fifo.h", "../secret/key.h", "a b/../link.h", "/etc/passwd", ""):
        with pytest.raises((below.OutsideError, OSError)):
            below.read_found(tree, name, limit=9)
    with pytest.raises(below.OutsideError, match="more than 0 bytes"):
        below.read_found(tree, "a b/é (1).cpp", limit=0)


def test_a_file_is_written_in_one_step_and_never_through_a_link(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    below.write_below(tree, "a/b/x.so", b"one", mode=0o755)
    with (tree / "a" / "b" / "x.so").open("rb") as old:
        below.write_below(tree, "a/b/x.so", b"two", mode=0o755)
        assert old.read() == b"one"
    assert (tree / "a" / "b" / "x.so").read_bytes() == b"two"
    assert (tree / "a" / "b" / "x.so").stat().st_mode & 0o777 == 0o755
    killed, at_work = (tree / "a" / "b" / f".envbuild-{digit * 16}.new" for digit in "01")
    for path in (killed, at_work):
        path.write_bytes(b"half")
    os.utime(killed, (1, 1))
    below.write_below(tree, "a/b/x.so", b"two", mode=0o755)
    assert not killed.exists()
    assert at_work.exists()
    (tmp_path / "other").mkdir()
    (tree / "folder").symlink_to(tmp_path / "other")
    (tree / "link.so").symlink_to(tmp_path / "other" / "x.so")
    for name in ("folder/x.so", "link.so", "../other/x.so"):
        with pytest.raises(below.OutsideError):
            below.write_below(tree, name, b"three", mode=0o755)
    (tree / "a" / "full").mkdir()
    with pytest.raises(OSError, match="directory"):
        below.write_below(tree, "a/full", b"four", mode=0o644)
    assert list((tmp_path / "other").iterdir()) == []
    assert [path.name for path in (tree / "a").iterdir() if path.name.startswith(".")] == []

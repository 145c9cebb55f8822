"""The encoder of plain text: what it writes is what Megatron's index format says, and what it refuses."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "dockerfiles" / "tools" / "encode-text"


def _run(folder, text, vocabulary, *options):
    (folder / "corpus.txt").write_text(text, encoding="utf-8")
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    command = [sys.executable, str(TOOL), "corpus.txt", "--vocab", "vocab.json", "--output", "out", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def _read(folder):
    """Read the pair as the format's description has it, without the tool's code."""
    index = (folder / "out.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, count, documents = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    place = 9 + 25
    sizes = struct.unpack_from(f"<{count}i", index, place)
    pointers = struct.unpack_from(f"<{count}q", index, place + 4 * count)
    ends = struct.unpack_from(f"<{documents}q", index, place + 12 * count)
    assert len(index) == place + 12 * count + 8 * documents
    assert list(ends) == list(range(count + 1))
    kind, width = {8: ("H", 2), 4: ("i", 4)}[code]
    data = (folder / "out.bin").read_bytes()
    assert len(data) == sum(sizes) * width
    return [list(struct.unpack_from(f"<{s}{kind}", data, p)) for s, p in zip(sizes, pointers, strict=True)]


def test_words(tmp_path):
    done = _run(tmp_path, "a b\n\nb b a\n", {"a": 5, "b": 7, "<end>": 0}, "--append-eod", "<end>")
    assert done.returncode == 0
    assert done.stdout == "2 documents, 7 tokens, 2 bytes each\n"
    assert _read(tmp_path) == [[5, 7, 0], [7, 7, 5, 0]]


def test_characters_and_a_list(tmp_path):
    assert _run(tmp_path, "ab a\n", ["a", "b", " "], "--characters").returncode == 0
    assert _read(tmp_path) == [[0, 1, 2, 0]]


def test_large_ids_take_four_bytes(tmp_path):
    assert _run(tmp_path, "a b\n", {"a": 1, "b": 70000}).returncode == 0
    assert _read(tmp_path) == [[1, 70000]]


def test_unknown(tmp_path):
    assert _run(tmp_path, "a zzz\n", {"a": 1, "?": 2}, "--unknown", "?").returncode == 0
    assert _read(tmp_path) == [[1, 2]]


@pytest.mark.parametrize(
    ("text", "vocabulary", "options", "message"),
    [
        ("a\na zzz\n", {"a": 1}, [], "corpus.txt:2: 'zzz' is not in the vocabulary"),
        ("a\n", {"a": 1, "b": 1}, [], "gives one id to two tokens"),
        ("a\n", {"a": -1}, [], "no number from 0 up"),
        ("a\n", {}, [], "neither an object of ids nor a list"),
        ("\n\n", {"a": 1}, [], "holds no text"),
        ("a\n", {"a": 1}, ["--append-eod", "<end>"], "'<end>' is not in vocab.json"),
    ],
)
def test_refuses(tmp_path, text, vocabulary, options, message):
    done = _run(tmp_path, text, vocabulary, *options)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.txt", "vocab.json"}


def test_a_line_that_is_no_utf_8_is_named(tmp_path):
    _run(tmp_path, "a\n", {"a": 1})
    (tmp_path / "corpus.txt").write_bytes(b"a\n\xe9\n")
    done = subprocess.run(
        [sys.executable, TOOL, "corpus.txt", "--vocab", "vocab.json", "--output", "new"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "corpus.txt:2: no UTF-8" in done.stderr
    assert not list(tmp_path.glob("new*"))

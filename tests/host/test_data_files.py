"""Files of data that somebody else may have written: what is no file, what is too large, what no reader was made for."""

import json
import os
import socket
import time
from pathlib import Path

import pytest

from envbuild.errors import DataError, EnvbuildError, UsageError
from envbuild.evidence.records import read_evidence
from envbuild.lock.files import read_lock
from envbuild.patches.diff import paths_of
from envbuild.patches.manifest import _load_manifest
from envbuild.run.launch import read_hostfile
from envbuild.settings import load_settings
from envbuild.stacks.load import load_stack
from envbuild.util.bounded import DATA_LIMIT, UnfitFileError, read_file
from envbuild.util.toml import read_toml

ROOT = Path(__file__).parents[2]


def settings_of(path):
    return load_settings(environ={"HOME": "/nowhere", "TMPDIR": str(path.parent), "ENVBUILD_CONFIG": str(path)})


def manifest_of(path):
    return _load_manifest(path)


READERS = {
    "stack": lambda path: load_stack(str(path)),
    "hostfile": lambda path: read_hostfile(path, default_slots=1),
    "settings": settings_of,
    "manifest": manifest_of,
    "record": read_evidence,
    "lock": read_lock,
    "toml": read_toml,
}


def make(kind, path):
    """Put something that is no file of data at `path`."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)


@pytest.mark.parametrize("kind", ["fifo", "zero", "socket", "sparse"])
@pytest.mark.parametrize("reader", list(READERS))
@pytest.mark.timeout(20)
def test_what_is_no_file_of_data_is_refused_at_once(reader, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    path = Path("x.toml")
    make(kind, path)
    began = time.monotonic()
    with pytest.raises(EnvbuildError) as caught:
        READERS[reader](path)
    assert caught.value.exit_code == 2
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("kind", ["fifo", "zero"])
@pytest.mark.timeout(20)
def test_the_machines_own_files_that_are_none_are_passed_over(kind, tmp_path):
    for name in ("etc/pip.conf", "etc/os-release", "etc/apt/sources.list"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        make(kind, tmp_path / name)
    settings = load_settings(environ={"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}, root=tmp_path)
    assert settings.origin("index_url") == "default"


@pytest.mark.timeout(20)
def test_a_list_of_mirrors_that_is_none_is_passed_over(tmp_path):
    (tmp_path / "etc" / "apt").mkdir(parents=True)
    (tmp_path / "etc" / "os-release").write_text("ID=debian\nVERSION_CODENAME=bookworm\n")
    (tmp_path / "etc" / "apt" / "sources.list").write_text(
        "deb mirror+file:/dev/zero bookworm main\ndeb mirror+file:/x\0y bookworm main\n"
    )
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "zero").symlink_to("/dev/zero")
    settings = load_settings(environ={"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}, root=tmp_path)
    assert settings.origin("debian_mirror") == "default"


def test_a_file_of_the_largest_size_is_read_and_one_byte_more_is_not(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"x" * 100)
    assert read_file(path, limit=100) == b"x" * 100
    with pytest.raises(UnfitFileError, match="99 bytes"):
        read_file(path, limit=99)
    assert 20 * max(f.stat().st_size for f in ROOT.glob("matrices/**/*") if f.is_file()) < DATA_LIMIT


NESTED = {
    "arrays": "a = " + "[" * 5000 + "]" * 5000,
    "unclosed": "a = " + "[" * 100_000,
    "tables": "a = " + "{a=" * 5000 + "1" + "}" * 5000,
    "dotted": ".".join(["a"] * 5000) + " = 1",
    "header": "[" + ".".join(["a"] * 5000) + "]",
    "number": "a = " + "1" * 5000,
    "escape": 'a = "\\ud800"',
    "nul": "a = \0",
    "key": f"{'a' * 100_000} = 1",
    "control": 'a = "\x1b[2J"',
    "types": "name = 1\npython = {}\nbuilds = 3\nsteps = [1]\nstated = []\ntarget = []\npatch = 7\nindex_url = [1]",
    "dates": "a = 9999-99-99",
    "date": "name = 1979-05-27T07:32:00Z\ntarget = 1979-05-27\nindex_url = 07:32:00",
    "infinite": "memory_gib = inf\nname = nan",
}


@pytest.mark.parametrize("text", list(NESTED.values()), ids=list(NESTED))
@pytest.mark.parametrize("reader", ["stack", "settings", "manifest"])
def test_odd_toml_is_a_data_error(reader, text, tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        READERS[reader](path)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("count", [3000, 30_000])
def test_thousands_of_entries_are_read_or_refused_soon(count, tmp_path):
    stack = (ROOT / "matrices" / "stacks" / "alcf.toml").read_text()
    steps = "".join(f'\n[[steps]]\nname = "s{number}"\nrun = "true"\n' for number in range(count))
    path = tmp_path / "x.toml"
    path.write_text(stack + steps)
    began = time.process_time()
    assert len(load_stack(str(path)).steps) >= count
    path.write_text(stack + steps + '\n[[steps]]\nname = "s7"\nrun = "true"\n')
    with pytest.raises(DataError, match="two steps are called 's7'"):
        load_stack(str(path))
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"h{number} slots=8\n" for number in range(count)))
    assert len(read_hostfile(hosts, default_slots=1)) == count
    assert time.process_time() - began < 10 * count / 3000


@pytest.mark.parametrize(
    "line",
    [
        "h slots=" + "0" * 5000 + "1",
        "h slots=99999999999",
        "h:²",
        "h slots=٣",
        "-oProxyCommand=x",
        "h\x1b[2J",
        "x" * 300,
        "h slots=8 y=1",
    ],
)
def test_an_odd_line_of_a_hostfile_is_refused(line, tmp_path):
    path = tmp_path / "hosts"
    path.write_text(line + "\n")
    with pytest.raises(UsageError) as caught:
        read_hostfile(path, default_slots=1)
    assert "\x1b" not in caught.value.what
    assert len(caught.value.what) < 200


@pytest.mark.parametrize("requirement", ["x; " + "(" * 5000, "x==" + "1" * 5000, "x[" * 3000, "x; a=='" * 2000])
def test_an_odd_requirement_is_a_data_error(requirement, tmp_path):
    stack = (ROOT / "matrices" / "stacks" / "alcf.toml").read_text()
    path = tmp_path / "x.toml"
    assert stack.count("\npython = [") == 1
    path.write_text(stack.replace("\npython = [", f"\npython = [{json.dumps(requirement)}, "))
    with pytest.raises(DataError, match=r"python\.0: "):
        load_stack(str(path))


@pytest.mark.parametrize(
    "name", ["a\0b", "\ud800", "x" * 5000, "x" * 300, "x" * 300 + ".toml", "a\nb", "/", "@", ".toml", ""]
)
def test_a_name_that_no_stack_has_is_a_usage_error(name):
    with pytest.raises(UsageError) as caught:
        load_stack(name)
    assert len(caught.value.what) < 300


@pytest.mark.parametrize(
    "head", [b"@@ -%s,1 +1,1 @@\n", b"@@ -1,%s +1,1 @@\n", b"@@ -1 +%s @@\n"], ids=["start", "count", "new"]
)
def test_a_number_of_thousands_of_digits_in_a_diff_is_a_data_error(head):
    diff = b"--- a/x\n+++ b/x\n" + head.replace(b"%s", b"1" * 5000) + b"-a\n+b\n"
    with pytest.raises(DataError):
        paths_of(diff, where="x")


def record():
    return json.loads(min((ROOT / "matrices" / "evidence").glob("*.json")).read_text())


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[]",
        "null",
        '"x"',
        json.dumps(record() | {"tests": 1}),
        json.dumps(record() | {"seconds": float("nan")}),
        json.dumps(record() | {"seconds": 1}).replace('"seconds": 1,', '"seconds": 1e999,'),
        json.dumps(record() | {"seconds": "nan"}),
        json.dumps(record() | {"reason": "\ud800"}),
        json.dumps(record() | {"cell": {"cuda": "\ud800"}}),
        json.dumps(record()).replace('"cell": {', '"cell": {"x": ' + "[" * 400 + "]" * 400 + ", ", 1),
        json.dumps(record() | {"nproc": 0}).replace('"nproc": 0', '"nproc": ' + "1" * 5000),
    ],
    ids=[
        "deep",
        "list",
        "null",
        "text",
        "number",
        "nan",
        "infinite",
        "nan in a text",
        "surrogate",
        "surrogate in any",
        "deep any",
        "digits",
    ],
)
def test_an_odd_record_is_a_data_error(text, tmp_path):
    path = tmp_path / "20261122T101859Z-0000000000000000.json"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_evidence(path)
    assert len(str(caught.value)) < 1000


def test_a_setting_that_no_path_can_be_is_a_data_error(tmp_path):
    for value in ("x" * 5000, "\udc8e", "/x\x1b[2J"):
        with pytest.raises(DataError) as caught:
            load_settings(
                environ={"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "ENVBUILD_SOURCES": value}, root=tmp_path
            )
        assert "\x1b" not in str(caught.value)
        assert len(str(caught.value)) < 600


@pytest.mark.timeout(30)
def test_a_long_blank_list_of_sources_takes_time_in_proportion(tmp_path):
    (tmp_path / "etc" / "apt").mkdir(parents=True)
    (tmp_path / "etc" / "os-release").write_text("ID=debian\nVERSION_CODENAME=bookworm\n")
    (tmp_path / "etc" / "apt" / "sources.list").write_text("\n" * 1_000_000 + "x" * 1_000_000)
    (tmp_path / "etc" / "pip.conf").write_text("[global]\n" + " \n" * 200_000)
    began = time.process_time()
    load_settings(environ={"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}, root=tmp_path)
    assert time.process_time() - began < 3

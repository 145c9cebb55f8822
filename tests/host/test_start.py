"""A quick start changes no answer, and trusts nothing that somebody else may have written."""

import copy
import dataclasses
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import pytest
from same_answers import checked_matrix, compare, random_request

from envbuild.cli.declared import Declared
from envbuild.cli.quick import parsed
from envbuild.errors import DataError, EnvbuildError
from envbuild.evidence.kept import records_of
from envbuild.evidence.records import Evidence, load_evidence
from envbuild.lock.files import Locked
from envbuild.lock.inputs import inputs_of
from envbuild.lock.model import Lock
from envbuild.lock.unlocked import unlocked
from envbuild.matrix.load import _load, load_matrix
from envbuild.paths import data_dir
from envbuild.plan import compiled_dockerfile
from envbuild.plan.dockerfile import _templates, compiled_source, dockerfile
from envbuild.plan.plan import plan_of
from envbuild.solver.solve import solve
from envbuild.util import compiled, keys
from envbuild.util.frozen import Frozen, field, replace
from envbuild.util.model import Model, plain

HEADLINE = ["--cuda", "12.6", "--te", "2.6", "--gpu", "h100", "--flash-attn-hopper", "auto"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _load.cache_clear()
    yield tmp_path / "cache" / "envbuild" / "compiled"
    _load.cache_clear()


def loaded_again():
    _load.cache_clear()
    return load_matrix()


def assert_same(one, other):
    assert one.axes == other.axes
    assert one.releases == other.releases
    assert one.rules == other.rules
    assert one.packages == other.packages
    assert one.digest == other.digest


@pytest.mark.parametrize("seed", range(3))
def test_the_quick_way_answers_as_the_thorough_one(seed):
    counts = compare(40, seed)
    assert counts["cell by the search"] > 5
    assert counts["refused"] > 2


def test_what_is_kept_is_what_was_checked(cache):
    assert_same(load_matrix(), checked_matrix())  # kept now
    assert list(cache.glob("matrix-*.json"))
    again = loaded_again()
    assert any("_plain" in vars(release) for releases in again.releases.values() for release in releases)
    assert_same(again, checked_matrix())
    for release in again.releases["cuda"]:
        assert release.facts == checked_matrix().release("cuda", release.version).facts


def test_other_data_is_never_answered_from_what_is_kept(cache, tmp_path):
    folder = shutil.copytree(data_dir("matrices"), tmp_path / "data")
    before = load_matrix(folder)
    file = folder / "te.toml"
    file.write_text(file.read_text().replace('title = "', 'title = "Changed ', 1))
    _load.cache_clear()
    assert load_matrix(folder).axes["te"].title == "Changed " + before.axes["te"].title
    file.write_text(file.read_text() + "\n[[release]]\nversion = 3\n")
    _load.cache_clear()
    with pytest.raises(DataError, match=r"release.*version"):
        load_matrix(folder)


def tampered(file: Path, key: str) -> bytes:
    """Return a kept file that says something else and carries the right hash."""
    head, *lines = file.read_bytes().split(b"\n")[1:]
    changed = json.loads(head)
    next(axis for axis in changed["axes"] if axis["name"] == "te")["title"] = "hostile"
    body = b"\n".join([json.dumps(changed).encode(), *lines])
    return compiled.hash_of((key.encode(), body)).encode() + b"\n" + body


@pytest.mark.parametrize("how", ["file", "folder", "link", "linked folder", "hash", "half", "pipe", "junk"])
def test_a_file_that_others_may_have_written_counts_for_nothing(cache, tmp_path, how):
    load_matrix()
    file = next(cache.glob("matrix-*.json"))
    key = file.stem.removeprefix("matrix-")
    hostile = tampered(file, key)
    file.write_bytes(hostile)
    assert loaded_again().axes["te"].title == "hostile", "the file is read where only its owner can write it"
    if how == "file":
        file.chmod(0o666)
    elif how == "folder":
        cache.chmod(0o777)
    elif how == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif how == "linked folder":
        cache.rename(tmp_path / "elsewhere")
        cache.symlink_to(tmp_path / "elsewhere")
    elif how == "hash":
        file.write_bytes(b"0" * 64 + hostile[64:])
    elif how == "half":
        file.write_bytes(hostile[: len(hostile) // 2])
    elif how == "pipe":
        file.unlink()
        os.mkfifo(file, 0o600)
    else:
        body = b'{"axes": 3}\nnull'
        file.write_bytes(compiled.hash_of((key.encode(), body)).encode() + b"\n" + body)
    assert_same(loaded_again(), checked_matrix())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_counts_for_nothing(cache):
    load_matrix()
    file = next(cache.glob("matrix-*.json"))
    file.write_bytes(tampered(file, file.stem.removeprefix("matrix-")))
    os.chown(file, 65534, 65534)
    assert_same(loaded_again(), checked_matrix())


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file in its place")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert_same(loaded_again(), checked_matrix())


class Inner(Model):
    number: int = 1


class Outer(Model):
    name: str
    inner: tuple[Inner, ...] = ()
    either: str | tuple[str, ...] = "a"
    by_name: dict[str, Inner] = {}


def test_a_plain_model_is_what_a_checked_one_is():
    values = {"name": "x", "inner": [{"number": 2}, {}], "either": ["b", "c"], "by_name": {"k": {"number": 3}}}
    checked = Outer.model_validate(values)
    kept = Outer.from_plain(json.dumps(plain(checked)).encode())
    assert kept == checked
    assert (kept.either, kept.inner[0].number, kept.by_name["k"]) == (("b", "c"), 2, Inner(number=3))
    assert isinstance(checked, Outer)
    for options in ({}, {"mode": "json"}, {"mode": "json", "exclude_defaults": True}):
        assert kept.model_dump(**options) == checked.model_dump(**options)
    assert kept.model_dump_json(indent=1, exclude_defaults=True) == checked.model_dump_json(
        indent=1, exclude_defaults=True
    )
    with pytest.raises(ValueError, match="number"):
        Outer.model_validate(values | {"inner": [{"number": "many"}]})
    with pytest.raises(ValueError, match="name"):
        Outer(inner=())
    with pytest.raises(AttributeError, match="immutable"):
        kept.name = "y"


def test_a_lock_that_is_made_unchecked_would_pass_the_check():
    chance, matrix, seen = random.Random(5), load_matrix(), 0
    for _ in range(60):
        try:
            inputs = inputs_of(matrix, solve(matrix, random_request(matrix, chance)).cell)
        except EnvbuildError:
            continue
        lock = unlocked(matrix, inputs)
        again = Lock.model_validate(lock.model_dump(mode="json"))
        assert again == lock
        assert (again.digest, again.model_dump_json(indent=1, exclude_defaults=True)) == (
            lock.digest,
            lock.model_dump_json(indent=1, exclude_defaults=True),
        )
        seen += 1
    assert seen > 15


def test_the_compiled_template_is_of_the_template():
    place = Path(compiled_dockerfile.__file__)
    assert place.read_text(encoding="utf-8") == compiled_source(), "run: python scripts/compile_template.py"


def test_the_compiled_template_writes_what_jinja_writes():
    chance, matrix, seen = random.Random(6), load_matrix(), 0
    for _ in range(60):
        try:
            cell = solve(matrix, random_request(matrix, chance)).cell
            flavor = cell.versions.get("flavor", "runtime")
            plan = plan_of(matrix, Locked(lock=unlocked(matrix, inputs_of(matrix, cell, flavor=flavor)), pylocks={}))
        except EnvbuildError:
            continue
        assert dockerfile(plan) == _templates().get_template("Dockerfile.j2").render(plan=plan)
        seen += 1
    assert seen > 15


def test_a_plain_command_line_reads_as_click_reads_it():
    """The options are declared once; where click is not loaded, `quick` reads the declarations."""
    code = """
import itertools, random, sys
from envbuild.cli.render import render
from envbuild.cli.resolve import resolve
from envbuild.cli.quick import parsed
assert "click" not in sys.modules
chance, read = random.Random(3), []
for command in (resolve, render):
    options = [next(a for a in s.arguments if a.startswith("--")) for s in command.stated if s.name == "option"]
    words = [*options, *options, "--help", "-h", "--odd", "--json=1", "--te=2.6", "2.6", "auto", "", "newest", "bake", "-1"]
    for _ in range(3000):
        args = [w for o in chance.sample(options, chance.randint(0, 3)) for w in (o, *chance.sample(words, 1))]
        args = chance.choice([args, chance.sample(words, chance.randint(0, 4))])
        read.append((command, args, parsed(command, args)))
import click
quick = 0
for command, args, values in read:
    if values is None:
        continue
    quick += 1
    context = command.real().make_context(command.function.__name__, list(args))
    assert context.params == values, (args, context.params, values)
print(quick)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 300


PROVEN = ("--cuda", "13.0", "--te", "2.12")
"""A cell with records, which are compared with the suite of today."""


@pytest.mark.parametrize(
    ("command", "flags"),
    [(["resolve"], HEADLINE), (["resolve"], PROVEN), (["render", "--unlocked"], HEADLINE)],
    ids=["resolve", "resolve a proven cell", "render"],
)
def test_a_plain_answer_loads_none_of_the_slow_libraries(tmp_path, command, flags):
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    argv = [sys.executable, "-X", "importtime", "-m", "envbuild", *command, *flags]
    first = subprocess.run(argv, capture_output=True, text=True, check=True, env=environ)
    second = subprocess.run(argv, capture_output=True, text=True, check=True, env=environ)
    assert first.stdout == second.stdout
    loaded = {line.rsplit("|", 1)[-1].strip() for line in second.stderr.splitlines()}
    slow = {"pydantic", "clingo", "click", "rich", "jinja2", "packaging.version", "packaging.specifiers", "asyncio"}
    assert not loaded & {*slow, "subprocess", "envbuild.util.processes"}
    assert "pydantic" in first.stderr, "the first run checks the data"


def test_what_is_not_plain_is_left_to_click():
    real = Declared(lambda **_: None, ())
    assert parsed(real, []) == {}
    assert parsed(real, ["--odd"]) is None


def test_a_large_field_is_read_when_it_is_asked_for(cache):
    folder = data_dir("matrices") / "evidence"
    first = records_of(folder, ".json", Evidence, load_evidence, ("tests",))
    again = records_of(folder, ".json", Evidence, load_evidence, ("tests",))
    kept = next(cache.glob("evidence-*.json"))
    assert b'"tests"' not in kept.read_bytes()
    assert "tests" not in vars(again[-1])
    assert again[-1].tests == first[-1].tests
    assert again == first
    assert again[0].model_copy(update={"id": "x"}).tests == first[0].tests


def hash_of(file: Path) -> tuple[str, bool]:
    """Return the hash of a file, and whether it was read for that."""
    read = []

    def compute() -> str:
        read.append(file)
        return file.read_text()

    return keys.hash_of_files("a file", [str(file)], compute), bool(read)


@pytest.fixture
def settled(cache, monkeypatch):
    """A machine on which nothing has changed lately."""
    monkeypatch.setattr(keys, "_SETTLED_NS", -1)
    keys._hashes.cache_clear()
    yield
    keys._hashes.cache_clear()


def test_files_that_have_not_changed_are_not_read_again(settled, tmp_path):
    file = tmp_path / "a"
    file.write_text("one")
    time.sleep(0.05)  # more than a tick of the file system's clock
    assert hash_of(file) == ("one", True)
    keys._hashes.cache_clear()  # another process
    assert hash_of(file) == ("one", False)


@pytest.mark.parametrize("how", ["write", "replace", "write and set the times back"])
def test_files_that_have_changed_are_read_again(settled, tmp_path, how):
    file = tmp_path / "a"
    file.write_text("one")
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    time.sleep(0.05)
    assert hash_of(file) == ("one", True)
    if how == "replace":
        (tmp_path / "b").write_text("two")
        os.utime(tmp_path / "b", ns=times)
        (tmp_path / "b").rename(file)
    else:
        file.write_text("two")
    if "times" in how:
        os.utime(file, ns=times)
    assert hash_of(file) == ("two", True)


def test_the_hash_of_files_that_changed_just_now_is_not_kept(cache, tmp_path):
    keys._hashes.cache_clear()
    file = tmp_path / "a"
    file.write_text("one")
    assert [hash_of(file), hash_of(file)] == [("one", True), ("one", True)]
    keys._hashes.cache_clear()


class Point(Frozen):
    x: int
    y: int = 2
    marks: list[int] = field(default_factory=list)
    more: Mapping[str, int] = MappingProxyType({})


class Named(Point):
    name: str
    shared: ClassVar[int] = 7


def test_an_immutable_class_is_what_a_dataclass_is():
    one = Point(x=1)
    assert (one.x, one.y, one.marks, repr(one)) == (1, 2, [], "Point(x=1, y=2, marks=[], more=mappingproxy({}))")
    assert one == Point(x=1, y=2) != Point(x=1, y=3)
    assert one != Named(x=1, name="a")
    assert one.marks is not Point(x=1).marks
    hashed = {"x": 1, "marks": (), "more": (), "name": "a"}
    assert hash(Named(**hashed)) == hash(Named(**hashed))
    assert replace(one, y=5) == dataclasses.replace(one, y=5) == Point(x=1, y=5)
    plain_one = Point(x=1, more={})
    assert dataclasses.asdict(Named(x=plain_one, more={}, name="a")) == {
        "x": {"x": 1, "y": 2, "marks": [], "more": {}},
        "y": 2,
        "marks": [],
        "more": {},
        "name": "a",
    }
    assert pickle.loads(pickle.dumps(plain_one)) == copy.deepcopy(plain_one) == plain_one
    for wrong in ({}, {"x": 1, "z": 1}, {"name": "a"}):
        with pytest.raises(TypeError, match="Point"):
            Point(**wrong)
    with pytest.raises(AttributeError, match="immutable"):
        one.x = 2
    with pytest.raises(AttributeError, match="immutable"):
        del one.x


@pytest.mark.parametrize(
    "command", [["resolve", *HEADLINE], ["render", "--unlocked", *HEADLINE], ["--help"], ["resolve", "--help"]]
)
def test_a_quick_end_loses_no_output(tmp_path, command):
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    argv = [sys.executable, "-m", "envbuild", *command]
    piped = subprocess.run(argv, capture_output=True, check=True, env=environ).stdout
    with (tmp_path / "out").open("wb") as file:
        subprocess.run(argv, stdout=file, check=True, env=environ)
    assert piped == (tmp_path / "out").read_bytes()
    assert piped.endswith(b"\n")
    with Path("/dev/full").open("wb") as full:
        failed = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, check=False, env=environ)
    assert failed.returncode != 0
    assert b"envbuild: error" in failed.stderr

"""A lock or a stack of somebody else: whatever its fields hold, it is refused or it stays a value."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import tomli
import yaml
from cell_inputs import complete, inputs_for_stack
from hostile import MARK, OTHERS, TEXTS, leaves, outside_of_documents, put, put_unchecked
from pydantic import ValidationError

from envbuild.errors import DataError, EnvbuildError
from envbuild.lock.files import Locked, read_lock
from envbuild.lock.model import Lock
from envbuild.matrix.load import load_matrix
from envbuild.paths import data_dir
from envbuild.plan.apptainer import definition
from envbuild.plan.cluster import Cluster
from envbuild.plan.devcontainer import devcontainer
from envbuild.plan.dockerfile import bake, dockerfile
from envbuild.plan.kubernetes import manifest
from envbuild.plan.plan import plan_of
from envbuild.plan.sbatch import batch_script
from envbuild.plan.shell import script
from envbuild.stacks.load import load_stack
from envbuild.stacks.model import Stack
from envbuild.stacks.parts import digest_of
from envbuild.util.quote import plain

ROOT = Path(__file__).resolve().parents[2]
LOCKS = {
    "plain": (min((ROOT / "matrices/locks").glob("*-apex*-sm90-fc9f6c2f-*")), None),
    "stack": (ROOT / "docs/gpu/deepspeed", ROOT / "docs/gpu/deepspeed.toml"),
}
CLUSTER = Cluster(image="reg.example.org/team/te:1", digest="sha256:" + "a" * 64, command=("train.py",))
RUNS = {
    "sbatch": lambda plan: batch_script(load_matrix(), plan, CLUSTER, "docker"),
    "kubernetes": lambda plan: manifest(load_matrix(), plan, CLUSTER, "trainjob"),
    "devcontainer": lambda plan: devcontainer(plan, CLUSTER),
}
FORMATS = {"dockerfile": dockerfile, "bake": bake, "apptainer": definition, "shell": script, **RUNS}
SHORT = ("dockerfile", "shell", *RUNS)


def rendered(locked, stack, formats=tuple(FORMATS)):
    plan = plan_of(load_matrix(), locked, stack)
    return {name: FORMATS[name](plan) for name in formats}


def is_plain(value):
    try:
        return bool(plain(value))
    except ValueError:
        return False


def assert_same_build(texts, good, place, value):
    """The texts may differ in values and hold less, and nothing more that an engine or a shell runs."""
    for name, text in texts.items():
        if name in {"bake", "devcontainer"}:
            assert json.loads(text).keys() == json.loads(good[name]).keys()
            continue
        if name == "kubernetes":
            found, known = (list(map(shape, yaml.safe_load_all(each))) for each in (text, good[name]))
            assert found == known, (name, place, value)
            continue
        known = Counter(map(_opening, outside_of_documents(good[name])))
        lines = outside_of_documents(text)
        added = Counter(map(_opening, lines)) - known
        assert not [word for word in added if word and not word.startswith("#")], (name, place, value, added)
        if is_plain(value):
            continue  # nothing in it could be more than a value
        for line in lines:
            if MARK in line and not line.lstrip().startswith("#"):
                # FROM and ADD know no quotes; a word that a quoting function let through is one word there
                assert _opening(line) in {"FROM", "ADD"} or _in_quotes(line, line.index(MARK)), (
                    name,
                    place,
                    value,
                    line,
                )


def shape(value):
    """Return an object without its annotations, its texts as `str`, but those that a shell or Python runs."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items() if key not in {"annotations", "labels", "name"}}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return str if isinstance(value, str) and "\n" not in value else value


def _opening(line):
    """Return the instruction or command that a line begins with, a value after `=` aside."""
    return line.split(" ")[0].partition("=")[0]


def _in_quotes(line, end):
    quote, escaped = "", False
    for character in line[:end]:
        if escaped:
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif not quote and character in "'\"":
            quote = character
        elif character == quote:
            quote = ""
    return bool(quote)


@pytest.fixture(params=LOCKS, scope="module")
def example(request):
    folder, file = LOCKS[request.param]
    locked = read_lock(folder)
    stack = load_stack(str(file)) if file else None
    return folder, locked, stack, rendered(locked, stack)


def test_a_hostile_field_of_a_lock_is_refused_or_stays_a_value(example):
    folder, locked, stack, good = example
    whole = json.loads((folder / "lock.json").read_text())
    accepted = 0
    for place in leaves(whole):
        if place[0] == "missing" and place[1:2] not in {(), (0,)}:
            continue  # notes in any words: all of a kind
        notes = place[0] == "missing" and len(place) > 1
        for value in TEXTS[:10] if notes else (*TEXTS, *OTHERS):
            try:
                lock = Lock.model_validate_json(json.dumps(put(whole, place, value)))
                formats = tuple(FORMATS) if value in TEXTS[:4] else SHORT
                texts = rendered(Locked(lock=lock, pylocks=locked.pylocks), stack, formats)
            except (EnvbuildError, ValidationError):
                continue
            accepted += 1
            if isinstance(value, str):
                assert_same_build(texts, good, place, value)
    assert accepted  # a note such as `why` may hold any line, so the test reaches the renderers


def test_what_is_printed_of_a_hostile_lock_is_short_and_plain(example, tmp_path):
    folder, _, _, _ = example
    whole = json.loads((folder / "lock.json").read_text())
    for place in (("uv", "url"), ("cell", "torch"), ("sources", 0, "name"), ("matrix",)):
        for value in TEXTS:
            (tmp_path / "lock.json").write_text(json.dumps(put(whole, place, value)))
            with pytest.raises(DataError) as caught:
                read_lock(tmp_path)
            assert len(str(caught.value)) < 2000
            assert "\x1b" not in str(caught.value)


def test_a_hostile_name_of_a_field_is_refused(example, tmp_path):
    folder, _, stack, _ = example
    whole = json.loads((folder / "lock.json").read_text())
    for file in folder.glob("pylock.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for value in TEXTS:
        for key in ("cell", "commits"):
            changed = whole | {key: {**whole.get(key, {}), value: "1"}}
            (tmp_path / "lock.json").write_text(json.dumps(changed))
            with pytest.raises(EnvbuildError):
                rendered(read_lock(tmp_path), stack)


# A new instruction, a command behind a quote, one that a shell expands, an option of --mount.
BEHIND_THE_MODEL = (TEXTS[0], TEXTS[4], TEXTS[6], TEXTS[10])


def test_the_renderers_do_not_rely_on_the_model(example):
    """The same values, put into the model behind its validators: a template quotes or refuses each of them."""
    _, locked, stack, good = example
    whole = locked.lock.model_dump()
    places = [place for place in leaves(whole) if isinstance(_at(whole, place), str)]
    assert len(places) > 40
    if stack is not None:  # what the other lock has not
        places = [
            place for place in places if place[0] in {"images", "missing", "sources", "stack", "stack_digest", "files"}
        ]
    for place in places:
        for value in BEHIND_THE_MODEL:
            lock = put_unchecked(locked.lock, place, value)
            try:
                texts = rendered(Locked(lock=lock, pylocks=locked.pylocks), stack, SHORT)
            except (EnvbuildError, ValueError):  # an error of pydantic where a later step reads the value again
                continue
            assert_same_build(texts, good, place, value)


def _at(data, place):
    for part in place:
        data = data[part]
    return data


def test_a_hostile_field_of_a_stack_is_refused_or_stays_a_value():
    raw = tomli.loads((data_dir("matrices") / "stacks" / "llama3-70b.toml").read_text())
    stack = Stack.model_validate(raw)
    locked = complete(inputs_for_stack(stack))
    good = rendered(locked, stack)
    commands = {"run", "check", "command"}  # what a stack is asked to run
    accepted = 0
    for place in leaves(raw):
        if commands & set(map(str, place)) or place[0] in {
            "title",
            "about",
            "source",
            "also",
            "uses",
            "proof",
            "launchers",
        }:
            continue  # no part of a build
        for value in TEXTS[:12]:
            try:
                other = Stack.model_validate(put(raw, place, value))
                lock = locked.lock.model_copy(update={"stack_digest": digest_of(other)})
                texts = rendered(Locked(lock=lock, pylocks=locked.pylocks), other, SHORT)
            except (EnvbuildError, ValueError):
                continue
            accepted += 1
            assert_same_build(texts, good, place, value)
    assert accepted


def test_a_script_with_hostile_notes_still_parses(example, tmp_path):
    folder, _, stack, _ = example
    if stack is None:
        pytest.skip("a complete lock holds no note")
    whole = json.loads((folder / "lock.json").read_text())
    for file in folder.glob("pylock.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for value in TEXTS[3:9]:
        (tmp_path / "lock.json").write_text(json.dumps(put(whole, ("missing", 0, "what"), value)))
        text = rendered(read_lock(tmp_path), stack)["shell"]
        subprocess.run(["sh", "-n"], input=text, text=True, check=True)


def test_a_lock_that_calls_itself_complete_is_not(tmp_path):
    """Whether every input has its hash follows from the content; a lock cannot claim it."""
    folder, _ = LOCKS["plain"]
    whole = json.loads((folder / "lock.json").read_text())
    assert read_lock(folder).lock.complete
    for change in (
        lambda lock: lock["uv"].pop("sha256"),
        lambda lock: next(p for p in lock["os"] if p["name"] == "runtime").pop("packages"),
        lambda lock: lock["root"].pop("packages"),
        lambda lock: lock["files"][0].pop("sha256"),
        lambda lock: lock["sources"][0].pop("tree"),
        lambda lock: lock["python"][0].pop("packages"),
    ):
        lock = json.loads(json.dumps(whole))
        change(lock)
        for file in folder.glob("pylock.*"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "lock.json").write_text(json.dumps(lock))
        found = read_lock(tmp_path).lock
        assert not found.complete
        assert found.still_missing()
        plan = plan_of(load_matrix(), read_lock(tmp_path))
        assert plan.labels["io.envbuild.complete"] == "false"


def test_a_lock_of_another_cell_than_its_packages_is_refused(tmp_path):
    folder, _ = LOCKS["plain"]
    whole = json.loads((folder / "lock.json").read_text())
    for file in folder.glob("pylock.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for place, value in (
        (("cell", "torch"), "2.10.0"),
        (("cell", "apex"), "25.08"),
        (("cell", "os"), "debian13"),
        (("cell", "te"), "9.9"),
        (("version",), 2),
        (("epoch",), -1),
        (("epoch",), 2**40),
        (("components",), ["te"]),
        (("matrix",), "sha256:x"),
    ):
        (tmp_path / "lock.json").write_text(
            json.dumps(put(whole, place, value) if place[0] in whole else whole | {place[0]: value})
        )
        with pytest.raises(EnvbuildError):
            rendered(read_lock(tmp_path), None)


def test_a_pylock_that_is_a_link_is_refused(tmp_path):
    folder, _ = LOCKS["plain"]
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    pylock = tmp_path / "pylock.torch.toml"
    pylock.rename(tmp_path / "elsewhere")
    pylock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EnvbuildError, match="link"):
        read_lock(tmp_path)

"""What the cache holds, and removing it: own files by their kind alone, no link, nothing that a run uses."""

import fcntl
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from envbuild.engine.cache import KINDS, contents_of, prune
from envbuild.util import in_use
from envbuild.util.in_use import alone, share
from envbuild.util.logs import KEPT, new_log

KEY = "ab" * 32
MADE_AGAIN = [kind.name for kind in KINDS if kind.made_again]
EVERY = [kind.name for kind in KINDS]


def put(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def cache(tmp_path):
    """Return a cache with an entry of every kind."""
    folder = tmp_path / "cache"
    put(folder / "apptainer" / "home" / "notes")
    put(folder / "bisect" / KEY[:16] / "log.jsonl")
    put(folder / "builds" / KEY[:16] / "Dockerfile")
    put(folder / "builds" / f"{KEY[:16]}.lock", "")
    put(folder / "catalogs" / f"{KEY}.json")
    put(folder / "catalog-locks" / KEY / "lock.json")
    put(folder / "compiled" / f"clauses-{KEY}.json")
    put(folder / "failures" / f"{KEY}.json")
    put(folder / "files" / KEY / "uv.whl")
    put(folder / "git" / "objects.git" / "config")
    put(folder / "helpers" / KEY / "files" / "data" / "helpers.so")
    put(folder / "helpers" / f"{KEY}.key")
    put(folder / "helpers" / f"{KEY}.lock")
    put(folder / "locks" / "cu126-py312-torch2.8.0-3f9a21c7-92db1b" / "lock.json")
    put(folder / "pytest" / KEY[:16] / "front" / "pytest.py")
    put(folder / "proofs" / f"{KEY}.json")
    put(folder / "roots" / f"{KEY[:32]}.tar", "r" * 100_000)
    put(folder / "roots" / f"{KEY[:32]}.tar.sha256")
    put(folder / "sandboxes" / KEY / ".singularity.d" / "labels.json")
    put(folder / "uv" / "wheels-v5" / "x.whl")
    put(folder / "wheels" / f"flash-attn-{KEY[:32]}" / "record.json")
    put(folder / "catalogs" / f"{KEY}.json")
    put(folder / "catalog-locks" / KEY / "lock.json")
    for kind in ("built", "made-by", "pulled", "records", "taken", "times", "trials"):
        put(folder / kind / KEY)
    log = new_log(folder / "logs", "build", KEY[:8])
    log.close()
    return folder


def names(entries) -> set[str]:
    return {entry.name for entry in entries}


def test_every_kind_is_listed_and_pruned(cache):
    found = contents_of(cache)
    assert {entry.kind for entry in found.entries} == set(EVERY)
    assert found.other == []
    assert not any(entry.in_use for entry in found.entries)
    assert found.size > 100_000
    done = prune(cache, EVERY)
    assert names(done.removed) == names(found.entries)
    assert done.stayed == []
    left = [str(path.relative_to(cache)) for path in cache.rglob("*") if not path.is_dir()]
    assert sorted(left) == [f"builds/{KEY[:16]}.lock", "use.lock"]


def test_what_costs_hours_or_is_a_choice_goes_only_when_it_is_named(cache):
    prune(cache, MADE_AGAIN)
    assert {entry.kind for entry in contents_of(cache).entries} == {
        "apptainer",
        "bisect",
        "built",
        "catalogs",
        "failures",
        "locks",
        "made-by",
        "proofs",
        "pulled",
        "sandboxes",
        "taken",
        "wheels",
    }
    prune(cache, ["wheels"])
    assert not list((cache / "wheels").iterdir())


def test_a_dry_run_removes_nothing(cache):
    before = sorted(cache.rglob("*"))
    done = prune(cache, EVERY, dry_run=True)
    assert sorted(path for path in cache.rglob("*") if path.name != "use.lock") == before
    assert (len(done.removed), done.size) == (len(contents_of(cache).entries), prune(cache, EVERY).size)


def test_only_what_is_old_enough_goes(cache):
    old = put(cache / "times" / ("cd" * 32))
    os.utime(old, (1e9, 1e9))
    assert names(prune(cache, EVERY, older_s=86400.0).removed) == {f"times/{'cd' * 32}"}


def test_a_file_with_a_name_elsewhere_frees_nothing(cache):
    os.link(cache / "roots" / f"{KEY[:32]}.tar", cache / "builds" / KEY[:16] / "rootfs.tar")
    assert prune(cache, ["builds"], dry_run=True).size < 50_000
    assert prune(cache, ["builds", "roots"], dry_run=True).size > 100_000


HOSTILE = [
    "..", "-rf", "a\nb", "\x1b]0;title\x07", "é", ".hidden", "ab" * 31, "AB" * 32, KEY + ".json.bak", f"te-{KEY[:31]}", "x" * 255
]  # fmt: skip


def test_what_has_another_name_stays(cache):
    for kind in EVERY:
        for name in HOSTILE[1:]:
            if kind in {"apptainer", "git", "uv"} or (kind == "locks" and name in {"ab" * 31, "AB" * 32, "x" * 255}):
                continue
            if kind == "locks" and name in {KEY + ".json.bak", f"te-{KEY[:31]}"}:
                continue
            put(cache / kind / name, "mine")
    put(cache / "my notes.txt", "mine")
    before = {path for path in cache.rglob("*") if path.is_file() and path.read_text() == "mine"}
    found = contents_of(cache)
    assert len(found.other) == len(before)
    assert all(name.isprintable() for name in found.other)
    prune(cache, EVERY)
    assert {path for path in cache.rglob("*") if path.is_file() and path.read_text() == "mine"} == before


def test_no_link_is_followed(cache, tmp_path):
    mine = put(tmp_path / "home" / "thesis.txt", "mine")
    (cache / "wheels" / f"te-{KEY[:32]}").symlink_to(tmp_path / "home")
    (cache / "times" / ("cd" * 32)).symlink_to(mine)
    (cache / "files" / KEY / "link").symlink_to(tmp_path / "home")
    (cache / "git" / "up").symlink_to(tmp_path / "home")
    (cache / "records").rename(tmp_path / "records")
    (cache / "records").symlink_to(tmp_path / "home")
    put(tmp_path / "home" / KEY, "mine")
    found = contents_of(cache)
    assert {"records", f"wheels/te-{KEY[:32]}", f"times/{'cd' * 32}"} == set(found.other)
    prune(cache, EVERY)
    assert mine.read_text() == (tmp_path / "home" / KEY).read_text() == "mine"
    assert (cache / "wheels" / f"te-{KEY[:32]}").is_symlink()
    assert not (cache / "git").exists()


def test_an_entry_of_another_type_stays(cache):
    put(cache / "wheels" / f"te-{'cd' * 16}")
    (cache / "times" / ("cd" * 32)).mkdir()
    os.mkfifo(cache / "records" / ("cd" * 32))
    prune(cache, EVERY)
    assert (cache / "wheels" / f"te-{'cd' * 16}").exists()
    assert (cache / "times" / ("cd" * 32)).exists()
    assert (cache / "records" / ("cd" * 32)).exists()


def test_a_tree_that_may_not_be_written_goes_too(cache):
    folder = cache / "trials" / ("cd" * 32) / "sub"
    put(folder / "file").chmod(0o400)
    folder.chmod(0o500)
    folder.parent.chmod(0o500)
    prune(cache, ["trials"])
    assert list((cache / "trials").iterdir()) == []


USE = """
import pathlib, sys, time
from envbuild.util.in_use import share
share(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_what_a_run_uses_stays_until_the_run_is_dead(cache):
    process = subprocess.Popen([sys.executable, "-c", USE, str(cache)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        found = contents_of(cache)
        assert {entry.kind for entry in found.entries if not entry.in_use} == {"builds"}
        done = prune(cache, EVERY)
        assert {entry.kind for entry in done.removed} == {"builds"}  # no build of it goes on
        assert {why for _, why in done.stayed} == {"a run of envbuild uses the cache", "it is being written"}
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert prune(cache, EVERY).stayed == []


def test_the_folder_of_a_build_that_goes_on_stays(cache):
    with (cache / "builds" / f"{KEY[:16]}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        done = prune(cache, ["builds"])
        assert [why for _, why in done.stayed] == ["its build goes on"]
        assert (cache / "builds" / KEY[:16] / "Dockerfile").exists()
    assert prune(cache, ["builds"]).stayed == []


def test_a_log_that_is_written_stays(cache):
    with new_log(cache / "logs", "build", "00000000") as log:
        assert [why for _, why in prune(cache, ["logs"]).stayed] == ["it is being written"]
        assert Path(log.name).exists()


def test_a_run_waits_until_the_removal_is_over(cache, monkeypatch):
    monkeypatch.setattr(in_use, "_held", {})
    lines = []
    with alone(cache) as mine:
        assert mine
        with alone(cache) as second:
            assert not second
        waiting = subprocess.Popen([sys.executable, "-c", USE, str(cache)], stdout=subprocess.PIPE, text=True)
        too_early, _, _ = select.select([waiting.stdout], [], [], 1.0)
    try:
        assert not too_early
        assert waiting.stdout.readline() == "held\n"
    finally:
        waiting.kill()
        waiting.wait()
        waiting.stdout.close()
    share(cache, lines.append)
    assert lines == []


def test_five_logs_of_a_subject_are_kept_and_one_that_is_written_stays(tmp_path):
    first = new_log(tmp_path, "build", "aaaaaaaa")
    new_log(tmp_path, "build", "bbbbbbbb").close()
    new_log(tmp_path, "smoke", "aaaaaaaa").close()
    old = [put(tmp_path / f"build-aaaaaaaa-20200101-00000{number}-0000.log") for number in range(8)]
    Path(first.name).rename(tmp_path / "build-aaaaaaaa-20190101-000000-0000.log")
    put(tmp_path / "build-aaaaaaaa-notes.log")
    last = new_log(tmp_path, "build", "aaaaaaaa")
    left = {path.name for path in tmp_path.glob("build-aaaaaaaa-2*")}
    assert (
        left
        == {
            "build-aaaaaaaa-20190101-000000-0000.log",  # its run goes on
            *(path.name for path in old[-KEPT + 1 :]),
            Path(last.name).name,
        }
    )
    assert len(list(tmp_path.iterdir())) == len(left) + 3
    first.close()
    last.close()


def test_the_commands_answer_in_words_and_as_json(cache, monkeypatch, capsys):
    from envbuild.cli import main

    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(cache))
    monkeypatch.setattr(in_use, "_held", {})

    def envbuild(*words, code=0):
        with pytest.raises(SystemExit) as ended:
            main(["cache", *words])
        assert ended.value.code == code
        return capsys.readouterr()

    answer = json.loads(envbuild("--json").out)
    assert {kind["kind"] for kind in answer["kinds"]} == set(EVERY)
    assert answer["bytes"] == sum(kind["bytes"] for kind in answer["kinds"])
    assert "compiled wheels" in envbuild().out
    assert "would remove 1 entry" in envbuild("prune", "wheels", "--dry-run").out
    removed = json.loads(envbuild("prune", "wheels", "--json").out)["removed"]
    assert [entry["name"] for entry in removed] == [f"wheels/flash-attn-{KEY[:32]}"]
    assert "no kind" in envbuild("prune", "../x", code=2).err
    assert "no age" in envbuild("prune", "--older-than", "soon", code=2).err
    assert "contradict" in envbuild("prune", "logs", "--all", code=2).err

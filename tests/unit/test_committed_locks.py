"""The locks in the repository: each is whole, of the cell that its folder names, and found by the flags that the docs name."""

import contextlib
import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from envbuild.cli import main
from envbuild.lock.files import read_lock
from envbuild.lock.find import check_fits, find_lock, lock_name
from envbuild.lock.inputs import inputs_of
from envbuild.matrix.load import load_matrix
from envbuild.plan.plan import plan_of
from envbuild.settings import load_settings
from envbuild.stacks.load import stack_of_lock

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "matrices" / "locks").iterdir())

# Flags of the docs whose cells have a lock here. The other cells that they name take wheels from PyTorch's index, or start
# from NVIDIA's images: CI locks those, where these hosts are reached.
DOCUMENTED = [
    "--cuda 13.0 --te 2.12",
    "--cuda 13.0 --te 2.12 --gpu h100",
    "--cuda 13.0 --te 2.12 --apex none",
    "--cuda 13.0 --gpu a100,h100,b200",
]


def inputs_of_lock(lock):
    stack = stack_of_lock(lock.stack, None) if lock.stack else None
    return inputs_of(load_matrix(), lock.as_cell, stack=stack, flavor=lock.flavor, te_source=lock.te_source)


@pytest.mark.parametrize("folder", LOCKS, ids=lambda folder: folder.name)
def test_a_committed_lock_is_whole_and_of_its_cell(folder):
    locked = read_lock(folder)
    lock = locked.lock
    assert lock.complete
    assert (lock.flavor, lock.te_source) == ("runtime", "pypi")  # the two that a folder's name would say otherwise
    inputs = inputs_of_lock(lock)
    check_fits(lock, inputs, folder.name)
    assert lock_name(inputs) == folder.name
    plan_of(load_matrix(), locked, None)  # every input that the recipe asks for is there


@pytest.mark.parametrize("folder", LOCKS, ids=lambda folder: folder.name)
def test_a_committed_lock_names_no_host_of_the_machine_that_made_it(folder):
    text = "".join(path.read_text(encoding="utf-8") for path in folder.iterdir())
    hosts = {urlsplit(url).hostname for url in re.findall(r"https?://[^\s\"']+", text)}
    assert hosts <= {"files.pythonhosted.org", "github.com"}, hosts
    assert not re.findall(r"file://|\"/(?:root|home|tmp|work)/", text)


def test_committed_locks_state_the_same_submodules_for_the_same_commit():
    """Only a clone knows what a commit links, and a lock without it is refused where the source is fetched."""
    stated = {}
    for folder in LOCKS:
        for source in read_lock(folder).lock.sources:
            links = {(each.path, each.commit) for each in source.submodules}
            stated.setdefault((source.url, source.commit), {})[folder.name] = links
    assert stated
    for locks in stated.values():
        first, *rest = locks.values()
        assert all(links == first for links in rest), locks


@pytest.mark.parametrize("flags", DOCUMENTED)
def test_the_documented_flags_find_their_lock(flags, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path))
    with contextlib.suppress(SystemExit):
        main(["resolve", *flags.split(), "--json"])
    cell = json.loads(capsys.readouterr().out)["id"]
    (folder,) = (each for each in LOCKS if each.name.rpartition("-")[0] == cell)
    found = find_lock(load_settings(), inputs_of_lock(read_lock(folder).lock))
    assert found is not None
    assert found[1] == folder

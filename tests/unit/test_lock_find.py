"""Which lock a cell's commands take, and where a new one goes."""

import pytest
from road import complete, inputs_for

from envbuild import pipeline
from envbuild.errors import LockError
from envbuild.lock import find
from envbuild.lock.make import Locked, unlocked, write_lock
from envbuild.matrix.load import load_matrix
from envbuild.settings import load_settings


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Settings of a user, inputs, their complete lock and one that lacks everything; the committed locks are in a folder of their own."""
    settings = load_settings(environ={"HOME": str(tmp_path)}, root=tmp_path)
    monkeypatch.setattr(find, "data_dir", lambda _: tmp_path / "data")
    inputs = inputs_for(cuda="cpu")
    return settings, inputs, complete(inputs), Locked(lock=unlocked(load_matrix(), inputs), pylocks={})


def test_a_complete_lock_is_found_before_ones_that_lack_inputs(place, tmp_path):
    settings, inputs, whole, lacking = place
    own, committed = (f / find.lock_name(inputs) for f in (find.own_locks(settings), tmp_path / "data" / "locks"))
    assert find.find_lock(settings, inputs) is None
    write_lock(lacking, own)
    assert find.find_lock(settings, inputs)[1] == own
    write_lock(whole, committed)
    assert find.find_lock(settings, inputs)[1] == committed
    write_lock(whole, own)
    assert find.find_lock(settings, inputs)[1] == own


def test_a_lock_that_lacks_inputs_replaces_no_complete_one(place):
    settings, inputs, whole, lacking = place
    own = find.own_locks(settings) / find.lock_name(inputs)
    assert find.place_for(settings, inputs, lacking.lock) == own
    write_lock(whole, own)
    assert find.place_for(settings, inputs, whole.lock) == own
    write_lock(lacking, find.place_for(settings, inputs, lacking.lock))
    found, folder = find.find_lock(settings, inputs)
    assert (folder, found.lock.complete) == (own, True)


def test_an_archive_that_does_not_answer_leaves_the_lock_as_it_is(place, monkeypatch):
    settings, inputs, whole, _ = place

    def silent(*_):
        raise LockError("the archive at deb.example.org does not answer")

    monkeypatch.setattr(pipeline, "current_os", silent)
    said = []
    assert pipeline.renewed(settings, load_matrix(), inputs, whole, note=said.append) is None
    assert "deb.example.org" in said[0]

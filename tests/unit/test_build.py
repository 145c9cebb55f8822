"""What a build keeps for later ones."""

import os
from types import SimpleNamespace

import pytest

from envbuild.engine.build import _Run, scratch


def wheel(folder, content: str, *, whole: bool = True):
    folder.mkdir(parents=True)
    (folder / "x.whl").write_text(content)
    if whole:
        (folder / "record.json").write_text("{}")
    return folder


def keep(made, kept, *, cache: bool = True) -> str:
    _Run._keep(SimpleNamespace(b=SimpleNamespace(cache=cache)), made, kept)
    assert (kept / "record.json").is_file()
    return (kept / "x.whl").read_text()


def test_a_finished_wheel_is_kept_whole(tmp_path):
    made, kept = wheel(tmp_path / "own/made", "new"), tmp_path / "kept"
    assert keep(made, kept) == "new"
    assert not made.exists()


def test_a_wheel_that_another_run_keeps_already_stays(tmp_path):
    assert keep(wheel(tmp_path / "own/made", "new"), wheel(tmp_path / "kept", "theirs")) == "theirs"


@pytest.mark.parametrize(("whole", "cache"), [(False, True), (True, False)], ids=["half", "built anew"])
def test_what_is_half_there_or_was_to_be_built_anew_is_replaced(tmp_path, whole, cache):
    kept = wheel(tmp_path / "kept", "old", whole=whole)
    assert keep(wheel(tmp_path / "own/made", "new"), kept, cache=cache) == "new"
    assert sorted(p.name for p in kept.iterdir()) == ["record.json", "x.whl"]


def test_another_run_that_is_faster_in_the_same_moment_wins(tmp_path, monkeypatch):
    made, kept = wheel(tmp_path / "own/made", "new"), tmp_path / "kept"
    rename = type(made).rename

    def late(self, target):
        if self == made:
            wheel(kept, "theirs")
        return rename(self, target)

    monkeypatch.setattr(type(made), "rename", late)
    assert keep(made, kept) == "theirs"


def test_what_a_killed_run_left_goes_with_the_next_and_what_is_in_use_stays(tmp_path):
    left, fresh = tmp_path / ".te-killed", tmp_path / ".te-new"
    for folder in (left, fresh):
        (folder / "made").mkdir(parents=True)
    with scratch(tmp_path, "image") as used:
        for folder in (left, used):
            os.utime(folder, (0, 0))
        (used / "image.tar").write_text("x")
        with scratch(tmp_path, "te"):
            assert not left.exists()  # nobody holds it
            assert (used / "image.tar").exists()  # somebody does
            assert fresh.exists()  # somebody may be about to
    assert not used.exists()

"""What dead runs left in the cache and in the engine, and what is distinguished from it."""

import fcntl
import os
import subprocess
import sys
import time

import pytest

from envbuild.engine.leftovers import clear
from envbuild.settings import load_settings

HALF = """
import pathlib, signal, os, sys
from envbuild.util.scratch import scratch
with scratch("wheel", pathlib.Path(sys.argv[1])) as folder:
    (folder / "made").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    env = {"HOME": str(tmp_path), "ENVBUILD_CACHE_DIR": str(tmp_path / "cache")}
    # no engine answers there, and that is no failure
    return load_settings(environ=env, root=tmp_path).model_copy(update={"engine_host": f"unix://{tmp_path}/none.sock"})


def test_every_folder_of_the_cache_is_swept_and_what_is_whole_stays(tmp_path, settings):
    places = [
        tmp_path / "tmp",
        *(settings.cache_dir / name for name in ("", "wheels", "builds", "roots", "git/trees", "locks/cell")),
    ]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-c", HALF, str(place)], check=False)
    kept = settings.cache_dir / "wheels" / "te-0123"
    kept.mkdir()
    assert len(list(settings.cache_dir.rglob("*.tmp"))) == 6
    clear(settings)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not list(settings.cache_dir.rglob("*.tmp"))
    assert kept.is_dir()


def test_halves_of_packs_go_unless_somebody_fetches(settings):
    store = settings.cache_dir / "git" / "objects.git"
    (store / "objects" / "pack").mkdir(parents=True)
    (store / "objects" / "ab").mkdir()
    half, whole = store / "objects/pack/tmp_pack_1", store / "objects/pack/pack-1.pack"
    fresh, old = store / "objects/ab/tmp_obj_1", store / "objects/ab/tmp_obj_2"
    for each in (half, whole, fresh, old):
        each.touch()
    os.utime(old, (time.time() - 3600,) * 2)
    lock = store.with_suffix(".lock")
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        clear(settings)
        assert half.exists()
    clear(settings)
    assert not half.exists()
    assert not old.exists()
    assert fresh.exists()  # git writes single objects without the store's lock
    assert whole.exists()

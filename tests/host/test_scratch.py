"""Temporary folders: private, and gone when their maker is, however it went."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from envbuild.util import scratch as module
from envbuild.util.scratch import scratch, sweep

HOLD = """
import pathlib, sys, time
from envbuild.util.scratch import scratch
with scratch("secrets", pathlib.Path(sys.argv[1])) as folder:
    (folder / "env").write_text("password")
    print(folder, flush=True)
    time.sleep(60)
"""


def held(place: Path) -> tuple[subprocess.Popen, Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(place)], stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen, by: signal.Signals) -> None:
    process.send_signal(by)
    process.wait()
    process.stdout.close()


def killed(place: Path) -> Path:
    process, folder = held(place)
    end(process, signal.SIGKILL)
    assert (folder / "env").read_text() == "password"
    return folder


def test_a_folder_is_private_and_goes_with_the_block(tmp_path):
    with scratch("secrets", tmp_path) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "a" / "b").mkdir(parents=True)
    with pytest.raises(ValueError), scratch("secrets", tmp_path) as folder:
        raise ValueError
    assert list(tmp_path.iterdir()) == []


def test_the_default_place_is_tmpdir(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch("apt") as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith("envbuild-apt-")


def test_what_sigkill_left_goes_at_once_with_the_next_and_what_lives_stays(tmp_path):
    left = killed(tmp_path)
    process, lives = held(tmp_path)  # its own making sweeps
    assert not left.exists()
    assert sweep(tmp_path) == []
    assert (lives / "env").exists()
    end(process, signal.SIGKILL)
    with scratch("other", tmp_path):
        assert not lives.exists()


def test_half_a_removal_is_finished(tmp_path):
    left = killed(tmp_path)
    (left / "env").unlink()
    assert sweep(tmp_path) == [left.name]
    (tmp_path / left.name).mkdir()  # killed between the folder and its lock
    assert sweep(tmp_path) == [left.name]


def test_no_link_is_followed(tmp_path):
    outside, place = tmp_path / "outside", tmp_path / "place"
    outside.mkdir()
    place.mkdir()
    (outside / "file").write_text("kept")
    left = killed(place)
    (left / "inside").symlink_to(outside)
    lookalike = place / left.name.replace("secrets", "other")
    lookalike.symlink_to(outside)
    assert sweep(place) == [left.name]
    assert lookalike.is_symlink()
    assert (outside / "file").read_text() == "kept"


def test_a_link_in_place_of_the_lock_is_not_opened(tmp_path):
    left = killed(tmp_path)
    target = tmp_path / "file"
    target.write_text("kept")
    (left / ".lock").unlink()
    (left / ".lock").symlink_to(target)
    assert sweep(tmp_path) == []
    assert left.exists()


@pytest.mark.parametrize(
    "name", ["envbuild-1000", "envbuild-secrets-mine", "envbuild-logs-20261122", ".envbuild-x.tmp"]
)
def test_a_folder_of_another_name_is_no_leftover(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / ".lock").touch()
    assert sweep(tmp_path) == []
    assert (tmp_path / name).is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_stays(tmp_path):
    left = killed(tmp_path)
    os.chown(left, 12345, 12345)
    assert sweep(tmp_path) == []
    assert left.exists()


def test_another_hosts_folder_stays_for_a_week(tmp_path):
    left = killed(tmp_path)
    (left / ".lock").write_text("another-host")
    assert sweep(tmp_path) == []
    os.utime(left / ".lock", (0, 0))
    assert sweep(tmp_path) == [left.name]


@pytest.mark.parametrize("name", ["place", "a place\\ with\ttabs"])
def test_what_is_mounted_in_a_leftover_is_left_alone(tmp_path, name):
    tmp_path = tmp_path / name
    tmp_path.mkdir()
    left = killed(tmp_path)
    (left / "proc").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", left / "proc"], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("only root can mount")
    try:
        (left / "proc" / "file").touch()
        assert sweep(tmp_path) == []
        assert (left / "proc" / "file").exists()
    finally:
        subprocess.run(["umount", left / "proc"], check=True)
    assert sweep(tmp_path) == [left.name]


def test_folders_that_even_their_owner_may_not_write_to_go_too():
    script = HOLD.replace("print(", "(folder / 'a' / 'b').mkdir(parents=True); (folder / 'a').chmod(0o500); print(")
    script = script.replace("time.sleep(60)", "pass")
    if os.geteuid() == 0:  # root may write anywhere
        script = script.replace("with scratch(", "import os; os.setuid(65534)\nwith scratch(")
    place = Path("/tmp", f"envbuild-test-{os.getpid()}")  # pytest's own folders are closed to other users
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    try:
        subprocess.run([sys.executable, "-c", script, str(place)], check=True, stdout=subprocess.DEVNULL)
        assert list(place.iterdir()) == []
    finally:
        subprocess.run(["rm", "-rf", place], check=True)


def test_makers_and_sweepers_at_the_same_time(tmp_path):
    """Between a folder and its lock another run may take it for a leftover: its maker then makes another."""
    stop, wrong = threading.Event(), []

    def sweeps():
        while not stop.is_set():
            sweep(tmp_path)

    def makes():
        for _ in range(150):
            with scratch("part", tmp_path) as folder:
                (folder / "file").write_text("x")
                time.sleep(0.0005)
                if not (folder / "file").exists():
                    wrong.append(folder)

    sweepers = [threading.Thread(target=sweeps) for _ in range(2)]
    makers = [threading.Thread(target=makes) for _ in range(3)]
    for each in (*sweepers, *makers):
        each.start()
    for each in makers:
        each.join()
    stop.set()
    for each in sweepers:
        each.join()
    assert not wrong
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["before the lock file", "before the lock"])
def test_a_sweep_in_the_worst_moment_costs_nothing(tmp_path, monkeypatch, moment):
    where = (os, "open") if moment == "before the lock file" else (module.fcntl, "flock")
    real = getattr(*where)
    calls = []

    def late(*args, **kwargs):
        if not calls and (moment == "before the lock" or str(args[0]).endswith(".lock")):
            calls.append(1)
            for each in tmp_path.iterdir():  # as a sweep of another process does
                (each / ".lock").unlink(missing_ok=True)
                each.rmdir()
        return real(*args, **kwargs)

    monkeypatch.setattr(*where, late)
    with scratch("part", tmp_path) as folder:
        assert calls
        (folder / "file").touch()
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_behind_a_removed_lock_goes_with_the_next_sweep(tmp_path):
    """A program that was still ending wrote into its folder after a sweep had taken the lock away."""
    left = killed(tmp_path)
    (left / ".lock").unlink()
    (left / "late").mkdir()
    (left / "late" / "file").touch()
    assert sweep(tmp_path) == [left.name]
    assert list(tmp_path.iterdir()) == []


def test_a_maker_that_is_quicker_than_a_sweep_keeps_its_folder(tmp_path, monkeypatch):
    """The sweep finds no lock, and then its maker makes it and begins to work."""
    folder = tmp_path / "envbuild-part-0123456789abcdef.tmp"
    folder.mkdir()
    real = Path.rmdir

    def late(path):
        (path / ".lock").touch()
        (path / "work").touch()
        return real(path)

    monkeypatch.setattr(Path, "rmdir", late)
    assert sweep(tmp_path) == []
    assert (folder / "work").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can leave what its maker may not remove")
def test_what_a_containers_root_left_is_no_error():
    place = Path(tempfile.mkdtemp())  # pytest's own folders are closed to others
    place.chmod(0o777)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setuid(65534)
            with scratch("watch", place) as folder:
                (folder / "result").write_text("x")
                (folder / "kept").mkdir()
                os.read(read, 1)
            code = 0
        finally:
            os._exit(code)
    try:
        end = time.monotonic() + 20
        while not (kept := list(place.glob("*/kept"))):
            assert time.monotonic() < end
            time.sleep(0.01)
        (kept[0] / "of-root").mkdir()
        (kept[0] / "of-root" / "file").write_text("x")
        os.write(write, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (kept[0] / "of-root" / "file").exists()
    finally:
        os.close(read)
        os.close(write)
        shutil.rmtree(place)

"""What a .sif unpacks to is looked at before any of it is written: it is foreign, and a few KiB can be TiBs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from envbuild.engine import apptainer, squashfs
from envbuild.engine.archive import ImageError
from envbuild.engine.image import Label, image_of
from envbuild.engine.originals import open_original
from envbuild.errors import HostError
from envbuild.run.apptainer import ApptainerRuntime
from envbuild.settings import Settings
from envbuild.util.foreign_tar import Bounds

START = 4096
"""Where the file system starts in a .sif of these tests, which is nothing else."""
ROOT = "drwxr-xr-x 0/0                     111 2026-11-23 22:09 squashfs-root\n"
FILE = "-rwsr-xr-x 0/0 {:>23} 2026-11-23 22:09 squashfs-root/{}\n"


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Put a stand-in for unsquashfs on the PATH; it lists what `listing` holds and unpacks one file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "unsquashfs").write_text(
        f'#!/bin/sh\ncase "$*" in\n"-lln "*) cat {folder}/listing; exit $(cat {folder}/code) ;;\nesac\n'
        'while [ "$1" != -dest ]; do shift; done\nmkdir "$2" && echo x >"$2/made"\n'
    )
    (folder / "unsquashfs").chmod(0o755)
    (folder / "code").write_text("0")
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def lists(text: str, code: int = 0) -> None:
        (folder / "listing").write_text(text)
        (folder / "code").write_text(str(code))

    return lists


def unpacked(tmp_path: Path, **limits: int) -> Path:
    target = tmp_path / "target"
    bounds = Bounds(**{"bytes": 1 << 40, "members": 1000} | limits)
    squashfs.unpack(tmp_path / "x.sif", START, target, bounds)
    return target


def test_what_is_within_the_bounds_is_unpacked(tmp_path, tools):
    device = "crw-r--r-- 0/0                   1,  3 2026-11-23 22:09 squashfs-root/dev\n"
    tools("Parallel unsquashfs: 2 processors\n" + ROOT + FILE.format(5, "a") + device + FILE.format(6, "odd\nname"))
    assert (unpacked(tmp_path, bytes=122, members=4) / "made").is_file()


@pytest.mark.parametrize(
    ("listing", "limits", "says"),
    [
        (ROOT + FILE.format(1 << 37, "bomb"), {"bytes": 100 << 30}, "it unpacks to more than 100 GiB"),
        (ROOT + "".join(FILE.format(1 << 30, n) for n in range(200)), {"bytes": 100 << 30}, "more than 100 GiB"),
        (ROOT + "".join(FILE.format(0, n) for n in range(1000)), {"members": 1000}, "more than 1,000 files"),
        (FILE.format(10**20 - 1, "a"), {}, "more than 1,024 GiB"),
        # a path with a line break can only add to it
        (FILE.format(1, "a\n" + FILE.format(1 << 50, "b")), {}, "more than 1,024 GiB"),
        ("nothing that is a listing\n", {}, "cannot be listed: nothing that is a listing"),
        ("", {}, "cannot be listed: unsquashfs gave no reason"),
    ],
)
def test_what_is_out_of_bounds_is_refused_before_anything_is_written(tmp_path, tools, listing, limits, says):
    tools(listing)
    with pytest.raises(ValueError, match=says):
        unpacked(tmp_path, **limits)
    assert not (tmp_path / "target").exists()


def test_a_listing_that_fails_unpacks_nothing(tmp_path, tools):
    tools(ROOT + "FATAL ERROR: Data queue size is too large\n", code=1)
    with pytest.raises(ValueError, match="cannot be listed: FATAL ERROR"):
        unpacked(tmp_path)
    assert not (tmp_path / "target").exists()


def test_more_than_the_disk_has_is_an_error_of_the_host(tmp_path, tools):
    tools(ROOT + FILE.format(1 << 50, "a"))
    with pytest.raises(HostError, match="GiB are free") as refused:
        unpacked(tmp_path, bytes=1 << 60)
    assert refused.value.where == str(tmp_path)
    assert not (tmp_path / "target").exists()


def test_an_endless_listing_is_ended(tmp_path, tools):
    tools("")
    script = Path(os.environ["PATH"].split(":")[0]) / "unsquashfs"
    script.write_text(f"#!/bin/sh\nwhile :; do echo '{FILE.format(0, 'a').strip()}'; done\n")
    with pytest.raises(ValueError, match="more than 1,000 files"):
        unpacked(tmp_path)


def test_reproduce_and_the_audit_refuse_it_and_leave_nothing(tmp_path, tools, monkeypatch):
    """Both unpack a .sif into a folder that goes with the run."""
    tools(ROOT + "".join(FILE.format(1 << 33, n) for n in range(20)))  # 160 GiB
    sif = tmp_path / "x.sif"
    sif.write_bytes(bytes(START))
    monkeypatch.setattr(apptainer, "_listed", lambda path: b"3 |1 |NONE |4096-8192 |FS (Squashfs/*System/amd64)\n")
    digest = f"sha256:{'a' * 64}"
    label = {apptainer.LABEL: Label(digest=digest).model_dump_json()}
    monkeypatch.setattr(apptainer, "labels_of_sif", lambda path: label)
    monkeypatch.setattr(apptainer, "program", lambda: "apptainer")
    made = tmp_path / "tmp"
    made.mkdir()
    monkeypatch.setenv("TMPDIR", str(made))
    monkeypatch.setattr("tempfile.tempdir", str(made))
    settings = Settings(cache_dir=tmp_path / "cache")
    with pytest.raises(ImageError, match="128 GiB"), open_original(settings, str(sif)):
        pass
    image = image_of(Label(digest=digest), reference=str(sif), place=sif, confirmed_by="label")
    with pytest.raises(ImageError, match="128 GiB"), ApptainerRuntime(settings).export(image, seconds=60):
        pass
    assert list(made.iterdir()) == []


@pytest.mark.skipif(shutil.which("mksquashfs") is None, reason="squashfs-tools is not installed")
def test_a_real_file_system(tmp_path):
    """The listing of the installed unsquashfs is of the form that is read."""
    source = tmp_path / "source"
    (source / "folder").mkdir(parents=True)
    (source / "a").write_bytes(b"x" * 5000)
    (source / "folder" / "odd\nname").write_bytes(b"y")
    (source / "link").symlink_to("a")
    os.mkfifo(source / "fifo")
    with (source / "sparse").open("wb") as file:
        file.truncate(2 << 30)
    made = tmp_path / "made"
    subprocess.run(["mksquashfs", source, made, "-noappend", "-quiet", "-no-progress"], check=True, capture_output=True)
    (tmp_path / "x.sif").write_bytes(bytes(START) + made.read_bytes())
    assert made.stat().st_size < 1 << 20
    with pytest.raises(ValueError, match="more than 1 GiB"):
        unpacked(tmp_path, bytes=1 << 30)
    with pytest.raises(ValueError, match="more than 5 files"):
        unpacked(tmp_path, members=5)
    (source / "sparse").unlink()
    subprocess.run(["mksquashfs", source, made, "-noappend", "-quiet", "-no-progress"], check=True, capture_output=True)
    (tmp_path / "x.sif").write_bytes(bytes(START) + made.read_bytes())
    assert (unpacked(tmp_path) / "a").read_bytes() == b"x" * 5000


SYSTEM = b"4 |1 |NONE |40960-81920 |FS (Squashfs/*System/amd64)\n"


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (b"3 |1 |NONE |32768-40960 |FS (Squashfs/Data/amd64)\n" + SYSTEM, "2 file systems"),
        (SYSTEM + b"5 |1 |NONE |81920-90112 |FS (Ext3/Overlay/amd64)\n", "2 file systems"),
        (SYSTEM + SYSTEM, "2 squashfs file systems to run"),
        (b"3 |1 |NONE |32768-40960 |FS (Squashfs/Data/amd64)\n", "0 squashfs file systems to run"),
        (b"3 |1 |NONE |32768-40960 |FS (Ext3/*System/amd64)\n", "0 squashfs file systems to run"),
    ],
)
def test_a_sif_that_runs_another_file_system_than_is_read(table, says, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(apptainer, "_listed", lambda _: table)
    monkeypatch.setattr(apptainer.squashfs, "unpack", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ValueError, match=says):
        apptainer.unpack_sif(tmp_path / "x.sif", tmp_path / "root")

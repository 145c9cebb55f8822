"""`envbuild bisect --images`: the images lie in a folder, as files, and none is built."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from saved_images import Image

from envbuild.cli import bisect as command
from envbuild.cli import main
from envbuild.pipeline.image_folder import images_in
from envbuild.verify import command as running

GOOD, BAD = "cuda=cpu python=3.10 torch=2.11.0", "cuda=cpu python=3.12 torch=2.13.0 mpi=mpich"


def archive(folder: Path, name: str, cell: object, **more: str) -> Path:
    """Write an image that states this cell."""
    labels: dict[str, object] = {} if cell is None else {"io.envbuild.cell": cell}
    labels |= more
    return Image(config={"os": "linux", "architecture": "amd64", "config": {"Labels": labels}}).write(folder, name)


@pytest.fixture
def bisect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command with `--images FOLDER`; a test that fails at the images whose name holds `bad`."""
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "_made", lambda *_: pytest.fail("an image was built"))

    class Run:
        folder = tmp_path / "images"
        ran: list[str] = []

        def test(self, image: str, *_: object, **__: object) -> tuple[int, str]:
            self.ran.append(image)
            return int("bad" in Path(image).name), "last line"

        def __call__(self, *words: str) -> tuple[int, str, str]:
            self.ran = []
            with pytest.raises(SystemExit) as ended:
                main(["bisect", GOOD, BAD, "--images", str(self.folder), *words])
            out, err = capsys.readouterr()
            return int(ended.value.code or 0), out, err

    run = Run()
    run.folder.mkdir()
    monkeypatch.setattr(running, "run_test", run.test)
    return run


def way(bisect: Any) -> list[dict[str, Any]]:
    stops: list[dict[str, Any]] = json.loads(bisect("--dry-run", "--json")[1])["stops"]
    return stops


def test_the_images_of_the_way_are_found_by_the_cell_that_they_state(bisect: Any) -> None:
    stops = way(bisect)
    assert [stop["image"] for stop in stops] == [None] * len(stops)
    for place, stop in enumerate(stops):
        archive(bisect.folder, f"{place}{'-bad' if place > 1 else ''}.oci.tar", stop["cell"])
    archive(bisect.folder, "another.oci.tar", "cu130-py311-torch2.11.0-0123abcd")
    (bisect.folder / "notes.txt").write_text("not an image")
    code, out, _ = bisect("--json", "--", "true")
    answer = json.loads(out)
    assert (code, answer["found"]["first_bad"]) == (0, stops[2]["cell"])
    assert bisect.ran
    assert set(bisect.ran) <= {stop["image"] for stop in answer["stops"]}
    assert all(Path(image).is_absolute() for image in bisect.ran)
    _, out, _ = bisect("--dry-run")
    assert "2-bad.oci.tar" in out


def test_the_search_goes_on_with_an_image_that_was_missing(bisect: Any) -> None:
    stops = way(bisect)
    first, last = stops[0]["cell"], stops[-1]["cell"]
    archive(bisect.folder, "first.oci.tar", first)
    code, _, err = bisect("--", "true")
    assert (code, f"the image of {last} is missing" in err, len(bisect.ran)) == (8, True, 1)
    (line,) = [line for line in err.splitlines() if "envbuild image" in line]
    words = shlex.split(line.partition("again: ")[2])
    assert words[-3:] == ["--no-smoke", "--output", f"{last}.oci.tar"]
    flags = dict(zip(words[2:-3:2], words[3:-3:2], strict=True))
    assert flags.items() >= {"--cuda": "cpu", "--python": "3.12", "--torch": "2.13.0+cpu", "--mpi": "mpich"}.items()
    archive(bisect.folder, "last-bad.oci.tar", last)
    code, _, err = bisect("--", "true")
    assert code == 8  # one in the middle
    assert [Path(image).name for image in bisect.ran] == ["last-bad.oci.tar"]  # the first one's verdict is kept
    assert f"good (kept from an earlier run): {first}" in err


def test_another_image_of_a_cell_is_tested_again(bisect: Any) -> None:
    stops = way(bisect)
    for place, stop in enumerate(stops):
        archive(bisect.folder, f"{place}{'-bad' if place > 1 else ''}.oci.tar", stop["cell"])
    assert bisect("--", "true")[0] == 0
    assert bisect("--", "true")[0] == 0
    assert bisect.ran == []
    archive(bisect.folder, "0.oci.tar", stops[0]["cell"], more="another image")
    assert bisect("--", "true")[0] == 0
    assert [Path(image).name for image in bisect.ran] == ["0.oci.tar"]


def test_a_sif_without_apptainer_is_not_missing(bisect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bisect.folder / "a.sif").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = bisect("--dry-run")
    assert (code, "apptainer" in err, "missing from" in err) == (8, True, False)


def test_a_name_of_a_file_makes_no_line_of_its_own(bisect: Any) -> None:
    cell = way(bisect)[0]["cell"]
    archive(bisect.folder, "x\nforged.oci.tar", cell)
    _, out, _ = bisect("--dry-run")
    assert not any(line.startswith("forged") for line in out.splitlines())
    assert "x\\nforged.oci.tar" in out


def test_what_flavor_the_images_must_have_is_stated(bisect: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bisect", GOOD + " flavor=devel", BAD + " flavor=devel", "--images", str(bisect.folder), "--dry-run"]
    with pytest.raises(SystemExit):
        main(words)
    assert "must be devel" in capsys.readouterr().err


def test_two_images_of_one_cell_are_refused(bisect: Any) -> None:
    cell = way(bisect)[0]["cell"]
    archive(bisect.folder, "a.oci.tar", cell)
    archive(bisect.folder, "b.oci.tar", cell)
    code, _, err = bisect("--", "true")
    assert (code, "a.oci.tar and b.oci.tar are images of one cell" in err, bisect.ran) == (2, True, [])


def test_cells_of_two_flavors_are_refused(bisect: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bisect", GOOD, BAD + " flavor=devel", "--images", str(bisect.folder), "--", "true"])
    assert ended.value.code == 2
    assert "the flavor is no part of what an image states" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["missing", "file"])
def test_a_folder_that_cannot_be_read(bisect: Any, what: str) -> None:
    bisect.folder.rmdir()
    if what == "file":
        bisect.folder.write_text("")
    code, _, err = bisect("--", "true")
    assert (code, "cannot be read" in err, "Traceback" in err) == (2, True, False)


def test_what_is_spoiled_is_passed_over_with_a_word(tmp_path: Path) -> None:
    sound = archive(tmp_path, "sound.oci.tar", "cell-a")
    archive(tmp_path, "none.oci.tar", None)
    archive(tmp_path, "number.oci.tar", 3)
    archive(tmp_path, "\x1b[2J.oci.tar", None)
    (tmp_path / "text.tar").write_text("no tar")
    changed = Image(
        config={"os": "linux", "architecture": "amd64", "config": {"Labels": {"io.envbuild.cell": "cell-b"}}}
    )
    changed.blobs = {digest: body.replace(b"cell-b", b"cell-a") for digest, body in changed.blobs.items()}
    changed.write(tmp_path, "changed.oci.tar")
    (tmp_path / "box" / ".singularity.d").mkdir(parents=True)
    notes: list[str] = []
    found = images_in(tmp_path, notes.append)
    assert {cell: [image.reference for image in images] for cell, images in found.items()} == {"cell-a": [str(sound)]}
    reported = {note.removeprefix("passed over ").partition(": ")[0]: note.partition(": ")[2] for note in notes}
    assert set(reported) == {"none.oci.tar", "number.oci.tar", "text.tar", "changed.oci.tar", "box", "\\x1b[2J.oci.tar"}
    assert reported["none.oci.tar"] == "it states no cell"


def test_a_folder_of_very_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envbuild.pipeline.image_folder._MOST", 2)
    for name in "abc":
        (tmp_path / name).touch()
    with pytest.raises(Exception, match="holds 3 files and folders, more than 2"):
        images_in(tmp_path)


def test_another_image_of_good_is_another_baseline_and_another_search(
    bisect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[str] = []

    def bench(_settings: object, _asked: object, folder: Path) -> Any:
        folders.append(folder.name)
        return lambda image: ("bad" not in Path(image).name, "slow")

    monkeypatch.setattr(command, "_bench_test", bench)
    stops = way(bisect)
    for place, stop in enumerate(stops):
        archive(bisect.folder, f"{place}{'-bad' if place > 1 else ''}.oci.tar", stop["cell"])
    assert bisect()[0] == bisect()[0] == 0
    archive(bisect.folder, "2-bad.oci.tar", stops[2]["cell"], more="another image")
    assert bisect()[0] == 0
    assert len(set(folders)) == 1
    archive(bisect.folder, "0.oci.tar", stops[0]["cell"], more="another image")
    assert bisect()[0] == 0
    assert len(set(folders)) == 2

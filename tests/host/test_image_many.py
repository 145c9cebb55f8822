"""`envbuild image --matrix`: which cells a pattern names, and what many of them come to."""

import json
import shlex

import pytest

from envbuild.cli import image_many, main
from envbuild.cli.axes import keyword
from envbuild.curate.matching import cells_matching
from envbuild.errors import BuildError, LockError, NoCellError, SmokeError, UsageError
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix

CU13 = Request(pins=(Pin(axis="cuda", spec="13.0", origin="--cuda"), Pin(axis="gpu", spec="a100", origin="--gpu")))


def ids(request=CU13, *patterns, skip=()):
    found, skipped = cells_matching(load_matrix(), request, patterns, skip=skip)
    return [cell.cell.id for cell, _ in found], [cell.cell.id for cell in skipped]


def test_a_pattern_names_whole_ids_and_the_newest_comes_first():
    found, skipped = ids(CU13, "cu13*-te2.1[0-2]*", skip=("*-torch2.9.*", "*-te2.10*"))
    assert found
    assert skipped
    assert all(name.startswith("cu130-") and "-sm80-" in name for name in found)
    assert all("-te2.11" in name or "-te2.12" in name for name in found)
    assert all("torch2.9." in name or "te2.10" in name for name in skipped)
    torches = [name.split("torch")[1].split("-")[0] for name in found]
    assert torches == sorted(torches, key=lambda v: [-int(n) for n in v.split(".")])
    everything, _ = ids(CU13, "*")
    assert set(found) | set(skipped) < set(everything)
    assert len(set(everything)) == len(everything)


def test_cells_of_a_cuda_that_has_no_te_are_named_too():
    found, _ = ids(Request(pins=(Pin(axis="cuda", spec="cpu", origin="--cuda"),)), "cpu-*")
    assert found
    assert all("-te" not in name for name in found)


def test_the_flags_of_a_cell_choose_it_again(capsys):
    (cell, versions), *_ = cells_matching(load_matrix(), CU13, ["*-te2.12*"])[0]
    assert versions["te"] == "2.12.0"
    with pytest.raises(SystemExit):
        main(["resolve", *shlex.split(cell.args), "--json"])
    assert json.loads(capsys.readouterr().out)["id"] == cell.cell.id


@pytest.mark.parametrize(
    ("patterns", "skip", "error", "says"),
    [
        (["cu99*"], [], UsageError, "no cell matches 'cu99\\*'"),
        (["te2.12"], [], UsageError, "no cell matches"),
        (["cu13*"], ["cu99*"], UsageError, "no cell matches"),
        ([" "], [], UsageError, "a pattern is empty"),
        (["\x1b[2J*"], [], UsageError, r"x1b\[2J"),
        (["cu13*"], ["*"], NoCellError, "leaves out every cell"),
    ],
)
def test_a_pattern_that_names_nothing_is_an_error(patterns, skip, error, says):
    with pytest.raises(error, match=says) as caught:
        cells_matching(load_matrix(), CU13, patterns, skip=skip)
    assert str(caught.value).replace("\n", "").isprintable()


def run(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["image", *words])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


WORDS = ("--cuda", "13.0", "--torch", ">=2.11,<2.13", "--matrix", "*-te2.1[12].*")


def test_the_cells_are_listed_without_making_one(capsys, monkeypatch):
    monkeypatch.setattr(image_many, "make_one", lambda *_, **__: pytest.fail("it makes one"))
    code, out, _ = run(capsys, *WORDS, "--skip", "*-te2.11*", "--dry-run", "--json")
    answer = json.loads(out)
    assert code == 0
    assert {cell["outcome"] for cell in answer["cells"]} == {"not begun"}
    assert all("-te2.11" in name for name in answer["skipped"])
    assert answer["counts"]["not begun"] == len(answer["cells"]) > 1


def outcomes(monkeypatch, *each):
    """Let the images come to these, in turn: a report, a failure with a report, or what is raised."""
    asked = []

    def make_one(options, given, *, notices):
        asked.append((given.flags[keyword("torch")], given.flags[keyword("te")], notices))
        mine = each[len(asked) - 1]
        if isinstance(mine, BaseException):
            raise mine
        return mine

    monkeypatch.setattr(image_many, "make_one", make_one)
    return asked


REPORT = {"origin": "built", "digest": f"sha256:{'a' * 64}", "unreached": {}}


def test_a_failure_stops_no_other_cell_and_decides_the_exit_code(capsys, monkeypatch):
    asked = outcomes(
        monkeypatch,
        (REPORT, None),
        BuildError("the stage build-te failed\nline", where="log"),
        (REPORT, SmokeError("a test failed")),
        OSError(28, "No space left on device", "/x"),
        LockError("no lock"),
        RuntimeError("nobody foresaw it"),
        *[(REPORT | {"origin": "pulled"}, None)] * 20,
    )
    code, out, err = run(capsys, *WORDS, "--json")
    answer = json.loads(out)
    rows = answer["cells"]
    assert code == BuildError.exit_code
    assert [row["outcome"] for row in rows[:5]] == ["built", "failed", "failed", "failed", "failed"]
    assert [row["exit_code"] for row in rows[:6]] == [0, 5, 7, 8, 4, 70]
    assert rows[1]["image"] is None
    assert rows[2]["image"] == REPORT
    assert answer["counts"]["failed"] == 5
    assert answer["counts"]["pulled"] == len(rows) - 6
    assert len(asked) == len(rows) == len(set(asked))
    assert [notices for *_, notices in asked].count(True) == 1
    assert f"5 of {len(rows)} cells failed; the first one: the stage build-te failed" in err


def test_people_get_a_table(capsys, monkeypatch):
    outcomes(monkeypatch, (REPORT, None), BuildError("the stage build-te failed"), *[(REPORT, None)] * 20)
    code, out, err = run(capsys, *WORDS)
    assert code == 5
    lines = out.splitlines()
    assert lines[0].split() == ["cell", "outcome", "time", "image", "or", "error"]
    assert "built" in lines[1]
    assert "exit code 5: the stage build-te failed" in lines[2]
    assert "1 failed in" in lines[-1]
    assert "[2/" in err


def test_an_interrupted_run_still_says_what_was_done(capsys, monkeypatch):
    outcomes(monkeypatch, (REPORT, None), KeyboardInterrupt())
    code, out, _ = run(capsys, *WORDS, "--json")
    answer = json.loads(out)
    assert code == 130
    assert [cell["outcome"] for cell in answer["cells"][:3]] == ["built", "not begun", "not begun"]


def test_where_no_engine_answers_each_cell_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("ENVBUILD_ENGINE_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path / "cache"))
    code, out, _ = run(capsys, *WORDS, "--json")
    answer = json.loads(out)
    assert code == 8
    assert len(answer["cells"]) > 1
    assert {cell["outcome"] for cell in answer["cells"]} == {"failed"}
    assert {cell["exit_code"] for cell in answer["cells"]} == {8}


@pytest.mark.parametrize(
    "words",
    [
        ("--tag", "a:b"),
        ("--digest", f"sha256:{'a' * 64}"),
        ("--output", "x.sif"),
        ("--build-context", "base=docker-image://debian"),
    ],
)
def test_what_names_one_image_does_not_go_with_many(capsys, words):
    code, _, err = run(capsys, *WORDS, *words)
    assert code == 2
    assert words[0] in err
    assert "names one image" in err


@pytest.mark.parametrize("words", [("--skip", "x"), ("--dry-run",)])
def test_what_chooses_among_many_needs_them(capsys, words):
    code, _, err = run(capsys, "--cuda", "13.0", *words)
    assert code == 2
    assert "--matrix PATTERN" in err


@pytest.mark.parametrize(("more", "hinted"), [((), True), (("--gpu", "h100"), False)])
def test_the_hint_that_a_flag_names_another_gpu_is_for_who_gave_none(more, hinted, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("ENVBUILD_ENGINE_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path / "cache"))
    code, _, err = run(capsys, "--cuda", "13.0", "--te", "2.12", *more)
    assert code == 8
    assert ("--gpu names another GPU" in err) is hinted

"""Comparing two records: training curves and their band, rates of the bench, and what differs of the locks."""

import copy
import json
import math
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from envbuild.cli.compare import compare as compare_command
from envbuild.errors import DataError, SmokeError, UsageError
from envbuild.evidence import baseline
from envbuild.evidence.curves import compare, curves_of
from envbuild.evidence.named import named_record, run_differences
from envbuild.evidence.recording import from_report
from envbuild.evidence.records import Evidence, content_id, read_evidence, record_evidence
from envbuild.evidence.refs import committed_evidence
from envbuild.evidence.report import Outcome, SmokeReport
from envbuild.lock.compare import differing_locks, lock_differences, lock_of
from envbuild.lock.files import read_lock
from envbuild.paths import data_dir

STEPS = 200
SEEDS = [1, 2, 3, 4, 5]
LOCKS = data_dir("matrices") / "locks"


def losses(seed: int) -> list[float]:
    """A curve that falls, of a seed: they are some hundredths apart."""
    return [5.5 * math.exp(-step / 50) + 0.02 * math.sin(seed * 1.7 + step / 9) for step in range(STEPS)]


def figures(**changes) -> dict:
    found = {f"seed {seed}, losses": {"value": losses(seed)} for seed in SEEDS}
    found["seed 1, gradient norms"] = {"value": [0.5] * STEPS}
    found["training"] = {"value": {"layers": "torch", "steps": STEPS, "lr": 3e-3, "seeds": SEEDS}}
    return found | changes


def trained(of: dict | None = None, *, variant: str = "float32", outcome: str = "passed", **changes) -> Evidence:
    test = Outcome(
        id=f"test_train.py::test_train_curve[{variant}]",
        level="train",
        outcome=outcome,
        seconds=9.0,
        reason="" if outcome == "passed" else "the same seed twice: the loss of step 3 is 1.0 and then 2.0",
        figures=of or figures(),
    )
    fields = {
        "target": {"kind": "image", "digest": "sha256:aa", "digest_from": "engine", "runtime": "Docker 29"},
        "cell_id": "cu130-py312-torch2.11.0-x",
        "cell": {"cuda": "13.0", "torch": "2.11.0+cu130", "gpu": "sm_90"},
        "lock_digest": None,
        "level": "train",
        "device": "cuda",
        "nproc": 1,
        "verdict": "passed",
        "reason": "",
        "suite": "sha256:22",
        "seed": 7,
        "machine": {"gpus": [{"name": "NVIDIA H200", "sm": "90", "memory_gib": 139.8}], "driver": "580.1"},
        "launchers": ["env"],
        "tests": (test,),
        "seconds": 9.0,
        "log": "",
    }
    return from_report(SmokeReport(**(fields | changes)), now=datetime(2026, 11, 23, 12, tzinfo=UTC))


def compared(one: Evidence, other: Evidence):
    return compare("float32", curves_of(one, "A")[0]["float32"], curves_of(other, "B")[0]["float32"])


def moved(step: int, by: float) -> dict:
    """Return the figures of a run whose losses differ from a step on."""
    values = losses(1)
    return figures(**{"seed 1, losses": {"value": [v + (by if n >= step else 0) for n, v in enumerate(values)]}})


# --- curves ---


def test_equal_curves_are_equal_to_the_bit() -> None:
    found = compared(trained(), trained())
    assert (found.verdict, found.parted, found.norms_parted, found.outside) == ("equal", None, None, None)


def test_the_smallest_difference_is_found_at_its_step() -> None:
    values = losses(1)
    values[120] = math.nextafter(values[120], 1e9)
    found = compared(trained(), trained(figures(**{"seed 1, losses": {"value": values}})))
    assert (found.verdict, found.parted.step, found.outside) == ("within-band", 120, None)
    assert found.parted.difference == math.ulp(values[120]) or found.parted.difference > 0


def test_a_difference_is_held_against_the_spread_of_the_seeds() -> None:
    band = curves_of(trained(), "A")[0]["float32"].band()
    assert 0.01 < min(band) <= max(band) < 0.05
    small, large = (compared(trained(), trained(moved(50, by))) for by in (0.5 * min(band), 2 * max(band)))
    assert (small.verdict, small.parted.step) == ("within-band", 50)
    assert (large.verdict, large.parted.step, large.outside.step) == ("outside-band", 50, 50)
    assert large.outside.difference == pytest.approx(2 * max(band))
    assert large.outside.band == band[50]


def test_a_difference_that_grows_leaves_the_band_later_than_it_begins() -> None:
    grown = [value + 1e-7 * 1.2 ** max(0, n - 50) for n, value in enumerate(losses(1))]
    found = compared(trained(), trained(figures(**{"seed 1, losses": {"value": grown}})))
    assert found.parted.step < found.outside.step < STEPS
    assert found.largest.step == STEPS - 1 or found.largest.difference >= found.outside.difference


def test_gradient_norms_alone_are_a_difference() -> None:
    norms = [0.5] * 10 + [0.50001] * (STEPS - 10)
    found = compared(trained(), trained(figures(**{"seed 1, gradient norms": {"value": norms}})))
    assert (found.verdict, found.parted, found.norms_parted.step) == ("within-band", None, 10)


def test_seeds_that_meet_by_chance_in_one_step_make_no_band_of_nothing() -> None:
    meeting = {f"seed {s}, losses": {"value": [*losses(s)[:100], 1.0, *losses(s)[101:]]} for s in SEEDS}
    assert min(curves_of(trained(figures(**meeting)), "A")[0]["float32"].band()) > 0.005


def test_curves_of_other_settings_are_no_comparison() -> None:
    other = figures(training={"value": {"layers": "torch", "steps": STEPS, "lr": 1e-3, "seeds": SEEDS}})
    with pytest.raises(ValueError, match="trained in another way: lr"):
        compared(trained(), trained(other))


def without(name: str) -> dict:
    return {key: value for key, value in figures().items() if key != name}


def setting(**changes) -> dict:
    return figures(training={"value": {"steps": STEPS, "seeds": SEEDS} | changes})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (without("training"), "it has no training"),
        (without("seed 3, losses"), "it has no seed 3, losses"),
        (without("seed 1, gradient norms"), "it has no seed 1, gradient norms"),
        (figures(training={"value": [1]}), "how it was trained is not stated"),
        (figures(training={"value": {"steps": 200, "seeds": "12345"}}), "how it was trained is not stated"),
        (setting(seeds=[1, 2, 3, 4]), "5 seeds or more"),
        (setting(seeds=[1, 2, 3, 4, 4]), "5 seeds or more"),
        (setting(seeds=[True, 2, 3, 4, 5]), "5 seeds or more"),
        (setting(seeds=[[1], 2, 3, 4, 5]), "5 seeds or more"),
        (setting(seeds=list(range(1000))), "5 seeds or more"),
        (setting(steps=0), "its number of steps"),
        (setting(steps=True), "its number of steps"),
        (setting(steps=10**9), "its number of steps"),
        (setting(steps="200"), "its number of steps"),
        (setting(steps=100), "does not have 100 numbers"),
        (figures(**{"seed 2, losses": {"value": losses(2)[:-1]}}), "does not have 200 numbers"),
        (figures(**{"seed 2, losses": {"value": {"a": 1}}}), "does not have 200 numbers"),
        (figures(**{"seed 2, losses": {}}), "does not have 200 numbers"),
        (figures(**{"seed 2, losses": {"value": [*losses(2)[:-1], "nan"]}}), "something else than numbers"),
        (figures(**{"seed 2, losses": {"value": [*losses(2)[:-1], None]}}), "something else than numbers"),
        (figures(**{"seed 2, losses": {"value": [*losses(2)[:-1], False]}}), "something else than numbers"),
        (figures(**{"seed 2, losses": {"value": [*losses(2)[:-1], 1e300]}}), "something else than numbers"),
        (figures(**{"seed 2, losses": {"value": [*losses(2)[:-1], 10**4000]}}), "something else than numbers"),
    ],
)
def test_a_curve_that_cannot_be_is_refused(wrong: dict, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        curves_of(trained(wrong), "A")


def test_a_record_without_a_curve_says_how_to_make_one() -> None:
    bench = next(record for record in committed_evidence() if record.level == "bench")
    with pytest.raises(DataError, match=r"has no training curve: its run went to the level bench") as caught:
        curves_of(bench, "A")
    assert "--level train" in (caught.value.hint or "")
    with pytest.raises(DataError, match="came to failed: the same seed twice"):
        curves_of(trained(outcome="failed"), "A")


# --- the command ---


def run(tmp_path: Path, one: Evidence, other: Evidence, *flags: str) -> tuple[BaseException | None, str]:
    names = [str(record_evidence(each, tmp_path / str(n))) for n, each in enumerate((one, other))]
    done = CliRunner().invoke(compare_command, [*names, *flags])
    return done.exception, done.stdout


def test_the_command_names_the_step_the_band_and_what_differs(tmp_path: Path) -> None:
    other = trained(moved(50, 0.3), cell={"cuda": "13.0", "torch": "2.12.0+cu130", "gpu": "sm_90"})
    failed, text = run(tmp_path, trained(), other)
    assert isinstance(failed, SmokeError)
    assert failed.exit_code == 7
    assert "the curves are further apart than the seeds: float32, step 50, by 0.3 where the seeds are 0.0" in str(
        failed
    )
    assert "cell: torch │ 2.11.0+cu130 │ 2.12.0+cu130" in text
    assert "a run was of no lock" in text


def test_the_command_answers_in_json(tmp_path: Path) -> None:
    failed, text = run(tmp_path, trained(), trained(moved(50, 1e-4)), "--json")
    answer = json.loads(text)
    assert failed is None
    assert (answer["verdict"], answer["curves"][0]["parted"]["step"]) == ("within-band", 50)
    assert set(answer) == {
        "records", "verdict", "curves", "not_compared", "runs_differ", "locks_differ", "locks_note",
    }  # fmt: skip
    assert answer["runs_differ"] == []


def test_exact_fails_at_any_difference(tmp_path: Path) -> None:
    failed, _ = run(tmp_path / "a", trained(), trained(moved(199, 1e-9)), "--exact")
    assert isinstance(failed, SmokeError)
    assert "step 199" in str(failed)
    assert run(tmp_path / "b", trained(), trained(), "--exact")[0] is None


def test_what_one_record_alone_has_is_not_compared(tmp_path: Path) -> None:
    both = trained().tests + trained(variant="TE bfloat16").tests
    more = trained().model_copy(update={"tests": both, "id": ""})
    more = more.model_copy(update={"id": content_id(json.loads(json.dumps(_plain(more))))})
    _, text = run(tmp_path, more, trained())
    assert "not compared: TE bfloat16: only in " in text
    failed, _ = run(tmp_path / "x", trained(variant="a"), trained(variant="b"))
    assert isinstance(failed, DataError)
    assert "no curve that can be compared" in str(failed)


def _plain(record: Evidence) -> dict:
    from envbuild.evidence.records import as_json

    return as_json(record)


def test_what_a_record_says_does_not_reach_the_terminal(tmp_path: Path) -> None:
    evil = trained(cell={"cuda": "13.0", "torch": "\x1b]0;x\x07[bold]"}, cell_id="\x1b[2J[red]x")
    _, text = run(tmp_path, trained(), evil)
    assert "\x1b" not in text
    assert "[bold]" in text


def test_a_record_that_was_edited_is_refused(tmp_path: Path) -> None:
    path = record_evidence(trained(), tmp_path)
    body = json.loads(path.read_text())
    body["tests"][0]["figures"]["seed 1, losses"]["value"][3] = 0.0
    path.write_text(json.dumps(body))
    with pytest.raises(DataError, match="edited"):
        named_record(str(path), tmp_path)


def test_a_record_is_named_by_its_id(tmp_path: Path) -> None:
    kept = trained()
    path = record_evidence(kept, tmp_path)
    digits = kept.id.removeprefix("sha256:")
    for name in (str(path), kept.id, digits, digits[:6], f"sha256:{digits[:20]}"):
        assert named_record(name, tmp_path) == (kept, path)
    wrong = digits[:20] + ("0" if digits[20] != "0" else "1")  # the file's name has fewer digits than this
    for name, message in [
        (wrong, "no record has"),
        ("abc", "no file and no id"),
        ("../no-such-file", "no file and no id"),
    ]:
        with pytest.raises(UsageError, match=message):
            named_record(name, tmp_path)


# --- locks ---


def test_the_locks_of_two_runs_are_compared_input_by_input() -> None:
    lock = read_lock(min(LOCKS.glob("*-apex*-sm90-fc9f6c2f-*"))).lock
    assert lock_differences(lock, lock) == ()
    python = list(lock.python)
    first = python[0].packages[0]
    packages = (first.model_copy(update={"version": "9.9"}), *python[0].packages[1:])
    python[0] = python[0].model_copy(update={"packages": packages})
    other = lock.model_copy(update={"python": tuple(python), "sources": lock.sources[1:], "epoch": lock.epoch + 1})
    found = {each.what: (each.first, each.second) for each in lock_differences(lock, other)}
    assert set(found) == {f"{python[0].name} packages: {first.name}", f"source {lock.sources[0].name}"}
    assert found[f"{python[0].name} packages: {first.name}"][1].startswith("9.9 (")
    assert found[f"source {lock.sources[0].name}"][1] == ""


def test_other_files_of_one_version_are_a_difference() -> None:
    lock = read_lock(min(LOCKS.glob("*-apex*-sm90-fc9f6c2f-*"))).lock
    package = lock.python[0].packages[0]
    changed = package.model_copy(update={"hashes": ("f" * 64, *package.hashes[1:])})
    python = lock.python[0].model_copy(update={"packages": (changed, *lock.python[0].packages[1:])})
    found = lock_differences(lock, lock.model_copy(update={"python": (python, *lock.python[1:])}))
    assert [each.what for each in found] == [f"{lock.python[0].name} packages: {package.name}"]


def test_a_lock_is_found_by_its_digest(tmp_path: Path) -> None:
    lock = read_lock(min(LOCKS.glob("*-apex*-sm90-fc9f6c2f-*"))).lock
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "lock.json").write_text("{")
    assert lock_of(lock.digest, [tmp_path, LOCKS]) == lock
    assert lock_of(lock.digest, [tmp_path]) is None
    assert lock_of(lock.digest, [tmp_path, min(LOCKS.glob("*-apex*-sm90-fc9f6c2f-*"))]) == lock
    assert lock_of(None, [LOCKS]) is None
    assert differing_locks((lock.digest, lock.digest), [])[1] == "both runs are of one lock"
    found, note = differing_locks((lock.digest, "sha256:00"), [LOCKS])
    assert (found, note) == (None, "not in a folder of locks here: sha256:00")


def test_what_differs_between_two_runs() -> None:
    found = run_differences(trained(), trained(lock_digest="sha256:11", suite="sha256:33"))
    assert {each.what for each in found} == {"lock", "smoke suite"}
    # the hash of a suite covers the files up to a level: two runs of two levels have two, and nothing has changed
    other = trained(lock_digest="sha256:11", suite="sha256:33", level="bench")
    assert {each.what for each in run_differences(trained(), other)} == {"lock"}


def test_another_attention_kernel_in_a_row_of_both_is_named() -> None:
    def with_kernels(*rows: object, columns: object = ("implementation", "attention kernel")) -> Evidence:
        table = {"title": "t", "columns": list(columns) if isinstance(columns, tuple) else columns, "rows": list(rows)}
        test = benched(eager=1.0).tests[0].model_copy(update={"tables": [table]})
        return trained(level="bench", tests=(test,))

    fused = with_kernels(["eager", "flash"], ["TE BF16", "cudnn_sdpa"], ["FA3", "FlashAttnFwdSm90"])
    found = run_differences(fused, with_kernels(["eager", "flash"], ["TE BF16", "-"]))
    named = [(each.what, each.first, each.second) for each in found]
    assert named == [("attention kernel: TE BF16", "cudnn_sdpa", "-")]
    for odd in (with_kernels(["TE BF16"]), with_kernels("TE BF16"), with_kernels(columns=3), with_kernels(columns=())):
        assert run_differences(fused, odd) == ()


# --- the bench against a baseline ---

H200 = [record for record in committed_evidence() if record.level == "bench" and record.passed and record.ranks < 5]


def benched(**rates: float) -> Evidence:
    test = Outcome(
        id="test_bench.py::test_bench_gpt_step",
        level="bench",
        outcome="passed",
        seconds=1.0,
        figures={f"{name}, tokens per second": {"value": rate} for name, rate in rates.items()},
    )
    return trained(level="bench", tests=(test,))


def test_a_rate_below_95_percent_is_slow() -> None:
    before = benched(eager=100_000, TE=120_000)
    fine = baseline.hold(benched(eager=95_001, TE=140_000), before, "A")
    assert fine.slow == ()
    slow = baseline.hold(benched(eager=94_900, TE=60_000), before, "A")
    assert [(rate.name, rate.part) for rate in slow.slow] == [("TE", 0.5), ("eager", 0.949)]
    assert baseline.hold(benched(eager=1e5, FA3=1), before, "A").absent == ("FA3", "TE")


def test_rates_of_other_gpus_are_no_comparison() -> None:
    gpu = {"name": "NVIDIA H100 80GB HBM3", "sm": "90", "memory_gib": 79.1}
    other = benched(eager=1.0).model_copy(
        update={"gpus": (benched(eager=1.0).gpus[0].model_copy(update={"name": gpu["name"]}),)}
    )
    with pytest.raises(UsageError, match="the baseline is of NVIDIA H100 80GB HBM3, this run was on NVIDIA H200"):
        baseline.hold(benched(eager=1.0), other, "A")
    with pytest.raises(DataError, match="in common"):
        baseline.hold(benched(eager=1.0), benched(TE=1.0), "A")


@pytest.mark.parametrize("rate", [0, -1, "9", None, True, 1e300, 1e-300, pytest.param(10**400, id="10**400")])
def test_a_rate_that_cannot_be_is_refused(rate: object) -> None:
    kept = benched(eager=1.0)
    figure = {"eager, tokens per second": {"value": rate}}
    kept = kept.model_copy(update={"tests": (kept.tests[0].model_copy(update={"figures": figure}),)})
    with pytest.raises(DataError, match="is no rate"):
        baseline.check_baseline(kept, "A")


def test_what_is_no_baseline_is_refused() -> None:
    for wrong, message in [
        (trained(verdict="failed", reason="x"), "its run came to failed"),
        (trained(), "it has no tokens per second"),
    ]:
        with pytest.raises(DataError, match=message):
            baseline.check_baseline(wrong, "A")


def test_the_committed_runs_of_one_cell_are_no_false_alarm_and_another_cell_is_found() -> None:
    """Each run of the default cell with apex on H200 against each other; then the image without apex against them."""
    runs = [r for r in H200 if "H200" in r.machine and r.cell.get("apex") and dict(baseline._rates(r, "x"))]
    pairs = [(one, other) for one in runs for other in runs if one is not other]
    assert len(pairs) > 100
    assert [pair for pair in pairs if baseline.hold(*pair, "A").slow] == []
    image = next(r for r in H200 if r.image and dict(baseline._rates(r, "x")))
    last = next(r for r in reversed(runs) if not r.cell.get("flash-attn-hopper"))
    held = baseline.hold(image, last, "A")
    assert {rate.name for rate in held.slow} >= {"TE BF16", "TE FP8"}
    assert "cell: apex" in {each.what for each in run_differences(last, image)}


def test_records_of_this_suite_have_their_hashes() -> None:
    """A record with curves reads back as it was written."""
    assert copy.deepcopy(trained()) == trained()
    for path in sorted((data_dir("matrices") / "evidence").glob("*.json")):
        assert read_evidence(path).id

"""How far a record counts, and the four words: in text, in JSON, on the page and in the order of cells."""

import dataclasses
import json
import re
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from envbuild import __version__
from envbuild.cli.resolve import explain as explain_command
from envbuild.cli.resolve import resolve as resolve_command
from envbuild.components import COMPONENTS, SOFTWARE
from envbuild.curate.page import build_page
from envbuild.curate.page_html import render_page
from envbuild.curate.page_proof import proof_by_gpu
from envbuild.evidence import refs
from envbuild.evidence.claims import claim_of, component_claims
from envbuild.evidence.place import altered_of, differences, place_of, replaced_of
from envbuild.evidence.recording import from_report
from envbuild.evidence.records import REPLACED, Evidence
from envbuild.evidence.report import SmokeReport
from envbuild.lock.files import read_lock
from envbuild.matrix.cell import Cell, Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.paths import data_dir
from envbuild.plan.dockerfile import recipe_digest
from envbuild.plan.plan import plan_of
from envbuild.solver.asked import read_request
from envbuild.solver.explain import explain
from envbuild.solver.proof import RANKS, Proof
from envbuild.solver.solve import solve

SOFT = {"cuda": "13.0", "torch": "2.11.0+cu130", "te": "2.12.0", "apex": "25.09.post20251222"}
VERSIONS = {**SOFT, "gpu": "sm_90", "python": "3.12", "os": "ubuntu24.04"}
H200 = {"name": "NVIDIA H200", "sm": "90", "memory_gib": 139.8, "count": 4}


def record(**changes) -> Evidence:
    fields = {
        "date": datetime(2026, 11, 22, 10, 17, tzinfo=UTC),
        "cell_id": Cell(versions=VERSIONS).id,
        "cell": VERSIONS,
        "lock_digest": "sha256:11",
        "target": {"kind": "image", "digest": "sha256:aa"},
        "suite": "sha256:22",
        "level": "bench",
        "device": "cuda",
        "nproc": 4,
        "nodes": 1,
        "gpus": (H200,),
        "driver": "580.159.04",
        "software": {"python": "3.12.3"},
        "launchers": (),
        "seed": 7,
        "verdict": "passed",
        "reason": "",
        "seconds": 60.0,
        "tests": (),
        "id": "sha256:01",
    }
    return Evidence.model_validate(fields | changes)


def claim(kept: Evidence, *, trials=None, **changes):
    cell = Cell(versions={axis: v for axis, v in {**VERSIONS, **changes}.items() if v is not None})
    return claim_of(cell, [SimpleNamespace(id=kept.id)], [kept], trials=trials)


CPU = {"device": "cpu", "gpus": (), "driver": None}
BARE = {"kind": "host", "os": "Ubuntu 24.04.3 LTS", "python": "3.12.3"}


@pytest.mark.parametrize(
    ("ran", "asked", "word", "kinds"),
    [
        ({}, {}, Proof.HERE, []),
        ({"target": BARE}, {}, Proof.HERE, []),
        ({}, {"gpu": "sm_100"}, Proof.ELSEWHERE, ["gpu"]),
        ({}, {"gpu": "sm_80"}, Proof.ELSEWHERE, ["gpu"]),
        ({}, {"python": "3.11"}, Proof.ELSEWHERE, ["python"]),
        ({"software": {"python": "3.11.9"}}, {}, Proof.ELSEWHERE, ["python"]),
        ({"software": {}}, {}, Proof.ELSEWHERE, ["python"]),
        ({}, {"os": "debian12"}, Proof.ELSEWHERE, ["os"]),
        ({"target": BARE | {"os": "Ubuntu 22.04.5 LTS"}}, {}, Proof.ELSEWHERE, ["os"]),
        ({"target": BARE | {"os": "Debian GNU/Linux 12 (bookworm)"}}, {}, Proof.ELSEWHERE, ["os"]),
        ({}, {"mpi": "mpich-4.0"}, Proof.ELSEWHERE, ["mpi"]),
        ({"cell": VERSIONS | {"mpi": "mpich-4.0"}}, {}, Proof.ELSEWHERE, ["mpi"]),
        ({"architecture": "aarch64"}, {}, Proof.ELSEWHERE, ["arch"]),
        ({"adopted": {"torch": "2.11.0"}}, {}, Proof.ELSEWHERE, ["adopted"]),
        ({"built_with": {"NVTE_WITH_NVSHMEM": "1"}}, {}, Proof.ELSEWHERE, ["switches"]),
        ({"built_with": {"the shell": "was altered"}}, {}, Proof.ELSEWHERE, ["switches"]),
        ({"built_with": {"src-te": REPLACED}}, {}, Proof.STATED, ["replaced"]),
        ({"built_with": {"base": REPLACED}}, {}, Proof.STATED, ["replaced"]),
        ({"built_with": {"src-flash-attn": REPLACED}}, {}, Proof.HERE, []),
        ({"built_with": {"src-te": REPLACED, "NVTE_X": "1"}}, {}, Proof.STATED, ["replaced", "switches"]),
        # what those switches leave out is of a component that this cell does not have
        ({"built_with": {"FLASH_ATTENTION_DISABLE_FP16": "TRUE"}}, {}, Proof.HERE, []),
        ({"built_with": {"FLASH_ATTENTION_DISABLE_FP16": "TRUE"}}, {"flash-attn": "2.8.3"}, None, ["switches"]),
        ({"gpus": ({**H200, "name": "NVIDIA B200", "sm": "100"},)}, {}, Proof.ELSEWHERE, ["gpu", "target"]),
        ({"gpus": ({**H200, "name": "NVIDIA B200", "sm": "100"},)}, {"gpu": "sm_100"}, Proof.ELSEWHERE, ["target"]),
        ({"level": "kernels"}, {}, Proof.ELSEWHERE, []),
        (CPU, {}, Proof.TRIED, []),
        (CPU, {"gpu": "sm_100"}, Proof.TRIED, []),
        (CPU, {"python": "3.11"}, Proof.TRIED, ["python"]),
        (CPU | {"level": "import"}, {}, Proof.STATED, []),
        ({"verdict": "failed", "reason": "test_x"}, {}, Proof.STATED, []),
    ],
)
def test_a_record_counts_for_what_it_ran_on(ran, asked, word, kinds) -> None:
    kept = record(**ran)
    versions = {**VERSIONS, **asked}
    assert list(differences(kept, versions)) == kinds
    if word is None:
        return
    found = claim(kept, **asked)
    assert found.proof is word
    assert found.status == (
        "failed" if ran.get("verdict") else "never" if kinds or word is Proof.STATED else "verified"
    )
    if word is not Proof.STATED:
        assert found.text.startswith(word.words)


def test_a_replaced_source_proves_nothing_of_its_component() -> None:
    found = component_claims(VERSIONS, [record(built_with={"src-te": REPLACED})])
    assert (found["te"].proof, found["te"].record) == (Proof.STATED, None)
    assert found["torch"].proof is Proof.ELSEWHERE
    assert "with another source of te" in found["torch"].text
    base = component_claims(VERSIONS, [record(built_with={"base": REPLACED})])
    assert {each.proof for each in base.values()} == {Proof.STATED}


def test_a_record_does_not_rank_by_what_was_replaced() -> None:
    evidence = {ref.id: ref for ref in refs.evidence_refs()}
    kept = [record for record in refs.committed_evidence() if REPLACED in record.built_with.values()]
    assert kept
    for each in kept:
        assert not evidence[each.id].versions.keys() & replaced_of(each)
        assert evidence[each.id].versions.keys() | replaced_of(each) == {a for a in SOFTWARE if each.cell.get(a)}


def test_the_words() -> None:
    assert {proof.value: proof.words for proof in Proof} == {
        "run-on-this-gpu": "run on this GPU",
        "run-elsewhere": "run elsewhere",
        "tried": "tried without a GPU",
        "stated": "stated only",
    }
    there = f", in {Cell(versions=VERSIONS).id}"
    assert claim(record()).text == "run on this GPU: the image, 4x H200, driver 580, 2026-11-22"
    assert claim(record(), gpu="sm_100").text == (
        f"run elsewhere: not run on sm_100; run on sm_90: the image, 4x H200, driver 580, 2026-11-22{there}"
    )
    assert claim(record(adopted={"torch": "2.11.0"}), gpu="sm_80", python="3.11", mpi="mpich-4.0").text == (
        "run elsewhere: not run on sm_80; run on sm_90: the image, 4x H200, driver 580, 2026-11-22, with Python 3.12 (here 3.11), "
        f"no MPI (here mpich-4.0), torch adopted from the host{there}"
    )
    assert claim(record(**CPU), python="3.11").text == (
        f"tried without a GPU: the image, CPU, 2026-11-22, with Python 3.12 (here 3.11){there}"
    )
    assert claim(record(), te="2.11.0", gpu="sm_100").text.startswith(
        "stated only; all but te: run elsewhere: not run on sm_100; run on sm_90: the image, 4x H200"
    )


def test_a_run_that_counts_comes_before_a_larger_one_that_does_not() -> None:
    small = record(nproc=1, gpus=({**H200, "count": 1},), id="sha256:02")
    large = record(adopted={"torch": "2.11.0"})
    found = claim_of(Cell(versions=VERSIONS), (), [large, small])
    assert (found.proof, found.record) == (Proof.HERE, small)
    # what failed with another torch does not speak of the lock's
    failed = record(adopted={"torch": "2.11.0"}, verdict="failed", reason="x", date=datetime(2026, 11, 23, tzinfo=UTC))
    assert claim_of(Cell(versions=VERSIONS), (), [failed, small]).record == small
    assert claim_of(Cell(versions=VERSIONS), (), [failed]).status == "failed"


def test_a_run_that_proves_nothing_verifies_nothing() -> None:
    found = claim(record(level="import", **CPU))
    assert (found.proof, found.status) == (Proof.STATED, "never")
    assert claim(record()).status == "verified"


def test_a_date_is_that_of_utc() -> None:
    east = record(date=datetime.fromisoformat("2026-11-28T01:00:00+14:00"))
    assert claim(east).as_json()["date"] == "2026-11-27T11:00:00Z"


def test_a_failure_elsewhere_is_not_hidden() -> None:
    later = record(verdict="failed", reason="test_x: slow", date=datetime(2026, 11, 23, tzinfo=UTC), id="sha256:02")
    found = claim_of(Cell(versions={**VERSIONS, "gpu": "sm_100"}), [SimpleNamespace(id="sha256:01")], [record(), later])
    assert (found.status, found.proof) == ("failed", Proof.STATED)
    assert "failed on sm_90: the image, 4x H200, driver 580, 2026-11-23: test_x: slow" in found.text


def test_json_of_a_claim() -> None:
    answer = claim(record(), gpu="sm_100").as_json()
    assert json.loads(json.dumps(answer)) == answer
    assert answer["claim"] == "run-elsewhere"
    assert answer["date"] == "2026-11-22T10:17:00Z"
    assert answer["record"] == "sha256:01"
    assert answer["ran_on"] == {
        "machine": "4x H200, driver 580",
        "image": "sha256:aa",
        "gpu": "sm_90",
        "arch": "x86_64",
        "python": "3.12",
        "mpi": "none",
        "os": "ubuntu24.04",
    }
    assert answer["differences"] == {"gpu": "sm_90 (here sm_100)"}
    assert {axis: each["claim"] for axis, each in answer["components"].items()} == dict.fromkeys(SOFT, "run-elsewhere")
    assert answer["components"]["te"]["text"] == "run elsewhere (sm_90)"


def test_each_component_has_its_own_word() -> None:
    versions = {**VERSIONS, "te": "2.11.0", "gpu": "sm_90"}
    found = component_claims(versions, [record()])
    assert (found["te"].proof, found["te"].text) == (Proof.STATED, "stated only")
    assert (found["apex"].proof, found["apex"].text) == (Proof.ELSEWHERE, "run elsewhere (with te 2.12.0)")
    whole = component_claims(VERSIONS, [record()])
    assert {each.text for each in whole.values()} == {"run on this GPU"}
    # a part of the tests proves no component
    for part in ({"level": "kernels"}, {"keyword": "te"}, {"verdict": "failed", "reason": "x"}):
        assert {each.proof for each in component_claims(VERSIONS, [record(**part)]).values()} == {Proof.STATED}


class _Trials:
    """A ledger of trials by pair of axes."""

    def __init__(self, *, read=(), **verdicts: str) -> None:
        self.read = dict(read)
        self.verdicts = {frozenset(pair.split("_")): verdict for pair, verdict in verdicts.items()}

    def of(self, versions):
        verdict = self.verdicts.get(frozenset(versions))
        return verdict and SimpleNamespace(
            verdict=verdict, trials=(), read=self.read, describe=lambda: f"tried: names {verdict}"
        )


def test_a_trial_is_tried_without_a_gpu() -> None:
    cell = Cell(versions=VERSIONS)
    found = claim_of(cell, (), [], trials=_Trials(te_torch="passed", apex_torch="passed"))
    assert (found.proof, found.status) == (Proof.TRIED, "never")
    assert found.text == "tried without a GPU: trials of its components with each other passed"
    assert found.components["te"].proof is Proof.TRIED
    assert found.as_json()["components"]["te"]["tried"] == {"torch": "tried: names passed"}
    # with another release or build than the cell's
    read = {"torch": "2.11.1+cu128"}
    near = claim_of(cell, (), [], trials=_Trials(read=read, te_torch="passed", apex_torch="passed"))
    assert near.text == (
        "tried without a GPU: trials of its components with each other passed, with torch 2.11.1+cu128"
    )
    assert near.components["te"].text == "tried without a GPU (with torch 2.11.1+cu128)"
    # one that was not tried, or failed
    some = claim_of(cell, (), [], trials=_Trials(te_torch="passed"))
    assert (some.proof, some.components["te"].proof) == (Proof.STATED, Proof.TRIED)
    bad = claim_of(cell, (), [], trials=_Trials(te_torch="failed", apex_torch="passed"))
    assert (bad.proof, bad.components["te"].proof) == (Proof.STATED, Proof.STATED)
    # a run says more than a trial
    assert claim(record(), gpu="sm_100", trials=_Trials(te_torch="passed")).components["te"].proof is Proof.ELSEWHERE


def test_where_a_bare_host_ran() -> None:
    for text, name in [
        ("Ubuntu 24.04.3 LTS", "ubuntu24.04"),
        ("Ubuntu 22.04", "ubuntu22.04"),
        ("Debian GNU/Linux 12 (bookworm)", "debian12"),
        ("Rocky Linux 9.4 (Blue Onyx)", "rocky9"),
        ("", "unknown"),
        (None, "unknown"),
    ]:
        assert place_of(record(target=BARE | {"os": text}))["os"] == name


def test_a_new_record_has_the_architecture_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    fields = {
        "cell_id": "x",
        "cell": {},
        "lock_digest": None,
        "level": "step",
        "device": "cuda",
        "nproc": 1,
        "verdict": "passed",
        "reason": "",
        "suite": "s",
        "seed": 1,
        "machine": {},
        "launchers": (),
        "tests": (),
        "seconds": 1.0,
        "log": "",
    }
    image = {"kind": "image", "reference": "x", "digest": "sha256:aa"}
    assert from_report(SmokeReport(target=BARE, **fields)).architecture == "aarch64"
    assert from_report(SmokeReport(target=image, **fields)).architecture == "aarch64"
    emulated = SmokeReport(target=image, **(fields | {"machine": {"arch": "x86_64"}}))
    assert from_report(emulated).architecture == "x86_64"


def test_switches_belong_to_the_components_that_read_them() -> None:
    assert altered_of(record()) == frozenset()
    assert altered_of(record(built_with={"APEX_FAST_LAYER_NORM": "1"})) == {"apex"}
    assert altered_of(record(built_with={"FLASH_ATTENTION_DISABLE_FP16": "1"})) == {"flash-attn", "flash-attn-hopper"}
    assert altered_of(record(built_with={"CFLAGS": "-O1"})) == set(SOFTWARE)
    assert altered_of(record(adopted={"numpy": "2.5.2"})) == set(SOFTWARE)
    beginnings = [each for component in COMPONENTS.values() for each in component.switches]
    assert all(beginning.endswith("_") for beginning in beginnings)


# --- which release made the image ---

ONE, TWO = (f"sha256:{digit * 64}" for digit in "12")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "the image, 4x H200"),
        ({"layers": [ONE]}, "the image, 4x H200"),
        ({"recipe": ONE, "release": __version__}, "the image, 4x H200"),
        ({"recipe": ONE, "release": "0.0.9"}, "the image that envbuild 0.0.9 made, 4x H200"),
    ],
)
def test_an_image_of_another_release_is_called_that(content, words) -> None:
    kept = record(content=content)
    assert claim(kept).text == f"run on this GPU: {words}, driver 580, 2026-11-22"
    (row,) = proof_by_gpu([kept])
    assert row["why"] == ("envbuild 0.0.9 made the image" if "0.0.9" in words else "")


LOCK = min((data_dir("matrices") / "locks").glob("cu*-sm90-*"))


def recipe_now() -> str:
    held = read_lock(LOCK)
    return recipe_digest(plan_of(load_matrix(), held, None))


@pytest.mark.parametrize(
    ("recipe", "lock_digest", "other"),
    [(recipe_now, None, False), (lambda: ONE, None, True), (lambda: None, None, None), (lambda: ONE, TWO, None)],
    ids=["this one", "another one", "not stated", "of another lock"],
)
def test_explain_says_that_another_recipe_made_the_image(monkeypatch, recipe, lock_digest, other) -> None:
    lock = read_lock(LOCK).lock
    kept = record(
        cell=lock.cell,
        cell_id=lock.as_cell.id,
        lock_digest=lock_digest or lock.digest,
        software={"python": "3.11.2"},
        content={"recipe": recipe(), "release": __version__},
    )
    monkeypatch.setattr(refs, "committed_evidence", lambda: (kept,))
    refs.evidence_refs.cache_clear()
    words = ["--lock", str(LOCK)]
    answer = json.loads(CliRunner().invoke(explain_command, [*words, "--json"]).stdout)
    text = CliRunner().invoke(explain_command, words).stdout
    refs.evidence_refs.cache_clear()
    assert answer["standing"]["record"] == kept.id
    assert answer["other_recipe"] is other
    lines = text.splitlines()
    (claimed,) = (number for number, line in enumerate(lines) if line.startswith("evidence "))
    assert ("made by another recipe than this release's" in lines[claimed + 1]) is (other is True)


# --- the order, on the shipped matrix ---

# the records of this file are of an image where they do not say otherwise
HERE, ELSEWHERE = (RANKS.index(f"{word} (in an image)") for word in ("run on this GPU", "run elsewhere"))


def refs_of(monkeypatch: pytest.MonkeyPatch, *records: Evidence):
    monkeypatch.setattr(refs, "committed_evidence", lambda: records)
    refs.evidence_refs.cache_clear()
    found = refs.evidence_refs()
    refs.evidence_refs.cache_clear()
    return found


def solved(evidence, **pins):
    asked = {"cuda": "13.0", **pins}
    return solve(
        load_matrix(), Request(pins=tuple(Pin(axis=a, spec=s, origin="-") for a, s in asked.items())), evidence
    )


def test_a_record_of_another_gpu_does_not_rank_as_run_on_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = refs_of(monkeypatch, record())
    ranks = {
        gpu: solved(evidence, gpu=gpu, python="3.12", os="ubuntu24.04").score.evidence
        for gpu in ("h100", "h200", "b200", "a100")
    }
    assert ranks == {"h100": -HERE, "h200": -HERE, "b200": -ELSEWHERE, "a100": -ELSEWHERE}
    for same in ({"arch": "x86_64"}, {}):
        pins = {"gpu": "h200", "python": "3.12", "os": "ubuntu24.04", **same}
        assert solved(evidence, **pins).score.evidence == -HERE, same
    for other in ({"python": "3.11"}, {"os": "debian12"}, {"mpi": "auto"}, {"arch": "aarch64"}):
        pins = {"gpu": "h200", "python": "3.12", "os": "ubuntu24.04", **other}
        assert solved(evidence, **pins).score.evidence == -ELSEWHERE, other
    for changes in ({"adopted": {"torch": "2.11.0"}}, {"built_with": {"NVTE_X": "1"}}):
        altered = refs_of(monkeypatch, record(**changes))
        assert solved(altered, gpu="h200", python="3.12", os="ubuntu24.04").score.evidence == -ELSEWHERE


def test_what_ran_on_this_gpu_comes_before_what_ran_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = {**VERSIONS, "torch": "2.12.0+cu130", "te": "2.13.0", "gpu": "sm_100"}
    blackwell = record(cell=newer, gpus=({**H200, "name": "NVIDIA B200", "sm": "100"},), id="sha256:02")
    evidence = refs_of(monkeypatch, record(), blackwell)
    pins = {"python": "3.12", "os": "ubuntu24.04"}
    for gpu, torch in [("h200", "2.11.0+cu130"), ("b200", "2.12.0+cu130")]:
        solution = solved(evidence, gpu=gpu, **pins)
        assert (solution.cell.versions["torch"], solution.score.evidence) == (torch, -HERE)


HOST = {"kind": "host", "os": "Ubuntu 24.04.3 LTS", "python": "3.12.3"}


def test_an_image_that_ran_comes_before_an_environment_on_a_bare_host(monkeypatch: pytest.MonkeyPatch) -> None:
    older = {**VERSIONS, "torch": "2.10.0+cu130", "te": "2.11.0"}
    software = {"python": "3.12.3", "torch": "2.10.0+cu130"}
    image = record(cell=older, software=software, id="sha256:02")
    pins = {"gpu": "h200", "python": "3.12", "os": "ubuntu24.04"}
    evidence = refs_of(monkeypatch, record(target=HOST), image)
    found = solved(evidence, **pins)
    assert (found.cell.versions["torch"], found.cell.versions["te"]) == ("2.10.0+cu130", "2.11.0")
    assert [ref.image for ref in found.evidence] == ["sha256:aa"]
    assert RANKS[-found.score.evidence] == "run on this GPU (in an image)"
    # the word comes first: on another GPU the image proves less than the environment on this one
    elsewhere = image.model_copy(update={"gpus": (record().gpus[0].model_copy(update={"sm": "100"}),)})
    found = solved(refs_of(monkeypatch, record(target=HOST), elsewhere), **pins)
    assert found.cell.versions["torch"] == VERSIONS["torch"]
    assert [ref.image for ref in found.evidence] == [None]


def test_explain_names_an_image_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    image = record(cell={**VERSIONS, "te": "2.11.0"}, id="sha256:02")
    evidence = refs_of(monkeypatch, record(target=HOST), image)
    request = Request(
        pins=tuple(
            Pin(axis=axis, spec=spec, origin="-")
            for axis, spec in {"cuda": "13.0", "gpu": "h200", "python": "3.12", "os": "ubuntu24.04"}.items()
        )
    )
    solution = solve(load_matrix(), request, evidence)
    te = next(
        each for each in explain(solution, evidence, asked=read_request(load_matrix(), request)) if each.axis == "te"
    )
    assert (te.version, te.next_best.version) == ("2.11.0", VERSIONS["te"])
    reason = "evidence: run on this GPU (on a bare host) instead of run on this GPU (in an image)"
    assert reason in te.next_best.why


# --- the commands and the page, on the shipped matrix and records ---


def resolved(*flags: str) -> tuple[str, dict]:
    texts = [CliRunner().invoke(resolve_command, [*flags, *more]).stdout for more in ([], ["--json"])]
    return texts[0], json.loads(texts[1])


@pytest.mark.parametrize(("gpu", "sm"), [("b200", "sm_100"), ("a100", "sm_80")])
def test_resolve_claims_no_gpu_that_nothing_ran_on(gpu, sm) -> None:
    text, answer = resolved("--gpu", gpu, "--cuda", "13.0", "--te", "2.12")
    # which of the runs on sm_90 is named, the newest record decides
    ran = rf"run elsewhere: not run on {sm}; run on sm_90: the image, (?:2x )?H[12]00[\w ]*, driver 580, 2026-\d\d-\d\d"
    assert re.search(ran, text)
    assert "proven" not in text
    assert "verified" not in text
    rows = [line for line in text.splitlines() if line.startswith(("  cuda", "  torch", "  te ", "  apex"))]
    assert len(rows) == 4
    assert all("run elsewhere (sm_90)" in row for row in rows)
    assert answer["standing"]["status"] == "never"
    assert answer["standing"]["claim"] == "run-elsewhere"
    assert answer["standing"]["ran_on"]["gpu"] == "sm_90"
    assert {each["claim"] for each in answer["standing"]["components"].values()} == {"run-elsewhere"}


def test_resolve_says_what_of_a_run_was_not_as_in_the_cell() -> None:
    text, answer = resolved("--gpu", "h100", "--python", "3.12", "--cuda", "13.0", "--te", "2.12")
    assert re.search(r"run elsewhere: run on sm_90: the image, (?:2x )?H[12]00[\w ]*, driver", text)
    assert "with Python 3.11 (here 3.12), debian12 (here ubuntu24.04)" in text
    assert {"python", "os"} <= set(answer["standing"]["differences"])
    assert "gpu" not in answer["standing"]["differences"]
    on_a_host, _ = resolved(
        "--gpu", "h100", "--python", "3.12", "--cuda", "13.0", "--te", "2.12", "--deepspeed", "auto"
    )
    assert "all but te: run elsewhere: run on sm_90: 2x H200" in on_a_host
    assert "torch adopted from the host" in on_a_host
    stated, answer = resolved("--cuda", "12.6", "--te", "none", "--apex", "none")
    assert "stated only: no run of it is recorded" in stated
    assert answer["standing"]["claim"] == "stated"
    tried, answer = resolved("--cuda", "cpu", "--torch", "2.13")
    assert "tried without a GPU: " in tried
    assert answer["standing"]["claim"] == "tried"


def test_explain_has_the_words() -> None:
    done = CliRunner().invoke(explain_command, ["--gpu", "b200", "--cuda", "13.0", "--te", "2.12"])
    assert "te 2.12.0: run elsewhere (sm_90); asked for" in done.stdout
    assert "evidence   run elsewhere: not run on sm_100; run on sm_90" in done.stdout


@pytest.fixture(scope="module")
def small():
    real = load_matrix()
    kept = {"cuda": {"13.0"}, "torch": {SOFT["torch"]}, "te": {SOFT["te"]}, "gpu": {"sm_90", "sm_100"}}
    releases = {a: tuple(r for r in rs if r.version in kept.get(a, {r.version})) for a, rs in real.releases.items()}
    return dataclasses.replace(real, releases=releases)


@pytest.mark.parametrize(
    ("changes", "word", "kind"),
    [
        ({}, "run-on-this-gpu", "ran"),
        ({"gpus": ({**H200, "name": "NVIDIA B200", "sm": "100"},)}, "run-elsewhere", "elsewhere"),
        ({"adopted": {"torch": "2.11.0"}}, "run-elsewhere", "elsewhere"),
        ({"software": {"python": "3.9.1"}}, "run-elsewhere", "elsewhere"),
        (CPU, "tried", "tried"),
        ({"suite": "sha256:33"}, "run-on-this-gpu", "stale"),
        ({"verdict": "failed", "reason": "x"}, "stated", "failed"),
    ],
)
def test_the_page_is_coloured_by_the_same_words(small, changes, word, kind) -> None:
    cell = solve(
        small, Request(pins=tuple(Pin(axis=a, spec=SOFT[a], origin="-") for a in ("cuda", "torch", "te")))
    ).cell
    place = {"cell": dict(cell.versions), "cell_id": cell.id, "software": {"python": f"{cell.versions['python']}.1"}}
    page = build_page(small, records=[record(**(place | changes))], suite="sha256:22")
    number = next(n for n, each in enumerate(page.cells) if each["te"] == SOFT["te"])
    assert page.cells[number]["standing"][0]["claim"] == word
    text = render_page(page)
    assert f'<button type="button" class="k {kind}" data-n="{number}"' in text
    for proof in Proof:
        assert proof.words in text
    assert "verified" not in text.partition("<main")[2].partition("<script")[0].replace('class="standing verified"', "")


def test_the_page_shows_what_was_tried(small) -> None:
    page = build_page(small, trials=_Trials(te_torch="passed", apex_torch="passed"))
    number = next(n for n, each in enumerate(page.cells) if each["te"] == SOFT["te"])
    assert f'<button type="button" class="k tried" data-n="{number}"' in render_page(page)
    assert build_page(small).cells[number]["tried"] == "stated"

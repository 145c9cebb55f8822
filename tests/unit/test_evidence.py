"""Evidence records: what they keep, what they leave out, and that an edited one is noticed."""

import errno
import getpass
import json
import math
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from envbuild.cli.resolve import _claim
from envbuild.errors import DataError, HostError
from envbuild.evidence import refs as evidence_refs
from envbuild.evidence.claims import claim_of
from envbuild.evidence.recording import from_report
from envbuild.evidence.records import Evidence, content_id, load_evidence, read_evidence, record_evidence
from envbuild.evidence.report import Outcome, SmokeReport
from envbuild.evidence.standing import evidence_for
from envbuild.matrix.load import load_matrix
from envbuild.verify.suite import suite_hash

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
CELL = "cu130-py312-torch2.11.0-te2.12.0-3f9a21c7"
VERSIONS = {"cuda": "13.0", "gpu": "sm_90", "os": "ubuntu24.04", "python": "3.12"}


def report(**changes) -> SmokeReport:
    fields = {
        "target": {"kind": "image", "reference": "registry.example/me/img:1", "digest": "sha256:aa"},
        "cell_id": CELL,
        "cell": VERSIONS,
        "lock_digest": "sha256:11",
        "level": "step",
        "device": "cuda",
        "nproc": 1,
        "verdict": "passed",
        "reason": "",
        "suite": "sha256:22",
        "seed": 7,
        "machine": {
            "gpus": [{"name": "NVIDIA H200", "sm": "90", "memory_gib": 139.8}] * 2,
            "driver": "580.159.04",
            "torch": "2.11.0+cu130",
            "cuda": "13.0",
            "python": "3.12.3",
        },
        "launchers": ["torchrun"],
        "tests": (
            Outcome(
                id="test_a.py::test_b",
                level="kernels",
                outcome="passed",
                seconds=1.5,
                figures={"error": {"value": 1e-3, "bound": 8e-3}},
            ),
        ),
        "seconds": 2.0,
        "log": "/home/someone/.cache/envbuild/logs/smoke.log",
    }
    return SmokeReport(**(fields | changes))


def record(**changes) -> Evidence:
    when, keyword = changes.pop("now", NOW), changes.pop("keyword", None)
    return from_report(report(**changes), now=when, keyword=keyword)


def claim_text(*records: Evidence, **more) -> str:
    """Return what is known of the cell that the records are of."""
    return claim_of(SimpleNamespace(id=CELL, versions=VERSIONS), (), records, **more).text


def test_round_trip(tmp_path: Path) -> None:
    written = record()
    path = record_evidence(written, tmp_path)
    assert load_evidence(tmp_path) == (written,)
    assert path.name == f"20261120T120000Z-{written.id.removeprefix('sha256:')[:16]}.json"
    assert written.gpus[0].count == 2
    assert written.tests[0].figures == {"error": {"value": 1e-3, "bound": 8e-3}}


def test_no_folder_is_no_evidence(tmp_path: Path) -> None:
    assert load_evidence(tmp_path / "absent") == ()


@pytest.mark.parametrize("change", ["verdict", "figure", "added", "no id"])
def test_an_edited_record_is_refused(tmp_path: Path, change: str) -> None:
    path = record_evidence(record(verdict="failed", reason="slow"), tmp_path)
    raw = json.loads(path.read_text())
    if change == "verdict":
        raw["verdict"] = "passed"
    elif change == "figure":
        raw["tests"][0]["figures"]["error"]["value"] = 0.0
    elif change == "no id":
        del raw["id"]
    else:
        raw["adopted"] = {"torch": "2.11.0"}
    path.write_text(json.dumps(raw))
    with pytest.raises(DataError, match="was edited") as caught:
        load_evidence(tmp_path)
    assert str(path) in str(caught.value)


def test_an_edited_record_with_a_matching_id_is_refused_by_its_name(tmp_path: Path) -> None:
    path = record_evidence(record(verdict="failed", reason="slow"), tmp_path)
    raw = json.loads(path.read_text())
    raw["verdict"] = "passed"
    raw["id"] = content_id(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(DataError, match="was edited"):
        read_evidence(path)


def test_reformatting_is_no_edit(tmp_path: Path) -> None:
    path = record_evidence(record(), tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4, sort_keys=True))
    assert read_evidence(path) == record()


def test_what_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(DataError, match="does not load"):
        load_evidence(tmp_path)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(DataError, match="does not load"):
        load_evidence(tmp_path)


def test_records_are_never_replaced(tmp_path: Path) -> None:
    record_evidence(record(), tmp_path)
    with pytest.raises(DataError, match="there already"):
        record_evidence(record(), tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(HostError, match="cannot be written"):
        record_evidence(record(), blocked / "evidence")


def test_no_names_or_paths_of_the_machine(tmp_path: Path) -> None:
    host, user = "gpu-node-17.example.org", "annabel"
    text = (
        f"{host}:4242 [0] NCCL WARN from 10.11.12.13 in /home/{user}/env/lib/python3.12/site-packages/torch/nn/x.py, "
        f"127.0.0.1 is fine, {socket.gethostname()} ran it"
    )
    test = Outcome(id="t", level="step", outcome="failed", seconds=0.0, reason=text)
    kept = from_report(report(reason=text, verdict="failed", tests=(test,)), now=NOW, nodes=[host])
    path = record_evidence(kept, tmp_path)
    for word in (host, user, "10.11.12.13", "registry.example", "/home/", ".cache"):
        assert word not in path.read_text(), word
    if len(socket.gethostname()) > 2 and socket.gethostname() != "localhost":
        assert socket.gethostname() not in kept.reason
    assert "torch/nn/x.py" in kept.reason
    assert "127.0.0.1 is fine" in kept.reason
    assert getpass.getuser() == "root" or getpass.getuser() not in kept.reason


def test_a_bare_host_is_described_without_its_interpreter() -> None:
    target = {"kind": "host", "interpreter": "/home/a/venv/bin/python", "os": "Ubuntu 24.04", "python": "3.12.3"}
    assert record(target=target).target == {"kind": "host", "os": "Ubuntu 24.04", "python": "3.12.3"}


def test_a_cell_that_never_ran() -> None:
    assert evidence_for([record()], cell_id="another").status == "never"
    assert claim_text() == "stated only: no run of it is recorded"


def test_a_run_in_words() -> None:
    assert claim_text(record(), suite="sha256:22", lock_digest="sha256:11") == (
        "run on this GPU: the image, H200, driver 580, 2026-11-20"
    )
    assert claim_text(record(nproc=8, level="bench")) == "run on this GPU: the image, 8x H200, driver 580, 2026-11-20"
    # below `distributed` no test uses more than one
    assert claim_text(record(nproc=8, level="step")) == "run on this GPU: the image, H200, driver 580, 2026-11-20"
    machine = {"gpus": [], "python": "3.12.3"}
    some = record(device="cpu", machine=machine, keyword="te")
    assert claim_text(some) == "stated only; run in part: the image, CPU, 2026-11-20, with only -k 'te'"
    altered = record().model_copy(update={"adopted": {"torch": "2.11.0"}, "built_with": {"CFLAGS": "-O1"}})
    assert claim_text(altered) == (
        "run elsewhere: run on sm_90: the image, H200, driver 580, 2026-11-20, with torch adopted from the host, "
        "1 switch of a compile that the lock does not state"
    )
    assert claim_text(record(device="cpu", machine=machine)) == "tried without a GPU: the image, CPU, 2026-11-20"


def test_another_suite_or_lock_makes_stale() -> None:
    suite = evidence_for([record()], cell_id=CELL, suite="sha256:new")
    assert suite.status == "stale"
    assert claim_text(record(), suite="sha256:new") == (
        "stale: run on this GPU: the image, H200, driver 580, 2026-11-20, but the smoke suite has changed since"
    )
    lock = claim_text(record(), suite="sha256:22", lock_digest="sha256:new")
    assert lock.endswith("but the lock has changed since")


def test_the_newest_run_that_is_not_stale_decides() -> None:
    good = record()
    bad = record(verdict="failed", reason="test_x: TE ran its unfused attention\nmore", now=NOW + timedelta(hours=1))
    failed = evidence_for([good, bad], cell_id=CELL, suite="sha256:22")
    assert failed.status == "failed"
    assert (
        claim_text(good, bad)
        == "failed on sm_90: the image, H200, driver 580, 2026-11-20: test_x: TE ran its unfused attention"
    )
    later = record(now=NOW + timedelta(hours=2))
    assert evidence_for([good, bad, later], cell_id=CELL).status == "verified"
    # An older run of the present suite beats a newer run of another one.
    other = record(suite="sha256:old", now=NOW + timedelta(hours=3))
    assert evidence_for([good, other], cell_id=CELL, suite="sha256:22").record == good


def test_the_run_on_the_most_gpus_since_the_last_failure_is_shown() -> None:
    def run(count: int, minutes: int, verdict: str = "passed", level: str = "bench") -> Evidence:
        return record(nproc=count, level=level, verdict=verdict, reason="test_x", now=NOW + timedelta(minutes=minutes))

    runs = [run(8, 0), run(4, 60), run(1, 120)]
    assert evidence_for(runs, cell_id=CELL).record == runs[0]
    assert evidence_for([*runs, run(4, 30, "failed")], cell_id=CELL).record == runs[1]
    assert evidence_for([*runs, run(8, 130, level="step")], cell_id=CELL).record == runs[0]
    cpu = record(device="cpu", nproc=16, machine={"gpus": []}, now=NOW + timedelta(days=1))
    assert evidence_for([*runs, cpu], cell_id=CELL).record == runs[0]


@pytest.mark.parametrize(
    ("later", "fixes"),
    [
        ({"level": "distributed", "nproc": 4}, True),
        ({"level": "bench", "nproc": 8}, True),
        ({"level": "step", "nproc": 4}, False),
        ({"level": "distributed", "nproc": 1}, False),
        ({"level": "bench", "nproc": 8, "keyword": "ddp"}, False),
    ],
)
def test_a_failure_stands_until_as_much_has_passed(later, fixes) -> None:
    bad = record(level="distributed", nproc=4, verdict="failed", reason="rank 1 hung")
    standing = evidence_for([bad, record(**later, now=NOW + timedelta(hours=1))], cell_id=CELL)
    assert standing.status == ("verified" if fixes else "failed")


def test_a_gpu_run_counts_before_a_later_cpu_run() -> None:
    cpu = record(device="cpu", machine={"gpus": []}, now=NOW + timedelta(days=1))
    assert evidence_for([record(), cpu], cell_id=CELL).record == record()


def test_a_run_of_some_tests_alone_gives_way_to_a_whole_one() -> None:
    def some(verdict: str, hours: int) -> Evidence:
        return record(keyword="te", verdict=verdict, reason="test_x", now=NOW + timedelta(hours=hours))

    whole, passed, failed, fixed = record(), some("passed", 1), some("failed", 2), some("passed", 3)
    cpu = record(device="cpu", machine={"gpus": []}, now=NOW + timedelta(days=1))
    stale = record(suite="sha256:old")
    for records, decides in [
        ([whole, passed], whole),
        ([passed], passed),
        ([whole, passed, failed], failed),
        ([whole, failed, fixed], whole),
        ([failed, fixed], fixed),
        ([passed, cpu], passed),
        ([stale, passed], passed),
        ([record(verdict="failed", reason="test_y"), passed], record(verdict="failed", reason="test_y")),
    ]:
        assert evidence_for(records, cell_id=CELL, suite="sha256:22").record == decides


def test_a_host_with_something_missing_proves_nothing_of_the_cell() -> None:
    assert evidence_for([record(verdict="host", reason="no GPU")], cell_id=CELL).status == "never"


def test_resolve_with_a_lock_holds_the_record_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = next(r for r in evidence_refs.committed_evidence() if r.passed and r.device == "cuda" and not r.keyword)
    kept = kept.model_copy(
        update={"suite": suite_hash(axes=(), level=kept.level, date=NOW), "date": NOW, "adopted": {}, "built_with": {}}
    )
    monkeypatch.setattr(evidence_refs, "committed_evidence", lambda: (kept,))
    versions = {axis: version for axis, version in kept.cell.items() if isinstance(version, str)}
    solution = SimpleNamespace(cell=SimpleNamespace(id=kept.cell_id, versions=versions), evidence=[])
    matrix, locks = load_matrix(), (None, kept.lock_digest, "other")
    claims = [_claim(matrix, solution, lock and SimpleNamespace(digest=lock)) for lock in locks]
    assert [each.status for each in claims] == ["verified", "verified", "stale"]
    assert claims[2].text.endswith("but the lock has changed since")
    assert claims[2].as_json()["date"] == "2026-11-20T12:00:00Z"


def test_a_full_disk_leaves_no_half_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(self: Path, text: str, encoding: str) -> int:
        write(self, text[:100], encoding=encoding)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(HostError, match="No space left on device"):
        record_evidence(record(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("value", "kept"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")])
def test_a_figure_that_is_no_number_is_kept_as_its_name(tmp_path: Path, value: float, kept: str) -> None:
    test = Outcome(id="t", level="step", outcome="failed", seconds=1, figures={"error": {"value": value, "bound": 1}})
    path = record_evidence(record(verdict="failed", reason="x", seconds=2, tests=(test,)), tmp_path)
    assert read_evidence(path).tests[0].figures == {"error": {"value": kept, "bound": 1}}


def test_a_reason_that_utf_8_cannot_say_is_kept(tmp_path: Path) -> None:
    path = record_evidence(record(verdict="failed", reason="no file \udc80"), tmp_path)
    assert read_evidence(path).reason == "no file \\udc80"


def test_a_record_that_does_not_read_back_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="was edited"):
        record_evidence(record().model_copy(update={"seed": 8}), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "nvidia-cudnn-cu13 is 9.19.0.56, the lock says 9.20.0.48",
        "opencv-python is 4.11.0.86, the lock says 4.12.0.88",
        "flash-attn 2.8.3.1 is above 2.8.3.0",
        "nvidia_curand_cu12-10.3.9.90-py3-none-manylinux",
        "needs nvidia-curand-cu12==10.3.9.90 and opencv>=4.12.0.88",
        "cuDNN version 9.19.0.56, libcudnn.so.9.19.0.56",
        "127.0.0.1 and 0.0.0.0 and 1.2.3.400",
        "x[1::2], c10::cuda::get, 12:30:59, bus 0000:3b:00.0, test_a.py::test_b",
    ],
)
def test_versions_survive(text: str) -> None:
    assert record(verdict="failed", reason=text).reason == text


@pytest.mark.parametrize(
    "text",
    [
        "connect to {}:29500",
        "NCCL INFO eth0 {}<0>",
        "the master is {}",
        "tcp://{}:1",
        "torchrun {}",
        "NCCL {}:4 and cudnn 9.1.0.70",
    ],
)
@pytest.mark.parametrize("address", ["10.11.12.13", "203.0.113.7", "2001:db8::17"])
def test_addresses_of_hosts_do_not(text: str, address: str) -> None:
    kept = record(verdict="failed", reason=text.format(address)).reason
    assert address not in kept
    assert "cudnn" not in kept or "9.1.0.70" in kept


def test_an_address_of_a_node_is_left_out_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(2, 1, 6, "", ("10.3.9.90", 0))])
    kept = from_report(report(verdict="failed", reason="version 10.3.9.90"), nodes=["node17"])
    assert kept.reason == "version ***"


def test_a_run_of_less_than_a_step_says_its_level() -> None:
    for level in ("import", "kernels"):
        assert claim_text(record(level=level)) == (
            f"run elsewhere: run on sm_90: the image, H200, driver 580, 2026-11-20, with level {level} alone"
        )
    assert claim_text(record(level="bench")) == "run on this GPU: the image, H200, driver 580, 2026-11-20"


def test_a_run_of_less_than_a_step_takes_back_no_more_than_it_ran() -> None:
    later = record(level="import", now=NOW + timedelta(hours=1))
    for level, status in [("step", "failed"), ("kernels", "failed"), ("import", "verified")]:
        bad = record(level=level, verdict="failed", reason="test_x")
        assert evidence_for([bad, later], cell_id=CELL).status == status
    assert evidence_for([record(), later], cell_id=CELL).record == record()


def test_a_stale_failure_is_shown() -> None:
    assert claim_text(record(verdict="failed", reason="x"), suite="sha256:new") == (
        "stale: failed on sm_90: the image, H200, driver 580, 2026-11-20: x, but the smoke suite has changed since"
    )


def test_what_a_record_ranks_as(monkeypatch: pytest.MonkeyPatch) -> None:
    def test(level: str) -> tuple[Outcome, ...]:
        return (Outcome(id="t", level=level, outcome="passed", seconds=1.0),)

    cpu = {"device": "cpu", "machine": {"gpus": []}}
    for changes, level in [
        ({"level": "bench"}, "gpu"),
        ({"level": "kernels"}, "built"),
        ({"level": "import"}, "built"),
        (cpu, "cpu"),
        (cpu | {"level": "import"}, "built"),
        ({"keyword": "sgd", "tests": test("distributed")}, None),
        ({"verdict": "failed", "reason": "x"}, None),
    ]:
        kept = (record(**changes),)
        monkeypatch.setattr(evidence_refs, "committed_evidence", lambda kept=kept: kept)
        evidence_refs.evidence_refs.cache_clear()
        assert [ref.level for ref in evidence_refs.evidence_refs()] == ([level] if level else [])
    evidence_refs.evidence_refs.cache_clear()


def test_the_image_is_named_before_its_environment_on_a_host() -> None:
    of_image = record(nproc=1)
    of_host = record(
        now=datetime(2026, 12, 1, tzinfo=UTC),
        nproc=8,
        target={"kind": "host", "os": "Ubuntu 24.04", "python": "3.12.3"},
    )
    found = evidence_for([of_host, of_image], cell_id=of_image.cell_id)
    assert found.record == of_image
    assert found.record.image == of_image.target["digest"]
    assert of_host.image is None

"""`envbuild ci --unverified --shard K/N --seed S`: N days of shares verify every pair, whatever changes in between."""

import datetime as dt
import hashlib
import http.server
import itertools
import json
import random
import threading
from dataclasses import replace

import pytest

from envbuild.cli import main
from envbuild.cli.ci import _needless
from envbuild.curate.coverage import AXES, cells_to_verify
from envbuild.curate.rotation import Share, Verified, read_share, verified_by
from envbuild.errors import UsageError
from envbuild.evidence.records import Evidence
from envbuild.lock.files import read_lock
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.paths import data_dir
from envbuild.solver.enumerate import enumerate_cells
from envbuild.stacks.load import load_stack

DAY = dt.datetime(2026, 11, 23, 12, tzinfo=dt.UTC)
SUITE = "sha256:suite"
WITHIN = Request(pins=(Pin(axis="cuda", spec=">=12.8", origin="--cuda"),))


def pairs(versions):
    used = [(axis, ".".join(versions[axis].partition("+")[0].split(".")[:2])) for axis in AXES if axis in versions]
    return {(*one, *other) for one, other in itertools.combinations(used, 2)}


def every_pair(within=WITHIN):
    return set().union(*(pairs(cell) for cell in enumerate_cells(load_matrix(), AXES, within.pins)))


def record(cell, *, verdict="passed", date=DAY, lock=None, device="cpu", **changes):
    fields = {
        "date": date,
        "cell_id": cell.id,
        "cell": dict(cell.versions),
        "lock_digest": lock,
        "target": {"kind": "image", "digest": "sha256:" + "ab" * 32},
        "suite": SUITE,
        "level": "distributed",
        "device": device,
        "nproc": 2,
        "nodes": 1,
        "gpus": [],
        "driver": None,
        "software": {},
        "launchers": [],
        "seed": 1,
        "verdict": verdict,
        "reason": "",
        "seconds": 1.0,
        "tests": [],
        "id": hashlib.sha256(f"{cell.id} {date} {verdict} {changes}".encode()).hexdigest(),
    }
    return Evidence.model_validate(fields | changes)


def verified(records, *, now=DAY, days=30, device=None):
    return verified_by(records, since=now - dt.timedelta(days=days), suite=lambda *_: SUITE, device=device)


def chosen(share, within=WITHIN, **more):
    return cells_to_verify(load_matrix(), {}, within, share=share, **more).cells


def test_all_shares_together_hold_every_pair():
    held = [set().union(*(pairs(v.cell.versions) for v in chosen(Share(number=n, of=7, seed=3)))) for n in range(1, 8)]
    assert every_pair() <= set().union(*held)
    assert all(every_pair() - each for each in held)  # no share is the whole


def test_a_round_of_days_verifies_every_pair_of_the_whole_matrix():
    """What a day verifies is evidence on the next, so that a round costs hardly more cells than one cover of all pairs."""
    whole = Request(pins=())
    records, cells = [], []
    for day in range(10):
        moment = DAY + dt.timedelta(days=day)
        share = read_share("today/10", seed=None, day=moment.date())
        known = verified(records, now=moment)
        today = chosen(share, whole, verified=known, needless=lambda v, known=known: known.cell(v.cell.id) or None)
        cells += today
        records += [record(v.cell, date=moment) for v in today]
    assert every_pair(whole) <= set().union(*(pairs(v.cell.versions) for v in cells))
    assert len({v.cell.id for v in cells}) == len(cells)  # none twice
    once = len(cells_to_verify(load_matrix(), {}, whole).cells)
    assert len(cells) < 1.4 * once


def test_a_round_misses_no_pair_when_other_evidence_arrives_in_its_middle():
    """Positions in a list move when it becomes shorter; a pair stays in its share."""
    source = random.Random(5)
    others = [v.cell for v in cells_to_verify(load_matrix(), {}, WITHIN).cells]
    records, ran = [], set()
    for day in range(6):
        share = Share(number=day + 1, of=6, seed=11 + day // 4)  # from the fifth day on another round's
        known = verified(records)
        ran |= set().union(*(pairs(v.cell.versions) for v in chosen(share, verified=known)))
        records += [record(cell) for cell in source.sample(others, 4)]
    by_others = set().union(*(pairs(r.cell) for r in records))
    assert every_pair() <= ran | by_others


def test_the_next_round_verifies_the_pairs_in_other_cells():
    first, second = ({v.cell.id for v in chosen(Share(number=2, of=5, seed=s))} for s in (1, 2))
    assert len(first - second) > len(first) / 4  # some pairs are in one cell alone


def test_days_follow_each_other_through_the_shares_and_a_round_has_one_seed():
    start = dt.date.fromordinal(7 * 100_000)
    shares = [read_share("today/7", seed=None, day=start + dt.timedelta(days=n)) for n in range(14)]
    assert [share.number for share in shares] == [*range(1, 8)] * 2
    assert [share.seed for share in shares] == [100_000] * 7 + [100_001] * 7
    assert read_share("today/7", seed=4, day=start).seed == 4
    assert read_share(" 3/10 ", seed=None, day=start) == Share(number=3, of=10, seed=0)


@pytest.mark.parametrize(
    "text", ["0/3", "4/3", "3", "/", "today/0", "today/401", "-1/3", "1/3/3", "²/3", "1/x", "99999/3"]
)
def test_what_is_no_share(text):
    with pytest.raises(UsageError, match="is no share"):
        read_share(text, seed=None, day=DAY.date())


@pytest.fixture(scope="module")
def cell():
    return cells_to_verify(load_matrix(), {}, WITHIN, limit=1).cells[0].cell


OLDER = DAY - dt.timedelta(days=31)


@pytest.mark.parametrize(
    ("records", "counts"),
    [
        ([{}], True),
        ([{"date": OLDER}], False),
        ([{"verdict": "failed"}], False),
        ([{"suite": "sha256:other"}], False),
        ([{"keyword": "te"}], False),
        ([{"level": "import"}], False),
        ([{"date": DAY - dt.timedelta(hours=2)}, {"verdict": "failed"}], False),
        ([{"verdict": "failed", "date": DAY - dt.timedelta(hours=2)}, {}], True),
        ([{"lock": "sha256:a"}, {"lock": "sha256:b", "verdict": "failed"}], True),
        ([{"verdict": "host"}], False),
    ],
)
def test_what_verifies_a_cell(cell, records, counts):
    found = verified([record(cell, **each) for each in records])
    assert found.cell(cell.id) is counts
    if counts:
        assert not found.cell("another")


def test_where_it_ran_counts_when_that_is_asked_for(cell):
    records = [record(cell)]
    assert verified(records).cell(cell.id)
    assert verified(records, device="cpu").cell(cell.id)
    assert not verified(records, device="cuda").cell(cell.id)


def test_a_lock_of_a_verified_cell(cell):
    found = verified([record(cell, lock="sha256:a")])
    assert found.cell(cell.id, "sha256:a")
    assert not found.cell(cell.id, "sha256:b")


def test_verified_pairs_are_left_out_and_counted():
    first = cells_to_verify(load_matrix(), {}, WITHIN, limit=4).cells
    known = Verified(records=tuple(record(v.cell) for v in first))
    rest = cells_to_verify(load_matrix(), {}, WITHIN, verified=known)
    held = set().union(*(pairs(v.cell.versions) for v in first))
    assert rest.verified == len(held)
    assert every_pair() - held <= set().union(*(pairs(v.cell.versions) for v in rest.cells))
    assert len(rest.cells) < len(cells_to_verify(load_matrix(), {}, WITHIN).cells)


def test_what_needs_no_run_is_left_out_counts_as_covered_and_takes_no_place():
    every = cells_to_verify(load_matrix(), {}, WITHIN, limit=9).cells
    needless = {every[4].cell.id, every[6].cell.id}
    found = cells_to_verify(
        load_matrix(), {}, WITHIN, limit=7, needless=lambda v: "it is there" if v.cell.id in needless else None
    )
    assert [v.cell.id for v in found.cells] == [v.cell.id for v in every if v.cell.id not in needless]
    assert [(v.cell.id, why) for v, why in found.left_out] == [(every[n].cell.id, "it is there") for n in (4, 6)]


@pytest.fixture
def run(capsys):
    def call(*args):
        with pytest.raises(SystemExit) as caught:
            main(["ci", *args])
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return call


def test_the_command_gives_the_same_answer_for_the_same_day(run):
    args = ("--cuda", ">=12.8", "--unverified", "--stale-after", "30d", "--shard", "today/9", "--json")
    first = run(*args, "--date", "2026-11-25")
    assert first[0] == 0
    assert first == run(*args, "--date", "2026-11-25")
    assert first[1] != run(*args, "--date", "2026-11-26")[1]
    turn, place = divmod(dt.date(2026, 11, 25).toordinal(), 9)
    assert f"; share {place + 1}/9, seed {turn}, has " in first[2]


def test_what_a_limit_leaves_out_is_counted(run):
    """A share that is cut covers not all of its pairs, and who reads the log must see that."""
    code, _, err = run("--cuda", ">=12.8", "--shard", "1/3", "--limit", "2")
    assert code == 0
    whole = cells_to_verify(load_matrix(), {}, WITHIN, share=Share(number=1, of=3))
    cut = cells_to_verify(load_matrix(), {}, WITHIN, share=Share(number=1, of=3), limit=2)
    assert whole.left == 0 < cut.left
    assert "; --limit leaves " in err


def test_a_seed_orders_the_whole_list_too(run):
    one, other = (json.loads(run("--cuda", "13.0", "--seed", seed, "--json")[1])["include"] for seed in ("1", "2"))
    assert one != other
    assert one[:1] == other[:1]  # what is documented comes first all the same


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--stale-after", "30d"], "this changes nothing without --unverified"),
        (["--device", "cpu"], "this changes nothing without --unverified"),
        (["--unverified", "--stale-after", "30"], "'30' is no age"),
        (["--shard", "3-10"], "'3-10' is no share"),
        (["--date", "2026-11-23"], "this changes nothing without --shard today/N or --stale-after"),
        (["--shard", "1/3", "--date", "2026-11-23"], "this changes nothing"),
        (["--shard", "today/3", "--date", "23.11.2026"], "'23.11.2026' is no date"),
        (["--unpublished"], "no registry is set to ask"),
    ],
)
def test_options_that_cannot_be(run, monkeypatch, args, what):
    monkeypatch.delenv("ENVBUILD_REGISTRY", raising=False)
    code, _, err = run("--cuda", "13.0", *args)
    assert code == 2
    assert what in err


class Registry(http.server.BaseHTTPRequestHandler):
    """A registry that holds the manifests of `server.held`, and writes down what it was asked for."""

    def do_GET(self):
        self.server.asked.append(self.path)
        body = b'{"schemaVersion": 2}' if self.path in self.server.held else b"{}"
        self.send_response(200 if self.path in self.server.held else self.server.otherwise)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def registry(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        server.held, server.asked, server.otherwise = set(), [], 404
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("ENVBUILD_REGISTRY", f"127.0.0.1:{server.server_port}/team/cells")
        yield server
        server.shutdown()


def committed():
    """Return a committed lock, its flags, and where a registry keeps its image."""
    lock = read_lock(min((data_dir("matrices") / "locks").glob("*-apex*-sm90-fc9f6c2f-*"))).lock
    flags = [word for axis in ("cuda", "te") for word in (f"--{axis}", lock.cell[axis])]
    key = lock.digest.removeprefix("sha256:")[:16]
    return lock, flags, f"/v2/team/cells/manifests/{lock.as_cell.id[:90]}-{key}"


@pytest.fixture
def no_locks_here(monkeypatch, tmp_path):
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path))


def test_what_the_registry_holds_by_key_is_left_out(run, registry, no_locks_here):
    lock, flags, path = committed()
    before = json.loads(run(*flags, "--json")[1])["include"]
    assert lock.as_cell.id in [entry["id"] for entry in before]

    code, out, err = run(*flags, "--unpublished", "--json")
    assert (code, path in registry.asked) == (0, True)
    assert json.loads(out)["include"] == before  # asked, and not there

    registry.held.add(path)
    code, out, err = run(*flags, "--unpublished", "--json")
    assert code == 0
    assert lock.as_cell.id not in [entry["id"] for entry in json.loads(out)["include"]]
    assert f"left out: {lock.as_cell.id}: the registry has its image: 127.0.0.1:" in err


def test_a_cell_without_a_lock_is_not_asked_for(run, registry, no_locks_here):
    code, out, _ = run("--cuda", "13.2", "--unpublished", "--limit", "3", "--json")
    assert (code, len(json.loads(out)["include"]), registry.asked) == (0, 3, [])


def test_a_registry_that_does_not_answer_is_an_error_and_not_an_empty_registry(run, registry, no_locks_here):
    _, flags, _ = committed()
    registry.otherwise = 503
    code, out, err = run(*flags, "--unpublished", "--json")
    assert code == 8
    assert json.loads(out)["error"] == "host"
    assert "answered 503" in err


def test_a_stack_is_verified_by_a_run_of_its_own_lock_alone(no_locks_here):
    """Its image differs from that of the same cell without the stack, so a record of that one says nothing of it."""
    stacks = {"megatron-gpt3": load_stack("megatron-gpt3").axes}
    (one,) = cells_to_verify(load_matrix(), stacks, Request(pins=()), stack="megatron-gpt3", limit=1).cells
    reason = _needless(load_matrix(), verified([record(one.cell, lock="sha256:a")]), unpublished=False)
    assert reason(one) is None
    assert reason(replace(one, stack=None)) == "verified"

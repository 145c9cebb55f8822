"""The figures of benchmarks/bench_registry.py, and the relay that counts its bytes."""

import contextlib
import json
import os
import socket
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import registry_cells
from registry_builders import two_builders
from registry_cells import CELLS, compiled, publish, read_objects
from registry_figures import compiles, empty, for_people, new_bytes, shared, update
from registry_site import Relay, Site, StepError

TORCH, OTHER = "2.11.0+cu130", "2.7.1+cu126"
BLOBS = {
    "a": {"torch": 1000, "te-1": 100, "own-a": 1},
    "b": {"torch": 1000, "te-2": 120, "own-b": 1},
    "c": {"other": 900, "own-c": 2},
}


def row(name, torch=TORCH, *, wheels=None, seconds=None, **more):
    own = {"name": name, "flags": ["--te", name], "outcome": "published", "digest": name, "torch": torch}
    return own | {"wheels": wheels or {}, "compiled": seconds or {}, "stand_in": ""} | more


def test_a_blob_of_two_cells_counts_once():
    rows = [row("a"), row("b"), row("c", OTHER), {"name": "d", "flags": [], "outcome": "failed", "why": "no"}]
    every, family = shared(rows, BLOBS)
    assert (every["cells"], every["bytes"], every["one"], every["met"]) == (["a", "b", "c"], 2124, 1121, False)
    assert (family["of"], family["cells"], family["bytes"]) == (f"torch {TORCH}", ["a", "b"], 1222)
    assert (family["times"], family["met"]) == (1.09, True)
    assert new_bytes(rows, BLOBS) == {"a": 1101, "b": 121, "c": 902}
    assert shared(rows[:1], BLOBS) == []


def test_a_wheel_that_is_compiled_twice_is_seen():
    first = row("a", wheels={"te": "1"}, seconds={"te": 300.0})
    again = row("b", wheels={"te": "1", "apex": "2"}, seconds={"apex": 600.0})
    found = compiles([first, again])
    assert (found["cells_s"], found["wheels_s"], found["times"]) == (900.0, 900.0, 1.0)
    assert (found["wheels"], found["uses"], found["met"]) == (2, 3, True)
    twice = row("b", wheels={"te": "1"}, seconds={"te": 300.0})
    found = compiles([first, twice])
    assert (found["times"], found["met"]) == (2.0, False)
    kept = compiles([row("a", wheels={"te": "1"})])
    assert (kept["cells_s"], kept["times"], kept["met"]) == (0.0, None, True)
    own = compiles([row("a", wheels={"te": "1"}, seconds={"te": 10.0, "mpi": 50.0})])
    assert own["times"] == 1.0


def test_only_a_stage_that_compiled_counts():
    stages = [
        {"name": "build-te", "seconds": 300.0, "executed": 3},
        {"name": "build-apex", "seconds": 0.2, "executed": 0},
        {"name": "wheel-te", "seconds": 1.0, "executed": 1},
    ]
    assert compiled({"stages": stages}) == {"te": 300.0}


def test_an_update_has_two_targets():
    found = update(["a", "b"], 184_000_000, 2_980_000_000)
    assert (found["met"], found["share_met"]) == (True, False)
    assert not update(["a", "b"], 200_000_001, 2_980_000_000)["met"]


def test_the_tables_name_what_missed_its_target():
    report = {
        "cells": [
            row("a", seconds={"te": 3.0}, bytes=1101, new_bytes=1101, publish_seconds=4.0) | {"seconds": 9.0},
            {"name": "d", "flags": ["--cuda", "9"], "stand_in": "", "outcome": "out of reach", "why": "no | host"},
        ],
        "shared": shared([row("a"), row("c", OTHER)], BLOBS),
        "compile": compiles([row("a", wheels={"te": "1"}, seconds={"te": 3.0})]),
        "pulls": {"a": {"seconds": 5.0, "bytes": 1200}},
        "storage_bytes": 2100,
        "left_out": ["update: b is not published"],
        "empty": empty(
            ["--cuda", "13.0"],
            {"origin": "pulled", "verified": {"by": "catalog"}, "seconds": 99.0},
            1200,
            20.0,
            31.0,
            25.0,
        ),
        "second": {"flags": "--te a", "taken": ["te"], "compiled": {}},
        "builders": {"name": "a", "seconds": 80.4},
    }
    text = for_people(report)
    assert "| d | `--cuda 9` | out of reach: no \\| host |" in text
    assert "| 1.6 times | 1.82 times (2,003 and 1,101) | **no** |" in text
    assert "| download + 10 s | 31.0 s; download 20.0 s of 1,200 bytes | **no** |" in text
    assert "| + 10 s | 31.0 s; the engine alone 25.0 s | yes |" in text
    assert "`a` built again on a second engine" in text
    assert "the same digest, 80 s" in text
    assert "- update: b is not published" in text


def test_records_that_follow_each_other_are_read():
    assert list(read_objects('{"a": 1}\n{\n "b": {"c": 2}}\n')) == [{"a": 1}, {"b": {"c": 2}}]
    assert list(read_objects("")) == []


def test_the_names_of_the_cells_are_distinct():
    assert len({cell.name for cell in CELLS}) == len(CELLS)


class OnlySite(Site):
    """A site without engines and registry; its `envbuild` is a file that notes its calls and gives the same answer."""

    address = 1

    @property
    def publisher(self):
        return os.environ | {"PYTHONPATH": str(self.folder)}

    @property
    def free_gb(self):
        return 1000.0

    def docker(self, env, *words):
        return ""

    def answers(self, code, answer):
        answer |= {"documents": ["sbom"]}
        (self.folder / "envbuild").mkdir()
        (self.folder / "envbuild" / "__init__.py").touch()
        (self.folder / "envbuild" / "__main__.py").write_text(
            f"import json, sys\nopen({str(self.folder / 'calls')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
            f"print({json.dumps(answer)!r})\nsys.exit({code} if sys.argv[1] == 'image' else 0)\n"
        )

    @property
    def calls(self):
        return [line.split()[0] for line in (self.folder / "calls").read_text().splitlines()]


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(registry_cells, "_prepared", lambda site, cell, given, stack: ([], site.publisher))
    return OnlySite(folder=tmp_path)


def made(*defects):
    checks = [{"name": name, "verdict": "failed", "text": text} for name, text in defects]
    known = {"id": "x", "digest": "x", "size_bytes": 1, "seconds": 1.0, "cell": {"torch": "x"}, "stages": []}
    return known | {"audit": {"checks": [*checks, {"name": "torch", "verdict": "passed", "text": "good"}]}}


SITE = "/usr/local/lib/python3.8/dist-packages"
OLD = ("GPU code", f"{SITE}/torch/lib/libtorch_cuda.so has no GPU code that sm_80 runs: sm_35, sm_37")
STUB = ("stubs of the driver", "/usr/lib/libcuda.so.1 is a stub, and comes before the driver's library")
CELL_OF = {cell.name: cell for cell in CELLS}


def test_a_cell_with_the_known_defects_of_its_stand_in_is_published_and_says_so(site):
    site.answers(6, made(OLD))
    row = publish(site, CELL_OF["gpt2-3d"])
    assert (row["outcome"], row["documents"], site.calls) == ("published", ["sbom"], ["image", "catalog"])
    assert "--even-if-failed" in (site.folder / "calls").read_text().splitlines()[-1]
    assert row["stand_in"].endswith(f"; the audit finds: {OLD[1]}")
    row |= {"bytes": 1, "new_bytes": 1}
    report = {"cells": [row], "shared": [], "compile": compiles([row]), "pulls": {}, "storage_bytes": 0, "left_out": []}
    assert f"published ({row['stand_in']})" in for_people(report)


@pytest.mark.parametrize(
    ("name", "code", "answer", "why"),
    [
        ("gpt2-3d", 6, made(OLD, STUB), "stubs of the driver: "),
        ("gpt2-3d", 6, made(STUB), "stubs of the driver: "),
        ("gpt2-3d", 0, made(), "no defect"),  # another torch than the one that is known
        ("megatron-gpt3", 6, made(OLD), "GPU code: torch/lib/libtorch_cuda.so has no GPU code that sm_80 runs"),
        # an audit that could not be made ends with the same code, and its answer is the error
        (
            "gpt2-3d",
            6,
            {"error": "audit", "what": "the image's Python does not run"},
            "the image's Python does not run",
        ),
        ("cpu", 6, {"error": "audit", "what": "the image has 1 defects"}, "the image has 1 defects"),
    ],
)
def test_a_cell_with_another_defect_is_not_published(site, name, code, answer, why):
    site.answers(code, answer)
    row = publish(site, CELL_OF[name])
    assert (row["outcome"], site.calls) == ("failed", ["image"])
    assert why in row["why"]


class TwoBuilders:
    """A registry whose pulls ask for builders: how many signed, and what a rebuild ends with."""

    def __init__(self, folder, *, signed=1, signs=1, code=4):
        self.folder, self.signed, self.signs, self.code, self.words = folder, signed, signs, code, []
        self.publisher = {"HOME": "p"}
        self.client = {"HOME": "c", "ENVBUILD_TRUSTED_KEYS": "one"}
        self.builder = {"HOME": "b"}

    def say(self, text):
        pass

    def fresh_client(self):
        self.words.append("an empty engine")

    def envbuild(self, env, *words):
        self.words.append(words[0])
        if words[0] == "reproduce":
            assert env["ENVBUILD_SIGNING_KEYS"].endswith("/second.key")
            self.signed += self.signs
        asked = int(env.get("ENVBUILD_TRUSTED_BUILDERS", 0))
        assert asked == 0 or len(env["ENVBUILD_TRUSTED_KEYS"].split()) == 2
        if asked > self.signed:
            raise StepError("2 trusted builders must have built this image, and release did", self.code)
        return {"tag": "t:1", "digest": "x", "verified": {"text": "two signed"}}


def test_who_asks_for_two_builders_is_refused_until_the_second_one_signed(tmp_path):
    site = TwoBuilders(tmp_path)
    found = two_builders(site, row("x"))
    assert (found["refused"], found["verified"]) == (
        "2 trusted builders must have built this image, and release did",
        "two signed",
    )
    empty_engine, pull = "an empty engine", "pull"
    assert site.words == ["catalog", empty_engine, pull, pull, "reproduce", empty_engine, pull]


@pytest.mark.parametrize(
    ("site", "digest", "why"),
    [
        ({"signed": 2}, "x", "pulled although one builder signed"),
        ({"signs": 0}, "x", "2 trusted builders must have built"),
        ({"code": 8}, "x", "2 trusted builders must have built"),
        ({}, "y", "pulled x"),
    ],
)
def test_a_policy_of_two_builders_that_does_not_hold_is_seen(tmp_path, site, digest, why):
    with pytest.raises(StepError, match=why):
        two_builders(TwoBuilders(tmp_path, **site), row("x") | {"digest": digest})


@pytest.fixture
def echo():
    """A server that answers each connection with the bytes that it got, twice."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                taken, _ = listening.accept()
            except OSError:
                return
            with taken:
                got = b""
                while piece := taken.recv(65536):
                    got += piece
                taken.sendall(got * 2)

    threading.Thread(target=serve, daemon=True).start()
    yield listening.getsockname()[1]
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def exchanged(port, body):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(body)
        client.shutdown(socket.SHUT_WR)
        got = b""
        while piece := client.recv(1 << 20):
            got += piece
    return got


def test_the_relay_counts_both_ways_and_changes_nothing(echo):
    relay = Relay(0, echo)
    try:
        body = bytes(range(256)) * 20_000
        assert exchanged(relay.port, body) == body * 2
        assert (relay.traffic.up, relay.traffic.down) == (len(body), 2 * len(body))
        relay.reset()
        assert (relay.traffic.up, relay.traffic.down, relay.traffic.seconds) == (0, 0, 0.0)
        assert exchanged(relay.port, b"x") == b"xx"
        assert (relay.traffic.up, relay.traffic.down) == (1, 2)
    finally:
        relay.close()


def test_a_relay_without_a_server_ends_the_connection():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    relay = Relay(0, port)
    got = None
    try:
        with (
            contextlib.suppress(ConnectionResetError),
            socket.create_connection(("127.0.0.1", relay.port), timeout=20) as client,
        ):
            got = client.recv(1)
        assert not got
        assert relay.traffic.down == 0
    finally:
        relay.close()

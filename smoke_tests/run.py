#!/usr/bin/env python3
"""Run the smoke tests in the environment that this Python belongs to.

    python run.py --expected expected.json --level distributed --device cuda --nproc 2

Levels, each with those before it: import, kernels, step, distributed, bench. Everything that a caller needs is told on
stdout as lines `@smoke {json}`; the rest of stdout is for people. Exit codes: 0 passed, 1 a test failed, 3 this host
cannot run what was asked, 4 the suite itself could not run.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import random
import shutil
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
LEVELS = ("import", "kernels", "step", "distributed", "bench")
EXIT_HOST, EXIT_SUITE = 3, 4


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--expected", help="the expectation (default: $ENVBUILD_EXPECTED)")
    parser.add_argument("--level", choices=LEVELS, default="distributed")
    parser.add_argument("--only", action="store_true", help="run this level without those before it")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda when the cell's torch is a CUDA build")
    parser.add_argument(
        "--nproc", type=int, default=0, help="ranks (default: every GPU, two on a CPU, every slot of --nodes)"
    )
    parser.add_argument("--nodes", help="hostfile: `host slots=N` per line")
    parser.add_argument("--seed", type=int, help="default: a fresh one, printed")
    parser.add_argument(
        "--pytest", help="folder that holds a pytest to use (front/ before, back/ behind what is installed)"
    )
    parser.add_argument("--junit", help="write JUnit XML to this file")
    parser.add_argument("-k", dest="keyword", help="as pytest's -k")
    return parser.parse_args(argv)


class Events:
    """Tells the caller what happens, on the real stdout whatever pytest captures."""

    def __init__(self):
        self.out = os.dup(1)

    def say(self, **fields):
        os.write(self.out, ("\n@smoke " + json.dumps(fields) + "\n").encode())


def level_of(nodeid):
    name = os.path.basename(nodeid.split("::")[0])
    return next(level for level in LEVELS if name.startswith("test_" + level))


class Reporter:
    """A pytest plugin that turns reports into events."""

    def __init__(self, events, start, launchers):
        self.events, self.start, self.launchers = events, start, launchers
        self.figures, self.tables = {}, []
        self.seconds = {}

    def pytest_collection_finish(self, session):
        self.events.say(event="collected", total=len(session.items), **self.start)

    def pytest_runtest_logstart(self, nodeid):
        self.events.say(event="begin", id=self._id(nodeid), level=level_of(nodeid))

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        outcome = None
        if report.when == "call" or (report.when == "setup" and not report.passed):
            outcome = report.outcome
        elif report.when == "teardown" and report.failed:
            outcome = "failed"
        if outcome is None:
            return
        self.events.say(
            event="test",
            id=self._id(report.nodeid),
            level=level_of(report.nodeid),
            outcome=outcome,
            seconds=round(self.seconds[report.nodeid], 3),
            reason=self._reason(report, outcome),
            figures={
                value["name"]: {k: v for k, v in value.items() if k != "name"}
                for key, value in report.user_properties
                if key == "figure"
            },
            tables=[value for key, value in report.user_properties if key == "table"],
            launchers=list(self.launchers),
        )

    def pytest_collectreport(self, report):
        if report.failed:
            self.events.say(
                event="test",
                id=self._id(report.nodeid),
                level=level_of(report.nodeid),
                outcome="failed",
                seconds=0.0,
                reason="does not load: " + str(report.longrepr)[-1500:],
                figures={},
                tables=[],
            )

    @staticmethod
    def _id(nodeid):
        return (
            nodeid.replace("\\", "/").rsplit("/", 1)[-1]
            if "::" not in nodeid
            else nodeid.split("::", 1)[0].rsplit("/", 1)[-1] + "::" + nodeid.split("::", 1)[1]
        )

    @staticmethod
    def _reason(report, outcome):
        if outcome == "passed":
            return ""
        if outcome == "skipped":
            longrepr = report.longrepr
            text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
            return text.replace("Skipped: ", "", 1)
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash is not None else str(report.longrepr)
        for prefix in ("AssertionError: ", "smokelib.launch.RanksFailed: ", "Failed: "):
            text = text[len(prefix) :] if text.startswith(prefix) else text
        return text[:3000]


def suite_hash():
    """Return the hash over every file that can change what the suite checks."""
    sha = hashlib.sha256()
    names = []
    for folder, _, files in os.walk(HERE):
        names += [os.path.join(folder, name) for name in files if name.endswith((".py", ".txt"))]
    for name in sorted(os.path.relpath(n, HERE).replace(os.sep, "/") for n in names):
        with open(os.path.join(HERE, name), "rb") as handle:
            sha.update(name.encode() + b"\0" + hashlib.sha256(handle.read()).digest())
    return "sha256:" + sha.hexdigest()


def keep_bytecode():
    """Leave no byte code in the environment; where torch's is missing, return a folder that this run's processes share.

    Every test of several ranks starts new processes, and each would compile torch and Transformer Engine anew.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin or os.path.exists(importlib.util.cache_from_source(spec.origin)):
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        return None
    folder = tempfile.mkdtemp(prefix="smoke-bytecode-")
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = folder
    return folder


def main(argv=None):
    bytecode = keep_bytecode()
    try:
        return run(argv)
    finally:
        if bytecode:
            shutil.rmtree(bytecode, ignore_errors=True)


def run(argv):
    args = parse(argv)
    events = Events()
    if args.pytest:
        # pytest itself goes in front; what it needs goes behind, so that the environment's own copies are the ones tested.
        os.environ["ENVBUILD_SMOKE_PYTEST"] = os.path.abspath(args.pytest)
        sys.path.insert(0, os.path.join(args.pytest, "front"))
        sys.path.append(os.path.join(args.pytest, "back"))
    sys.path.insert(0, HERE)
    if args.expected:
        os.environ["ENVBUILD_EXPECTED"] = os.path.abspath(args.expected)
    from smokelib.expectation import Expectation

    expected = Expectation.load()
    for path in reversed(expected.paths):
        sys.path.insert(1, path)
        os.environ["PYTHONPATH"] = path + (
            os.pathsep + os.environ["PYTHONPATH"] if os.environ.get("PYTHONPATH") else ""
        )
    device = args.device or ("cuda" if expected.is_cuda and args.level != "import" else "cpu")
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1, 2**20)
    try:
        from smokelib import machine

        info = machine.describe()
    except Exception as error:  # an image whose torch does not even import is a finding, not a crash of the suite
        events.say(
            event="verdict",
            kind="torch-broken",
            what="torch does not import: {}: {}".format(type(error).__name__, error),
        )
        return 1
    nproc = args.nproc or (len(info["gpus"]) if device == "cuda" else 2) or 1
    if args.nodes and not args.nproc:
        from smokelib.launch import read_hostfile

        nproc = sum(host["slots"] for host in read_hostfile(args.nodes))
    refused = machine.verdict(info, device, 1 if args.nodes else nproc)
    if refused:
        events.say(event="verdict", machine=info, **refused)
        print("smoke: " + refused["what"])
        return EXIT_HOST
    os.environ.update(SMOKE_DEVICE=device, SMOKE_NPROC=str(nproc), SMOKE_SEED=str(seed))
    if args.nodes:
        os.environ["SMOKE_NODES"] = os.path.abspath(args.nodes)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the environment's own pytest plugins are none of ours
    import pytest

    from smokelib import launch

    chosen = [args.level] if args.only else LEVELS[: LEVELS.index(args.level) + 1]
    files = sorted(name for name in os.listdir(HERE) if name.startswith(tuple("test_" + level for level in chosen)))
    files.sort(key=lambda name: LEVELS.index(level_of(name)))
    start = {
        "machine": info,
        "seed": seed,
        "suite": suite_hash(),
        "level": args.level,
        "device": device,
        "nproc": nproc,
        "cell_id": expected.cell_id,
        "pytest": pytest.__version__,
    }
    options = [
        "-q",
        "-rs",
        "--tb=short",
        "--assert=plain",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "--rootdir",
        HERE,
        "-c",
        os.devnull,
        "--confcutdir",
        HERE,
        "-o",
        "junit_family=xunit2",
    ]
    if args.junit:
        options += ["--junit-xml", args.junit]
    if args.keyword:
        options += ["-k", args.keyword]
    begin = time.time()
    print(
        "smoke: seed {} ({}), device {}, {} rank(s), pytest {}".format(
            seed, expected.cell_id, device, nproc, pytest.__version__
        )
    )
    code = int(
        pytest.main(
            options + [os.path.join(HERE, name) for name in files], plugins=[Reporter(events, start, launch.USED)]
        )
    )
    events.say(event="end", code=code, seconds=round(time.time() - begin, 3))
    if code in (0, 1):
        return code
    return EXIT_SUITE


if __name__ == "__main__":
    sys.exit(main())

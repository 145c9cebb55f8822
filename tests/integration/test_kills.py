"""A few kills of a small build; `make kills` runs fifty."""

import json
import signal
from dataclasses import asdict

import pytest
from kill_runs import Killer, chosen

FEW = (
    ("base", signal.SIGKILL),
    ("export", signal.SIGKILL),
    ("load", signal.SIGTERM),
    ("audit", signal.SIGKILL),
)


@pytest.fixture(scope="module")
def killer(engine, tmp_path_factory):
    made = Killer(tmp_path_factory.mktemp("kills"))
    made.reference()
    yield made
    made.close()


@pytest.mark.parametrize(("stage", "by"), FEW, ids=[f"{stage}-{by.name}" for stage, by in FEW])
def test_a_killed_run_leaves_nothing_and_the_next_ends_the_same(killer, stage, by):
    _, rng = chosen(0, seed=FEW.index((stage, by)))
    kill = killer.kill(0, stage, by, rng)
    assert not kill.faults, json.dumps(asdict(kill), indent=1)

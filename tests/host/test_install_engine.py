"""scripts/install-engine: what its functions decide, without an engine."""

import os
import subprocess
from pathlib import Path

import pytest

LIBRARY = Path(__file__).resolve().parents[2] / "scripts" / "lib"


@pytest.fixture
def free_network(tmp_path):
    """Return what finds a free network on a machine with these routes and these engines' networks."""

    def find(*routes: str, engines: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        ip = tmp_path / "ip"
        lines = "".join(
            f"echo '{route} dev x proto kernel scope link linkdown' || exit 1; sleep 0.01\n" for route in routes
        )
        ip.write_text(f"#!/bin/sh\n{lines}")  # a line at a time, as iproute2 writes them
        ip.chmod(0o755)
        for number, network in enumerate(engines):
            (tmp_path / f"e{number}").mkdir()
            (tmp_path / f"e{number}" / "network").write_text(network)
        script = f". {LIBRARY}/second.bash; second_home={tmp_path}; net=$(free_network) || exit 8; echo -n $net"
        env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], env=env, capture_output=True, text=True, check=False
        )

    return find


def test_the_first_network_is_taken_where_none_is(free_network):
    assert free_network("default via 192.0.2.1").stdout == "10.200"


def test_a_network_that_a_route_has_is_not_free(free_network):
    """A second bridge in one network gets none of its answers: names no longer resolve in its containers."""
    routes = [f"10.{n}.0.0/20" for n in range(200, 204)] + ["172.17.0.0/16", "192.0.2.0/24"]
    assert free_network("default via 192.0.2.1", *routes).stdout == "10.204"


def test_a_network_of_another_engine_is_not_free(free_network):
    assert free_network("unreachable 10.200.0.0/16", engines=("10.201",)).stdout == "10.202"


def test_no_network_is_an_error(free_network):
    done = free_network(*(f"10.{n}.0.0/20" for n in range(200, 250)))
    assert (done.returncode, done.stdout, done.stderr) == (8, "", "")


def test_without_the_routes_nothing_is_free(free_network):
    assert free_network("'; exit 1 #").returncode == 8

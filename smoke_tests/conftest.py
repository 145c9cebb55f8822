"""Fixtures of the smoke tests: what is expected, where to run, and how a figure is kept."""

import os
import zlib

import pytest

from smokelib.expectation import Expectation


@pytest.fixture(scope="session")
def expected():
    """The lock's expectation."""
    return Expectation.load()


@pytest.fixture(scope="session")
def device():
    """cuda or cpu."""
    return os.environ["SMOKE_DEVICE"]


@pytest.fixture(scope="session")
def nproc():
    """Ranks that a distributed test may start."""
    return int(os.environ["SMOKE_NPROC"])


@pytest.fixture(scope="session")
def seed():
    """This run's seed; printed at the start, so that a run can be repeated."""
    return int(os.environ["SMOKE_SEED"])


@pytest.fixture
def figure(record_property):
    """Keep a figure in the report: figure(name, value, bound=None, unit="")."""

    def keep(name, value, bound=None, unit=""):
        entry = {"name": name, "value": value}
        if bound is not None:
            entry["bound"] = bound
        if unit:
            entry["unit"] = unit
        record_property("figure", entry)

    return keep


@pytest.fixture
def table(record_property):
    """Keep a table in the report: table(title, columns, rows)."""

    def keep(title, columns, rows):
        record_property("table", {"title": title, "columns": columns, "rows": rows})

    return keep


@pytest.fixture
def close(figure):
    """Assert that a result is within a stated relative error of its reference, and keep the error."""
    from smokelib.numerics import relative_error

    def check(name, out, ref, bound):
        error = relative_error(out, ref)
        figure(name, error, bound=bound)
        assert error <= bound, "{}: relative error {:.3g} where {:.3g} is allowed".format(name, error, bound)
        return error

    return check


@pytest.fixture
def need(expected):
    """Skip, with the reason, a test of a component that the lock does not list."""

    def check(component):
        if not expected.lists(component):
            pytest.skip("the lock lists no {}".format(component))
        return expected.component(component)

    return check


@pytest.fixture
def gpu(device, request, seed):
    """Skip on a CPU; on a GPU, draw this test's random numbers from the run's seed and free what it leaves."""
    if device != "cuda":
        pytest.skip("needs a GPU, and the run is on a CPU")
    import torch

    torch.manual_seed(seed + zlib.crc32(request.node.nodeid.encode()) % 100003)
    # A reference in TF32 would be no reference.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    yield "cuda"
    torch.cuda.empty_cache()

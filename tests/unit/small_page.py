"""A page of few releases, for tests of what the page holds and of what a browser makes of it."""

import dataclasses
from datetime import UTC, datetime

from envbuild.curate.page import Page, build_page
from envbuild.evidence.records import Evidence
from envbuild.matrix.load import Matrix, load_matrix
from envbuild.stacks.load import load_stack

KEPT = {
    "cuda": {"12.6", "13.0", "cpu"},
    "torch": {"2.8.0+cu126", "2.7.1+cu126", "2.11.0+cu130", "2.13.0+cpu", "2.7.0a0+7c8ec84dab"},
    "te": {"1.9.0", "2.6.0", "2.12.0", "ngc"},
    "python": {"3.9", "3.10", "3.11", "3.12"},
    "gpu": {"sm_90", "sm_70"},
}


def record(**changes) -> Evidence:
    fields = {
        "date": datetime(2026, 11, 17, 9, 0, tzinfo=UTC),
        "cell_id": "cu130-py311-torch2.11.0-te2.12.0-x",
        "cell": {"cuda": "13.0", "torch": "2.11.0+cu130", "te": "2.12.0", "gpu": "sm_90", "os": "debian12"},
        "lock_digest": None,
        "target": {"kind": "image", "digest": "sha256:aa"},
        "suite": "sha256:22",
        "level": "distributed",
        "device": "cuda",
        "nproc": 1,
        "nodes": 1,
        "gpus": ({"name": "NVIDIA H200", "sm": "90", "memory_gib": 139.8, "count": 1},),
        "driver": "580.95.05",
        "software": {"python": "3.11.2"},
        "launchers": (),
        "seed": 7,
        "verdict": "passed",
        "reason": "",
        "seconds": 60.0,
        "tests": (),
        "id": "sha256:0123",
    }
    return Evidence.model_validate(fields | changes)


def few_releases() -> Matrix:
    """Return the matrix with few releases of what the tables show."""
    real = load_matrix()
    return dataclasses.replace(
        real,
        releases={a: tuple(r for r in rs if r.version in KEPT.get(a, {r.version})) for a, rs in real.releases.items()},
    )


def small_page(matrix: Matrix) -> Page:
    """Return its page, with one stack and two records."""
    records = [record(), record(verdict="failed", reason="boom\nmore", date=datetime(2026, 11, 16, tzinfo=UTC))]
    return build_page(matrix, stacks=[load_stack("megatron-gpt3")], records=records, suite="sha256:22")

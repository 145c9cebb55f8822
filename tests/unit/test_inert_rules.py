"""Inert rules: each decides something, and on sm_120 Transformer Engine's fused attention is not left out in silence."""

import dataclasses

import pytest

from envbuild.errors import NoCellError
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.matrix.spec import matches, version_key
from envbuild.solver.solve import solve

MATRIX = load_matrix()
INERT = [rule for rule in MATRIX.rules if rule.kind == "inert"]


def request(**asked):
    return Request(pins=tuple(Pin(axis=a.replace("_", "-"), spec=spec, origin=f"--{a}") for a, spec in asked.items()))


def violations(rule):
    """Return requests that a rule refuses: what it speaks of, with each release that it does not allow."""
    asked = dict(rule.when)
    if not rule.needs:
        return [asked]
    return [
        asked | {axis: release.version}
        for axis, spec in rule.needs.items()
        for release in MATRIX.releases[axis]
        if not matches(MATRIX.axes[axis], spec, release)
        and (axis not in asked or matches(MATRIX.axes[axis], asked[axis], release))
    ]


@pytest.mark.parametrize("rule", INERT, ids=[rule.id for rule in INERT])
def test_an_inert_rule_is_what_refuses_some_request(rule):
    """Without it there would be a cell: no other rule says the same already, and what it speaks of exists."""
    without = dataclasses.replace(MATRIX, rules=tuple(r for r in MATRIX.rules if r.id != rule.id))
    for asked in violations(rule):
        with pytest.raises(NoCellError):
            solve(MATRIX, request(**asked))
        try:
            solve(without, request(**asked))
        except NoCellError:
            continue
        return
    pytest.fail(f"{rule.id} never decides")


def test_fused_attention_on_sm_120_has_its_cudnn():
    """TE 2.14's fused_attn.cpp: `sm_arch_ == 120` and a cuDNN before 9.18.1 is no backend."""
    with pytest.raises(NoCellError, match="te-fused-sm120"):
        solve(MATRIX, request(gpu="rtx5090", te="2.16", torch="2.10"))
    found = 0
    for release in MATRIX.releases["te"]:
        version = version_key(release.version)
        if version is None or "base" in release.needs:
            continue
        for cuda in ("12.8", "12.9", "13.0", "13.2"):
            try:
                versions = solve(MATRIX, request(gpu="rtx5090", te=release.version, cuda=cuda)).cell.versions
            except NoCellError:
                continue
            found += 1
            newer = version_key(versions["cudnn"]) >= version_key("9.18.1")
            assert newer or version < version_key("2.14"), (release.version, cuda, versions["cudnn"])
    assert found > 40


@pytest.mark.parametrize("gpu", ["b200", "h100", "a100"])
def test_no_other_gpu_is_held_to_it(gpu):
    versions = solve(MATRIX, request(gpu=gpu, te="2.16", torch="2.10")).cell.versions
    assert version_key(versions["cudnn"]) < version_key("9.18.1")

"""Which published image a request gets: the solver's own choice, among what is there."""

import datetime as dt
import json

import pytest
from cell_inputs import whole_cell

from envbuild.catalog.choose import Machine, Wanted, nearest_published, offers
from envbuild.catalog.model import Catalog, Entry, read_body
from envbuild.errors import UsageError
from envbuild.evidence.refs import evidence_refs
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.pipeline.cataloged import describe_nearest
from envbuild.solver.solve import solve

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def entry(**axes) -> Entry:
    return entry_of(solve(load_matrix(), wanted(**axes).request, evidence_refs()).cell.of_image)


def entry_of(cell, *, seed="0", **more) -> Entry:
    values = {
        "id": cell.id,
        "cell": dict(cell.versions),
        "commits": dict(cell.commits),
        "flavor": "runtime",
        "platform": "linux/arm64" if cell.arch == "aarch64" else "linux/amd64",
        "sms": (cell.versions["gpu"],) if "gpu" in cell.versions else (),
        "lock": "sha256:" + "1" * 64,
        "lock_artifact": "sha256:" + "2" * 64,
        "image": "sha256:" + seed * 64,
        "size": 1,
        "release": "1.0",
        "added": NOW,
    }
    return Entry.model_validate(values | more)


def test_a_cell_with_every_component_and_a_stack_of_another_pin_fit_into_a_catalogue():
    cell = whole_cell()
    assert len(cell.id) > 150
    made = entry_of(cell, stack="llm-jp@main-2")
    read = read_body(Catalog(version=1, created=NOW, entries=(made,)).body())
    assert read.entries[0].id == cell.id


def wanted(machine=None, *, prefer="proven", **axes) -> Wanted:
    pins = tuple(Pin(axis=a.replace("_", "-"), spec=s, origin=f"--{a}") for a, s in axes.items())
    return Wanted(request=Request(pins=pins, prefer=prefer), machine=machine or Machine())


def chosen(want, *entries):
    return [offer.entry for offer in offers(load_matrix(), want, entries, evidence_refs())]


@pytest.fixture(scope="module")
def some():
    return {
        "cpu": entry(cuda="cpu"),
        "new": entry(cuda="13.0", gpu="h100"),
        "old": entry(cuda="12.6", gpu="h100", te="2.6"),
        "a100": entry(cuda="12.6", gpu="a100"),
        "noapex": entry(cuda="13.0", gpu="h100", apex="none"),
    }


def test_what_resolve_chooses_is_chosen_where_it_is_published(some):
    """For the same flags, and whatever else is there, resolve's own cell comes first."""
    for axes in ({"cuda": "13.0", "gpu": "h100"}, {"cuda": "12.6", "te": "2.6", "gpu": "h100"}, {"cuda": "cpu"}):
        want = wanted(**axes)
        own = solve(load_matrix(), want.request, evidence_refs()).cell.id
        assert chosen(want, *some.values())[0].id == own


@pytest.mark.parametrize("prefer", ["proven", "newest"])
def test_of_two_the_solvers_order_decides(some, prefer):
    """Whatever their order in the catalogue; the cell that resolve chooses comes first among all of them."""
    want = wanted(prefer=prefer)
    names = [name for name in some if name != "cpu"]
    forward = chosen(want, *(some[name] for name in names))
    assert forward == chosen(want, *(some[name] for name in reversed(names)))
    assert len(forward) == len(names)
    best = solve(load_matrix(), want.request, evidence_refs())
    with_best = chosen(want, *forward, entry_of(best.cell.of_image, seed="9"))
    assert with_best[0].id == best.cell.id


def test_a_pin_keeps_others_out(some):
    assert [e.id for e in chosen(wanted(te="2.6", gpu="h100"), *some.values())] == [some["old"].id]
    assert [e.id for e in chosen(wanted(cuda="cpu"), *some.values())] == [some["cpu"].id]
    assert chosen(wanted(cuda="12.9"), *some.values()) == []
    assert some["noapex"].id in {e.id for e in chosen(wanted(apex="none"), *some.values())}
    assert all("apex" not in e.cell for e in chosen(wanted(apex="none"), *some.values()))


def test_a_component_is_left_out_only_where_nothing_better_is_there(some):
    both = chosen(wanted(cuda="13.0"), some["noapex"], some["new"])
    assert [e.id for e in both] == [some["new"].id, some["noapex"].id]
    assert [e.id for e in chosen(wanted(cuda="13.0"), some["noapex"])] == [some["noapex"].id]


def test_the_machines_gpu_and_driver_decide(some):
    every = list(some.values())
    hopper = Machine(gpus=frozenset({"sm_90"}), driver="580.65.06")
    assert "sm_80" not in {e.cell.get("gpu") for e in chosen(wanted(hopper), *every)}
    ampere = Machine(gpus=frozenset({"sm_80"}), driver="580.65.06")
    assert chosen(wanted(ampere), *every)[0].id == some["a100"].id
    # a driver of CUDA 12 does not start CUDA 13; what is for the CPU asks for none
    older = Machine(gpus=frozenset({"sm_90"}), driver="560.35.05")
    found = [e.id for e in chosen(wanted(older), *every)]
    assert found[0] == some["old"].id
    assert some["new"].id not in found
    assert some["cpu"].id in found
    # what a flag names is asked for whatever this machine has
    assert chosen(wanted(hopper, gpu="a100"), *every)[0].id == some["a100"].id


def test_stack_flavor_and_source_are_not_mixed(some):
    new = some["new"]
    devel = entry(flavor="devel").model_copy(update={"flavor": "devel"})
    assert chosen(wanted(), devel) == []
    assert chosen(wanted(flavor="devel"), devel) == [devel]
    assert chosen(wanted(flavor="devel"), new) == []
    stack = new.model_copy(update={"stack": "x", "stack_digest": "d"})
    assert chosen(wanted(), stack) == []
    plain = wanted().request
    assert chosen(Wanted(request=plain, stack="x", stack_digest="d"), stack, new) == [stack]
    assert chosen(Wanted(request=plain, stack="x", stack_digest="e"), stack, new) == []
    assert chosen(Wanted(request=plain, te_source="git"), new) == []
    assert chosen(Wanted(request=plain, te_source="pypi"), new) == [new]


def test_another_processor_is_asked_for(some):
    arm = entry(gpu="gh200")
    assert arm.platform == "linux/arm64"
    assert chosen(wanted(), arm) == []
    assert chosen(wanted(gpu="gh200"), arm, some["new"]) == [arm]
    assert chosen(wanted(arch="aarch64"), arm, some["new"]) == [arm]


def test_versions_that_the_matrix_does_not_have_are_passed_over(some):
    new = some["new"]
    later = new.model_copy(update={"cell": {**new.cell, "torch": "99.0.0+cu130"}})
    axis = new.model_copy(update={"cell": {**new.cell, "other": "1"}})
    assert chosen(wanted(), later, axis, new) == [new]


def test_an_unknown_version_is_a_usage_error(some):
    with pytest.raises(UsageError, match="no release"):
        chosen(wanted(te="99"), *some.values())


def test_the_newer_of_two_with_one_cell(some):
    later = some["new"].model_copy(update={"added": NOW + dt.timedelta(days=1), "image": "sha256:" + "5" * 64})
    assert chosen(wanted(), some["new"], later) == [later, some["new"]]


def test_the_nearest_and_what_differs(some):
    near = nearest_published(load_matrix(), wanted(cuda="12.6", te="2.12"), list(some.values()))
    assert [len(one.differs) for one in near] == [1, 1, 1]
    found = {
        one.entry.id: dict(one.differs)
        for one in nearest_published(load_matrix(), wanted(cuda="12.6", te="2.12"), list(some.values()), count=9)
    }
    assert found[some["old"].id] == {"te": ("2.12", some["old"].cell["te"])}


def test_the_nearest_names_what_it_has_unasked():
    few = entry(cuda="13.0", te="2.12", gpu="h100", flash_attn_hopper="3.0.0", fa3_kernels="training")
    (near,) = nearest_published(load_matrix(), wanted(cuda="13.0", flash_attn_hopper="3.0.0"), [few])
    assert near.differs == {"fa3-kernels": ("", "training")}
    assert "fa3-kernels: training, which was not requested" in describe_nearest([near])
    (near,) = nearest_published(load_matrix(), wanted(cuda="13.0", fa3_kernels="training"), [few])
    assert near.differs == {"flash-attn-hopper": ("", "3.0.0")}


def test_of_two_as_near_the_closer_release_comes_first(some):
    near = nearest_published(load_matrix(), wanted(cuda="12.9"), list(some.values()), count=9)
    assert [one.differs["cuda"][1] for one in near] == ["13.0", "13.0", "12.6", "12.6", "cpu"]
    (last,) = nearest_published(load_matrix(), wanted(te="2.6"), [some["cpu"]])
    assert last.differs == {"te": ("2.6", "none")}


def wrong():
    good = Catalog(version=3, created=NOW, entries=(entry(cuda="cpu"),)).model_dump(mode="json")
    one = good["entries"][0]
    yield {**good, "format": 2}
    yield {**good, "version": 0}
    yield {**good, "created": "2026-01-01T00:00:00"}
    yield {**good, "more": 1}
    yield {**good, "entries": [one, one]}
    yield {**good, "entries": [{**one, "id": "../../x"}]}
    yield {**good, "entries": [{**one, "id": one["id"][:-1] + "0"}]}
    yield {**good, "entries": [{**one, "image": "latest"}]}
    yield {**good, "entries": [{**one, "lock": None}]}
    yield {**good, "entries": [{**one, "cell": {**one["cell"], "torch": "1; rm"}}]}
    yield {**good, "entries": [{**one, "flavor": "other"}]}
    yield {**good, "entries": [{**one, "size": -1}]}
    yield {**good, "entries": [{**one, "signers": ["a\nb"]}]}
    yield []
    yield None


@pytest.mark.parametrize("value", list(wrong()), ids=range(15))
def test_what_is_no_catalogue(value):
    with pytest.raises(ValueError, match=r".+"):
        read_body(json.dumps(value).encode())


def test_a_catalogue_goes_both_ways(some):
    catalog = Catalog(version=3, created=NOW, entries=tuple(some.values()))
    again = read_body(catalog.body())
    assert again.body() == catalog.body()
    assert {e.key for e in again.entries} == {e.key for e in catalog.entries}
    later = some["new"].model_copy(update={"image": "sha256:" + "7" * 64})
    changed = again.with_entries((later,), now=NOW)
    assert changed.version == 4
    assert len(changed.entries) == len(catalog.entries)
    assert later in changed.entries
    assert some["new"] not in changed.entries

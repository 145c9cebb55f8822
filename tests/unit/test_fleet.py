"""A mixed fleet: one cell, lock and image for GPUs of several architectures."""

import itertools
import json
from types import SimpleNamespace

import pytest
from cell_inputs import complete, inputs_for
from click.testing import CliRunner
from test_catalog_choose import chosen, entry, entry_of, wanted
from test_claims import SOFT, VERSIONS, record

from envbuild.catalog.choose import Machine
from envbuild.cli.resolve import resolve as resolve_command
from envbuild.components import COMPONENTS
from envbuild.errors import NoCellError, UsageError
from envbuild.evidence.claims import claim_of, versions_on
from envbuild.evidence.place import differences
from envbuild.evidence.refs import evidence_refs
from envbuild.lock.inputs import inputs_of
from envbuild.lock.model import Lock
from envbuild.matrix.cell import Cell, Pin, Request
from envbuild.matrix.driver import carries_compat, driver_verdict
from envbuild.matrix.fleet import GPU, fleet_of, gpus_in
from envbuild.matrix.load import load_matrix
from envbuild.matrix.spec import matches
from envbuild.pipeline.cataloged import _of_lock
from envbuild.pipeline.wheel_index import indexes_of
from envbuild.pipeline.wheels import ListedWheel
from envbuild.plan.dockerfile import dockerfile
from envbuild.plan.plan import plan_of
from envbuild.plan.shell import script
from envbuild.run.gpus import after_run, sms_in_id, unserved
from envbuild.solver.asked import read_request
from envbuild.solver.nearest import nearest
from envbuild.solver.order import best_values, by_clingo
from envbuild.solver.proof import Proof
from envbuild.solver.propagation import propagate
from envbuild.solver.solve import solve
from envbuild.verify.binaries import image
from envbuild.verify.binaries.gpu_code import Code

FLEET = "sm_80+sm_90+sm_100"


def pins(**axes) -> tuple[Pin, ...]:
    return tuple(Pin(axis=a.replace("_", "-"), spec=s, origin=f"--{a.replace('_', '-')}") for a, s in axes.items())


def solved(**axes):
    return solve(load_matrix(), Request(pins=pins(**axes)))


@pytest.mark.parametrize(
    "text", ["a100,h100,b200", "b200, H100 ,a100", "sm_80,sm_90,sm_100", "8.0,9.0,10.0", FLEET, "a100,h100,h200,b200"]
)
def test_the_same_gpus_are_one_fleet_however_they_are_named(text):
    cell = solved(cuda="13.0", gpu=text).cell
    assert cell.versions["gpu"] == FLEET
    assert cell.id == solved(cuda="13.0", gpu="a100,h100,b200").cell.id
    assert "-sm80-sm90-sm100-" in cell.id


def test_gpus_of_one_architecture_are_the_cell_of_that_architecture():
    assert solved(cuda="13.0", gpu="h100,h200").cell == solved(cuda="13.0", gpu="h100").cell


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a100,", "an empty place between its commas"),
        ("a100,h10", "'h10' in 'a100,h10' names no GPU"),
        ("a100,any", "'any' in 'a100,any' names no GPU"),
        ("a100,none", "'none' in"),
        ("a100,sm_9*", "'sm_9*' in"),
        ("a100,gh200", "one image cannot serve hosts of two architectures"),
    ],
)
def test_what_is_no_fleet_is_refused_by_name(text, says):
    with pytest.raises(UsageError) as caught:
        solved(cuda="13.0", gpu=text)
    assert says in caught.value.what


def test_a_fleet_on_arm_hosts_is_one_where_every_host_is_stated_to_be_arm():
    cell = solved(cuda="13.0", gpu="gh200,gb200").cell
    assert (cell.arch, cell.versions["gpu"]) == ("aarch64", "sm_90+sm_100")
    assert solved(cuda="13.0", gpu="a100,gh200", arch="aarch64").cell.versions["gpu"] == "sm_80+sm_90"


def test_two_requests_for_different_fleets_contradict_each_other():
    two = (*pins(cuda="13.0", gpu="a100,h100"), Pin(axis="gpu", spec=FLEET, origin="the lock"))
    with pytest.raises(UsageError, match="the lock asks for"):
        solve(load_matrix(), Request(pins=two))
    with pytest.raises(NoCellError):
        solve(load_matrix(), Request(pins=(*two[:2], Pin(axis="gpu", spec="h100", origin="stack x"))))


def test_the_nearest_cells_keep_the_fleet_or_one_of_its_gpus():
    found = nearest(load_matrix(), Request(pins=pins(cuda="12.6", gpu="a100,h100,b200")), 2)
    assert [list(near.changed) for near in found] == [["cuda"], ["gpu"]]
    assert found[0].cell.versions["gpu"] == FLEET
    assert found[1].cell.versions["gpu"] in {"sm_80", "sm_90"}


@pytest.mark.parametrize("cuda", ["12.6", "13.0"])
@pytest.mark.parametrize("gpus", [("v100", "a100"), ("t4", "l40", "h100"), ("a100", "h100", "b200")])
def test_a_fleets_cell_is_a_cell_of_each_of_its_gpus(cuda, gpus):
    """Where one GPU has no cell with that CUDA, the fleet has none; else the same versions are a cell of every GPU."""

    def alone(gpu):
        try:
            return solved(cuda=cuda, gpu=gpu)
        except NoCellError:
            return None

    try:
        cell = solved(cuda=cuda, gpu=",".join(gpus)).cell
    except NoCellError:
        # one has no cell at all, or what is left of torch differs between them
        singles = [alone(gpu) for gpu in gpus]
        shared = None not in singles and {each.cell.versions["torch"] for each in singles}
        assert not shared or len(shared) > 1
        return
    for gpu in gpus:
        exact = {axis.replace("-", "_"): version for axis, version in cell.versions.items() if axis != "gpu"}
        assert solved(**exact, gpu=gpu).cell.versions | {"gpu": ""} == dict(cell.versions) | {"gpu": ""}


def test_every_rule_about_a_gpu_holds_for_each_gpu_of_a_fleet():
    """Masks against one release at a time, for every constraint that the matrix states on the axis gpu."""
    matrix = load_matrix()
    axis, listed = matrix.axes["gpu"], matrix.releases["gpu"]
    specs = {spec for rule in matrix.rules for spec in (rule.when.get("gpu"), rule.needs.get("gpu")) if spec}
    assert len(specs) > 10
    for members in [*itertools.combinations(listed, 2), listed[:3]]:
        fleet = fleet_of(members)
        compiled = read_request(matrix, Request(pins=pins(gpu=fleet.version, arch="aarch64"))).compiled
        number = compiled.number["gpu"]
        bit = 1 << compiled.position[number][fleet.version]
        for spec in specs:
            held = [matches(axis, spec, release) for release in members]
            assert bool(compiled.mask(number, spec) & bit) == all(held), (fleet.version, spec)
            assert bool(compiled.touched(number, spec) & bit) == any(held), (fleet.version, spec)


@pytest.mark.parametrize(
    "axes", [{"gpu": FLEET}, {"gpu": "t4,l40,h100", "driver": "550.54.14", "flash_attn_hopper": "auto"}]
)
def test_both_searches_choose_the_same_cell_of_a_fleet(axes):
    asked = read_request(load_matrix(), Request(pins=pins(**axes)))
    records = evidence_refs()
    found = best_values(asked, records, asked.compiled.domains(asked.pinned()))
    domains = asked.compiled.domains(asked.pinned())
    assert propagate(asked.compiled, domains) is None
    assert found == by_clingo(asked, records, domains)


def test_the_driver_must_know_each_gpu():
    matrix = load_matrix()
    with pytest.raises(NoCellError) as caught:
        solved(cuda="12.8", gpu="a100,h100,b200", driver="550.54.14")
    assert "Blackwell is known to driver branch 570" in caught.value.what
    assert solved(cuda="12.8", gpu="a100,h100", driver="550.54.14").cell
    cell = solved(cuda="12.8", gpu="a100,h100,b200").cell
    assert driver_verdict(matrix, cell, "565.57.01").why.startswith("sm_100 is known to driver branch 570")
    assert "sm_100 needs the driver of NVIDIA's open kernel modules" in driver_verdict(matrix, cell, "570.86.15").why


def test_cuda_compat_is_for_a_fleet_of_data_center_gpus_alone():
    matrix = load_matrix()
    assert carries_compat(matrix, solved(cuda="13.0", gpu="a100,h100", driver="535.54.03").cell)
    for gpus in ("a100,rtx4090", "h100,rtxpro6000"):
        with pytest.raises(NoCellError):
            solved(cuda="13.0", gpu=gpus, driver="570.86.15" if "pro" in gpus else "535.54.03")


def test_flash_attention_3_is_for_the_hopper_gpus_of_a_fleet():
    """One GPU that runs it is enough; a fleet without one refuses it, as a single GPU does."""
    cell = solved(cuda="13.0", gpu="a100,h100", flash_attn_hopper="auto").cell
    assert "flash-attn-hopper" in cell.versions
    for gpus in ("a100,b200", "a100"):
        with pytest.raises(NoCellError):
            solved(cuda="13.0", gpu=gpus, flash_attn_hopper="auto")


def test_the_sms_of_a_component_are_those_of_its_rules():
    """`sms` of a component and the rules that refuse it elsewhere state one fact."""
    matrix = load_matrix()
    partial = {axis: component.sms for axis, component in COMPONENTS.items() if component.sms}
    assert partial == {"flash-attn-hopper": ("90",), "fa3-kernels": ("90",)}
    for axis, sms in partial.items():
        if chosen := COMPONENTS[axis].chooses:
            assert [rule.with_ for rule in matrix.rules if rule.when == {axis: "any"} and rule.with_] == [(chosen,)]
        of = chosen or axis
        needed = [rule.needs["gpu"] for rule in matrix.rules if rule.when == {of: "any"} and "gpu" in rule.needs]
        served = [r for r in matrix.releases["gpu"] if all(matches(matrix.axes["gpu"], spec, r) for spec in needed)]
        assert tuple(release.facts.sm for release in served) == sms


def fleet_plan(gpus="a100,h100,b200", **more):
    inputs = inputs_for(cuda="13.0", gpu=gpus, **more)
    return plan_of(load_matrix(), complete(inputs))


def test_what_is_compiled_gets_every_architecture_and_ptx_of_the_newest():
    made = fleet_plan(
        flash_attn="auto", flash_attn_hopper="auto", mamba_ssm="auto", causal_conv1d="auto", grouped_gemm="auto"
    )
    wheels = {wheel.axis: wheel for wheel in made.components}
    assert wheels["apex"].environment["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0;10.0+PTX"
    assert wheels["grouped-gemm"].environment["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0;10.0+PTX"
    assert wheels["flash-attn"].environment["FLASH_ATTN_CUDA_ARCHS"] == "80;90;100"
    for axis in ("flash-attn", "mamba-ssm", "causal-conv1d"):
        assert f"\nsh /run/envbuild/recipe/build-templates build-for-sms 80,90,100 {axis} " in dockerfile(made)
        assert f"    recipe build-templates build-for-sms 80,90,100 {axis} " in script(made)
    assert dict(wheels["flash-attn-hopper"].environment) == {
        "FLASH_ATTENTION_FORCE_BUILD": "TRUE",
        "NVCC_THREADS": "1",
        "FLASH_ATTENTION_DISABLE_SM80": "TRUE",
    }


def test_transformer_engine_from_git_gets_every_architecture():
    inputs = inputs_for(cuda="12.8", gpu="a100,h100,b200", te="2.6")
    git = inputs_of(load_matrix(), inputs.cell, te_source="git")
    assert next(w for w in git.components if w.axis == "te").environment["NVTE_CUDA_ARCHS"] == "80;90;100"


def test_the_architectures_are_in_the_keys_of_what_is_compiled_for_them():
    keys = {gpus: {s.name: s.key for s in fleet_plan(gpus, mamba_ssm="auto").stages} for gpus in ("h100", "a100,h100")}
    one, fleet = keys.values()
    assert one["wheel-apex"] != fleet["wheel-apex"]
    assert one["wheel-mamba-ssm"] != fleet["wheel-mamba-ssm"]
    assert one["wheel-te"] == fleet["wheel-te"], "C++ alone: the kernels are in the core wheel, for every GPU"
    assert one["torch"] == fleet["torch"]


def test_a_fleets_lock_names_it_and_is_read_again():
    locked = complete(inputs_for(cuda="13.0", gpu="a100,h100,b200"))
    lock = Lock.model_validate_json(locked.lock.model_dump_json())
    assert lock == locked.lock
    assert lock.cell["gpu"] == FLEET
    assert lock.as_cell.id.count("sm80-sm90-sm100") == 1
    assert _of_lock(locked)["sms"] == ("sm_80", "sm_90", "sm_100")
    again = solve(
        load_matrix(), Request(pins=tuple(Pin(axis=a, spec=s, origin="the lock") for a, s in lock.cell.items()))
    )
    assert again.cell.of_image.id == lock.as_cell.id


@pytest.mark.parametrize("gpu", ["sm_90+sm_80", "sm_80+sm_80", "sm_80+sm_99", "sm_80+", "sm_80+h100"])
def test_a_lock_of_a_fleet_in_another_spelling_is_of_no_listed_gpu(gpu):
    assert not load_matrix().has(GPU, gpu)
    with pytest.raises(KeyError):
        load_matrix().release(GPU, gpu)


def test_the_image_says_which_gpus_a_component_is_for_only_where_that_is_not_all_of_them():
    def stated(gpus):
        text = fleet_plan(gpus, flash_attn_hopper="auto").lists["lock/expected.json"]
        return {axis: each.get("sms") for axis, each in json.loads(text)["components"].items()}

    assert {axis: sms for axis, sms in stated("a100,h100").items() if sms} == {"flash-attn-hopper": ["90"]}
    assert set(stated("h100").values()) == {None}


def fleet_claim(kept, fleet="sm_80+sm_90", **more):
    versions = {**VERSIONS, "gpu": fleet, **more}
    return claim_of(Cell(versions=versions), [SimpleNamespace(id=kept.id)], [kept])


def test_a_run_on_one_gpu_of_a_fleet_is_claimed_for_that_gpu_alone():
    fleet = {**VERSIONS, "gpu": "sm_80+sm_90"}
    found = fleet_claim(record(cell=fleet, cell_id=Cell(versions=fleet).id))
    assert found.proof is Proof.ELSEWHERE
    assert {gpu: each.proof for gpu, each in found.gpus.items()} == {"sm_80": Proof.ELSEWHERE, "sm_90": Proof.HERE}
    assert found.text.startswith("sm_80: run elsewhere: not run on sm_80; run on sm_90: ")
    assert "sm_90: run on this GPU: " in found.text
    assert found.as_json()["gpus"]["sm_90"]["claim"] == "run-on-this-gpu"
    assert found.components["te"].proof is Proof.ELSEWHERE
    assert found.components["te"].text == "sm_80: run elsewhere (sm_90); sm_90: run on this GPU"


def test_a_run_of_a_fleets_image_counts_on_the_gpus_that_it_is_for():
    fleet = {**VERSIONS, "gpu": "sm_80+sm_90"}
    assert differences(record(cell=fleet), VERSIONS) == {}
    assert differences(record(cell={**VERSIONS, "gpu": "sm_80+sm_100"}), VERSIONS) == {
        "target": "compiled for sm_80, sm_100"
    }


def test_a_component_for_some_gpus_is_in_the_claims_of_those_alone():
    fleet = {**VERSIONS, "gpu": "sm_80+sm_90", "flash-attn-hopper": "3.0.0"}
    assert "flash-attn-hopper" not in versions_on(fleet, "sm_80")
    assert versions_on(fleet, "sm_90") == {**fleet, "gpu": "sm_90"}
    found = fleet_claim(record(), **{"flash-attn-hopper": "3.0.0"})
    assert "flash-attn-hopper" not in found.gpus["sm_80"].components
    assert found.components["flash-attn-hopper"].text.startswith("sm_90: ")


def test_a_cell_of_one_gpu_says_nothing_by_gpu():
    found = claim_of(Cell(versions={**SOFT, **VERSIONS}), [], [])
    assert "gpus" not in found.as_json()


def test_resolve_prints_a_fleet_and_what_is_known_of_each_gpu():
    ran = CliRunner().invoke(resolve_command, ["--cuda", "13.0", "--gpu", "a100,h100,b200", "--json"])
    assert ran.exit_code == 0
    answer = json.loads(ran.stdout)
    assert list(answer["standing"]["gpus"]) == ["sm_80", "sm_90", "sm_100"]


@pytest.fixture(scope="module")
def published():
    fleet = entry_of(solved(cuda="13.0", gpu="a100,h100").cell.of_image, seed="7", sms=("sm_80", "sm_90"))
    return {"fleet": fleet, "b200": entry(cuda="13.0", gpu="b200"), "h100": entry(cuda="13.0", gpu="h100")}


def test_a_machine_finds_the_fleets_image_that_is_for_its_gpu(published):
    every = (published["fleet"], published["b200"])
    ids = {sm: [e.id for e in chosen(wanted(Machine(gpus=frozenset({sm}), driver="580.65.06")), *every)]
           for sm in ("sm_80", "sm_90", "sm_100", "sm_75")}  # fmt: skip
    fleet, other = published["fleet"].id, published["b200"].id
    assert ids == {"sm_80": [fleet], "sm_90": [fleet], "sm_100": [other], "sm_75": []}


def test_the_image_of_the_one_gpu_comes_before_the_fleets(published):
    hopper = Machine(gpus=frozenset({"sm_90"}), driver="580.65.06")
    found = [e.id for e in chosen(wanted(hopper), published["fleet"], published["h100"])]
    assert found == [published["h100"].id, published["fleet"].id]


def test_a_request_that_names_gpus_gets_the_image_for_just_those(published):
    every = tuple(published.values())
    assert [e.id for e in chosen(wanted(gpu="a100,h100"), *every)] == [published["fleet"].id]
    assert [e.id for e in chosen(wanted(gpu="h100"), *every)] == [published["h100"].id]
    assert chosen(wanted(gpu="a100,b200"), *every) == []


def test_an_entry_of_a_fleet_that_this_matrix_does_not_know_fits_nothing(published):
    strange = published["fleet"].model_copy(update={"cell": {**published["fleet"].cell, "gpu": "sm_80+sm_999"}})
    assert chosen(wanted(), strange) == []


def test_a_cells_id_says_which_gpus_its_image_is_for():
    assert sms_in_id(solved(cuda="13.0", gpu="a100,h100,b200").cell.id) == (80, 90, 100)
    assert sms_in_id(solved(cuda="13.0", gpu="h100").cell.id) == (90,)
    assert sms_in_id(solved(cuda="cpu").cell.id) == ()


def test_a_machine_with_another_gpu_is_named_before_a_run():
    text = unserved((80, 90, 100), [("NVIDIA T4", "75"), ("NVIDIA A100", "80")])
    assert text.startswith(
        "the image is compiled for sm_80, sm_90 and sm_100, and this machine has NVIDIA T4 (sm_75): "
    )
    assert unserved((80, 90), [("NVIDIA A100", "80"), ("old", None)]) == ""
    assert unserved((), [("NVIDIA T4", "75")]) == ""


def test_a_run_of_the_smoke_tests_says_which_gpus_it_leaves_open():
    seen = [{"name": "NVIDIA H200", "sm": "90"}] * 2
    assert (
        after_run({"gpu": FLEET}, seen) == "this run proves nothing for sm_80 and sm_100, which the image is for, too"
    )
    assert after_run({"gpu": "sm_90"}, seen) == ""
    assert after_run({"gpu": FLEET}, []) == ""
    assert after_run({"gpu": "sm_80"}, seen).startswith(
        "the image is compiled for sm_80, and this machine has NVIDIA H200"
    )


def test_gpus_in_a_cell():
    assert gpus_in({"gpu": FLEET}) == ("sm_80", "sm_90", "sm_100")
    assert gpus_in({}) == ()


def listed(sha256: str, *sms: int) -> ListedWheel:
    return ListedWheel(
        kept=SimpleNamespace(
            record=SimpleNamespace(sha256=sha256), inputs=SimpleNamespace(torch="2.11.0+cu130"), key=sha256
        ),
        file=SimpleNamespace(name="apex-1.whl"),
        codes=tuple(Code(sm=sm, suffix="", ptx=False) for sm in sms),
    )


def test_an_index_of_wheels_has_the_one_for_a_gpu_alone_before_the_fleets():
    one, fleet = listed("1", 90), listed("2", 80, 90, 100)
    indexes, _ = indexes_of([fleet, one])
    assert {index.sm: index.wheels for index in indexes} == {80: (fleet,), 90: (one,), 100: (fleet,)}


@pytest.mark.parametrize(
    ("gpu", "sms"),
    [
        (FLEET, (80, 90, 100)),
        ("sm_90", (90,)),
        ("", ()),
        ("sm_80+" * 30 + "sm_90", ()),
        ("sm_80+sm_x", ()),
        ("h100", ()),
    ],
)
def test_the_audit_of_an_image_asks_for_each_gpu_of_its_cell(monkeypatch, gpu, sms):
    asked = []
    monkeypatch.setattr(image, "examine", lambda files, expectation: asked.append(expectation) or ())
    components = {
        "te": {"distribution": "transformer_engine_torch"},
        "flash-attn-hopper": {"distribution": "flash_attn_3", "sms": ["90"]},
    }
    cell = {"cuda": "13.0", **({"gpu": gpu} if gpu else {})}
    expected = {"cell": cell, "components": components, "flavor": "runtime"}
    image.binary_checks(None, {"expected": expected, "built": {}}, ())
    assert asked[0].sms == sms
    assert asked[0].served == {"flash-attn-3": [90]}


def test_what_is_no_text_is_no_gpu():
    assert gpus_in({"gpu": ["sm_90"]}) == gpus_in({"gpu": None}) == gpus_in({"gpu": 90}) == gpus_in({}) == ()
    assert gpus_in({"gpu": "sm_80+sm_90"}) == ("sm_80", "sm_90")

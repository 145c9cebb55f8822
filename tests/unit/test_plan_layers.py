"""Layers of large distributions: each is made alone, with fixed times, and is the same in every image that holds it."""

import re
from collections import Counter
from datetime import UTC, datetime

import pytest
from cell_inputs import complete, inputs_for, inputs_for_stack, plan_for

from envbuild.engine.details import part_of
from envbuild.engine.exports import archive_output
from envbuild.lock.make import unlocked
from envbuild.lock.model import PythonPackage
from envbuild.matrix.load import load_matrix
from envbuild.plan.dockerfile import dockerfile
from envbuild.plan.layers import layers_of
from envbuild.plan.plan import Plan, plan_of
from envbuild.settings import Settings
from envbuild.stacks.load import load_stack

ROOT = {"cuda": "13.0", "te": "2.12", "torch": "2.11.0", "python": "3.11", "os": "debian12", "base": "debian12-root"}
TOUCHED = "find /layer -newermt 1980-01-02 -exec touch -h -d @315532800 {} +"


def packed(plan: Plan, more: dict[str, dict[str, str]] | None = None) -> Plan:
    """Return the plan with `more` distributions in its sets, by set, name and version."""
    lock = plan.lock
    sets = []
    for each in lock.python:
        found = {p.name: p for p in each.packages}
        for name, version in (more or {}).get(each.name, {}).items():
            found[name] = PythonPackage(name=name, version=version, hashes=(f"{len(name + version):064x}",))
        sets.append(each.model_copy(update={"packages": tuple(sorted(found.values(), key=lambda p: p.name))}))
    locked = complete(inputs_for(**ROOT))
    locked = type(locked)(lock=lock.model_copy(update={"python": tuple(sets)}), pylocks=locked.pylocks)
    return plan_of(load_matrix(), locked)


CLOSURE = {
    "torch": {"nvidia-cublas": "13.1.0.3", "nvidia-nvtx": "13.0.85", "filelock": "4.2", "triton": "3.6.0"},
    "env": {"onnx": "1.23.2", "einops": "0.8.2"},
}


def stages(plan: Plan) -> dict[str, str]:
    """Return the text of each stage, without its comments."""
    parts = re.split(r"^FROM ", dockerfile(plan), flags=re.MULTILINE)[1:]
    text = {}
    for part in parts:
        lines = [line for line in part.splitlines() if not line.startswith("#") and line.strip()]
        text[lines[0].split()[-1]] = "\n".join(lines)
    return text


def image_chain(plan: Plan) -> list[str]:
    """Return the stages whose steps are layers of the image, the image's own first."""
    found, name, texts = [], "image", stages(plan)
    while name in texts:
        found.append(name)
        name = texts[name].split()[0]
    return found


def test_large_distributions_have_a_layer_each_and_the_small_ones_share_one():
    plan = packed(plan_for(**ROOT), CLOSURE)
    assert {"torch-torch", "torch-nvidia-cublas", "torch-triton", "torch-rest", "env-onnx", "env-rest"} <= {
        layer.stage for layer in plan.layers
    }
    rest = next(layer for layer in plan.layers if layer.stage == "torch-rest")
    assert {"filelock", "nvidia-nvtx"} <= {line.partition("==")[0] for line in rest.requirements.splitlines()}


def test_every_locked_package_is_in_just_one_layer():
    plan = packed(plan_for(**ROOT), CLOSURE)
    held = [line for layer in plan.layers for line in layer.requirements.splitlines()]
    wanted = [f"{p.name}=={p.version}" for s in plan.lock.python if s.name in {"torch", "env"} for p in s.packages]
    assert sorted(line.split()[0] for line in held) == sorted(wanted)
    assert all("--hash=sha256:" in line for line in held)


@pytest.mark.parametrize("more", [{"te": "2.11"}, {"apex": "25.09.post20251222"}, {"gpu": "a100"}])
def test_a_layer_is_made_the_same_way_whatever_else_is_in_the_cell(more):
    one, other = packed(plan_for(**ROOT), CLOSURE), packed(plan_for(**ROOT | more), CLOSURE)
    before, after = stages(one), stages(other)
    for name in (
        "os-copy",
        "os",
        "torch-torch",
        "torch-nvidia-cublas",
        "torch-triton",
        "torch-rest",
        "torch",
        "env-onnx",
    ):
        assert before[name] == after[name]
    lists = {layer.stage: layer.requirements for layer in one.layers}
    for layer in other.layers:
        if not layer.name.startswith("transformer-engine") and layer.stage != "env-rest":
            assert lists.get(layer.stage, layer.requirements) == layer.requirements


@pytest.mark.parametrize("more", [{}, {"apex": "25.09.post20251222"}, {"mpi": "openmpi"}, {"megatron": "auto"}])
def test_every_layer_of_a_dated_image_is_a_copy_of_what_was_given_its_times(more):
    plan = plan_for(**ROOT | more)
    assert plan.dated
    texts = stages(plan)
    assert image_chain(plan)[-1] == "os"
    assert texts["os"].startswith("scratch")
    sources = set()
    for name in image_chain(plan):
        for line in texts[name].splitlines()[1:]:
            assert not line.startswith(("RUN", "ADD")), name
            if line.startswith("COPY"):
                match = re.fullmatch(r"COPY --link --from=(\S+) /layer/ /", line)
                assert match, line
                sources.add(match[1])
    assert {"os-copy", "torch-torch", "torch-rest", "own"} <= sources
    for source in sources:
        assert texts[source].endswith(TOUCHED), source


@pytest.mark.parametrize("name", ["megatron-gpt3", "llm-jp"])
def test_a_stack_reaches_the_image_as_a_dated_layer(name):
    stack = load_stack(name)
    plan = plan_of(load_matrix(), complete(inputs_for_stack(stack)), stack)
    texts = stages(plan)
    assert plan.own_os == plan.dated
    if plan.dated:
        assert "COPY --link --from=stack-made /layer/ /" in texts["stack"]
        assert texts["stack-made"].endswith(TOUCHED)


@pytest.mark.parametrize("name", ["rest", "placed", "onnx"])
def test_a_build_of_a_stack_shares_no_stage_with_another_layer(name):
    stack = load_stack("llama3-70b")
    stack = stack.model_copy(update={"builds": (*stack.builds, stack.builds[0].model_copy(update={"name": name}))})
    plan = plan_of(load_matrix(), complete(inputs_for_stack(stack)), stack)
    assert plan.layers
    made = re.findall(r"^FROM .* AS (\S+)", dockerfile(plan), flags=re.MULTILINE)
    assert [stage for stage, count in Counter(made).items() if count > 1] == []


def test_layers_with_the_times_of_the_build_are_rewritten(tmp_path):
    kept_base = plan_for(cuda="12.6", te="2.6", gpu="h100")
    bare = plan_of(load_matrix(), unlocked_of(**ROOT))
    settings = Settings(cache_dir=tmp_path)
    assert "rewrite-timestamp=true" in archive_output(settings, bare, tmp_path, "a:b")
    assert "rewrite-timestamp" not in archive_output(
        settings, kept_base, tmp_path, "a:b"
    )  # plain Ubuntu under it: one layer


def unlocked_of(**axes):
    from envbuild.lock.files import Locked

    return Locked(lock=unlocked(load_matrix(), inputs_for(**axes)), pylocks={})


def test_what_nobody_locked_is_installed_together():
    plan = plan_of(load_matrix(), unlocked_of(**ROOT))
    assert plan.layers == ()
    assert "torch-torch" not in stages(plan)
    assert "python-layer" not in plan.recipes


def test_a_distribution_that_replaces_another_is_installed_with_it():
    plan = packed(plan_for(**ROOT), {"torch": {"packaging": "1"}, "env": {"packaging": "2"}})
    assert plan.layers == ()
    assert layers_of(plan_for(**ROOT).lock, ["torch"]) == ()


@pytest.mark.parametrize(
    ("stage", "part"),
    [
        ("torch-nvidia-cublas", "torch"),
        ("env-wheel-te", "env"),
        ("os-copy", "runtime"),
        ("stack-made", "stack"),
        ("build-te", "wheel-te"),
        ("build-mpi", "mpi"),
        ("tree-megatron-lm", "tree-megatron-lm"),
        ("torch", "torch"),
    ],
)
def test_a_layers_stage_counts_for_the_part_that_it_is_of(stage, part):
    assert part_of(stage) == part


def test_an_image_states_by_ocis_annotations_what_its_lock_decides():
    prefix = "org.opencontainers.image."
    stack = load_stack("megatron-gpt3")
    made = plan_of(load_matrix(), complete(inputs_for_stack(stack)), stack)
    labels = {name.removeprefix(prefix): v for name, v in made.labels.items() if name.startswith(prefix)}
    base = next(image for image in made.lock.images if image.stage == "base")
    assert labels == {
        "title": f"envbuild {made.cell.id}",
        "version": made.cell.id,
        "created": datetime.fromtimestamp(made.lock.epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "base.name": base.reference,
        "base.digest": base.digest,
        "source": stack.repository.url,
        "revision": stack.repository.commit,
    }
    bare = plan_for(**ROOT).labels
    assert prefix + "source" not in bare
    assert prefix + "base.name" not in bare  # its root is its own

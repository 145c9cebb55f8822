"""The bake file of one run: its outputs, contexts and secrets, and the build cache in a registry."""

import csv
import json
import re
from pathlib import Path

import pytest
from cell_inputs import plan_for, whole_cell

from envbuild.engine.builders import ASKED
from envbuild.engine.built import OwnBuild, built_digest, own_build, remember_built
from envbuild.engine.exports import archive_output, bake_file, cache_of, registry_output, store_output
from envbuild.engine.replaced import LABEL, label_of, replaced_in
from envbuild.net.registry import parse_reference
from envbuild.pipeline.prebuilt import registry_reference
from envbuild.plan.plan import tag_of
from envbuild.settings import Settings
from envbuild.util.frozen import replace

CACHE = "registry.example.org/team/cache"


@pytest.fixture(scope="module")
def plan():
    return plan_for(cuda="13.0", te="2.12", torch="2.11.0", python="3.11", os="debian12", base="debian12-root")


def fields(text):
    (row,) = csv.reader([text])
    return dict(part.split("=", 1) for part in row)


WAYS = [
    lambda settings, plan: store_output(settings, plan, "a:b"),
    lambda settings, plan: archive_output(settings, plan, Path("/x y,z/i.tar"), "a:b"),
    lambda settings, plan: registry_output(settings, plan, "h/p"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compression", ["zstd", "gzip"])
def test_every_way_makes_the_same_layers_and_rewrites_none_that_has_fixed_times(plan, tmp_path, way, compression):
    found = fields(way(Settings(cache_dir=tmp_path, compression=compression), plan))
    assert plan.dated
    assert (found["compression"], found["force-compression"]) == (compression, "true")
    assert "rewrite-timestamp" not in found


def test_a_note_of_one_compression_is_none_of_the_other(plan, tmp_path):
    by_zstd, by_gzip = (Settings(cache_dir=tmp_path, compression=each) for each in ("zstd", "gzip"))
    remember_built(by_zstd, plan, OwnBuild(digest=f"sha256:{1:064x}"))
    assert own_build(by_gzip, plan) is None
    remember_built(by_gzip, plan, OwnBuild(digest=f"sha256:{2:064x}"))
    assert built_digest(by_zstd, plan) == f"sha256:{1:064x}"
    assert built_digest(by_gzip, plan) == f"sha256:{2:064x}"


def test_a_builder_pushes_by_digest_alone(plan, tmp_path):
    found = fields(registry_output(Settings(cache_dir=tmp_path), plan, "h/p"))
    assert (found["type"], found["name"], found["push"], found["push-by-digest"]) == ("image", "h/p", "true", "true")
    assert found["store"] == "false"  # nothing stays where the builder keeps images


def test_without_settings_no_registry_is_asked(plan, tmp_path):
    assert cache_of(Settings(cache_dir=tmp_path), plan, "image", taken=True) == {}


def test_steps_of_a_cell_and_of_its_compilers_have_a_tag_each(plan, tmp_path):
    settings = Settings(cache_dir=tmp_path, cache_from=CACHE, cache_to=f"{CACHE}-2")
    tags = set()
    for target in ("image", "wheel-te", "wheel-apex"):
        found = cache_of(settings, plan, target, taken=True)
        taken, left = fields(found["cache-from"][0]), fields(found["cache-to"][0])
        assert (taken["type"], left["type"], left["mode"], left["ignore-error"]) == (
            "registry",
            "registry",
            "max",
            "true",
        )
        tag = taken["ref"].removeprefix(f"{CACHE}:")
        assert left["ref"] == f"{CACHE}-2:{tag}"
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", tag)
        tags.add(tag)
    assert len(tags) == 2
    assert plan.cell.id in " ".join(tags)


def test_the_image_of_a_cell_with_every_component_has_a_name_everywhere(plan, tmp_path):
    settings = Settings(cache_dir=tmp_path, registry="registry.example.org/team/x", cache_from=CACHE)
    cell = whole_cell()
    names = set()
    for flavor in ("runtime", "devel"):
        lock = plan.lock.model_copy(update={"cell": cell.versions, "commits": cell.commits, "flavor": flavor})
        whole = replace(plan, lock=lock, cell=cell)
        taken = fields(cache_of(settings, whole, "image", taken=True)["cache-from"][0])["ref"]
        for name in (tag_of(lock), str(registry_reference(settings, lock)), taken):
            parse_reference(name)  # refuses what is no name of an image
            names.add(name)
    assert len(names) == 6  # each flavor its own


def test_what_only_asks_leaves_nothing_and_no_cache_takes_nothing(plan, tmp_path):
    settings = Settings(cache_dir=tmp_path, cache_from=CACHE, cache_to=CACHE)
    assert set(cache_of(settings, plan, ASKED, taken=True)) == {"cache-from"}
    assert set(cache_of(settings, plan, "image", taken=False)) == {"cache-to"}


@pytest.mark.parametrize("target", ["image", "wheel-te", ASKED])
def test_a_run_has_its_contexts_secrets_and_one_output(plan, target, tmp_path):
    contexts = {"wheel-te": "/kept/${x}", "src-te": "/src"}
    text = bake_file(
        plan,
        target,
        "type=local,dest=/out,${HOME}",
        contexts=contexts,
        secrets={"jobs-te": tmp_path / "a,b"},
        shared={"cache-from": ["type=registry,ref=x"]},
    )
    targets = json.loads(text)["target"]
    mine = targets[target]
    assert mine["output"] == ["type=local,dest=/out,$${HOME}"]
    assert mine["cache-from"] == ["type=registry,ref=x"]
    assert [name for name, each in targets.items() if "output" in each or "cache-from" in each] == [target]
    assert mine["secret"] == [f'id=jobs-te,"src={tmp_path}/a,b"']
    assert mine["contexts"] == {k: v.replace("${", "$${") for k, v in contexts.items() if k != target}
    assert "tags" not in mine
    assert not [name for name, each in targets.items() if "labels" in each]
    assert ("dockerfile-inline" in mine) is (target == ASKED)
    assert ("dockerfile" in mine) is (target != ASKED)
    assert mine["target"] == target


def test_an_image_states_which_inputs_were_replaced_and_no_wheel_does(plan):
    for target in ("image", "wheel-te"):
        text = bake_file(
            plan, target, "type=cacheonly", contexts={}, secrets={}, shared={}, replaced={"src-te": "/a b", "base": "x"}
        )
        stated = {name: each["labels"] for name, each in json.loads(text)["target"].items() if "labels" in each}
        assert stated == {"image": {"io.envbuild.replaced": "base src-te"}}


def test_only_names_of_inputs_are_read_from_a_foreign_label():
    assert replaced_in({}) == ()
    assert replaced_in(label_of({"src-te": "/x", "base": "y"})) == ("base", "src-te")
    assert replaced_in({LABEL: "src-te \x1b[31m ../x -c $(id) " + "a" * 65}) == ("src-te",)
    assert len(replaced_in({LABEL: " ".join(f"s{i}" for i in range(1000))})) == 50

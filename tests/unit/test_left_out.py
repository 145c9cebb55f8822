"""What an image is without because a source is out of reach: the answers say so, where nobody overlooks it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cell_inputs import complete, inputs_for

from envbuild.cli import image as command
from envbuild.cli import main
from envbuild.cli.axes import keyword
from envbuild.cli.image_many import Row, _table
from envbuild.cli.image_report import for_people, report_on
from envbuild.curate.coverage import Verification
from envbuild.engine.builders import BuilderFacts
from envbuild.errors import HostError, LockError
from envbuild.lock.files import write_lock
from envbuild.lock.model import Missing
from envbuild.pipeline import locked
from envbuild.pipeline.image import ImageRequest
from envbuild.settings import Settings

HOST = "git.example.org"
# a cell that has no committed lock
FLAGS = {"cuda": "13.0", "te": "2.11", "gpu": "h100"}


@dataclass
class Engine:
    """An engine that has no image; it notes when it is asked for its builder."""

    settings: Settings
    version: str = "v0.25.2"
    asked: list[str] = field(default_factory=list)

    def builder(self) -> BuilderFacts:
        self.asked.append("builder")
        return BuilderFacts(driver="docker", options={}, buildkit=(self.version,))

    def find_image(self, _: str) -> None:
        return None


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """No engine, registry or network of this machine."""
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "docker").write_text("#!/bin/sh\necho github.com/docker/buildx v0.29.1 x\n")
    (tmp_path / "docker").chmod(0o755)
    return Settings(cache_dir=tmp_path / "cache")


def given(**more: str) -> command.Given:
    return command.Given(
        flags={keyword(axis): spec for axis, spec in (FLAGS | more).items()}, lock_file=None, sources=()
    )


def with_lock(given: command.Given, engine: Engine, **more: Any) -> tuple[Any, Any, dict[str, str]]:
    asked = given.asked()
    request = ImageRequest(matrix=asked.matrix, inputs=asked.inputs, **more)
    return command._with_lock(request, given, asked, engine)


@pytest.fixture
def apex_is_out_of_reach(monkeypatch):
    made = []

    def make_lock(settings, matrix, inputs, *, note):
        del settings, matrix, note
        made.append(inputs.cell.id)
        found = complete(inputs)
        if "apex" not in inputs.cell.versions:
            return found
        gone = Missing(what="source tree of apex", host=HOST, why="no answer", component="apex", kind="tree")
        return type(found)(
            lock=found.lock.model_copy(update={"missing": (gone,)}), pylocks=found.pylocks, unreached=True
        )

    monkeypatch.setattr(locked, "make_lock", make_lock)
    return made


def test_the_component_and_its_host_are_handed_on(settings, apex_is_out_of_reach):
    asked, (found, _), unreached = with_lock(given(), Engine(settings))
    assert unreached == {"apex": HOST}
    assert "apex" not in asked.solution.cell.versions
    assert "apex" not in found.lock.cell
    assert len(apex_is_out_of_reach) == 2


@pytest.mark.usefixtures("apex_is_out_of_reach")
def test_one_that_a_flag_asks_for_is_an_error(settings):
    with pytest.raises(HostError, match=r"(?s)1 input of this cell cannot be had.*apex.*git\.example\.org"):
        with_lock(given(apex="auto"), Engine(settings))


def made_of(lock, folder: Path) -> Any:
    digest = f"sha256:{'a' * 64}"
    built = SimpleNamespace(tag="envbuild:x", digest=digest, size=1, stages=(), executed=0, taken=(), log=None)
    verified = SimpleNamespace(as_json=lambda: {"by": "build", "text": "verified"})
    return SimpleNamespace(
        built=built, locked=lock, lock_folder=folder, origin="built", verified=verified, reference=None
    )


@pytest.fixture
def report(settings, tmp_path, apex_is_out_of_reach):
    del apex_is_out_of_reach
    asked, (found, _), unreached = with_lock(given(), Engine(settings))
    proven = {"audit": {"size": {"bytes": 1}, "checks": []}, "smoke": None, "stack_proof": [], "not_proven": ["a"]}
    return report_on(asked, made_of(found, tmp_path), unreached) | proven | {
        "proven": "now", "seconds": 3.0, "pushed": "r.example/x", "wheels_pushed": []
    }  # fmt: skip


def test_json_has_it_with_the_reason_and_apart(report):
    assert report["unreached"] == {"apex": HOST}
    assert report["left_out"]["apex"] == f"its source cannot be reached ({HOST}), and no flag or stack names it"


def test_it_is_the_last_block_of_the_text(report):
    *_, last = for_people(report).split("\n\n")
    assert last.splitlines() == [
        "left out, because the source cannot be reached from here",
        f"  - apex ({HOST}): `--apex auto` requires it",
    ]
    assert for_people(report).count("apex (") == 1


def test_an_image_with_everything_ends_with_the_line_that_runs_it(report):
    text = for_people(report | {"unreached": {}})
    assert text.endswith(report["run"])
    assert "\nleft out\n  - apex: " in text  # what left_out has besides is still there


def test_the_table_of_many_cells_says_it_once(report):
    cell = inputs_for(cuda="13.0", te="2.11", gpu="h100").cell
    row = Row(cell=Verification(cell=cell, args="", stack=None, why=""), report=report)
    text = _table([row, row], [], {"built": 2}, 5.0)
    assert text.endswith(f"2 built in 5 s\n\nleft out, because the source cannot be reached from here\n  - apex ({HOST}): "
                         "`--apex auto` requires it")  # fmt: skip


def run(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main([*words])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


WORDS = ("--cuda", "13.0", "--te", "2.11", "--gpu", "h100")


def test_a_lock_that_is_not_complete_says_so_in_its_answer(settings, apex_is_out_of_reach, monkeypatch, capsys):
    del settings, apex_is_out_of_reach
    monkeypatch.setattr("envbuild.lock.make.make_lock", locked.make_lock)
    code, out, err = run(capsys, "lock", *WORDS)
    assert code == 8
    assert out.splitlines()[-1] == "  not complete: 1 input has no hash"
    assert "1 input has no hash" in err
    code, out, _ = run(capsys, "lock", *WORDS, "--apex", "none")
    assert code == 0
    assert out.endswith("\n\nleft out\n  - apex: asked not to be there (--apex none)\n")
    _, out, _ = run(capsys, "lock", *WORDS, "--apex", "none", "--json")
    assert list(json.loads(out)["left_out"]) == ["apex"]


def test_a_pulled_image_says_what_its_lock_is_without(settings, tmp_path, monkeypatch, capsys):
    held = complete(inputs_for(cuda="13.0", te="2.11", gpu="h100", apex="none"))
    write_lock(held, tmp_path / "held")
    monkeypatch.setenv("ENVBUILD_REGISTRY", "r.example/team")
    built = SimpleNamespace(tag="envbuild:x", digest=f"sha256:{'a' * 64}", size=1)
    verified = SimpleNamespace(as_json=dict, text="verified")
    monkeypatch.setattr(
        "envbuild.pipeline.prebuilt.pull_prebuilt", lambda *_, **__: (built, SimpleNamespace(verified=verified))
    )
    machine = SimpleNamespace(machine=lambda: SimpleNamespace(platform="linux/amd64"), settings=settings)
    monkeypatch.setattr("envbuild.engine.podman.pulling_client", lambda _: machine)
    code, out, _ = run(capsys, "pull", "--lock", str(tmp_path / "held"))
    assert code == 0
    assert out.endswith("\n\nleft out\n  - apex: it is not in the lock\n")
    _, out, _ = run(capsys, "pull", "--lock", str(tmp_path / "held"), "--json")
    assert json.loads(out)["left_out"] == {"apex": "it is not in the lock"}


# -- a builder that is too old is named before what takes minutes


def never(*_: object, **__: object) -> None:
    pytest.fail("it comes after the builder was looked at")


def test_a_builder_that_is_too_old_is_named_before_a_lock_is_made(settings, monkeypatch):
    monkeypatch.setattr(locked, "make_lock", never)
    with pytest.raises(HostError, match=r"BuildKit v0\.11\.6 is too old"):
        with_lock(given(), Engine(settings, "v0.11.6"))


def test_a_builder_that_is_too_old_is_named_before_sources_are_fetched(settings, monkeypatch):
    asked = given().asked()
    write_lock(complete(asked.inputs), locked.own_lock(settings, asked.inputs))
    monkeypatch.setattr(locked, "require_sources", never)
    with pytest.raises(HostError, match=r"BuildKit v0\.11\.6 is too old"):
        with_lock(given(), Engine(settings, "v0.11.6"))


@pytest.mark.parametrize("version", ["v0.0.0+unknown", "v0.25.2"])
def test_a_builder_that_is_new_enough_or_does_not_say_is_taken(settings, apex_is_out_of_reach, version):
    with_lock(given(), Engine(settings, version))
    assert len(apex_is_out_of_reach) == 2


def test_an_image_that_is_there_needs_no_builder(settings, monkeypatch):
    """Neither does one that a registry may have, nor a lock that is named: the build itself looks."""
    asked = given().asked()
    held = complete(asked.inputs)
    folder = locked.own_lock(settings, asked.inputs)
    write_lock(held, folder)
    old = Engine(settings, "v0.11.6")
    monkeypatch.setattr(locked, "require_sources", lambda *_, **__: None)
    monkeypatch.setattr("envbuild.pipeline.image.find_present", lambda *_, **__: (None, None, None))
    with_lock(given(), old)
    monkeypatch.setattr("envbuild.pipeline.image.find_present", lambda *_, **__: None)
    registry = Engine(settings.model_copy(update={"registry": "r.example/team"}), "v0.11.6")
    with_lock(given(), registry)
    with_lock(command.Given(flags={}, lock_file=folder, sources=()), old)
    assert old.asked == registry.asked == []
    with pytest.raises(HostError, match="too old"):
        with_lock(given(), registry, pull=False)


def test_with_locked_nothing_is_made_and_no_builder_is_asked(settings):
    old = Engine(settings, "v0.11.6")
    with pytest.raises(LockError, match="this cell has no lock"):
        with_lock(given(), old, locked_only=True)
    assert old.asked == []

"""`envbuild dev`: what a tree asks for, what it compiles, and what is kept of that."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from cell_inputs import complete, inputs_for, inputs_for_stack
from click.testing import CliRunner
from recorded import BARE

from envbuild.cli import cli
from envbuild.engine import reproduce
from envbuild.engine.image import Image
from envbuild.errors import BuildError, HostError, UsageError
from envbuild.run.dev import helpers
from envbuild.run.dev import state as state_module
from envbuild.run.dev.requirements import differences
from envbuild.run.dev.state import state_of
from envbuild.settings import Settings
from envbuild.stacks.load import load_stack
from envbuild.stacks.model import Step
from envbuild.util.processes import ProcessResult

STEPS = (Step(name="helpers", run="make -C data", compiles=True, keep=("data/helpers*.so",)),)
IMAGE = Image(
    reference="x",
    id="sha256:" + "1" * 64,
    digest="sha256:" + "2" * 64,
    size=1,
    labels={},
    volumes=(),
    environment=(),
    repo_digests=(),
)


@pytest.fixture(scope="module")
def stack():
    return load_stack("llama3-70b")


@pytest.fixture(scope="module")
def lock(stack):
    return complete(inputs_for_stack(stack), overrides={"numpy": "1.26.4", "transformers": "4.50.0"}).lock


def asked(tree: Path, lock, stack) -> list[tuple[str, str, str | None]]:
    return [(each.where, each.asked, each.version) for each in differences(tree, lock, stack)]


def test_each_requirement_that_the_image_does_not_meet_is_named_with_its_file_and_line(tmp_path, lock, stack):
    (tmp_path / "requirements.txt").write_text(
        "# of the tree\nnumpy<2\nnumpy >= 2 ; python_version < '3'\ntransformers>=4.51 # newer\n"
        "--extra-index-url https://x.example\ngit+https://x.example/y.git\n-r more/other.txt\n-r requirements.txt\n"
    )
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "other.txt").write_text("Not_There\nmpi4py>=5\napex\n")
    assert asked(tmp_path, lock, stack) == [
        ("requirements.txt:4", "transformers>=4.51", "4.50.0"),
        ("more/other.txt:1", "Not_There", None),
        ("more/other.txt:2", "mpi4py>=5", "4.0.3"),
    ]
    first, second, _ = differences(tmp_path, lock, stack)
    assert first.text() == ("requirements.txt:4 asks for transformers>=4.51, the image has transformers 4.50.0")
    assert second.text() == "more/other.txt:1 asks for Not_There, the image has no not-there"


def test_pyproject_and_the_files_of_packages_are_read_and_folders_that_are_none_are_not(tmp_path, lock, stack):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "x"\ndependencies = ["torch>=99"]\n[project.optional-dependencies]\nall = ["numpy>=9"]\n'
        '[tool.setuptools.dynamic]\ndependencies = { file = ["deps.txt", "../outside.txt"] }\n'
    )
    (tmp_path / "deps.txt").write_text("numpy>=2.1\n")
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "requirements.txt").write_text("einops==99\n")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "requirements.txt").write_text("numpy>=3\n")
    found = asked(tmp_path, lock, stack)
    assert [(where, wanted) for where, wanted, _ in found] == [
        ("pyproject.toml", "torch>=99"),
        ("deps.txt:1", "numpy>=2.1"),
        ("megatron/core/requirements.txt:1", "einops==99"),
    ]


def test_what_cannot_be_read_is_no_requirement(tmp_path, lock, stack):
    (tmp_path / "pyproject.toml").write_text("[project\n")
    (tmp_path / "requirements.txt").symlink_to("/etc/passwd")
    assert asked(tmp_path, lock, stack) == []


def test_the_commit_and_the_patches_that_are_missing_are_named(tmp_path, lock, stack):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("a" * 40 + "\n")
    state = state_of(tmp_path, lock, stack)
    assert state.commit == "a" * 40
    assert [state for _, state, _ in state.patches] == ["refused"] * len(stack.patches)
    notes = state.notes()
    assert notes[0] == f"the tree is at aaaaaaaaaaaa, the image has {stack.repository.commit[:12]}"
    assert [note.split(" does not fit the tree: ")[0] for note in notes[1:]] == [
        f"patch {name}" for name, _, _ in state.patches
    ]
    json.dumps(state.as_json())


def test_a_lock_of_another_state_of_the_stack_is_named(tmp_path, lock, stack):
    other = lock.model_copy(update={"stack_digest": "0" * 64})
    assert "the image is of an earlier state of the stack llama3-70b" in state_of(tmp_path, other, stack).notes()


def test_a_tree_without_the_folder_that_is_mounted_is_refused(tmp_path):
    stack = load_stack("gpt2-3d")
    with pytest.raises(UsageError, match="the tree has no folder Megatron-LM-v1"):
        state_of(tmp_path, complete(inputs_for(cuda="cpu")).lock, stack)


def test_an_image_is_asked_for_its_lock_once_and_what_is_kept_must_be_of_that_digest(tmp_path, lock, monkeypatch):
    asked_for = []

    def carried(client, image):
        asked_for.append(image)
        return SimpleNamespace(lock=lock)

    monkeypatch.setattr(reproduce, "carried_lock", carried)
    image = Image(**{**vars(IMAGE), "labels": {"io.envbuild.lock": lock.digest}})
    settings = Settings(cache_dir=tmp_path)
    assert state_module.lock_of_image(settings, image) == lock
    assert state_module.lock_of_image(settings, image) == lock
    assert asked_for == [image.id]
    kept = tmp_path / "helpers" / f"{lock.digest.removeprefix('sha256:')}.lock"
    kept.write_text(kept.read_text().replace("1.26.4", "1.26.5"))
    assert state_module.lock_of_image(settings, image) == lock
    assert asked_for == [image.id, image.id]


def test_an_image_that_is_a_file_is_refused(tmp_path):
    refused = CliRunner().invoke(cli, ["dev", "./x.sif", str(tmp_path)])
    assert isinstance(refused.exception, UsageError)
    assert refused.exception.what == "dev runs images of the engine"


@pytest.fixture
def podman(tmp_path, monkeypatch):
    """Podman is the engine, on a machine without GPUs."""
    monkeypatch.setattr("envbuild.host.collect.LocalProbe", lambda: BARE)
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ENVBUILD_ENGINE", "podman")
    monkeypatch.setattr("envbuild.engine.guest.look_up", lambda *_: IMAGE)


def test_the_flags_are_those_of_the_engine(podman, tmp_path, lock, monkeypatch):
    monkeypatch.setattr(state_module, "lock_of_image", lambda *_: lock)
    done = CliRunner().invoke(cli, ["dev", "img", str(tmp_path), "--dry-run", "--", "true"])
    assert done.exit_code == 0, done.exception
    assert "podman run " in done.stdout
    assert "--ulimit nofile=" in done.stdout  # podman's alone
    assert "memlock=-1" not in done.stdout


def test_the_container_is_of_the_user_who_is_asked_for(podman, tmp_path, lock, monkeypatch):
    monkeypatch.setattr(state_module, "lock_of_image", lambda *_: lock)
    words = ["dev", "img", str(tmp_path), "--dry-run", "--user"]
    done = CliRunner().invoke(cli, [*words, "1234:0"])
    assert "--user 1234:0" in done.stdout
    refused = CliRunner().invoke(cli, [*words, "a b"])
    assert isinstance(refused.exception, UsageError)


def test_what_compiles_has_the_flags_of_the_engine(podman, tmp_path, stack, monkeypatch):
    made, settings = [], Settings(cache_dir=tmp_path, engine="podman")

    @contextlib.contextmanager
    def guest(*_, flags: list[str], **__):
        made.extend(flags)
        yield "name"

    monkeypatch.setattr("envbuild.engine.guest.guest", guest)
    monkeypatch.setattr(helpers, "bounded", lambda *_, **__: ProcessResult(code=0, out=b"", err=b""))
    helpers._run(settings, IMAGE, BARE.facts(), stack, STEPS[0], tmp_path, "a" * 64)
    assert any(flag.startswith("nofile=") for flag in made)
    assert "memlock=-1" not in made


# -- what is compiled


def key(tree: Path, image: Image = IMAGE) -> str:
    return helpers.key_of(image, STEPS, helpers.sources_in(tree))


@pytest.fixture
def tree(tmp_path) -> Path:
    data = tmp_path / "tree" / "data"
    data.mkdir(parents=True)
    (data / "helpers.cpp").write_text("int x;\n")
    (data / "Makefile").write_text("all:\n")
    (data / "a.py").write_text("x = 1\n")
    return tmp_path / "tree"


def test_only_sources_and_what_builds_them_change_the_key(tree):
    before = key(tree)
    (tree / "data" / "a.py").write_text("x = 2\n")
    (tree / "data" / "helpers.cpython-312.so").write_bytes(b"\x7fELF")
    (tree / ".git").mkdir()
    (tree / ".git" / "x.cpp").write_text("not of the tree\n")
    (tree / "link.cpp").symlink_to("/etc/passwd")
    assert key(tree) == before
    for name, text in (("helpers.cpp", "int y;\n"), ("Makefile", "all: x\n"), ("new.cuh", "")):
        (tree / "data" / name).write_text(text)
        assert key(tree) != before
        before = key(tree)
    other = Image(**{**vars(IMAGE), "id": "sha256:" + "3" * 64})
    assert key(tree, other) != before


def test_what_was_compiled_is_kept_whole_or_not_at_all(tmp_path):
    settings = Settings(cache_dir=tmp_path)
    made = {"data/helpers.so": b"one", "data/more/x.so": b"two"}
    assert helpers.kept(settings, "a" * 64) is None
    helpers.keep(settings, "a" * 64, made)
    assert helpers.kept(settings, "a" * 64) == made
    (tmp_path / "helpers" / ("a" * 64) / "files" / "data" / "helpers.so").write_bytes(b"other")
    assert helpers.kept(settings, "a" * 64) is None
    helpers.keep(settings, "a" * 64, made)
    assert helpers.kept(settings, "a" * 64) == made


def test_a_file_of_an_image_whose_name_is_none_is_no_defect_of_envbuild(tmp_path):
    with pytest.raises(HostError, match="the compiled files cannot be kept"):
        helpers.keep(Settings(cache_dir=tmp_path), "a" * 64, {"data/helpers x.so": b"one"})


def test_files_are_written_next_to_their_sources_and_only_where_they_differ(tree):
    made = {"data/helpers.so": b"one"}
    assert helpers.place(made, tree) == ["data/helpers.so"]
    file = tree / "data" / "helpers.so"
    assert file.read_bytes() == b"one"
    with file.open("rb") as loaded:
        assert helpers.place(made, tree) == []
        assert helpers.place({"data/helpers.so": b"two"}, tree) == ["data/helpers.so"]
        assert loaded.read() == b"one"  # who has it loaded keeps it
    assert sorted(each.name for each in file.parent.iterdir()) == ["Makefile", "a.py", "helpers.cpp", "helpers.so"]


def test_no_link_in_the_tree_leads_a_file_out_of_it(tree, tmp_path):
    (tmp_path / "outside").mkdir()
    (tree / "linked").symlink_to(tmp_path / "outside")
    with pytest.raises(HostError, match="is a link"):
        helpers.place({"linked/helpers.so": b"one"}, tree)
    assert not list((tmp_path / "outside").iterdir())


@pytest.mark.parametrize("of", ["/etc/passwd", "real.so"])
def test_a_link_that_a_step_made_is_not_kept(of, tree, tmp_path, stack, monkeypatch):
    def run(settings, image, host, stack, step, copy, key):
        (copy / "data" / "real.so").write_bytes(b"x")
        (copy / "data" / "helpers.so").symlink_to(of)

    monkeypatch.setattr(helpers, "_run", run)
    monkeypatch.setattr(helpers, "steps_of", lambda _: STEPS)
    with pytest.raises(BuildError, match=r"data/helpers.so, which the step helpers made, cannot be read: .*link"):
        helpers.compiled(Settings(cache_dir=tmp_path), IMAGE, BARE.facts(), stack, tree, "a" * 64)


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("data/helpers.so", True),
        ("data/helpers.cpython-312-x86_64-linux-gnu.so", True),
        ("other/data/helpers.so", False),
        ("data/deep/helpers.so", False),
        ("data/helpers.cpp", False),
    ],
)
def test_a_compiled_file_is_one_that_a_step_keeps(path, is_one):
    assert helpers._is_compiled(path, STEPS[0].keep) is is_one


@pytest.mark.parametrize(
    ("output", "absent"),
    [
        ("sh: 1: make: not found", "make"),
        ("make: g++: No such file or directory\nmake: *** [Makefile:3: x.so] Error 127", "g++"),
        ("gcc: fatal error: cannot execute 'cc1plus': execvp: No such file or directory", "cc1plus"),
        ("bash: line 1: nvcc: command not found", "nvcc"),
        ("g++ -O3 x.cpp -o x.so\nx.cpp:1:10: fatal error: y.h: No such file or directory", None),
    ],
)
def test_only_a_compiler_that_is_not_there_is_named_as_missing(output, absent):
    found = helpers._NO_COMPILER.search(output)
    assert (found[1] or found[2] if found else None) == absent

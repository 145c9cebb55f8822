"""`envbuild dev --watch`: which edits start a run, what may be started before one, and what a Python does that waits."""

import importlib
import importlib.util
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

from envbuild.cli import cli
from envbuild.errors import UsageError
from envbuild.paths import data_dir
from envbuild.run.container import Container, Mount
from envbuild.run.dev.watch import can_wait, changed, made_by_a_run, state_of_files

HOOK = data_dir("dockerfiles") / "dev" / "sitecustomize.py"


@pytest.fixture(scope="module")
def hook():
    spec = importlib.util.spec_from_file_location("hook_of_dev", HOOK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path):
    folder = tmp_path / "tree"
    (folder / "pkg").mkdir(parents=True)
    (folder / "train.py").write_text("")
    (folder / "pkg" / "__init__.py").write_text("")
    return folder.resolve()


def test_an_edit_is_a_change_of_a_source_and_not_of_what_a_run_writes(tree):
    before = state_of_files(tree)
    for name in ("log.txt", "loss.json", "model.pt", "pkg/helpers.cpython-311-x86_64-linux-gnu.so"):
        (tree / name).write_text("x")
    for folder in ("__pycache__", ".git", ".cache"):
        (tree / folder).mkdir()
        (tree / folder / "x.py").write_text("x")
    assert changed(before, state_of_files(tree)) == []
    (tree / "train.py").write_text("more")
    (tree / "pkg" / "helpers.cpp").write_text("")
    (tree / "pkg" / "Makefile").write_text("")
    (tree / "run.yaml").write_text("")
    (tree / "pkg" / "__init__.py").unlink()
    found = changed(before, state_of_files(tree))
    assert found == ["pkg/Makefile", "pkg/__init__.py", "pkg/helpers.cpp", "run.yaml", "train.py"]


@pytest.mark.parametrize(
    ("command", "waits"),
    [
        ("python train.py", True),
        ("/opt/venv/bin/python3.11 -u -X importtime train.py", True),
        ("python -W error /w/train.py", True),
        ("python -m pkg.run", True),
        ("torchrun --nproc-per-node 8 train.py --config other.py", True),
        ("sh train.sh", False),
        ("./train.py", False),
        ("mpirun python train.py", False),
        # these read the tree, and none of their Pythons waits
        ("python -m pytest tests", False),
        ("python -m cProfile train.py", False),
        ("python -c pass", False),
        ("python -E train.py", False),
        ("python -I train.py", False),
        ("python -uc pass", False),
        ("python /elsewhere/other.py", False),
        ("python ../w2/train.py", False),
        ("python pkg", False),
        ("python missing.py", False),
        ("python link.py", False),
        ("python", False),
        ("torchrun --no-python train.py", False),
        ("torchrun --no-pyth ./run.sh train.py", False),
        ("torchrun -m pkg train.py", False),
        ("torchrun /elsewhere/x.py", False),
        ("torchrun train.sh", False),
    ],
)
def test_only_a_command_whose_pythons_wait_is_started_early(tree, tmp_path, command, waits):
    (tmp_path / "other.py").write_text("")
    (tree / "link.py").symlink_to(tmp_path / "other.py")
    assert can_wait(command.split(), Container(image="x"), tree, "/w") is waits


def test_the_folder_that_a_run_starts_in_counts(tree):
    below, other = Container(image="x", workdir="/w/pkg"), Container(image="x", workdir="/data")
    assert can_wait(["python", "../train.py"], below, tree, "/w")
    assert not can_wait(["python", "train.py"], below, tree, "/w")
    assert not can_wait(["python", "train.py"], other, tree, "/w")


def test_nothing_is_started_early_where_a_file_of_the_user_lies_in_a_package(tree):
    target = "/opt/venv/lib/python3.11/site-packages/transformer_engine/module.py"
    mounts = (Mount(source=Path("/x"), target=target),)
    assert not can_wait(["python", "train.py"], Container(image="x", mounts=mounts), tree, "/w")
    mounts = (Mount(source=Path("/x"), target="/data"),)
    assert can_wait(["python", "train.py"], Container(image="x", mounts=mounts), tree, "/w")


def test_what_a_run_writes_is_not_an_edit(tree):
    before = state_of_files(tree)
    (tree / "wandb" / "run-1").mkdir(parents=True)
    (tree / "wandb" / "run-1" / "config.yaml").write_text("")
    (tree / "debug").mkdir()
    (tree / "debug" / "kernel.py").write_text("")
    (tree / "used.yaml").write_text("")
    (tree / "pkg" / "new.py").write_text("")  # as a person adds one
    own = made_by_a_run(before, state_of_files(tree))
    assert own == {"wandb/run-1/config.yaml", "debug/kernel.py", "used.yaml"}


def test_settings_that_are_written_again_as_they_were_are_no_edit(tree):
    (tree / "used.yaml").write_text("lr: 1\n")
    before = state_of_files(tree)
    (tree / "used.yaml").unlink()
    (tree / "used.yaml").write_text("lr: 1\n")
    os.utime(tree / "used.yaml", (1, 1))
    assert changed(before, state_of_files(tree)) == []
    (tree / "used.yaml").write_text("lr: 2\n")
    assert changed(before, state_of_files(tree)) == ["used.yaml"]


def test_a_file_that_goes_while_the_tree_is_read_is_left_out(tree, monkeypatch):
    lstat = Path.lstat

    def gone(path):
        if path.name == "train.py":
            raise FileNotFoundError(2, "gone", str(path))
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", gone)
    assert list(state_of_files(tree)) == ["pkg/__init__.py"]


@pytest.mark.parametrize(
    ("words", "below"),
    [
        (["train.py"], "."),
        (["-u", "train.py", "--lr", "1"], "."),
        (["-X", "dev", "-W", "error", "pkg/__init__.py"], "pkg"),
        (["-Ximporttime", "-Wdefault::Warning:mod", "train.py"], "."),
        (["-m", "pkg.run", "x"], "."),
        (["-um", "pkg"], "."),
        (["-mpkg"], "."),
        (["-m", "torch.distributed.run", "train.py"], None),
        (["-c", "import pkg"], None),
        (["-uc", "import pkg"], None),
        (["/bin/torchrun", "train.py"], None),
        (["missing.py"], None),
        ([], None),
    ],
)
def test_a_process_waits_where_its_script_lies_in_the_tree(hook, tree, monkeypatch, words, below):
    monkeypatch.chdir(tree)
    expected = None if below is None else os.path.normpath(tree / below)
    assert hook.folder_of(["python", *words], str(tree)) == expected


def test_a_script_that_a_link_leads_out_of_the_tree_does_not_wait(hook, tree, tmp_path, monkeypatch):
    (tmp_path / "other.py").write_text("")
    (tree / "link.py").symlink_to(tmp_path / "other.py")
    monkeypatch.chdir(tree)
    assert hook.folder_of(["python", "link.py"], str(tree)) is None


def test_packages_of_the_image_are_those_of_pythons_folders(hook, tree, monkeypatch):
    monkeypatch.setattr(hook, "TREE", str(tree))
    monkeypatch.setattr(sys, "path", [str(tree), *sys.path])
    assert hook.is_of_the_image("json")
    assert hook.is_of_the_image("pydantic")
    assert not hook.is_of_the_image("pkg")
    assert not hook.is_of_the_image("no_such_package")
    (tree / "colorsys.py").write_text("")  # the tree's own comes before Python's
    importlib.invalidate_caches()
    assert not hook.is_of_the_image("colorsys")


def test_a_module_lies_in_the_tree_where_its_file_does(hook, tree, monkeypatch):
    monkeypatch.chdir(tree)
    made_up = types.ModuleType("made_up")
    made_up.__file__ = "_ops.py"  # as torch.ops has it
    monkeypatch.setitem(sys.modules, "made_up", made_up)
    assert not hook.has_modules_of(str(tree))
    made_up.__file__ = str(tree / "train.py")
    assert hook.has_modules_of(str(tree))


def lit(folder: Path) -> Path:
    """Make a folder of packages with `beacon`, whose import makes the file `lit`."""
    place = folder / "site-packages"
    (place / "beacon").mkdir(parents=True)
    (place / "beacon" / "__init__.py").write_text(f"open({str(folder / 'lit')!r}, 'w').close()\n")
    return place


def until_there(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


SCRIPT = """import sys
print([name in sys.modules for name in ("colorsys", "wave", "pkg")], flush=True)
import colorsys, pkg
"""


def run_of(tree: Path, place: Path, notes: Path | None = None) -> "subprocess.Popen[str]":
    env = os.environ | {
        "PYTHONPATH": str(place),
        "ENVBUILD_DEV_TREE": str(tree),
        "ENVBUILD_DEV_NOTES": str(notes or place.parent),
    }
    return subprocess.Popen(
        [sys.executable, "train.py"], cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_run_waits_with_the_imports_of_the_run_before_it(tree, tmp_path):
    place = tmp_path / "hook"
    place.mkdir()
    (place / "sitecustomize.py").write_bytes(HOOK.read_bytes())
    (place / "go").touch()
    (tree / "train.py").write_text(SCRIPT)
    with run_of(tree, place) as first:
        out, err = first.communicate(timeout=30)
    assert (out, err) == ("[False, False, False]\n", "")
    assert "colorsys" in (names := (tmp_path / "names").read_text().split())
    assert "pkg" not in names
    (place / "go").unlink()
    with (tmp_path / "names").open("a") as file:
        file.write("no_such_module\nos.path.nothing\n../x\n\x00\nbeacon\n")  # only the last can be imported
    with run_of(tree, Path(f"{place}:{lit(tmp_path)}"), notes=tmp_path) as second:
        until_there(tmp_path / "lit")
        assert second.poll() is None
        (tree / "train.py").write_text(SCRIPT.replace("import colorsys", "import wave, colorsys"))
        (place / "go").touch()
        out, err = second.communicate(timeout=30)
    assert (out, err) == ("[True, False, False]\n", "")
    assert "wave" in (tmp_path / "names").read_text().split()


def test_a_package_that_imports_the_tree_is_not_imported_early(tree, tmp_path):
    """Else the run after the edit would have the module of before it."""
    place, packages = tmp_path / "hook", tmp_path / "site-packages"
    place.mkdir()
    (packages / "plugin").mkdir(parents=True)
    (packages / "plugin" / "__init__.py").write_text("import pkg\n")
    (place / "sitecustomize.py").write_bytes(HOOK.read_bytes())
    (tree / "pkg" / "__init__.py").write_text("V = 'old'\n")
    (tree / "train.py").write_text("import plugin, pkg, wave\nprint(pkg.V, flush=True)\n")
    (place / "go").touch()
    path = Path(f"{place}:{packages}")
    with run_of(tree, path, notes=tmp_path) as first:
        assert first.communicate(timeout=30) == ("old\n", "")
    assert {"plugin", "wave"} <= set((tmp_path / "names").read_text().split())
    (place / "go").unlink()
    with run_of(tree, path, notes=tmp_path) as second:
        time.sleep(1.5)  # it has started, found the tree's module, and started again
        assert second.poll() is None
        (tree / "pkg" / "__init__.py").write_text("V = 'newer'\n")
        (place / "go").touch()
        assert second.communicate(timeout=30) == ("newer\n", "")


def test_a_program_that_closes_all_descriptors_imports_on(tree, tmp_path):
    place = tmp_path / "hook"
    place.mkdir()
    (place / "sitecustomize.py").write_bytes(HOOK.read_bytes())
    (place / "go").touch()
    (tree / "train.py").write_text("import os\nos.closerange(3, 256)\nimport colorsys, wave\nprint('on')\n")
    with run_of(tree, place) as run:
        assert run.communicate(timeout=30) == ("on\n", "")
    assert "colorsys" in (tmp_path / "names").read_text().split()


def test_a_package_that_is_only_looked_for_is_not_imported(tree, tmp_path):
    place = tmp_path / "hook"
    place.mkdir()
    (place / "sitecustomize.py").write_bytes(HOOK.read_bytes())
    (place / "go").touch()
    (tree / "train.py").write_text(
        "import importlib.util, colorsys\nassert importlib.util.find_spec('wave')\nimport chunk_of_nothing\n"
    )
    with run_of(tree, place) as run:
        assert "chunk_of_nothing" in run.communicate(timeout=30)[1]
    names = (tmp_path / "names").read_text().split()
    assert "colorsys" in names
    assert "wave" not in names


def test_the_image_s_own_sitecustomize_runs_too(tree, tmp_path):
    for name, text in (("hook", HOOK.read_text()), ("own", "print('own')\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(text)
    (tmp_path / "hook" / "go").touch()
    path = f"{tmp_path / 'hook'}:{tmp_path / 'own'}"
    done = subprocess.run(
        [sys.executable, "-c", "print('code')"],
        env=os.environ | {"PYTHONPATH": path, "ENVBUILD_DEV_TREE": str(tree)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "own\ncode\n"


def test_watch_asks_for_a_command(tmp_path):
    done = CliRunner().invoke(cli, ["dev", "x:y", str(tmp_path), "--watch"], standalone_mode=False)
    assert isinstance(done.exception, UsageError)
    assert done.exception.what == "no command to run again"

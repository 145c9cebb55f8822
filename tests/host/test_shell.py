"""The shell rendering: the lock's pins and no others, keys that follow the axes, refusals before anything is made."""

import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest
from cell_inputs import complete, inputs_for, inputs_for_stack, plan_for
from git_server import git_server
from test_plan import BASE

from envbuild.errors import UsageError
from envbuild.lock.files import Locked
from envbuild.lock.make import unlocked
from envbuild.lock.model import GitSource, Missing, Submodule
from envbuild.matrix.load import load_matrix
from envbuild.paths import data_dir
from envbuild.plan.plan import plan_of
from envbuild.plan.shell import HOST_PROVIDES, script
from envbuild.stacks.load import load_stack, stack_names

CUDA = BASE | {"flash-attn-hopper": "auto", "megatron": "auto"}
HOST_TOOLKIT = BASE | {"toolchain": "base", "base": None, "os": None, "python": None}


def plan(cell=CUDA, **changes):
    return plan_for(**{k: v for k, v in (cell | changes).items() if v is not None})


def keys(text):
    """Return the keys that the steps of a script start from, by step."""
    order = re.findall(r"^step (\S+) .*?\$key_(\d+)", text, re.MULTILINE)
    wheels = {f"key_{number}": name for name, number in order}
    found = re.findall(r"^(\w+)=\$\(key_of ([0-9a-f]{32})", text, re.MULTILINE)
    inline = re.findall(r'^step (\S+) "\$\(key_of ([0-9a-f]{32})', text, re.MULTILINE)
    return {wheels.get(name, name): key for name, key in found} | dict(inline)


def embedded(text, name):
    return re.search(rf"run/{re.escape(name)}\" <<'envbuild_end'\n(.*?)envbuild_end\n", text, re.DOTALL)[1]


@pytest.mark.parametrize("cell", [CUDA, HOST_TOOLKIT, {"cuda": "cpu"}])
def test_the_script_holds_every_pin_of_the_lock_and_no_other(cell):
    rendered = plan(cell)
    text = script(rendered)
    stated = {
        (name, version, tuple(re.findall("--hash=sha256:([0-9a-f]{64})", hashes)))
        for name, version, hashes in re.findall(r"^(\S+)==(\S+)((?: --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    }
    assert stated == {(p.name, p.version, p.hashes) for s in rendered.lock.python for p in s.packages}
    lock = json.loads(embedded(text, "lock.json"))
    assert {s["name"]: s["tree"] for s in lock.get("sources", ())} == {s.name: s.tree for s in rendered.lock.sources}
    assert {f["name"]: f["sha256"] for f in lock.get("files", ())} == {f.name: f.sha256 for f in rendered.lock.files}
    assert rendered.lock.digest in text.splitlines()[2]
    assert json.loads(embedded(text, "expected.json"))["lock_digest"] == rendered.lock.digest


AXES = {
    "te": ({"te": "2.11"}, {"wheel-te", "env_key"}, {"torch_key", "tools", "wheel-apex", "wheel-flash-attn-hopper"}),
    "apex": ({"apex": "25.09.post20260708"}, {"wheel-apex", "env_key"}, {"torch_key", "wheel-te"}),
    "gpu": ({"gpu": "a100", "flash-attn-hopper": None}, {"wheel-apex", "env_key"}, {"torch_key", "wheel-te"}),
    "torch": ({"torch": "2.12.0"}, {"torch_key"}, {"tools"}),
    "megatron": ({"megatron": None}, {"env_key"}, {"torch_key", "wheel-te", "wheel-apex", "wheel-flash-attn-hopper"}),
    "deepspeed": ({"deepspeed": "auto"}, {"wheel-deepspeed", "env_key"}, {"torch_key", "wheel-te", "wheel-apex"}),
}


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_changes_the_steps_that_it_bears_on_and_no_other(axis):
    changes, must, must_not = AXES[axis]
    before, after = (script(plan(**c)) for c in ({}, changes))
    a, b = keys(before), keys(after)
    assert before != after
    moved = {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    assert must <= moved, sorted(must - moved)
    assert not must_not & moved, sorted(must_not & moved)


def test_os_packages_and_base_images_change_no_step():
    """A host has its own: another libc of the image's must not compile anything again."""
    a, b = plan(), plan(overrides={"libc6": "2.0", "gcc": "2.0", "g++": "2.0"})
    assert a.lock.digest != b.lock.digest
    assert keys(script(a)) == keys(script(b))


def test_the_pypi_toolkit_is_there_only_where_the_plan_has_it():
    assert "CUDA toolkit from PyPI" in script(plan())
    assert "CUDA toolkit from PyPI" not in script(plan(HOST_TOOLKIT))
    assert "nvcc" not in script(plan({"cuda": "cpu"})).split("# --- the plan's own files")[0]


def test_unlocked_says_so_in_its_first_lines_and_adopts_nothing():
    matrix, inputs = load_matrix(), inputs_for(cuda="cpu")
    text = script(plan_of(matrix, Locked(lock=unlocked(matrix, inputs), pylocks={})))
    assert any(line.startswith("# UNLOCKED") for line in text.splitlines()[:5])
    assert "this script is unlocked, so no torch can be compared" in text


def test_a_host_has_its_own_images_and_os_packages():
    lock = complete(inputs_for(cuda="cpu")).lock
    of_the_host = (
        Missing(what="digest of docker.io/x:1 (base)", host="docker.io", stages=("base",)),
        Missing(what="OS packages on noble: gcc", host="archive.ubuntu.com", stages=("base", "devel")),
    )
    ours = Missing(what="source tree of apex at 123", host="github.com", stages=("src-apex",))
    assert lock.model_copy(update={"missing": (*of_the_host, ours)}).still_missing(HOST_PROVIDES) == (ours,)


def test_a_torch_that_exists_in_an_image_alone_is_refused():
    with pytest.raises(UsageError, match=r"exists only inside ngc-\S+,"):
        script(plan({"base": "ngc-*"}))


def stack_plan(name, path=None, **changes):
    matrix, stack = load_matrix(), load_stack(name)
    if path:
        changes["repository"] = stack.repository.model_copy(update={"path": path})
    stack = stack.model_copy(update=changes)
    return plan_of(matrix, Locked(lock=unlocked(matrix, inputs_for_stack(stack)), pylocks={}), stack)


@pytest.mark.parametrize("name", [n for n in stack_names() if n != "gpt2-3d"])
def test_a_stack_has_its_repository_patches_and_steps(name):
    made = stack_plan(name)
    text = script(made)
    assert f"step stack \"$stack_key\" 8 'stack {name}'" in text
    assert made.stack.repository.commit in text
    for patch in made.stack.patches:
        assert f"/{patch}.patch" in text
    for step in made.stack.steps:
        assert (f"inside step-{step.name}" in text) == bool(step.run)
        assert (f"inside check-{step.name}" in text) == bool(step.check)
    check(text)


def check(text):
    assert subprocess.run(["sh", "-n"], input=text, text=True, check=False).returncode == 0
    if shutil.which("shellcheck"):
        ran = subprocess.run(["shellcheck", "-s", "sh", "-"], input=text, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout


FA3 = {"cuda": "12.6", "gpu": "h100", "flash-attn-hopper": "auto", "apex": "none"}


@pytest.mark.parametrize("cell", [CUDA, HOST_TOOLKIT, {"cuda": "cpu"}, CUDA | {"mpi": "auto"}, FA3])
def test_the_shell_is_clean(cell):
    check(script(plan(cell)))


def moved(text, *, path=None, prefix="/p", cuda="/cuda"):
    """Return what the script's own function makes of a text; `path` is where the image has the repository."""
    (function,) = re.findall(r"(?ms)^here\(\) .*?^}$", script(stack_plan("llama3-70b", path)))
    variables = f"prefix={prefix}; state=$prefix/envbuild; CUDA_HOME={cuda}"
    command = ["sh", "-eu", "-c", f"{variables}\n{function}\nhere"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("prefix", ["/tmp/envbuild-mine", "/data/run/envbuild", "/opt/tools/venv", "/opt/openmpi"])
def test_a_prefix_may_look_like_a_path_of_the_image(prefix):
    paths = "/opt/venv/bin /opt/tools /opt/openmpi/lib /run/envbuild/uv /tmp/envbuild-src /usr/local/cuda/bin"
    paths_there = moved(paths, prefix=prefix, cuda="/usr/local/cuda-12.6")
    own = ("venv/bin", "tools", "mpi/lib", "envbuild/run/uv", "envbuild/tmp/src")
    assert paths_there.split() == [*(f"{prefix}/{path}" for path in own), "/usr/local/cuda-12.6/bin"]


def test_a_path_of_the_repository_is_moved_where_it_is_one_and_nowhere_else():
    text = "make -C megatron/data -I/data/x /data:/data /data /data2 a/data /database https://x/data\n"
    assert (
        moved(text, path="/data")
        == "make -C megatron/data -I/p/data/x /p/data:/p/data /p/data /data2 a/data /database https://x/data\n"
    )
    assert moved("/w/a.b /w/axb\n", path="/w/a.b") == "/p/a.b /w/axb\n"


@pytest.mark.parametrize("name", ["venv", "envbuild", "cuda", "tools", "toolchain", "mpi"])
def test_a_repository_never_lies_where_the_script_keeps_its_own(name):
    text = script(stack_plan("llama3-70b", f"/workspace/{name}"))
    assert f'\nrepository="$prefix/repository-{name}"\n' in text


def test_the_tools_of_a_stack_are_commands_of_its_environment(tmp_path):
    text = script(stack_plan("llama3-70b", tools=("encode-text",)))
    (line,) = re.findall(r"^ *(cp .*encode-text.*) \|\| return$", text, re.MULTILINE)
    (tmp_path / "run" / "tools").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "run" / "tools" / "encode-text").write_text(embedded(text, "tools/encode-text"))
    subprocess.run(["sh", "-euc", f"state=. venv=.; {line}"], cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "bin" / "encode-text", "--help"], capture_output=True, text=True, check=True)
    assert "--vocab" in done.stdout
    check(text)


def test_an_mpi_is_compiled_where_nothing_else_is():
    text = script(plan({"cuda": "13.0", "te": "none", "apex": "none", "mpi": "openmpi-5.0.5"}))
    assert re.search(r'^step mpi "\$\(key_of [0-9a-f]{32} "\$compiled_with"\)" 5 ', text, re.MULTILINE)
    assert "step tools" not in text
    assert "and this cell compiles" in text
    check(text)


@pytest.mark.parametrize(
    ("compiler", "code", "text"),
    [
        (None, 0, ""),
        ("g++ -O1", 0, ""),
        ("g++ -static-libstdc++", 8, "the C++ compiler g++ -static-libstdc++ does not link libstdc++.so.6"),
        ("no-such-g++", 8, "the C++ compiler no-such-g++ does not compile"),
    ],
)
def test_a_compiler_that_gives_each_module_a_copy_of_libstdcxx_is_refused(tmp_path, compiler, code, text):
    body = script(stack_plan("llama3-70b"))
    start, end = body.index("# torch loads libstdc++.so.6."), body.index('rm -f "$state/tmp/cxx.so"')
    (tmp_path / "tmp").mkdir()
    front = 'refuse() { echo "$2"; exit "$1"; }\nstate=.\n'
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    environment |= {"CXX": compiler} if compiler else {}
    done = subprocess.run(
        ["sh", "-eu"],
        input=front + body[start:end],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert text in done.stdout


def test_a_variable_is_not_left_out_for_its_maker():
    text = script(stack_plan("llama3-70b", environment={"NVIDIA_TF32_OVERRIDE": "0", "B": "/data:$PATH"}))
    assert "export NVIDIA_TF32_OVERRIDE=0\n" in text
    assert "export B='/data:$PATH'\n" in text
    assert "NVIDIA_VISIBLE_DEVICES=" not in text.split("activate.sh")[1]


def test_what_is_missing_in_the_environment_stays_expected_but_for_what_comes_with_torch(tmp_path):
    (tmp_path / "run").mkdir()
    packages = {"pytest": "9", "einops-not-here": "1", "nvidia-not-here": "1"}
    expected = {"cell_id": "c", "lock_digest": "d", "packages": packages}
    (tmp_path / "run" / "expected.json").write_text(json.dumps(expected))
    (tmp_path / "adopted.json").write_text(json.dumps({"installed": {"torch": "2.11.0"}}))
    record = data_dir("dockerfiles") / "host" / "record"
    subprocess.run([sys.executable, record, tmp_path], check=True)
    assert set(json.loads((tmp_path / "expected.json").read_text())["packages"]) == {"pytest", "einops-not-here"}
    assert json.loads((tmp_path / "record.json").read_text())["not_as_packages"] == ["nvidia-not-here"]


def test_a_build_finds_what_it_would_fetch(tmp_path):
    """The script's own function, with the source and the compile of FA3 replaced: both archives are where setup.py looks."""
    text = script(plan(FA3))
    (function,) = re.findall(r"(?ms)^make_wheel\(\) .*?^}$", text)
    site = tmp_path / "site"
    site.mkdir()
    files = {}
    for name in ("nvcc", "ptxas"):
        archive = site / f"{name}-archive.tar.xz"
        archive.write_bytes(name.encode())
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        files[f"flash-attn-hopper-{name}"] = {"url": f"https://x.example/{archive.name}", "sha256": digest}
    files["flash-attn-hopper"] = files["flash-attn-hopper-nvcc"]  # any source will do
    state = tmp_path / "state"
    (state / "run" / "jobs").mkdir(parents=True)
    (state / "run" / "lock.json").write_text(json.dumps({"files": [{"name": n, **f} for n, f in files.items()]}))
    # plain-words: allow bring - the file's name
    shutil.copy(data_dir("dockerfiles") / "host" / "bring", state / "run" / "bring")
    variables = f'state={state} wheels="" sources={site} offline=1 python={sys.executable}'
    stubs = "jobs_for() { echo 1; }; compile() { (cd $state/run/downloads && find . -type f | sort); }"
    ran = subprocess.run(
        ["sh", "-eu", "-c", f"{variables}\n{stubs}\n{function}\nmake_wheel flash-attn-hopper key 1 compile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = [word for word in ran.stdout.split() if word.startswith("./")]
    assert found == [f"./.flashattn/nvidia/{name}/{name}-archive.tar.xz" for name in ("nvcc", "ptxas")]


# -- refusals of the script itself --------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """Run a cell's script with a Python that says it is the cell's, and nothing of this machine's CUDA."""

    def call(cell, *args, **env):
        made = plan(cell)
        file = tmp_path / "cell.sh"
        file.write_text(script(made))
        python = tmp_path / "python"
        version = made.cell.versions["python"]
        python.write_text(
            f'#!/bin/sh\ncase "$2" in *version_info*) echo {version} ;; *sys.executable*) echo {python} ;;\n'
            f'*) exec {sys.executable} "$@" ;; esac\n'
        )
        python.chmod(0o755)
        base = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "ENVBUILD_PREFIX": str(tmp_path / "p"),
            "ENVBUILD_PYTHON": str(python),
        }
        return subprocess.run(["sh", file, *args], env=base | env, capture_output=True, text=True, check=False)

    return call


@pytest.mark.parametrize(
    ("args", "env", "code", "message"),
    [
        (["--upside-down"], {}, 2, "there is no option --upside-down"),
        (["--sources"], {}, 2, "--sources needs a value"),
        ([], {"ENVBUILD_PREFIX": "/tmp/a b"}, 2, "letters, digits"),
        (["--wheels", "/nowhere/at/all"], {}, 8, "there is no folder /nowhere/at/all"),
        ([], {"ENVBUILD_PYTHON": "python3.99"}, 8, "python3.99 does not run"),
        (["--adopt-torch", "/nowhere/python"], {}, 8, "/nowhere/python does not run"),
        (["--adopt-torch", "/bin/echo"], {}, 4, "the cell is for Python 3."),
    ],
)
def test_what_cannot_work_is_refused_at_once(run, args, env, code, message):
    done = run({"cuda": "cpu"}, *args, **env)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_another_toolkit_is_refused_with_both_versions(run, tmp_path):
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    if Path("/usr/local/cuda-13.0/bin/nvcc").exists():
        cell, wanted = HOST_TOOLKIT | {"cuda": "12.8", "te": "auto", "torch": "auto", "apex": "none"}, "12.8"
    else:
        cell, wanted = HOST_TOOLKIT, "13.0"
    done = run(cell, CUDA_HOME=str(nvcc.parents[1]))
    assert done.returncode == 8, done.stderr
    assert f"no CUDA {wanted} toolkit is here" in done.stderr
    assert "has nvcc 12.4" in done.stderr


# -- what it installs ---------------------------------------------------------------------------------------------------


def git(folder, *args):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(
        ["git", *identity, *args], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def fetch_by_script(*args):
    helper = data_dir("dockerfiles") / "host" / "bring"  # plain-words: allow bring - the file's name
    return subprocess.run([sys.executable, helper, *map(str, args)], capture_output=True, text=True, check=False)


@pytest.fixture
def upstream(tmp_path):
    """A clone with modes, links, names that sort oddly and two submodules, of which one is used."""
    folder = tmp_path / "clones" / "lib"
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / "deps").mkdir()
    for name in ("a", "a-b", "a.c", "deps/x", "é"):
        (folder / name).write_text(name)
    (folder / "a0").mkdir()
    (folder / "a0" / "run").write_text("#!/bin/sh\n")
    (folder / "a0" / "run").chmod(0o755)
    (folder / "link").symlink_to("a0/run")
    git(folder, "add", "-A")
    part = tmp_path / "clones" / "part"
    part.mkdir()
    git(part, "init", "-q")
    (part / "part.h").write_text("int x;\n")
    git(part, "add", "-A")
    git(part, "commit", "-qm", "1")
    commit = git(part, "rev-parse", "HEAD")
    for path in ("deps/part", "other"):
        git(folder, "update-index", "--add", "--cacheinfo", f"160000,{commit},{path}")
    git(folder, "commit", "-qm", "1")
    url = "https://unreachable.invalid/x"
    source = GitSource(
        name="thing",
        url=f"{url}/lib.git",
        commit=git(folder, "rev-parse", "HEAD"),
        tree=git(folder, "rev-parse", "HEAD^{tree}"),
        submodules=(
            Submodule(
                path="deps/part", url=f"{url}/part.git", commit=commit, tree=git(part, "rev-parse", "HEAD^{tree}")
            ),
            Submodule(path="other", url="", commit=commit, used=False),
        ),
    )
    lock = tmp_path / "lock.json"
    lock.write_text(json.dumps({"sources": [source.model_dump(exclude_defaults=True)]}))
    return tmp_path / "clones", source, lock


def test_a_clone_a_folder_and_an_archive_give_the_same_verified_tree(upstream, tmp_path):
    clones, source, lock = upstream
    dest = tmp_path / "one"
    done = fetch_by_script("source", lock, "thing", dest, clones, "1")
    assert done.returncode == 0, done.stderr
    assert f"tree {source.tree}" in done.stdout
    assert (dest / "deps" / "part" / "part.h").read_text() == "int x;\n"
    assert not (dest / ".git").exists()
    plain = tmp_path / "plain"
    shutil.copytree(dest, plain / f"thing-{source.commit}", symlinks=True)
    packed = tmp_path / "packed"
    packed.mkdir()
    with tarfile.open(packed / f"lib-{source.commit}.tar.gz", "w:gz") as tar:
        tar.add(dest, "lib-inner")
    for site in (plain, packed):
        done = fetch_by_script("source", lock, "thing", tmp_path / "two", site, "1")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "two" / "link").is_symlink()


@pytest.mark.parametrize("path", ["a", "deps/part/part.h"])
def test_a_changed_tree_is_refused_with_both_ids(upstream, tmp_path, path):
    clones, source, lock = upstream
    fetch_by_script("source", lock, "thing", tmp_path / "one", clones, "1")
    site = tmp_path / "site" / f"thing-{source.commit}"
    shutil.copytree(tmp_path / "one", site, symlinks=True)
    (site / path).write_text("other")
    done = fetch_by_script("source", lock, "thing", tmp_path / "two", tmp_path / "site", "1")
    assert done.returncode == 4
    assert "is not what the lock names" in done.stderr
    assert (source.submodules[0].tree if "part" in path else source.tree) in done.stderr


def test_a_tree_made_small_is_verified_in_what_it_has(upstream, tmp_path):
    clones, source, lock = upstream
    fetch_by_script("source", lock, "thing", tmp_path / "one", clones, "1")
    site = tmp_path / "site"
    tree = site / f"thing-{source.commit}"
    shutil.copytree(tmp_path / "one", tree, symlinks=True)
    listed = [
        line
        for line in git(clones / "lib", "ls-tree", "-r", "HEAD").splitlines()
        if "a0/run" in line or "\ta.c" in line
    ]
    shutil.rmtree(tree / "a0")
    (tree / "a.c").unlink()
    assert fetch_by_script("source", lock, "thing", tmp_path / "two", site, "1").returncode == 4
    (site / f"thing-{source.commit}.absent").write_text("".join(f"{line}\n" for line in listed))
    done = fetch_by_script("source", lock, "thing", tmp_path / "two", site, "1")
    assert done.returncode == 0, done.stderr
    assert "without 2 files that its list names" in done.stdout
    (tree / "a-b").write_text("other")
    assert fetch_by_script("source", lock, "thing", tmp_path / "two", site, "1").returncode == 4


def test_a_source_that_cannot_be_had_says_where_to_put_it(upstream, tmp_path):
    _, source, lock = upstream
    done = fetch_by_script("source", lock, "thing", tmp_path / "one", tmp_path / "empty", "1")
    assert done.returncode == 8
    assert f"put it there as thing-{source.commit}" in done.stderr


def test_a_file_is_held_against_its_hash(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "te-1.0.tar.gz").write_bytes(b"x")
    lock = tmp_path / "lock.json"
    good = hashlib.sha256(b"x").hexdigest()
    lock.write_text(json.dumps({"files": [{"name": "te", "url": "https://h.invalid/a/te-1.0.tar.gz", "sha256": good}]}))
    assert fetch_by_script("source", lock, "te", tmp_path / "d", site, "1").returncode == 0
    (site / "te-1.0.tar.gz").write_bytes(b"y")
    done = fetch_by_script("source", lock, "te", tmp_path / "d", site, "1")
    assert done.returncode == 4
    assert good in done.stderr


def test_a_wheel_compiled_elsewhere_is_held_against_its_record(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "a.whl").write_bytes(b"x")
    (kept / "record.json").write_text(json.dumps({"wheel": "a.whl", "sha256": hashlib.sha256(b"x").hexdigest()}))
    assert fetch_by_script("wheel", kept, tmp_path / "one").returncode == 0
    (kept / "a.whl").write_bytes(b"y")
    assert fetch_by_script("wheel", kept, tmp_path / "two").returncode == 4
    assert not (tmp_path / "two").exists()


# -- a torch that the host has ------------------------------------------------------------------------------------------


@pytest.fixture
def look(tmp_path):
    """Let `adopt look` find a torch 2.11.0 for CUDA 13.0 with these packages next to it, where the lock names others."""

    def call(packages, hip=None):
        site = tmp_path / "host" / "site-packages"
        (site / "torch").mkdir(parents=True)
        (site / "torch" / "__init__.py").write_text(
            "from types import SimpleNamespace as N\n__version__ = '2.11.0+cu130'\n"
            f"version = N(cuda={None if hip else '13.0'!r}, hip={hip!r})\n_C = N(_GLIBCXX_USE_CXX11_ABI=True)\n"
        )
        for name, version in packages.items():
            folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            module = f"{name.replace('-', '/')}/__init__.py"  # cuda-bindings is cuda.bindings, in a folder of several
            (site / module).parent.mkdir(parents=True, exist_ok=True)
            (site / module).write_text(f"__version__ = {version!r}\n")
            (folder / "RECORD").write_text(f"{module},,\n{folder.name}/METADATA,,\n../../../bin/{name},,\n")
            if name == "nvidia-cusparselt":  # its wheel has libraries alone, and its top_level.txt names a path
                (folder / "top_level.txt").write_text("nvidia/cusparselt\n")
                (site / module).rename(site / "nvidia" / "cusparselt" / "libcusparseLt.so.0")
                (site / "nvidia" / "cusparselt" / "lib").mkdir()
        names = tmp_path / "names.txt"
        hashed = f" --hash=sha256:{'0' * 64}"
        pins = ("nvidia-cudnn-cu13==9.19.0.56", "nvidia-nccl-cu13==2.28.9", "nvidia-cublas==13.1.0.3", "sympy==1.14.0",
                "numpy==1.26.4", "setuptools==81.0.0")  # fmt: skip
        names.write_text("".join(f"{pin}{hashed}\n" for pin in pins))
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        command = [
            sys.executable,
            data_dir("dockerfiles") / "host" / "adopt",
            "look",
            "2.11.0+cu130",
            "cpu" if hip else "13.0",
        ]
        return subprocess.run(
            [*command, "cxx11", python, names],
            env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    return call


def test_what_belongs_to_the_torch_is_adopted_as_it_is_and_the_rest_only_as_the_lock_names_it(look):
    taken = {"nvidia-cudnn-cu13": "9.19.0.56", "nvidia-cublas": "13.2.0.9", "sympy": "1.14.0"}
    done = look({**taken, "numpy": "2.5.2", "setuptools": "81.0.0"})  # whose distutils only its own folder shows
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["installed"] == taken | {"torch": "2.11.0+cu130"}


def test_an_environment_sees_what_was_adopted_and_nothing_else_of_the_host(look, tmp_path):
    """Its own come first: of numpy the lock names another, and scipy, which would take the host's, it does not name."""
    taken = {"nvidia-cublas": "13.2.0.9", "nvidia-cusparselt": "0.8.0", "cuda-bindings": "13.3.1", "sympy": "1.14.0"}
    looked = tmp_path / "looked.json"
    looked.write_text(look({**taken, "numpy": "2.5.2", "scipy": "1.17.0", "setuptools": "81.0.0"}).stdout)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "cuda" / "core").mkdir(parents=True)  # a part of the environment's own in a folder of several
    (site / "cuda" / "core" / "__init__.py").touch()
    adopt = [sys.executable, data_dir("dockerfiles") / "host" / "adopt", "join", looked, venv, site]
    subprocess.run([*adopt, tmp_path / "names.txt", tmp_path / "rest.txt"], check=True)
    assert [line.split("==")[0] for line in (tmp_path / "rest.txt").read_text().splitlines()] == ["numpy", "setuptools"]
    code = """
import importlib, json
from importlib import metadata
def found(name):
    try:
        return getattr(importlib.import_module(name), "__version__", None)
    except ImportError:
        return "none"
names = ("torch", "sympy", "nvidia.cublas", "cuda.bindings", "cuda.core", "numpy", "scipy", "setuptools")
print(json.dumps([{name: found(name) for name in names}, {d.metadata["Name"]: d.version for d in metadata.distributions()}, metadata.version("sympy")]))
"""
    done = subprocess.run([venv / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    modules, distributions, version = json.loads(done.stdout)
    assert modules == {
        "torch": "2.11.0+cu130",
        "sympy": "1.14.0",
        "nvidia.cublas": "13.2.0.9",
        "cuda.bindings": "13.3.1",
        "cuda.core": None,
        "numpy": "none",
        "scipy": "none",
        "setuptools": "none",
    }
    assert (distributions, version) == (taken, "1.14.0")


@pytest.mark.parametrize(
    ("name", "found", "wanted"),
    [("nvidia-cudnn-cu13", "9.20.0.48", "9.19.0.56"), ("nvidia-nccl-cu13", "2.29.2", "2.28.9")],
)
def test_another_cudnn_or_nccl_than_the_lock_names_is_refused(look, name, found, wanted):
    done = look({name: found})
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == f"envbuild: {name} at {sys.executable} is {found}, the lock says {wanted}\n"


def test_a_torch_for_rocm_is_refused_for_a_cell_without_cuda(look):
    done = look({}, hip="7.0")
    assert done.returncode == 4
    assert "2.11.0+cu130, built for ROCm 7.0, the lock says 2.11.0+cu130" in done.stderr


# -- what a lock, a folder of sources or an upstream of somebody else's can have it do ------------------------------------


def lock_of(tmp_path, **source):
    lock = tmp_path / "hostile.json"
    lock.write_text(json.dumps({"sources": [{"name": "thing", "url": "https://127.0.0.1:1/x.git"} | source]}))
    return lock


@pytest.mark.parametrize(
    "source",
    [
        {"url": "--upload-pack=touch {marker}", "commit": "1" * 40},
        {"url": "ext::sh -c touch% {marker}", "commit": "1" * 40},
        {"url": "http://127.0.0.1:1/x", "commit": "1" * 40},
        {"commit": "--upload-pack=touch {marker}"},
        {"commit": 5},
        {"commit": "1" * 40, "tree": "x"},
        {"commit": "1" * 40, "submodules": [{"path": "../x", "url": "https://127.0.0.1:1/x", "commit": "1" * 40}]},
        {
            "commit": "1" * 40,
            "submodules": [{"path": "a/.git/hooks", "url": "https://127.0.0.1:1/x", "commit": "1" * 40}],
        },
        {"commit": "1" * 40, "submodules": [{"path": "a", "url": "--upload-pack=x", "commit": "1" * 40}]},
        {"commit": "1" * 40, "submodules": "x"},
        {"commit": "1" * 40, "submodules": ["x"]},
    ],
)
def test_a_hostile_field_of_a_lock_is_one_message(tmp_path, source):
    marker = tmp_path / "marker"
    filled = json.loads(json.dumps(source).replace("{marker}", str(marker)))
    done = fetch_by_script("source", lock_of(tmp_path, **filled), "thing", tmp_path / "one", "", "0")
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "can be used" in done.stderr
    assert not marker.exists()


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"sources": 5}', '{"sources": [5]}', "\xff"])
def test_a_lock_that_is_none_is_one_message(tmp_path, text):
    (tmp_path / "lock.json").write_text(text, encoding="latin-1")
    done = fetch_by_script("source", tmp_path / "lock.json", "thing", tmp_path / "one", "", "0")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr


def test_another_protocol_is_asked_for(tmp_path, upstream, monkeypatch):
    clones, source, _ = upstream
    lock = lock_of(tmp_path, url=f"file://{clones}/part", commit=source.submodules[0].commit)
    done = fetch_by_script("source", lock, "thing", tmp_path / "one", "", "0")
    assert done.returncode == 2
    assert "ENVBUILD_GIT_PROTOCOLS" in done.stderr
    monkeypatch.setenv("ENVBUILD_GIT_PROTOCOLS", "file")
    assert fetch_by_script("source", lock, "thing", tmp_path / "one", "", "0").returncode == 0
    assert (tmp_path / "one/part.h").is_file()


def test_an_upstream_is_fetched_over_https(tmp_path, upstream, monkeypatch):
    clones, source, _ = upstream
    with git_server(clones, tmp_path / "private") as served:
        lock = lock_of(tmp_path, url=f"{served.url}/part/.git", commit=source.submodules[0].commit)
        monkeypatch.delenv("GIT_SSL_CAINFO", raising=False)
        monkeypatch.setenv("SSL_CERT_FILE", str(served.certificate))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setenv("GIT_SSH_COMMAND", f"touch {tmp_path}/marker")
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
        (tmp_path / "gitconfig").write_text(f'[url "https://127.0.0.1:1/"]\n\tinsteadOf = {served.url}/\n')
        done = fetch_by_script("source", lock, "thing", tmp_path / "one", "", "0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "one/part.h").is_file()


def test_a_clones_own_configuration_runs_nothing(tmp_path, upstream):
    clones, _, lock = upstream
    marker = tmp_path / "marker"
    script = tmp_path / "touch"
    script.write_text(f"#!/bin/sh\ntouch {marker}\n")
    script.chmod(0o755)
    for key in (
        "core.fsmonitor",
        "core.sshCommand",
        "filter.x.smudge",
        "filter.x.process",
        "core.alternateRefsCommand",
    ):
        git(clones / "lib", "config", key, script)
    (clones / "lib/.git/info/attributes").write_text("* filter=x\n")
    for hook in ("post-checkout", "post-index-change"):
        shutil.copy(script, clones / "lib/.git/hooks" / hook)
    done = fetch_by_script("source", lock, "thing", tmp_path / "one", clones, "1")
    assert done.returncode == 0, done.stderr
    assert not marker.exists()


def test_a_submodule_behind_a_link_stays_in_its_tree(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    place = tmp_path / "site" / f"thing-{'1' * 40}"
    place.mkdir(parents=True)
    (place / "sub").symlink_to(outside)
    part = tmp_path / "site" / f"thing-sub-x-{'2' * 40}"
    part.mkdir()
    (part / "file").write_text("x")
    submodule = {"path": "sub/x", "url": "https://127.0.0.1:1/x", "commit": "2" * 40}
    lock = lock_of(tmp_path, commit="1" * 40, submodules=[submodule])
    done = fetch_by_script("source", lock, "thing", tmp_path / "one", tmp_path / "site", "1")
    assert done.returncode == 4, done.stderr
    assert not list(outside.iterdir())


def test_a_fifo_among_the_sources_does_not_hang(tmp_path):
    place = tmp_path / "site" / f"thing-{'1' * 40}"
    place.mkdir(parents=True)
    os.mkfifo(place / "fifo")
    done = fetch_by_script(
        "source", lock_of(tmp_path, commit="1" * 40), "thing", tmp_path / "one", tmp_path / "site", "1"
    )
    assert done.returncode == 4, done.stderr
    assert "neither a file" in done.stderr


@pytest.mark.parametrize("kind", ["outside", "link", "fifo", "behind"])
def test_an_archive_among_the_sources_stays_in_its_folder(tmp_path, kind):
    (tmp_path / "site").mkdir()
    with tarfile.open(tmp_path / "site" / f"thing-{'1' * 40}.tar", "w") as tar:
        member = tarfile.TarInfo({"outside": "../../marker"}.get(kind, "a"))
        if kind == "link":
            member.type, member.linkname = tarfile.SYMTYPE, str(tmp_path)
        if kind == "behind":
            member.type, member.linkname = tarfile.SYMTYPE, "."
        if kind == "fifo":
            member.type = tarfile.FIFOTYPE
        tar.addfile(member)
        tar.addfile(tarfile.TarInfo("a/marker"))
    done = fetch_by_script(
        "source", lock_of(tmp_path, commit="1" * 40), "thing", tmp_path / "one", tmp_path / "site", "1"
    )
    assert done.returncode == 4, done.stderr
    assert "cannot be unpacked" in done.stderr
    assert not list(tmp_path.rglob("marker"))


def file_lock(tmp_path, url, body=b"x"):
    lock = tmp_path / "lock.json"
    lock.write_text(json.dumps({"files": [{"name": "te", "url": url, "sha256": hashlib.sha256(body).hexdigest()}]}))
    return lock


class Answer(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        if self.path.startswith("/redirect"):
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", "3" if "short" in self.path else "1")
        self.end_headers()
        self.wfile.write(b"x")


@pytest.mark.parametrize(
    ("path", "code"),
    [("good.tar.gz", 0), ("short.tar.gz", 8), ("redirect.tar.gz", 8), ("..", 2), (".hidden", 2), ("", 2)],
)
def test_a_file_is_downloaded_whole_or_not_at_all(tmp_path, path, code):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        lock = file_lock(tmp_path, f"http://127.0.0.1:{server.server_address[1]}/{path}")
        done = fetch_by_script("source", lock, "te", tmp_path / "d", "", "0")
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == code, done.stderr
    held = list((tmp_path / "d").iterdir()) if (tmp_path / "d").exists() else []
    assert [p.name for p in held] == ([path] if code == 0 else [])


def test_a_file_of_another_hash_is_not_left(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site/a.tar").write_text("other")
    done = fetch_by_script(
        "source", file_lock(tmp_path, "https://127.0.0.1:1/a.tar"), "te", tmp_path / "d", tmp_path / "site", "1"
    )
    assert done.returncode == 4
    assert not list((tmp_path / "d").iterdir())


def test_a_folder_of_a_wheel_gives_what_its_record_names(tmp_path):
    """The script installs every wheel of that folder."""
    kept = tmp_path / "te-key"
    kept.mkdir()
    (kept / "te.whl").write_bytes(b"x")
    (kept / "other.whl").write_bytes(b"hostile")
    record = {"wheel": "te.whl", "sha256": hashlib.sha256(b"x").hexdigest()}
    (kept / "record.json").write_text(json.dumps(record))
    done = fetch_by_script("wheel", kept, tmp_path / "one")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["record.json", "te.whl"]
    for wheel in ("../te.whl", "/etc/passwd", 5):
        (kept / "record.json").write_text(json.dumps(record | {"wheel": wheel}))
        assert fetch_by_script("wheel", kept, tmp_path / "two").returncode == 2

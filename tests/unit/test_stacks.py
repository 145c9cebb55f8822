"""The five stacks as data, and what a user's own stack file may get wrong."""

import json
import re
from pathlib import Path

import pytest
from cell_inputs import complete, inputs_for_stack

from envbuild.cli import main
from envbuild.errors import DataError, LockError, NoCellError, UsageError
from envbuild.lock.files import Locked
from envbuild.lock.inputs import inputs_of
from envbuild.lock.make import unlocked
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.matrix.spec import matches
from envbuild.patches.manifest import load_patches
from envbuild.plan.dockerfile import dockerfile
from envbuild.plan.plan import plan_of
from envbuild.recipes.catalog import findings_catalog
from envbuild.solver.enumerate import enumerate_cells
from envbuild.solver.solve import solve
from envbuild.stacks.load import load_stack, stack_names, stack_of_lock

FIVE = ("alcf", "gpt2-3d", "llama3-70b", "llm-jp", "megatron-gpt3")
STACKS = Path(__file__).parents[2] / "matrices" / "stacks"


def _solution(stack, **flags):
    pins = [Pin(axis=a, spec=s, origin=f"stack {stack.name}") for a, s in stack.axes.items()]
    pins += [Pin(axis=a, spec=s, origin=f"--{a}") for a, s in flags.items()]
    return solve(load_matrix(), Request(pins=tuple(pins), repository=True))


def _plan(stack):
    matrix = load_matrix()
    return plan_of(matrix, Locked(lock=unlocked(matrix, inputs_for_stack(stack)), pylocks={}), stack)


def test_the_five_are_shipped():
    assert stack_names() == FIVE


@pytest.mark.parametrize("name", FIVE)
def test_resolves_to_what_was_stated_but_for_the_corrections(name):
    matrix, stack = load_matrix(), load_stack(name)
    cell = _solution(stack).cell
    corrected = {c.item: c.instead for c in stack.corrections if c.item in stack.stated}
    for axis, stated in stack.stated.items():
        spec = corrected.get(axis, stated)
        if spec == "none":
            assert axis not in cell.versions
        elif matrix.has(axis, cell.versions[axis]):
            assert spec == "any" or matches(matrix.axes[axis], spec, matrix.release(axis, cell.versions[axis]))
        else:  # an exact driver of an open axis
            assert cell.versions[axis] == spec


@pytest.mark.parametrize("name", FIVE)
def test_a_correction_names_a_rule_that_speaks_against_what_was_stated(name):
    matrix, stack = load_matrix(), load_stack(name)
    rules = {rule.id: rule for rule in matrix.rules}
    for correction in stack.corrections:
        assert correction.rule in rules or correction.rule in findings_catalog()
        assert correction.stated != correction.instead
        rule = rules.get(correction.rule)
        if rule and correction.item in stack.stated:
            named = {*rule.when, *rule.needs, *rule.same, *rule.with_}
            # the rule is of the corrected axis, or of one that it is bound to
            assert correction.item in named or correction.item in {"torch", "cuda", "deepspeed", "python"}


def test_stated_inert_build_is_refused_by_the_rule_that_the_correction_names():
    stack = load_stack("llama3-70b")
    pins = tuple(Pin(axis=a, spec=s, origin="stated") for a, s in stack.stated.items())
    with pytest.raises(NoCellError) as caught:
        solve(load_matrix(), Request(pins=pins))
    assert "fa3-lookup-fa3" in {step.rule for step in caught.value.conflict.steps}


def test_megatron_is_the_commit_of_its_axis():
    for name in ("llama3-70b", "megatron-gpt3"):
        stack = load_stack(name)
        assert _solution(stack).cell.commits["megatron"] == stack.repository.commit


def test_gpt2_3d_cannot_reach_hopper_and_says_so():
    with pytest.raises(NoCellError, match="sm_90"):
        _solution(load_stack("gpt2-3d"), gpu="h100")


@pytest.mark.parametrize("name", FIVE)
def test_patches_exist_and_know_the_pin(name):
    stack, known = load_stack(name), load_patches()
    assert stack.patches
    for patch in stack.patches:
        assert stack.repository.commit in {revision.commit for revision in known[patch].revisions}
        assert name in known[patch].stacks


def test_every_patch_is_in_a_stack():
    used = {(patch, name) for name in FIVE for patch in load_stack(name).patches}
    assert used == {(patch.name, stack) for patch in load_patches().values() for stack in patch.stacks}


def test_second_pin_of_llm_jp_needs_no_patch():
    stack = load_stack("llm-jp@deepspeed-multi-node")
    assert stack.repository.commit.startswith("6740c1e1")
    assert stack.patches == ()
    assert _solution(stack).cell == _solution(load_stack("llm-jp")).cell
    with pytest.raises(UsageError, match="no pin 'main'"):
        load_stack("llm-jp@main")


@pytest.mark.parametrize("name", FIVE)
def test_dockerfile_checks_out_patches_compiles_and_checks(name):
    stack = load_stack(name)
    text = dockerfile(_plan(stack))
    repository = stack.repository
    assert f"ADD {repository.url}#{repository.commit} /" in text
    assert f"FROM builder AS tree-{repository.name}\n" in text
    assert ("sh /run/envbuild/recipe/patch-tree\n" in text) == bool(stack.patches)
    assert f"FROM tree-{repository.name} AS compiled-{repository.name}" in text
    assert "FROM stack AS image" in text
    for step in stack.steps:
        assert (f"sh /run/envbuild/recipe/check-{step.name}" in text) == bool(step.check)
    for build in stack.builds:
        assert f"AS wheel-{build.name}\n" in text


def test_what_is_compiled_against_torch_comes_from_its_index():
    plan = _plan(load_stack("llm-jp"))
    torch = plan.lock.python_set("torch")
    assert torch.requirements == ("torch==2.0.1+cu118", "numpy<1.24", "torchvision==0.15.2+cu118")
    assert torch.index == "https://download.pytorch.org/whl/cu118"
    assert "torchvision" not in " ".join(plan.lock.python_set("env").requirements)


def test_impostors_are_never_installed_from_the_index():
    for name in FIVE:
        plan = _plan(load_stack(name))
        for python_set in plan.lock.python:
            names = {re.split(r"[<>=!\[ ]", r)[0] for r in python_set.requirements}
            assert not names & {"apex", "ezpz", "flash-attn-3"}


def test_another_megatron_pin_compiles_no_kernel_again():
    stack = load_stack("llama3-70b")
    # dist-checkpoint knows one revision
    stack = stack.model_copy(update={"patches": tuple(name for name in stack.patches if name != "dist-checkpoint")})
    other = stack.model_copy(
        update={
            "repository": stack.repository.model_copy(update={"commit": "64cb6bd7a155c4e742514ed1024407fb97d0a367"})
        }
    )
    before = {s.name: s.key for s in _plan(stack).stages}
    after = {s.name: s.key for s in _plan(other).stages}
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"tree-megatron-lm", "compiled-megatron-lm", "stack", "image"}


def test_another_patch_changes_the_tree_and_no_wheel():
    stack = load_stack("llama3-70b")
    other = stack.model_copy(update={"patches": ("fix-convert",)})
    before = {s.name: s.key for s in _plan(stack).stages}
    after = {s.name: s.key for s in _plan(other).stages}
    assert not {n for n in before if n.startswith("wheel-") and before[n] != after[n]}
    assert before["tree-megatron-lm"] != after["tree-megatron-lm"]


def test_devel_flavor_starts_from_the_base_with_the_compiler():
    plan = _plan(load_stack("llm-jp"))
    assert {i.reference for i in plan.lock.images} == {"docker.io/nvidia/cuda:11.8.0-cudnn8-devel-ubuntu22.04"}
    assert "/usr/local/cuda/bin" in plan.environment["PATH"]
    assert "nvidia" not in _plan(load_stack("megatron-gpt3")).lock.images[0].reference


def test_ngc_stack_takes_torch_from_its_image():
    plan = _plan(load_stack("gpt2-3d"))
    assert not plan.has("torch")
    assert plan.provided == ("numpy", "torch")
    assert [c.axis for c in plan.components] == ["deepspeed"]
    text = dockerfile(plan)
    assert 'ENV PATH="/opt/venv/bin:$PATH"' in text
    assert "ENVBUILD_SYSTEM_SITE=1" in text


def test_a_changed_stack_does_not_go_with_its_old_lock():
    matrix, stack = load_matrix(), load_stack("llm-jp")
    inputs = inputs_of(matrix, _solution(stack).cell, stack=stack, flavor=stack.flavor)
    locked = Locked(lock=unlocked(matrix, inputs), pylocks={})
    assert plan_of(matrix, locked, stack).lock.stack == "llm-jp"
    changed = stack.model_copy(update={"environment": {"X": "1"}})
    with pytest.raises(LockError, match="has changed since this lock was made") as refused:
        plan_of(matrix, locked, changed)
    assert "--stack FILE" in refused.value.hint  # a user's own may have a shipped one's name


# -- a user's own file ------------------------------------------------------------------------------------------------


def _own(tmp_path, *changes, source="llm-jp"):
    text = (STACKS / f"{source}.toml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_own_file_of_the_same_schema(tmp_path):
    stack = load_stack(_own(tmp_path, ('name = "llm-jp"', 'name = "mine"')))
    assert stack.name == "mine"
    assert _solution(stack).cell == _solution(load_stack("llm-jp")).cell


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[stated]", 'colour = "red"\n[stated]', "colour"),
        ('commit = "a43b9cb5904e6cca211278f8b2f07f0e82d65c82"', 'commit = "a43b9cb"', "repository.commit"),
        (
            'commit = "a43b9cb5904e6cca211278f8b2f07f0e82d65c82"',
            f'commit = "{"1" * 40}"',
            "patch makefile is for another revision: it knows hpc/fujii/new-mds",
        ),
        ('patches = ["makefile", "fused-kernels"]', 'patches = ["nonsuch"]', "there is no patch 'nonsuch'"),
        (
            'patches = ["makefile", "fused-kernels"]',
            'patches = ["sgd"]',
            "patch sgd is for https://github.com/NVIDIA/Megatron-LM",
        ),
        ('[[steps]]\nname = "helpers"\n', "[[steps]]\n", "steps.0.name"),
        ('run = "make -C megatron/data"\ncompiles = true\n', "compiles = true\n", "compiles, so it needs `run`"),
        ('keep = ["megatron/data/helpers*.so"]\n', "", "`keep` for the files"),
        ('version = "3.1.4"\n', "", "give either `version` or both"),
        ('"numpy<1.24"', '"numpy<<1.24"', "is not a requirement"),
        ('stated = "3.10.10 or 3.11.4"', 'stated = "3.9"', "says that the makers stated '3.9'"),
        ('name = "mpirun"\n', 'name = "mpirum"\n', "launchers.1.name"),
        ("[stated]", "[stated", "cannot be read"),
        ('system = ["', 'system = ["git;touch x", "', "system.0"),
        ("[environment]", '[environment]\n"A B" = "c"', "environment"),
        ("[environment]", '[environment]\nPATH = "/opt/mine/bin:$PATH"', "PATH is made by envbuild"),
        ("[environment]", '[environment]\nA = """b\nUSER x"""', "environment"),
        ('cuda = "11.8"', 'cuda = " "', "stated.cuda"),
        ('cuda = "11.8"', 'cuda = "11.8"\nflavor = "devel"', "the flavor is a separate key"),
        ("title = ", "titel = ", "unknown key titel"),
        ('run = "make -C megatron/data"', 'run = "true\\nenvbuild_end\\nUSER x"', "the word that ends a script"),
        ('path = "/', 'path = "/opt/../', "leads out of its folder"),
        ('keep = ["megatron/data/helpers*.so"]', 'keep = ["a b; rm -rf c"]', "steps.0.keep.0"),
        ('keep = ["megatron/data/helpers*.so"]', 'keep = ["megatron/../../x*"]', "leads out of the repository"),
        ('keep = ["megatron/data/helpers*.so"]', 'keep = ["megatron/.?/.?/x"]', "leads out of the repository"),
        ("{hostfile}", "{hostfil}", "launcher deepspeed: {hostfil} is none of"),
        ('"makefile", "fused-kernels"', '"makefile", "makefile"', "two patches are called 'makefile'"),
        ('path = "/workspace/megatron-deepspeed"', 'path = "/opt/venv"', "is a folder of the image"),
        ('path = "/workspace/megatron-deepspeed"', 'path = "/usr"', "is a folder of the image"),
        ('path = "/workspace/megatron-deepspeed"', 'path = "/etc/megatron"', "is a folder of the image"),
        ('path = "/workspace/megatron-deepspeed"', 'path = "//"', "repository.path"),
        ('path = "/workspace/megatron-deepspeed"', 'path = "/workspace/."', "leads out of its folder"),
        ('ref = "hpc/fujii/new-mds"', 'ref = "main\\nRUN x"', "repository.ref"),
        ("Megatron-DeepSpeed.git", "Megatron-DeepSpeed", "does not end in .git"),
        ("Megatron-DeepSpeed.git", "Megatron-DeepSpeed.git#main", "repository.url"),
        ("https://github.com/llm", "https://me:secret@github.com/llm", "repository.url"),
        ("https://github.com/llm", "git@github.com:llm", "write https://HOST/PATH.git, also for a repository"),
        (
            'commit = "6740c1e1eff985a044b8a21e3c1e6d954cf6e5a0"',
            'commit = "main"',
            "write all 40 digits of it, not a branch",
        ),
        ('version = "3.1.4"', 'version = ""', "is not a version such as"),
        ('version = "3.1.4"', 'version = "1\\nRUN x"', "is not a version such as"),
        ('module = "mpi4py.MPI"', 'module = "mpi4py; x"', "builds.0.module"),
        ('extensions = ["MPI"]', 'extensions = ["a b; x"]', "builds.0.extensions"),
        ('CFLAGS = "-g0"', 'PATH = "/x"', "PATH is made by envbuild"),
        ('name = "mpi4py"', 'name = "megatron-deepspeed"', "two sources are called 'megatron-deepspeed'"),
        ('commit = "6740c1e1eff985a044b8a21e3c1e6d954cf6e5a0"\n', "", "`ref` goes with the `commit`"),
        ("patches = []", 'patches = []\naxes = { flavor = "runtime" }', "the flavor is the stack's"),
        ("patches = []", 'patches = ["makefile", "makefile"]', "names a patch twice"),
        (
            "[[builds]]",
            '[[corrections]]\nitem = "python"\nstated = "3.10.10 or 3.11.4"\ninstead = "3.11"\nrule = "x"\nwhy = "x"\nsource = "run:x"\n\n[[builds]]',
            "two corrections are of 'python'",
        ),
        ("[stated]", f"[aaa]\nx = {'9' * 5000}\n[stated]", "cannot be read"),
        ("[stated]", f"x = {'[' * 3000}{']' * 3000}\n[stated]", "nested too deeply"),
        ('name = "helpers"\nrun = "python', 'name = "apex"\nrun = "python', "two proofs are called 'apex'"),
    ],
)
def test_bad_stack_file(tmp_path, old, new, message):
    with pytest.raises(DataError, match=re.escape(message)):
        load_stack(_own(tmp_path, (old, new)))


def test_two_patches_on_one_hunk(tmp_path):
    folder = tmp_path / "patches" / "megatron-deepspeed-llm-jp"
    folder.mkdir(parents=True)
    source = Path(__file__).parents[2] / "patches" / folder.name
    head, entry = re.split(r"(?=^\[\[patch\]\])", (source / "manifest.toml").read_text(), flags=re.MULTILINE)[:2]
    manifest = head + entry
    (folder / "manifest.toml").write_text(manifest + entry.replace('name = "makefile"', 'name = "again"'))
    for name in ("makefile", "again"):
        (folder / f"{name}.patch").write_bytes((source / "makefile.patch").read_bytes())
    with pytest.raises(DataError, match=r"the patches again and makefile both change megatron/data/Makefile"):
        load_patches(tmp_path / "patches")


def test_a_pin_that_does_not_exist(tmp_path):
    stack = load_stack(_own(tmp_path, ('apex = "23.07"', 'apex = "23.99"')))
    with pytest.raises(UsageError, match=r"no release of apex matches '23.99'"):
        _solution(stack)


def test_an_axis_that_does_not_exist(tmp_path):
    stack = load_stack(_own(tmp_path, ('apex = "23.07"', 'apecks = "23.07"')))
    with pytest.raises(UsageError, match="no axis 'apecks'"):
        _solution(stack)


def test_pins_that_contradict(tmp_path):
    stack = load_stack(_own(tmp_path, ('te = "none"', 'te = "2.6"')))
    with pytest.raises(NoCellError, match="TE 2 needs CUDA 12"):
        _solution(stack)


def test_a_correction_by_no_rule(tmp_path):
    stack = load_stack(_own(tmp_path, ('rule = "own-python-ubuntu22.04"', 'rule = "because"')))
    with pytest.raises(DataError, match="the rule 'because', which does not exist"):
        inputs_of(load_matrix(), _solution(stack).cell, stack=stack)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("apex", "the stack asks for PyPI's apex: PyPI's apex is a toolkit"),
        ("ezpz>=0.1", "the stack asks for PyPI's ezpz"),
        ("torch==2.0", "the requirement 'torch==2.0' is the axis torch"),
        ("Transformer_Engine[pytorch]", "is the axis te"),
    ],
)
def test_a_requirement_that_the_cell_decides_or_that_is_another_project(tmp_path, line, message):
    stack = load_stack(_own(tmp_path, ('"numpy<1.24"', f'"numpy<1.24", "{line}"')))
    with pytest.raises(DataError, match=re.escape(message)):
        inputs_of(load_matrix(), _solution(stack).cell, stack=stack)


def test_a_correction_of_what_nobody_stated(tmp_path):
    stack = load_stack(_own(tmp_path, ('python = "3.10.10 or 3.11.4"\n', "")))
    with pytest.raises(DataError, match=r"a correction is of python, of which \[stated\] says nothing"):
        inputs_of(load_matrix(), _solution(stack).cell, stack=stack)


def test_a_correction_of_a_misspelt_axis(tmp_path):
    stack = load_stack(_own(tmp_path, ('item = "deepspeed"', 'item = "deepsped"'), source="gpt2-3d"))
    with pytest.raises(DataError, match="a correction is of 'deepsped', which is not an axis") as refused:
        inputs_of(load_matrix(), _solution(load_stack("gpt2-3d")).cell, stack=stack)
    assert "deepspeed" in refused.value.hint


def test_a_lock_of_a_users_own_stack_asks_for_its_file(tmp_path):
    own = _own(tmp_path, ('name = "llm-jp"', 'name = "mine"'))
    with pytest.raises(UsageError, match="the lock is of the stack mine, which is not one of envbuild's") as refused:
        stack_of_lock("mine", None)
    assert "--stack FILE" in refused.value.hint
    assert stack_of_lock("mine", own).name == "mine"
    with pytest.raises(UsageError, match=r"the lock is of the stack llm-jp, .* is mine"):
        stack_of_lock("llm-jp", own)
    assert stack_of_lock("llm-jp", None).name == "llm-jp"


def test_a_build_for_an_mpi_that_the_cell_does_not_have(tmp_path):
    stack = load_stack(_own(tmp_path, ('mpi = "openmpi"\n', "")))
    with pytest.raises(DataError, match="compiled against the cell's MPI, and the cell has none"):
        inputs_of(load_matrix(), _solution(stack).cell, stack=stack)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ezpz", "the build ezpz would be PyPI's"),
        ("torchvision", "the build torchvision is decided with the cell"),
        ("transformer-engine", "the build transformer-engine is decided with the cell"),
        ("uv", "'uv' is the name of another source"),
        ("flash-attn-hopper-ptxas", "is the name of another source"),
    ],
)
def test_a_build_that_another_source_of_the_cell_is(tmp_path, name, message):
    stack = load_stack(_own(tmp_path, ('name = "mpi4py"', f'name = "{name}"')))
    with pytest.raises(DataError, match=re.escape(message)):
        inputs_of(load_matrix(), _solution(stack).cell, stack=stack)


def test_a_numpy_next_to_the_torch_of_an_image(tmp_path):
    stack = load_stack(_own(tmp_path, ('"protobuf<4"', '"protobuf<4", "numpy==1.99"'), source="gpt2-3d"))
    with pytest.raises(DataError, match=r"'numpy==1.99' is decided by ngc-20.12"):
        inputs_of(load_matrix(), _solution(stack).cell, stack=stack)


@pytest.mark.parametrize(
    ("old", "new", "code", "says"),
    [
        ('te = "none"', 'te = "none "', 0, ""),
        ('te = "none"', 'te = ">>9"', 2, "where: stack llm-jp"),
        ('te = "none"', 'te = "none"\ndriver = "auto"', 8, "no NVIDIA driver answers"),
        ('"nltk"', '"torch"', 2, "the requirement 'torch' is the axis torch"),
    ],
)
def test_resolve_reports_what_is_wrong_in_a_stack(tmp_path, capsys, monkeypatch, old, new, code, says):
    monkeypatch.setattr("envbuild.host.driver_version", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main(["resolve", "--stack", _own(tmp_path, (old, new))])
    assert (ended.value.code, says in capsys.readouterr().err) == (code, True)


def test_a_stack_file_by_odd_names(tmp_path):
    folder = tmp_path / "me@corp"
    folder.mkdir()
    own = _own(folder)
    assert load_stack(own).name == "llm-jp"
    assert load_stack(f"{own}@deepspeed-multi-node").name == "llm-jp@deepspeed-multi-node"
    Path(own).write_bytes(b"\xef\xbb\xbf" + Path(own).read_bytes())
    assert load_stack(own).name == "llm-jp"
    Path(own).rename(folder / "mine")
    with pytest.raises(UsageError, match=r"the name of .*/mine does not end in \.toml"):
        load_stack(str(folder / "mine"))
    (folder / "folder.toml").mkdir()
    with pytest.raises(UsageError, match=r"folder\.toml is a folder"):
        load_stack(str(folder / "folder.toml"))


def test_a_build_that_is_an_axis(tmp_path):
    stack = load_stack(_own(tmp_path, ('name = "mpi4py"', 'name = "apex"')))
    with pytest.raises(DataError, match="the build apex is an axis of the matrix"):
        inputs_of(load_matrix(), _solution(stack).cell, stack=stack)


def test_no_such_stack():
    with pytest.raises(UsageError, match="there is no stack 'llama4'"):
        load_stack("llama4")
    with pytest.raises(UsageError, match=r"there is no file './nowhere.toml'"):
        load_stack("./nowhere.toml")


@pytest.mark.parametrize("name", stack_names())
def test_no_image_names_the_place_of_one_of_cudnns_libraries(name: str) -> None:
    """With CUDNN_HOME or CUDNN_PATH TE loads libcudnn.so.9 alone, and then misses those that its own library names."""
    assert not {"CUDNN_HOME", "CUDNN_PATH"} & set(load_stack(name).environment)


def test_what_a_stack_builds_from_a_commit_is_not_expected_to_be_called_by_it():
    stack = load_stack("alcf")
    made = plan_of(load_matrix(), complete(inputs_for_stack(stack)), stack)
    components = json.loads(made.lists["lock/expected.json"])["components"]
    assert components["mpi4py"]["version"] == "3.1.4"
    for build in stack.builds:
        if build.commit:
            assert components[build.name]["version"] is None
            assert components[build.name]["commit"] == build.commit
    assert {build.name for build in stack.builds if build.commit} == {"ezpz", "ambivalent", "enrich"}


def test_a_stack_has_the_repository_where_a_cell_of_flags_has_a_wheel():
    asked = tuple(Pin(axis=a, spec=s, origin=f"--{a}") for a, s in {"megatron": "0.12.3", "python": "3.12"}.items())
    assert solve(load_matrix(), Request(pins=asked, repository=True)).cell.versions["python"] == "3.12"
    with pytest.raises(NoCellError, match="has wheels for CPython"):
        solve(load_matrix(), Request(pins=asked))
    held = {
        repository: {
            each["megatron"] for each in enumerate_cells(load_matrix(), ("megatron",), asked[1:], repository=repository)
        }
        for repository in (False, True)
    }
    assert held[True] - held[False] == {
        f"0.{n}.{patch}" for n, patches in {8: 1, 9: 1, 10: 1, 11: 1, 12: 4, 13: 2}.items() for patch in range(patches)
    }

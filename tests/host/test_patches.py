"""The mechanics of patches, on small trees that the tests make."""

import difflib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from envbuild.cli import patch as command
from envbuild.errors import DataError, PatchError, UsageError
from envbuild.patches import replace
from envbuild.patches.apply import apply, check, of_tree, undo
from envbuild.patches.diff import paths_of
from envbuild.patches.manifest import blob_id, in_order, load_patches, select
from envbuild.patches.script import apply_script
from envbuild.patches.tree import patched
from envbuild.patches.upstream import check_upstream

OLD = "".join(f"line {n}\n" for n in range(1, 21))
NEW = OLD.replace("line 3\n", "line three\n").replace("line 15\n", "line 15\nline 15b\n")
COMMIT = "1234567890" * 4


def diff(path: str, old: str, new: str, context: int = 1) -> str:
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{path}", f"b/{path}", n=context
    )
    return "".join(lines)


def entry(name, files, *, after=(), commit=COMMIT, extra=""):
    listed = "".join(
        f'{{ path = "{path}", pre = "{blob_id(old.encode())}", post = "{blob_id(new.encode())}" }},\n'
        for path, old, new in files
    )
    return f"""
[[patch]]
name = "{name}"
revisions = [{{ name = "v1.0", commit = "{commit}" }}]
files = [{listed}]
after = {list(after)!r}
what = "x"
why = "x"
issue = "none"
proof = "x"
expires = "x"
stacks = []
{extra}
[patch.upstream]
ref = "main"
path = "a.txt"
fixed_when_present = "repaired"
state = "needed"
seen = "{COMMIT}"
"""


@pytest.fixture
def store(tmp_path):
    """Write a folder of patches and return a function that adds one to it."""
    root = tmp_path / "patches"

    def add(name, files, target="demo", **more):
        folder = root / target
        folder.mkdir(parents=True, exist_ok=True)
        manifest = folder / "manifest.toml"
        head = f'target = "{target}"\nrepo = "https://example.org/{target}"\n'
        text = manifest.read_text() if manifest.exists() else head
        manifest.write_text(text + entry(name, files, **more))
        (folder / f"{name}.patch").write_text("".join(diff(*file) for file in files))
        return root

    add.root = root
    return add


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "a tree"
    (root / "sub").mkdir(parents=True)
    (root / "a.txt").write_text(OLD)
    (root / "sub" / "b.sh").write_text(OLD)
    (root / "sub" / "b.sh").chmod(0o755)
    return root


def git(tree, *command):
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *command], cwd=tree, check=True, capture_output=True)


def snapshot(tree):
    return {
        str(p.relative_to(tree)): (p.lstat().st_mode, str(p.readlink()) if p.is_symlink() else p.read_bytes())
        for p in tree.rglob("*")
        if ".git" not in p.parts and (p.is_symlink() or p.is_file())
    }


def by_python(tree, patches, root):
    del root
    try:
        apply(tree, patches)
    except PatchError as error:
        return error.exit_code, str(error)
    return 0, ""


def by_shell(tree, patches, root):
    command = ["sh", "-c", apply_script(patches)]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, "PATCHES": str(root)}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr + done.stdout


both = pytest.mark.parametrize("run", [by_python, by_shell])
TWO = [("a.txt", OLD, NEW), ("sub/b.sh", OLD, NEW)]


# -- blob ids and diffs


def test_blob_id_is_gits(tmp_path):
    for content in (b"", b"x", OLD.encode(), b"\r\n\0\xff"):
        (tmp_path / "f").write_bytes(content)
        printed = subprocess.run(
            ["git", "hash-object", "--no-filters", "f"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert blob_id(content) == printed.stdout.strip()


lines = st.lists(
    st.sampled_from(["a\n", "b\n", "c\r\n", "\n", "- x\n", "-- a/f\n", "++ b/f\n", "\\ y\n"]), min_size=1, max_size=25
)


@settings(max_examples=300, deadline=None)
@given(old=lines, new=lines, context=st.integers(0, 3))
def test_a_diff_has_the_paths_of_its_heads_whatever_its_lines_say(old, new, context):
    if old == new:
        return
    text = "".join(difflib.unified_diff(old, new, "a/f", "b/f", n=context)).encode()
    assert paths_of(text + text.replace(b"--- a/f\n+++ b/f\n@@", b"--- a/g\n+++ b/g\n@@", 1), where="x") == ("f", "g")


def one(tmp_path, diff, old, new):
    """Load a patch of one file by its diff."""
    folder = tmp_path / "patches" / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    head = 'target = "demo"\nrepo = "https://example.org/demo"\n'
    text = entry("one", [("f", "", "x")]).replace(blob_id(b""), blob_id(old)).replace(blob_id(b"x"), blob_id(new))
    (folder / "manifest.toml").write_text(head + text)
    (folder / "one.patch").write_bytes(diff)
    return load_patches(folder.parent)["one"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"x\ny", b"x\ny\n"),
        (b"x\ny\n", b"x\nz"),
        (b"x\ny", b"x\nz"),
        (b"x\r\ny\r\n", b"x\r\nz\n"),
        (b"x\n  \n\n", b"x\n\t \n \n\n"),
        (b"-- a/f\n", b"++ b/f\n"),
        (b"\xff\n$Id$\n", b"\xfe\n$Id$\n"),
    ],
)
def test_a_diff_gives_the_new_bytes_and_back(tmp_path, old, new):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a/f").write_bytes(old)
    (tmp_path / "b/f").write_bytes(new)
    command = ["git", "diff", "--no-index", "--no-prefix", "--text", "a/f", "b/f"]
    text = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).stdout
    patch = one(tmp_path, text, old, new)
    assert patched(patch, {"f": old}) == {"f": new}
    assert patched(patch, {"f": new}, undo=True) == {"f": old}


def test_a_hunk_that_does_not_fit_is_an_error_of_the_data(tmp_path):
    other = OLD.replace("line 4\n", "line four\n")
    patch = one(tmp_path, diff("f", OLD, NEW).encode(), other.encode(), NEW.encode())
    with pytest.raises(DataError, match="does not apply: error: patch failed: f:2"):
        patched(patch, {"f": other.encode()})


def test_git_reads_the_same_paths_from_the_products_diffs():
    for patch in load_patches().values():
        line = ["git", "apply", "--numstat", "-z", "--summary"]
        printed = subprocess.run(line, input=patch.diff, capture_output=True, check=True).stdout.decode()
        assert {part.split("\t")[2] for part in printed.rstrip("\0").split("\0")} == set(
            paths_of(patch.diff, where="x")
        )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n", "in place"),
        ("--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n", "in place"),
        ("--- a/f\n+++ b/g\n@@ -1 +1 @@\n-x\n+y\n", "in place"),
        ("--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n-x\n+y\n", "number of lines"),
        ("--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n-x\n+y\nz\n", "neither"),
        ("@@ -1 +1 @@\n-x\n+y\n", "before any file"),
        ("--- a/f\n+++ b/f\n", "changes nothing"),
        ("", "changes nothing"),
        ("--- a/f\n+++ b/f\n@@ -1 +1,2 @@\n-x\n-y\n+z\n", "number of lines"),
        ("--- a/f\n+++ b/f\n\\ No newline at end of file\n", "before any hunk"),
        ("diff --git a/f b/g\nrename from f\nrename to g\n", "unexpected"),
        ("old mode 100644\n", "unexpected"),
        ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n--- a/f\n+++ b/f\n@@ -5 +5 @@\n-x\n+y\n", "twice"),
    ],
)
def test_other_diffs_are_refused(text, problem):
    with pytest.raises(DataError, match=problem):
        paths_of(text.encode(), where="f.patch")


# -- manifests


def test_the_products_own_patches_load():
    patches = load_patches()
    assert set(patches) == {
        "sgd",
        "fix-convert",
        "lr-scheduler",
        "makefile",
        "fused-kernels",
        "alcf-portable",
        "no-nvcc",
        "dist-checkpoint",
    }
    assert len({patch.digest for patch in patches.values()}) == len(patches)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('why = "x"', 'why = "x"\nwhen = "y"', "unknown key patch.0.when"),
        ('ref = "main"', 'ref = "main"\nbranch = "y"', "unknown key patch.0.upstream.branch"),
        ('why = "x"', 'wy = "x"', "unknown key patch.0.wy"),
        ('why = "x"\n', "", "patch.0.why: Field required"),
        (f'pre = "{blob_id(OLD.encode())}"', 'pre = "2608fde8"', "patch.0.files.0.pre"),
        ('path = "a.txt", pre', 'path = "../a.txt", pre', "patch.0.files.0.path"),
        ('path = "a.txt", pre', 'path = "/a.txt", pre', "patch.0.files.0.path"),
        ('path = "a.txt", pre', 'path = "c.txt", pre', "do not name the same files: a.txt, c.txt"),
        ("fixed_when_present", "fixed_when_absent = 'y'\nfixed_when_present", "give one of"),
        ('target = "demo"', 'target = "other"', "its folder 'demo'"),
        ('target = "demo"', "target = ", "cannot be read: Invalid value"),
        ('name = "one"', 'name = "two"', "patch two has no diff"),
    ],
)
def test_a_manifest_that_does_not_load_is_named_with_its_key(store, old, new, problem):
    root = store("one", [("a.txt", OLD, NEW)])
    manifest = root / "demo" / "manifest.toml"
    text = manifest.read_text()
    assert old in text
    manifest.write_text(text.replace(old, new))
    with pytest.raises(DataError) as caught:
        load_patches(root)
    assert problem in caught.value.what
    assert "demo" in caught.value.where


def test_a_diff_without_an_entry_is_refused(store):
    root = store("one", [("a.txt", OLD, NEW)])
    (root / "demo" / "stray.patch").write_text(diff("a.txt", OLD, NEW))
    with pytest.raises(DataError, match=r"stray\.patch is in no entry"):
        load_patches(root)


def test_one_name_for_two_patches_is_refused(store):
    store("one", [("a.txt", OLD, NEW)])
    with pytest.raises(DataError, match="two patches are named one"):
        load_patches(store("one", [("a.txt", OLD, NEW)], target="other"))


def test_two_patches_on_one_file_are_refused_unless_chained(store):
    store("one", [("a.txt", OLD, NEW)])
    with pytest.raises(DataError, match=r"one and two both change a\.txt") as caught:
        load_patches(store("two", [("a.txt", OLD, OLD + "end\n")]))
    assert 'after = ["one"]' in caught.value.hint


def test_a_chain_whose_ids_do_not_meet_is_refused(store):
    store("one", [("a.txt", OLD, NEW)])
    with pytest.raises(DataError, match="two comes after one, which makes blob"):
        load_patches(store("two", [("a.txt", OLD, OLD + "end\n")], after=["one"]))


def test_after_names_a_patch_of_the_same_target(store):
    with pytest.raises(DataError, match=r"patch one comes after 'oen', which is not a patch of demo"):
        load_patches(store("one", [("a.txt", OLD, NEW)], after=["oen"]))


def test_a_circle_is_refused(store):
    store("one", [("a.txt", OLD, NEW)], after=["two"])
    with pytest.raises(DataError, match="after the other"):
        load_patches(store("two", [("a.txt", NEW, OLD)], after=["one"]))


def test_two_patches_on_one_file_of_different_revisions_are_no_conflict(store):
    store("one", [("a.txt", OLD, NEW)])
    assert len(load_patches(store("two", [("a.txt", OLD + "end\n", NEW)], commit="ab" * 20))) == 2


def test_a_manifest_that_contradicts_its_diff_is_found_before_writing(store, tree):
    root = store("one", [("a.txt", OLD, NEW)])
    manifest = root / "demo" / "manifest.toml"
    manifest.write_text(manifest.read_text().replace(blob_id(NEW.encode()), "ab" * 20))
    before = snapshot(tree)
    with pytest.raises(DataError, match="its manifest states abab"):
        apply(tree, load_patches(root).values())
    code, printed = by_shell(tree, load_patches(root).values(), root)
    assert code == 4
    assert "its manifest states abab" in printed
    assert snapshot(tree) == before


# -- applying


@both
@pytest.mark.parametrize("checkout", [True, False])
def test_applies_then_says_that_it_has(store, tree, run, checkout):
    root = store("one", TWO)
    if checkout:
        git(tree, "init", "-q")
        git(tree, "add", ".")
        git(tree, "commit", "-qm", "x")
    patches = load_patches(root).values()
    assert check(tree, patches)[0].state == "applies"
    assert run(tree, patches, root)[0] == 0
    assert (tree / "a.txt").read_text() == NEW
    assert (tree / "sub/b.sh").read_text() == NEW
    assert (tree / "sub/b.sh").stat().st_mode & 0o777 == 0o755
    assert sorted(snapshot(tree)) == ["a.txt", "sub/b.sh"]
    inode = (tree / "a.txt").stat().st_ino
    assert check(tree, patches)[0].state == "applied"
    assert run(tree, patches, root)[0] == 0
    assert (tree / "a.txt").stat().st_ino == inode


def test_the_script_says_what_it_did(store, tree):
    root = store("one", TWO)
    patches = load_patches(root).values()
    assert by_shell(tree, patches, root) == (0, "patch one: applied\n")
    assert by_shell(tree, patches, root) == (0, "patch one: already applied\n")


def test_the_script_ignores_configuration_and_repositories_around(store, tree, tmp_path):
    root = store("one", [("a.txt", OLD, NEW.replace("line three", "line three  "))])
    git(tmp_path, "init", "-q")
    git(tmp_path, "config", "core.autocrlf", "true")
    (tmp_path / "gitconfig").write_text("[apply]\nwhitespace = fix\n[core]\nautocrlf = true\n")
    os.environ["GIT_CONFIG_GLOBAL"] = str(tmp_path / "gitconfig")
    try:
        assert by_shell(tree, load_patches(root).values(), root)[0] == 0
    finally:
        del os.environ["GIT_CONFIG_GLOBAL"]
    assert "line three  \n" in (tree / "a.txt").read_text()


def test_the_script_is_nothing_for_no_patches_and_fails_without_its_diffs(store, tree):
    assert apply_script([]) == ""
    patches = load_patches(store("one", TWO)).values()
    before = snapshot(tree)
    for missing in ("", str(tree.parent / "nowhere"), str(tree)):
        code, printed = by_shell(tree, patches, missing)
        assert (code, "does not apply" in printed or "names no folder" in printed) == (4, True)
    assert snapshot(tree) == before


@both
def test_a_chain_applies_in_order_from_any_state(store, tree, run):
    third = NEW + "end\n"
    store("zz-first", [("a.txt", OLD, NEW)])
    root = store("second", [("a.txt", NEW, third)], after=["zz-first"])
    patches = load_patches(root).values()
    for start, states in (
        (OLD, ["applies", "applies"]),
        (NEW, ["applied", "applies"]),
        (third, ["applied", "applied"]),
    ):
        (tree / "a.txt").write_text(start)
        assert [report.state for report in check(tree, patches)] == states
        assert run(tree, patches, root)[0] == 0
        assert (tree / "a.txt").read_text() == third


def broken_preimage(tree):
    (tree / "sub/b.sh").write_text("a new first line\n" + OLD)
    return (
        f"sub/b.sh has blob {blob_id(('a new first line' + chr(10) + OLD).encode())}, expected {blob_id(OLD.encode())}"
    )


def broken_crlf(tree):
    (tree / "sub/b.sh").write_bytes(OLD.replace("\n", "\r\n").encode())
    return "CRLF line ends"


def broken_missing(tree):
    (tree / "sub/b.sh").unlink()
    return "sub/b.sh is missing"


def broken_missing_folder(tree):
    shutil.rmtree(tree / "sub")
    return "sub/b.sh is missing"


def broken_link_out(tree):
    (tree.parent / "out.sh").write_text(OLD)
    (tree / "sub/b.sh").unlink()
    (tree / "sub/b.sh").symlink_to("../../out.sh")
    return "symbolic link"


def broken_dangling(tree):
    (tree / "sub/b.sh").unlink()
    (tree / "sub/b.sh").symlink_to("nowhere")
    return "symbolic link"


def broken_folder_out(tree):
    (tree / "sub").rename(tree.parent / "elsewhere")
    (tree / "sub").symlink_to("../elsewhere")
    return "symbolic link"


def broken_folder(tree):
    (tree / "sub/b.sh").unlink()
    (tree / "sub/b.sh").mkdir()
    return "is no file"


def broken_half(tree):
    (tree / "a.txt").write_text(NEW)
    return "already but not in"


@both
@pytest.mark.parametrize("breaks", [f for name, f in sorted(globals().items()) if name.startswith("broken_")])
def test_a_refused_tree_is_untouched(store, tree, run, breaks):
    root = store("one", TWO)
    store("other", [("c.txt", OLD, NEW)])
    (tree / "c.txt").write_text(OLD)
    message = breaks(tree)
    before = snapshot(tree)
    outside = {p: p.read_bytes() for p in tree.parent.glob("elsewhere/*")}
    code, printed = run(tree, load_patches(root).values(), root)
    assert code == 4
    assert message in printed
    assert snapshot(tree) == before
    assert {p: p.read_bytes() for p in tree.parent.glob("elsewhere/*")} == outside


def test_a_wrong_pre_image_is_reported_with_both_ids_and_the_revision(store, tree):
    (tree / "a.txt").write_text("x\n" + OLD)
    report = check(tree, load_patches(store("one", TWO)).values())[0]
    assert report.state == "refused"
    assert report.files[0].found == blob_id(("x\n" + OLD).encode())
    for part in (report.files[0].found, report.files[0].pre, report.files[0].post, "v1.0 (12345678)"):
        assert part in report.error.what


def test_a_file_changed_since_head_is_reported_as_such(store, tree):
    git(tree, "init", "-q")
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "x")
    (tree / "a.txt").write_text(OLD + "mine\n")
    with pytest.raises(PatchError, match=r"modified: HEAD has .* which is the file before the patch") as caught:
        apply(tree, load_patches(store("one", TWO)).values())
    assert "git restore a.txt" in caught.value.hint
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "mine")
    with pytest.raises(PatchError, match="has blob") as caught:
        apply(tree, load_patches(store.root).values())
    assert "modified" not in caught.value.what


@pytest.mark.parametrize("place", ["sub/b.sh", "sub"])
def test_what_is_marked_read_only_is_not_written(store, tree, place):
    (tree / place).chmod(0o555)
    before = snapshot(tree)
    with pytest.raises(PatchError, match="is read-only"):
        apply(tree, load_patches(store("one", TWO)).values())
    (tree / "sub").chmod(0o755)
    assert snapshot(tree) == before


@pytest.mark.parametrize("error", [OSError(30, "Read-only file system"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_replacement_that_fails_half_way_is_put_back(store, tree, monkeypatch, error, after, at):
    """Renamed are the list, two files, and the list again; after that the change holds."""
    patches = load_patches(store("one", TWO)).values()
    before = snapshot(tree)
    rename, calls = os.rename, []

    def fail(*names, **folders):
        calls.append(names)
        if len(calls) == at and not after:
            raise error
        rename(*names, **folders)
        if len(calls) == at:
            raise error

    monkeypatch.setattr(os, "rename", fail)
    holds = at == 4 and after
    if holds and isinstance(error, OSError):
        apply(tree, patches)
    else:
        with pytest.raises(PatchError if isinstance(error, OSError) else KeyboardInterrupt):
            apply(tree, patches)
    assert (snapshot(tree) == before) is not holds
    assert sorted(snapshot(tree)) == sorted(before)
    assert check(tree, patches)[0].state == ("applied" if holds else "applies")


def test_what_cannot_be_put_back_is_put_back_by_the_next_run(store, tree, monkeypatch):
    patches = load_patches(store("one", TWO)).values()
    before = snapshot(tree)
    with monkeypatch.context() as broken:
        rename, calls = os.rename, []

        def fail(*names, **folders):
            calls.append(names)
            if len(calls) > 2:
                raise OSError(5, "Input/output error")
            rename(*names, **folders)

        broken.setattr(os, "rename", fail)
        with pytest.raises(PatchError, match=r"a\.txt could not be put back"):
            apply(tree, patches)
        with pytest.raises(PatchError, match=r"a killed run left a\.txt changed"):
            check(tree, patches)
    assert check(tree, patches)[0].state == "applies"
    assert snapshot(tree) == before


def test_two_calls_on_one_tree_wait_for_each_other(store, tree, monkeypatch):
    patches = load_patches(store("one", TWO)).values()
    staged, other = replace._stage, []

    def meanwhile(*given):
        if not other:
            other.append(threading.Thread(target=lambda: other.append(apply(tree, patches))))
            other[0].start()
            time.sleep(0.2)  # the other call has come as far as it can by now
        return staged(*given)

    monkeypatch.setattr(replace, "_stage", meanwhile)
    assert [report.state for report in apply(tree, patches)] == ["applies"]
    other[0].join()
    assert [report.state for report in other[1]] == ["applied"]


def test_a_file_that_changes_meanwhile_is_not_overwritten(store, tree, monkeypatch):
    patches = load_patches(store("one", TWO)).values()
    stage = replace._stage

    def stage_and_change(root, path, *given):
        if path == "sub/b.sh":
            (root / path).write_text("someone else's\n")
        return stage(root, path, *given)

    monkeypatch.setattr(replace, "_stage", stage_and_change)
    with pytest.raises(PatchError, match="changed while"):
        apply(tree, patches)
    assert (tree / "a.txt").read_text() == OLD
    assert (tree / "sub/b.sh").read_text() == "someone else's\n"
    assert sorted(snapshot(tree)) == ["a.txt", "sub/b.sh"]


def test_patches_of_two_targets_are_not_applied_together(store, tree):
    store("one", [("a.txt", OLD, NEW)])
    root = store("other", [("a.txt", NEW, OLD)], target="other")
    patches = load_patches(root).values()
    assert [report.state for report in check(tree, patches)] == ["applies", "applied"]
    with pytest.raises(UsageError, match="of one target, not of demo, other"):
        apply(tree, patches)


def test_no_folder_is_no_tree(store, tmp_path):
    with pytest.raises(PatchError, match="is not a folder"):
        check(tmp_path / "nowhere", load_patches(store("one", TWO)).values())


# -- which patches a tree takes, upstream, and the command


def test_a_tree_whose_one_known_file_is_a_link_is_reported(store, tree):
    patches = load_patches(store("one", [("a.txt", OLD, NEW)])).values()
    (tree / "a.txt").rename(tree / "elsewhere")
    (tree / "a.txt").symlink_to("elsewhere")
    with pytest.raises(PatchError, match="link"):
        of_tree(tree, patches)
    (tree / "a.txt").unlink()
    with pytest.raises(PatchError, match="there is no patch for this tree"):
        of_tree(tree, patches)


def test_a_tree_takes_the_patches_of_its_target(store, tree):
    store("one", TWO)
    store("more", [("d.txt", OLD, NEW)])
    root = store("other", [("a.txt", OLD + "other\n", NEW)], target="other")
    patches = load_patches(root).values()
    assert [p.name for p in of_tree(tree, patches)] == ["one", "more"]
    (tree / "a.txt").write_text(OLD + "other\n")
    (tree / "sub/b.sh").unlink()
    assert [p.name for p in of_tree(tree, patches)] == ["other"]
    (tree / "a.txt").write_text("no known id\n")
    assert [p.name for p in of_tree(tree, patches)] == ["other"]
    (tree / "a.txt").unlink()
    with pytest.raises(PatchError, match="there is no patch for this tree"):
        of_tree(tree, patches)


def test_a_tree_of_no_known_id_is_of_the_target_that_most_files_speak_for(store, tree):
    store("one", TWO)
    patches = load_patches(store("other", [("a.txt", OLD + "other\n", NEW)], target="other")).values()
    for path in ("a.txt", "sub/b.sh"):
        (tree / path).write_bytes((tree / path).read_bytes().replace(b"\n", b"\r\n"))
    taken = of_tree(tree, patches)
    assert [p.name for p in taken] == ["one"]
    with pytest.raises(PatchError, match="CRLF"):
        apply(tree, taken)


def test_a_tree_with_files_of_two_targets_is_of_the_one_that_most_files_speak_for(store, tree):
    """A fork keeps some of the original's files as they were."""
    store("one", TWO)
    patches = load_patches(store("other", [("a.txt", OLD, OLD + "other\n")], target="other")).values()
    assert [p.name for p in of_tree(tree, patches)] == ["one"]
    apply(tree, of_tree(tree, patches))
    assert [p.name for p in of_tree(tree, patches)] == ["one"]
    (tree / "a.txt").write_text(OLD)
    (tree / "sub/b.sh").write_text("no known id\n")
    with pytest.raises(UsageError, match=r"may be of demo or of other: 1 file ") as caught:
        of_tree(tree, patches)
    assert "--patch" in caught.value.hint
    (tree / "a.txt").write_text(OLD + "other\n")
    assert [p.name for p in of_tree(tree, patches)] == ["other"]


def test_patches_are_ordered_by_what_they_come_after_then_by_name(store):
    store("d", [("a.txt", OLD, NEW)])
    store("a", [("a.txt", NEW, OLD + "a\n")], after=["d"])
    store("c", [("c.txt", OLD, NEW)])
    patches = load_patches(store("b", [("b.txt", OLD, NEW)], after=["a"]))
    for some in (patches.values(), reversed(patches.values())):
        assert [patch.name for patch in in_order(some)] == ["c", "d", "a", "b"]
    assert [patch.name for patch in in_order([patches["b"], patches["a"]])] == ["a", "b"]


# -- undoing


def test_undo_takes_a_chain_out_from_any_state(store, tree):
    third = NEW + "end\n"
    store("zz-first", [("a.txt", OLD, NEW), ("sub/b.sh", OLD, NEW)])
    patches = load_patches(store("second", [("a.txt", NEW, third)], after=["zz-first"])).values()
    before = snapshot(tree)
    for after, states in (
        (OLD, ["applies", "applies"]),
        (NEW, ["applies", "applied"]),
        (third, ["applied", "applied"]),
    ):
        (tree / "a.txt").write_text(after)
        (tree / "sub/b.sh").write_text(OLD if after == OLD else NEW)
        reports = undo(tree, patches)
        assert [(report.name, report.state) for report in reports] == list(
            zip(["second", "zz-first"], states, strict=True)
        )
        assert snapshot(tree) == before


def test_undo_of_a_patch_under_another_is_refused(store, tree):
    store("one", TWO)
    patches = load_patches(store("two", [("a.txt", NEW, NEW + "end\n")], after=["one"]))
    apply(tree, patches.values())
    before = snapshot(tree)
    with pytest.raises(PatchError, match=r"patch one: a\.txt has blob"):
        undo(tree, [patches["one"]])
    assert snapshot(tree) == before


@pytest.mark.parametrize("breaks", [f for name, f in sorted(globals().items()) if name.startswith("broken_")])
def test_undo_refuses_what_apply_refuses(store, tree, breaks):
    patches = load_patches(store("one", TWO)).values()
    message = breaks(tree)
    before = snapshot(tree)
    with pytest.raises(PatchError) as caught:
        undo(tree, patches)
    assert message in str(caught.value)
    assert snapshot(tree) == before


# -- what a killed run left, or a tree contains


def left_over(tree, *, path="a.txt", old=OLD, new=NEW, name=".envbuild-patch"):
    """Write what a run leaves that was killed right after it replaced `path`."""
    token = "0123456789abcdef"
    entry = {"path": path, "old": blob_id(old.encode()), "new": blob_id(new.encode())}
    (tree / name).write_text(json.dumps({"token": token, "files": [entry]}))
    (tree / path).parent.joinpath(f".envbuild-{token}-0.old").write_text(old)


def test_a_check_puts_back_and_leaves_nothing(store, tree):
    patches = load_patches(store("one", TWO)).values()
    before = snapshot(tree)
    (tree / "a.txt").write_text(NEW)
    left_over(tree)
    (tree / ".envbuild-patch.new").write_text("{")
    assert check(tree, patches)[0].state == "applies"
    assert snapshot(tree) == before


def test_what_was_changed_since_the_kill_stays(store, tree):
    patches = load_patches(store("one", TWO)).values()
    (tree / "a.txt").write_text("somebody's\n")
    left_over(tree)
    before = snapshot(tree)
    assert check(tree, patches)[0].state == "refused"
    assert {name for name in before if name not in snapshot(tree)} == {
        ".envbuild-patch",
        ".envbuild-0123456789abcdef-0.old",
    }
    assert (tree / "a.txt").read_text() == "somebody's\n"


def test_a_list_is_not_touched_where_there_are_no_locks(store, tree, monkeypatch):
    """It may be that of a run at work."""
    patches = load_patches(store("one", TWO)).values()
    (tree / "a.txt").write_text(NEW)
    left_over(tree)
    before = snapshot(tree)
    # without locks its temporary folders look left over to the sweeps of the tests next to it
    monkeypatch.setattr(tempfile, "tempdir", str(tree.parent))

    def none(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    for run in (check, apply, undo):
        with pytest.raises(PatchError, match="no locks that show which"):
            run(tree, patches)
    assert snapshot(tree) == before
    for name in set(before) - {"a.txt", "sub/b.sh"}:
        (tree / name).unlink()
    (tree / "a.txt").write_text(OLD)
    assert apply(tree, patches)[0].state == "applies"


@pytest.mark.parametrize("name", [".envbuild-patch", ".envbuild-patch.done"])
def test_a_list_in_a_tree_reaches_nothing_outside(store, tree, name):
    patches = load_patches(store("one", TWO)).values()
    outside = tree.parent / "outside"
    outside.mkdir()
    (outside / "a.txt").write_text(NEW)
    (tree / "link").symlink_to(outside)
    left_over(tree, path="link/a.txt", name=name)
    before = {path.name: path.read_text() for path in outside.iterdir()}
    with pytest.raises(PatchError, match=r"link/a\.txt|link is a link"):
        check(tree, patches)
    assert {path.name: path.read_text() for path in outside.iterdir()} == before
    text = (tree / name).read_text()
    for path in ("../outside/a.txt", str(outside / "a.txt"), ".git/config"):
        (tree / name).write_text(text.replace("link/a.txt", path))
        with pytest.raises(PatchError, match="is not what envbuild writes there"):
            check(tree, patches)
    for other in ("", "[" * 100_000, "{}", '{"token": "../x", "files": []}'):
        (tree / name).write_text(other)
        with pytest.raises(PatchError, match="is not what envbuild writes there"):
            check(tree, patches)
    (tree / name).unlink()
    (tree / name).symlink_to(outside / "a.txt")
    with pytest.raises(PatchError, match="is not what envbuild writes there"):
        check(tree, patches)
    assert {path.name: path.read_text() for path in outside.iterdir()} == before


def test_an_unknown_patch_is_reported_with_the_known_ones(store):
    with pytest.raises(UsageError) as caught:
        select(load_patches(store("one", TWO)), ["two"])
    assert "one" in caught.value.hint


@pytest.mark.parametrize(("content", "state"), [("as ever\n", "needed"), ("now repaired\n", "fixed"), (None, "gone")])
def test_upstream(store, tree, content, state):
    if content is None:
        (tree / "a.txt").unlink()
    else:
        (tree / "a.txt").write_text(content)
    report = check_upstream(tree, load_patches(store("one", TWO)).values())[0]
    assert (report.state, report.known) == (state, "needed")


def test_the_command(store, tree, monkeypatch):
    patches = load_patches(store("one", TWO))
    monkeypatch.setattr(command, "load_patches", lambda: patches)

    def run(*args):
        return CliRunner().invoke(command.patch, [*map(str, args)], standalone_mode=False)

    assert "one" in run("list").output
    assert '"digest"' in run("list", "--json").output
    assert run("check", tree).stdout == "one: fits\n"
    assert run("apply", tree).stdout == "one: applied\n"
    assert run("apply", tree).stdout == "one: already applied, nothing changed\n"
    assert '"state": "already applied"' in run("apply", tree, "--json").stdout
    (tree / "a.txt").write_text("x\n")
    refused = run("check", tree, "--json")
    assert refused.return_value == 4
    assert '"state": "refused"' in refused.stdout
    assert "expected" in refused.stderr
    assert isinstance(run("apply", tree).exception, PatchError)
    assert run("check", tree, "--upstream", "--patch", "one").return_value == 0
    (tree / "a.txt").write_text("repaired\n")
    assert run("check", tree, "--upstream", "--patch", "one").return_value == 4


def test_the_command_undoes_and_skips(store, tree, monkeypatch):
    store("one", TWO)
    patches = load_patches(store("more", [("d.txt", OLD, NEW)]))
    (tree / "d.txt").write_text(OLD)
    monkeypatch.setattr(command, "load_patches", lambda: patches)

    def run(*args):
        return CliRunner().invoke(command.patch, [*map(str, args)], standalone_mode=False)

    assert run("check", tree, "--skip", "more").stdout == "one: fits\n"
    assert run("apply", tree, "--skip", "more").stdout == "one: applied\n"
    assert run("undo", tree).stdout == "one: undone\nmore: not applied, nothing changed\n"
    assert (tree / "a.txt").read_text() == OLD
    run("apply", tree)
    undone = json.loads(run("undo", tree, "--skip", "one", "--json").stdout)["patches"]
    assert [(each["name"], each["state"]) for each in undone] == [("more", "undone")]
    assert run("check", tree).stdout == "more: fits\none: already applied\n"
    nothing = run("undo", tree, "--skip", "one", "--skip", "more")
    assert nothing.exception is None
    assert "every patch is skipped" in nothing.stderr
    refused = run("apply", tree, "--skip", "oen").exception
    assert isinstance(refused, UsageError)
    assert refused.where == "--skip"

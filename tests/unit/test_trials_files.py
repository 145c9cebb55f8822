"""Where trials take their files from: a commit of a clone, read as objects."""

import shutil
import subprocess
from types import SimpleNamespace

import pytest

from envbuild.curate.trials.files import Files
from envbuild.curate.trials.subject import Subject
from envbuild.errors import LockError
from envbuild.settings import Settings


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "clone"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/a.py").write_text("import torch\n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "link.py").symlink_to("/etc/passwd")

    def git(*line):
        who = ("-c", "user.name=a", "-c", "user.email=a@localhost")
        return subprocess.run(["git", *who, *line], cwd=folder, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD").strip()
    (folder / "deep/a.py").write_text("import numpy\n")
    return SimpleNamespace(folder=folder, commit=commit, git=git)


def test_a_checkout_holds_the_sources_of_the_commit_and_nothing_else(clone, tmp_path):
    files = Files(Settings(cache_dir=tmp_path / "cache"))
    folder = files.checkout(clone.folder, clone.commit, {})
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()} == {"deep/a.py"}
    assert (folder / "deep/a.py").read_text() == "import torch\n"
    shutil.rmtree(clone.folder)
    assert files.checkout(clone.folder, clone.commit, {}) == folder


def test_a_submodule_is_taken_from_its_own_clone_at_the_commit_that_is_stated(clone, tmp_path):
    inner, commit = clone.folder, clone.commit
    outer = tmp_path / "outer"
    outer.mkdir()

    def git(*line):
        who = ("-c", "user.name=a", "-c", "user.email=a@localhost")
        return subprocess.run(["git", *who, *line], cwd=outer, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (outer / "own.h").write_text("\n")
    git("add", "own.h")
    git("update-index", "--add", "--cacheinfo", f"160000,{commit},csrc/cutlass")
    git("commit", "-qm", "one")
    clone.git("commit", "-qam", "two")  # the submodule's clone is further on
    files = Files(Settings(cache_dir=tmp_path / "cache"))
    at = git("rev-parse", "HEAD").strip()
    assert not (files.checkout(outer, at, {}) / "csrc").exists()
    assert not (files.checkout(outer, at, {"other": inner}) / "csrc").exists()
    folder = files.checkout(outer, at, {"cutlass": inner})
    assert (folder / "own.h").exists()
    assert (folder / "csrc/cutlass/deep/a.py").read_text() == "import torch\n"
    with pytest.raises(LockError, match=f"does not give commit {commit}"):
        Files(Settings(cache_dir=tmp_path / "other")).checkout(outer, at, {"cutlass": outer})


def test_a_checkout_of_what_is_no_clone_or_has_no_such_commit_is_refused(clone, tmp_path):
    files = Files(Settings(cache_dir=tmp_path / "cache"))
    with pytest.raises(LockError, match="no git repository"):
        files.checkout(tmp_path, clone.commit, {})
    with pytest.raises(LockError, match=r"does not give commit 0{40}"):
        files.checkout(clone.folder, "0" * 40, {})


def test_a_checkout_without_one_of_its_blobs_is_refused(clone, tmp_path):
    blob = clone.git("rev-parse", "HEAD:deep/a.py").strip()
    (clone.folder / ".git/objects" / blob[:2] / blob[2:]).unlink()
    files = Files(Settings(cache_dir=tmp_path / "cache"))
    for _ in range(2):  # nothing that is incomplete counts as there
        with pytest.raises(LockError, match=r"does not hold deep/a.py"):
            files.checkout(clone.folder, clone.commit, {})


def test_a_subject_of_a_commit_is_known_by_it_and_a_folder_by_its_content(tmp_path):
    (tmp_path / "a.py").write_text("1\n")
    commit = "1" * 40
    assert Subject(axis="apex", version="1", tree=tmp_path, commit=commit).identity == (f"commit {commit}",)
    before = Subject(axis="apex", version="1", tree=tmp_path).identity
    (tmp_path / "a.py").write_text("2\n")
    assert Subject(axis="apex", version="1", tree=tmp_path).identity != before

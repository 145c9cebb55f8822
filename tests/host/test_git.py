"""What a lock, an upstream, a clone or a tree of somebody else's can have git do: nothing but give its objects."""

import io
import os
import platform
import shutil
import subprocess
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from git_server import git_server

from envbuild.cli.patch import patch as patch_command
from envbuild.components.base import Tree
from envbuild.errors import DataError, HostError, LockError
from envbuild.lock.model import GitSource, Submodule
from envbuild.lock.sources import SourceStore
from envbuild.patches.manifest import load_patches
from envbuild.settings import load_settings
from envbuild.util.git import empty_repository, head_of, objects_of, run_git

SECOND = "0123456789abcdef0123456789abcdef01234567"


def git(folder, *args, **more):
    return subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always", *args],
        cwd=folder, check=True, capture_output=True, text=True, **more,
    ).stdout.strip()  # fmt: skip


def repository(folder, **files):
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    for name, content in files.items():
        (folder / name).write_text(content)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one", "--allow-empty")
    return git(folder, "rev-parse", "HEAD")


def link_submodule(folder, path, commit, url):
    """Commit a submodule as a hostile upstream can: git itself would refuse some of these."""
    (folder / ".gitmodules").write_text(f'[submodule "x"]\n\tpath = {path}\n\turl = {url}\n')
    git(folder, "add", ".gitmodules")
    git(folder, "update-index", "--add", "--cacheinfo", f"160000,{commit},{path}")
    git(folder, "commit", "-qm", "link")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def settings_for(tmp_path):
    def make(**env):
        variables = {"HOME": str(tmp_path), "ENVBUILD_CACHE_DIR": str(tmp_path / "cache")} | env
        return load_settings(environ=variables, root=tmp_path)

    return make


@pytest.fixture
def upstream(tmp_path, settings_for):
    """An https upstream with the repositories below `up`, and a store that knows its certificate."""
    root = tmp_path / "up"
    root.mkdir()
    with git_server(root, tmp_path / "private") as served:
        settings = settings_for(ENVBUILD_CA_BUNDLE=str(served.certificate), ENVBUILD_NO_PROXY="127.0.0.1")
        yield root, served, SourceStore(settings=settings, patience_s=2)


HOSTILE_URLS = (
    "--upload-pack=touch {marker}",
    "-c core.fsmonitor=touch",
    "ext::sh -c touch% {marker}",
    "http://127.0.0.1/x.git",
    "git://127.0.0.1/x.git",
    "/srv/x.git",
    "../x",
    "https://127.0.0.1/x.git\nhttps://127.0.0.1/y.git",
)


@pytest.mark.parametrize("url", HOSTILE_URLS)
def test_an_address_that_is_none_is_refused_before_git_runs(tmp_path, settings_for, url):
    marker = tmp_path / "marker"
    url = url.format(marker=marker)
    (tmp_path / "sources").mkdir()
    store = SourceStore(settings=settings_for(ENVBUILD_SOURCES=str(tmp_path / "sources")))
    with pytest.raises(DataError, match="cannot be used"):
        store.pin(Tree(name="x", url=url, commit=SECOND))
    hostile = GitSource.trusted(name="x", url=url, commit=SECOND, tree=None, submodules=())
    with pytest.raises(DataError, match="cannot be used"):
        store.checkout(hostile)
    below = Submodule.trusted(path="deps", url=url, commit=SECOND, tree=None, used=True)
    with pytest.raises(DataError, match="cannot be used"):
        store.checkout(
            GitSource.trusted(name="x", url="https://127.0.0.1:1/x.git", commit=SECOND, tree=None, submodules=(below,))
        )
    assert not marker.exists()


@pytest.mark.parametrize("url", [*HOSTILE_URLS[:5], "git@127.0.0.1:x.git"])
def test_an_address_in_an_upstreams_gitmodules_is_refused(tmp_path, upstream, url):
    root, served, store = upstream
    marker = tmp_path / "marker"
    commit = repository(root / "lib")
    commit = link_submodule(root / "lib", "deps", commit, url.format(marker=marker))
    with pytest.raises(DataError, match="address that is not used"):
        store.pin(Tree(name="lib", url=f"{served.url}/lib/.git", commit=commit))
    assert not marker.exists()
    # one that no build reads is a link and an empty address
    pinned = store.pin(Tree(name="lib", url=f"{served.url}/lib/.git", commit=commit, submodules=()))
    assert [(s.path, s.url, s.used) for s in pinned.submodules] == [("deps", "", False)]


@pytest.mark.parametrize(
    "path", ["../out", "/etc/x", "a/../../x", ".git/hooks", "a/.GIT/x", "-x", "a b", "a\nb", "a\\b", "..", ""]
)
@pytest.mark.parametrize("where", ["name", "path"])
def test_a_name_that_leads_out_is_refused_and_nothing_is_removed(tmp_path, upstream, path, where):
    root, served, store = upstream
    kept = tmp_path / "cache/git/kept"
    kept.mkdir(parents=True)
    url, commit = f"{served.url}/lib/.git", repository(root / "lib", a="a")
    if where == "name":
        source = GitSource.trusted(name=path, url=url, commit=commit, tree=None, submodules=())
    else:
        below = Submodule.trusted(path=path, url=url, commit=commit, tree=None, used=True)
        source = GitSource.trusted(name="lib", url=url, commit=commit, tree=None, submodules=(below,))
    with pytest.raises(DataError, match="cannot be used"):
        store.checkout(source)
    assert kept.is_dir()
    assert not served.asked


def test_a_submodule_behind_a_link_of_the_tree_is_refused(tmp_path, upstream):
    """The tree of the lock holds a link to a folder outside, and the lock a submodule below it."""
    root, served, store = upstream
    outside = tmp_path / "outside"
    outside.mkdir()
    part = repository(root / "part", a="a")
    repository(root / "lib")
    (root / "lib/sub").symlink_to(outside)
    git(root / "lib", "add", "-A")
    git(root / "lib", "commit", "-qm", "two")
    commit = git(root / "lib", "rev-parse", "HEAD")
    source = GitSource(
        name="lib",
        url=f"{served.url}/lib/.git",
        commit=commit,
        submodules=(Submodule(path="sub/x", url=f"{served.url}/part/.git", commit=part),),
    )
    with pytest.raises(LockError, match="no submodule sub/x"):
        store.checkout(source)
    assert not list(outside.iterdir())


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_what_lies_behind_a_link_of_a_sites_own_tree_stays(tmp_path, settings_for, kind):
    """A git folder that a link of the tree leads to was removed with the submodule's own."""
    outside = tmp_path / "outside"
    (outside / "x/.git").mkdir(parents=True)
    (outside / "x/.git/kept").write_text("kept")
    place = tmp_path / f"sources/lib-{SECOND}"
    place.mkdir(parents=True)
    (place / "a").write_text("a")
    (place / "sub").symlink_to(outside)
    if kind == "archive":
        with tarfile.open(f"{place}.tar", "w") as tar:
            tar.add(place, "lib")
        shutil.rmtree(place)
    store = SourceStore(settings=settings_for(ENVBUILD_SOURCES=str(tmp_path / "sources")))
    source = GitSource(
        name="lib",
        url="https://127.0.0.1:1/lib.git",
        commit=SECOND,
        submodules=(Submodule(path="sub/x", url="https://127.0.0.1:1/x.git", commit=SECOND),),
    )
    with pytest.raises(LockError):
        store.checkout(source)
    assert (outside / "x/.git/kept").read_text() == "kept"


@pytest.mark.parametrize("path", ["../out", "sub/../../out", "a b"])
def test_a_submodules_path_in_an_upstreams_tree_is_checked(upstream, path):
    root, served, store = upstream
    commit = repository(root / "lib", a="a")
    listed = f"160000 commit {commit}\t{path}\n"
    if "/" in path:  # a tree with a slash in a name, as no git makes it
        digest = bytes.fromhex(commit)
        body = b"160000 " + path.encode() + b"\0" + digest
        tree = git(root / "lib", "hash-object", "-t", "tree", "--literally", "-w", write(root / "tree", body))
    else:
        tree = git(root / "lib", "mktree", "--missing", input=listed)
    made = git(root / "lib", "commit-tree", "-m", "x", tree)
    git(root / "lib", "update-ref", "refs/heads/main", made)
    with pytest.raises(LockError, match="cannot be used"):
        store.pin(Tree(name="lib", url=f"{served.url}/lib/.git", commit=made))


def write(path, body):
    path.write_bytes(body)
    return str(path)


# -- protocols and the environment --------------------------------------------------------------------------------------


def test_https_is_fetched_and_nothing_of_the_user_plays_a_part(tmp_path, upstream, monkeypatch):
    """Hooks, variables and configuration of the user that would run a command, or fetch from elsewhere."""
    root, served, store = upstream
    marker = tmp_path / "marker"
    part = repository(root / "part", b="b")
    repository(root / "lib", a="a")
    commit = link_submodule(root / "lib", "deps/part", part, "../../part/.git")
    home = tmp_path / "home"
    (home / ".config/git").mkdir(parents=True)
    touch = f"touch {marker}; false"
    configuration = (
        f'[core]\n\tfsmonitor = "{touch}"\n\taskPass = "{touch}"\n\tsshCommand = "{touch}"\n'
        f'[credential]\n\thelper = "!{touch}"\n[url "https://127.0.0.1:1/"]\n\tinsteadOf = {served.url}/\n'
    )
    for file in (home / ".gitconfig", home / ".config/git/config"):
        file.write_text(configuration)
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("post-index-change", "post-checkout", "reference-transaction"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {marker}\n")
        (hooks / name).chmod(0o755)
    (home / ".gitconfig").write_text(configuration + f"[core]\n\thooksPath = {hooks}\n")
    for name, value in {
        "HOME": home, "XDG_CONFIG_HOME": home / ".config", "GIT_CONFIG_GLOBAL": home / ".gitconfig",
        "GIT_CONFIG_SYSTEM": home / ".gitconfig", "GIT_SSH_COMMAND": touch, "GIT_ASKPASS": touch,
        "GIT_EXEC_PATH": tmp_path, "GIT_TEMPLATE_DIR": tmp_path, "GIT_EXTERNAL_DIFF": touch, "GIT_PROXY_COMMAND": touch,
        "GIT_DIR": tmp_path / "other", "GIT_WORK_TREE": tmp_path / "other", "GIT_INDEX_FILE": tmp_path / "other",
        "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.fsmonitor", "GIT_CONFIG_VALUE_0": touch,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    pinned = store.pin(Tree(name="lib", url=f"{served.url}/lib/.git", commit=commit))
    assert pinned.submodules[0].url == f"{served.url}/part/.git"
    folder = store.checkout(pinned)
    assert (folder / "a").read_text() + (folder / "deps/part/b").read_text() == "ab"
    assert not marker.exists()


@pytest.mark.parametrize("url", ["ssh://git@127.0.0.1:1/x.git", "file:///nowhere/x.git"])
def test_another_protocol_needs_the_setting(tmp_path, settings_for, url):
    wanted = Tree(name="x", url=url, commit=SECOND)
    protocol = url.partition(":")[0]
    with pytest.raises(DataError, match=f"{protocol} is not allowed here") as refused:
        SourceStore(settings=settings_for()).pin(wanted)
    assert f'git_protocols = ["{protocol}"]' in str(refused.value)
    allowed = settings_for(ENVBUILD_GIT_PROTOCOLS=protocol)
    with pytest.raises(HostError):
        SourceStore(settings=allowed, patience_s=5).pin(wanted)


def test_a_redirect_to_another_protocol_is_not_followed(upstream):
    root, served, store = upstream
    repository(root / "lib", a="a")
    served.redirect = "http://127.0.0.1:9/lib/.git/info/refs?service=git-upload-pack"
    with pytest.raises(HostError, match="cannot be fetched"):
        store.pin(Tree(name="lib", url=f"{served.url}/lib/.git", commit=SECOND))


def test_an_upstream_that_stalls_is_one_message_in_time(upstream):
    root, served, store = upstream
    repository(root / "lib", a="a")
    served.stall.set()
    begun = time.monotonic()
    with pytest.raises(HostError, match="nothing came for 2 s") as refused:
        store.pin(Tree(name="lib", url=f"{served.url}/lib/.git", commit=SECOND))
    assert time.monotonic() - begun < 20
    assert "check the network" in str(refused.value)


def test_a_commit_that_is_missing_at_an_https_upstream(upstream):
    root, served, store = upstream
    repository(root / "lib", a="a")
    with pytest.raises(LockError, match="has no commit 1111"):
        store.pin(Tree(name="lib", url=f"{served.url}/lib/.git", commit="1" * 40))


def test_git_runs_with_an_end(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with empty_repository() as ours:
        fifo = ours / "objects/info"
        fifo.mkdir()
        os.mkfifo(fifo / "alternates")
        begun = time.monotonic()
        with pytest.raises(HostError, match="did not end in time"):
            run_git(ours, "cat-file", "--batch-check", stdin=b"HEAD:x\n" + SECOND.encode() + b"\n", limit_s=1)
        assert time.monotonic() - begun < 10


def test_an_operand_is_no_option():
    with empty_repository() as ours:
        with pytest.raises(ValueError, match="starts with a dash"):
            run_git(ours, "fetch", operands=("--upload-pack=x", SECOND))
        with pytest.raises(LockError, match="more than 10 bytes"):
            run_git(ours, "cat-file", "--batch-check", stdin=(SECOND + "\n").encode(), limit_bytes=10)


def test_a_machine_without_git(monkeypatch, settings_for):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostError, match="git is not on the PATH"):
        SourceStore(settings=settings_for()).pin(Tree(name="x", url="https://127.0.0.1:1/x.git", commit=SECOND))


# -- a tree or a clone whose own configuration names programs -----------------------------------------------------------


def arm(tree, marker):
    """Have every key of the tree's configuration that names a program touch `marker`."""
    script = tree / ".git/touch"
    script.write_text(f"#!/bin/sh\ntouch {marker}\nexit 1\n")
    script.chmod(0o755)
    for key in (
        "core.fsmonitor", "core.sshCommand", "core.askPass", "core.pager", "core.editor", "core.alternateRefsCommand",
        "core.gitProxy", "filter.x.clean", "filter.x.smudge", "filter.x.process", "diff.x.textconv", "diff.external",
        "diff.x.command", "merge.x.driver", "credential.helper", "uploadpack.packObjectsHook", "remote.origin.uploadpack",
        "remote.origin.vcs", "gpg.program",
    ):  # fmt: skip
        git(tree, "config", key, str(script))
    git(tree, "config", "remote.origin.url", "ssh://127.0.0.1:1/x")
    git(tree, "config", "remote.origin.promisor", "true")
    git(tree, "config", "extensions.partialClone", "origin")
    git(tree, "config", "core.hooksPath", str(tree / ".git/armed"))
    (tree / ".git/armed").mkdir()
    for hook in ("post-checkout", "post-index-change", "reference-transaction", "pre-auto-gc", "fsmonitor-watchman"):
        shutil.copy(script, tree / ".git/armed" / hook)
    (tree / ".git/info/attributes").write_text("* filter=x diff=x merge=x\n")


@pytest.fixture
def armed(tmp_path):
    """A tree like Megatron's with one file changed, and the marker that its configuration would make."""
    target = next(iter(load_patches().values()))
    tree = tmp_path / "tree"
    for file in target.files:
        (tree / file.path).parent.mkdir(parents=True, exist_ok=True)
        (tree / file.path).write_text("as HEAD has it\n")
    git(tmp_path, "init", "-q", str(tree))
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "one")
    for file in target.files:
        (tree / file.path).write_text("changed\n")
    arm(tree, tmp_path / "marker")
    return tree, tmp_path / "marker", target


def promise_tree(tree):
    """Take HEAD's tree away: git fetches what is missing in a partial clone as soon as it is read, by a command of its choice."""
    oid = git(tree, "rev-parse", "HEAD^{tree}")
    (tree / ".git/objects" / oid[:2] / oid[2:]).unlink()
    git(tree, "config", "--unset", "remote.origin.vcs")


@pytest.mark.parametrize("command", ["check", "apply", "undo"])
@pytest.mark.parametrize("partial", [False, True])
def test_patch_runs_nothing_that_the_tree_names(armed, command, partial):
    tree, marker, target = armed
    if partial:
        promise_tree(tree)
    done = CliRunner().invoke(patch_command, [command, str(tree), "--patch", target.name], standalone_mode=False)
    printed = done.output + str(done.exception or "")
    assert not marker.exists()
    assert ("the file is modified: HEAD has" in printed) is not partial  # so that HEAD was read
    assert "expected" in printed


def test_a_clone_among_the_sources_runs_nothing(tmp_path, settings_for):
    marker = tmp_path / "marker"
    commit = repository(tmp_path / "sources/lib", a="a")
    arm(tmp_path / "sources/lib", marker)
    store = SourceStore(settings=settings_for(ENVBUILD_SOURCES=str(tmp_path / "sources")))
    pinned = store.pin(Tree(name="lib", url="https://127.0.0.1:1/lib.git", commit=commit))
    assert (store.checkout(pinned) / "a").read_text() == "a"
    assert not marker.exists()
    shutil.rmtree(tmp_path / "sources/lib")
    shutil.rmtree(tmp_path / "cache/git/trees")
    assert (store.checkout(pinned) / "a").read_text() == "a"  # the objects are ours now


def test_a_file_address_runs_nothing(tmp_path, settings_for):
    marker = tmp_path / "marker"
    commit = repository(tmp_path / "up/lib", a="a")
    arm(tmp_path / "up/lib", marker)
    store = SourceStore(settings=settings_for(ENVBUILD_GIT_PROTOCOLS="file"))
    pinned = store.pin(Tree(name="lib", url=f"file://{tmp_path}/up/lib", commit=commit))
    assert (store.checkout(pinned) / "a").read_text() == "a"
    assert not marker.exists()


def test_a_clone_that_lies_about_an_object_is_passed_over(tmp_path, settings_for):
    """An object under another's id: a clone's word for a commit is not taken."""
    commit = repository(tmp_path / "sources/lib", a="a")
    other = git(tmp_path / "sources/lib", "hash-object", "-w", "--stdin", input="hostile")
    blob = git(tmp_path / "sources/lib", "rev-parse", "HEAD:a")
    objects = tmp_path / "sources/lib/.git/objects"
    (objects / blob[:2] / blob[2:]).unlink()
    shutil.copy(objects / other[:2] / other[2:], objects / blob[:2] / blob[2:])
    notes = []
    store = SourceStore(settings=settings_for(ENVBUILD_SOURCES=str(tmp_path / "sources")), note=notes.append)
    with pytest.raises(HostError, match="cannot be fetched"):
        store.pin(Tree(name="lib", url="https://127.0.0.1:1/lib.git", commit=commit))


@pytest.mark.parametrize("kind", ["bare", "packed", "worktree", "alternates", "detached"])
def test_every_kind_of_clone_is_read(tmp_path, kind):
    commit = repository(tmp_path / "one", a="a")
    place = tmp_path / "two"
    if kind == "bare":
        git(tmp_path, "clone", "-q", "--bare", "one", "two")
    elif kind == "worktree":
        git(tmp_path / "one", "worktree", "add", "-q", str(place))
    elif kind == "alternates":
        git(tmp_path, "clone", "-q", "--shared", "one", "two")
    else:
        place = tmp_path / "one"
        git(place, *(("gc", "-q") if kind == "packed" else ("checkout", "-q", "--detach")))
    assert head_of(place) == commit
    with empty_repository() as ours:
        ran = run_git(ours, "cat-file", "--batch-check", stdin=f"{commit}:a\n".encode(), borrowed=(objects_of(place),))
    assert ran.stdout.split()[1] == b"blob"


def test_a_head_that_leads_elsewhere_is_none(tmp_path):
    repository(tmp_path / "one", a="a")
    for text in ("ref: ../../../etc/passwd", "ref: refs/heads/../../x", "ref: refs/heads/a b", "x" * 2000, "\0", ""):
        (tmp_path / "one/.git/HEAD").write_text(text)
        assert head_of(tmp_path / "one") is None
    (tmp_path / "one/.git/HEAD").write_text("ref: refs/heads/fifo")
    os.mkfifo(tmp_path / "one/.git/refs/heads/fifo")
    assert head_of(tmp_path / "one") is None
    (tmp_path / "one/.git/HEAD").write_text("ref: refs/heads/loop")
    (tmp_path / "one/.git/refs/heads/loop").write_text("ref: refs/heads/loop")
    assert head_of(tmp_path / "one") is None


# -- archives -----------------------------------------------------------------------------------------------------------


def archive(path, *members):
    with tarfile.open(path, "w") as tar:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            if kind == tarfile.REGTYPE:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            else:
                member.linkname = content
                tar.addfile(member)


@pytest.mark.parametrize(
    "members",
    [
        [("lib/../../../marker", tarfile.REGTYPE, b"x")],
        [("lib/out", tarfile.SYMTYPE, "{root}"), ("lib/out/marker", tarfile.REGTYPE, b"x")],
        [("lib/in", tarfile.SYMTYPE, "."), ("lib/in/marker", tarfile.REGTYPE, b"x")],
        [("lib/a", tarfile.SYMTYPE, "b"), ("lib/a", tarfile.REGTYPE, b"x")],
        [("lib/fifo", tarfile.FIFOTYPE, "")],
        [("lib/null", tarfile.CHRTYPE, "")],
        [("lib/hard", tarfile.LNKTYPE, "/etc/passwd")],
        [("lib/hard", tarfile.LNKTYPE, "lib/none")],
    ],
)
def test_an_archive_holds_files_folders_and_links_alone(tmp_path, settings_for, members):
    (tmp_path / "sources").mkdir()
    filled = [(n, k, c.format(root=tmp_path) if isinstance(c, str) else c) for n, k, c in members]
    archive(tmp_path / f"sources/lib-{SECOND}.tar", *filled)
    store = SourceStore(settings=settings_for(ENVBUILD_SOURCES=str(tmp_path / "sources")))
    source = GitSource(name="lib", url="https://127.0.0.1:1/lib.git", commit=SECOND)
    with pytest.raises(LockError, match="cannot be unpacked"):
        store.plain_folder(source)
    assert not list(tmp_path.glob("**/marker"))


def test_an_archive_has_a_bound(tmp_path, settings_for, monkeypatch):
    monkeypatch.setattr("envbuild.lock.trees._MOST_BYTES", 1000)
    monkeypatch.setattr("envbuild.lock.trees._MOST_FILES", 10)
    (tmp_path / "sources").mkdir()
    store = SourceStore(settings=settings_for(ENVBUILD_SOURCES=str(tmp_path / "sources")))
    source = GitSource(name="lib", url="https://127.0.0.1:1/lib.git", commit=SECOND)
    for members in ([("a", tarfile.REGTYPE, b"x" * 1001)], [(f"{n}", tarfile.REGTYPE, b"") for n in range(11)]):
        archive(tmp_path / f"sources/lib-{SECOND}.tar", *members)
        with pytest.raises(LockError, match=r"has more than|unpacks to more than"):
            store.plain_folder(source)


def test_a_header_of_an_archive_has_a_bound(tmp_path, settings_for):
    """tarfile reads an extended header whole: 32 MiB of it in 32 KiB."""
    (tmp_path / "sources").mkdir()
    with tarfile.open(tmp_path / f"sources/lib-{SECOND}.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("a")
        member.pax_headers = {"comment": "x" * 2**25}
        tar.addfile(member)
    store = SourceStore(settings=settings_for(ENVBUILD_SOURCES=str(tmp_path / "sources")))
    with pytest.raises(LockError, match="header in it is larger"):
        store.plain_folder(GitSource(name="lib", url="https://127.0.0.1:1/lib.git", commit=SECOND))


def test_a_fifo_in_a_sites_own_folder_is_refused(tmp_path, settings_for):
    place = tmp_path / f"sources/lib-{SECOND}"
    place.mkdir(parents=True)
    os.mkfifo(place / "fifo")
    store = SourceStore(settings=settings_for(ENVBUILD_SOURCES=str(tmp_path / "sources")))
    with pytest.raises(LockError, match="not a file, a link or a folder"):
        store.checkout(GitSource(name="lib", url="https://127.0.0.1:1/lib.git", commit=SECOND))


# -- the cache ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cached(upstream):
    root, served, store = upstream
    part = repository(root / "part", b="b")
    repository(root / "lib", a="a", c="c" * 5000)
    commit = link_submodule(root / "lib", "deps/part", part, "../../part/.git")
    notes = []
    store = replace(store, note=notes.append)
    pinned = store.pin(Tree(name="lib", url=f"{served.url}/lib/.git", commit=commit))
    return served, store, pinned, store.checkout(pinned), notes


def change_content(folder):
    (folder / "a").write_text("other")


def change_submodule(folder):
    (folder / "deps/part/b").write_text("other")


def add_file(folder):
    (folder / "new").write_text("new")


def add_git(folder):
    (folder / ".git").mkdir()


def remove_file(folder):
    (folder / "a").unlink()


def change_mode(folder):
    (folder / "a").chmod(0o755)


def make_link(folder):
    shutil.rmtree(folder / "deps")
    (folder / "deps").symlink_to("/")


@pytest.mark.parametrize(
    "change", [change_content, change_submodule, add_file, add_git, remove_file, change_mode, make_link]
)
def test_a_cached_tree_that_was_changed_is_made_again_and_reported(cached, change):
    _, store, pinned, folder, notes = cached
    change(folder)
    assert store.checkout(pinned) == folder
    assert (folder / "a").read_text() == "a"
    assert sorted(p.name for p in folder.iterdir()) == [".gitmodules", "a", "c", "deps"]
    assert (folder / "deps/part/b").read_text() == "b"
    assert len(notes) == 1
    assert "was changed" in notes[0]
    store.checkout(pinned)
    assert len(notes) == 1
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_cached_tree_needs_no_objects(cached, tmp_path):
    _, store, pinned, folder, notes = cached
    shutil.rmtree(tmp_path / "cache/git/objects.git")
    assert store.checkout(pinned) == folder
    assert not notes


def damage_pack(objects):
    for pack in objects.glob("objects/pack/*.pack"):
        pack.chmod(0o644)
        body = bytearray(pack.read_bytes())
        middle = len(body) // 2
        body[middle : middle + 20] = b"x" * 20
        pack.write_bytes(body)


def cut_packs(objects):
    for pack in objects.glob("objects/pack/*.pack"):
        pack.chmod(0o644)
        pack.write_bytes(pack.read_bytes()[:40])


def empty_indexes(objects):
    for pack in objects.glob("objects/pack/*.idx"):
        pack.chmod(0o644)
        pack.write_bytes(b"")


def spoil_config(objects):
    (objects / "config").write_text("[core\n")


def spoil_shallow(objects):
    (objects / "shallow").write_text("x")


def remove_head(objects):
    (objects / "HEAD").unlink()


@pytest.mark.parametrize("damage", [damage_pack, cut_packs, empty_indexes, spoil_config, spoil_shallow, remove_head])
def test_a_damaged_store_is_made_again(cached, tmp_path, damage):
    _, store, pinned, folder, notes = cached
    damage(tmp_path / "cache/git/objects.git")
    shutil.rmtree(folder)
    assert store.checkout(pinned) == folder
    assert (folder / "c").read_text() == "c" * 5000
    assert len(notes) <= 1
    assert sorted(p.name for p in (tmp_path / "cache/git").iterdir()) == ["objects.git", "objects.lock", "trees"]


def test_a_damaged_store_without_its_upstream_is_named(cached, tmp_path):
    served, store, pinned, folder, notes = cached
    damage_pack(tmp_path / "cache/git/objects.git")
    shutil.rmtree(folder)
    served.stall.set()
    with pytest.raises(HostError, match="cannot be fetched from"):
        store.checkout(pinned)
    assert len(notes) == 1
    assert "damaged" in notes[0]


def test_an_upstreams_words_do_not_remove_the_store(cached, tmp_path):
    """Only damage that is found here is damage."""
    served, store, _, _, notes = cached
    kept = {p.name for p in (tmp_path / "cache/git/objects.git/objects/pack").iterdir()}
    blob = "2e65efe2a145dda7ee51d1741299f848e5bf752e"  # "a", which the upstream does have, and which is no commit
    with pytest.raises(LockError):
        store.pin(Tree(name="lib", url=f"{served.url}/lib/.git", commit=blob))
    assert kept <= {p.name for p in (tmp_path / "cache/git/objects.git/objects/pack").iterdir()}
    assert not notes


def test_runs_at_the_same_time_while_the_store_and_the_tree_are_damaged(cached, tmp_path):
    _, store, pinned, folder, _ = cached
    damage_pack(tmp_path / "cache/git/objects.git")
    change_content(folder)
    failed = []

    def run():
        try:
            assert (store.checkout(pinned) / "a").read_text() == "a"
        except Exception as error:  # noqa: BLE001 - every one is a failure of the test
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert (folder / "a").read_text() == "a"


def test_what_a_killed_run_left_goes(cached, tmp_path):
    _, store, pinned, folder, _ = cached
    left = [tmp_path / f"cache/git/{where}.envbuild-source-{'0' * 16}.tmp" for where in ("", "trees/")]
    for each in left:
        (each / "made").mkdir(parents=True)
        (each / ".lock").write_text(platform.node())
    pack = tmp_path / "cache/git/objects.git/objects/pack/tmp_pack_x"
    pack.write_text("x")
    change_content(folder)
    store.checkout(pinned)
    shutil.rmtree(folder)
    store.checkout(pinned)
    assert not [each for each in (*left, pack) if each.exists()]


def test_files_are_their_blobs_whatever_their_attributes_say(upstream):
    root, served, store = upstream
    files = {".gitattributes": "*.bat eol=crlf\n*.id ident\n*.x filter=lfs\n"}
    repository(root / "lib", **files, **{"a.bat": "one\ntwo\n", "b.id": "$Id$\n", "c.x": "text\n"})
    commit = git(root / "lib", "rev-parse", "HEAD")
    folder = store.checkout(store.pin(Tree(name="lib", url=f"{served.url}/lib/.git", commit=commit)))
    for name in ("a.bat", "b.id", "c.x"):
        assert (folder / name).read_bytes() == git_bytes(root / "lib", f"HEAD:{name}")


def git_bytes(folder, name):
    return subprocess.run(["git", "cat-file", "blob", name], cwd=folder, capture_output=True, check=True).stdout


def test_submodules_in_one_another_have_a_bound(upstream):
    root, served, store = upstream
    url = f"{served.url}/lib/.git"
    commit = repository(root / "lib", a="a")
    for _ in range(10):
        commit = link_submodule(root / "lib", "s", commit, "./.")
    git(root / "lib", "update-ref", "refs/heads/main", commit)
    with pytest.raises(DataError):
        store.pin(Tree(name="lib", url=url, commit=commit))
    for _ in range(10):
        commit = link_submodule(root / "lib", "s", commit, url)
    with pytest.raises(DataError, match="submodules nested deeper than 8"):
        store.pin(Tree(name="lib", url=url, commit=commit))


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe",
        b"[submodule",
        b'[submodule "x"]\npath = a\npath = b\n',
        b'[submodule "x"]\npath = "a\n',
        b"\0=",
        b"=x",
    ],
)
def test_an_odd_gitmodules_is_one_message(upstream, text):
    root, served, store = upstream
    commit = repository(root / "lib", a="a")
    (root / "lib/.gitmodules").write_bytes(text)
    git(root / "lib", "add", "-A")
    git(root / "lib", "update-index", "--add", "--cacheinfo", f"160000,{commit},s")
    git(root / "lib", "commit", "-qm", "two")
    commit = git(root / "lib", "rev-parse", "HEAD")
    with pytest.raises(DataError, match=r"\.gitmodules cannot be read"):
        store.pin(Tree(name="lib", url=f"{served.url}/lib/.git", commit=commit))


def test_a_large_gitmodules_is_not_read(upstream):
    root, served, store = upstream
    commit = repository(root / "lib", a="a")
    (root / "lib/.gitmodules").write_text("#" * (2**20 + 1))
    git(root / "lib", "add", "-A")
    git(root / "lib", "update-index", "--add", "--cacheinfo", f"160000,{commit},s")
    git(root / "lib", "commit", "-qm", "two")
    commit = git(root / "lib", "rev-parse", "HEAD")
    with pytest.raises(DataError, match=r"\.gitmodules has 1048577 bytes"):
        store.pin(Tree(name="lib", url=f"{served.url}/lib/.git", commit=commit))


def test_git_is_run_in_one_place_of_the_package():
    """Nothing else builds a command line of it."""
    package = Path(__file__).parents[2] / "envbuild"
    found = [
        p.name for p in package.rglob("*.py") if 'subprocess.run(["git"' in p.read_text() or '["git",' in p.read_text()
    ]
    assert found == ["git.py"]

"""Source trees: by commit from a clone, or a site's own tree or archive, compared with the lock."""

import concurrent.futures
import shutil
import subprocess
import tarfile
from dataclasses import replace

import pytest
from cell_inputs import plan_for

from envbuild.components.base import Tree
from envbuild.errors import HostError, LockError
from envbuild.lock.find import incomplete
from envbuild.lock.model import Missing
from envbuild.lock.sources import SourceStore
from envbuild.pipeline.locked import UnreachableError, require_sources
from envbuild.settings import Settings, load_settings


def git(folder, *args):
    return subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always", *args],
        cwd=folder, check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip


@pytest.fixture
def site(tmp_path):
    """A `sources` folder with a clone of `lib`, which has a submodule."""
    sources = tmp_path / "sources"
    for name in ("part", "lib"):
        folder = sources / name
        folder.mkdir(parents=True)
        git(folder, "init", "-q", "-b", "main")
        (folder / "run.sh").write_text(f"#!/bin/sh\necho {name}\n")
        (folder / "run.sh").chmod(0o755)
        (folder / "link").symlink_to("run.sh")
        if name == "lib":
            git(folder, "submodule", "--quiet", "add", str(sources / "part"), "deps/part")
            git(
                folder,
                "config",
                "-f",
                ".gitmodules",
                "submodule.deps/part.url",
                "https://unreachable.invalid/x/part.git",
            )
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "one")
    settings = load_settings(
        environ={
            "HOME": str(tmp_path),
            "ENVBUILD_SOURCES": str(sources),
            "ENVBUILD_CACHE_DIR": str(tmp_path / "cache"),
            "ENVBUILD_GIT_PROTOCOLS": "file",
        },
        root=tmp_path,
    )
    wanted = Tree(
        name="lib", url="https://unreachable.invalid/x/lib.git", commit=git(sources / "lib", "rev-parse", "HEAD")
    )
    return sources, settings, wanted


def test_a_clone_in_the_sites_folder_is_pinned_by_tree_with_its_submodules(site):
    sources, settings, wanted = site
    pinned = SourceStore(settings=settings).pin(wanted)
    assert pinned.tree == git(sources / "lib", "rev-parse", "HEAD^{tree}")
    assert [(s.path, s.commit) for s in pinned.submodules] == [
        ("deps/part", git(sources / "part", "rev-parse", "HEAD"))
    ]
    folder = SourceStore(settings=settings).checkout(pinned)
    assert (folder / "deps/part/run.sh").read_text() == "#!/bin/sh\necho part\n"
    assert (folder / "run.sh").stat().st_mode & 0o111
    assert (folder / "link").is_symlink()
    assert not (folder / ".git").exists()


def test_another_choice_of_submodules_is_another_tree(site):
    _, settings, wanted = site
    store = SourceStore(settings=settings)
    without = store.pin(replace(wanted, submodules=()))
    assert not list((store.checkout(without) / "deps/part").glob("*"))
    assert (store.checkout(store.pin(wanted)) / "deps/part/run.sh").is_file()
    assert not list((store.checkout(without) / "deps/part").glob("*"))


def test_a_tree_that_differs_from_the_lock_is_refused(site):
    _, settings, wanted = site
    store = SourceStore(settings=settings)
    pinned = store.pin(wanted)
    with pytest.raises(LockError, match="is not what the lock names") as refused:
        store.checkout(pinned.model_copy(update={"tree": "0" * 40}))
    assert pinned.tree in str(refused.value)


def test_an_unpacked_tree_is_verified(site):
    sources, settings, wanted = site
    store = SourceStore(settings=settings)
    pinned = store.pin(wanted)
    plain = with_its_submodules(sources, wanted)
    for folder in (plain / "deps/part", plain):
        dot = folder / ".git"
        subprocess.run(["rm", "-rf", str(dot)], check=True)
    assert store.checkout(pinned) == plain
    (plain / "run.sh").write_text("#!/bin/sh\necho changed\n")
    with pytest.raises(LockError, match="is not what the lock names"):
        store.checkout(pinned)


def test_a_lock_that_lists_no_submodules_of_a_tree_that_has_some_is_made_again(site):
    _, settings, wanted = site
    store = SourceStore(settings=settings)
    unlisted = store.pin(wanted).model_copy(update={"submodules": ()})
    with pytest.raises(LockError, match=r"does not list the submodules of lib at .*: deps/part") as refused:
        store.checkout(unlisted)
    assert refused.value.hint == "make the lock again"


def with_its_submodules(sources, wanted):
    """Make the site's own tree of `lib`, a clone as git leaves it."""
    plain = sources / f"lib-{wanted.commit}"
    git(sources, "clone", "-q", str(sources / "lib"), str(plain))
    instead = f"url.{sources / 'part'}.insteadOf=https://unreachable.invalid/x/part.git"
    git(plain, "-c", instead, "submodule", "--quiet", "update", "--init")
    return plain


@pytest.mark.parametrize("what", ["changed", "missing"])
def test_a_submodule_of_an_unpacked_tree_is_verified(site, what):
    sources, settings, wanted = site
    store = SourceStore(settings=settings)
    pinned = store.pin(wanted)
    part = with_its_submodules(sources, wanted) / "deps/part"
    (part / "run.sh").write_text("#!/bin/sh\necho changed\n")
    if what == "missing":
        shutil.rmtree(part)
    with pytest.raises(LockError, match="lib/deps/part is not what the lock names") as refused:
        store.checkout(pinned)
    assert pinned.submodules[0].tree in str(refused.value)


def test_what_no_id_accounts_for_stays_out(site):
    """git's own files, and the content of a submodule that no build reads."""
    sources, settings, wanted = site
    store = SourceStore(settings=settings)
    plain = with_its_submodules(sources, wanted)
    whole = store.checkout(store.pin(wanted))
    assert sorted(p.relative_to(whole).as_posix() for p in whole.rglob("*") if not p.is_dir()) == [
        ".gitmodules",
        "deps/part/link",
        "deps/part/run.sh",
        "link",
        "run.sh",
    ]
    assert (whole / "link").is_symlink()
    alone = store.checkout(store.pin(replace(wanted, submodules=())))
    assert not (alone / "deps/part").exists()
    assert (plain / ".git").exists()
    with tarfile.open(f"{plain}.tar", "w") as tar:
        tar.add(plain, arcname="lib")
    shutil.rmtree(plain)
    unpacked = store.checkout(store.pin(wanted))
    assert unpacked != whole
    assert not list(unpacked.rglob(".git"))
    assert (unpacked / "deps/part/run.sh").is_file()


def test_a_lock_that_a_killed_fetch_left_does_not_stay_in_the_way(site):
    _, settings, wanted = site
    store = SourceStore(settings=settings)
    store.objects.make()
    left = settings.cache_dir / "git" / "objects.git" / "shallow.lock"
    left.touch()
    assert store.pin(wanted).tree


def test_two_runs_fetch_one_after_the_other(site):
    sources, settings, wanted = site
    store = SourceStore(settings=settings)
    part = replace(
        wanted,
        name="part",
        url="https://unreachable.invalid/x/part.git",
        commit=git(sources / "part", "rev-parse", "HEAD"),
    )
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = [f.result() for f in [pool.submit(store.pin, each) for each in (wanted, part) * 4]]
    assert len({p.tree for p in found}) == 2


def test_an_archive_is_unpacked_and_verified(site):
    sources, settings, wanted = site
    store = SourceStore(settings=settings)
    pinned = store.pin(
        Tree(
            name="part", url="https://unreachable.invalid/x/part.git", commit=git(sources / "part", "rev-parse", "HEAD")
        )
    )
    with tarfile.open(sources / f"part-{pinned.commit}.tar.gz", "w:gz") as tar:
        for name in ("run.sh", "link"):
            tar.add(sources / "part" / name, arcname=f"part/{name}")
    assert (store.checkout(pinned) / "run.sh").is_file()
    assert wanted.commit != pinned.commit


def test_a_broken_archive_is_one_clear_message(site):
    sources, settings, _ = site
    store = SourceStore(settings=settings)
    pinned = store.pin(
        Tree(
            name="part", url="https://unreachable.invalid/x/part.git", commit=git(sources / "part", "rev-parse", "HEAD")
        )
    )
    (sources / f"part-{pinned.commit}.tar.gz").write_bytes(b"no archive")
    with pytest.raises(LockError, match="cannot be unpacked"):
        store.checkout(pinned)


def test_a_commit_that_the_upstream_does_not_have_is_no_matter_of_the_network(site, tmp_path):
    _, settings, _ = site
    git(tmp_path, "init", "-q", "--bare", "up.git")
    wanted = Tree(name="lib", url=f"file://{tmp_path}/up.git", commit="1" * 40)
    with pytest.raises(LockError, match=f"has no commit {'1' * 40}") as refused:
        SourceStore(settings=settings).pin(wanted)
    assert "correct the pin" in str(refused.value)


def test_an_upstream_out_of_reach_names_its_host(site):
    _, settings, _ = site
    wanted = Tree(name="gone", url="https://unreachable.invalid/x/gone.git", commit="1" * 40)
    with pytest.raises(HostError, match=r"unreachable\.invalid") as refused:
        SourceStore(settings=settings).pin(wanted)
    assert "`sources`" in str(refused.value)


def test_a_host_with_a_long_name_is_named_whole(site):
    """In the error, and in the one of a lock that lists it as missing. curl itself cuts one of more than 230 characters."""
    host = ".".join(["a" * 60] * 3) + ".invalid"
    _, settings, _ = site
    wanted = Tree(name="gone", url=f"https://{host}/{'x' * 90}/gone.git", commit="1" * 40)
    with pytest.raises(HostError) as refused:
        SourceStore(settings=settings).pin(wanted)
    last = refused.value.what.partition(f"cannot be fetched from {host}: ")[2]
    assert host in last
    assert "unable to access" not in last  # the address is in `where`
    gone = Missing(what="source tree of gone", host="one", why=refused.value.what, component="gone", kind="tree")
    assert last in incomplete((gone,), "lock.json").what


def test_a_source_that_the_command_line_replaces_is_not_asked_for(tmp_path):
    settings = Settings(cache_dir=tmp_path / "cache")
    plan = plan_for(cuda="13.0", te="2.12", apex="auto")
    away = tuple(s.model_copy(update={"url": "https://unreachable.invalid/apex.git"}) for s in plan.lock.sources)
    plan = replace(plan, lock=plan.lock.model_copy(update={"sources": away}))
    with pytest.raises(UnreachableError, match=r"(?s)apex.*unreachable\.invalid"):
        require_sources(settings, plan)
    require_sources(settings, plan, replaced={"src-apex"})

"""The Debian root of our own, made twice, run on two engines; and what apt says a list of packages comes to."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from envbuild.engine.bootstrap import bootstrap_root
from envbuild.engine.progress import Watch
from envbuild.errors import HostError, LockError
from envbuild.lock.apt import resolve_os_packages
from envbuild.paths import data_dir
from envbuild.settings import load_settings
from envbuild.util.scratch import sweep

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="session")
def settings():
    return load_settings()


@pytest.fixture(scope="session")
def unanswered(settings):
    """The same settings with archives that nobody serves."""
    names = ("debian_mirror", "debian_security_mirror", "ubuntu_mirror")
    return settings.model_copy(update=dict.fromkeys(names, "http://127.0.0.1:9/archive"))


@pytest.fixture(scope="session")
def resolved(settings):
    return resolve_os_packages(settings, suite="bookworm", packages=[])


def test_two_runs_give_the_same_bytes_and_just_the_resolved_packages(debian_root, resolved, settings, epoch, tmp_path):
    again = bootstrap_root(
        settings,
        suite="bookworm",
        packages=[],
        epoch=epoch,
        dest=tmp_path / "again.tar",
        log=tmp_path / "log",
        locked=resolved,
    )
    assert again.sha256 == debian_root.sha256
    assert again.packages == debian_root.packages == resolved
    again.path.unlink()


def test_the_root_carries_nothing_of_this_machine_or_this_day(debian_root, epoch):
    with tarfile.open(debian_root.path) as tar:
        members = {member.name.removeprefix("./"): member for member in tar}
        sources = tar.extractfile(members["etc/apt/sources.list"]).read().decode()
    assert max(member.mtime for member in members.values()) <= epoch
    hosts = set(re.findall(r"https?://([^/]+)/", sources))
    assert hosts == {"deb.debian.org"}
    assert not {"etc/hostname", "etc/resolv.conf", "etc/machine-id"} & members.keys()
    assert not [
        name
        for name in members
        if re.match(r"var/log/.*[^/]$|var/cache/.*\.bin$|.*-old$|dev/.", name) and members[name].isfile()
    ]
    assert members["bin"].linkname == "usr/bin"
    # Whose they are does not depend on who may enter the temporary folder; nobody else may enter pytest's.
    for folder in ("var/cache/apt/archives/partial", "var/lib/apt/lists/partial"):
        assert (members[folder].uid, members[folder].gid) == (42, 0), folder


def test_the_root_runs_and_installs_on_two_engines_side_by_side(debian_root, engine, second_engine, tmp_path):
    """The second engine must leave the first one's network whole, and have one itself."""
    (tmp_path / "Dockerfile").write_text(
        "FROM scratch\nADD rootfs.tar /\nRUN apt-get update -qq -o APT::Update::Error-Mode=any\n"
    )
    (tmp_path / "rootfs.tar").hardlink_to(debian_root.path)
    for client in (engine, second_engine):
        output = tmp_path / "built.tar"
        client.buildx.build(
            tmp_path, output={"type": "oci", "dest": str(output)}, cache=False, provenance=False, progress=False
        )
        with tarfile.open(fileobj=io.BytesIO(output.read_bytes())) as layout:
            assert "index.json" in layout.getnames()


def test_packages_that_containers_cannot_reach_are_reported(debian_root, engine, tmp_path):
    """Not by the names of packages that apt has no list of: the cause comes first."""
    (tmp_path / "os-install").write_bytes((data_dir("dockerfiles") / "recipe" / "os-install").read_bytes())
    (tmp_path / "rootfs.tar").hardlink_to(debian_root.path)
    (tmp_path / "list").write_text("gcc\n")
    (tmp_path / "Dockerfile").write_text(
        "FROM scratch\nADD rootfs.tar /\nCOPY os-install list /\n"
        "RUN --network=none --mount=type=tmpfs,target=/var/cache/apt sh /os-install /list\n"
    )
    command = ["docker", "buildx", "build", "--progress=rawjson", "--no-cache", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode
    watch = Watch(log=io.StringIO())
    for line in done.stderr.splitlines():
        watch.feed(line)
    _, lines = watch.failure()
    assert re.match(r"envbuild: no package lists from http://deb\.debian\.org/.*Temporary failure resolving", lines[0])


def test_only_the_packages_that_are_missing_in_a_base_come_back(resolved, settings):
    whole = resolve_os_packages(settings, suite="bookworm", packages=["g++", "python3-dev"])
    added = resolve_os_packages(settings, suite="bookworm", packages=["g++", "python3-dev"], installed=resolved)
    assert not {package.name for package in added} & {package.name for package in resolved}
    assert set(added) | set(resolved) == set(whole)
    assert resolve_os_packages(settings, suite="bookworm", packages=["bash"], installed=resolved) == ()


def test_a_base_with_versions_that_the_archive_no_longer_holds_stays_as_it_is(resolved, settings):
    older = [
        package.model_copy(update={"version": f"{package.version}~"}) if package.name in {"grep", "tar"} else package
        for package in resolved
    ]
    added = resolve_os_packages(settings, suite="bookworm", packages=["make"], installed=older)
    assert [package.name for package in added] == ["make"]


@pytest.mark.parametrize("wanted", ["no-such-package", "bash=0.1"])
def test_a_package_or_version_that_is_missing_in_the_archive(wanted, settings):
    with pytest.raises(LockError, match=f"bookworm: .*{wanted.partition('=')[0]}"):
        resolve_os_packages(settings, suite="bookworm", packages=[wanted])


@pytest.mark.parametrize("suite", ["bookworm", "trixie", "noble", "jammy", "focal"])
def test_a_mirror_that_does_not_answer_is_named(suite, unanswered):
    with pytest.raises(HostError, match=r"on 127\.0\.0\.1 cannot be reached"):
        resolve_os_packages(unanswered, suite=suite, packages=["bash"])


def test_a_bootstrap_that_fails_leaves_no_tar_and_says_why(tmp_path, settings, unanswered, epoch, monkeypatch):
    dest, log = tmp_path / "out" / "rootfs.tar", tmp_path / "log"

    def bootstrap(settings):
        bootstrap_root(settings, suite="bookworm", packages=[], epoch=epoch, dest=dest, log=log)

    with pytest.raises(HostError, match=r"127\.0\.0\.1 cannot be reached"):
        bootstrap(unanswered)
    assert list(dest.parent.iterdir()) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError, match="mmdebstrap is missing") as caught:
        bootstrap(settings)
    assert "scripts/install-engine" in caught.value.hint


def _processes_of(mark: str) -> list[Path]:
    """Return the /proc folders of the living processes in whose environment `mark` stands."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append(place)
    return found


def test_a_bootstrap_killed_at_any_moment_leaves_nothing_mounted(tmp_path, epoch):
    """Not even where mmdebstrap itself had no time: whoever removes the folder later must not meet this machine's /sys."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    code = (
        "import sys; from pathlib import Path; from envbuild.engine.bootstrap import bootstrap_root\n"
        "from envbuild.settings import load_settings; here = Path(sys.argv[1])\n"
        "bootstrap_root(load_settings(), suite='bookworm', packages=[], epoch=int(sys.argv[2]), dest=here / 'root.tar', log=here / 'log')"
    )
    mark = f"TEST_MARK={tmp_path}"
    env = os.environ | {"TMPDIR": str(temporary), "TEST_MARK": str(tmp_path)}
    run = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(epoch)], env=env, start_new_session=True)

    def mounted() -> bool:
        for place in _processes_of(mark):
            with contextlib.suppress(OSError):
                if re.search(rf" {re.escape(str(temporary))}/\S+/(proc|sys) ", (place / "mountinfo").read_text()):
                    return True
        return False

    try:
        end = time.monotonic() + 120
        while not mounted():
            assert run.poll() is None, (tmp_path / "log").read_text()[-2000:]
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        while left := _processes_of(mark):
            for place in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(place.name), signal.SIGKILL)
            run.poll()
            time.sleep(0.05)
    run.wait()
    assert str(temporary) not in Path("/proc/self/mountinfo").read_text()
    assert len(list(temporary.iterdir())) == 1
    sweep(temporary)
    assert not list(temporary.iterdir())


def test_packages_that_exclude_each_other(settings):
    with pytest.raises(LockError, match=r"exim4-\S+ : Conflicts: postfix") as caught:
        resolve_os_packages(settings, suite="bookworm", packages=["exim4-daemon-light", "postfix"])
    assert "fix-broken" not in str(caught.value)

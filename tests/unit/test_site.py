"""What a site gives its builds, and how many compile jobs a machine takes."""

import hashlib
import os
import re
import subprocess

import pytest
from cell_inputs import plan_for

from envbuild.engine.bootstrap import bootstrap_root, end_of, locked_debs, write_archive
from envbuild.engine.contexts import wheels_here
from envbuild.engine.site import jobs, secrets
from envbuild.errors import BuildError, HostError, LockError
from envbuild.lock.apt import _IsolatedApt, resolve_os_packages
from envbuild.lock.apt_answers import parse_stanzas as _parse_stanzas
from envbuild.lock.archives import apt_environment as _environment
from envbuild.lock.archives import apt_options as _apt_options
from envbuild.lock.archives import archive_of
from envbuild.lock.model import OsPackage
from envbuild.settings import load_settings


def settings_of(tmp_path, **environ):
    return load_settings(environ={"HOME": str(tmp_path), **environ}, root=tmp_path)


@pytest.mark.parametrize(
    ("cores", "memory", "need", "expected"),
    [(2, 24, 2.4, 2), (64, 24, 3.0, 7), (64, 512, 4.5, 64), (8, 4, 4.5, 1), (16, 128, 4.3, 16)],
)
def test_jobs_are_bounded_by_cores_and_memory(tmp_path, cores, memory, need, expected):
    assert jobs(settings_of(tmp_path), job_gib=need, cores=cores, memory_gib=memory) == expected


def test_jobs_can_be_set_and_memory_lowered(tmp_path):
    assert jobs(settings_of(tmp_path, ENVBUILD_JOBS="3"), job_gib=4.5, cores=2, memory_gib=8) == 3
    assert jobs(settings_of(tmp_path, ENVBUILD_MEMORY_GIB="10"), job_gib=3.0, cores=64, memory_gib=512) == 3


def test_secrets_carry_mirrors_proxy_and_ca(tmp_path):
    ca = tmp_path / "ca.pem"
    ca.write_text("certificates")
    settings = settings_of(
        tmp_path,
        ENVBUILD_CA_BUNDLE=str(ca),
        ENVBUILD_INDEX_URL="https://me:secret@pypi.example.org/simple",
        ENVBUILD_HTTPS_PROXY="http://proxy.example.org:3128",
        ENVBUILD_DEBIAN_MIRROR="http://mirror.example.org/debian",
    )
    found = secrets(settings, plan_for(cuda="cpu"), tmp_path / "secrets")
    assert found["ca"] == ca
    env = found["env"].read_text()
    assert "export UV_DEFAULT_INDEX=https://me:secret@pypi.example.org/simple\n" in env
    assert "export SSL_CERT_FILE=/run/envbuild/site/ca.crt\n" in env
    assert "export https_proxy=http://proxy.example.org:3128\n" in env
    assert "deb http://mirror.example.org/debian bookworm main\n" in found["apt"].read_text()
    assert found["env"].stat().st_mode & 0o077 == 0


def test_a_page_of_wheels_is_named_to_the_build_and_a_folder_is_not(tmp_path):
    links = f"https://wheels.example.org/cu126 file://{tmp_path}"
    found = secrets(settings_of(tmp_path, ENVBUILD_FIND_LINKS=links), plan_for(cuda="cpu"), tmp_path / "secrets")
    assert "export ENVBUILD_PAGES=https://wheels.example.org/cu126\n" in found["env"].read_text()


def test_a_site_without_settings_mounts_nothing_but_the_index(tmp_path):
    found = secrets(settings_of(tmp_path), plan_for(cuda="cpu"), tmp_path / "secrets")
    assert set(found) == {"env"}


NOBLE = {"base": "nvidia-cuda-13.0.2-ubuntu24.04"}
ARCHIVE = "http://archive.ubuntu.com/ubuntu"


@pytest.mark.parametrize(
    ("mirror", "security"),
    [(ARCHIVE, "http://security.ubuntu.com/ubuntu"), ("http://mirror.acme.example/ubuntu",) * 2],
)
def test_an_image_that_others_made_takes_packages_from_the_os_archives_alone(tmp_path, mirror, security):
    found = secrets(settings_of(tmp_path, ENVBUILD_UBUNTU_MIRROR=mirror), plan_for(**NOBLE), tmp_path / "secrets")
    lines = found["apt"].read_text().splitlines()
    assert [line.split()[1:3] for line in lines] == [
        [mirror, "noble"],
        [mirror, "noble-updates"],
        [security, "noble-security"],
    ]


def test_no_secret_enters_the_dockerfile(tmp_path):
    from envbuild.plan.dockerfile import dockerfile

    text = dockerfile(plan_for(cuda="cpu"))
    # The image's own `pip` reads the variable where the image runs; no build sets it.
    assert not re.search(r"^(ENV|ARG) .*UV_(DEFAULT_)?INDEX", text, re.MULTILINE)
    assert not re.search(r"https?://[^/ ]*@", text)
    assert text.count("--mount=type=secret,id=ca") >= 2


def test_apt_goes_the_settings_way_to_an_archive(tmp_path):
    ca = tmp_path / "ca.pem"
    ca.write_text("certificates")
    proxy = "http://proxy.example.org:3128"
    settings = settings_of(
        tmp_path, ENVBUILD_CA_BUNDLE=str(ca), ENVBUILD_HTTP_PROXY=proxy, ENVBUILD_NO_PROXY="mirror.example.org"
    )
    hosts_own = _apt_options(settings_of(tmp_path))
    assert _apt_options(settings) == [*hosts_own, f'Acquire::http::Proxy "{proxy}"', f'Acquire::https::CaInfo "{ca}"']
    assert _environment(settings)["no_proxy"] == "mirror.example.org"


HOSTILE = [
    'http://x" ; DPkg::Pre-Invoke "touch /tmp/x',
    "http://x\nDPkg::Pre-Invoke",
    "http://x [trusted=yes]",
]


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_value_that_passed_the_settings_is_refused_where_it_is_written(tmp_path, value):
    """The settings refuse it first; one that came another way ends here."""
    settings = settings_of(tmp_path).model_copy(update={"debian_mirror": value, "http_proxy": value})
    archive = archive_of("bookworm")
    with pytest.raises(ValueError, match="cannot"):
        archive.sources("bookworm", mirror=value, security_mirror=archive.security_mirror)
    if " [" not in value:  # apt.conf takes blanks
        with pytest.raises(HostError, match="apt cannot take this"):
            _apt_options(settings)


@pytest.mark.parametrize(
    "line", ['Acquire::http::Proxy "a\\";', 'Acquire::http::Proxy "a"; DPkg::Pre-Invoke "x";', "x"]
)
def test_a_line_of_the_hosts_apt_that_is_no_plain_setting_is_left_out(tmp_path, monkeypatch, line):
    program = tmp_path / "apt-config"
    program.write_text(f"#!/bin/sh\ncat <<'E'\nAcquire::https::Verify-Peer \"true\";\n{line}\nE\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert _apt_options(settings_of(tmp_path)) == ['Acquire::https::Verify-Peer "true"']


def test_a_tmpdir_that_apt_cannot_read_is_a_clear_message(tmp_path):
    with pytest.raises(HostError, match="apt cannot take this"):
        _IsolatedApt(tmp_path / 'a"b', "amd64", settings_of(tmp_path))


@pytest.mark.parametrize("package", ["-oDPkg::Pre-Invoke::=x", "a b", "bash=1 x", "?essential", "x;y", "bash=-1", ""])
def test_a_name_that_is_no_packages_never_reaches_apt(tmp_path, monkeypatch, package):
    monkeypatch.setattr("envbuild.lock.apt._IsolatedApt", None)
    with pytest.raises(LockError, match="is not an OS package"):
        resolve_os_packages(settings_of(tmp_path), suite="bookworm", packages=[package])


def test_a_log_is_read_from_its_end_within_a_bound(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(10 * 2**30)  # sparse
        file.seek(0, 2)
        file.write(b"E: the reason\n")
    assert end_of(log, 1000).endswith("E: the reason\n")
    assert len(end_of(log, 1000)) == 1000
    assert end_of(tmp_path / "none", 10) == ""


def test_a_login_is_on_no_command_line(tmp_path, monkeypatch):
    """Every user of the machine can read the arguments of every process."""
    settings = settings_of(
        tmp_path,
        ENVBUILD_DEBIAN_MIRROR="http://me:secret@mirror.example.org/debian",
        ENVBUILD_HTTP_PROXY="http://me:secret@proxy.example.org:3128",
    )
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "mmdebstrap"
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/args; cat >{tmp_path}/stdin; env >{tmp_path}/env; exit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    with pytest.raises(BuildError):
        bootstrap_root(
            settings, suite="bookworm", packages=(), epoch=0, dest=tmp_path / "root.tar", log=tmp_path / "log"
        )
    assert "secret" not in (tmp_path / "args").read_text()
    assert "deb http://me:secret@mirror.example.org/debian bookworm main\n" in (tmp_path / "stdin").read_text()
    for name in ("http_proxy", "https_proxy"):
        assert f"\n{name}=http://me:secret@proxy.example.org:3128\n" in (tmp_path / "env").read_text()


@pytest.mark.parametrize(("user", "may"), [(0, True), (0, False), (1000, True)])
@pytest.mark.parametrize("own", [True, False])
def test_root_makes_a_root_of_packages_out_of_a_folder_apart_from_this_machines_processes(
    tmp_path, monkeypatch, user, may, own
):
    """Without root mmdebstrap does so itself; where nothing may be mounted, it cannot."""
    programs = {
        "mmdebstrap": f'echo "$@" >{tmp_path}/args; exit 1',
        "dpkg-deb": "echo Package: one",
        "unshare": 'shift 2; exec "$@"' if may else "exit 1",
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    (tmp_path / "debs").mkdir()
    (tmp_path / "debs" / "one.deb").write_text("one")
    package = OsPackage(
        name="one",
        version="1",
        filename="pool/one.deb",
        sha256=hashlib.sha256(b"one").hexdigest(),
    )
    settings = settings_of(tmp_path).model_copy(update={"debs": tmp_path / "debs" if own else None})
    with pytest.raises(BuildError):
        bootstrap_root(
            settings,
            suite="bookworm",
            packages=(),
            epoch=0,
            dest=tmp_path / "root.tar",
            log=tmp_path / "log",
            locked=(package,),
        )
    assert ("--mode=unshare" in (tmp_path / "args").read_text()) is (own and may and user == 0)


def test_a_package_that_the_archive_describes_by_halves_is_a_clear_message():
    with pytest.raises(LockError, match="describes bash in an unknown way: version"):
        _parse_stanzas("Package: bash\nArchitecture: amd64\n")


def carried_wheels(plan, folder):
    """Write the wheels of a made-up plan into a folder: the content of each is what its hash is of."""
    folder.mkdir()
    for python_set in plan.lock.python:
        for package in python_set.packages:
            name = f"{package.name}-{package.version}-py3-none-any.whl"
            (folder / name).write_text(f"{package.name}=={package.version}")
    return sorted(folder.iterdir())


def test_a_folder_with_every_wheel_takes_the_place_of_the_index(tmp_path):
    plan, folder = plan_for(cuda="cpu"), tmp_path / "wheels"
    names = carried_wheels(plan, folder)
    settings = settings_of(tmp_path, ENVBUILD_FIND_LINKS=f"{folder} https://wheels.example.org/cpu")
    found, whole = wheels_here(settings, plan)
    assert whole
    assert sorted(found.values()) == names
    env = secrets(settings, plan, tmp_path / "secrets", offline=whole)["env"].read_text()
    assert "export UV_OFFLINE=1\n" in env
    assert "ENVBUILD_PAGES" not in env


@pytest.mark.parametrize("fault", ["missing", "another"])
def test_a_folder_without_one_wheel_leaves_the_index(tmp_path, fault):
    plan, folder = plan_for(cuda="cpu"), tmp_path / "wheels"
    first, *others = carried_wheels(plan, folder)
    if fault == "missing":
        first.unlink()
    else:
        first.write_text("another wheel of this name")
    settings = settings_of(tmp_path, ENVBUILD_FIND_LINKS=str(folder))
    found, whole = wheels_here(settings, plan)
    assert not whole
    assert sorted(found.values()) == others
    assert "UV_OFFLINE" not in secrets(settings, plan, tmp_path / "secrets")["env"].read_text()


def test_without_a_folder_nothing_is_looked_for(tmp_path):
    settings = settings_of(tmp_path, ENVBUILD_FIND_LINKS="https://wheels.example.org/cpu")
    assert wheels_here(settings, plan_for(cuda="cpu")) == ({}, False)


def test_a_root_comes_from_a_folder_only_where_that_has_every_package(tmp_path):
    (tmp_path / "inner").mkdir()
    first, second = tmp_path / "one.deb", tmp_path / "inner" / "two.deb"
    locked = []
    for path in (first, second):
        path.write_text(path.name)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        locked.append(OsPackage(name=path.stem, version="1.0", sha256=sha256, filename=f"pool/{path.name}"))
    assert locked_debs(tmp_path, locked) == {locked[0].sha256: first, locked[1].sha256: second}
    second.write_text("another content")
    assert locked_debs(tmp_path, locked) is None
    assert locked_debs(tmp_path, locked[:1]) == {locked[0].sha256: first}


def test_what_is_no_package_makes_no_archive(tmp_path):
    (tmp_path / "one.deb").write_text("no package")
    with pytest.raises(LockError, match="is not a Debian package"):
        write_archive({"0" * 64: tmp_path / "one.deb"}, tmp_path / "archive")


def test_an_archive_of_packages_is_one_that_apt_reads(tmp_path):
    control = tmp_path / "tree" / "DEBIAN"
    control.mkdir(parents=True)
    fields = "Package: one\nVersion: 1.0\nArchitecture: all\nMaintainer: x\nDescription: y\n"
    (control / "control").write_text(fields)
    subprocess.run(
        ["dpkg-deb", "--build", str(tmp_path / "tree"), str(tmp_path / "one.deb")], check=True, capture_output=True
    )
    digest = hashlib.sha256((tmp_path / "one.deb").read_bytes()).hexdigest()
    write_archive({digest: tmp_path / "one.deb"}, tmp_path / "archive")
    (found,) = _parse_stanzas((tmp_path / "archive" / "Packages").read_text())
    assert (found.name, found.version, found.sha256, found.filename) == ("one", "1.0", digest, f"{digest}.deb")
    assert (tmp_path / "archive" / f"{digest}.deb").is_file()

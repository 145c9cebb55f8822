"""OS packages on an image that others made and that is older than the archive, as Ubuntu's and NVIDIA's images are."""

import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from root_support import ubuntu_root

from envbuild.lock.apt import resolve_on_image
from envbuild.lock.archives import mirrors_of
from envbuild.lock.model import OsPackage
from envbuild.paths import data_dir
from envbuild.settings import load_settings

pytestmark = pytest.mark.timeout(600)

WANTED = ("ca-certificates", "g++", "git", "libc6-dev", "openssh-server")


@pytest.fixture(scope="module", autouse=True)
def _archive():
    mirror, _ = mirrors_of(load_settings(), "noble")
    try:
        urllib.request.urlopen(f"{mirror}/dists/noble/InRelease", timeout=20).close()
    except (urllib.error.URLError, TimeoutError) as error:
        pytest.skip(f"Ubuntu's archive is out of reach: {error}")


def added_to(
    image: str,
    folder: Path,
    packages: tuple[OsPackage, ...],
    renewed: tuple[OsPackage, ...] = (),
    options: tuple[str, ...] = ("--output=type=cacheonly",),
) -> str:
    """Install the list on the image by the build's own recipe; return what BuildKit printed.

    The .debs in the folder's own folder `debs` are the site's.
    """
    lines = [f"{p.name}={p.version} {p.sha256}" for p in packages]
    lines += [f"# {p.name}={p.version} {p.sha256}" for p in renewed]
    (folder / "list").write_text("".join(f"{line}\n" for line in lines))
    (folder / "os-install").write_bytes((data_dir("dockerfiles") / "recipe" / "os-install").read_bytes())
    (folder / "debs").mkdir(exist_ok=True)
    report = "dpkg-query -W -f 'now ${Package}=${Version}\\n'"
    (folder / "Dockerfile").write_text(
        f"FROM {image}\nCOPY os-install list /\nRUN {report} | sed s/now/was/\n"
        f"RUN --mount=type=bind,source=debs,target=/run/envbuild/debs --mount=type=tmpfs,target=/var/cache/apt sh /os-install /list\n"
        f"RUN {report}\n"
    )
    command = ["docker", "buildx", "build", "--progress=plain", "--no-cache", *options, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode == 0 else f"FAILED\n{done.stderr}"


def stated(output: str, when: str) -> dict[str, str]:
    words = (line.split() for line in output.splitlines())
    return dict(w[-1].split("=", 1) for w in words if len(w) == 4 and w[2] == when and "=" in w[3])


@pytest.mark.parametrize("suite", ["jammy", "noble"])
def test_an_older_image_gets_the_locked_packages_and_keeps_what_it_has(suite, engine, tmp_path):
    packages, renewed = resolve_on_image(load_settings(), suite=suite, packages=WANTED)
    assert set(WANTED) <= {p.name for p in packages}
    locked = {p.name: p.version for p in (*packages, *renewed)}
    with ubuntu_root(suite, tmp_path / "root", ("build-essential", "curl", "gnupg2")) as image:
        (tmp_path / "build").mkdir()
        output = added_to(image, tmp_path / "build", packages, renewed)
        before, after = stated(output, "was"), stated(output, "now")
        assert not output.startswith("FAILED"), output[-4000:]
        assert set(WANTED) <= after.keys()
        assert before["libc6"] != locked["libc6"]  # or nothing is shown
        assert {n: v for n, v in after.items() if v != before.get(n)}.items() <= locked.items()
        assert {n for n, v in after.items() if before.get(n) == v and locked.get(n) not in {None, v}}
        # a package that the lock does not name stops the build
        short = tuple(p for p in packages if p.name != "openssh-client")
        refused = added_to(image, tmp_path / "build", short)
    assert refused.startswith("FAILED")
    assert "openssh-client" in refused
    assert "which the lock does not name" in refused


def test_a_site_without_an_archive_installs_from_its_own_debs(engine, tmp_path):
    """Without a network, from a folder that also holds what the list does not name; one .deb less, and the archive is asked.

    libc6-dev asks for its own libc6, which is newer than the image's: that is renewed, and nothing else.
    """
    mirror, _ = mirrors_of(load_settings(), "noble")
    packages, renewed = resolve_on_image(load_settings(), suite="noble", packages=("libc6-dev", "make"))
    locked = {p.name: p.version for p in packages}
    debs = tmp_path / "build" / "debs"
    debs.mkdir(parents=True)
    offline = ("--output=type=cacheonly", "--network=none")
    with ubuntu_root("noble", tmp_path / "root", ()) as image:
        without = stated(added_to(image, tmp_path / "build", ()), "was")
        assert without["libc6"] != locked["libc6"]  # or nothing is shown
        needed = {name: version for name, version in locked.items() if name not in without}
        assert {"libc6-dev", "make"} <= needed.keys()
        for package in packages:
            if package.name in needed or package.name in {"libc6", "libc-bin", "bash", "dpkg"}:
                name = package.filename.rsplit("/", 1)[-1]
                urllib.request.urlretrieve(f"{mirror}/{package.filename}", debs / name)
        (debs / "stray.deb").write_bytes(b"no package, and not in the list")
        output = added_to(image, tmp_path / "build", packages, renewed, offline)
        after = stated(output, "now")
        assert after.items() >= needed.items(), output[-4000:]
        assert after["libc6"] == locked["libc6"]
        assert {name: after[name] for name in ("bash", "dpkg")} == {name: without[name] for name in ("bash", "dpkg")}
        next(debs.glob("make_*.deb")).unlink()
        output = added_to(image, tmp_path / "build", packages, renewed, offline)
    assert output.startswith("FAILED")

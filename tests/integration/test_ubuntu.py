"""OS packages on an image that others made and that is older than the archive, as Ubuntu's and NVIDIA's images are."""

import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from root_support import ubuntu_root

from envbuild.engine.bootstrap import mirrors_of, resolve_on_image
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


def added_to(image: str, folder: Path, packages: tuple[OsPackage, ...], renewed: tuple[OsPackage, ...] = ()) -> str:
    """Install the list on the image by the build's own recipe; return what BuildKit printed."""
    lines = [f"{p.name}={p.version} {p.sha256}" for p in packages]
    lines += [f"# {p.name}={p.version} {p.sha256}" for p in renewed]
    (folder / "list").write_text("".join(f"{line}\n" for line in lines))
    (folder / "os-install").write_bytes((data_dir("dockerfiles") / "recipe" / "os-install").read_bytes())
    report = "dpkg-query -W -f 'now ${Package}=${Version}\\n'"
    (folder / "Dockerfile").write_text(
        f"FROM {image}\nCOPY os-install list /\nRUN {report} | sed s/now/was/\nRUN sh /os-install /list\nRUN {report}\n"
    )
    command = ["docker", "buildx", "build", "--progress=plain", "--no-cache", "--output=type=cacheonly", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode == 0 else f"FAILED\n{done.stderr}"


def stated(output: str, when: str) -> dict[str, str]:
    words = (line.split() for line in output.splitlines())
    return dict(w[-1].split("=", 1) for w in words if len(w) == 4 and w[2] == when and "=" in w[3])


@pytest.mark.parametrize("suite", ["jammy", "noble"])
def test_an_older_image_gets_the_locked_packages_and_keeps_what_it_has(suite, engine, tmp_path):
    mirror, security_mirror = mirrors_of(load_settings(), suite)
    packages, renewed = resolve_on_image(suite=suite, packages=WANTED, mirror=mirror, security_mirror=security_mirror)
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

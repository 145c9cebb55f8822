"""Roots and images without an image registry: Debian's as a tar, Ubuntu's of the day that a suite came out."""

import contextlib
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from envbuild.engine.bootstrap import RootFS, bootstrap_root
from envbuild.lock.archives import archive_of, mirrors_of
from envbuild.settings import load_settings


def debian_tar(suite: str, folder: Path, *packages: str, epoch: int) -> RootFS:
    """Bootstrap a Debian root from the archives of this machine's settings, as `rootfs.tar` in the folder."""
    return bootstrap_root(
        load_settings(),
        suite=suite,
        packages=packages,
        epoch=epoch,
        dest=folder / "rootfs.tar",
        log=folder / "log",
    )


def build_image(folder: Path, tag: str, *options: str) -> str:
    """Build the folder's Dockerfile under this name; return the name."""
    command = ["docker", "buildx", "build", "--quiet", "--provenance=false", *options, "--tag", tag, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return tag


@contextlib.contextmanager
def ubuntu_root(suite: str, folder: Path, packages: Sequence[str]) -> Iterator[str]:
    """Give the name of an image of `suite` as it was released, as old as a published one may be, with today's archive."""
    archive = archive_of(suite)
    mirror, security_mirror = mirrors_of(load_settings(), suite)
    folder.mkdir(parents=True)
    sources = archive.sources(suite, mirror=mirror, security_mirror=security_mirror)
    (folder / "sources.list").write_text("\n".join(sources) + "\n")
    command = [
        "mmdebstrap",
        "--quiet",
        "--variant=apt",
        "--skip=output/dev",
        "--components=main,universe",
        f"--keyring={archive.keyring}",
        f"--include={','.join(('ca-certificates', *packages))}",
        "--dpkgopt=force-unsafe-io",
        f"--customize-hook=upload {folder}/sources.list /etc/apt/sources.list",
        '--customize-hook=find "$1/var/lib/apt/lists" -type f -delete',
        # noble's own packages have /usr merged
        *(["--hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr"] if suite != "noble" else []),
        suite,
        str(folder / "rootfs.tar"),
        f"deb {mirror} {suite} main universe",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        pytest.fail(f"no root of {suite}:\n{done.stderr[-2000:]}")
    (folder / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
    image = build_image(folder, f"envbuild-test:{suite}-{uuid.uuid4().hex[:8]}")
    (folder / "rootfs.tar").unlink()
    try:
        yield image
    finally:
        subprocess.run(["docker", "image", "rm", "--force", image], check=True, capture_output=True)

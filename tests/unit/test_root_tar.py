"""The tar of a root, where two versions of mmdebstrap differ."""

import io
import tarfile

from envbuild.engine.bootstrap import drop_member


def made(path, *names):
    with tarfile.open(path, "w") as tar:
        for name in names:
            member = tarfile.TarInfo(f"./{name}")
            if name.endswith("/"):
                member.type = tarfile.DIRTYPE
            member.size = 0 if member.isdir() else 3
            tar.addfile(member, io.BytesIO(b"abc") if member.size else None)
    return path


def test_an_empty_dev_leaves_no_trace(tmp_path):
    with_dev = made(tmp_path / "with.tar", "bin/", "dev/", "etc/", "etc/hosts")
    drop_member(with_dev, "dev")
    assert with_dev.read_bytes() == made(tmp_path / "without.tar", "bin/", "etc/", "etc/hosts").read_bytes()
    before = with_dev.read_bytes()
    drop_member(with_dev, "dev")
    assert with_dev.read_bytes() == before

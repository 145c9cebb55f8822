"""An image's files, read from outside: every change is named, whatever the image's RECORDs say."""

import contextlib
import hashlib
import io
import random
import re
import tarfile
import zipfile

import pytest
from fake_image import SITE, FakeImage, encoded, fake_image

from envbuild.errors import LockError
from envbuild.paths import data_dir
from envbuild.settings import Settings
from envbuild.util.foreign_tar import Bounds, TarError, read_tar
from envbuild.verify.contents import files_check
from envbuild.verify.installed import hold_to_records, hold_to_wheel, read_record, read_tree
from envbuild.verify.wheels import Wheels, read_wheel


@pytest.fixture
def image() -> FakeImage:
    return fake_image()


def faults(image: FakeImage) -> tuple[list[str], list[str]]:
    """Return what contradicts the RECORDs, and what is in none."""
    found = hold_to_records(read_tree(io.BytesIO(image.tar())))
    return list(found.changed), list(found.unlisted)


def against_wheels(image: FakeImage) -> list[str]:
    tree = read_tree(io.BytesIO(image.tar()))
    found = hold_to_records(tree)
    rows = {}
    for filename, body in image.wheels.items():
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            name = next(n for n in archive.namelist() if n.endswith("/RECORD") and n.count("/") == 1)
            rows[filename.partition("-")[0]] = read_record(archive.read(name).decode())
    faults = []
    for dist in found.distributions:
        others = {
            other.place(row): {row.sha256}
            for other in found.distributions
            if other.name != dist.name
            for row in other.rows
        }
        faults += hold_to_wheel(dist, rows[dist.name], tree, others)
    return faults


def test_a_sound_image_has_no_fault(image):
    assert faults(image) == ([], [])
    assert against_wheels(image) == []


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (f"{SITE}/torch/__init__.py", b"import os\n", "torch/__init__.py is not what torch installed"),
        (f"{SITE}/torch/lib/core.so", None, "torch/lib/core.so of torch is not there"),
        ("opt/venv/bin/numpy-run", b"#!/bin/sh\n", "/opt/venv/bin/numpy-run is not what numpy installed"),
        (f"{SITE}/numpy-1.0.dist-info/RECORD", None, "numpy-1.0.dist-info has no RECORD"),
        (f"{SITE}/numpy-1.0.dist-info/RECORD", b"a,b\n", "is no RECORD: a,b is not a line of a RECORD"),
        (f"{SITE}/numpy-1.0.dist-info/RECORD", b"x,md5=00,1\n", "not a sha256: md5"),
        (f"{SITE}/numpy-1.0.dist-info/RECORD", b"../../../../../../etc/passwd,,\n", "lists a file outside /opt/venv"),
        (f"{SITE}/numpy-1.0.dist-info/RECORD", b"/etc/passwd,,\n", "lists a file outside /opt/venv"),
        (f"{SITE}/numpy-1.0.dist-info/RECORD", b"numpy/__init__.py,,\n", "has no hash in its RECORD"),
        (f"{SITE}/numpy-1.0.dist-info/RECORD", b'"' * 300_000, "is no RECORD"),
    ],
)
def test_a_change_is_named(image, path, body, says):
    if body is None:
        del image.files[path]
    else:
        image.files[path] = body
    changed, _ = faults(image)
    assert any(says in line for line in changed), changed


HOOK = {
    name: (data_dir("dockerfiles") / "image" / name).read_bytes()
    for name in ("_envbuild_home.py", "_envbuild_home.pth")
}


def test_what_the_build_itself_adds_among_the_packages_is_known_by_its_content(image):
    image.files |= {f"{SITE}/{name}": body for name, body in HOOK.items()}
    image.files[f"{SITE}/__pycache__/_envbuild_home.cpython-311.pyc"] = b"byte code"
    assert faults(image) == ([], [])
    for name, body in HOOK.items():
        image.files |= {f"{SITE}/{name}": body + b"\nimport evil\n", f"{SITE}/torch/{name}": body}
    assert faults(image)[1] == sorted(f"/{SITE}/{folder}{name}" for name in HOOK for folder in ("", "torch/"))


@pytest.mark.parametrize(
    "path",
    [
        f"{SITE}/sitecustomize.py",
        f"{SITE}/evil.pth",
        f"{SITE}/__pycache__/evil.cpython-311.pyc",
        f"{SITE}/torch/evil.pyc",
        f"{SITE}/torch/flash_attn_interface.py",
        "opt/venv/bin/git",
        "opt/venv/lib/python3.11/evil.py",
        f"{SITE}/e\x1b[2Jvil.py",
    ],
)
def test_a_file_of_no_distribution_is_named(image, path):
    image.files[path] = b"import os\n"
    (line,) = faults(image)[1]
    assert line.startswith("/opt/venv/")
    assert line.isprintable()


def test_a_link_in_the_place_of_a_file_is_named(image):
    del image.files[f"{SITE}/torch/__init__.py"]
    info = tarfile.TarInfo(f"{SITE}/torch/__init__.py")
    info.type, info.linkname = tarfile.SYMTYPE, "/tmp/x"
    image.more.append((info, b""))
    assert any("torch/__init__.py of torch is not a regular file" in line for line in faults(image)[0])


def test_a_hard_link_has_the_content_of_what_it_links_to(image):
    del image.files[f"{SITE}/torch/__init__.py"]
    image.files["opt/venv/lib/other.py"] = b"name = 'torch'\n"
    info = tarfile.TarInfo(f"{SITE}/torch/__init__.py")
    info.type, info.linkname = tarfile.LNKTYPE, "opt/venv/lib/other.py"
    image.more.append((info, b""))
    assert faults(image) == ([], ["/opt/venv/lib/other.py"])


def test_a_record_that_was_changed_with_its_file_is_held_against_the_locked_wheel(image):
    """The RECORD alone proves nothing: who changes a file changes its line, too."""
    for path, new in (("torch/__init__.py", b"import os\n"), ("torch/evil.py", b"import os\n")):
        name = next(n for n in image.files if n.startswith(f"{SITE}/torch-") and n.endswith("/RECORD"))
        lines = [line for line in image.files[name].decode().splitlines() if not line.startswith(f"{path},")]
        image.files[name] = "\n".join([*lines, f"{path},{encoded(new)},{len(new)}", ""]).encode()
        image.files[f"{SITE}/{path}"] = new
    assert faults(image) == ([], [])
    assert against_wheels(image) == [
        f"/{SITE}/torch/__init__.py is not the one of the locked wheel",
        f"/{SITE}/torch/evil.py is not in the locked wheel",
    ]


def test_records_of_wheels_are_kept_by_hash_and_only_whole(tmp_path, image):
    wheels = Wheels(Settings(cache_dir=tmp_path / "cache", find_links=(str(tmp_path),)))
    (filename, body), *_ = image.wheels.items()
    (tmp_path / filename).write_bytes(body)
    sha256 = hashlib.sha256(body).hexdigest()
    name, version, *_ = filename.split("-")
    assert wheels.known(sha256) is None
    wheels.fetch(name, version, [sha256], [], lambda _: None)
    assert {row.path for row in wheels.known(sha256)} >= {f"{name}/__init__.py"}
    for foreign in ("../../etc/passwd", "x", "", sha256.upper()):
        assert wheels.known(foreign) is None
    with pytest.raises(LockError, match="no index has the wheel"):
        wheels.fetch(name, version, ["0" * 64], [], lambda _: None)


@pytest.mark.parametrize("body", [b"", b"PK", b"no zip"])
def test_what_is_no_wheel_is_refused(tmp_path, body):
    path = tmp_path / "x-1-py3-none-any.whl"
    path.write_bytes(body)
    with pytest.raises(ValueError):
        read_wheel(path)


def test_a_record_that_unpacks_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("envbuild.verify.wheels._RECORD_LIMIT", 1000)
    path = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x-1.dist-info/RECORD", b"\n" * 1_000_000)
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        read_wheel(path)


# --- tars ---------------------------------------------------------------------------------------------


def header(name="x", *, size=0, count=1, **fields) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT) * count


END = b"\0" * 1024


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (header(type=tarfile.XHDTYPE, size=7 << 30), "extended header out of bounds"),
        (header(type=tarfile.GNUTYPE_LONGNAME, size=7 << 30), "extended header out of bounds"),
        (header(type=tarfile.XHDTYPE, count=100_000), "extended header out of bounds"),
        (header(type=tarfile.GNUTYPE_SPARSE), "unknown kind b'S'"),
        (header(type=b"7"), "unknown kind b'7'"),
        (header(count=1001) + END, "more than 1,000 members"),
        (header("../etc/passwd") + END, "a path that leads outside: ../etc/passwd"),
        (header("a/b\x1b[2J/../c") + END, r"a path that leads outside: a/b\x1b[2J/../c"),
        (header() + b"garbage" * 200, "a damaged header"),
        (header(size=1 << 40) + END, "a damaged tar"),
        (header()[:300], "a damaged"),
        (b"", "a damaged tar"),
    ],
)
def test_a_tar_out_of_bounds_is_refused(body, says):
    with pytest.raises(TarError, match=re.escape(says)):
        for _ in read_tar(io.BytesIO(body), Bounds(members=1000)):
            pass


class Zeros:
    """A file without an end, after `head`."""

    def __init__(self, head: bytes) -> None:
        self.head = head

    def read(self, count: int) -> bytes:
        piece, self.head = self.head[:count], self.head[count:]
        return piece or b"\0" * count


def test_what_unpacks_without_an_end_is_refused():
    member = next(read_tar(Zeros(header(size=1 << 40)), Bounds(bytes=10_000_000)))

    def read_all() -> None:
        while member.body.read(1 << 16):
            pass

    with pytest.raises(TarError, match="more than 10,000,000 bytes unpacked"):
        read_all()


def test_a_damaged_tar_is_an_error_of_its_own_kind_whatever_the_damage(image):
    body = image.tar()
    random_ = random.Random(7)
    for _ in range(400):
        damaged = bytearray(body)
        for _ in range(random_.randint(1, 6)):
            damaged[random_.randrange(len(damaged))] = random_.randrange(256)
        if random_.random() < 0.3:
            del damaged[random_.randrange(len(damaged)) :]
        with contextlib.suppress(TarError):
            hold_to_records(read_tree(io.BytesIO(bytes(damaged))))


@pytest.mark.parametrize("place", ["opt", "opt/venv", "opt/envbuild", "opt/venv/lib", SITE])
def test_a_link_in_place_of_a_folder_is_refused(image, place):
    """What is installed would lie elsewhere, and nothing would be compared."""
    image.files = {name.replace(place, "srv/moved", 1): body for name, body in image.files.items()}
    link = tarfile.TarInfo(place)
    link.type, link.linkname = tarfile.SYMTYPE, "/srv/moved"
    image.more.append((link, b""))
    with pytest.raises(TarError, match=f"/{re.escape(place)} is a link in place of a folder"):
        read_tree(io.BytesIO(image.tar()))


def test_a_locked_package_without_a_record_is_a_fault(image):
    name, version = next(iter(image.expected["packages"].items()))
    facts = {"distributions": {}, "distributions_of_base": [], "expected": image.expected}
    sound = hold_to_records(read_tree(io.BytesIO(image.tar())))
    assert files_check(sound, facts).verdict == "passed"
    image.files = {path: body for path, body in image.files.items() if f"{name}-{version}.dist-info" not in path}
    found = files_check(hold_to_records(read_tree(io.BytesIO(image.tar()))), facts)
    assert found.verdict == "failed"
    assert f"{name} has no RECORD in the environment" in found.text

"""Whose layers an image shares: real Dockerfiles of CUDA cells, built with small wheels that stand in for the large ones.

The wheels have the names and versions of the real ones and a 500th of their bytes; the OS is a Debian root with Python.
"""

import base64
import hashlib
import io
import json
import random
import subprocess
import tarfile
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from cell_inputs import complete, inputs_for, pylock
from root_support import build_image, debian_tar

from envbuild.engine.exports import archive_output
from envbuild.lock.files import Locked
from envbuild.lock.model import PythonPackage
from envbuild.lock.unlocked import uv_wheel
from envbuild.matrix.load import load_matrix
from envbuild.net.download import download
from envbuild.plan.dockerfile import dockerfile
from envbuild.plan.plan import Plan, plan_of
from envbuild.settings import Settings, load_settings

ROOT = {"cuda": "13.0", "torch": "2.11.0", "python": "3.11", "os": "debian12", "base": "debian12-root"}
# kB here, about twice the MB of the real wheels
SIZES = {
    "torch": 1060, "nvidia-cublas": 1080, "nvidia-cudnn-cu13": 730, "nvidia-nccl-cu13": 390, "triton": 370,
    "nvidia-cufft": 430, "nvidia-cusparse": 320, "nvidia-cusolver": 400, "transformer-engine-cu13": 360, "numpy": 34,
}  # fmt: skip
CLOSURE = {
    "torch": {
        "nvidia-cublas": "13.1.0.3", "nvidia-cudnn-cu13": "9.19.0.56", "nvidia-nccl-cu13": "2.28.9", "triton": "3.6.0",
        "nvidia-cufft": "12.0.0.61", "nvidia-cusparse": "12.6.3.3", "nvidia-cusolver": "12.0.4.66", "filelock": "4.2.11",
    },
    "env": {"einops": "0.8.2"},
}  # fmt: skip
MARK = "envbuild-layers-test"


def wheel(folder: Path, name: str, version: str) -> Path:
    """Write a wheel whose bytes follow from its name and version: a module, a program, and what all of NVIDIA's hold."""
    module = name.replace("-", "_")
    noise = random.Random(f"{name} {version}").randbytes(1000 * SIZES.get(name, 2))
    files = {
        f"{module}/__init__.py": f"version = {version!r}\ndef main(): print(version)\n".encode(),
        f"{module}/lib.so": noise,
        **({"nvidia/__init__.py": b"# of all of them\n"} if name.startswith("nvidia-") else {}),
    }
    info = f"{module}-{version}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{name}-run = {module}:main\n".encode()
    record = "".join(f"{path},sha256={_record_hash(content)},{len(content)}\n" for path, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(place, "w") as archive:
        for path, content in files.items():
            archive.writestr(zipfile.ZipInfo(path), content)
    return place


def _record_hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


@dataclass(frozen=True)
class Made:
    """An image: its manifest's digest, and the digest and bytes of each layer."""

    digest: str
    layers: tuple[tuple[str, int], ...]
    folder: Path
    uncompressed: tuple[str, ...]
    """The digest of each layer, unpacked."""
    packed_by: str

    def new(self, *known: "Made") -> int:
        """Return how many bytes a client that has the others pulls."""
        held = {digest for each in known for digest, _ in each.layers}
        return sum(size for digest, size in dict(self.layers).items() if digest not in held)

    @property
    def size(self) -> int:
        """How many bytes a client without any pulls, the OS left out: it is no 500th of a real one."""
        return self.new() - self.layers[0][1]


class Workshop:
    """Builds cells from small wheels."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime = ""

    def make(self, *options: str, compression: Literal["zstd", "gzip"] = "zstd", **axes: str) -> Made:
        """Build a cell; `options` are for buildx."""
        folder = self.folder / uuid.uuid4().hex[:8]
        plan = self._plan(folder, **axes)
        assert plan.dated
        settings = Settings(cache_dir=folder, compression=compression)
        # another cache than everybody's: `--no-cache` empties it
        text = dockerfile(plan).replace("id=envbuild-", f"id={MARK}-")
        (folder / "Dockerfile").write_text(text)
        (folder / "rootfs.tar").touch()
        (folder / "env").write_text("export UV_OFFLINE=1\n")
        contexts = {
            "runtime": f"docker-image://{self.runtime}",
            "wheels": folder / "wheels",
            "uv-wheel": self.folder / "uv",
        }
        contexts |= {f"wheel-{c.axis}": folder / f"wheel-{c.axis}" for c in plan.components}
        command = ["docker", "buildx", "build", "--progress=plain", "--provenance=false", "--target=image", *options]
        command += [f"--build-arg=SOURCE_DATE_EPOCH={plan.lock.epoch}", f"--secret=id=env,src={folder / 'env'}"]
        command += [f"--output={archive_output(settings, plan, folder / 'image.tar', 'x:y')}"]
        command += [word for name, place in contexts.items() for word in ("--build-context", f"{name}={place}")]
        done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-5000:]
        return read(folder / "image.tar")

    def _plan(self, folder: Path, **axes: str) -> Plan:
        locked = complete(inputs_for(**ROOT | axes))
        sets = []
        for each in locked.lock.python:
            versions = {p.name: p.version for p in each.packages} | CLOSURE.get(each.name, {})
            packages = []
            for name, version in sorted(versions.items()):
                path = wheel(folder / "wheels", name, version)
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                packages.append(PythonPackage(name=name, version=version, hashes=(digest,)))
            sets.append(each.model_copy(update={"packages": tuple(packages)}))
        lock = locked.lock.model_copy(update={"python": tuple(sets)})
        plan = plan_of(load_matrix(), Locked(lock=lock, pylocks={s.name: pylock(s) for s in sets if s.packages}))
        for component in plan.components:
            wheel(folder / f"wheel-{component.axis}", component.distribution, component.version)
            (folder / f"wheel-{component.axis}" / "record.json").write_text("{}")
        return plan


def read(archive: Path) -> Made:
    """Read an OCI archive, and unpack its layers next to it in their order."""
    folder = archive.with_suffix("")
    with tarfile.open(archive) as tar:

        def blob(digest: str) -> bytes:
            held = tar.extractfile(f"blobs/sha256/{digest.removeprefix('sha256:')}")
            assert held is not None
            return held.read()

        index = tar.extractfile("index.json")
        assert index is not None
        digest = json.loads(index.read())["manifests"][0]["digest"]
        layers = json.loads(blob(digest))["layers"]
        (packed_by,) = {layer["mediaType"].rpartition("+")[2] for layer in layers}
        uncompressed = []
        for layer in layers:
            raw = subprocess.run(
                [packed_by, "-dc"], input=blob(layer["digest"]), capture_output=True, check=True
            ).stdout
            uncompressed.append(hashlib.sha256(raw).hexdigest())
            with tarfile.open(fileobj=io.BytesIO(raw)) as content:
                late = [m.name for m in content if m.mtime > 315532800]
                assert late == [], late
                content.extractall(folder, [m for m in content if m.name.startswith("opt")], filter="tar")
    return Made(
        digest=digest,
        layers=tuple((each["digest"], each["size"]) for each in layers),
        folder=folder,
        uncompressed=tuple(uncompressed),
        packed_by=packed_by,
    )


@pytest.fixture(scope="module")
def workshop(engine, epoch, tmp_path_factory) -> Iterator[Workshop]:
    """A workshop with a root that has Python, and uv."""
    made = Workshop(tmp_path_factory.mktemp("layers"))
    debian_tar("bookworm", made.folder, "python3-minimal", "python3-distutils", epoch=epoch)
    (made.folder / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
    made.runtime = build_image(made.folder, f"envbuild-test:layers-{uuid.uuid4().hex[:8]}")
    settings, uv = load_settings(), uv_wheel()
    path, _ = download(settings, uv.url, uv.sha256, settings.cache_dir / "files")
    (made.folder / "uv").mkdir()
    (made.folder / "uv/uv.whl").write_bytes(path.read_bytes())
    yield made
    engine.image.remove(made.runtime, force=True)


@pytest.fixture(scope="module")
def first(workshop) -> Made:
    """The cell that the others are compared with."""
    return workshop.make(te="2.11")


def test_another_transformer_engine_is_its_own_layers_and_no_other(workshop, first):
    second = workshop.make(te="2.12")
    assert second.layers[0] == first.layers[0]
    changed = second.new(first)
    # the core library itself; all else that changes, the lock and its lists too, is under 1 % of the image
    assert changed <= 1000 * SIZES["transformer-engine-cu13"] + first.size // 100
    assert changed > 1000 * SIZES["transformer-engine-cu13"]


def test_cells_of_one_torch_take_little_more_than_one_of_them(workshop, first):
    others = [
        workshop.make(te=te, **more) for te in ("2.11", "2.12") for more in ({"megatron": "auto"}, {"apex": "none"})
    ]
    blobs = dict(layer for each in (first, *others) for layer in each.layers)
    assert len({each.layers[0] for each in others} | {first.layers[0]}) == 1  # one OS
    assert sum(blobs.values()) - first.layers[0][1] <= 1.6 * first.size


def test_a_second_build_from_nothing_has_the_same_digest(workshop, first):
    assert workshop.make("--no-cache", te="2.11").digest == first.digest


def test_gzip_is_another_packing_of_the_same_layers(workshop, first):
    second = workshop.make(te="2.11", compression="gzip")
    assert (first.packed_by, second.packed_by) == ("zstd", "gzip")
    assert second.digest != first.digest
    assert second.uncompressed == first.uncompressed
    assert workshop.make("--no-cache", te="2.11", compression="gzip").digest == second.digest


def test_what_is_installed_apart_is_one_environment(first):
    site = first.folder / "opt/venv/lib/python3.11/site-packages"
    assert (first.folder / "opt/venv/bin/python").is_symlink()
    assert (first.folder / "opt/venv/pyvenv.cfg").is_file()
    assert (site / "torch/lib.so").stat().st_size == 1000 * SIZES["torch"]
    assert (site / "nvidia/__init__.py").read_text() == "# of all of them\n"
    assert (site / "torch/__pycache__/__init__.cpython-311.pyc").is_file()
    assert (first.folder / "opt/venv/bin/torch-run").read_text().startswith("#!/opt/venv/bin/python")
    for record in site.glob("*.dist-info/RECORD"):
        for line in record.read_text().splitlines():
            path, digest, _ = line.rsplit(",", 2)
            if digest:
                assert digest == f"sha256={_record_hash((site / path).read_bytes())}", path
    assert (first.folder / "opt/envbuild/built/te.json").is_file()

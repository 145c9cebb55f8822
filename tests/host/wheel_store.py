"""Small wheels in a store of compiled wheels, for tests."""

import base64
import hashlib
import json
import zipfile
from pathlib import Path

from envbuild.plan.stages import Stage

PYTHON = "3.11"


def hashed(body: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(body).digest()).decode().rstrip("=")


def write_wheel(
    folder: Path,
    project: str = "apex",
    version: str = "1.0",
    *,
    tag: str = "py3-none-any",
    members: dict[str, bytes] | None = None,
    metadata: str = "",
) -> Path:
    """Write a wheel that installs the module of its project; `members` are further files, `metadata` further lines."""
    info = f"{project}-{version}.dist-info"
    files = {
        f"{project}.py": f"VERSION = {version!r}\n".encode(),
        **(members or {}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n{metadata}\n".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    record = "".join(f"{name},{hashed(body)},{len(body)}\n" for name, body in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{project}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files.items():
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), body)
    return path


def stage(component: str = "apex", torch: str = "2.11.0+cu130", **values: object) -> Stage:
    """Return the stage of a compiled wheel, every input of it named."""
    inputs = {
        "source": ["c" * 40, []],
        "environment": {},
        "torch": [torch, "a" * 64],
        "python": PYTHON,
        "nvcc": f"sha256:{'b' * 64}",
        "compiler": {"gcc-12": "12.2.0-14"},
        "tools": {"wheel": "0.45.1"},
    }
    return Stage(name=f"wheel-{component}", title=component, inputs=inputs | values)


def store(cache: Path, made: Stage, wheel: Path, *, inputs: bool = True) -> Path:
    """Put a wheel into the store of `cache` as the result of a stage; return its folder."""
    component = made.name.removeprefix("wheel-")
    folder = cache / "wheels" / f"{component}-{made.key[:32]}"
    folder.mkdir(parents=True)
    body = wheel.read_bytes()
    (folder / wheel.name).write_bytes(body)
    record = {"component": component, "wheel": wheel.name, "sha256": hashlib.sha256(body).hexdigest(), "extensions": []}
    (folder / "record.json").write_text(json.dumps({**record, "gcc": "12.2.0", "nvcc": "Build cuda_13.0"}))
    if inputs:
        folder.with_name(f"{folder.name}.json").write_text(made.text)
    return folder

"""A tiny image that says it is one of a lock: real wheels with RECORDs, installed as uv does, and a `python` of shell."""

import base64
import copy
import hashlib
import io
import json
import tarfile
import zipfile
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from cell_inputs import complete, inputs_for

from envbuild.lock.model import Lock
from envbuild.matrix.load import load_matrix
from envbuild.plan.plan import plan_of

SITE = "opt/venv/lib/python3.11/site-packages"
PYTHON = '#!/bin/sh\ncat >/dev/null\necho "noise without an end"\nprintf \'envbuild-probe %s \' "$2"\ncat /answer.json\necho\n'


def encoded(body: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()


def record(files: dict[str, bytes], own: str) -> bytes:
    lines = [f"{path},{encoded(body)},{len(body)}" for path, body in sorted(files.items())]
    return "\n".join([*lines, f"{own},,", ""]).encode()


@dataclass
class FakeImage:
    """What goes into the image; tests change it before they ask for `tar`."""

    lock: Lock
    expected: dict
    answer: dict
    files: dict[str, bytes]
    wheels: dict[str, bytes]
    """Name of the file -> its bytes."""
    labels: dict[str, str]
    python: str = PYTHON
    more: list[tuple[tarfile.TarInfo, bytes]] = field(default_factory=list)

    def tar(self, busybox: Path | None = None) -> bytes:
        files = self.files | {
            "opt/envbuild/lock.json": self.files.get("opt/envbuild/lock.json", self.lock.model_dump_json().encode()),
            "opt/envbuild/expected.json": json.dumps(self.expected).encode(),
            "answer.json": json.dumps(self.answer).encode(),
            "bin/python": self.python.encode(),
            "bin/python3": self.python.encode(),
        }
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for path, body in files.items():
                info = tarfile.TarInfo(path)
                info.size, info.mode = len(body), 0o755
                tar.addfile(info, io.BytesIO(body))
            if busybox is not None:
                tar.add(busybox, "bin/busybox")
                for name in (
                    "sh",
                    "cat",
                    "echo",
                    "printf",
                    "yes",
                    "sleep",
                    "head",
                    "tr",
                    "true",
                    "ls",
                    "touch",
                    "kill",
                ):
                    info = tarfile.TarInfo(f"bin/{name}")
                    info.type, info.linkname = tarfile.SYMTYPE, "busybox"
                    tar.addfile(info)
            for info, body in self.more:
                tar.addfile(info, io.BytesIO(body))
        return out.getvalue()


def fake_image() -> FakeImage:
    """Return an image that is what its lock says."""
    return copy.deepcopy(_sound())


@cache
def _sound() -> FakeImage:
    locked = complete(inputs_for(cuda="cpu"))
    lock = locked.lock
    files: dict[str, bytes] = {}
    wheels: dict[str, bytes] = {}
    sets = []
    for python_set in lock.python:
        packages = []
        for package in python_set.packages:
            filename, body = wheel(package.name, package.version)
            wheels[filename] = body
            files |= installed(body)
            packages.append(package.model_copy(update={"hashes": (hashlib.sha256(body).hexdigest(),)}))
        sets.append(python_set.model_copy(update={"packages": tuple(packages)}))
    lock = Lock.model_validate(lock.model_dump() | {"python": sets})
    files[f"{SITE}/torch/__pycache__/__init__.cpython-311.pyc"] = b"byte code"
    files |= {f"opt/venv/bin/{name}": b"#\n" for name in ("activate.ps1", "activate_this.py")}
    files |= {"opt/venv/bin/__pycache__/activate_this.cpython-311.pyc": b"byte code"}
    files |= {"opt/venv/pyvenv.cfg": b"home = /usr/bin\n", "opt/venv/bin/activate": b"#\n"}
    plan = plan_of(load_matrix(), replace(locked, lock=lock))
    stated = json.loads(plan.lists["lock/expected.json"])
    answer = {
        "expected": stated,
        "python": "3.11",
        "distributions": {p.name: p.version for s in lock.python for p in s.packages},
        "distributions_of_base": [],
        "bytes": 100,
        "installed_bytes": 100,
        "cuda_headers": None,
        "built": {},
        "torch": {"version": lock.cell["torch"], "cuda": None},
        "imports": {},
    }
    return FakeImage(
        lock=lock,
        expected=stated,
        answer=answer,
        files=files,
        wheels=wheels,
        labels={"io.envbuild.lock": lock.digest},
    )


def wheel(name: str, version: str) -> tuple[str, bytes]:
    stem = f"{name}-{version}"
    members = {
        f"{name}/__init__.py": f"name = {name!r}\n".encode(),
        f"{name}/lib/core.so": b"\x7fELF" + name.encode(),
        f"{name}/_vendor/six-1.17.0.dist-info/RECORD": b"six.py,,\n",  # not a distribution of the environment
        "shared/__init__.py": f"# of {name}\n".encode(),  # two distributions contain it; the last one's is there
        f"{stem}.data/scripts/{name}-run": b"#!python\nprint(1)\n",
        f"{stem}.data/purelib/{name}_extra.py": b"extra = 1\n",
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n".encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
    }
    members[f"{stem}.dist-info/RECORD"] = record(members, f"{stem}.dist-info/RECORD")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path, body in members.items():
            archive.writestr(path, body)
    return f"{stem}-py3-none-any.whl", out.getvalue()


def installed(body: bytes) -> dict[str, bytes]:
    """Return what an installer makes of a wheel, by path in the image."""
    rows: dict[str, bytes] = {}
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        stem = next(n for n in archive.namelist() if n.endswith("/RECORD") and n.count("/") == 1).removesuffix(
            ".dist-info/RECORD"
        )
        for name in archive.namelist():
            if "/scripts/" in name:
                rows["../../../bin/" + name.rpartition("/")[2]] = b"#!/opt/venv/bin/python\nprint(1)\n"
            elif "/purelib/" in name:
                rows[name.partition("/purelib/")[2]] = archive.read(name)
            elif name.count("/") != 1 or not name.endswith("/RECORD"):
                rows[name] = archive.read(name)
    rows[f"{stem}.dist-info/INSTALLER"] = b"uv"
    rows[f"{stem}.dist-info/REQUESTED"] = b""
    own = f"{stem}.dist-info/RECORD"
    found = {f"{SITE}/{path}": content for path, content in rows.items() if not path.startswith("../")}
    found |= {f"opt/venv/{path[9:]}": content for path, content in rows.items() if path.startswith("../")}
    return found | {f"{SITE}/{own}": record(rows, own)}

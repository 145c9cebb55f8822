"""One target per reader of data from elsewhere. A target accepts an `EnvbuildError` and nothing else.

An input is a line that says what it is (`json`, `pip.conf`, `Dockerfile`), a line feed, and the data itself.
"""

import contextlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from envbuild.errors import EnvbuildError
from tests.fuzz import documents

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "docs" / "gpu" / "main"

Seed = tuple[str, str, bytes]
"""What it is, the form that it is mutated in (json, toml, text), the data."""


class OddAnswerError(AssertionError):
    """A reader accepted something that it must not."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A reader, its real inputs, and the words that it looks for."""

    name: str
    read: Callable[[str, bytes], None]
    seeds: Callable[[], list[Seed]]
    words: tuple[bytes, ...] = ()
    share: float = 1.0
    """Of the executions, next to the other targets: a reader that takes long gets fewer."""
    wall: float = 60.0
    """Seconds that an execution may take where it waits instead of working."""

    def __call__(self, data: bytes) -> bool:
        """Run the reader on an input; return whether it accepted it."""
        kind, _, body = data.partition(b"\n")
        try:
            self.read(kind.decode("latin-1"), body)
        except EnvbuildError as error:
            # what a user would see must print, too
            str(error).encode(
                "utf-8", "surrogateescape" if "\udc80" <= max(str(error)) <= "\udcff" else "backslashreplace"
            )
            json.dumps(error.as_json(), default=str)
            return False
        return True

    @property
    def inputs(self) -> list[tuple[str, bytes]]:
        """The seeds as inputs, each with its form."""
        return [(form, kind.encode() + b"\n" + body) for kind, form, body in self.seeds()]


@cache
def scratch() -> Path:
    """Return a folder in memory for this process."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix=f"envbuild-fuzz-{os.getpid()}-", dir=base))


def forget() -> None:
    """Remove this process's folder."""
    shutil.rmtree(scratch(), ignore_errors=True)
    scratch.cache_clear()


@cache
def matrix() -> Any:
    from envbuild.matrix.load import load_matrix

    return load_matrix()


def _write(name: str, body: bytes) -> Path:
    path = scratch() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return path


def _text(body: bytes) -> str:
    """Return an argument as the operating system hands it over."""
    return body.decode("utf-8", "surrogateescape")


# -- the command line's versions --------------------------------------------------------------------------------------


def _read_spec(kind: str, body: bytes) -> None:
    from envbuild.matrix.cell import Pin, Request
    from envbuild.matrix.spec import matches
    from envbuild.solver.asked import read_request

    text = _text(body).strip()
    pins = (Pin(axis=kind, spec=text, origin=f"--{kind}"),)
    read_request(matrix(), Request(pins=pins))
    axis = matrix().axes.get(kind)
    if axis is not None:
        for release in matrix().releases[kind][:3]:
            matches(axis, text, release)


def _spec_seeds() -> list[Seed]:
    texts = "12.6 2.6 >=2.6,<2.8 >2||<1 ==12.* !=2 ~=2.6 auto none any cpu h100 rtx4090 !ngc-* ngc-* e74a67bb 560.35.05 2.8.0+cu126"
    axes = ("cuda", "te", "torch", "apex", "gpu", "driver", "base", "megatron", "flash-attn", "flavor", "nope")
    return [(axis, "text", text.encode()) for axis in axes for text in texts.split()]


# -- locks ------------------------------------------------------------------------------------------------------------


@cache
def _pylock(name: str) -> bytes:
    return (LOCK / name).read_bytes()


@cache
def _short_lock() -> dict[str, Any]:
    lock: dict[str, Any] = json.loads((LOCK / "lock.json").read_bytes())
    for each in lock["os"]:
        each["packages"] = each["packages"][:2]
    return lock


def _parse_lock(body: bytes, pylock: Callable[[str], bytes]) -> Any:
    from envbuild.lock.files import parse_lock

    return parse_lock(body, pylock, "a lock")


def _read_lock(kind: str, body: bytes) -> None:
    def pylock(name: str) -> bytes:
        if not (LOCK / name).is_file():
            raise FileNotFoundError(2, "No such file or directory", name)
        return _pylock(name)

    locked = _parse_lock(body, pylock)
    locked.lock.digest.encode()
    locked.lock.still_missing()
    if kind == "plan":
        from envbuild.plan.apptainer import definition
        from envbuild.plan.dockerfile import bake, dockerfile
        from envbuild.plan.plan import plan_of

        plan = plan_of(matrix(), locked)
        for write in (dockerfile, bake, definition):
            write(plan)


def _lock_seeds() -> list[Seed]:
    short = json.dumps(_short_lock()).encode()
    return [("lock", "json", short)] * 5 + [("plan", "json", short)]


def _read_pylock(kind: str, body: bytes) -> None:
    lock = _short_lock()
    only = {**lock, "python": [each for each in lock["python"] if each["name"] == "tools"]}
    _parse_lock(json.dumps(only).encode(), lambda _: body)


def _pylock_seeds() -> list[Seed]:
    return [("pylock", "toml", _pylock(f"pylock.{name}.toml")) for name in ("tools", "tools", "tools", "env")]


# -- stacks, manifests, patches ---------------------------------------------------------------------------------------


def _read_stack(kind: str, body: bytes) -> None:
    from envbuild.stacks.load import load_stack
    from envbuild.stacks.parts import digest_of

    if kind == "name":
        load_stack(_text(body))
        return
    stack = load_stack(str(_write("stack.toml", body)))
    digest_of(stack)
    _ = stack.axes


def _stack_seeds() -> list[Seed]:
    files = [*sorted((ROOT / "matrices" / "stacks").glob("*.toml")), ROOT / "docs" / "gpu" / "sgd.toml"]
    names = [("name", "text", name) for name in (b"alcf", b"llama3-70b", b"llm-jp@x", b"./x.toml")]
    return [("stack", "toml", file.read_bytes()) for file in files] * 3 + names


def _read_manifest(kind: str, body: bytes) -> None:
    from envbuild.patches.manifest import load_patches

    root = scratch() / "patches"
    shipped = ROOT / "patches" / kind
    if not shipped.is_dir():
        return
    if not (root / kind).is_dir():
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(shipped, root / kind)
    _write(f"patches/{kind}/manifest.toml", body)
    for patch in load_patches(root).values():
        patch.digest.encode()


def _manifest_seeds() -> list[Seed]:
    return [
        (path.parent.name, "toml", path.read_bytes()) for path in sorted((ROOT / "patches").glob("*/manifest.toml"))
    ]


def _read_patch(kind: str, body: bytes) -> None:
    from envbuild.patches.diff import paths_of

    paths_of(body, where="x.patch")


def _patch_seeds() -> list[Seed]:
    small = b"--- a/x.txt\n+++ b/x.txt\n@@ -2,3 +2,4 @@\n line 1\n-line 2\n+line two\n+and\n line 3\n@@ -9 +10,0 @@\n-line 8\n"
    shipped = [("diff", "text", path.read_bytes()) for path in sorted((ROOT / "patches").glob("*/*.patch"))]
    end = b"--- a/x\n+++ b/x\n@@ -400 +400 @@\n-line 399\n+x\n\\ No newline at end of file\n"
    return [*shipped, ("diff", "text", small), ("diff", "text", end)]


# -- what servers answer ----------------------------------------------------------------------------------------------

_BASE = "https://index.example/simple/torch/"
_JSON = "application/vnd.pypi.simple.v1+json"


def _read_index(kind: str, body: bytes) -> None:
    from envbuild.lock import index

    listing = index.read_page(body, _JSON if kind == "json" else "text/html", _BASE)
    for file in listing.files if hasattr(listing, "files") else listing:
        name = file.filename
        if "/" in name or "\0" in name or name in {"", ".", ".."}:
            raise OddAnswerError(f"a file name that is none: {name!r}")


def _index_seeds() -> list[Seed]:
    digest = "0123456789abcdef" * 4
    names = [
        "torch-2.11.0+cu130-cp311-cp311-manylinux_2_28_x86_64.whl",
        "torch-2.10.0-cp312-none-any.whl",
        "torch-2.11.0.tar.gz",
        "torch-2.11.0.dev1-py3-none-any.whl",
    ]
    files = [
        {
            "filename": name,
            "url": f"https://files.example/packages/aa/{name}",
            "hashes": {"sha256": digest},
            "requires-python": ">=3.10",
            "size": 1234,
            "upload-time": "2026-01-26T04:13:18.123456Z",
            "yanked": False,
            "core-metadata": {"sha256": digest},
        }
        for name in names
    ]
    page = {"meta": {"api-version": "1.1"}, "name": "torch", "versions": ["2.11.0", "2.10.0"], "files": files}
    links = "".join(
        f'<a href="../../packages/{name.replace("+", "%2B")}#sha256={digest}" data-requires-python="&gt;=3.10" '
        f'data-dist-info-metadata="sha256={digest}">{name}</a><br/>\n'
        for name in names
    )
    html = f'<!DOCTYPE html><html><head><meta name="pypi:repository-version" content="1.1"></head><body>\n{links}</body></html>'
    return [("json", "json", json.dumps(page).encode())] * 2 + [("html", "text", html.encode())]


def _read_registry(kind: str, body: bytes) -> None:
    from envbuild.net import answers as registry
    from envbuild.net.registry import parse_reference

    if kind == "reference":
        parse_reference(_text(body))
    elif kind == "challenge":
        challenge = registry.read_challenge(body.decode("latin-1"))
        registry.token_url(challenge, scope="repository:x:pull", plain=False)
    elif kind == "token":
        registry.read_token(body)
    elif kind == "login":
        registry.read_docker_config(body, "ghcr.io")
    else:
        registry.read_helper_answer(body)


def _registry_seeds() -> list[Seed]:
    challenge = b'Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull"'
    config = {
        "auths": {"ghcr.io": {"auth": "dXNlcjpwYXNz"}, "https://index.docker.io/v1/": {}},
        "credHelpers": {"ecr.example": "ecr-login"},
        "credsStore": "",
        "HttpHeaders": {"User-Agent": "Docker-Client/29"},
    }
    return [
        ("challenge", "text", challenge),
        ("challenge", "text", b'Basic realm="x"'),
        (
            "token",
            "json",
            b'{"token": "abc.def", "access_token": "abc.def", "expires_in": 300, "issued_at": "2026-01-01T00:00:00Z"}',
        ),
        ("login", "json", json.dumps(config).encode()),
        ("helper", "json", b'{"ServerURL": "ghcr.io", "Username": "me", "Secret": "s"}'),
        ("reference", "text", b"ghcr.io:443/acme/envbuild:cu130-py311@sha256:" + b"ab" * 32),
        ("reference", "text", b"debian"),
    ]


def _read_gitmodules(kind: str, body: bytes) -> None:
    from envbuild.lock.gitfiles import read_gitmodules

    read_gitmodules(body, what="https://github.com/x/y.git")


def _gitmodules_seeds() -> list[Seed]:
    text = (
        b'[submodule "3rdparty/cutlass"]\n\tpath = 3rdparty/cutlass\n\turl = https://github.com/NVIDIA/cutlass.git\n'
        b'[submodule "ck"] # note\n\tpath = "csrc/ck"\n\turl = ../ck.git\n\tbranch = main\n\tshallow = true\n'
    )
    return [("gitmodules", "text", text)]


# -- this machine's files ---------------------------------------------------------------------------------------------


def _read_hostfile(kind: str, body: bytes) -> None:
    from envbuild.run.launch import read_hostfile

    for node in read_hostfile(_write("hostfile", body), default_slots=8):
        if not 0 < node.slots < 10**5 or node.name.startswith("-"):
            raise OddAnswerError(f"{node}")
        _ = node.is_address


def _hostfile_seeds() -> list[Seed]:
    texts = (
        b"node1 slots=8\nnode2 slots=8 max-slots=8\n# a comment\n\nnode3\n",
        b"10.0.0.1:4\n10.0.0.2:4\n",
        b"fe80::1 slots=2\n[::1]:4\n",
        b"localhost slots=1\n",
        b"".join(b"host-%d.cluster slots=8\n" % number for number in range(300)),
    )
    return [("hostfile", "text", text) for text in texts]


_PLACES = {
    "config.toml": "home/.config/envbuild/config.toml",
    "pip.conf": "root/etc/pip.conf",
    "os-release": "root/etc/os-release",
    "sources.list": "root/etc/apt/sources.list",
    "debian.sources": "root/etc/apt/sources.list.d/debian.sources",
    "mirrors": "root/etc/apt/mirrors.list",
}
_OS_RELEASE = b'ID=debian\nVERSION_CODENAME=bookworm\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n'
_MIRRORS = b"mirror+file:///etc/apt/mirrors.list"


def _read_settings(kind: str, body: bytes) -> None:
    from envbuild.settings import load_settings

    machine = scratch() / "machine"
    if not machine.is_dir():
        for place in _PLACES.values():
            (machine / place).parent.mkdir(parents=True, exist_ok=True)
    plain = {"os-release": _OS_RELEASE, "sources.list": b"deb " + _MIRRORS + b" bookworm main\n"}
    for name, place in _PLACES.items():
        (machine / place).write_bytes(body if name == kind else plain.get(name, b"") if kind != "config.toml" else b"")
    env = {"HOME": str(machine / "home"), "TMPDIR": str(machine)}
    if kind not in _PLACES:  # an environment variable, which holds no NUL
        env[kind] = _text(body.replace(b"\0", b""))
    with contextlib.suppress(FileNotFoundError):
        (machine / "home" / "none").unlink()
    settings = load_settings(environ=env, root=machine / "root")
    json.dumps(settings.redacted())
    repr(settings)


def _settings_seeds() -> list[Seed]:
    config = (
        b'index_url = "https://u:p@index.example/simple"\nextra_index_urls = ["https://a.example/x"]\nfind_links = []\n'
        b'debian_mirror = "http://deb.example/debian"\nhttps_proxy = "http://proxy:3128"\nno_proxy = "localhost,.example"\n'
        b'registry = "ghcr.io/acme/envbuild"\njobs = 8\nmemory_gib = 12.5\nbuilder = "x"\nengine_host = "ssh://me@host"\n'
    )
    pip = b"[global]\nindex-url = https://pip.example/simple/\nextra-index-url =\n    https://a/x\n    https://b/y\n[install]\nfind-links = /x\ncert = /y\n"
    one_line = b"# x\ndeb [arch=amd64 signed-by=/x] http://deb.debian.org/debian bookworm main\ndeb http://s/debian-security bookworm-security main\n"
    deb822 = b"Types: deb deb-src\nURIs: http://a/debian\n  http://b/debian\nSuites: bookworm bookworm-updates\nComponents: main\n\nTypes: deb\nURIs: http://s/x\nSuites: bookworm-security\nEnabled: no\n"
    return [
        ("config.toml", "toml", config),
        ("config.toml", "toml", config),
        ("pip.conf", "text", pip),
        ("os-release", "text", _OS_RELEASE),
        ("sources.list", "text", one_line),
        ("debian.sources", "text", deb822),
        ("mirrors", "text", b"http://a/debian\npriority:1\n"),
        ("UV_INDEX", "text", b"acme=https://a.example/x https://b.example/y"),
        ("PIP_INDEX_URL", "text", b"https://u:p@a.example/x"),
        ("ENVBUILD_FIND_LINKS", "text", b"https://a.example/x /tmp"),
        ("ENVBUILD_JOBS", "text", b"8"),
        ("ENVBUILD_MEMORY_GIB", "text", b"1.5"),
        ("https_proxy", "text", b"http://u:p@proxy:3128"),
        ("DOCKER_HOST", "text", b"unix:///run/docker.sock"),
    ]


# -- records and recipes ----------------------------------------------------------------------------------------------


def _read_record(kind: str, body: bytes) -> None:
    from envbuild.errors import DataError
    from envbuild.evidence.baseline import check_baseline, hold
    from envbuild.evidence.claims import claim_of
    from envbuild.evidence.curves import compare, curves_of
    from envbuild.evidence.named import run_differences
    from envbuild.evidence.place import altered_of
    from envbuild.evidence.records import content_id, read_evidence

    name = "20261122T101859Z-0000000000000000.json"
    with contextlib.suppress(ValueError, RecursionError, AttributeError):  # a record whose hash is right gets further
        raw = json.loads(body)
        raw["id"] = content_id(raw)
        body = json.dumps(raw).encode()
        name = f"20261122T101859Z-{raw['id'].removeprefix('sha256:')[:16]}.json"
    path = _write(f"records/{name}", body)
    try:
        record = read_evidence(path)
    finally:
        path.unlink()
    for versions in (record.cell, {"cuda": "13.0", "gpu": "sm_90", "python": "3.12"}):
        cell: Any = SimpleNamespace(id=record.cell_id, versions=versions)
        json.dumps(claim_of(cell, (), [record], suite=record.suite).as_json(), allow_nan=False)
    _ = record.where, altered_of(record)
    with contextlib.suppress(DataError):
        for name, curve in curves_of(record, "A")[0].items():
            found = compare(name, curve, curve)
            assert found.verdict == "equal", found
            json.dumps(found.as_json(), allow_nan=False)
    with contextlib.suppress(DataError):
        check_baseline(record, "A")
        json.dumps([rate.as_json() for rate in hold(record, record, "A").rates], allow_nan=False)
    assert run_differences(record, record) == ()
    json.dumps(record.model_dump(mode="json"), allow_nan=False)


def _record_seeds() -> list[Seed]:
    folders = ROOT / "matrices" / "evidence", ROOT / "docs" / "gpu" / "nodes", ROOT / "docs" / "gpu" / "faults"
    files = [path for folder in folders for path in sorted(folder.glob("*.json"))]
    small = sorted(files, key=lambda path: path.stat().st_size)
    return [
        *(("record", "json", path.read_bytes()) for path in (*small[:4], small[len(small) // 2])),
        ("record", "json", _trained(small[0])),
    ]


def _trained(path: Path) -> bytes:
    """Return a record with a training curve, made of another one."""
    record = json.loads(path.read_bytes())
    seeds = [1, 2, 3, 4, 5]
    figures: dict[str, Any] = {f"seed {seed}, losses": {"value": [5.5, 3.1 + seed / 100, 2.0]} for seed in seeds}
    figures |= {
        "seed 1, gradient norms": {"value": [1.0, 0.5, 0.25]},
        "training": {"value": {"steps": 3, "seeds": seeds}},
    }
    test = {"id": "test_train.py::test_train_curve[float32]", "level": "train", "outcome": "passed", "seconds": 1.0}
    return json.dumps({**record, "level": "train", "tests": [{**test, "figures": figures}]}).encode()


def _read_catalogue(kind: str, body: bytes) -> None:
    from envbuild.curate.page_published import read_published

    for image in read_published(_write("catalogue/catalog.json", body)):
        # goes into a command that people paste into a shell
        if shlex.quote(image.reference) != image.reference or not image.reference.isprintable():
            raise OddAnswerError(f"{kind}: {image.reference!r}")


def _catalogue_seeds() -> list[Seed]:
    entry = {
        "id": "cu126-py312-torch2.8.0-te2.6.0-sm90-00112233",
        "cell": {"cuda": "12.6", "torch": "2.8.0+cu126", "te": "2.6.0"},
        "image": "sha256:" + "0a" * 32,
        "platform": "linux/amd64",
        "size": 5_000_000_000,
        "stack": None,
        "signers": ["team"],
    }
    answer = {"registry": "registry.example.org:5000/team/megatron", "entries": [entry]}
    return [("catalogue", "json", json.dumps(answer).encode())]


def _read_recipe(kind: str, body: bytes) -> None:
    from envbuild.recipes.read import read_recipe

    name = kind.removeprefix("check ")
    if "/" in name or not name:
        return
    recipe = read_recipe(matrix(), _write(f"recipe/{name}", body))
    if name != kind:
        from envbuild.recipes.check import check_recipe

        for finding in check_recipe(matrix(), recipe).findings:
            json.dumps(finding.as_json())


def _recipe_seeds() -> list[Seed]:
    names = {".Dockerfile": "Dockerfile", ".sh": "x.sh", ".txt": "requirements.txt", ".toml": "x.toml"}
    found: list[Seed] = [
        (names[path.suffix], "toml" if path.suffix == ".toml" else "text", path.read_bytes())
        for path in sorted((ROOT / "tests" / "data" / "recipes").iterdir())
    ]
    return found * 10 + [(f"check {name}", form, body) for name, form, body in found if len(body) < 3000]


# -- SBOM and provenance ----------------------------------------------------------------------------------------------


def _read_document(kind: str, body: bytes) -> None:
    if kind in documents.KINDS:
        documents.read(kind, body)
    else:
        documents.write(_parse_lock(body, _pylock))


def _document_seeds() -> list[Seed]:
    lock = _short_lock()
    short = {**lock, "python": [each for each in lock["python"] if each["name"] == "tools"]}
    body = json.dumps(short).encode()
    own = documents.written(_parse_lock(body, _pylock).lock)
    return [("lock", "json", body), *((kind, "json", each) for kind, each in own.items())]


# -- binaries ---------------------------------------------------------------------------------------------------------


def _read_binary(kind: str, body: bytes) -> None:
    import io

    from envbuild.errors import AuditError
    from envbuild.verify.binaries.elf import ElfError, read_elf

    try:
        binary = read_elf(io.BytesIO(body), kind, len(body))
    except ElfError as error:
        raise AuditError(str(error)) from None
    if len(binary.wanted) * 24 > len(body) or len(binary.needed) * 16 > len(body):
        raise OddAnswerError("more symbols than the file has room for")
    if binary.gpu is not None:
        for code in binary.gpu.codes:
            binary.gpu.support(code.sm)


def _binary_seeds() -> list[Seed]:
    from tests.fuzz.elf import fatbin, library

    gpu = fatbin((2, 80, 0), (1, 90, 0)) + fatbin((2, 90, 1 << 20), (2, 100, 1 << 21))
    return [("libcudnn.so.9", "text", library(gpu=gpu)), ("one.so", "text", library(needed=(), wanted=("a",) * 40))]


_DOCKER = b"FROM ARG ENV RUN pip install git clone --branch cd && || ; | << EOF \\\n ${X} $X CUDA_HOME= TORCH_CUDA_ARCH_LIST= --extra-index-url torch==2.6.0 if then fi for do done () {} [[ ]]".split(
    b" "
)
_SPEC = b">= <= == != ~= === , || .* + ! auto none any * rc1 .post1 dev0 cpu ngc- 12.6".split()

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(name="specs", read=_read_spec, seeds=_spec_seeds, words=tuple(_SPEC), share=2.5),
        Target(name="lock", read=_read_lock, seeds=_lock_seeds, share=0.5),
        Target(name="pylock", read=_read_pylock, seeds=_pylock_seeds, share=0.6),
        Target(name="stack", read=_read_stack, seeds=_stack_seeds, share=0.4),
        Target(name="manifest", read=_read_manifest, seeds=_manifest_seeds, share=0.7),
        Target(
            name="patches",
            read=_read_patch,
            seeds=_patch_seeds,
            words=(
                b"@@ -1,2 +1,2 @@\n",
                b"--- a/",
                b"+++ b/",
                b"\\ No newline at end of file\n",
                b"diff --git ",
                b" ",
                b"-",
                b"+",
            ),
            share=2,
        ),
        Target(
            name="index",
            read=_read_index,
            seeds=_index_seeds,
            words=(
                b"<a href=",
                b"#sha256=",
                b"&amp;",
                b"&#",
                b"<!--",
                b"-->",
                b"<![CDATA[",
                b"%2F",
                b"..",
                b"</a>",
                b"<base href=",
            ),
            share=2,
        ),
        Target(
            name="registry",
            read=_read_registry,
            seeds=_registry_seeds,
            words=(b'realm="', b"Bearer ", b"@sha256:"),
            share=3,
        ),
        Target(
            name="gitmodules",
            read=_read_gitmodules,
            seeds=_gitmodules_seeds,
            words=(b'[submodule "', b"path = ", b"url = ", b"../", b"\\\n", b'"', b"[include]", b"update = !x"),
            share=2,
        ),
        Target(
            name="hostfile",
            read=_read_hostfile,
            seeds=_hostfile_seeds,
            words=(b"slots=", b"max_slots=", b"localhost", b":8", b"::1", b"-x", b"#"),
            share=2.5,
        ),
        Target(name="settings", read=_read_settings, seeds=_settings_seeds, share=0.7),
        Target(name="record", read=_read_record, seeds=_record_seeds, share=1),
        Target(name="documents", read=_read_document, seeds=_document_seeds, share=0.3),
        Target(name="catalogue", read=_read_catalogue, seeds=_catalogue_seeds, share=0.3),
        Target(
            name="binary",
            read=_read_binary,
            seeds=_binary_seeds,
            words=(
                b"\x7fELF",
                b"\xff" * 8,
                b"\xff" * 4,
                b"\0" * 8,
                b"\x50\xed\x55\xba",
                b"\x01\0\0\0\0\0\0\0",
                b"\0\0\0\x80",
            ),
        ),
        Target(name="recipes", read=_read_recipe, seeds=_recipe_seeds, words=tuple(_DOCKER), share=0.25),
    )
}

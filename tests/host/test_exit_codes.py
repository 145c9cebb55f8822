"""One cause has one exit code: a host that does not answer is 8 in every command, and stderr names it and what to do.

The commands are real ones, against a host on 127.0.0.1 that refuses, resets, answers 503 or never answers. What lies
behind https goes through a proxy that does the same. The commands that need an engine are in tests/integration.
"""

import dataclasses
import json
import re
import socket

import pytest
from cell_inputs import complete, inputs_for
from fault_server import FaultServer

from envbuild.cli import main
from envbuild.curate import ranges, upstreams, wheels
from envbuild.errors import HostError, LockError
from envbuild.lock import apt, python
from envbuild.lock.files import write_lock
from envbuild.lock.index import IndexFile, files_of
from envbuild.lock.inputs import PythonGroup, Tree
from envbuild.lock.sources import SourceStore
from envbuild.net import download as downloads
from envbuild.net import exchange, registry
from envbuild.net import fetch as pages
from envbuild.settings import load_settings
from envbuild.verify.wheels import Wheels

QUICK = {"connect_s": 1, "stall_s": 0.3, "total_s": 3, "attempts": 2, "pause_s": 0.01}
CUDA = ("--cuda", "12.6", "--te", "2.6", "--apex", "auto", "--os", "ubuntu22.04")
"""A cell that asks every kind of host: a registry, the archive, the index, PyTorch's index, a git server."""
DEBIAN = ("--cuda", "cpu", "--os", "debian12")


def _free_port():
    with socket.socket() as taken:  # a port that nothing listens on
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


MANNERS = {
    "refuses": None,
    "resets": lambda fault, number: fault.reset(),
    "answers 503": lambda fault, number: fault.send(b"down", 503, "Service Unavailable"),
    # Every other wait is shorter. git's is not for a proxy (curl takes 300 s), so in the end the connection closes.
    "hangs": lambda fault, number: fault.wait(8),
}


@pytest.fixture(params=MANNERS)
def away(request, monkeypatch, tmp_path):
    """The address of a host that fails in one manner; every setting leads to it, and every wait is short."""
    manner = MANNERS[request.param]
    with FaultServer(manner or MANNERS["hangs"]) as host:
        url = host.url if manner else f"http://127.0.0.1:{_free_port()}"
        _settle(monkeypatch, tmp_path, url)
        yield url


def _settle(monkeypatch, tmp_path, url):
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "HOME": str(tmp_path),
        "ENVBUILD_CONFIG": str(tmp_path / "config.toml"),
        "ENVBUILD_CACHE_DIR": str(tmp_path / "cache"),
        "ENVBUILD_INDEX_URL": f"{url}/simple",
        "ENVBUILD_TORCH_INDEX": f"{url}/torch",
        "ENVBUILD_UBUNTU_MIRROR": f"{url}/ubuntu",
        "ENVBUILD_DEBIAN_MIRROR": f"{url}/debian",
        "ENVBUILD_DEBIAN_SECURITY_MIRROR": f"{url}/security",
        "ENVBUILD_HTTPS_PROXY": url,
        "ENVBUILD_NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.toml").write_text("")
    page, file = (dataclasses.replace(bounds, **QUICK) for bounds in (exchange.PAGE, downloads.FILE))
    monkeypatch.setitem(pages.fetch.__kwdefaults__, "bounds", page)
    monkeypatch.setitem(downloads.download.__kwdefaults__, "bounds", file)
    monkeypatch.setattr(ranges, "PAGE", page)
    monkeypatch.setattr(registry, "_bounds", lambda: dataclasses.replace(page, size=4 << 20))
    monkeypatch.setattr(apt, "_APT_SECONDS", 1)
    monkeypatch.setattr(python, "_UV_SECONDS", 1)
    monkeypatch.setattr(python, "_UV_RETRIES", 0)
    monkeypatch.setitem(SourceStore.__init__.__kwdefaults__, "patience_s", 1)
    monkeypatch.setattr(upstreams, "_GIT_TIMEOUT_S", 2)


@pytest.fixture
def run(capsys):
    """Run a command; return its exit code, stdout and stderr."""

    def call(*words):
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return call


# --- real commands ---------------------------------------------------------------------------------------------------------


def test_lock_names_every_host_that_did_not_answer(away, run, tmp_path):
    code, out, err = run("lock", *CUDA, "--out", str(tmp_path / "lock"), "--json")
    assert code == 8, err
    missing = {m["kind"]: m for m in json.loads(out)["missing"]}
    assert set(missing) == {"image", "os", "sdist", "tree", "python"}
    hosts = {kind: m["host"] for kind, m in missing.items()}
    assert hosts.pop("image") == "docker.io"
    assert hosts.pop("tree") == "github.com"
    assert set(hosts.values()) == {"127.0.0.1"}
    for m in missing.values():
        assert f"{m['what']}: held by {m['host']}" in err
    assert "to do: run `envbuild lock` with the same flags where these hosts (or mirrors in the settings)" in err
    # the lock that was written is a lock with missing inputs, whoever reads it later
    assert run("render", *CUDA, "--lock", str(tmp_path / "lock"))[0] == 4


def test_check_of_a_lock(away, run, tmp_path):
    place = write_lock(complete(inputs_for(cuda="cpu", os="debian12")), tmp_path / "lock")
    code, _, err = run("lock", *DEBIAN, "--lock", str(place), "--check")
    assert (code, "the package archive on 127.0.0.1 cannot be reached" in err, "to do: " in err) == (8, True, True), err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("matrix", "update", "torch"), "127.0.0.1"),
        (("matrix", "update", "nvcc"), "127.0.0.1"),
        (("matrix", "update", "apex"), "https://github.com/NVIDIA/apex.git"),
        (("matrix", "check", "--online"), "127.0.0.1"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else None,
)
def test_the_matrix_and_its_upstreams(away, run, words, named):
    code, _, err = run(*words)
    assert code == 8, err
    assert named in err
    assert re.search(r"to do: .*(proxy|network)", err)


@pytest.mark.parametrize(
    "words",
    [
        ("resolve", *CUDA),
        ("render", "--unlocked", *CUDA),
        ("explain", *CUDA),
        ("patch", "list"),
        ("matrix", "check"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_command_that_asks_no_host_does_not_meet_one(run, words, monkeypatch, tmp_path):
    with FaultServer(MANNERS["answers 503"]) as host:
        _settle(monkeypatch, tmp_path, host.url)
        code, _, err = run(*words)
        assert (code, host.seen) == (0, []), err


def test_a_tool_that_is_missing(run, monkeypatch, tmp_path):
    with FaultServer(MANNERS["answers 503"]) as host:
        _settle(monkeypatch, tmp_path, host.url)
        monkeypatch.setenv("PATH", str(tmp_path))
        code, _, err = run("lock", *DEBIAN, "--out", str(tmp_path / "lock"))
    assert (code, "apt-get is missing" in err, "to do: " in err) == (8, True, True), err


@pytest.mark.parametrize(
    "words",
    [
        ("lock", "--no-such"),
        ("resolve", "--cuda", "99"),
        ("launch", "x", "--launcher", "none"),
        ("pull", "--digest", "1"),
    ],
    ids=" ".join,
)
def test_an_option_or_a_value_that_does_not_exist(run, words):
    assert run(*words)[0] == 2


# --- each way to a host, so that no other failure of a command hides its kind ----------------------------------------------


def _wheel_of(settings):
    url = f"{settings.index_url}/files/x-1-py3-none-any.whl"
    return IndexFile(filename="x-1-py3-none-any.whl", url=url, sha256=None, upload_time=None)


def _known(settings):
    return Wheels(settings).fetch("x", "1", ["0" * 64], [settings.index_url], lambda _: None)


GIT = Tree(name="apex", url="https://git.example/apex.git", commit="1" * 40)
WAYS = {
    "an archive": lambda s: apt.resolve_os_packages(s, suite="bookworm", packages=["zlib1g"]),
    "uv": lambda s: python.resolve(s, PythonGroup(name="env", requirements=("x",)), python="3.12", glibc="2.36"),
    "uv at PyTorch's index": lambda s: python.resolve(
        s,
        PythonGroup(name="torch", requirements=("torch",), index=f"{python.PYTORCH}/cpu"),
        python="3.12",
        glibc="2.36",
    ),
    "an index": lambda s: files_of(s, "x"),
    "the API of an index": lambda s: wheels.uploads(s, "x"),
    "a wheel's metadata": lambda s: wheels.metadata_of(s, _wheel_of(s)),
    "a part of a wheel": lambda s: wheels.member(s, _wheel_of(s), "METADATA"),
    "the wheels of an audit": _known,
    "a file": lambda s: downloads.download(s, f"{s.index_url}/x.whl", "0" * 64, s.cache_dir / "files"),
    "a registry over https": lambda s: registry.find_digest("registry.example/team/x:1", settings=s),
    "a registry on loopback": lambda s: registry.find_digest(
        f"{s.index_url.removeprefix('http://').removesuffix('/simple')}/team/x:1", settings=s
    ),
    "a git server": lambda s: SourceStore(settings=s).pin(GIT),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_a_host(away, way):
    settings = load_settings()
    with pytest.raises(HostError) as caught:
        WAYS[way](settings)
    host = {"a registry over https": "registry.example", "a git server": "git.example"}.get(way, "127.0.0.1")
    assert host in f"{caught.value.what} {caught.value.where}"
    assert caught.value.hint


@pytest.mark.parametrize(("status", "kind"), [(404, LockError), (401, HostError), (500, HostError)])
@pytest.mark.parametrize(
    "way", ["an index", "a file", "a part of a wheel", "the API of an index", "a registry on loopback"]
)
def test_what_a_host_answers_decides(monkeypatch, tmp_path, way, status, kind):
    """What the host does not have is 4; a login that is missing, and a host that cannot serve, are 8."""
    with FaultServer(lambda fault, number: fault.send(b"", status, "No")) as host:
        _settle(monkeypatch, tmp_path, host.url)
        settings = load_settings()
        if kind is LockError and way in {"the API of an index", "a registry on loopback"}:
            assert not WAYS[way](settings)  # what need not be there is no error yet
            return
        with pytest.raises(kind) as caught:
            WAYS[way](settings)
        assert (type(caught.value), "127.0.0.1" in str(caught.value)) == (kind, True)

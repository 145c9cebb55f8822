"""The readers of what others send: index pages, METADATA, pylocks, registry answers, docker's configuration."""

import base64
import contextlib
import hashlib
import json
import random
import time

import pytest
from fault_server import FaultServer
from hypothesis import given
from hypothesis import strategies as st

from envbuild.curate.proposals import Proposal
from envbuild.curate.upstreams import read_tags
from envbuild.curate.wheels import Distribution, IndexFile, Version, member, parse_metadata, python_tags, read_uploads
from envbuild.errors import EnvbuildError, HostError, LockError
from envbuild.lock.index import files_of, read_page
from envbuild.lock.python import local_wheel, packages_of
from envbuild.net import answers as registry
from envbuild.net import docker_login as logins
from envbuild.net.download import download
from envbuild.net.registry import find_digest
from envbuild.settings import load_settings

JSON = "application/vnd.pypi.simple.v1+json"
BASE = "https://pypi.example.org/simple/x/"
SHA = "ab" * 32
SECRET = "hunter2-secret"
GOOD_TOKENS = ("x", "../x", "9" * 5000)
ODD = [None, True, 5, -1.5, "", "x", "\ud800", [], [1], {}, {"a": None}, [[]], "9" * 5000, "a\nb", "../x"]


def settings_of(folder, **environ):
    return load_settings(environ={"HOME": str(folder), **environ}, root=folder)


def good_entry(name="x-1.0.tar.gz", **more):
    return {"filename": name, "url": f"/files/{name}", "hashes": {"sha256": SHA}} | more


def replaced(value, odd):
    """Yield `value` with each part of it, itself included, replaced by `odd`."""
    yield odd
    if isinstance(value, dict):
        for key in value:
            yield from ({**value, key: part} for part in replaced(value[key], odd))
            yield {k: v for k, v in value.items() if k != key}
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from ([*value[:number], other, *value[number + 1 :]] for other in replaced(part, odd))


DEEP = b"[" * 200_000
HOSTILE_JSON = [
    DEEP,
    b'{"a":' * 100_000,
    b"9" * 5000,
    b'{"files":' + b"9" * 5000 + b"}",
    b"\xff\xfe",
    b"",
    b"null",
    b"NaN",
]


# --- index pages ----------------------------------------------------------------------------------------------------------

ESCAPES = ["%2e%2e%2f%2e%2e%2fescaped", "..", "%2fetc%2fpasswd", "a%00b", "a%0ab", "-x", ".x", "", "a%5cb", "a b"]


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("kind", [JSON, "text/html"])
def test_a_name_that_leads_out_is_left_out_and_named(kind, name):
    entries = [{**good_entry(), "url": f"/files/{name}", "filename": "x-2.0.tar.gz"}, good_entry()]
    body = (
        json.dumps({"files": entries})
        if kind == JSON
        else "".join(f'<a href="{e["url"]}#sha256={SHA}">x-2.0.tar.gz</a>' for e in entries)
    )
    listing = read_page(body.encode(), kind, BASE)
    assert [file.filename for file in listing] == ["x-1.0.tar.gz"]
    assert len(listing.refused) == 1
    assert listing.refused[0].isprintable()


def test_a_name_in_json_is_checked_as_its_address_is():
    for name in ("../../x", "/etc/passwd", "a\nb", "", None, 5, "x" * 300):
        listing = read_page(json.dumps({"files": [good_entry() | {"filename": name}]}).encode(), JSON, BASE)
        assert (listing.files, len(listing.refused)) == ((), 1)


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", f"https://me:{SECRET}@h/x.whl", "ftp://h/x.whl", "http://[::1/x.whl", "javascript:x/y"],
)
def test_an_address_that_is_none_is_left_out(url):
    for body, kind in (
        (json.dumps({"files": [good_entry() | {"url": url}]}), JSON),
        (f"<a href='{url}'>x</a>", "text/html"),
    ):
        listing = read_page(body.encode(), kind, BASE)
        assert (listing.files, len(listing.refused)) == ((), 1)
        assert SECRET not in listing.refused[0]


def test_the_refused_entry_that_was_needed_is_named():
    body = json.dumps({"files": [good_entry("x-2.0.tar.gz", url="/%2e%2e%2fx-2.0.tar.gz"), good_entry()]})
    listing = read_page(body.encode(), JSON, BASE)
    assert "is not a file name" in listing.why_not("-2.0.tar.gz")
    assert listing.why_not("-3.0.tar.gz") is None


def test_json_with_every_part_of_every_wrong_type():
    page = {
        "meta": {"api-version": "1.1"},
        "name": "x",
        "files": [good_entry(**{"upload-time": "2026-01-01T00:00:00Z"})],
    }
    tried = 0
    for odd in ODD:
        for value in replaced(page, odd):
            tried += 1
            try:
                listing = read_page(json.dumps(value).encode(), JSON, BASE)
            except LockError as error:
                assert str(error).replace("\n", "").isprintable()  # noqa: PT017 - any number of them may be read
                continue
            for file in listing:
                assert file.filename in {"x-1.0.tar.gz", "x"}
                assert file.sha256 in {SHA, None}
                assert file.upload_time is None or file.upload_time.startswith("2026-01-01")
    assert tried > 100


@pytest.mark.parametrize("body", HOSTILE_JSON, ids=range(len(HOSTILE_JSON)))
def test_json_that_is_none(body):
    with pytest.raises(LockError, match="not a page of a package index"):
        read_page(body, JSON, BASE)
    with pytest.raises(LockError, match="JSON API"):
        read_uploads(body)
    for read in (registry.read_token, registry.read_helper_answer, lambda b: registry.read_docker_config(b, "h")):
        with pytest.raises(HostError):
            read(body)


def test_html_as_indexes_write_it():
    body = f"""<!DOCTYPE html><html><body>
    <!-- <a href="/files/commented-1.0.tar.gz">no</a> -->
    <a href="/files/a-1.0.tar.gz#sha256={SHA}" data-requires-python=">=3.8">a</a>
    <A data-x='"<a href=x>"' HREF = '/files/b-1%2B1.0.tar.gz?x=1&amp;y=2'>b</A>
    <a  href=../../files/c-1.0.whl>c</a><a name=x></a><abbr href="/files/d-1.0.tar.gz">
    <a href="../">up</a>""".encode()
    listing = read_page(body, "text/html", BASE)
    assert [(f.filename, f.url, f.sha256) for f in listing] == [
        ("a-1.0.tar.gz", "https://pypi.example.org/files/a-1.0.tar.gz", SHA),
        ("b-1+1.0.tar.gz", "https://pypi.example.org/files/b-1%2B1.0.tar.gz?x=1&y=2", None),
        ("c-1.0.whl", "https://pypi.example.org/files/c-1.0.whl", None),
    ]


@pytest.mark.parametrize(
    "part", ["<a ", '<a href="', "<a href='", "<!--", "<a\n", "<![", "<a href=&#" + "9" * 5000 + ";>", "<", "<a x=\"'", "&", "<a " + "x" * 99]
)  # fmt: skip
def test_a_page_is_read_in_one_pass(part):
    body = (part * (2_000_000 // len(part))).encode()
    started = time.monotonic()
    read_page(body, "text/html", BASE)
    assert time.monotonic() - started < 10  # seconds; a pattern that backtracks takes hours


@given(st.binary(max_size=300) | st.text("<a href='\"#=>/%2e.\n", max_size=200).map(str.encode))
def test_any_bytes_as_a_page(body):
    for kind in (JSON, "text/html"):
        try:
            listing = read_page(body, kind, BASE)
        except LockError:
            continue
        assert all("/" not in f.filename and not f.filename.startswith(".") for f in listing)


def test_an_index_that_leads_out_writes_nothing(tmp_path):
    """The reproduction: a lock made against this index wrote two folders above the cache."""
    body = b"mine"
    sha = hashlib.sha256(body).hexdigest()

    def answer(fault, number):
        if fault.path.startswith("/simple"):
            page = {"files": [good_entry(url="/files/%2e%2e%2f%2e%2e%2f%2e%2e%2fx-1.0.tar.gz", hashes={"sha256": sha})]}
            fault.send(json.dumps(page).encode(), Content_Type=JSON)
        else:
            fault.send(body)

    cache = tmp_path / "a/b/c/files"
    with FaultServer(answer) as host:
        settings = settings_of(tmp_path, ENVBUILD_INDEX_URL=f"{host.url}/simple")
        listing = files_of(settings, "x")
        for file in listing:
            download(settings, file.url, file.sha256, cache)
        with pytest.raises(LockError):
            download(settings, f"{host.url}/files/%2e%2e%2f%2e%2e%2f%2e%2e%2fx-1.0.tar.gz", sha, cache)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    assert "x-1.0.tar.gz" in listing.why_not("x-1.0")


@pytest.mark.parametrize("name", ["../x", "a/b", "", "x" * 300, "a?b", "a#b"])
def test_a_distribution_s_name_leads_nowhere(tmp_path, name):
    with pytest.raises(LockError, match="no distribution"):
        files_of(settings_of(tmp_path, ENVBUILD_INDEX_URL="http://127.0.0.1:9"), name)


# --- METADATA, uploads, wheels ---------------------------------------------------------------------------------------------


def test_metadata_that_is_nonsense():
    lines = [
        "Requires-Python: >=3\n [[release]]\n version = 1",
        "Requires-Dist: x==" + "9" * 5000,
        "Requires-Dist: x; " + "(" * 100_000,
        "Requires-Dist: \x00",
        "Requires-Dist: good>=1",
    ]
    metadata = parse_metadata("\n".join(lines) + "\n")
    assert metadata.requires_python is None
    assert "good" in {r.name for r in metadata.requires}
    assert parse_metadata("Requires-Python: >=3.8, <4\n").requires_python == ">=3.8, <4"


def test_a_remark_stays_a_comment():
    proposal = Proposal(axis="te", version="1", release={"version": "1"}, remarks=("x\n[[release]]\nversion = 2",))
    assert proposal.toml().count("\n[[release]]") == 1


def test_uploads_with_every_part_of_every_wrong_type():
    answer = {"releases": {"1.0": [{"upload_time": "2026-01-01T00:00:00", "yanked": False}]}}
    for odd in ODD:
        for value in [*replaced(answer, odd), {"releases": {str(odd): answer["releases"]["1.0"]}}]:
            with contextlib.suppress(LockError):
                read_uploads(json.dumps(value).encode())


def test_a_tag_of_a_wheel_that_is_no_python():
    files = (IndexFile(filename="x-1.0-cp3x.cp312-cp3x.cp312-none-any.whl", url="https://h/x", sha256=None),)
    assert python_tags(Distribution(name="x", version=Version("1.0"), files=files[:0])) == set()
    named = IndexFile(filename="x-1.0-cp3x.cp312-cp3x.cp312-linux_x86_64.whl", url="https://h/x", sha256=None)
    assert python_tags(Distribution(name="x", version=Version("1.0"), files=(named,))) == {"3.12"}


def test_tags_of_a_repository_that_are_none():
    commit = "a" * 40
    reply = (
        f"{commit}\trefs/tags/v1\nnonsense\n{commit}\trefs/tags/../x\nzz\trefs/tags/v2\n{commit}\trefs/tags/v1^{{}}\n"
    )
    assert read_tags(reply) == {"v1": commit}


RANGES = {
    "no size": lambda fault: fault.send(b"x", 206, Content_Range="bytes 0-0/*"),
    "another range": lambda fault: fault.send(b"x", 206, Content_Range="bytes 7-7/100"),
    "5000 digits": lambda fault: fault.send(b"x", 206, Content_Range="bytes 0-0/" + "9" * 5000),
    "none": lambda fault: fault.send(b"x", 206),
    "more than asked": lambda fault: fault.send(b"x" * 99, 206, Content_Range="bytes 0-0/100"),
    "all of it": lambda fault: fault.send(b"x" * 99),
    "nonsense": lambda fault: fault.send(b"P", 206, Content_Range="bytes 0-0/1"),
}


@pytest.mark.parametrize("kind", RANGES)
def test_ranges_that_are_none(tmp_path, kind):
    with FaultServer(lambda fault, number: RANGES[kind](fault)) as host:
        wheel = IndexFile(filename="x.whl", url=f"{host.url}/x.whl", sha256=None)
        with pytest.raises(LockError, match="cannot be read"):
            member(settings_of(tmp_path), wheel, "METADATA")


# --- pylocks --------------------------------------------------------------------------------------------------------------

PYLOCK = {
    "lock-version": "1.0",
    "packages": [
        {
            "name": "six",
            "version": "1.0",
            "wheels": [{"url": "https://h.example/six-1.0-py3-none-any.whl", "hashes": {"sha256": SHA}}],
        }
    ],
}


def as_toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value)


def pylock_text(value):
    return "\n".join(f"{json.dumps(k)} = {as_toml(v)}" for k, v in value.items()) if isinstance(value, dict) else "x"


def test_a_usual_pylock():
    (package,) = packages_of(pylock_text(PYLOCK))
    assert (package.name, package.version, package.hashes) == ("six", "1.0", (SHA,))


def test_a_pylock_with_every_part_of_every_wrong_type():
    tried = read = 0
    for odd in [*ODD[1:], "https://u:p@h/x.whl", "file:///etc/passwd", "wheels/../../x.whl"]:
        for value in replaced(PYLOCK, odd):
            tried += 1
            try:
                packages_of(pylock_text(value))
                read += 1
            except EnvbuildError as error:
                assert error.what.isprintable()  # noqa: PT017 - any number of them may be read
    assert tried > 100
    assert read > 0


@pytest.mark.parametrize(
    "text",
    ["x = " + "[" * 100_000, "x = " + "9" * 5000, "packages = 5", "\0", "packages = [1]", "x = {" * 5000, "a." * 5000],
)
def test_a_pylock_that_is_none(text):
    with pytest.raises(LockError, match="not a pylock"):
        packages_of(text)


@pytest.mark.parametrize(
    "wheel",
    [
        {"url": "https://h/%2e%2e%2f%2e%2e%2fx.whl"},
        {"url": f"https://me:{SECRET}@h/x.whl"},
        {"name": "../../x.whl", "url": "https://h/x.whl"},
        {"path": "wheels/.."},
        {"path": "wheels/%2e%2e%2fx"},
        {"url": "ftp://h/x.whl"},
        {},
    ],
)
def test_a_pylock_s_file_is_a_file(wheel):
    package = {"name": "x", "version": "1", "wheels": [{**wheel, "hashes": {"sha256": SHA}}]}
    with pytest.raises(LockError, match="not a pylock") as caught:
        packages_of(pylock_text({"packages": [package]}))
    assert SECRET not in str(caught.value)


def test_a_local_wheel_s_name_leads_nowhere(tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    (tmp_path / "any.whl").write_text("outside")
    (links / "x-1.0-py3-none-any.whl").write_text("inside")
    settings = settings_of(tmp_path, ENVBUILD_FIND_LINKS=f"{links} https://pypi.example.org/links")
    assert local_wheel(settings, "x-1.0-py3-none-any.whl") == links / "x-1.0-py3-none-any.whl"
    for name in (
        "x-1.0-py3-none-a/../../any.whl",
        "x-1.0-py3-none-/../any.whl",
        "../any.whl",
        "y-1.0-py3-none-any.whl",
        "",
    ):
        assert local_wheel(settings, name) is None


# --- registries -----------------------------------------------------------------------------------------------------------

MANIFEST = b'{"schemaVersion": 2}'
DIGEST = "sha256:" + hashlib.sha256(MANIFEST).hexdigest()
STATED = {"Docker_Content_Digest": DIGEST}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Write docker's config.json; returns the function that does."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(value):
        (tmp_path / "config.json").write_text(value if isinstance(value, str) else json.dumps(value))

    return write


def reference(host, tag=":one"):
    return host.url.removeprefix("http://") + f"/team/cell{tag}"


def test_the_digest_is_that_of_the_manifest_s_bytes(config):
    with FaultServer(lambda fault, number: fault.send(MANIFEST, **STATED)) as host:
        assert find_digest(reference(host)) == DIGEST
        assert find_digest(reference(host, f"@{DIGEST}")) == DIGEST
    with FaultServer(lambda fault, number: fault.send(MANIFEST)) as host:
        assert find_digest(reference(host)) == DIGEST


@pytest.mark.parametrize(
    "stated", ["sha256:" + "0" * 64, "sha512:" + "0" * 128, "sha256:xyz", "nonsense\x1b[31m", f"{DIGEST}, {DIGEST}"]
)
def test_a_digest_that_is_not_the_manifest_s(config, stated):
    with (
        FaultServer(lambda fault, number: fault.send(MANIFEST, Docker_Content_Digest=stated)) as host,
        pytest.raises(LockError, match="another digest") as caught,
    ):
        find_digest(reference(host))
    assert str(caught.value).replace("\n", "").isprintable()


def test_a_manifest_of_another_digest_than_the_reference_s(config):
    with (
        FaultServer(lambda fault, number: fault.send(MANIFEST)) as host,
        pytest.raises(LockError, match="the reference says"),
    ):
        find_digest(reference(host, "@sha256:" + "0" * 64))


def test_a_manifest_without_end(config):
    def endless(fault, number):
        fault.raw(b"HTTP/1.1 200 OK\r\n\r\n")
        while not fault.ended:
            fault.raw(b"\0" * 65536)

    with FaultServer(endless) as host, pytest.raises(LockError, match="more than 4 MiB"):
        find_digest(reference(host))


def challenging(realm, answer, *, basic=False):
    """Answer as a registry whose tokens come from `realm`; `answer(fault)` answers there."""

    def registry_answer(fault, number):
        if fault.path.startswith("/token"):
            answer(fault)
        elif fault.headers.get("Authorization", "").startswith("Bearer good"):
            fault.send(MANIFEST, **STATED)
        else:
            asked = f'Bearer realm="{realm}",service="s",scope="repository:team/cell:pull"'
            fault.send(b"", 401, "Unauthorized", WWW_Authenticate=asked)

    return registry_answer


def with_tokens(answer):
    server = FaultServer(None)

    def late(fault, number):  # the realm is known once the server runs
        challenging(f"{server.url}/token?x=y", answer)(fault, number)

    server.answer = late
    return server


def test_a_token_is_fetched_and_used(config):
    with with_tokens(lambda fault: fault.send(json.dumps({"token": "good" + SECRET}).encode())) as host:
        assert find_digest(reference(host)) == DIGEST
        asked = next(path for path, _ in host.seen if path.startswith("/token"))
        assert asked == "/token?x=y&service=s&scope=repository%3Ateam%2Fcell%3Apull"


@pytest.mark.parametrize(
    "odd", [v for v in ODD if not isinstance(v, str)] + [{"token": v} for v in ODD if v not in GOOD_TOKENS]
)
def test_a_token_of_another_type(config, odd):
    with (
        with_tokens(lambda fault: fault.send(json.dumps(odd).encode())) as host,
        pytest.raises(HostError, match="token"),
    ):
        find_digest(reference(host))


def test_a_token_that_would_add_a_header(config):
    with (
        with_tokens(lambda fault: fault.send(json.dumps({"token": f"{SECRET}\r\nX: y"}).encode())) as host,
        pytest.raises(HostError, match="holds no token") as caught,
    ):
        find_digest(reference(host))
    assert SECRET not in str(caught.value)


def login(host, config):
    auth = base64.b64encode(f"me:{SECRET}".encode()).decode()
    config({"auths": {host.url.removeprefix("http://"): {"auth": auth}}})
    return f"Basic {auth}"


def test_the_login_goes_to_the_realm_and_no_further(config):
    with FaultServer(lambda fault, number: fault.send(b'{"token": "good"}')) as other:
        with with_tokens(lambda fault: fault.send(b"", 302, "Moved", Location=f"{other.url}/x")) as host:
            basic = login(host, config)
            assert find_digest(reference(host)) == DIGEST
            assert [h.get("Authorization") for p, h in host.seen if p.startswith("/token")] == [basic]
        assert [h.get("Authorization") for _, h in other.seen] == [None]


@pytest.mark.parametrize(
    "realm",
    ["http://192.0.2.1/token", "ftp://h/", "file:///etc/passwd", f"https://u:{SECRET}@h/", "x", "http://127.0.0.1.evil.example/"],
)  # fmt: skip
def test_a_realm_that_gets_no_login(config, realm):
    with FaultServer(challenging(realm, None)) as host:
        login(host, config)
        with pytest.raises(HostError, match="tokens") as caught:
            find_digest(reference(host))
        assert SECRET not in str(caught.value)
        assert len(host.seen) == 1


@pytest.mark.parametrize(
    "header", ["Bearer", "Bearer realm=", "Nonsense x", "", "\x1b[31m", "a" * 60_000, 'Basic realm="r"']
)
def test_a_challenge_that_is_none(config, header):
    with (
        FaultServer(lambda fault, number: fault.send(b"", 401, "No", WWW_Authenticate=header)) as host,
        pytest.raises(HostError) as caught,
    ):
        find_digest(reference(host))
    assert str(caught.value).replace("\n", "").isprintable()


def test_a_registry_s_words_are_escaped(config):
    with (
        FaultServer(lambda fault, number: fault.send(b"", 418, "\x1b[31mred\x07")) as host,
        pytest.raises(HostError, match="answered 418") as caught,
    ):
        find_digest(reference(host))
    assert "\x1b" not in str(caught.value)
    assert "\\x1b[31mred" in str(caught.value)


def test_docker_s_configuration_with_every_part_of_every_wrong_type():
    auth = base64.b64encode(b"me:pw").decode()
    whole = {"auths": {"h": {"auth": auth}}, "credHelpers": {"h": ""}, "credsStore": ""}
    for odd in ODD:
        for value in replaced(whole, odd):
            try:
                helper, stored = registry.read_docker_config(json.dumps(value).encode(), "h")
            except HostError as error:
                assert str(error).replace("\n", "").isprintable()  # noqa: PT017 - any number of them may be read
                continue
            assert helper in {None, "x"}
            assert stored in {None, auth, "9" * 5000}


@pytest.mark.parametrize(
    "value", ["[]", "5", '{"credsStore": "../x"}', '{"credsStore": "a b"}', '{"credsStore": ["x"]}', "{"]
)
def test_docker_s_configuration_that_is_none_is_one_message(config, tmp_path, value):
    config(value)
    with pytest.raises(HostError, match="docker's logins cannot be read") as caught:
        logins.docker_login("h")
    assert caught.value.where == str(tmp_path / "config.json")


def helper(tmp_path, text):
    program = tmp_path / "docker-credential-x"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    "reply", ["", "no JSON", "[]", '{"Username": 5, "Secret": null}', '{"Username": "\\ud800", "Secret": ""}']
)
def test_a_helper_that_gives_no_login(config, tmp_path, reply):
    config({"credsStore": "x"})
    helper(tmp_path, f"cat <<'end'\n{reply}\nend")
    with pytest.raises(HostError, match="gives no login"):
        logins.docker_login("h")


def test_a_helper_s_login(config, tmp_path):
    config({"credHelpers": {"h": "x"}})
    helper(tmp_path, f"""read key; echo '{{"Username": "me", "Secret": "'$key-{SECRET}'"}}'""")
    assert logins.docker_login("h") == "Basic " + base64.b64encode(f"me:h-{SECRET}".encode()).decode()
    helper(tmp_path, "echo credentials not found; exit 1")
    assert logins.docker_login("h") is None


def test_a_helper_has_a_time_limit(config, tmp_path, monkeypatch):
    monkeypatch.setattr(logins, "_HELPER_S", 0.5)
    config({"credsStore": "x"})
    helper(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 60 & wait")
    started = time.monotonic()
    with pytest.raises(HostError, match=r"no answer: it did not end within 0.5 s"):
        logins.docker_login("h")
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("size", [0, 1, 7])
def test_random_bytes_are_one_message(size):
    chance = random.Random(size)
    for _ in range(300):
        body = chance.randbytes(size)
        for read in (registry.read_token, registry.read_helper_answer, read_uploads):
            with pytest.raises(EnvbuildError):
                read(body)

"""Asking a package index: logins, proxies and what is not there."""

import base64
import dataclasses

import pytest
from cell_inputs import inputs_for
from index_server import Index, wheel

from envbuild.errors import HostError
from envbuild.lock.index import files_of
from envbuild.lock.inputs import PythonGroup
from envbuild.lock.make import _Maker
from envbuild.lock.python import resolve
from envbuild.matrix.load import load_matrix
from envbuild.net.download import download
from envbuild.settings import load_settings

DEAD = "http://127.0.0.1:9"


@pytest.fixture
def index():
    made = Index()
    made.add("six", "1.0", wheel("six", "1.0", "py3-none-any"))
    return made


def settings_of(tmp_path, **environ):
    return load_settings(environ={"HOME": str(tmp_path), **environ}, root=tmp_path)


def with_login(url: str) -> str:
    return url.replace("//", "//me%40acme:p%3Aw@")


def test_the_login_of_an_index_is_used_for_its_files_and_stays_out_of_their_urls(index, tmp_path):
    index.login = "Basic " + base64.b64encode(b"me@acme:p:w").decode()
    with index.served() as url:
        (file,) = files_of(settings_of(tmp_path, ENVBUILD_INDEX_URL=with_login(url)), "six")
        assert "p%3Aw" not in file.url
        settings = settings_of(tmp_path, ENVBUILD_INDEX_URL=with_login(url))
        path, digest = download(settings, file.url, file.sha256, tmp_path / "files")
        assert (path.name, digest) == (file.filename, file.sha256)
        with pytest.raises(HostError, match="401"):
            files_of(settings_of(tmp_path, ENVBUILD_INDEX_URL=url), "six")


def test_a_token_alone_is_a_name_without_a_password(index, tmp_path):
    index.login = "Basic " + base64.b64encode(b"token:").decode()
    with index.served() as url:
        assert files_of(settings_of(tmp_path, ENVBUILD_INDEX_URL=url.replace("//", "//token@")), "six")


def test_a_redirect_within_the_host_keeps_the_login(index, tmp_path):
    index.login, index.moved = "Basic " + base64.b64encode(b"me:pw").decode(), "/old"
    with index.served() as url:
        moved = url.replace("//", "//me:pw@").replace("/simple", "/old/simple")
        assert files_of(settings_of(tmp_path, ENVBUILD_INDEX_URL=moved), "six")


def test_a_login_goes_to_its_own_host_alone(index, tmp_path):
    index.login = "Basic " + base64.b64encode(b"me@acme:p:w").decode()
    settings = settings_of(tmp_path, ENVBUILD_INDEX_URL="https://me%40acme:p%3Aw@pypi.example.org/simple")
    with index.served() as url, pytest.raises(HostError, match="401"):
        files_of(settings, "six", index=url)


def test_no_proxy_is_honoured(index, tmp_path):
    with index.served() as url:
        asked = {"ENVBUILD_INDEX_URL": url, "ENVBUILD_HTTP_PROXY": DEAD}
        with pytest.raises(HostError, match="cannot be reached"):
            files_of(settings_of(tmp_path, **asked), "six")
        assert files_of(settings_of(tmp_path, **asked, ENVBUILD_NO_PROXY="pypi.example.org,127.0.0.1"), "six")


def test_an_address_that_is_none_is_one_clear_message(tmp_path):
    with pytest.raises(HostError, match="cannot be reached"):
        files_of(settings_of(tmp_path), "six", index="http://me:x@127.0.0.1:port/simple")


@pytest.mark.parametrize("html", [False, True])
def test_the_login_of_an_index_is_in_no_pylock(index, tmp_path, html):
    index.html = html
    index.login = "Basic " + base64.b64encode(b"me@acme:p:w").decode()
    links = tmp_path / "links"
    links.mkdir()
    info = "linked-2.0.dist-info"
    members = {f"{info}/RECORD": "", f"{info}/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n"}
    name, body = wheel("linked", "2.0", "py3-none-any", members=members)
    (links / name).write_bytes(body)
    with index.served() as url:
        settings = settings_of(tmp_path, ENVBUILD_INDEX_URL=with_login(url), ENVBUILD_FIND_LINKS=str(links))
        group = PythonGroup(name="env", requirements=("six", "linked"))
        text, found = resolve(settings, group, python="3.12", glibc="2.36")
    assert [p.name for p in found.packages] == ["linked", "six"]
    assert found.local_wheels == (name,)
    assert f'path = "wheels/{name}"' in text
    for secret in ("p%3Aw", "p:w", "me%40", str(tmp_path)):
        assert secret not in text


def test_an_environment_is_not_resolved_without_the_torch_that_it_grows_on(index, tmp_path):
    index.add("grows", "1.0", wheel("grows", "1.0", "py3-none-any", requires=["torch"]))
    index.add("torch", "2.15.0", wheel("torch", "2.15.0", "py3-none-any"))
    own = {"cuda": "13.0", "torch": "2.11.0", "te": "none", "apex": "none", "os": "debian12", "base": "debian12-root"}
    groups = (
        PythonGroup(name="torch", requirements=("torch==2.11.0",), index=f"{DEAD}/whl/cu130"),
        PythonGroup(name="env", requirements=("grows",)),
    )
    inputs = dataclasses.replace(inputs_for(**own), python=groups)
    with index.served() as url:
        maker = _Maker(settings_of(tmp_path, ENVBUILD_INDEX_URL=url), load_matrix(), inputs, lambda _: None, 0)
        sets = maker._python(())
    assert [(s.name, s.packages) for s in sets] == [("torch", ()), ("env", ())]
    assert [m.what for m in maker.missing] == ["torch packages: torch==2.11.0", "env packages: grows"]
    assert maker.unreached

"""A file that a lock names by PyPI's address, on a machine that has a mirror, a folder of wheels, or neither."""

import hashlib

import pytest
from index_server import Index, wheel

from envbuild.errors import HostError, LockError
from envbuild.lock.model import FileSource
from envbuild.lock.released import released_file
from envbuild.settings import load_settings

NAME = "uv-0.1-py3-none-any.whl"
PYPI = f"https://files.pythonhosted.org/packages/ab/cd/{NAME}"
NO_NETWORK = {"HTTPS_PROXY": "http://127.0.0.1:9"}


def settings_of(tmp_path, **environ):
    return load_settings(environ={"HOME": str(tmp_path), **NO_NETWORK, **environ}, root=tmp_path)


@pytest.fixture
def content():
    return wheel("uv", "0.1", "py3-none-any")[1]


def source(content: bytes) -> FileSource:
    return FileSource(name="uv", url=PYPI, sha256=hashlib.sha256(content).hexdigest())


@pytest.fixture
def index(content):
    made = Index()
    made.add("uv", "0.1", (NAME, content))
    return made


def test_a_mirror_serves_it(index, content, tmp_path):
    with index.served() as url:
        settings = settings_of(tmp_path, ENVBUILD_INDEX_URL=url)
        assert released_file(settings, source(content), tmp_path / "files").read_bytes() == content


def test_a_mirror_with_other_content_is_refused(index, content, tmp_path):
    with index.served() as url, pytest.raises(LockError, match="is not the file that the lock names"):
        released_file(settings_of(tmp_path, ENVBUILD_INDEX_URL=url), source(b"other"), tmp_path / "files")


def test_a_folder_of_wheels_has_it(content, tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / NAME).write_bytes(content)
    settings = settings_of(tmp_path, ENVBUILD_FIND_LINKS=str(folder))
    assert released_file(settings, source(content), tmp_path / "files").read_bytes() == content
    with pytest.raises(LockError, match="is not the file that the lock names"):
        released_file(settings, source(b"other"), tmp_path / "others")


def test_a_mirror_without_it_leaves_pypi(content, tmp_path):
    with Index().served() as url, pytest.raises(HostError, match=r"files\.pythonhosted\.org|127\.0\.0\.1"):
        released_file(settings_of(tmp_path, ENVBUILD_INDEX_URL=url), source(content), tmp_path / "files")

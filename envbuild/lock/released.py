"""Files of Python releases that a lock names by PyPI's address, from where this machine gets its packages."""

from pathlib import Path
from urllib.parse import urlsplit

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename

from envbuild.errors import EnvbuildError
from envbuild.lock.index import files_of
from envbuild.lock.model import FileSource
from envbuild.lock.python import local_wheel
from envbuild.net.download import download, file_name
from envbuild.settings import Settings

_PYPI = "pypi.org"
_PYPI_FILES = "files.pythonhosted.org"


def released_file(settings: Settings, source: FileSource, folder: Path) -> Path:
    """Return the file of `source`, kept below `folder` by its hash.

    A file on PyPI is taken from a folder of `find_links`, or from the settings' index where that is a mirror. Whatever
    the place, its hash is the lock's.

    Args:
        settings: the index, folders of wheels, logins.
        source: address and hash of the file.
        folder: where downloads are kept.

    Raises:
        HostError: the file cannot be reached.
        LockError: its content is not what the lock names.

    """
    url = source.url
    if urlsplit(url).hostname == _PYPI_FILES:
        name = file_name(url)
        if local := local_wheel(settings, name):
            return download(settings, local.resolve().as_uri(), source.sha256, folder)[0]
        if urlsplit(settings.index_url).hostname != _PYPI:
            url = _mirrored(settings, name) or url
    return download(settings, url, source.sha256, folder)[0]


def _mirrored(settings: Settings, name: str) -> str | None:
    """Return the address of the file `name` in the settings' index; None where it does not list the file."""
    try:
        distribution = parse_wheel_filename(name)[0]
    except InvalidWheelFilename:
        try:
            distribution = parse_sdist_filename(name)[0]
        except InvalidSdistFilename:
            return None
    try:
        listed = files_of(settings, distribution)
    except EnvbuildError:
        return None  # PyPI may answer where the mirror does not
    return next((file.url for file in listed if file.filename == name), None)

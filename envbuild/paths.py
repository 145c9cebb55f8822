"""Where the product's own data is: next to the package in a clone, inside it in a wheel."""

from functools import cache
from pathlib import Path


@cache
def data_dir(name: str) -> Path:
    """Return the folder `name` (dockerfiles, matrices, patches or smoke_tests) of this installation.

    Raises:
        FileNotFoundError: the installation is damaged: neither place has the folder.

    """
    package = Path(__file__).resolve().parent
    for candidate in (package / "_data" / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"envbuild's own {name}/ folder is missing from {package}")

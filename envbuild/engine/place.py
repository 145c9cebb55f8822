"""Whether an argument names an image that is a file or a folder, and of which kind it is.

It imports little: every command that runs an image asks.
"""

import stat
from pathlib import Path
from typing import Literal

Kind = Literal["archive", "layout", "sif", "sandbox"]

_KINDS: dict[str, Kind] = {".sif": "sif", ".tar": "archive"}
_ENDS = (".tar", ".sif", ".sqsh")


def is_path(text: str) -> bool:
    """Whether an argument names a file or a folder, and not an image of the engine.

    A name in the engine starts with no dot, no slash and no tilde, and ends with no slash. One may end with `.tar`,
    `.sif` or `.sqsh`: then the file must be there.
    """
    if text.startswith(("/", "./", "../", "~/")) or text in {".", ".."} or text.endswith("/"):
        return True
    return text.endswith(_ENDS) and Path(text).is_file()


def kind_of(path: Path) -> Kind | None:
    """Return what kind of image lies at `path`; None where it is none, or cannot be looked into."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return _KINDS.get(path.suffix)
        if not stat.S_ISDIR(mode):  # who opens a pipe waits for its writer
            return None
        if (path / "oci-layout").is_file():
            return "layout"
        return "sandbox" if (path / ".singularity.d").is_dir() else None
    except (OSError, ValueError):
        return None


def as_path(text: str) -> str:
    """Return how to name the file or folder that is called like an image; nothing where there is none."""
    try:
        mode = Path(text).stat().st_mode
    except (OSError, ValueError):
        return ""
    folder = stat.S_ISDIR(mode)
    return f"the {'folder' if folder else 'file'} of that name is ./{text}{'/' if folder else ''}; "

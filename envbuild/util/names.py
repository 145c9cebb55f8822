"""Types of names and values that come from outside: a lock, an image, an index, a registry, a tree, a manifest.

Such a value is checked where it is loaded, before it becomes part of a path, an argument of a program or a line of a
script. A model states the types; `checked` is the same for a single value.
"""

import hashlib
import re
import unicodedata
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from envbuild.util.model import AfterValidator, Field
from envbuild.util.patterns import pattern as lazy
from envbuild.util.text import plain

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}"
_FILE_NAME = r"[A-Za-z0-9_][A-Za-z0-9._+!~-]{0,254}"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\])(?::\d{1,5})?"
_URL_PATH = r"(?:/[A-Za-z0-9._~!+@:,=%&;()/-]*)?"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SHOWN_CHARACTERS = 200


def _matching(pattern: str, what: str) -> AfterValidator:
    compiled = lazy(pattern)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(f"{shown(value, 80)!r} is not {what}")
        return value

    return AfterValidator(check)


def _check_tree_path(value: str) -> str:
    parts = value.split("/")
    good = len(value) <= 1024 and all(re.fullmatch(r"[A-Za-z0-9_.+@-]{1,255}", part) for part in parts)
    if not good or value.startswith("-") or any(part in {".", ".."} or part.lower() == ".git" for part in parts):
        raise ValueError(f"{shown(value, 80)!r} is not a path below a folder")
    return value


def _check_line(value: str) -> str:
    if not is_one_line(value):
        raise ValueError(f"{shown(value, 80)!r} holds a line break or a control character")
    return value


SafeName = Annotated[str, _matching(_NAME, "a name of letters, digits and . _ + - that starts with a letter or digit")]
"""One component of a path, of a stage's name, of a cache folder's name. At most 128 characters."""

CellId = Annotated[
    str,
    _matching(
        r"[A-Za-z0-9][A-Za-z0-9._+-]{0,254}",
        "a cell's id of letters, digits and . _ + - that starts with a letter or digit",
    ),
]
"""A cell's id. One with every component has some 160 characters."""

FileName = Annotated[str, _matching(_FILE_NAME, "a file name of letters, digits and . _ + ! ~ -")]
"""The name of a wheel, an sdist, an archive. It holds no slash and does not start with a dot or a dash."""

TreePath = Annotated[str, AfterValidator(_check_tree_path)]
"""A path relative to a source tree, such as a submodule's: no `..`, no `.git`, no leading slash or dash."""

_COMMIT = r"^[0-9a-f]{40}$"
_SHA256 = r"^[0-9a-f]{64}$"
GIT_HTTPS = r"^https://[A-Za-z0-9.-]+(:\d+)?/[A-Za-z0-9_./~+-]+$"
"""The address of a git repository in a stack's file."""
FORMS = {
    _COMMIT: "is not a commit: write all 40 digits of it, not a branch or a tag",
    _SHA256: "is not a sha256: write all 64 digits of it",
    GIT_HTTPS: "is not an https address without a login: write https://HOST/PATH.git, also for a repository that you reach by "
    "ssh, and put a clone of it into the folder of the setting `sources`",
}
"""What is wrong with a value that has not the form of such a pattern."""

Commit = Annotated[str, Field(pattern=_COMMIT)]
"""A git commit or tree, all 40 digits."""

Sha256 = Annotated[str, Field(pattern=_SHA256)]
"""A sha256 in hex."""

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
"""A digest as registries write it."""

SourceUrl = Annotated[
    str,
    _matching(
        rf"https://{_HOST}{_URL_PATH}|ssh://(?:[A-Za-z0-9_][A-Za-z0-9._-]{{0,63}}@)?{_HOST}{_URL_PATH}|file:///[A-Za-z0-9._~+@/-]*",
        "the address of a git repository: https://, ssh:// or file:///",
    ),
]
"""Where a source tree is fetched from. It carries no login but an ssh account. ssh and file need a setting to be fetched."""

FileUrl = Annotated[
    str,
    _matching(
        rf"https?://{_HOST}{_URL_PATH}(?:\?[A-Za-z0-9._~!+@:,=%&;()/-]*)?(?:#[A-Za-z0-9._~!+@:,=%&;()/-]*)?|file:///[A-Za-z0-9._~+@%/-]*",
        "the address of a file: https://, http:// or file:///, without a login",
    ),
]
"""Where a file is downloaded from, or an index is. It carries no login."""

OsPackageName = Annotated[str, _matching(r"[a-z0-9][a-z0-9+.-]{1,127}", "the name of a Debian package")]
"""Debian Policy 5.6.1."""

OsVersion = Annotated[str, _matching(r"[0-9A-Za-z][0-9A-Za-z.+~:-]{0,127}", "the version of a Debian package")]
"""Debian Policy 5.6.12."""

Version = Annotated[str, _matching(r"[0-9A-Za-z][0-9A-Za-z._+!-]{0,127}", "a version")]
"""A version of a distribution, or a release of the matrix."""

ImageReference = Annotated[
    str,
    Field(max_length=400),
    _matching(
        rf"(?:{_HOST}/)?[a-z0-9]+(?:(?:\.|_{{1,2}}|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_{{1,2}}|-+)[a-z0-9]+)*)*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?",
        "the name of an image: registry.example.org/team/image:tag",
    ),
]
"""An image by name and tag, without a digest."""

ArchivePath = Annotated[
    str,
    _matching(
        r"(?:[A-Za-z0-9_+~%:][A-Za-z0-9._+~%:-]{0,254}/){0,16}[A-Za-z0-9_+~%:][A-Za-z0-9._+~%:-]{0,254}",
        "the path of a file below an archive's root",
    ),
]
"""Where a .deb lies below the root of its archive; no part of it starts with a dot."""

StackName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,99}(@[a-z0-9][a-z0-9.-]{0,99})?$")]
"""A stack in a lock: its name, or `NAME@PIN` for another pin of it."""

Line = Annotated[str, Field(max_length=2000), AfterValidator(_check_line)]
"""Text that people read, in one line."""


def is_one_line(text: str) -> bool:
    """Return whether `text` has no line break, no control and no direction-changing character."""
    return text.isprintable() or not any(
        unicodedata.category(c) in {"Cc", "Zl", "Zp", "Cs"}
        or c in "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
        for c in text
    )


def is_digest(value: object) -> bool:
    """Return whether a value is a `Digest`."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def image_tag(name: str) -> str:
    """Return the tag of the image that is called `name`: the name itself where that is a tag.

    A tag holds 128 characters of `[A-Za-z0-9_.-]` (OCI distribution specification, "Pulling manifests"). A longer or another
    name is cut to its first part, and the first 16 digits of the sha256 of all of it keep it apart from others.
    """
    if _TAG.fullmatch(name):
        return name
    end = "-" + hashlib.sha256(name.encode()).hexdigest()[:16]
    head = re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".-_")[: 128 - len(end)].rstrip(".-_")
    return (head or "image") + end


def shown(text: str, limit: int = _SHOWN_CHARACTERS) -> str:
    """Return foreign `text` fit for a terminal: control characters as escapes, at most `limit` characters of it."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


@cache
def _adapter(kind: Any) -> "TypeAdapter[str]":
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def checked(kind: Any, value: object) -> str:
    """Return `value` when it is a string of the type `kind`, such as `FileName`.

    Raises:
        ValueError: it is not; the message says what it should be. (pydantic's ValidationError is one.)

    """
    from pydantic import ValidationError

    try:
        return _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(first["msg"].removeprefix("Value error, ")) from None


def last_text(output: str) -> str:
    """Return the last line with text that a program printed, fit for a terminal and without its colours; empty for none."""
    lines = [line.strip() for line in plain(output).splitlines() if line.strip()]
    return shown(lines[-1]) if lines else ""

"""Read what git prints of a tree: `git ls-tree` and `.gitmodules`. Pure: bytes in, values or an EnvbuildError out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import urlsplit

from envbuild.errors import DataError, LockError
from envbuild.util.names import SourceUrl, TreePath, checked, shown

MODULES_LIMIT = 2**20
"""Bytes that a .gitmodules may have."""
_MOST_FILES = 500_000
_MOST_BYTES = 16 * 2**30
_MOST_LINKS = 500
_ENTRY = re.compile(rb"(\d{6}) (blob|commit) ([0-9a-f]{40}) +(\d{1,18}|-)\t(.+)", re.DOTALL)
# 100664 is of a git before 2005's end, and some histories hold it still
_FILES = {b"100644", b"100755", b"100664", b"120000"}
_SECTION = re.compile(r'\[\s*([A-Za-z0-9.-]+)(?:\s+"((?:[^"\\]|\\.)*)")?\s*\](.*)')
_VARIABLE = re.compile(r"([A-Za-z][A-Za-z0-9-]*)\s*(?:=(.*))?")


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The files of one tree, all folders in it included."""

    links: Mapping[str, str]
    """Path of each submodule -> its commit."""
    modules: str | None
    """Id of the blob of .gitmodules."""
    odd_modes: Mapping[bytes, bytes]
    """Path of each file whose mode git writes no more -> that mode."""
    files: int
    size: int
    """Bytes of all files."""


def read_listing(text: bytes, *, what: str) -> Listing:
    """Read the output of `git ls-tree -r -z -l --full-tree`.

    Args:
        text: the output.
        what: whose tree it is, for a message.

    Raises:
        LockError: it is no such output; a path leads out of the tree, is twice there or is below a file; a submodule's path
            holds more than letters, digits and `. _ + @ -`; there is more than a source tree has.

    """
    links: dict[str, str] = {}
    odd: dict[bytes, bytes] = {}
    modules = None
    files: set[bytes] = set()
    folders: set[bytes] = {b""}
    size = 0

    def bad(problem: str) -> LockError:
        return LockError(
            f"the tree of {shown(what)} cannot be used: {problem}", hint="look at the commit that is pinned"
        )

    if text and not text.endswith(b"\0"):
        raise bad("its listing is cut off")
    for line in text.split(b"\0")[:-1]:
        entry = _ENTRY.fullmatch(line)
        if entry is None:
            raise bad(f"{_named(line)} is not a line of git ls-tree")
        mode, kind, oid, length, path = entry.groups()
        parts = path.split(b"/")
        if len(path) > 4000 or any(p in {b"", b".", b".."} or p.lower() == b".git" or len(p) > 255 for p in parts):
            raise bad(f"{_named(path)} is not a path in a tree")
        above = [b"/".join(parts[:n]) for n in range(len(parts))]
        if path in files or path in folders or any(folder in files for folder in above):
            raise bad(f"{_named(path)} is in the way of another path")
        files.add(path)
        folders.update(above)
        if mode == b"160000" and kind == b"commit":
            try:
                links[checked(TreePath, path.decode("utf-8", "replace"))] = oid.decode()
            except ValueError as error:
                raise bad(f"a submodule's path is odd: {error}") from None
        elif mode not in _FILES or kind != b"blob":
            raise bad(f"{_named(path)} is neither a file, a link nor a submodule")
        if mode == b"100664":
            odd[path] = mode
        if path == b".gitmodules" and mode in _FILES - {b"120000"}:
            modules = oid.decode()
        size += int(length) if length != b"-" else 0
        if len(files) > _MOST_FILES or size > _MOST_BYTES or len(links) > _MOST_LINKS:
            raise bad(f"it has more than {_MOST_FILES} files, {_MOST_BYTES // 2**30} GiB or {_MOST_LINKS} submodules")
    return Listing(
        links=MappingProxyType(links),
        modules=modules,
        odd_modes=MappingProxyType(odd),
        files=len(files),
        size=size,
    )


def _named(name: bytes) -> str:
    return repr(shown(name.decode("utf-8", "backslashreplace"), 80))


def read_gitmodules(text: bytes, *, what: str) -> dict[str, str]:
    """Read a .gitmodules and return the address of each path, as it is written there.

    A section without a path or an address is left out.

    Args:
        text: the file.
        what: whose it is, for a message.

    Raises:
        DataError: it is not in git's syntax or not in UTF-8, too large, or states two things of one submodule or path; a
            path leads out of the tree.

    """

    def bad(problem: str, number: int | None = None) -> DataError:
        where = f".gitmodules of {shown(what)}" + (f", line {number}" if number else "")
        return DataError(f"the .gitmodules cannot be read: {problem}", where=where, hint="ask upstream to correct it")

    if len(text) > MODULES_LIMIT:
        raise bad(f"it has more than {MODULES_LIMIT} bytes")
    try:
        lines = text.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise bad("it is not in UTF-8") from None
    stated: dict[str, dict[str, str]] = {}
    section: dict[str, str] | None = {}  # of another kind than a submodule's
    begun = 0
    while begun < len(lines):
        number = begun + 1
        line = lines[begun].rstrip("\r")
        begun += 1
        joined = [line]
        while _goes_on(joined[-1]) and begun < len(lines):
            joined[-1] = joined[-1][:-1]
            joined.append(lines[begun].rstrip("\r"))
            begun += 1
        line = "".join(joined).strip()
        head = _SECTION.match(line) if line.startswith("[") else None
        if head:
            if head[1].lower() == "submodule" and head[2] is not None:
                section = stated.setdefault(re.sub(r"\\(.)", r"\1", head[2]), {})
            else:
                section = None
            line = head[3].strip()
        if not line or line[0] in "#;":
            continue
        variable = _VARIABLE.fullmatch(line)
        if variable is None:
            raise bad("neither a section nor a key with a value", number)
        value = _value((variable[2] or "").strip())
        if value is None:
            raise bad("a value that does not end", number)
        key = variable[1].lower()
        if section is not None and key in {"path", "url"} and section.setdefault(key, value) != value:
            raise bad(f"two values of {key} for one submodule", number)
    urls: dict[str, str] = {}
    for module in stated.values():
        if "path" not in module or "url" not in module:
            continue
        try:
            path = checked(TreePath, module["path"].rstrip("/"))
        except ValueError as error:
            raise bad(str(error)) from None
        if urls.setdefault(path, module["url"]) != module["url"]:
            raise bad(f"two addresses for {path}")
    return urls


def _goes_on(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _value(text: str) -> str | None:
    """Return a value without its quotes, escapes and comment, or None where it does not end."""
    made: list[str] = []
    kept = 0  # how much of it is no blank at the end
    quoted = False
    characters = iter(text)
    for character in characters:
        if character == "\\":
            following = next(characters, None)
            if following is None or following not in '"\\ntb':
                return None
            made.append({"n": "\n", "t": "\t", "b": "\b"}.get(following, following))
        elif character == '"':
            quoted = not quoted
        elif character in "#;" and not quoted:
            break
        else:
            made.append(character)
            if character.isspace() and not quoted:
                continue
        kept = len(made)
    return None if quoted else "".join(made[:kept])


def submodule_url(parent: str, stated: str, *, what: str) -> str:
    """Return the address of a submodule as `SourceUrl` has it; one that starts with `./` or `../` is from its parent's.

    Raises:
        DataError: it is none, or has more `../` than its parent has folders.

    """
    url = stated
    if stated.startswith(("./", "../")):
        split = urlsplit(parent)
        folders = [part for part in split.path.split("/") if part]
        while stated.startswith(("./", "../")):
            if stated.startswith("../"):
                if not folders:
                    raise DataError(
                        f"the submodule {shown(what)} is at {shown(url, 80)!r}, which is above {shown(parent)}",
                        where=".gitmodules",
                    )
                folders.pop()
            stated = stated.partition("/")[2]
        url = f"{split.scheme}://{split.netloc}/" + "/".join([*folders, stated])
    try:
        return checked(SourceUrl, url)
    except ValueError as error:
        raise DataError(
            f"the submodule {shown(what)} is at an address that is not used: {error}",
            where=".gitmodules",
            hint="put its tree or a clone of it into the folder that the setting `sources` names, and pin an upstream with another address",
        ) from None

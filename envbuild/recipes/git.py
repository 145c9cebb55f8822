"""Source trees: what is cloned, at which ref, and what is built of it."""

import itertools
import posixpath
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from envbuild.recipes.model import Recipe
from envbuild.recipes.reader import Clone, Reader
from envbuild.recipes.syntax import Word

_REPOSITORIES = {
    "megatron-lm": "megatron",
    "transformerengine": "te",
    "apex": "apex",
    "flash-attention": "flash-attn",
    "deepspeed": "deepspeed",
}
# Who has a tree of the same name for other hardware.
_PORTS = {"rocm", "rocmsoftwareplatform", "intel", "habanaai"}
# What git does there is done to a submodule.
_OTHERS_FOLDER = re.compile(
    r"(?:^|/)(?:3rdparty|third[_-]?party|submodules?|external|cutlass|composable_kernel)(?:/|$)"
)
# Separate packages in flash-attention's tree.
_NEXT_TO_FLASH_ATTN = re.compile(r"(?:^|/|=)csrc/\w+")
_TAG = re.compile(r"^(?:core_|core-|release-)?v?(\d+(?:\.\d+)+(?:[.-]?(?:post|rc|a|b)\d+)?)(-\d+|-(?!dev$)[a-z]+\d*)?$")
_COMMIT = re.compile(r"^[0-9a-f]{7,40}$")
_ARCHIVE = re.compile(
    r"https://github\.com/([^/\s]+/[^/\s]+)/archive/((?:refs/tags/)?)(?:refs/heads/)?(\S+?)\.(?:zip|tar\.gz)"
)
_REQUIREMENT = re.compile(
    r"git\+([a-z]{2,10}://(?:[^\s/@#]+@)?[^\s@#]+/[A-Za-z0-9_.-]+?)(?:\.git)?(?:@([^#\s]+))?(?:#\S*)?"
)
_ADDED = re.compile(r"\S+/[A-Za-z0-9_.-]+\.git(?:#([^:\s]*)\S*)?")
_LONGEST_URL = 1000
_MOST_CLONES = 200
_VALUES = {
    *("-b", "--branch", "--revision", "-o", "--origin", "-c", "--config", "--depth", "-j", "--jobs", "--filter"),
    *("--shallow-since", "--shallow-exclude", "--reference", "--reference-if-able", "--separate-git-dir"),
    *("-u", "--upload-pack", "--template", "--server-option", "--bundle-uri"),
}
"""Options of `git clone` whose value is a separate word (git-clone(1))."""


def is_archive(url: str) -> bool:
    """Return whether `url` is an archive that GitHub makes of a ref."""
    return len(url) < _LONGEST_URL and _ARCHIVE.search(url) is not None


def repository(url: str) -> str:
    """Return the name of a repository in small letters, with its owner before it where that has another tree of that name."""
    parts = re.split(r"[/:]", url.rstrip("/").lower().removesuffix(".git"))
    return "/".join(parts[-2:]) if parts[-2:-1] and parts[-2] in _PORTS else parts[-1]


def url_requirement(recipe: Recipe, url: str, line: int) -> None:
    """Read `git+https://…@REF` or an archive of GitHub's."""
    if len(url) > _LONGEST_URL:
        return
    hopper = "subdirectory=hopper" in url
    other = _NEXT_TO_FLASH_ATTN.search(url.partition("#")[2]) is not None
    if archive := _ARCHIVE.search(url):
        source(recipe, repository(archive[1]), archive[2] + archive[3], line, hopper=hopper, other=other)
    found = _REQUIREMENT.fullmatch(url, url.find("git+")) if "git+" in url else None
    if found:
        source(recipe, repository(found[1]), found[2], line, hopper=hopper, other=other)


def source(recipe: Recipe, name: str, ref: str | None, line: int, *, hopper: bool = False, other: bool = False) -> None:
    """Note a source tree of `name` at `ref`: what it pins, or that it pins nothing.

    Args:
        recipe: where it is noted.
        name: the repository's.
        ref: what is checked out of it; None for whatever is there.
        line: where that is stated.
        hopper: whether flash-attention 3 is built of it.
        other: whether another package of flash-attention's tree is.

    """
    named = re.sub(r"^(?:refs/)?tags/", "", ref or "")
    tag, commit = _TAG.match(named), _COMMIT.match(named)
    if "$" in named:
        return
    if ref is None or not (tag or commit or named != ref):
        what = f"{name} at {ref}, a branch that moves" if ref else f"{name} at no commit"
        recipe.note("recipe-unpinned-source", line, what)
        if name == "apex" and ref is None:
            recipe.state("apex", "any", line, newest=True, source=True, installed=True)
        return
    axis = _REPOSITORIES.get(name)
    if axis == "flash-attn" and hopper:
        axis = "flash-attn-hopper"
    if axis and not (other and axis == "flash-attn") and (commit or (tag and not tag[2])):
        recipe.state(axis, tag[1] if tag else named, line, source=True, installed=True)


def finish(reader: Reader) -> None:
    """State what the clones came to, once all is read."""
    recipe = reader.recipe
    for clone in reader.clones:
        recipe.branch, recipe.environment = clone.branch, clone.environment
        if clone.name:
            source(recipe, clone.name, clone.ref, clone.line, hopper=clone.hopper, other=clone.built == {"next to it"})


def add(reader: Reader, places: Sequence[Word]) -> None:
    """Read an ADD of a Dockerfile."""
    for url in places[:-1]:
        if len(url) > _LONGEST_URL:
            continue
        if added := _ADDED.fullmatch(url):
            _cloned(reader, repository(url.partition("#")[0]), url.line, places[-1], added[1] or None)
        elif _ARCHIVE.fullmatch(url):
            url_requirement(reader.recipe, url, url.line)


def read(reader: Reader, words: Sequence[Word]) -> None:
    """Read a git command."""
    first, words = words[0].line, words[1:]
    elsewhere: str | None = None
    while words[:1] and words[0].startswith("-"):
        name, _, value = words[0].partition("=")
        apart = not value and name in {"-C", "-c", "--git-dir", "--work-tree", "--namespace"}
        if name in {"-C", "--git-dir", "--work-tree"}:
            elsewhere = reader.folder_at((value or "".join(words[1:2])).removesuffix("/.git"))
        words = words[2 if apart else 1 :]
    folder = elsewhere or reader.folder
    target = _clone_at(reader, folder) or (None if elsewhere else _clone_unnamed(reader))
    if _OTHERS_FOLDER.search(folder):
        target = None
    plain = [w for w in words[1:] if not w.startswith("-")]
    if words[:1] == ["clone"]:
        _clone(reader, words)
    elif words[:1] == ["init"]:
        _cloned(reader, "", first, plain[0] if plain else ".", None)
    elif words[:2] == ["remote", "add"] and len(plain) > 2 and target and not target.name:
        target.name, target.line = repository(plain[2]), first
    elif words[:1] == ["fetch"] and len(plain) > 1 and target:
        target.fetched = plain[-1].partition(":")[0]
    elif words[:1] in (["checkout"], ["switch"], ["reset"]) and "--" not in words and target:
        if {"-b", "-B", "-c", "-C"} & set(words):  # the new branch's name comes first
            plain = plain[1:]
        if plain and plain[0] not in {"HEAD", "."}:
            target.ref = target.fetched if plain[0] == "FETCH_HEAD" else plain[0]
            target.line = plain[0].line


def _clone(reader: Reader, words: Sequence[Word]) -> None:
    ref = next((words[i + 1] for i, w in enumerate(words[:-1]) if w in {"-b", "--branch", "--revision"}), None)
    joined = next((w.partition("=")[2] for w in words if re.match(r"--(?:branch|revision)=", w)), None)
    places = [w for last, w in itertools.pairwise(words) if not w.startswith("-") and last not in _VALUES]
    at = next((n for n, w in enumerate(places) if "/" in w and ":" in w), None)
    if at is not None:
        url = places[at]
        base = posixpath.basename(url.rstrip("/")).removesuffix(".git")
        place = places[at + 1] if at + 1 < len(places) else base
        _cloned(reader, repository(url), url.line, place, ref or joined)


def _cloned(reader: Reader, name: str, line: int, place: str, ref: str | None) -> None:
    folder = posixpath.basename(reader.folder_at(place))
    recipe = reader.recipe
    if len(reader.clones) >= _MOST_CLONES:
        recipe.effort.skip(line, name)
        return
    reader.clones.append(
        Clone(
            name,
            line,
            folder or name,
            reader.folder,
            ref,
            branch=recipe.branch,
            environment=recipe.environment,
        )
    )


def enter(reader: Reader, folder: str) -> None:
    """Make `folder` the current one."""
    reader.before, reader.folder = reader.folder, folder
    hopper(reader, folder)


def _clone_unnamed(reader: Reader) -> Clone | None:
    """Return the clone that git works on in a folder that has no clone's name, as far as that can be known."""
    if not reader.clones:
        return None
    last, name = reader.clones[-1], posixpath.basename(reader.folder)
    if posixpath.normpath(reader.folder) == posixpath.normpath(last.made_in) or re.search(r"[$`*?\[]", name):
        return last
    unpinned = [clone for clone in reader.clones if clone.ref is None]  # moved, or copied from another stage
    return unpinned[0] if len(unpinned) == 1 else None


def _clone_at(reader: Reader, place: str) -> Clone | None:
    """Return the innermost clone that `place` lies in, by the names of the folders: where they lie is not followed."""
    for part in reversed(place.split("/")[-20:]):
        for clone in reversed(reader.clones):
            if fnmatchcase(clone.folder, part):
                return clone
    return None


def built(reader: Reader, place: str) -> None:
    """Take it that a package is built in the folder `place`."""
    if clone := _clone_at(reader, place):
        clone.built.add("next to it" if _NEXT_TO_FLASH_ATTN.search(place) else "it")


def hopper(reader: Reader, place: str) -> None:
    """Take it that flash-attention 3 is built when `place` is its folder."""
    if posixpath.basename(place.rstrip("/")) == "hopper":
        inside = _clone_at(reader, place)
        for clone in [inside] if inside else reader.clones:
            clone.hopper = clone.hopper or clone.name == "flash-attention"

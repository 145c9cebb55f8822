"""What a constraint on an axis matches: PEP 440 for versions, names and globs (`ngc-*`, `!ngc-*`), prefixes for commits."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING

from envbuild.errors import UsageError
from envbuild.matrix.model import Axis, Release, Spec
from envbuild.util.names import is_one_line, shown
from envbuild.util.patterns import pattern

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

_COMMIT = pattern(r"^[0-9a-f]{7,40}$")
_BARE = pattern(r"^\d[\w.]*$")
_PREFIX = pattern(r"^\d+(\.\d+)*$")


# Far more than a version or a specifier has, and fewer digits than Python makes a number of.
LONGEST_SPEC = 1000
_KEPT = 50_000  # a matrix has some thousand versions; a recipe may state any number


@lru_cache(_KEPT)
def version_key(version: str) -> "Version | None":
    """Return `version` as a PEP 440 version, or None for a name such as `cpu`."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version) if len(version) <= LONGEST_SPEC else None
    except InvalidVersion:
        return None


@lru_cache(_KEPT)
def specifiers(text: str) -> "SpecifierSet":
    """Return `text` as PEP 440 specifiers; a bare version is a prefix. Raises InvalidSpecifier."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    if not text:
        raise InvalidSpecifier("an empty text is not a specifier")  # packaging takes it for every version
    if len(text) > LONGEST_SPEC:
        raise InvalidSpecifier(f"a specifier of {len(text)} characters")
    if _BARE.match(text):
        # "12.6" is the prefix 12.6.*, so that 2.1 does not match 2.10. 2.6.0.post1 begins no other version.
        text = f"=={text}.*" if _PREFIX.match(text) else f"=={text}"
    return SpecifierSet(text, prereleases=True)


@lru_cache(_KEPT)
def public_version(version: str) -> "Version | None":
    """Return `version` without its local label, or None for a name."""
    from packaging.version import Version

    parsed = version_key(version)
    return Version(parsed.public) if parsed is not None and parsed.local else parsed


def is_commit(text: str) -> bool:
    """Return whether `text` is read as the beginning of a commit where a release has one."""
    return bool(_COMMIT.match(text))


def _matches_one(axis: Axis, text: str, release: Release) -> bool:
    if text == "any" or text in names_of(release):
        return True
    if release.commit is not None and _COMMIT.match(text):
        return release.commit.startswith(text)
    if axis.scheme == "name":
        wanted, pattern = not text.startswith("!"), text.removeprefix("!")
        return wanted == any(fnmatchcase(name, pattern) for name in (release.version, *release.aliases))
    version = public_version(release.version)
    if version is None or "+" in text:
        return False
    from packaging.specifiers import InvalidSpecifier

    try:
        return any(specifiers(part.strip()).contains(version) for part in text.split("||"))
    except InvalidSpecifier:  # a name, such as `cpu` on the axis cuda; `check_spec` refuses what is nothing at all
        return False


def names_of(release: Release) -> tuple[str, ...]:
    """Return what a release is called: its version, its aliases, and its version on PyPI where that is another."""
    on_pypi = getattr(release.facts, "pypi", None)
    other = (on_pypi,) if on_pypi not in {None, release.version, *release.aliases} else ()
    return (release.version, *release.aliases, *other)


def matches(axis: Axis, spec: Spec, release: Release) -> bool:
    """Return whether `release` satisfies `spec` on `axis`.

    A local version label (`2.8.0+cu126`) is matched by its public version, or exactly when the spec spells the label.
    """
    if isinstance(spec, str):
        return _matches_one(axis, spec, release)
    return any(_matches_one(axis, text, release) for text in spec)


def check_text(axis: str, text: str, origin: str = "") -> None:
    """Raise UsageError when `text`, which `origin` asks for on `axis`, can be no constraint on any axis."""
    if len(text) <= LONGEST_SPEC and is_one_line(text):
        return
    problem = "is too long for a version" if len(text) > LONGEST_SPEC else "holds a line break or a control character"
    raise UsageError(
        f"{shown(text, 60)!r} {problem}",
        where=origin or f"--{axis}",
        hint=f"write a version or a listed name; `envbuild matrix {axis}` lists them",
    )


def check_spec(axis: Axis, text: str, origin: str = "", listed: Iterable[Release] = ()) -> None:
    """Raise UsageError when `text`, which `origin` asks for, cannot be read as a constraint on `axis`.

    Args:
        axis: the axis.
        text: what is asked for.
        origin: where it stands, for the message; the axis' flag where it is empty.
        listed: the releases of the axis; the message takes its examples from them.

    """
    check_text(axis.name, text, origin)
    if axis.scheme == "name" or "+" in text or _COMMIT.match(text):
        return
    from packaging.specifiers import InvalidSpecifier
    from packaging.version import InvalidVersion

    for part in text.split("||"):
        try:
            specifiers(part.strip())
        except (InvalidSpecifier, InvalidVersion):
            newest = (
                f"`--{axis.name} auto --prefer newest` takes the newest that fits; "
                if text in {"latest", "newest"}
                else ""
            )
            raise UsageError(
                f"{text!r} is not a version and not a PEP 440 specifier",
                where=origin or f"--{axis.name}",
                hint=f"{newest}write a version{_example(axis, listed)} or a listed name; `envbuild matrix {axis.name}` lists them",
            ) from None


def _example(axis: Axis, listed: Iterable[Release]) -> str:
    """Return examples of a version and a specifier that exist on the axis, and the words around them."""
    numbers = sorted({v.release[:2] for each in listed if (v := version_key(each.version)) is not None})
    if not numbers:
        return ", a PEP 440 specifier (>=X,<Y)"
    low, high = (".".join(map(str, number)) for number in (numbers[max(-3, -len(numbers))], numbers[-1]))
    upper = f",<{high}" if low != high else ""
    return f' (--{axis.name} {low}), a specifier (--{axis.name} ">={low}{upper}")'

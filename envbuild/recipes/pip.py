"""Python requirements: those of `pip install` and `uv pip install`, and what one requirement states."""

import itertools
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from envbuild.components import AXIS_OF_DISTRIBUTION
from envbuild.recipes import git, wheels
from envbuild.recipes.catalog import companions
from envbuild.recipes.model import IMAGE, Recipe
from envbuild.recipes.reader import Reader
from envbuild.recipes.syntax import Word, line_of

_PIP = re.compile(r"(?:.*/)?pip[\d.]*", re.DOTALL)
_PYTHON = re.compile(r"(?:.*/)?(?:python|pip)(\d\.\d+)", re.DOTALL)
_LONGEST = 1000
"""Characters of a requirement that is read."""

_INDEX_URL = {"-i", "--index-url", "--index", "--default-index"}
_INDEX_OPTIONS = {*_INDEX_URL, "-f", "--extra-index-url", "--find-links"}
# Those of `pip install` and `uv pip install`, as their --help lists them, but for -e, whose value is a requirement.
_TAKES_VALUE = {
    *_INDEX_OPTIONS, "-C", "-P", "-b", "-c", "-p", "-r", "-t", "-w",
    "--abi", "--allow-insecure-host", "--build-constraint", "--build-constraints", "--build-option", "--cache-dir", "--cert",
    "--client-cert", "--color", "--config-file", "--config-setting", "--config-settings", "--config-settings-package",
    "--constraint", "--constraints", "--directory", "--exclude-newer", "--exclude-newer-package", "--excludes",
    "--exists-action", "--extra", "--fork-strategy", "--global-option", "--group", "--implementation", "--index-strategy",
    "--install-option", "--keyring-provider", "--link-mode", "--log", "--no-binary", "--no-build-isolation-package",
    "--no-build-package", "--no-editable-package", "--no-sources-package", "--only-binary", "--output-format", "--override",
    "--overrides", "--platform", "--prefix", "--prerelease", "--prerelease-package", "--progress-bar", "--project", "--proxy",
    "--python", "--python-platform", "--python-version", "--refresh-package", "--reinstall-package", "--report",
    "--requirement", "--requirements", "--resolution", "--retries", "--root", "--root-user-action", "--src", "--target",
    "--timeout", "--torch-backend", "--trusted-host", "--upgrade-group", "--upgrade-package", "--upgrade-strategy",
    "--use-deprecated", "--use-feature", "--wheel-dir",
}  # fmt: skip
_RENEWS = re.compile(r"-[a-zA-Z]*[UI][a-zA-Z]*|--upgrade|--force-reinstall|--reinstall|--ignore-installed")
_RENEWS_ONE = {"-P", "--upgrade-package", "--reinstall-package"}
_ELSEWHERE = {"-t", "--target", "--prefix", "--root", "-p", "--python"}
_TORCH_INDEX = re.compile(r"https://download\.pytorch\.org/whl(?:/(?:cu\d+|cpu|nightly|test|torch_stable\.html).*)?/?")


def read_command(reader: Reader, words: Sequence[Word], own: Mapping[str, str]) -> bool:
    """Read a call of pip; return whether it is one."""
    place = next((n for n, word in enumerate(words) if _PIP.fullmatch(word)), None)
    if place is None:
        return False
    rest = list(itertools.dropwhile(lambda each: each.startswith("-"), words[place + 1 :]))
    if not rest or rest[0] not in {"install", "wheel", "uninstall"}:
        return False
    recipe = reader.recipe
    environment = recipe.environment
    recipe.environment = _environment(reader, words, rest)
    if rest[0] == "wheel":  # lies in a folder: another of the same may lie next to it
        recipe.environment = f"{recipe.environment} wheels of line {words[0].line}"
    if rest[0] == "uninstall":
        _uninstall(reader, rest[1:])
    else:
        read(recipe, rest[1:], _indexes_of({**reader.stage.environment, **reader.exported, **own}, rest), reader=reader)
        for word in rest[1:]:
            if "/" in word and len(word) < _LONGEST:
                git.hopper(reader, posixpath.join(reader.folder, word))
            if re.match(r"\.|/|[\w-]+/", word):
                git.built(reader, posixpath.join(reader.folder, word))
    recipe.environment = environment
    return True


def _environment(reader: Reader, words: Sequence[str], rest: Sequence[str]) -> str:
    """Return the environment that a call of pip installs into."""
    elsewhere = next((value for word, value in itertools.pairwise(rest) if word in _ELSEWHERE), "")
    joined = (w.partition("=")[2] for w in rest if w.startswith(("--target=", "--prefix=", "--python=", "--root=")))
    if elsewhere := elsewhere or next(joined, ""):
        return elsewhere
    if version := _PYTHON.fullmatch(words[0]):
        return f"python{version[1]}"
    folder = posixpath.dirname(words[0])
    searched = reader.values.get("PATH", "").split(":")
    private = "env" in folder and "$" not in folder and folder not in searched and reader.recipe.environment == ""
    return posixpath.dirname(folder) if private else reader.recipe.environment


def _uninstall(reader: Reader, words: Sequence[str]) -> None:
    axes = {AXIS_OF_DISTRIBUTION.get(canonicalize_name(word)) for word in words if len(word) < _LONGEST}
    axes |= {"cuda"} if "torch" in axes else set()
    reader.drop({axis for axis in axes if axis}, environment=True)
    if "torch" in axes:  # what is in an NGC image goes, too
        for found in list(reader.recipe.before("base", reader.stage.line)):
            reader.recipe.drop(found)


def _indexes_of(environment: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Return the indexes that the environment names to `pip install`, where its own options do not say otherwise."""
    options = {word.partition("=")[0] for word in words}
    found = "" if options & _INDEX_URL else environment.get("PIP_INDEX_URL", "")
    extra = "" if "--extra-index-url" in options else environment.get("PIP_EXTRA_INDEX_URL", "")
    return [*found.split(), *extra.split()]


def indexes(words: Sequence[str]) -> list[str]:
    """Return the indexes that pip's options name."""
    found = []
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        option, equals, value = word.partition("=")
        value = (value if equals else following).strip("'\"")
        if option in _INDEX_OPTIONS:
            found.append(value)
        elif option == "--torch-backend" and re.fullmatch(r"cu\d+|cpu", value):
            found.append(f"https://download.pytorch.org/whl/{value}")
    return found


def read(
    recipe: Recipe, words: Sequence[Word], given: Sequence[str], *, reader: Reader | None = None, marker: str = ""
) -> None:
    """Read the arguments of a `pip install`; `given` are indexes from elsewhere, `marker` is that of a wheel's URL."""
    names: list[Word] = []
    used = [*given, *indexes(words)]
    words = [word for word in words if word]
    renewed = set[str]()
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        recipe.effort.spend(1)
        if word.startswith("-"):
            option, equals, value = word.partition("=")
            if option in _RENEWS_ONE:
                renewed.add(canonicalize_name(value if equals else "".join(words[place : place + 1])))
            place += word in _TAKES_VALUE
        elif len(word) > _LONGEST:
            recipe.effort.skip(word.line, word)
        elif "git+" in word or git.is_archive(word) or (word == "@" and place < len(words)):
            url = words[place] if word == "@" else word
            place += word == "@"
            if word == "@" and names:
                names.pop()
            if url.partition("#")[0].endswith(".whl"):
                wheels.state(recipe, url.partition("#")[0], url.line, marker=marker)
            else:
                git.url_requirement(recipe, url, url.line)
        elif word.partition("#")[0].endswith(".whl"):
            wheels.state(recipe, word.partition("#")[0], word.line, marker=marker)
        elif not re.match(r"[./]|https?:", word):
            names.append(word)
    every = any(map(_RENEWS.fullmatch, words))
    own_index = any(w.partition("=")[0] in _INDEX_URL for w in words) or any(
        index and not _TORCH_INDEX.fullmatch(index) for index in used
    )
    found = [each for each in (_parsed(recipe, name) for name in names) if each]
    free = is_free(wanted for wanted, _ in found)
    for wanted, line in found:
        recipe.effort.spend(1)
        state(
            recipe,
            wanted,
            line,
            used,
            renewed=None if every else renewed,
            own_index=own_index,
            newest=free,
            reader=reader,
        )


_LEAVE_TORCH = {
    "torch",
    "torchvision",
    "torchaudio",
    "numpy",
    "pip",
    "setuptools",
    "wheel",
    "packaging",
    "ninja",
    "cmake",
    "pybind11",
    "six",
    "regex",
}


def is_free(wanted: Iterable[Requirement]) -> bool:
    """Return whether nothing else that is wanted decides which torch comes: then it is the newest."""
    return all(
        each.name.lower() in _LEAVE_TORCH
        and (each.name == "torch" or not each.specifier or each.name not in companions())
        for each in wanted
    )


def _parsed(recipe: Recipe, text: str) -> tuple[Requirement, int] | None:
    line = line_of(text, 1)
    recipe.effort.spend(1)
    try:
        # a marker itself ends in a quote
        return Requirement(re.sub(r"""^(['"])(.*?)\1?$""", r"\2", text)), line
    except InvalidRequirement:
        if re.match(r"['\"]?[A-Za-z]", text) and re.search(r"[=<>~]", text):
            recipe.effort.skip(line, text)
        return None


def state(
    recipe: Recipe,
    wanted: Requirement,
    line: int,
    used: Sequence[str],
    *,
    renewed: Collection[str] | None = (),
    own_index: bool = False,
    newest: bool = True,
    reader: Reader | None = None,
) -> None:
    """State what a requirement says.

    Args:
        recipe: where it is stated.
        wanted: the requirement.
        line: its line.
        used: the indexes that it may come from.
        renewed: what is installed again where it is there already; None for all.
        own_index: whether it may come from an index that is neither PyPI nor torch's.
        newest: whether one without a version is the newest: nothing else in the command decides it.
        reader: where the reading of a script stands; None in a list of requirements.

    """
    marker = str(wanted.marker or "")
    name = canonicalize_name(wanted.name)
    if wanted.url:
        if wanted.url.partition("#")[0].endswith(".whl"):
            wheels.state(recipe, wanted.url.partition("#")[0], line, marker=marker)
        else:
            git.url_requirement(recipe, wanted.url, line)
        return
    if not own_index:
        recipe.packages.append((name, line))
    stage = recipe.stage(line)
    if stage and name.startswith(("cuda-toolkit", "nvidia-cuda-nvcc")):
        stage.toolkit = True
    spec = str(wanted.specifier)
    exact = re.fullmatch(r"===?([^,*]+)", spec)
    version = exact[1].strip() if exact else ""
    begins = re.fullmatch(r"==(\d+\.\d+(?:\.\d+)?)\.\*", spec)
    variants = {match[1] for match in (re.search(r"/(cu\d+|cpu)/?$", index) for index in used) if match}
    label = variants.pop() if len(variants) == 1 else ""
    again = reader if renewed is None or name in renewed else None
    if name in companions():
        if again:
            again.renew(companions()[name].axis, line, of=name)
        if version or begins:
            state_companion(recipe, name, version or (begins[1] if begins else ""), line, marker=marker)
        if version:
            _cuda(recipe, version.partition("+")[2] or label, line, marker)
        return
    if re.fullmatch(r"nvidia-cudnn-cu\d+", name):
        if version:
            recipe.state("cudnn", version, line, marker=marker, installed=True, of=name)
        return
    axis = AXIS_OF_DISTRIBUTION.get(name)
    if axis is None:
        return
    if not spec and not (renewed is None or name in renewed) and reader and reader.is_there(axis, line):
        return
    if not spec:
        recipe.note("recipe-unpinned-package", line, f"{name} without a version")
        # a function or an arm of a script may well find a torch
        newest = newest and (recipe.kind != "shell" or not recipe.branch)
        if newest and axis == "torch" and not any(_TORCH_INDEX.fullmatch(i) or "$" in i for i in used):
            _replace_image(recipe, line, reader)
            recipe.state("torch", "any", line, newest=True, marker=marker, installed=True)
    else:
        if again:
            again.renew(axis, line)
        if axis == "torch":
            _replace_image(recipe, line, reader)
        recipe.state(axis, version or spec, line, marker=marker, installed=True)
    if axis == "torch" and not spec.endswith(f"+{label}"):
        _cuda(recipe, label, line, marker)


def _replace_image(recipe: Recipe, line: int, reader: Reader | None) -> None:
    """Drop the torch of an image: pip puts another in its place."""
    if reader:
        for found in [s for axis in ("torch", "cuda") for s in recipe.before(axis, line) if s.of == IMAGE]:
            recipe.drop(found)


_BUILT_BY_PYTORCH = re.compile(r"cu\d+|cpu|xpu|rocm[\d.]+|git[0-9a-f]+")
"""What PyTorch's own builds have behind the `+` of their version."""


def state_companion(recipe: Recipe, name: str, version: str, line: int, *, marker: str = "") -> None:
    """State what `version` of a package says of the axis that it goes with."""
    companion = companions()[name]
    if (label := version.partition("+")[2]) and not _BUILT_BY_PYTORCH.fullmatch(label):
        return  # a maker of other chips pairs them in another way
    minor = companion.releases.get(".".join(version.partition("+")[0].split(".")[:2]))
    if minor:
        recipe.state(companion.axis, minor, line, marker=marker, installed=True, of=name)


def _cuda(recipe: Recipe, label: str, line: int, marker: str) -> None:
    if found := re.fullmatch(r"cu(\d{2,3})|cpu", label):
        cuda = f"{found[1][:-1]}.{found[1][-1]}" if found[1] else "cpu"
        recipe.state("cuda", cuda, line, marker=marker, installed=True)

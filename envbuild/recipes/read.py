"""Reading a recipe: what a Dockerfile, a requirements file, a shell script or a TOML of axes states, line by line."""

import bisect
import itertools
import json
import posixpath
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Literal

import tomli
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from envbuild.errors import DataError
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.matrix.packages import AXIS_OF_DISTRIBUTION
from envbuild.recipes import habits
from envbuild.recipes.files import read_text

Kind = Literal["dockerfile", "requirements", "shell", "toml"]


Branch = tuple[tuple[str, str], ...]
"""The choices that a line stands in and the arm of each: of an if, a case, `||`, or the conda environments."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One release that a line states of an axis; `path` when it is only named by a search path."""

    axis: AxisName
    spec: str
    line: int
    text: str
    path: bool = False
    newest: bool = False
    """No version is named, so it is whatever is newest on the day."""
    marker: str = ""
    """The environment marker of a requirement: where it is false, nothing is stated."""
    plain: bool = False
    """The OS of an image without a CUDA toolkit: no base of the matrix need be it."""
    source: bool = False
    """Built from a source tree: what PyPI's wheels need is not asked of it."""
    installed: bool = False
    """Installed by the recipe's own pip or conda, or built, and so gone when they remove it."""
    module: bool = False
    """Loaded by a site's `module load`."""
    branch: Branch = ()

    def may_hold_beside(self, branch: Branch) -> bool:
        """Return whether no choice that both stand in went another way for this one than for what stands in `branch`."""
        return may_hold_beside(self.branch, branch)


def may_hold_beside(one: Branch, other: Branch) -> bool:
    """Return whether what stands in one place may hold beside what stands in another: no choice went both ways."""
    arms = dict(other)
    return all(arms.get(choice, arm) == arm for choice, arm in one)


@dataclass(frozen=True, kw_only=True)
class Noted:
    """A line that is wrong by itself, and the kind of finding that it is."""

    rule: str
    line: int
    what: str


@dataclass(eq=False)
class Stage:
    """A stage of a Dockerfile and what is known of its image."""

    line: int
    base: "Stage | None" = None
    """The stage that FROM names."""
    toolkit: bool | None = None
    """Whether the image holds a CUDA toolkit; None where the recipe does not say."""
    workdir: str = ""
    compat: str = ""
    """The CUDA, major.minor, whose cuda-compat the image brings."""
    environment: dict[str, str] = field(default_factory=dict)
    """The variables that ENV and ARG set."""

    def chain(self) -> "list[Stage]":
        """Return the stage and those that it is built on: what is stated in one of them holds in it."""
        stages, stage = list[Stage](), self
        while stage not in stages:
            stages.append(stage)
            stage = stage.base or stage
        return stages


@dataclass(eq=False)
class Command:
    """A line with those that it goes on over, without comments."""

    parts: list[tuple[int, str]]
    """The number and the text of each line of it."""
    script: bool = False
    """Whether it is a line of a script that RUN was handed in a here-document."""
    comment: bool = False

    @property
    def line(self) -> int:
        """The number of its first line."""
        return self.parts[0][0]

    @cached_property
    def text(self) -> str:
        """The whole of it."""
        return "".join(text for _, text in self.parts)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *itertools.accumulate(len(text) for _, text in self.parts[:-1])]

    def line_of(self, text: str) -> int | None:
        """Return the line on which `text` stands as a word or the part of one between other signs; None where on none."""
        place = self.text.find(text) if text else -1
        while place >= 0:
            around = self.text[max(place - 1, 0) : place], self.text[place + len(text) : place + len(text) + 1]
            joins = [re.match(r"[\w-]{2}", pair) for pair in (around[0] + text[0], text[-1] + around[1])]
            if not any(joins):
                return self.parts[bisect.bisect_right(self._starts, place) - 1][0]
            place = self.text.find(text, place + 1)
        return None


@dataclass
class Recipe:
    """What a recipe states."""

    kind: Kind
    lines: list[str]
    statements: dict[Statement, None] = field(default_factory=dict)
    """In the order in which they were read."""
    noted: list[Noted] = field(default_factory=list)
    variables: list[tuple[str, str, int]] = field(default_factory=list)
    """Environment variables: name, value, line."""
    packages: list[tuple[str, int]] = field(default_factory=list)
    """Python distributions that come from an index, by normalised name, and their lines."""
    stages: list[Stage] = field(default_factory=list)
    commands: dict[int, Command] = field(default_factory=dict)
    """What is read, by its first line: no comment, and no stage that the last one does not need."""
    branch: Branch = ()
    """Where the reading stands."""
    environment: str = ""
    """The conda environment that the reading stands in."""

    def stage(self, line: int) -> Stage | None:
        """Return the stage that `line` belongs to; None for what stands before the first, and holds in all."""
        place = bisect.bisect_right(self.stages, line, key=lambda stage: stage.line)
        return self.stages[place - 1] if place else None

    @property
    def within(self) -> Branch:
        """Where the reading stands, and in which conda environment: what an install there is part of."""
        return (*self.branch, ("environment", self.environment))

    @cached_property
    def text(self) -> str:
        """All that is read, once the reading is done."""
        return "\n".join(command.text for command in self.commands.values())

    def before(self, axis: AxisName, line: int) -> list[Statement]:
        """Return what is stated of `axis` so far, in the stage of `line` or what that is built on."""
        stage = self.stage(line)
        chain = [*(stage.chain() if stage else ()), None]
        return [
            s
            for s in self.statements
            if s.axis == axis and self.stage(s.line) in chain and s.may_hold_beside(self.within)
        ]

    def state(
        self,
        axis: AxisName,
        spec: str,
        line: int,
        *,
        path: bool = False,
        newest: bool = False,
        marker: str = "",
        plain: bool = False,
        source: bool = False,
        installed: bool = False,
        module: bool = False,
    ) -> None:
        """Add a statement, once per line."""
        if len(spec) > _LONGEST_VERSION or _TOO_MANY_DIGITS.search(spec):
            return
        found = Statement(
            axis=axis,
            spec=spec,
            line=line,
            text=self.lines[line - 1].strip(),
            path=path,
            newest=newest,
            marker=marker,
            plain=plain,
            source=source,
            installed=installed,
            module=module,
            branch=self.within if installed else self.branch,
        )
        self.statements[found] = None

    def note(self, rule: str, line: int, what: str) -> None:
        """Add a finding that needs no matrix."""
        self.noted.append(Noted(rule=rule, line=line, what=what))


_LONGEST_VERSION = 200
"""Characters. `>=2.1,!=2.1.1,<3` has fifteen; a longer one is no version that anything has."""

_TOO_MANY_DIGITS = re.compile(r"\d{19}")  # a date and a time have 14; int() refuses 4,301
_MOST_COMMANDS = 10_000
_DEEPEST = 20
"""How deep here-documents that shells are fed may stand in one another."""
_LONGEST_VALUE = 1 << 16
"""Characters that a text may have once variables are put in. Where it has more, they stay as they are written."""

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
# Packages of their own in flash-attention's tree.
_BESIDE_FLASH_ATTN = re.compile(r"(?:^|/|=)csrc/\w+")
_TAG = re.compile(r"^(?:core_|core-|release-)?v?(\d+(?:\.\d+)+(?:[.-]?(?:post|rc|a|b)\d+)?)(-\d+|-(?!dev$)[a-z]+\d*)?$")
_COMMIT = re.compile(r"^[0-9a-f]{7,40}$")
_CUDA_FOLDER = re.compile(r"\bcuda-(\d+(?:\.\d+)?)(?![\w-])")
_SEARCHED = re.compile(
    r"PATH|LD_LIBRARY_PATH|LIBRARY_PATH|CPATH|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|CUDA_HOME|CUDA_PATH|CUDACXX|\w+_ROOT"
)
_CUDA_MODULE = re.compile(
    r"(?:\S*/)?cuda(?:toolkit(?:-standalone)?)?[/-](\d+(?:\.\d+){0,2})(?![\d.])\S*", re.IGNORECASE
)
# Where a login shell takes its variables from.
_LOGIN_FILE = re.compile(r">\s*\S*(?:bashrc|profile|/etc/environment|/etc/profile\.d/[^\s'\"]+)['\"]?$")
_ARCHIVE = re.compile(
    r"https://github\.com/([^/\s]+/[^/\s]+)/archive/((?:refs/tags/)?)(?:refs/heads/)?(\S+?)\.(?:zip|tar\.gz)"
)
_GIT_ADDED = re.compile(r"\S+/[A-Za-z0-9_.-]+\.git(?:#([^:\s]*)\S*)?")
_ASSIGNMENT = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)
_TOOLKIT_PACKAGE = re.compile(
    r"^(?:nvidia-cuda-toolkit|cuda(?:-(?:toolkit|nvcc|compiler|minimal-build|libraries-dev))?(?:-(\d+)(?:-(\d+))?)?)$"
)
_RPM_VERSION = re.compile(r"(?:-\d+\.[\w.+~^]*-\d[\w.+~^]*?)?(?:\.(?:x86_64|aarch64|noarch))?$")
"""What may follow a package's name on dnf's command line: `-VERSION-RELEASE`, `.ARCH`."""
_CLONE_VALUES = {
    *("-b", "--branch", "--revision", "-o", "--origin", "-c", "--config", "--depth", "-j", "--jobs", "--filter"),
    *("--shallow-since", "--shallow-exclude", "--reference", "--reference-if-able", "--separate-git-dir"),
    *("-u", "--upload-pack", "--template", "--server-option", "--bundle-uri"),
}
"""Options of `git clone` whose value is a word of its own (git-clone(1))."""
_CONDA_LABEL = re.compile(r"\bnvidia/label/cuda-(\d+\.\d+(?:\.\d+)?)")
"""A channel of NVIDIA's that holds one release of the toolkit."""
_TOOLKIT_INSTALLER = re.compile(r"(?:\S*/)?cuda_(\d+\.\d+\.\d+)_[\d.]+_linux\w*\.run")
_SHELL = re.compile(r"(?:.*/)?(?:ba|da|z)?sh")
_TOOLKIT_FOLDER = re.compile(r"(?:^|/)cuda(?:-[\d.]+)?(?:/|$)")
_ITEM = re.compile(
    r"(?P<what>CUDA(?: Toolkit)?|nvcc|(?:NVIDIA )?driver|Python|PyTorch|torch|Transformer Engine|TE|DeepSpeed|gcc|cuDNN)"
    r"(?:\s*(?P<op>>=)\s*|[ =:]+)v?(?P<version>\d+(?:\.\d+)*)(?P<open>\.x)?(?P<least> or (?:newer|later|higher|above)|\+)?",
    re.IGNORECASE,
)
_SAID = {
    "cuda": "cuda",
    "cuda toolkit": "nvcc",
    "nvcc": "nvcc",
    "driver": "driver",
    "nvidia driver": "driver",
    "python": "python",
    "pytorch": "torch",
    "torch": "torch",
    "transformer engine": "te",
    "te": "te",
    "deepspeed": "deepspeed",
    "gcc": "gcc",
    "cudnn": "cudnn",
}


def read_recipe(matrix: Matrix, path: Path) -> Recipe:
    """Read the recipe at `path`; its name and its first lines say of which kind it is.

    Raises:
        DataError: it cannot be read, or is no text.

    """
    text = read_text(path)
    recipe = Recipe(kind=_kind(path, text), lines=text.removesuffix("\n").split("\n"))
    if recipe.kind == "toml":
        recipe.commands = {number: Command([(number, line)]) for number, line in enumerate(recipe.lines, 1)}
        _read_toml(matrix, recipe, path, text)
    elif recipe.kind == "requirements":
        lines = [re.sub(r"(^|\s)#.*$", "", line) for line in recipe.lines]
        recipe.commands = {command.line: command for command in _continued(enumerate(lines, 1))}
        options = [command.text for command in recipe.commands.values() if command.text.lstrip().startswith("-")]
        indexes = [index for line in options for index in _indexes(line.split())]
        for command in recipe.commands.values():
            _requirements_line(recipe, command.text, command.line, indexes)
    else:
        _Script(matrix, recipe).read()
    return recipe


def _kind(path: Path, text: str) -> Kind:
    name, suffix = path.name.lower(), path.suffix.lower()
    if suffix == ".toml":
        return "toml"
    if suffix in {".sh", ".bash"} or text.startswith("#!"):
        return "shell"
    if name.startswith(("dockerfile", "containerfile")) or suffix in {".dockerfile", ".containerfile"}:
        return "dockerfile"
    if suffix == ".in" or (suffix == ".txt" and ("requirements" in name or _requirements_alone(text))):
        return "requirements"
    # ARG alone may stand before it
    first = r"\A(?:[ \t]*(?:(?:#|ARG[ \t]).*)?\n)*[ \t]*FROM[ \t]+(?:--\S+[ \t]+)*\S+(?:[ \t]+AS[ \t]+\S+)?[ \t]*$"
    return "dockerfile" if re.search(first, text, re.MULTILINE | re.IGNORECASE) else "shell"


def _requirements_alone(text: str) -> bool:
    """Return whether every line is a requirement, an option of pip, or a comment."""
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)(^|\s)#.*$", "", text))
    lines = [re.split(r"\s--", line)[0].strip() for line in joined.splitlines() if line.strip()]
    return bool(lines) and all(map(_is_requirement, lines))


def _is_requirement(text: str) -> bool:
    if re.match(r"^(?:-[A-Za-z]\b|--[a-z-]+(?:[= ]|$)|git\+|https?://|\.{0,2}/\S+$)", text) or not text:
        return True
    try:
        Requirement(text)
    except InvalidRequirement:
        return False
    return True


def _read_toml(matrix: Matrix, recipe: Recipe, path: Path, text: str) -> None:
    try:
        data = tomli.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        raise DataError(f"the recipe is no TOML: {error}", where=str(path)) from error
    beside = ("environment", "python") if isinstance(data.get("python"), list) else ("environment",)
    if "stated" in data and "repository" in data:
        from envbuild.stacks import load_stack

        name, table = "stated", dict[str, object](load_stack(str(path)).axes)
    elif "axes" in data:
        name, table = "axes", data["axes"]
    else:
        name, table = "", {key: value for key, value in data.items() if key not in beside}
    for key, content in ((name, table), ("environment", data.get("environment", {}))):
        if not isinstance(content, dict):
            raise DataError(f"{key} is no table", where=str(path), hint=f"write [{key}], and a name and a text a line")
    for axis, spec in table.items():
        if axis in matrix.axes and not isinstance(spec, str):
            raise DataError(
                f"the version of {axis} is not in quotes",
                where=str(path),
                hint=f'write {axis} = "…", with the version between the quotes',
            )
        if axis not in matrix.axes or not isinstance(spec, str):
            raise DataError(
                f"{axis} is no axis",
                where=str(path),
                hint="axes: " + ", ".join(sorted(matrix.axes)),
            )
        recipe.state(axis, spec, _toml_line(recipe, name, axis))
    for variable, value in data.get("environment", {}).items():
        _variable(matrix, recipe, variable, str(value), _toml_line(recipe, "environment", variable))
    first = _toml_line(recipe, "", "python")
    for wanted in data["python"] if "python" in beside else ():
        quoted = re.compile(rf"""["']{re.escape(str(wanted))}["']""")
        line = next((n for n, text in enumerate(recipe.lines, 1) if n >= first and quoted.search(text)), first)
        _requirements_line(recipe, str(wanted), line, [])


def _toml_line(recipe: Recipe, table: str, key: str) -> int:
    """Return the line of `key` in `table`; another table may have a key of the same name."""
    named = rf"""["']?{re.escape(key)}["']?\s*="""
    pattern, inside = re.compile(rf"^\s*{named}"), ""
    dotted = re.compile(rf"""^\s*["']?{re.escape(table)}["']?\s*(?:\.\s*|=\s*\{{(?:.*[,\s{{])?){named}""")
    for number, text in enumerate(recipe.lines, 1):
        if header := re.match(r"^\s*\[+\s*([^\[\]]+?)\s*\]+\s*(?:#.*)?$", text):
            inside = header[1]
        elif (inside == table and pattern.match(text)) or (table and not inside and dotted.match(text)):
            return number
    return 1


def _variable(matrix: Matrix, recipe: Recipe, name: str, value: str, line: int) -> None:
    recipe.variables.append((name, value, line))
    for version in dict.fromkeys(_CUDA_FOLDER.findall(value) if _SEARCHED.fullmatch(name) else ()):
        recipe.state("nvcc", version, line, path=True)
    if name in {"TORCH_CUDA_ARCH_LIST", "NVTE_CUDA_ARCHS"}:
        archs = [a for a in re.split(r"[;, ]+", value.strip("'\"")) if a]
        digits = re.sub(r"\D", "", archs[0]) if len(archs) == 1 else ""
        if digits and matrix.has("gpu", f"sm_{digits}"):
            recipe.state("gpu", f"sm_{digits}", line)


def _requirements_line(recipe: Recipe, text: str, line: int, indexes: list[str]) -> None:
    """Read one line of a requirements file: a requirement may hold blanks, so it is tried whole before its words are."""
    text = text.strip()
    whole = re.split(r"\s-", text)[0].strip()  # hashes and options follow
    try:
        by_name = Requirement(whole).url is None
    except InvalidRequirement:
        by_name = False
    if by_name:
        _requirement(recipe, whole, line, indexes)
    else:
        _pip(recipe, text.split(), line, indexes)


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


def _indexes(words: list[str]) -> list[str]:
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


def _pip(recipe: Recipe, words: list[str], line: int, given: list[str]) -> None:
    """Read the arguments of a `pip install`, or one line of a requirements file; `given` are indexes from elsewhere."""
    names: list[str] = []
    indexes = [*given, *_indexes(words)]
    words = [word for word in words if word]
    renewed = set[str]()
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word.startswith("-"):
            option, equals, value = word.partition("=")
            if option in _RENEWS_ONE:
                renewed.add(canonicalize_name(value if equals else "".join(words[place : place + 1])))
            place += word in _TAKES_VALUE
        elif "git+" in word or _ARCHIVE.search(word) or (word == "@" and place < len(words)):
            url = words[place] if word == "@" else word
            place += word == "@"
            _url_requirement(recipe, url, _line_of(recipe, url, line))
            if word == "@" and names:
                names.pop()
        elif not re.match(r"^[./]|^https?:|\.whl$", word):
            names.append(word)
    every = any(map(_RENEWS.fullmatch, words))
    for name in names:
        _requirement(recipe, name, _line_of(recipe, name, line), indexes, renewed=None if every else renewed)


def _repository(url: str) -> str:
    """Return the name of a repository in small letters, with its owner before it where that has another tree of that name."""
    parts = re.split(r"[/:]", url.rstrip("/").lower().removesuffix(".git"))
    return "/".join(parts[-2:]) if parts[-2:-1] and parts[-2] in _PORTS else parts[-1]


def _url_requirement(recipe: Recipe, url: str, line: int) -> None:
    hopper = "subdirectory=hopper" in url
    beside = _BESIDE_FLASH_ATTN.search(url.partition("#")[2]) is not None
    if archive := _ARCHIVE.search(url):
        _source(recipe, _repository(archive[1]), archive[2] + archive[3], line, hopper=hopper, beside=beside)
    found = re.search(
        r"git\+([a-z]+://(?:[^\s/@#]+@)?[^\s@#]+/[A-Za-z0-9_.-]+?)(?:\.git)?(?:@([^#\s]+))?(?:#\S*)?$", url
    )
    if found:
        _source(recipe, _repository(found[1]), found[2], line, hopper=hopper, beside=beside)


def _source(
    recipe: Recipe, name: str, ref: str | None, line: int, *, hopper: bool = False, beside: bool = False
) -> None:
    """Note a source tree of `name` at `ref`: what it pins, or that it pins nothing.

    Args:
        recipe: where it is noted.
        name: the repository's.
        ref: what is checked out of it; None for whatever is there.
        line: where that is said.
        hopper: whether flash-attention 3 is built of it.
        beside: whether another package of flash-attention's tree is.

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
    if axis and not (beside and axis == "flash-attn") and (commit or (tag and not tag[2])):
        recipe.state(axis, tag[1] if tag else named, line, source=True, installed=True)


def _requirement(
    recipe: Recipe, text: str, line: int, indexes: list[str], *, renewed: Collection[str] | None = ()
) -> None:
    """Read one requirement; those of `renewed`, all where it is None, are installed anew where they are there already."""
    try:
        wanted = Requirement(re.sub(r"""^(['"])(.*?)\1?$""", r"\2", text))  # a marker ends in a quote of its own
    except InvalidRequirement:
        return
    if wanted.url:
        return
    marker = str(wanted.marker or "")
    name = canonicalize_name(wanted.name)
    recipe.packages.append((name, line))
    stage = recipe.stage(line)
    if stage and name.startswith(("cuda-toolkit", "nvidia-cuda-nvcc")):
        stage.toolkit = True
    axis = AXIS_OF_DISTRIBUTION.get(name)
    if axis is None:
        return
    spec = str(wanted.specifier)
    if not spec and not (renewed is None or name in renewed) and _is_there(recipe, axis, line):
        return
    if not spec:
        recipe.note("recipe-unpinned-package", line, f"{name} without a version")
        if axis == "torch" and not any("download.pytorch.org" in index for index in indexes):
            recipe.state("torch", "any", line, newest=True, marker=marker, installed=True)
    else:
        exact = re.fullmatch(r"===?([^,*]+)", spec)
        recipe.state(axis, exact[1].strip() if exact else spec, line, marker=marker, installed=True)
    variants = {match[1] for match in (re.search(r"/(cu\d+|cpu)/?$", index) for index in indexes) if match}
    if axis == "torch" and len(variants) == 1 and not spec.endswith(f"+{(variant := variants.pop())}"):
        cuda = "cpu" if variant == "cpu" else f"{variant[2:-1]}.{variant[-1]}"
        recipe.state("cuda", cuda, line, marker=marker, installed=True)


def _is_there(recipe: Recipe, axis: AxisName, line: int) -> bool:
    """Return whether something of `axis` is installed before `line`, which pip leaves as it is."""
    of_image = axis == "torch" and any(s.spec.startswith("ngc-") for s in recipe.before("base", line))
    return of_image or any(s.installed and not s.newest for s in recipe.before(axis, line))


def _line_of(recipe: Recipe, text: str, first: int) -> int:
    """Return the line of `text` in the command that begins at line `first`."""
    command = recipe.commands.get(first)
    return (command and command.line_of(text)) or first


def _continued(lines: Iterable[tuple[int, str]]) -> Iterator[Command]:
    """Yield lines with those that a backslash carries them on over; a comment between them is dropped, as docker does."""
    parts = list[tuple[int, str]]()
    for number, line in lines:
        if line.lstrip().startswith("#"):
            if not parts:
                yield Command([(number, line)], comment=True)
            continue
        goes_on = line.rstrip().endswith("\\")
        parts.append((number, f"{line.rstrip()[:-1]} " if goes_on else line))
        if not goes_on:
            yield Command(parts)
            parts = []
    if parts:
        yield Command(parts)


def _without_flags(text: str) -> str:
    return re.sub(r"^(?:--\S+\s+)*", "", text)


# A word of a shell's line with its quotes, and one that begins a here-document: `<<EOF`, `<<-'EOF'`, not `<<<text`.
_QUOTED = re.compile(r"""'[^']*'|"[^"\\]*(?:\\.[^"\\]*)*"|\\.""", re.DOTALL)
_QUOTED_WORD = re.compile(rf"""(?:{_QUOTED.pattern}|[^\s'"\\]+)+""", re.DOTALL)
_HERE_DOCUMENT = re.compile(r"\d*<<-?(['\"]?)([A-Za-z_]\w*)\1")


def _expanded(text: str, values: Mapping[str, str]) -> str:
    """Return `text` with the variables that `values` has put in, or their defaults; any other stays as it is written."""
    pattern = r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))"

    left = _LONGEST_VALUE

    def put_in(match: re.Match[str]) -> str:
        nonlocal left
        value = values.get(match[1] or match[3])
        if match[2] is not None:
            value = value or match[2]
        left -= len(value or "")
        return match[0] if value is None or left < 0 else value

    return re.sub(pattern, put_in, text)


# What parts a shell's lines: quotes, comments and here-documents keep what is within them. A quote goes on over lines where it
# begins a word alone, since a guide's prose has apostrophes.
_SHELL_TOKEN = re.compile(
    r"""
      (?P<on>\\[ \t]*\n(?:[ \t]*\#[^\n]*\n)*)
    | (?P<quoted>'[^'\n]*'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"|(?<!\w)(?:'[^']*'|"[^"\\]*(?:\\.[^"\\]*)*"))
    | (?P<comment>(?<![^\s;&|()])\#[^\n]*)
    | (?P<here>(?<!<)<<-?[ \t]*(?P<quote>['"]?)(?P<end>[A-Za-z_]\w*)(?P=quote))
    | (?P<newline>\n)
    | (?P<operator>&&|\|\||;;&?|;&?|\||(?<![<>&])&(?!\S))
    | \\.
    | [^\\'"\#<;&|\n]+
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
# A command that a shell is: what it is fed is its script.
_SHELL_ALONE = re.compile(r"(?:.*\|\s*)?(?:sudo\s+(?:-\S+\s+)*)?(?:/\S+/)?(?:ba|da|z)?sh(?:\s+-\S*)*\s*", re.DOTALL)


def _is_script(command: str) -> bool:
    """Return whether what `command` is fed in a here-document is read as a shell's lines, now or at the next login."""
    return bool(_SHELL_ALONE.fullmatch(command.strip()) or _LOGIN_FILE.search(command.strip()))


def _uncommented(command: Command) -> Command:
    """Return a command of one line for the shell without the comment that ends it."""
    comment = next((token for token in _SHELL_TOKEN.finditer(command.text) if token["comment"]), None)
    left, parts = comment.start() if comment else len(command.text), []
    for number, text in command.parts:
        parts.append((number, text[: max(left, 0)]))
        left -= len(text)
    return Command(parts)


def _shell_lines(lines: Sequence[str], first: int = 1, depth: int = 0) -> Iterator[Command]:
    """Yield the lines of a shell script, each with what it goes on over; a here-document is read where a shell is fed it."""
    text, place, number = "\n".join(lines), 0, first
    parts, piece, ends = list[tuple[int, str]](), list[str](), list[str]()
    while place < len(text) or piece or parts:
        token = _SHELL_TOKEN.match(text, place)
        kind, said = (token.lastgroup, token[0]) if token else ("newline", "")
        place += len(said)
        if kind == "comment":
            if not parts and not "".join(piece).strip():
                yield Command([(number, said)], comment=True)
        elif kind == "on":
            parts.append((number, f"{''.join(piece)} "))
            number, piece = number + said.count("\n"), []
        elif kind == "quoted":
            *over, last = said.split("\n")
            for each in over:
                parts.append((number, f"{''.join(piece)}{each}\n"))
                number, piece = number + 1, []
            piece.append(last)
        elif kind == "newline":
            parts.append((number, "".join(piece)))
            number, piece = number + 1, []
            if not ends and token and parts[-1][1].rstrip().endswith(("&&", "|")):
                continue
            command, parts = Command(parts), []
            if command.text.strip():
                yield command
            for end in ends:
                body = list(itertools.takewhile(lambda line: line.strip() != end, text[place:].split("\n")))  # noqa: B023
                if depth < _DEEPEST and _is_script(command.text):
                    yield from _shell_lines(body, number, depth + 1)
                number += len(body) + 1
                place += sum(len(line) + 1 for line in body)
                place = (text.find("\n", place) + 1) or len(text)
            ends = []
        elif kind == "here" and token and re.search(rf"(?m)^\s*{token['end']}\s*$", text[place:]):
            ends.append(token["end"])
        else:
            piece.append(said)


def _commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a shell's line, each with what stands before it: `;`, `&&`, `||`, ...; comments are left out."""
    operator, piece = ";", list[str]()
    for token in _SHELL_TOKEN.finditer(text):
        if token["operator"] or token["newline"]:
            yield operator, "".join(piece)
            ends = token["newline"] or token["operator"] == "&"
            operator, piece = ";" if ends else token["operator"], []
        elif not token["comment"]:
            piece.append(" " if token["on"] else token[0])
    yield operator, "".join(piece)


def _pip_arguments(words: list[str], *commands: str) -> list[str] | None:
    """Return what pip is given, where it is called with one of `commands`."""
    for place, word in enumerate(words):
        if re.fullmatch(r"(?:.*/)?pip[\d.]*", word):
            rest = list(itertools.dropwhile(lambda each: each.startswith("-"), words[place + 1 :]))
            return rest[1:] if rest and rest[0] in commands else None
    return None


def _pip_indexes(environment: Mapping[str, str], words: list[str]) -> list[str]:
    """Return the indexes that the environment names to `pip install`, where its own options do not say otherwise."""
    options = {word.partition("=")[0] for word in words}
    found = "" if options & _INDEX_URL else environment.get("PIP_INDEX_URL", "")
    extra = "" if "--extra-index-url" in options else environment.get("PIP_EXTRA_INDEX_URL", "")
    return [*found.split(), *extra.split()]


def _here_documents(text: str) -> tuple[list[str], bool]:
    """Return the words that end an instruction's here-documents, and whether these are shell scripts of RUN."""
    word, _, rest = text.strip().partition(" ")
    if word.upper() not in {"RUN", "COPY", "ADD"}:
        return [], False
    words = _QUOTED_WORD.findall(_without_flags(rest.strip()))
    ends = [match[2] for match in map(_HERE_DOCUMENT.fullmatch, words) if match]
    command = " ".join(each for each in words if not _HERE_DOCUMENT.fullmatch(each))
    return ends, word.upper() == "RUN" and (not command or _is_script(command))


def _needed(commands: Iterable[Command]) -> Iterator[Command]:
    """Yield a Dockerfile's instructions but for the stages that its last one does not need: BuildKit leaves those out."""
    stages: list[list[Command]] = [[]]
    given: dict[str, str] = {}  # what ARG before the first FROM gives a name of a stage
    for command in commands:
        text = command.text.strip()
        if re.match(r"FROM\s", text, re.IGNORECASE) and not command.script:
            stages.append([])
        stages[-1].append(command)
        if len(stages) == 1 and (match := re.match(r"ARG\s+([A-Za-z_]\w*)=(\S+)", text, re.IGNORECASE)):
            given[match[1]] = match[2].strip("'\"")
    named: dict[str, int] = {}
    uses: list[set[int]] = []
    for place, stage in enumerate(stages):
        texts = [_expanded(command.text.strip(), given) for command in stage]
        asked = {name.lower() for text in texts for name in re.findall(r"\bfrom=([\w.${}:-]+)", text)}
        first = re.match(r"FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?", texts[0] if texts else "", re.IGNORECASE)
        asked |= {first[1].lower()} if first else set()
        # whoever gives a name on the command line may mean any stage
        uses.append(
            {named[name] for name in asked if name in named}
            | (set(range(place)) if any("$" in n for n in asked) else set())
        )
        if first:
            named[str(place - 1)] = place  # stages have numbers, too
            named.update({first[2].lower(): place} if first[2] else {})
    wanted, open_ends = {0}, [len(stages) - 1]
    while open_ends:
        place = open_ends.pop()
        wanted.add(place)
        open_ends += uses[place] - wanted
    for place in sorted(wanted):
        yield from stages[place]


@dataclass
class _Clone:
    name: str
    line: int
    folder: str
    """The last part of its path."""
    made_in: str
    """The folder that was the current one."""
    ref: str | None = None
    fetched: str | None = None
    hopper: bool = False
    built: set[str] = field(default_factory=set)
    """What is built of it: its own package, or one beside that."""
    branch: Branch = ()
    environment: str = ""


# What `module` or `ml` is told; any other word is a module's name to `ml`.
_MODULES = {
    **dict.fromkeys(("load", "add"), "load"),
    **dict.fromkeys(("unload", "rm", "del", "delete"), "unload"),
    **dict.fromkeys(("swap", "switch"), "swap"),
    **dict.fromkeys(("purge", "reset"), "purge"),
    **dict.fromkeys(("avail", "help", "list", "restore", "save", "show", "spider", "use", "whatis"), ""),
}
_KEYWORDS = {"if", "then", "elif", "else", "fi", "case", "esac", "do", "while", "until", "time", "!", "{", "}"}


@dataclass(eq=False)
class _Choice:
    """An if, a case or a list of commands with `||`: of what its arms state, one holds."""

    number: int
    word: str
    before: dict[str, str]
    """The variables as they were before it."""
    arm: int = 0
    opens: bool = True
    """Whether a pattern of case comes next."""
    changed: set[str] = field(default_factory=set)
    """The variables that its arms set."""

    def turn(self, values: dict[str, str]) -> None:
        """Go on to the next arm, where `values` are again what they were before the first."""
        self.arm, self.opens = self.arm + 1, True
        if self.word != "list":
            self.changed |= {name for name, value in values.items() if self.before.get(name) != value}
            values.clear()
            values.update(self.before)


class _Script:
    """A Dockerfile or a shell script, read from top to bottom."""

    def __init__(self, matrix: Matrix, recipe: Recipe) -> None:
        self.matrix = matrix
        self.recipe = recipe
        self.values: dict[str, str] = {}
        self.given: dict[str, str] = {}
        """What ARG before the first FROM sets."""
        self.choices: list[_Choice] = []
        self.numbers = itertools.count()
        self.clones: list[_Clone] = []
        self.stage = Stage(line=0)
        self.named: dict[str, Stage] = {}
        self.folder = ""
        self.before = ""
        self.pushed: list[str] = []
        self.exported: dict[str, str] = {}

    def read(self) -> None:
        docker = self.recipe.kind == "dockerfile"
        whole = list(_needed(self._instructions()) if docker else _shell_lines(self.recipe.lines))
        self.recipe.commands = {command.line: command for command in whole if not command.comment}
        if len(whole) > _MOST_COMMANDS:
            raise DataError(f"the recipe has more than {_MOST_COMMANDS} commands", hint="check its parts one by one")
        for command in whole:
            text = command.text.strip()
            if command.comment:
                self._comment(text, command.line)
            elif docker and not command.script:
                self._instruction(text, command.line)
            else:
                self._shell(text, command.line)
        for clone in self.clones:
            self.recipe.branch, self.recipe.environment = clone.branch, clone.environment
            if clone.name:
                beside = clone.built == {"beside"}
                _source(self.recipe, clone.name, clone.ref, clone.line, hopper=clone.hopper, beside=beside)

    def _instructions(self) -> Iterator[Command]:
        """Yield a Dockerfile's instructions, and the lines of the scripts that RUN is handed in here-documents."""
        last = {line.strip(): number for number, line in enumerate(self.recipe.lines, 1)}
        lines = enumerate(self.recipe.lines, 1)
        for command in _continued(lines):
            ends, script = ([], False) if command.comment else _here_documents(command.text)
            run = re.match(r"\s*RUN\s+(?!\[)", command.text, re.IGNORECASE)
            yield _uncommented(command) if run else command
            for end in ends:
                if last.get(end, 0) > command.parts[-1][0]:
                    body = list(itertools.takewhile(lambda line: line[1].strip() != end, lines))  # noqa: B023
                    for inner in _shell_lines([text for _, text in body], body[0][0]) if script and body else ():
                        yield replace(inner, script=True)

    def _comment(self, text: str, line: int) -> None:
        """Read a comment that lists versions and says nothing else: `# CUDA 12.4 or newer, Python 3.10`."""
        said = re.sub(r"^#+\s*|[.\s]+$", "", text)
        said = re.sub(
            r"^(?:needs|requires|requirements|assumes|tested (?:on|with)|prerequisites|host)\b:?\s*",
            "",
            said,
            flags=re.IGNORECASE,
        )
        items = [re.sub(r"^with ", "", item.strip()) for item in re.split(r",|;|\band\b", said) if item.strip()]
        found = [_ITEM.fullmatch(item) for item in items]
        for match in found if items and all(found) else ():
            if match:
                axis = _SAID[match["what"].lower()]
                version = match["version"]
                if axis in {"cuda", "python"}:  # the matrix has them by major.minor
                    version = ".".join(version.split(".")[:2])
                self.recipe.state(axis, f">={version}" if match["least"] or match["op"] else version, line)

    def _instruction(self, text: str, line: int) -> None:
        word, rest = [*text.split(maxsplit=1), "", ""][:2]
        word, rest = word.upper(), _without_flags(rest)
        self.exported, self.choices = {}, []
        if word == "FROM":
            self._from(_expanded(rest, self.given).split(), line)
        elif word in {"ENV", "ARG"}:
            self._assign(rest, line, environment=word == "ENV")
        elif word == "WORKDIR":
            self.folder = self.stage.workdir
            self._cd(self._expand(rest.strip("'\"")))
            self.stage.workdir = self.folder
        elif word in {"ADD", "COPY"}:
            self.folder = self.stage.workdir
            places = self._expand(rest)
            listed = _exec_form(rest) or _words(rest)
            for rule, place in habits.in_copy(listed):
                self.recipe.note(rule, _line_of(self.recipe, listed[place], line), "")
            if word == "ADD":
                self._add(places, line)
            if any(_TOOLKIT_FOLDER.search(place) for place in places.split()) and self.stage.toolkit is False:
                self.stage.toolkit = None
        elif word == "RUN":
            self.folder = self.stage.workdir
            self._run(rest, line)

    def _run(self, text: str, line: int) -> None:
        words = _exec_form(text)
        if words is not None:
            self._command(shlex.join(words), line)
        else:
            self._shell(text, line)

    def _add(self, text: str, line: int) -> None:
        words = text.split()
        for url in words[:-1]:
            number = _line_of(self.recipe, url, line)
            if added := _GIT_ADDED.fullmatch(url):
                self._cloned(_repository(url.partition("#")[0]), number, words[-1], added[1] or None)
            elif _ARCHIVE.fullmatch(url):
                _url_requirement(self.recipe, url, number)

    def _from(self, words: list[str], line: int) -> None:
        image = words[0].partition("@")[0] if words else ""  # a digest says nothing that the tag does not
        base = self.named.get(image.lower())
        self.stage = (
            Stage(line, base, base.toolkit, base.workdir, base.compat, {**base.environment}) if base else Stage(line)
        )
        self.recipe.stages.append(self.stage)
        self.values = {**self.stage.environment}
        if len(words) > 2 and words[1].upper() == "AS":
            self.named[words[2].lower()] = self.stage
        if base is None:
            self._image(image, line)

    def _image(self, image: str, line: int) -> None:
        name, _, tag = image.rpartition(":") if ":" in image.rsplit("/", 1)[-1] else (image, "", "")
        name = name.removeprefix("docker.io/").removeprefix("library/")
        if name in {"nvidia/cuda", "nvcr.io/nvidia/cuda"}:
            flavor = re.search(r"-(base|runtime|devel)(?:-|$)", tag)
            self.stage.toolkit = flavor[1] == "devel" if flavor else None
            os = re.search(r"ubuntu(\d+\.\d+)", tag)
            if os:
                self.recipe.state("os", f"ubuntu{os[1]}", line, plain=not self.stage.toolkit)
            version = re.match(r"(\d+\.\d+)(?:\.\d+)?", tag)
            self.stage.compat = version[1] if version else ""
            if version and self.stage.toolkit:
                self.recipe.state("nvcc", version[0], line)
        elif name == "nvcr.io/nvidia/pytorch":
            self.stage.toolkit = True
            self.recipe.state("base", "ngc-" + tag.removesuffix("-py3"), line)
        elif name == "python" and (version := re.match(r"\d+\.\d+", tag)):
            self.recipe.state("python", version[0], line)
        elif name in {"ubuntu", "debian"} and tag:
            suite = tag.removesuffix("-slim")
            release = suite.split(".")[0] if name == "debian" else suite
            self.recipe.state("os", suite if suite.isalpha() else f"{name}{release}", line, plain=True)

    def _expand(self, text: str) -> str:
        return _expanded(text, self.values)

    def _assign(self, text: str, line: int, *, environment: bool) -> None:
        words = _words(text)
        if words and "=" not in words[0] and len(words) > 1:  # ENV NAME value
            words = [f"{words[0]}={' '.join(words[1:])}"]
        for word in words:
            match = _ASSIGNMENT.match(word)
            if match is None and (environment or word not in self.given):
                continue
            # what stands before FROM holds where it is named again
            name, value = (match[1], self._expand(match[2])) if match else (word, self.given[word])
            self.values[name] = value
            (self.stage.environment if self.recipe.stages else self.given)[name] = value
            if environment:
                _variable(self.matrix, self.recipe, name, value, _line_of(self.recipe, f"{name}=", line))

    def _shell(self, text: str, line: int) -> None:
        parts = list(_commands(text))
        for place, (operator, part) in enumerate(parts):
            if operator.startswith(";"):
                self._end("list")
            if (operator == "||" and self._inside("list")) or (operator.startswith(";;") and self._inside("case")):
                self.choices[-1].turn(self.values)
            command = self._without_keywords(part).strip("()").strip()
            if operator.startswith(";"):
                following = (parts[n][0] for n in range(place + 1, len(parts)))
                if "||" in itertools.takewhile(lambda each: not each.startswith(";"), following):
                    self._begin("list")
            command = self._expand(command)
            if command:
                self.recipe.branch = tuple(
                    (str(choice.number), str(choice.arm)) for choice in self.choices if choice.word != "shell"
                )
                self._command(command, line)
        self._end("list")
        self.recipe.branch = ()

    def _nested(self, text: str, line: int) -> None:
        """Read a line that a command of another is given: the choices of both are their own."""
        outside = len(self.choices)
        self._begin("shell")
        self._shell(text, line)
        del self.choices[outside:]

    def _begin(self, word: str) -> None:
        self.choices.append(_Choice(next(self.numbers), word, {**self.values}))

    def _inside(self, word: str) -> bool:
        return bool(self.choices) and self.choices[-1].word == word

    def _end(self, word: str) -> None:
        if self._inside(word):
            choice = self.choices.pop()
            choice.turn(self.values)
            if word != "list":  # which way it goes is not known, nor then what it sets
                for name in choice.changed:
                    self.values.pop(name, None)

    def _without_keywords(self, part: str) -> str:
        """Return what is left of a command without the words that make a choice, which are heeded."""
        while True:
            part = part.strip()
            word = re.match(r"[a-z!{}]*(?=\s|$)", part)
            if (
                self._inside("case")
                and self.choices[-1].opens
                and (pattern := re.match(r"(?!esac\b)\(?[^()]*\)", part))
            ):
                part, self.choices[-1].opens = part[pattern.end() :], False
                continue
            if word is None or word[0] not in _KEYWORDS:
                return part
            part = part[word.end() :]
            if word[0] == "if":
                self._begin("if")
            elif word[0] == "case":
                self._begin("case")
                part = re.sub(r"^.*?\sin(?=\s|$)", "", part, count=1, flags=re.DOTALL)
            elif word[0] in {"then", "elif", "else"} and self._inside("if"):
                self.choices[-1].turn(self.values)
            elif word[0] in {"fi", "esac"}:
                self._end("if" if word[0] == "fi" else "case")

    def _command(self, command: str, line: int) -> None:
        words = _words(command, redirected=True)
        own: dict[str, str] = {}
        while words and (words[0] in {"export", "sudo", "set"} or _ASSIGNMENT.match(words[0])):
            match = _ASSIGNMENT.match(words[0])
            if match:
                exported = command.lstrip().startswith("export ")
                self.values[match[1]] = match[2]
                (self.exported if exported else own)[match[1]] = match[2]
                if exported or len(words) > 1 or match[1].isupper():
                    _variable(self.matrix, self.recipe, match[1], match[2], _line_of(self.recipe, f"{match[1]}=", line))
            sudo, words = words[0] == "sudo", words[1:]
            while sudo and words and words[0].startswith("-"):
                words = words[2 if words[0] in {"-u", "-g", "-h", "-p"} else 1 :]
        if not words:
            return
        for rule, number in habits.in_command(words, image=self.recipe.kind == "dockerfile"):
            self.recipe.note(rule, _line_of(self.recipe, words[number], line), "")
        script = next((i for i, w in enumerate(words[:-1], 1) if re.fullmatch(r"-[a-z]*c", w)), None)
        if words[0] in {"echo", "printf"}:
            if _LOGIN_FILE.search(command):
                self._nested(" ".join(itertools.dropwhile(lambda word: word.startswith("-"), words[1:])), line)
        elif script and _SHELL.fullmatch(words[0]):
            self._nested(words[script], line)
        elif (gone := _pip_arguments(words, "uninstall")) is not None:
            axes = {AXIS_OF_DISTRIBUTION.get(canonicalize_name(word)) for word in gone}
            axes |= {"cuda"} if "torch" in axes else set()
            self._drop(lambda s: s.installed and s.axis in axes)
        elif (wanted := _pip_arguments(words, "install", "wheel")) is not None:
            _pip(self.recipe, wanted, line, _pip_indexes({**self.stage.environment, **self.exported, **own}, wanted))
            for place in wanted:
                if "/" in place:
                    self._hopper(posixpath.join(self.folder, place))
                if re.match(r"\.|/|[\w-]+/", place):
                    self._built(posixpath.join(self.folder, place))
        elif re.fullmatch(r"(?:.*/)?python[\d.]*", words[0]) and words[1:2] == ["setup.py"]:
            self._built(self.folder)
        elif words[0] == "git":
            self._git(words[1:], line)
        elif words[0] in {"cd", "pushd"}:
            self.pushed += [self.folder] if words[0] == "pushd" else []
            self._cd(next((w for w in words[1:] if w == "-" or not w.startswith(("-", "+"))), "~"))
        elif words[0] == "popd":
            self._at(self.pushed.pop() if self.pushed else self._folder_at(".."))
        elif words[0] in {"module", "ml"}:
            self._module(words, line)
        elif words[0] in {"apt-get", "apt", "dnf", "microdnf", "yum"} and "install" in words:
            self._os_packages(words, line)
        elif words[0] in {"conda", "mamba", "micromamba"}:
            self._conda(words, line)
        elif installer := _TOOLKIT_INSTALLER.fullmatch(
            words[1] if _SHELL.fullmatch(words[0]) and words[1:] else words[0]
        ):
            if "--driver" not in words or "--toolkit" in words:
                self.stage.toolkit = True
                self.recipe.state("nvcc", installer[1], _line_of(self.recipe, installer[0], line))
        elif words[:2] == ["pyenv", "install"]:
            for version in filter(None, (re.fullmatch(r"(\d+\.\d+)(?:\.\d+)?", word) for word in words[2:])):
                self.recipe.state("python", version[1], line)

    def _drop(self, ended: Callable[[Statement], bool]) -> None:
        """Drop what was stated and holds no longer, in this stage and what it is built on."""
        for axis in {s.axis for s in self.recipe.statements}:
            for found in filter(ended, self.recipe.before(axis, self.stage.line)):
                del self.recipe.statements[found]

    def _module(self, words: list[str], line: int) -> None:
        named = words[0] == "module" or words[1:2] == [] or words[1] in _MODULES
        did = _MODULES.get(words[1] if words[1:] else "", "") if named else "load"
        names = words[2:] if named else words[1:]
        gone = [name.partition("/")[0] for name in (names[:1] if did == "swap" else names)]
        cuda = any(_CUDA_MODULE.fullmatch(f"{name}/1.0") for name in gone)
        if did == "purge" or (did in {"unload", "swap"} and cuda):
            self._drop(lambda s: s.module)
        loaded = {"load": names, "swap": names[1:]}.get(did, [])
        for module in filter(None, map(_CUDA_MODULE.fullmatch, loaded)):
            self.recipe.state("nvcc", module[1], _line_of(self.recipe, module[0], line), module=True)

    def _git(self, words: list[str], line: int) -> None:
        elsewhere: str | None = None
        while words[:1] and words[0].startswith("-"):
            name, _, value = words[0].partition("=")
            apart = not value and name in {"-C", "-c", "--git-dir", "--work-tree", "--namespace"}
            if name in {"-C", "--git-dir", "--work-tree"}:
                elsewhere = self._folder_at((value or "".join(words[1:2])).removesuffix("/.git"))
            words = words[2 if apart else 1 :]
        folder = elsewhere or self.folder
        target = self._clone_at(folder) or (None if elsewhere else self._clone_unnamed())
        if _OTHERS_FOLDER.search(folder):
            target = None
        plain = [w for w in words[1:] if not w.startswith("-")]
        if words[:1] == ["clone"]:
            ref = next((words[i + 1] for i, w in enumerate(words[:-1]) if w in {"-b", "--branch", "--revision"}), None)
            ref = ref or next((w.partition("=")[2] for w in words if re.match(r"--(?:branch|revision)=", w)), None)
            places = [w for last, w in itertools.pairwise(words) if not w.startswith("-") and last not in _CLONE_VALUES]
            url = next((w for w in places if "/" in w and (":" in w)), "")
            if url:
                base = posixpath.basename(url.rstrip("/")).removesuffix(".git")
                place = places[places.index(url) + 1] if places.index(url) + 1 < len(places) else base
                self._cloned(_repository(url), _line_of(self.recipe, url, line), place, ref)
        elif words[:1] == ["init"]:
            self._cloned("", line, plain[0] if plain else ".", None)
        elif words[:2] == ["remote", "add"] and len(plain) > 2 and target and not target.name:
            target.name, target.line = _repository(plain[2]), line
        elif words[:1] == ["fetch"] and len(plain) > 1 and target:
            target.fetched = plain[-1].partition(":")[0]
        elif words[:1] in (["checkout"], ["switch"], ["reset"]) and "--" not in words and target:
            if {"-b", "-B", "-c", "-C"} & set(words):  # the new branch's name comes first
                plain = plain[1:]
            if plain and plain[0] not in {"HEAD", "."}:
                target.ref = target.fetched if plain[0] == "FETCH_HEAD" else plain[0]
                target.line = _line_of(self.recipe, plain[0], line)

    def _cloned(self, name: str, line: int, place: str, ref: str | None) -> None:
        folder = posixpath.basename(self._folder_at(place))
        self.clones.append(
            _Clone(
                name,
                line,
                folder or name,
                self.folder,
                ref,
                branch=self.recipe.branch,
                environment=self.recipe.environment,
            )
        )

    def _cd(self, place: str) -> None:
        self._at(self.before if place == "-" else self._folder_at(place))

    def _folder_at(self, place: str) -> str:
        """Return the folder that a command names, from the current one where it is relative."""
        return posixpath.normpath(posixpath.join("" if place.startswith(("~", "$")) else self.folder, place))

    def _at(self, folder: str) -> None:
        self.before, self.folder = self.folder, folder
        self._hopper(self.folder)

    def _clone_unnamed(self) -> _Clone | None:
        """Return the clone that git works on in a folder that has no clone's name, as far as that can be known."""
        if not self.clones:
            return None
        last, (_, name) = self.clones[-1], posixpath.split(self.folder)
        if posixpath.normpath(self.folder) == posixpath.normpath(last.made_in) or re.search(r"[$`*?\[]", name):
            return last
        unpinned = [clone for clone in self.clones if clone.ref is None]  # moved, or copied from another stage
        return unpinned[0] if len(unpinned) == 1 else None

    def _clone_at(self, place: str) -> _Clone | None:
        """Return the innermost clone that `place` lies in, by the names of the folders: where they lie is not followed."""
        for part in reversed(place.split("/")):
            for clone in reversed(self.clones):
                if fnmatchcase(clone.folder, part):
                    return clone
        return None

    def _built(self, place: str) -> None:
        if clone := self._clone_at(place):
            clone.built.add("beside" if _BESIDE_FLASH_ATTN.search(place) else "own")

    def _hopper(self, place: str) -> None:
        """Take it that flash-attention 3 is built when `place` is its folder."""
        if posixpath.basename(place.rstrip("/")) == "hopper":
            inside = self._clone_at(place)
            for clone in [inside] if inside else self.clones:
                clone.hopper = clone.hopper or clone.name == "flash-attention"

    def _os_packages(self, words: list[str], line: int) -> None:
        for word in words[words.index("install") + 1 :]:
            number = _line_of(self.recipe, word, line)
            package, _, pinned = word.partition("=")
            if words[0] not in {"apt-get", "apt"}:
                package = _RPM_VERSION.sub("", package)
            toolkit = _TOOLKIT_PACKAGE.match(package)
            python = re.match(r"^python(3\.\d+)(?:-dev|-devel|-venv)?$", package)
            if toolkit:
                self.stage.toolkit = True
                version = re.match(r"(?:\d+:)?(\d+\.\d+)", pinned)
                if toolkit[2] or version:
                    named = f"{toolkit[1]}.{toolkit[2]}" if toolkit[2] else version[1] if version else ""
                    self.recipe.state("nvcc", named, number)
            elif python:
                self.recipe.state("python", python[1], number)
            elif word in {"openmpi-bin", "libopenmpi-dev", "openmpi", "openmpi-devel"}:
                self.recipe.state("mpi", "openmpi", number)
            elif word in {"mpich", "libmpich-dev", "mpich-devel"}:
                self.recipe.state("mpi", "mpich", number)
            elif gcc := re.match(r"^g(?:cc|\+\+)-(\d+)$", word):
                self.recipe.state("gcc", gcc[1], number)

    def _conda(self, words: list[str], line: int) -> None:
        options = dict(itertools.pairwise(words))
        named = next((options[word] for word in ("-n", "--name", "-p", "--prefix") if word in options), "")
        does = words[2:3] if words[1:2] == ["env"] else words[1:2]
        if does == ["create"]:
            self.recipe.environment = named
        elif words[1:2] in (["activate"], ["deactivate"]):
            self.recipe.environment = "".join(word for word in words[2:3] if word != "base")
        brings = does in (["install"], ["create"], ["update"])
        labels = {label[1]: label for word in words if "::" not in word and (label := _CONDA_LABEL.search(word))}
        for word in words:
            package = word.rpartition("::")[2]
            if re.match(r"^(?:cuda|cuda-toolkit|cuda-nvcc|cudatoolkit-dev)(?:[=<>\[]|$)", package):
                self.stage.toolkit = True
                of = _CONDA_LABEL.match(word) if "::" in word else next(iter(labels.values()), None)
                if brings and of and len(labels) < 2 and re.search(r"\d", package) is None:
                    self.recipe.state("nvcc", of[1], _line_of(self.recipe, of[0], line), installed=True)
            found = re.match(r"^(python|pytorch-cuda|pytorch|cuda-toolkit|cuda-nvcc)={1,2}(\d+(?:\.\d+)*)", package)
            axes = {"python": "python", "pytorch-cuda": "cuda", "pytorch": "torch"}
            if found:
                version = ".".join(found[2].split(".")[:2]) if found[1] == "python" else found[2]
                self.recipe.state(
                    axes.get(found[1], "nvcc"), version, _line_of(self.recipe, word, line), installed=True
                )


def _exec_form(text: str) -> list[str] | None:
    """Return the words of an instruction in JSON, or None where it is none."""
    try:
        words = json.loads(text) if text.startswith("[") else None
    except (ValueError, RecursionError):
        return None
    return [str(word) for word in words] if isinstance(words, list) else None


def _without_redirections(words: Sequence[str]) -> list[str]:
    """Return a command's words, with their quotes, without those that say where its input and output go."""
    kept: list[str] = []
    target = False
    for word in words:
        found = re.match(r"(?:\d*|&)(?:>{1,2}|<{1,3})[&|]?", word)
        if not target and not found:
            kept.append(word)
        target = found is not None and found.end() == len(word)
    return kept


def _words(text: str, *, redirected: bool = False) -> list[str]:
    """Return the words of a text without their quotes, and, of what may be `redirected`, without the redirections.

    As shlex.split does, which takes the square of a long word's length.
    """
    whole = not _QUOTED_WORD.sub("", text).strip()  # else a quote closes elsewhere
    words = _QUOTED_WORD.findall(text) if whole else text.split()
    words = _without_redirections(words) if redirected else words
    return [_QUOTED.sub(_unquoted, word) for word in words] if whole else words


def _unquoted(match: re.Match[str]) -> str:
    quoted = match[0]
    if quoted.startswith("'"):
        return quoted[1:-1]
    return re.sub(r'\\(["\\$`])', r"\1", quoted[1:-1]) if quoted.startswith('"') else quoted[1:]

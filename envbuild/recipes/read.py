"""Reading a recipe: what a Dockerfile, a requirements file, a shell script or a TOML of axes states, line by line."""

import itertools
import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tomli
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from envbuild.errors import DataError
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.matrix.packages import AXIS_OF_DISTRIBUTION

Kind = Literal["dockerfile", "requirements", "shell", "toml"]


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
        return [self, *(self.base.chain() if self.base else ())]


@dataclass
class Recipe:
    """What a recipe states."""

    kind: Kind
    lines: list[str]
    statements: list[Statement] = field(default_factory=list)
    noted: list[Noted] = field(default_factory=list)
    variables: list[tuple[str, str, int]] = field(default_factory=list)
    """Environment variables: name, value, line."""
    packages: list[tuple[str, int]] = field(default_factory=list)
    """Python distributions that come from an index, by normalised name, and their lines."""
    stages: list[Stage] = field(default_factory=list)

    def stage(self, line: int) -> Stage | None:
        """Return the stage that `line` belongs to; None for what stands before the first, and holds in all."""
        return next((stage for stage in reversed(self.stages) if stage.line <= line), None)

    def commands(self) -> Iterator[list[tuple[int, str]]]:
        """Yield the lines of each command that is no comment, with their numbers: a backslash carries one on."""
        parts = list[tuple[int, str]]()
        for number, line in enumerate(self.lines, 1):
            if line.lstrip().startswith("#"):
                continue
            goes_on = line.rstrip().endswith("\\")
            parts.append((number, line.rstrip()[:-1] if goes_on else line))
            if not goes_on:
                yield parts
                parts = []
        if parts:
            yield parts

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
    ) -> None:
        """Add a statement, once per line."""
        text = self.lines[line - 1].strip()
        found = Statement(
            axis=axis, spec=spec, line=line, text=text, path=path, newest=newest, marker=marker, plain=plain
        )
        if found not in self.statements:
            self.statements.append(found)

    def note(self, rule: str, line: int, what: str) -> None:
        """Add a finding that needs no matrix."""
        self.noted.append(Noted(rule=rule, line=line, what=what))


_REPOSITORIES = {
    "megatron-lm": "megatron",
    "transformerengine": "te",
    "apex": "apex",
    "flash-attention": "flash-attn",
    "deepspeed": "deepspeed",
}
_TAG = re.compile(r"^(?:core_|core-|release-)?v?(\d+(?:\.\d+)+(?:[.-]?(?:post|rc|a|b)\d+)?)(-\d+|-[a-z]+\d*)?$")
_COMMIT = re.compile(r"^[0-9a-f]{7,40}$")
_CUDA_FOLDER = re.compile(r"\bcuda-(\d+(?:\.\d+)?)(?![\w-])")
_CUDA_MODULE = re.compile(r"(?:\S*/)?cuda(?:toolkit)?[/-](\d+(?:\.\d+){0,2})(?![\d.])\S*", re.IGNORECASE)
# Where a login shell takes its variables from.
_LOGIN_FILE = re.compile(r">\s*\S*(?:bashrc|profile|/etc/environment|/etc/profile\.d/[^\s'\"]+)['\"]?$")
_ARCHIVE = re.compile(
    r"https://github\.com/[^/\s]+/([^/\s]+)/archive/((?:refs/tags/)?)(?:refs/heads/)?(\S+?)\.(?:zip|tar\.gz)"
)
_GIT_ADDED = re.compile(r"\S+/([A-Za-z0-9_.-]+)\.git(?:#([^:\s]*)\S*)?")
_ASSIGNMENT = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)
_TOOLKIT_PACKAGE = re.compile(
    r"^(?:nvidia-cuda-toolkit|cuda(?:-(?:toolkit|nvcc|compiler|minimal-build|libraries-dev))?(?:-(\d+)(?:-(\d+))?)?)$"
)
_TOOLKIT_INSTALLER = re.compile(r"(?:\S*/)?cuda_(\d+\.\d+\.\d+)_[\d.]+_linux\w*\.run")
_SHELL = re.compile(r"(?:.*/)?(?:ba|da|z)?sh")
_TOOLKIT_FOLDER = re.compile(r"(?:^|/)cuda(?:-[\d.]+)?(?:/|$)")
_ITEM = re.compile(
    r"(?P<what>CUDA(?: Toolkit)?|nvcc|(?:NVIDIA )?driver|Python|PyTorch|torch|Transformer Engine|TE|DeepSpeed|gcc|cuDNN)"
    r"[ =:]+v?(?P<version>\d+(?:\.\d+)*)(?P<open>\.x)?(?P<least> or (?:newer|later|higher|above)|\+)?",
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
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the recipe cannot be read: {error}", where=str(path)) from error
    recipe = Recipe(kind=_kind(path, text), lines=text.splitlines())
    if recipe.kind == "toml":
        _read_toml(matrix, recipe, path, text)
    elif recipe.kind == "requirements":
        lines = [re.sub(r"(^|\s)#.*$", "", line) for line in recipe.lines]
        indexes = [index for line in lines if line.lstrip().startswith("-") for index in _indexes(line.split())]
        for number, line in enumerate(lines, 1):
            _requirements_line(recipe, line, number, indexes)
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
    except tomli.TOMLDecodeError as error:
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
    pattern = re.compile(rf"""^\s*["']?{re.escape(key)}["']?\s*=""")
    inside = ""
    for number, text in enumerate(recipe.lines, 1):
        if header := re.match(r"^\s*\[+\s*([^\[\]]+?)\s*\]+\s*(?:#.*)?$", text):
            inside = header[1]
        elif inside == table and pattern.match(text):
            return number
    return 1


def _variable(matrix: Matrix, recipe: Recipe, name: str, value: str, line: int) -> None:
    recipe.variables.append((name, value, line))
    for version in dict.fromkeys(_CUDA_FOLDER.findall(value)):
        recipe.state("nvcc", version, line, path=True)
    if name in {"TORCH_CUDA_ARCH_LIST", "NVTE_CUDA_ARCHS"}:
        archs = [a for a in re.split(r"[;, ]+", value.strip("'\"")) if a]
        digits = re.sub(r"\D", "", archs[0]) if len(archs) == 1 else ""
        if digits and matrix.has("gpu", f"sm_{digits}"):
            recipe.state("gpu", f"sm_{digits}", line)


def _requirements_line(recipe: Recipe, text: str, line: int, indexes: list[str]) -> None:
    """Read one line of a requirements file: a requirement may hold blanks, so it is tried whole before its words are."""
    text = text.strip().removesuffix("\\")
    whole = re.split(r"\s-", text)[0].strip()  # hashes and options follow
    try:
        by_name = Requirement(whole).url is None
    except InvalidRequirement:
        by_name = False
    if by_name:
        _requirement(recipe, whole, line, indexes)
    else:
        _pip(recipe, text.split(), line, indexes)


_INDEX_URL = {"-i", "--index-url", "--index"}
_INDEX_OPTIONS = {*_INDEX_URL, "-f", "--extra-index-url", "--find-links"}


def _indexes(words: list[str]) -> list[str]:
    """Return the indexes that pip's options name."""
    found = []
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        option, equals, value = word.partition("=")
        if option in _INDEX_OPTIONS:
            found.append((value if equals else following).strip("'\""))
    return found


def _pip(recipe: Recipe, words: list[str], line: int, given: list[str]) -> None:
    """Read the arguments of a `pip install`, or one line of a requirements file; `given` are indexes from elsewhere."""
    names: list[tuple[str, str]] = []
    indexes = [*given, *_indexes(words)]
    takes_value = {"-i", "-f", "-c", "-r", "-t", "--index-url", "--extra-index-url", "--find-links", "--index",
                   "--constraint", "--requirement", "--target", "--global-option", "--config-settings",
                   "--config-setting", "--python", "-C"}  # fmt: skip
    words = [word for word in words if word]
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word.startswith("-"):
            place += word in takes_value
        elif "git+" in word or _ARCHIVE.search(word) or (word == "@" and place < len(words)):
            url = words[place] if word == "@" else word
            place += word == "@"
            _url_requirement(recipe, url, _line_of(recipe, url, line))
            if word == "@" and names:
                names.pop()
        elif not re.match(r"^[./]|^https?:|\.whl$", word):
            names.append((word, word))
    for name, text in names:
        _requirement(recipe, name, _line_of(recipe, text, line), indexes)


def _url_requirement(recipe: Recipe, url: str, line: int) -> None:
    if archive := _ARCHIVE.search(url):
        _source(recipe, archive[1].lower(), archive[2] + archive[3], line, hopper="subdirectory=hopper" in url)
    found = re.search(
        r"git\+[a-z]+://(?:[^\s/@#]+@)?[^\s@#]+?/([A-Za-z0-9_.-]+?)(?:\.git)?(?:@([^#\s]+))?(?:#(\S*))?$", url
    )
    if found is None:
        return
    name, ref, fragment = found[1].lower(), found[2], found[3] or ""
    _source(recipe, name, ref, line, hopper="subdirectory=hopper" in fragment)


def _source(recipe: Recipe, name: str, ref: str | None, line: int, *, hopper: bool = False) -> None:
    """Note a source tree of `name` at `ref`: what it pins, or that it pins nothing."""
    named = re.sub(r"^(?:refs/)?tags/", "", ref or "")
    tag, commit = _TAG.match(named), _COMMIT.match(named)
    if "$" in named:
        return
    if ref is None or not (tag or commit or named != ref):
        what = f"{name} at {ref}, a branch that moves" if ref else f"{name} at no commit"
        recipe.note("recipe-unpinned-source", line, what)
        if name == "apex" and ref is None:
            recipe.state("apex", "any", line, newest=True)
        return
    axis = _REPOSITORIES.get(name)
    if axis == "flash-attn" and hopper:
        axis = "flash-attn-hopper"
    if axis and (commit or (tag and not tag[2])):
        recipe.state(axis, tag[1] if tag else named, line)


def _requirement(recipe: Recipe, text: str, line: int, indexes: list[str]) -> None:
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
    if not spec:
        recipe.note("recipe-unpinned-package", line, f"{name} without a version")
        if axis == "torch" and not any("download.pytorch.org" in index for index in indexes):
            recipe.state("torch", "any", line, newest=True, marker=marker)
    else:
        exact = re.fullmatch(r"===?([^,*]+)", spec)
        recipe.state(axis, exact[1].strip() if exact else spec, line, marker=marker)
    variants = {match[1] for match in (re.search(r"/(cu\d+|cpu)/?$", index) for index in indexes) if match}
    if axis == "torch" and len(variants) == 1 and not spec.endswith(f"+{(variant := variants.pop())}"):
        recipe.state("cuda", "cpu" if variant == "cpu" else f"{variant[2:-1]}.{variant[-1]}", line, marker=marker)


def _line_of(recipe: Recipe, text: str, first: int) -> int:
    """Return the line of `text` in a command that begins at line `first` and may go on over several."""
    number = first
    while number <= len(recipe.lines):
        content = recipe.lines[number - 1]
        if not content.lstrip().startswith("#"):  # a comment may stand within a command, and ends none
            if text in content:
                return number
            if not content.rstrip().endswith("\\"):
                break
        number += 1
    return first


# What stands before a line of a script that RUN was handed in a here-document.
_RUN_ON = "RUN-ON"


def _without_flags(text: str) -> str:
    return re.sub(r"^(?:--\S+\s+)*", "", text)


# A word of a shell's line with its quotes, and one that begins a here-document: `<<EOF`, `<<-'EOF'`, not `<<<text`.
_QUOTED_WORD = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""")
_HERE_DOCUMENT = re.compile(r"\d*<<-?(['\"]?)([A-Za-z_]\w*)\1")


def _expanded(text: str, values: Mapping[str, str]) -> str:
    """Return `text` with the variables that `values` has put in, or their defaults; any other stays as it is written."""
    pattern = r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))"

    def put_in(match: re.Match[str]) -> str:
        value = values.get(match[1] or match[3])
        if match[2] is not None:
            return value or match[2]
        return match[0] if value is None else value

    return re.sub(pattern, put_in, text)


# What ends a command, outside quotes.
_COMMAND_END = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(&&|\|\||;(?!;)|\|)""")


def _commands(text: str) -> Iterator[str]:
    begun = 0
    for match in _COMMAND_END.finditer(text):
        if match[1]:
            yield text[begun : match.start()]
            begun = match.end()
    yield text[begun:]


def _pip_arguments(words: list[str]) -> list[str] | None:
    """Return what `pip install` is given, where the command is one."""
    for place, word in enumerate(words):
        if re.fullmatch(r"(?:.*/)?pip[\d.]*", word):
            rest = list(itertools.dropwhile(lambda each: each.startswith("-"), words[place + 1 :]))
            return rest[1:] if rest[:1] in (["install"], ["wheel"]) else None
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
    command = " ".join(itertools.takewhile(lambda each: not _HERE_DOCUMENT.fullmatch(each), words))
    return ends, word.upper() == "RUN" and re.fullmatch(
        r"((/usr)?/bin/)?((ba|da|z)?sh)?(\s+-\S+)*", command
    ) is not None


def _needed(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield a Dockerfile's instructions but for the stages that its last one does not need: BuildKit leaves those out."""
    stages: list[list[tuple[int, str]]] = [[]]
    given: dict[str, str] = {}  # what ARG before the first FROM gives a name of a stage
    for number, text in lines:
        if re.match(r"FROM\s", text, re.IGNORECASE):
            stages.append([])
        stages[-1].append((number, text))
        if len(stages) == 1 and (match := re.match(r"ARG\s+([A-Za-z_]\w*)=(\S+)", text, re.IGNORECASE)):
            given[match[1]] = match[2].strip("'\"")
    named: dict[str, int] = {}
    uses: list[set[int]] = []
    for place, stage in enumerate(stages):
        stage = [(number, _expanded(text, given)) for number, text in stage]  # noqa: PLW2901 - only read here
        asked = {name.lower() for _, text in stage for name in re.findall(r"\bfrom=([\w.${}:-]+)", text)}
        first = re.match(r"FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?", stage[0][1] if stage else "", re.IGNORECASE)
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
    ref: str | None = None
    fetched: str | None = None
    hopper: bool = False


class _Script:
    """A Dockerfile or a shell script, read from top to bottom."""

    def __init__(self, matrix: Matrix, recipe: Recipe) -> None:
        self.matrix = matrix
        self.recipe = recipe
        self.values: dict[str, str] = {}
        self.clones: list[_Clone] = []
        self.stage = Stage(line=0)
        self.named: dict[str, Stage] = {}
        self.folder = ""
        self.exported: dict[str, str] = {}

    def read(self) -> None:
        whole = [(number, text.strip()) for number, text in self._logical()]
        for number, stripped in whole if self.recipe.kind != "dockerfile" else _needed(whole):
            if stripped.startswith("#"):
                self._comment(stripped, number)
            elif self.recipe.kind == "dockerfile":
                self._instruction(stripped, number)
            else:
                self._shell(stripped, number)
        for clone in self.clones:
            _source(self.recipe, clone.name, clone.ref, clone.line, hopper=clone.hopper)

    def _logical(self) -> Iterator[tuple[int, str]]:
        """Yield lines with their continuations joined, each with its first line's number."""
        begun, parts = 0, list[str]()
        ends, script = list[str](), False  # of the here-documents that a Dockerfile's instruction began
        for number, line in enumerate(self.recipe.lines, 1):
            if ends and line.strip() == ends[0]:
                ends.pop(0)
                continue
            if ends and not script:
                continue
            if parts and line.lstrip().startswith("#"):
                continue  # docker drops comments within a command
            begun = begun or number
            if line.rstrip().endswith("\\") and not line.lstrip().startswith("#"):
                parts.append(line.rstrip()[:-1])
                continue
            joined = " ".join([*parts, line])
            yield begun, f"{_RUN_ON} {joined}" if ends and not line.lstrip().startswith("#") else joined
            begun, parts = 0, []
            if not ends and self.recipe.kind == "dockerfile":
                ends, script = _here_documents(joined)
                after = {other.strip() for other in self.recipe.lines[number:]}
                ends = [end for end in ends if end in after]
        if parts:
            yield begun, " ".join(parts)

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
                self.recipe.state(axis, f">={version}" if match["least"] else version, line)

    def _instruction(self, text: str, line: int) -> None:
        word, rest = [*text.split(maxsplit=1), "", ""][:2]
        word, rest = word.upper(), _without_flags(rest)
        if word != _RUN_ON:
            self.exported = {}
        if word == "FROM":
            self._from(self._expand(rest).split(), line)
        elif word in {"ENV", "ARG"}:
            self._assign(rest, line, environment=word == "ENV")
        elif word == "WORKDIR":
            self.folder = self.stage.workdir
            self._cd(self._expand(rest.strip("'\"")))
            self.stage.workdir = self.folder
        elif word in {"ADD", "COPY"}:
            self.folder = self.stage.workdir
            places = self._expand(rest)
            if word == "ADD":
                self._add(places, line)
            if any(_TOOLKIT_FOLDER.search(place) for place in places.split()) and self.stage.toolkit is False:
                self.stage.toolkit = None
        elif word == "RUN":
            self.folder = self.stage.workdir
            self._run(rest, line)
        elif word == _RUN_ON:
            self._shell(rest, line)

    def _run(self, text: str, line: int) -> None:
        try:
            words = json.loads(text) if text.startswith("[") else None  # the exec form
        except ValueError:
            words = None
        if isinstance(words, list):
            self._command(shlex.join(map(str, words)), line)
        else:
            self._shell(text, line)

    def _add(self, text: str, line: int) -> None:
        words = text.split()
        for url in words[:-1]:
            number = _line_of(self.recipe, url, line)
            if added := _GIT_ADDED.fullmatch(url):
                self._cloned(added[1], number, words[-1], added[2] or None)
            elif _ARCHIVE.fullmatch(url):
                _url_requirement(self.recipe, url, number)

    def _from(self, words: list[str], line: int) -> None:
        image = words[0].partition("@")[0] if words else ""  # a digest says nothing that the tag does not
        base = self.named.get(image.lower())
        self.stage = (
            Stage(line, base, base.toolkit, base.workdir, base.compat, {**base.environment}) if base else Stage(line)
        )
        self.recipe.stages.append(self.stage)
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
            if match is None:
                continue
            name, value = match[1], self._expand(match[2])
            self.values[name] = value
            self.stage.environment[name] = value
            if environment:
                _variable(self.matrix, self.recipe, name, value, _line_of(self.recipe, f"{name}=", line))

    def _shell(self, text: str, line: int) -> None:
        for part in _commands(text):
            command = self._expand(re.sub(r"\s#\s.*$", "", part).strip().strip("()").strip())
            if command:
                self._command(command, line)

    def _command(self, command: str, line: int) -> None:
        words = _words(command)
        own: dict[str, str] = {}
        while words and (words[0] in {"export", "sudo", "then", "do", "else", "set"} or _ASSIGNMENT.match(words[0])):
            match = _ASSIGNMENT.match(words[0])
            if match:
                exported = command.lstrip().startswith("export ")
                self.values[match[1]] = match[2]
                (self.exported if exported else own)[match[1]] = match[2]
                if exported or len(words) > 1 or match[1].isupper():
                    _variable(self.matrix, self.recipe, match[1], match[2], _line_of(self.recipe, f"{match[1]}=", line))
            words = words[1:]
        if not words:
            return
        script = next((i for i, w in enumerate(words[:-1], 1) if re.fullmatch(r"-[a-z]*c", w)), None)
        if words[0] in {"echo", "printf"}:
            if _LOGIN_FILE.search(command):
                told = itertools.takewhile(lambda word: not word.startswith(">"), words[1:])
                self._shell(" ".join(itertools.dropwhile(lambda word: word.startswith("-"), told)), line)
        elif script and _SHELL.fullmatch(words[0]):
            self._shell(words[script], line)
        elif (wanted := _pip_arguments(words)) is not None:
            _pip(self.recipe, wanted, line, _pip_indexes({**self.stage.environment, **self.exported, **own}, wanted))
            for place in wanted:
                if "/" in place:
                    self._hopper(posixpath.join(self.folder, place))
        elif words[0] == "git":
            self._git(words[1:], line)
        elif words[0] in {"cd", "pushd"} and len(words) > 1:
            self._cd(words[1])
        elif words[0] == "popd":
            self._cd("..")
        elif words[:2] in (["module", "load"], ["module", "add"]):
            for module in filter(None, map(_CUDA_MODULE.fullmatch, words[2:])):
                self.recipe.state("nvcc", module[1], _line_of(self.recipe, module[0], line))
        elif words[0] in {"apt-get", "apt"} and "install" in words:
            self._apt(words, line)
        elif words[0] in {"conda", "mamba"}:
            self._conda(words, line)
        elif installer := _TOOLKIT_INSTALLER.fullmatch(
            words[1] if _SHELL.fullmatch(words[0]) and words[1:] else words[0]
        ):
            if "--driver" not in words or "--toolkit" in words:
                self.stage.toolkit = True
                self.recipe.state("nvcc", installer[1], _line_of(self.recipe, installer[0], line))
        elif words[:2] == ["pyenv", "install"] and len(words) > 2:
            self.recipe.state("python", ".".join(words[2].split(".")[:2]), line)

    def _git(self, words: list[str], line: int) -> None:
        target = self._clone_at(self.folder) or (self.clones[-1] if self.clones else None)
        if words[:1] == ["-C"] and len(words) > 2:
            target = self._clone_at(words[1])
            words = words[2:]
        plain = [w for w in words[1:] if not w.startswith("-")]
        if words[:1] == ["clone"]:
            ref = next((words[i + 1] for i, w in enumerate(words[:-1]) if w in {"-b", "--branch"}), None)
            ref = ref or next((w.partition("=")[2] for w in words if w.startswith("--branch=")), None)
            places = [w for w in plain if w != ref and not w.isdigit()]
            url = next((w for w in places if "/" in w and (":" in w)), "")
            if url:
                name = url.rstrip("/").rsplit("/", 1)[-1].removesuffix(".git")
                folder = places[places.index(url) + 1] if places.index(url) + 1 < len(places) else name
                self._cloned(name, _line_of(self.recipe, name, line), folder, ref)
        elif words[:1] == ["fetch"] and len(plain) > 1 and target:
            target.fetched = plain[-1].partition(":")[0]
        elif words[:1] in (["checkout"], ["switch"], ["reset"]) and "--" not in words and target:
            if {"-b", "-B", "-c", "-C"} & set(words):  # the new branch's name comes first
                plain = plain[1:]
            if plain and plain[0] not in {"HEAD", "."}:
                target.ref = target.fetched if plain[0] == "FETCH_HEAD" else plain[0]
                target.line = _line_of(self.recipe, plain[0], line)

    def _cloned(self, name: str, line: int, place: str, ref: str | None) -> None:
        folder = posixpath.basename(posixpath.normpath(posixpath.join(self.folder, place)))
        self.clones.append(_Clone(name.lower(), line, folder or name, ref))

    def _cd(self, place: str) -> None:
        here = "" if place.startswith(("~", "$")) else self.folder
        self.folder = posixpath.normpath(posixpath.join(here, ".." if place == "-" else place))
        self._hopper(self.folder)

    def _clone_at(self, place: str) -> _Clone | None:
        """Return the innermost clone that `place` lies in, by the names of the folders: where they lie is not followed."""
        for part in reversed(place.split("/")):
            for clone in reversed(self.clones):
                if clone.folder == part:
                    return clone
        return None

    def _hopper(self, place: str) -> None:
        """Take it that flash-attention 3 is built when `place` is its folder."""
        if posixpath.basename(place.rstrip("/")) == "hopper":
            inside = self._clone_at(place)
            for clone in [inside] if inside else self.clones:
                clone.hopper = clone.hopper or clone.name == "flash-attention"

    def _apt(self, words: list[str], line: int) -> None:
        for word in words[words.index("install") + 1 :]:
            number = _line_of(self.recipe, word, line)
            package, _, pinned = word.partition("=")
            toolkit = _TOOLKIT_PACKAGE.match(package)
            python = re.match(r"^python(3\.\d+)(?:-dev|-venv)?$", word)
            if toolkit:
                self.stage.toolkit = True
                version = re.match(r"(?:\d+:)?(\d+\.\d+)", pinned)
                if toolkit[2] or version:
                    named = f"{toolkit[1]}.{toolkit[2]}" if toolkit[2] else version[1] if version else ""
                    self.recipe.state("nvcc", named, number)
            elif python:
                self.recipe.state("python", python[1], number)
            elif word in {"openmpi-bin", "libopenmpi-dev"}:
                self.recipe.state("mpi", "openmpi", number)
            elif word in {"mpich", "libmpich-dev"}:
                self.recipe.state("mpi", "mpich", number)
            elif gcc := re.match(r"^g(?:cc|\+\+)-(\d+)$", word):
                self.recipe.state("gcc", gcc[1], number)

    def _conda(self, words: list[str], line: int) -> None:
        for word in words:
            package = word.rpartition("::")[2]
            if re.match(r"^(?:cuda|cuda-toolkit|cuda-nvcc|cudatoolkit-dev)(?:[=<>\[]|$)", package):
                self.stage.toolkit = True
            found = re.match(r"^(python|pytorch-cuda|pytorch|cuda-toolkit|cuda-nvcc)={1,2}(\d+(?:\.\d+)*)", package)
            axes = {"python": "python", "pytorch-cuda": "cuda", "pytorch": "torch"}
            if found:
                version = ".".join(found[2].split(".")[:2]) if found[1] == "python" else found[2]
                self.recipe.state(axes.get(found[1], "nvcc"), version, _line_of(self.recipe, word, line))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote that closes elsewhere
        return text.split()

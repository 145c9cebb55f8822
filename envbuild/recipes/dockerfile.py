"""Reading a Dockerfile by its syntax tree: its instructions, and the stages that the last one needs."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from envbuild.errors import DataError
from envbuild.recipes import comments, git, habits, images
from envbuild.recipes.commands import run
from envbuild.recipes.model import Stage
from envbuild.recipes.reader import Reader
from envbuild.recipes.shell import read_shell
from envbuild.recipes.syntax import Word, children, errors, head_of, parse, text_of
from envbuild.recipes.values import expanded

if TYPE_CHECKING:
    from tree_sitter import Node

_TOOLKIT_FOLDER = re.compile(r"(?:^|/)cuda(?:-[\d.]+)?(?:/|$)")
_QUOTED = re.compile(r"""'[^']*'|"[^"\\]*(?:\\.[^"\\]*)*"|\\.""", re.DOTALL)
_QUOTED_WORD = re.compile(rf"""(?:{_QUOTED.pattern}|[^\s'"\\])+""", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_MOST_INSTRUCTIONS = 10_000
_FLAG = re.compile(r"--[a-z][a-z-]*(?:=\S*)?")


@dataclass
class Instruction:
    """An instruction with its arguments."""

    name: str
    line: int
    flags: list[str] = field(default_factory=list)
    text: str = ""
    """Its arguments, with the comments between its lines taken out; its line breaks are kept."""
    first: int = 0
    """The line on which `text` begins."""

    def words(self) -> list[Word]:
        """Return the arguments as words without their quotes, each with its line."""
        if listed := _exec_form(self.text):
            return [Word(word, self.first + _row(self.text, f'"{word}')) for word in listed]
        found, row, place = list[Word](), self.first, 0
        for match in _QUOTED_WORD.finditer(self.text):
            row += self.text.count("\n", place, match.start())
            place = match.start()
            word = _QUOTED.sub(_unquoted, match[0])
            if word.strip():
                found.append(Word(word, row))
        return found


def _row(text: str, part: str) -> int:
    return text.count("\n", 0, max(text.find(part), 0))


def _unquoted(match: re.Match[str]) -> str:
    quoted = match[0]
    if quoted.startswith("'"):
        return quoted[1:-1]
    if quoted.startswith('"'):
        return re.sub(r'\\(["\\$`])', r"\1", quoted[1:-1])
    return "" if quoted[1:] == "\n" else quoted[1:]


def _exec_form(text: str) -> list[str] | None:
    """Return the words of an instruction in JSON, or None where it is none."""
    try:
        words = json.loads(text.replace("\\\n", "\n")) if text.startswith("[") else None
    except (ValueError, RecursionError):
        return None
    return [str(word) for word in words] if isinstance(words, list) else None


def read(reader: Reader, text: str) -> None:
    """Read the Dockerfile `text`."""
    recipe = reader.recipe
    root = parse("dockerfile", text.encode(errors="replace"), recipe.effort)
    # a tree that is wrong from the top has no instructions; those of its lines that stand alone are read again
    instructions = list(itertools.islice(_instructions(reader, root), _MOST_INSTRUCTIONS + 1))
    if len(instructions) > _MOST_INSTRUCTIONS:
        raise DataError(
            f"the recipe has more than {_MOST_INSTRUCTIONS} instructions", hint="check its parts one by one"
        )
    wanted = {id(each) for each in _needed(instructions)}
    for each in instructions:
        recipe.effort.spend(1)
        if id(each) in wanted:
            _read(reader, each)


def _instructions(reader: Reader, root: "Node") -> Iterator[Instruction]:
    effort = reader.recipe.effort
    for wrong in errors(root, effort):
        effort.skip(int(wrong.start_point[0]) + 1, head_of(wrong) or wrong.type)
    waiting = [root]
    while waiting:
        node = waiting.pop()
        line = int(node.start_point[0]) + 1
        if node.type == "comment":
            yield Instruction("#", line, text=text_of(node).strip(), first=line)
        elif node.type.endswith("_instruction"):
            yield from _instruction(reader, node, line)
        elif node.type in {"source_file", "ERROR"}:
            waiting += reversed(children(node, effort))


def _instruction(reader: Reader, node: "Node", line: int) -> Iterator[Instruction]:
    source = text_of(node)
    name = source.split(maxsplit=1)[0] if source.split() else ""
    if name.upper() in {"ONBUILD", "HEALTHCHECK"}:
        for child in children(node, reader.recipe.effort):
            if child.type.endswith("_instruction"):
                yield from _instruction(reader, child, int(child.start_point[0]) + 1)
        return
    kept = list[str]()
    body = source[len(name) :].split("\n")
    here = next((child for child in node.children if child.type == "heredoc_block"), None)
    ends = int(here.start_point[0]) + 1 - line if here else len(body)
    for number, text in enumerate(body):
        inside = 0 < number <= ends if here else number
        if inside and (not text.strip() or text.lstrip().startswith("#")):
            kept.append("\\")  # docker drops comments and empty lines within an instruction
        else:
            kept.append(text.rstrip() if not here or number <= ends else text)
    while kept and kept[-1] in {"\\", ""}:
        kept.pop()
    first, text = line, "\n".join(kept)
    flags = list[str]()
    while True:
        blank = re.match(r"(?:[ \t]|\\\n)*\n?(?:[ \t]|\\\n)*", text)
        start = blank.end() if blank else 0
        first += text.count("\n", 0, start)
        text = text[start:]
        flag = _FLAG.match(text)
        if not flag:
            break
        flags.append(flag[0])
        text = text[flag.end() :]
    yield Instruction(name.upper(), line, flags, text, first)


def _needed(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """Yield the instructions but for the stages that the last one does not need: BuildKit leaves those out."""
    stages: list[list[Instruction]] = [[]]
    given: dict[str, str] = {}  # what ARG before the first FROM gives a name of a stage
    for each in instructions:
        if each.name == "FROM":
            stages.append([])
        stages[-1].append(each)
        if len(stages) == 1 and each.name == "ARG":
            given |= {match[1]: match[2] for word in each.words() if (match := _ASSIGNMENT.fullmatch(word))}
    named: dict[str, int] = {}
    uses: list[set[int]] = []
    for place, stage in enumerate(stages):
        asked = {
            expanded(name, given).lower()
            for each in stage
            for flag in each.flags
            for name in re.findall(r"\bfrom=([\w.${}:/-]+)", flag)
        }
        first = [expanded(word, given) for word in stage[0].words()] if stage and stage[0].name == "FROM" else []
        asked |= {first[0].lower()} if first else set()
        # whoever gives a name on the command line may mean any stage
        uses.append(
            {named[name] for name in asked if name in named}
            | (set(range(place)) if any("$" in n for n in asked) else set())
        )
        if first:
            named[str(place - 1)] = place  # stages have numbers, too
            named.update({first[2].lower(): place} if first[2:] and first[1].upper() == "AS" else {})
    wanted, open_ends = {0}, [len(stages) - 1]
    while open_ends:
        place = open_ends.pop()
        if place not in wanted or place == len(stages) - 1:
            wanted.add(place)
            open_ends += uses[place] - wanted
    for place in sorted(wanted):
        yield from stages[place]


def _read(reader: Reader, each: Instruction) -> None:
    name, recipe = each.name, reader.recipe
    if name == "#":
        comments.read(recipe, each.text, each.line)
        return
    reader.exported = {}
    if name == "FROM":
        _from(reader, each)
    elif name in {"ENV", "ARG"}:
        _assign(reader, each)
    elif name == "WORKDIR":
        reader.folder = reader.stage.workdir
        git.enter(reader, reader.folder_at(expanded(each.text.strip().strip("'\""), reader.values)))
        reader.stage.workdir = reader.folder
    elif name in {"ADD", "COPY"}:
        _copy(reader, each)
    elif name in {"RUN", "CMD", "ENTRYPOINT"}:
        _run(reader, each)
    elif name not in {"LABEL", "EXPOSE", "USER", "VOLUME", "STOPSIGNAL", "SHELL", "MAINTAINER"}:
        recipe.effort.skip(each.line, each.name)


def _from(reader: Reader, each: Instruction) -> None:
    words = [expanded(word, reader.given) for word in each.words()]
    image = words[0].partition("@")[0] if words else ""  # a digest says nothing that the tag does not
    base = reader.named.get(image.lower())
    stage = Stage(each.line, base, base.toolkit, base.workdir, base.compat) if base else Stage(each.line)
    stage.environment = {**base.environment} if base else {}
    reader.stage = stage
    reader.recipe.stages.append(stage)
    reader.recipe.environment = ""
    if len(words) > 2 and words[1].upper() == "AS":
        reader.named[words[2].lower()] = stage
    reader.values = {**stage.environment}
    if base is None:
        images.state(reader, image, each.line)


def _assign(reader: Reader, each: Instruction) -> None:
    words, environment = each.words(), each.name == "ENV"
    if words and "=" not in words[0] and len(words) > 1:  # ENV NAME value
        words = [Word(f"{words[0]}={' '.join(words[1:])}", words[0].line)]
    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        if match is None and (environment or word not in reader.given):
            continue
        # what stands before FROM holds where it is named again
        name, value = (match[1], expanded(match[2], reader.values)) if match else (str(word), reader.given[word])
        reader.values[name] = value
        (reader.stage.environment if reader.recipe.stages else reader.given)[name] = value
        if environment:
            reader.set_variable(name, value, word.line)
            reader.recipe.commands.append((word.line, f"{name}={value}"))


def _copy(reader: Reader, each: Instruction) -> None:
    reader.folder = reader.stage.workdir
    places = [Word(expanded(word, reader.values), word.line) for word in each.words()]
    reader.recipe.commands.append((each.line, " ".join((each.name, *places))))
    for rule, place in habits.in_copy(places):
        reader.recipe.note(rule, places[place].line, "")
    if each.name == "ADD":
        git.add(reader, places)
    if any(_TOOLKIT_FOLDER.search(place) for place in places) and reader.stage.toolkit is False:
        reader.stage.toolkit = None


_ONLY_HERE = re.compile(
    r"<<(?P<tabs>-?)[ \t]*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)[ \t]*\n(?P<body>(?:.*\n)*?)\t*(?P=end)\s*"
)
"""A here-document without a command: docker runs it as a script."""


def _run(reader: Reader, each: Instruction) -> None:
    reader.folder = reader.stage.workdir
    listed = each.words() if _exec_form(each.text) else None
    # what a shell sets in one RUN is gone in the next
    reader.values = {**reader.stage.environment}
    here = _ONLY_HERE.fullmatch(each.text) if listed is None else None
    if here:
        body = re.sub(r"(?m)^\t+", "", here["body"]) if here["tabs"] else here["body"]
        read_shell(reader, body, each.first + 1)
    elif listed is None:
        read_shell(reader, each.text, each.first)
    elif listed:
        inner = run(reader, listed, {})
        script = next((n for n, word in enumerate(inner[:-1], 1) if re.fullmatch(r"-[a-z]*c", word)), None)
        if script and re.fullmatch(r"(?:.*/)?(?:ba|da|z)?sh", inner[0]):
            read_shell(reader, inner[script], inner[script].line)

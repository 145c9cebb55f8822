"""Reading a shell script by its syntax tree: which commands it runs, in which arms of its choices, with which variables."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from envbuild.recipes import comments
from envbuild.recipes.commands import run
from envbuild.recipes.reader import Conditional, Reader
from envbuild.recipes.shell_tests import conditions_of, differ, is_understood
from envbuild.recipes.shell_words import WORDS, word_of, words_of
from envbuild.recipes.syntax import DEEPEST, Word, asks, children, errors, head_of, parse, text_of

if TYPE_CHECKING:
    from tree_sitter import Node

_NESTED = 8
"""How deep texts may stand in one another that shells are given: `bash -c "bash -c …"`."""

_LOGIN_FILE = re.compile(r".*(?:bashrc|profile)|/etc/environment|/etc/profile\.d/.+", re.DOTALL)
"""Where a login shell takes its variables from."""

_SHELL = re.compile(r"(?:.*/)?(?:ba|da|z)?sh")
_PATTERN = re.compile(r"""["']?([\w.+:/-]+)["']?""")


@dataclass
class _Redirected:
    """Where a command's output goes, and what it is fed."""

    targets: list[str] = field(default_factory=list)
    fed: list[tuple[str, int]] = field(default_factory=list)
    more: list[Word] = field(default_factory=list)
    """Words of the command that stand behind a redirection."""
    glued: Word | None = None
    """The command's last word with the `>=2.1` that stands right behind it."""


def read_shell(reader: Reader, text: str, first: int = 1) -> None:
    """Read the shell script `text`, whose first line is line `first` of the recipe."""
    if reader.depth > _NESTED:
        reader.recipe.effort.skip(first, text)
        return
    reader.depth += 1
    _Walk(reader, first).read(text)
    reader.depth -= 1


class _Walk:
    def __init__(self, reader: Reader, first: int) -> None:
        self._reader, self._first = reader, first
        self._effort = reader.recipe.effort

    def read(self, text: str) -> None:
        root = parse("bash", text.encode(errors="replace"), self._effort)
        for wrong in errors(root, self._effort):
            self._effort.skip(self._line(wrong), head_of(wrong) or wrong.type)
        self._visit(root, 0)

    def _line(self, node: "Node") -> int:
        return self._first + int(node.start_point[0])

    def _all(self, nodes: Sequence["Node"], depth: int) -> None:
        for node in nodes:
            self._visit(node, depth)

    def _visit(self, node: "Node", depth: int) -> None:
        kind = node.type
        if depth > DEEPEST:
            self._effort.skip(self._line(node), head_of(node))
        elif kind == "command":
            self._command(node, _Redirected())
        elif kind == "redirected_statement":
            self._redirected(node, depth)
        elif kind in {"variable_assignment", "variable_assignments", "declaration_command"}:
            self._assignments(node)
        elif kind == "list":
            self._list(node, depth)
        elif kind == "if_statement":
            self._if(node, depth)
        elif kind == "case_statement":
            self._case(node, depth)
        elif kind == "subshell":
            self._subshell(node, depth)
        elif kind == "for_statement":
            for child in children(node, self._effort):
                if child.type == "variable_name":
                    self._reader.values.pop(text_of(child), None)
                elif child.type == "do_group":
                    self._visit(child, depth + 1)
        elif kind == "function_definition":
            self._function(node, depth)
        elif kind == "comment":
            self._comment(node)
        elif kind not in {"heredoc_body", "heredoc_redirect", *WORDS}:
            self._all(children(node, self._effort), depth + 1)

    def _comment(self, node: "Node") -> None:
        line, lines = self._line(node), self._reader.recipe.lines
        if self._reader.depth == 1 and line <= len(lines) and lines[line - 1].lstrip().startswith("#"):
            comments.read(self._reader.recipe, text_of(node), line)

    def _words(self, node: "Node") -> Iterator[Word]:
        return words_of(node, self._line(node), self._reader.values, self._effort)

    def _text(self, node: "Node") -> str:
        return word_of(node, self._reader.values, self._effort)

    # ---- commands

    def _command(self, node: "Node", goes: _Redirected) -> None:
        words: list[Word] = []
        own: dict[str, str] = {}
        nodes = children(node, self._effort)
        for child in nodes:
            if child.type == "variable_assignment":
                own |= self._assign(child)
            elif child.type == "command_name":
                words += [word for inner in children(child, self._effort) for word in self._words(inner)]
            elif child.type in {"file_redirect", "heredoc_redirect", "herestring_redirect"}:
                self._redirect(child, words, goes)
            elif child.type in WORDS:
                words += self._words(child)
        if goes.glued is not None:
            words[-1:] = [goes.glued]
        words += goes.more
        if words:
            self._run(words, own, goes)

    def _run(self, words: list[Word], own: dict[str, str], goes: _Redirected) -> None:
        printed = any(_LOGIN_FILE.fullmatch(target) for target in goes.targets)
        inner = run(self._reader, words, own)
        name = inner[0] if inner else ""
        if printed and name in {"echo", "printf"}:
            text = " ".join(word for word in inner[1:] if not word.startswith("-"))
            read_shell(self._reader, text, inner[0].line)
        elif _SHELL.fullmatch(name):
            script = next((i for i, w in enumerate(inner[:-1], 1) if re.fullmatch(r"-[a-z]*c", w)), None)
            if script:
                self._nested(inner[script], inner[script].line)
        if goes.fed and ((printed and name in {"cat", "tee"}) or not name or self._is_fed_shell(inner)):
            for text, line in goes.fed:
                self._nested(text, line)

    @staticmethod
    def _is_fed_shell(words: Sequence[str]) -> bool:
        return bool(_SHELL.fullmatch(words[0])) and all(word.startswith("-") for word in words[1:])

    def _nested(self, text: str, line: int) -> None:
        values = dict(self._reader.values)
        read_shell(self._reader, text, line)
        self._reader.values = values

    def _redirected(self, node: "Node", depth: int) -> None:
        goes = _Redirected()
        nodes = children(node, self._effort)
        body, then = nodes[0], list["Node"]()
        redirects = [child for child in nodes if child.type.endswith("_redirect")]
        for child in redirects:
            then += self._redirect(child, [], goes, behind=body if body.type == "command" else None)
        if body.type == "command":
            self._command(body, goes)
        elif body.type == "pipeline":
            *first, last = [each for each in children(body, self._effort) if each.is_named]
            self._all(first, depth + 1)
            if last.type == "command":
                self._command(last, goes)
            else:
                self._visit(last, depth + 1)
        elif body.type.endswith("_redirect"):
            self._run_fed(goes)
        else:
            self._visit(body, depth + 1)
        self._all(then, depth + 1)

    def _run_fed(self, goes: _Redirected) -> None:
        for text, line in goes.fed:
            self._nested(text, line)

    def _redirect(
        self, node: "Node", words: list[Word], goes: _Redirected, *, behind: "Node | None" = None
    ) -> list["Node"]:
        """Read a redirection; return the commands that stand within a here-document's first line."""
        then, parts = list["Node"](), children(node, self._effort)
        if node.type == "heredoc_redirect":
            for child in parts:
                if child.type == "heredoc_body":
                    goes.fed.append((self._unindented(node, text_of(child)), self._line(child)))
                elif child.type == "file_redirect":
                    self._redirect(child, words, goes)
                elif child.type in WORDS:
                    goes.more += self._words(child)
                elif child.is_named and child.type not in {"heredoc_start", "heredoc_end"}:
                    then.append(child)
        elif node.type == "file_redirect":
            targets = [word for child in parts if child.type in WORDS for word in self._words(child)]
            glued = behind is not None and behind.end_byte == node.start_byte and parts[0].type in {">", "<"}
            if glued and behind is not None and targets and re.match(r"=?\d", targets[0]):
                # `torch>=2.1` without quotes: the shell takes it for a file, and who wrote it did not mean that
                last = children(behind, self._effort)[-1]
                goes.glued = Word(f"{self._text(last)}{parts[0].type}{targets[0]}", self._line(last))
            elif targets and any(child.type in {">", ">>", "&>", "&>>", ">|"} for child in parts):
                goes.targets.append(targets[0])
            goes.more += targets[1:]
        return then

    @staticmethod
    def _unindented(node: "Node", text: str) -> str:
        first = node.children[0] if node.children else None
        return re.sub(r"(?m)^\t+", "", text) if first is not None and first.type == "<<-" else text

    # ---- variables

    def _assignments(self, node: "Node") -> None:
        nodes = children(node, self._effort)
        if node.type == "variable_assignment":
            self._assign(node, alone=True)
            return
        exported = bool(nodes) and text_of(nodes[0]) in {"export", "declare", "typeset"}
        for child in nodes:
            if child.type == "variable_assignment":
                self._assign(child, alone=not exported, exported=exported)
            elif exported and child.type == "variable_name" and text_of(child) in self._reader.values:
                name = text_of(child)
                self._reader.exported[name] = self._reader.values[name]

    def _assign(self, node: "Node", *, alone: bool = False, exported: bool = False) -> dict[str, str]:
        nodes = children(node, self._effort)
        name = text_of(nodes[0])
        if nodes[0].type != "variable_name" or any(child.type == "array" for child in nodes[1:]):
            self._reader.values.pop(name, None)
            return {}
        value = "".join(self._text(child) for child in nodes[1:] if child.type in WORDS)
        if any(child.type == "+=" for child in nodes[1:]):
            value = (self._reader.values.get(name, "") + value)[: 1 << 14]
        self._reader.values[name] = value
        if exported:
            self._reader.exported[name] = value
        if not alone or exported or name.isupper():
            self._reader.set_variable(name, value, self._line(node))
            self._reader.recipe.commands.append((self._line(node), f"{name}={value}"))
        return {name: value}

    # ---- choices

    def _list(self, node: "Node", depth: int) -> None:
        steps, last = list[tuple[str, "Node"]](), node
        while last.type == "list":  # `a && b && c` is a tree as deep as it is long
            left, operator, *right = children(last, self._effort)
            steps += [(operator.type, each) for each in reversed(right)]
            last = left
        groups: list[list[list[Node]]] = [[[last]]]  # of arms, of commands
        for operator_of, each in reversed(steps):
            if operator_of == "||":
                groups[-1].append([each])
            elif len(groups[-1]) > 1:
                groups.append([[each]])
            else:
                groups[-1][-1].append(each)
        for arms in groups:
            if len(arms) == 1:
                self._chain(arms[0], depth)
                continue
            with self._reader.choice() as choice:
                for number, arm in enumerate(arms):
                    choice.turn(keep=True, known=number == 0)  # the others run where it fails
                    self._chain(arm, depth)

    def _chain(self, nodes: Sequence["Node"], depth: int) -> None:
        conditions: dict[str, str] = {}
        for number, node in enumerate(nodes, 1):
            if differ(conditions, self._reader.values):
                return
            with self._reader.under(conditions):
                self._visit(node, depth + 1)
            conditions |= conditions_of(node)
            if number < len(nodes) and asks(node) and not is_understood(node):
                with self._reader.choice() as choice:
                    choice.turn(keep=True)
                    with self._reader.under(conditions):
                        self._chain(nodes[number:], depth)
                return

    def _if(self, node: "Node", depth: int) -> None:
        nodes = children(node, self._effort)
        with self._reader.choice() as choice:
            self._arm(nodes, choice, depth)
            for child in nodes:
                if child.type in {"elif_clause", "else_clause"}:
                    self._arm(children(child, self._effort), choice, depth)

    def _arm(self, nodes: Sequence["Node"], choice: Conditional, depth: int) -> None:
        starts = next((n for n, child in enumerate(nodes) if child.type in {"then", "else"}), 0)
        asked = [child for child in nodes[:starts] if child.is_named]
        conditions = conditions_of(asked[0]) if len(asked) == 1 else {}
        self._all(asked, depth + 1)
        choice.turn(known=len(asked) == 1 and is_understood(asked[0]))
        if differ(conditions, self._reader.values):
            return
        with self._reader.under(conditions):
            self._all(
                [child for child in nodes[starts:] if child.type not in {"elif_clause", "else_clause"}], depth + 1
            )

    def _case(self, node: "Node", depth: int) -> None:
        nodes = children(node, self._effort)
        asked = re.fullmatch(r'"?\$\{?([A-Za-z_]\w*)\}?"?', text_of(nodes[1])) if len(nodes) > 1 else None
        with self._reader.choice() as choice:
            for child in nodes:
                if child.type != "case_item":
                    continue
                parts = children(child, self._effort)
                ends = next((n for n, part in enumerate(parts) if part.type == ")"), 0)
                patterns = [text_of(part) for part in parts[:ends] if part.is_named]
                literal = _PATTERN.fullmatch(patterns[0]) if len(patterns) == 1 else None
                conditions = {asked[1]: literal[1]} if asked and literal else {}
                choice.turn(known=bool(conditions))
                if not differ(conditions, self._reader.values):
                    with self._reader.under(conditions):
                        self._all(parts[ends + 1 :], depth + 1)

    def _function(self, node: "Node", depth: int) -> None:
        """Read a function where it stands; which of several are called is not known."""
        nodes = children(node, self._effort)
        name = next((text_of(child) for child in nodes if child.type == "word"), "")
        with self._reader.choice() as choice:
            choice.turn()
            with self._reader.under({"(function)": name}):
                self._all(nodes, depth + 1)

    def _subshell(self, node: "Node", depth: int) -> None:
        reader = self._reader
        values, exported = dict(reader.values), dict(reader.exported)
        folder, pushed = reader.folder, list(reader.pushed)
        self._all(children(node, self._effort), depth + 1)
        reader.values, reader.exported, reader.folder, reader.pushed = values, exported, folder, pushed

"""What a Python file asks of other modules: imports, and attributes of modules that are read while it is imported.

What stands behind a guard (`try` with a handler for ImportError, `if` on a version) is kept apart, and so is what runs only
when a function is called.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from envbuild.curate.trials.modules import Answer, absolute, is_type_checking

_CAUGHT = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
_CAUGHT_ATTRIBUTES = _CAUGHT - {"ImportError", "ModuleNotFoundError"} | {"AttributeError"}

_KEPT = 1 << 13
"""Files of which the result is kept: most are the same in many releases."""

State = Literal["present", "missing", "unknown", "guarded", "late"]


@dataclass(frozen=True, kw_only=True)
class Need:
    """One thing that a file asks for."""

    module: str
    names: tuple[str, ...] = ()
    """`from module import names[0]`, or the attributes that are read of it, one of the other."""
    attribute: bool = False
    """Whether an attribute is read, and nothing imported."""
    line: int

    def __str__(self) -> str:
        return ".".join([self.module, *self.names])


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """What need not be there."""

    items: "tuple[Item, ...]"


@dataclass(frozen=True, kw_only=True)
class Late:
    """What is asked for when a function is called."""

    items: "tuple[Item, ...]"


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """A `try` whose handler does something else instead."""

    first: "tuple[Item, ...]"
    instead: "tuple[Item, ...]"
    caught: frozenset[str]


Item = Need | Guarded | Late | Fallback


@dataclass
class _Reader:
    module: str
    is_package: bool
    aliases: dict[str, str] = field(default_factory=dict)
    """Name in the file -> what it stands for, which may be a module."""
    lazy_annotations: bool = False

    def block(self, statements: Sequence[ast.stmt]) -> tuple[Item, ...]:
        return tuple(item for statement in statements for item in self.statement(statement))

    def statement(self, node: ast.stmt) -> Iterator[Item]:
        match node:
            case ast.Import():
                yield from self._import(node)
            case ast.ImportFrom():
                yield from self._import_from(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from self._function(node)
            case ast.ClassDef():
                for each in (*node.decorator_list, *node.bases, *(k.value for k in node.keywords)):
                    yield from self.expression(each)
                yield from self.block(node.body)
            case ast.Try() | ast.TryStar():
                yield from self._try(node)
            case ast.If():
                yield from self._if(node)
            case ast.With() | ast.AsyncWith():
                items = tuple(i for each in node.items for i in self.expression(each.context_expr))
                body = self.block(node.body)
                suppressed = any("suppress" in ast.unparse(each.context_expr) for each in node.items)
                yield from items
                if suppressed:
                    yield Guarded(items=body)
                else:
                    yield from body
            case ast.For() | ast.AsyncFor() | ast.While() | ast.Match():
                inner = [s for s in ast.iter_child_nodes(node) if isinstance(s, ast.stmt)]
                yield Guarded(items=self.block(inner))
            case ast.AnnAssign():
                if not self.lazy_annotations:
                    yield from self.expression(node.annotation)
                if node.value is not None:
                    yield from self.expression(node.value)
            case ast.Assert():
                yield Guarded(items=tuple(self.expression(node.test)))
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        yield from self.expression(child)

    def _import(self, node: ast.Import) -> Iterator[Item]:
        for alias in node.names:
            yield Need(module=alias.name, line=node.lineno)
            if alias.asname:
                self.aliases[alias.asname] = alias.name
            else:
                top = alias.name.partition(".")[0]
                self.aliases[top] = top

    def _import_from(self, node: ast.ImportFrom) -> Iterator[Item]:
        if node.module == "__future__":
            self.lazy_annotations |= any(alias.name == "annotations" for alias in node.names)
            return
        source = absolute(node.module, node.level, self.module, is_package=self.is_package)
        if source is None:
            return
        for alias in node.names:
            if alias.name == "*":
                yield Need(module=source, line=node.lineno)
                continue
            yield Need(module=source, names=(alias.name,), line=node.lineno)
            self.aliases[alias.asname or alias.name] = f"{source}.{alias.name}"

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Item]:
        arguments = node.args
        for each in (*node.decorator_list, *arguments.defaults, *(d for d in arguments.kw_defaults if d)):
            yield from self.expression(each)
        if not self.lazy_annotations:
            every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
            for argument in every:
                if argument is not None and argument.annotation is not None:
                    yield from self.expression(argument.annotation)
            if node.returns is not None:
                yield from self.expression(node.returns)
        # inside, only imports: attributes there are read of values that are not known here
        known = dict(self.aliases)
        items = tuple(item for item in _flat(self.block(node.body)) if not (isinstance(item, Need) and item.attribute))
        self.aliases = known
        if items:
            yield Late(items=items)

    def _try(self, node: ast.Try | ast.TryStar) -> Iterator[Item]:
        body = (*self.block(node.body), *self.block(node.orelse))
        caught: set[str] = set()
        instead: list[Item] = []
        for handler in node.handlers:
            inner = self.block(handler.body)
            names = _caught(handler)
            if _ends_in_raise(handler.body):
                continue
            caught |= names
            if names & (_CAUGHT | _CAUGHT_ATTRIBUTES):
                instead += inner
        if caught & (_CAUGHT | _CAUGHT_ATTRIBUTES):
            yield Fallback(first=body, instead=tuple(instead), caught=frozenset(caught))
        else:
            yield from body
        yield from self.block(node.finalbody)

    def _if(self, node: ast.If) -> Iterator[Item]:
        if is_type_checking(node.test):
            # the names are known to the annotations that follow, which are texts then
            self.block(node.body)
            yield from self.block(node.orelse)
            return
        if "__name__" in ast.unparse(node.test):
            return
        yield from self.expression(node.test)
        yield Guarded(items=(*self.block(node.body), *self.block(node.orelse)))

    def expression(self, node: ast.expr) -> Iterator[Item]:
        """Yield the attributes of modules that `node` reads."""
        match node:
            case ast.Lambda():
                return
            case ast.IfExp():
                yield from self.expression(node.test)
                yield Guarded(items=(*self.expression(node.body), *self.expression(node.orelse)))
            case ast.BoolOp():
                # `hasattr(torch, "x") and torch.x`
                yield from self.expression(node.values[0])
                yield Guarded(items=tuple(i for value in node.values[1:] for i in self.expression(value)))
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                yield Guarded(items=tuple(i for g in node.generators for i in self.expression(g.iter)))
            case ast.Attribute():
                names: list[str] = []
                inner: ast.expr = node
                while isinstance(inner, ast.Attribute):
                    names.append(inner.attr)
                    inner = inner.value
                if isinstance(inner, ast.Name):
                    if inner.id in self.aliases:
                        target = self.aliases[inner.id]
                        yield Need(module=target, names=tuple(reversed(names)), attribute=True, line=node.lineno)
                else:
                    yield from self.expression(inner)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        yield from self.expression(child)
                    elif isinstance(child, ast.keyword):
                        yield from self.expression(child.value)


def _flat(items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items of a function's body; attributes that it reads fall away at any depth."""
    for item in items:
        if isinstance(item, Need):
            if not item.attribute:
                yield item
        elif isinstance(item, Fallback):
            first, instead = tuple(_flat(item.first)), tuple(_flat(item.instead))
            if first or instead:
                yield Fallback(first=first, instead=instead, caught=item.caught)
        else:
            inner = tuple(_flat(item.items))
            if inner:
                yield type(item)(items=inner)


def _caught(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {"BaseException"}
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(each).rpartition(".")[2] for each in types}


def _ends_in_raise(body: Sequence[ast.stmt]) -> bool:
    return any(isinstance(statement, ast.Raise) for statement in body)


@lru_cache(_KEPT)
def needs_of(source: str, module: str, *, is_package: bool) -> tuple[Item, ...]:
    """Return what the file of `module`, whose text is `source`, asks of modules.

    Raises:
        SyntaxError: it is no Python that this interpreter reads. (ValueError and RecursionError, too.)

    """
    return _Reader(module=module, is_package=is_package).block(ast.parse(source).body)


def judged(items: Sequence[Item], has: Callable[[Need], Answer | None]) -> Iterator[tuple[Need, State]]:
    """Yield each need with its state.

    Args:
        items: as `needs_of` returns them.
        has: whether a need is met; None for one that is not asked about.

    """
    for item in items:
        match item:
            case Need():
                answer = has(item)
                if answer is not None:
                    yield item, _STATES[answer]
            case Guarded():
                yield from ((need, _softened(state, "guarded")) for need, state in judged(item.items, has))
            case Late():
                yield from ((need, _softened(state, "late")) for need, state in judged(item.items, has))
            case Fallback():
                yield from _chosen(item, has)


_STATES: dict[Answer, State] = {"yes": "present", "no": "missing", "unknown": "unknown"}


def _softened(state: State, to: State) -> State:
    if state == "unknown":
        return "guarded"  # whether it is there does not decide
    return to if state == "missing" else state


def _chosen(choice: Fallback, has: Callable[[Need], Answer | None]) -> Iterator[tuple[Need, State]]:
    failed = undecided = False
    for need, state in judged(choice.first, has):
        caught = choice.caught & (_CAUGHT_ATTRIBUTES if need.attribute else _CAUGHT)
        failed |= state == "missing" and bool(caught)
        undecided |= state == "unknown"
        yield need, _softened(state, "guarded") if caught else state
    if failed:
        yield from judged(choice.instead, has)
    elif undecided:
        yield from ((need, _softened(state, "guarded")) for need, state in judged(choice.instead, has))

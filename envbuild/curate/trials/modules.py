"""Which names a module of a release has, read from its source: nothing of it is imported."""

import ast
import importlib
import re
import sys
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

Answer = Literal["yes", "no", "unknown"]

_COMPILED = re.compile(r"(?P<stem>[^/]+?)(?:\.cpython-[^/]+|\.abi3|\.pypy[^/]+)?\.(?:so|pyd)")
_DEEPEST = 12
"""Star imports that follow one another."""
_KEPT = 1 << 13
"""Files of which the result is kept: most are the same in many releases."""
# torch/csrc/tensor/python_tensor.cpp gives these to torch and torch.cuda when torch is imported
_MADE_BY_TORCH = re.compile(
    r"torch(?:\.cuda)?(?:\.sparse)?\.(?:BFloat16|Bool|Byte|Char|Double|Float|Half|Int|Long|Short)Tensor"
)
_STUB_NAME = re.compile(r"^(?:(?:class|def|async def) +)?([A-Za-z_]\w*) *[\[(:=]", re.MULTILINE)
_OF_EVERY_MODULE = frozenset({"__name__", "__file__", "__doc__", "__path__", "__spec__", "__dict__", "__package__"})


@dataclass(frozen=True, kw_only=True)
class Names:
    """What the source of one module says of the module's names."""

    bound: frozenset[str]
    """Bound at the level of the module, behind any condition but `TYPE_CHECKING`."""
    stars: tuple[str, ...] = ()
    """Modules, by their full names, of which it imports everything."""
    exported: frozenset[str] | None = None
    """Its `__all__`, where that is one list of texts."""
    declared: frozenset[str] = frozenset()
    """What it declares for type checkers alone, and the texts in its `__getattr__`: names that an open module does make."""
    declared_stars: tuple[str, ...] = ()
    registered: frozenset[str] = frozenset()
    """What it puts below its own name into `sys.modules`, such as torch does with `torch.ops`."""
    open: bool = False
    """Whether it makes names while it runs: a `__getattr__`, writes to `globals()`, another object in `sys.modules`."""


def is_type_checking(test: ast.expr) -> bool:
    """Return whether the condition holds for type checkers alone."""
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def absolute(module: str | None, level: int, within: str, *, is_package: bool) -> str | None:
    """Return the full name of what `from ...module import` in the module `within` names; None above the top."""
    if level == 0:
        return module or None
    parts = within.split(".")
    parts = parts[: len(parts) - level + (1 if is_package else 0)]
    return ".".join([*parts, *([module] if module else [])]) if parts else None


class _Reader(ast.NodeVisitor):
    def __init__(self, module: str, *, is_package: bool) -> None:
        self.module, self.is_package = module, is_package
        self.bound: set[str] = set()
        self.stars: list[str] = []
        self.exported: set[str] | None = None
        self.open = False
        self.declared: set[str] = set()
        self.declared_stars: list[str] = []
        self.registered: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._bind(node.name)
        if node.name == "__getattr__":
            self.open = True
            texts = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
            self.declared.update(text for text in texts if isinstance(text, str))
        for inner in ast.walk(node):
            if isinstance(inner, ast.Global):  # it makes a name of the module
                self.bound.update(inner.names)
            elif isinstance(inner, ast.Call):
                self.open |= self._fills(inner)
            elif isinstance(inner, ast.Assign):
                self.open |= any(_writes_modules(target) for target in inner.targets)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - as ast names it

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._bind(node.name)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        del node

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._bind(alias.asname or alias.name.partition(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name != "*":
                self._bind(alias.asname or alias.name)
                continue
            source = absolute(node.module, node.level, self.module, is_package=self.is_package)
            if source:
                self.stars.append(source)

    def visit_If(self, node: ast.If) -> None:
        if not is_type_checking(node.test):
            self.generic_visit(node)
            return
        declared = _Reader(self.module, is_package=self.is_package)
        for each in node.body:
            declared.visit(each)
        self.declared |= declared.bound
        self.declared_stars += declared.stars
        for each in node.orelse:
            self.visit(each)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._bind(node.id)
        elif isinstance(node.ctx, ast.Del):
            self.bound.discard(node.id)

    def visit_For(self, node: ast.For) -> None:
        # `for name in ["a", "b"]: globals()[name] = ...`
        into = [f"{each}[{ast.unparse(node.target)}]" for each in ("globals()", "vars()")]
        targets = {ast.unparse(target) for each in node.body if isinstance(each, ast.Assign) for target in each.targets}
        if targets & set(into) and isinstance(node.iter, ast.List | ast.Tuple):
            texts = (each.value for each in node.iter.elts if isinstance(each, ast.Constant))
            self.bound.update(text for text in texts if isinstance(text, str))
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            self._export(node.value)
        if any(_writes_modules(target) for target in node.targets):
            self.open = True
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name) and node.target.id == "__all__":
            self._export(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        if called in {"globals().update", "vars().update", "exec"}:
            self.open = True
        if called.endswith("sys.modules.setdefault") and node.args:
            self.registered.add(_last_text(node.args[0]).rpartition(".")[2])
        if called == "setattr" and node.args and "modules" in ast.unparse(node.args[0]):
            self.open = True
        self.generic_visit(node)

    def _fills(self, call: ast.Call) -> bool:
        """Return whether a call in a function gives the module names: numpy.dtypes is filled by C so."""
        called = ast.unparse(call.func)
        if called in {"globals().update", "__all__.append", "__all__.extend"}:
            return True
        first = ast.unparse(call.args[0]) if called == "setattr" and call.args else ""
        return first == self.module.rpartition(".")[2] or "sys.modules" in first

    def _bind(self, name: str) -> None:
        self.bound.add(name)

    def _export(self, value: ast.expr) -> None:
        if isinstance(value, ast.List | ast.Tuple) and all(
            isinstance(each, ast.Constant) and isinstance(each.value, str) for each in value.elts
        ):
            names = {str(each.value) for each in value.elts if isinstance(each, ast.Constant)}
            self.exported = names | (self.exported or set())


def _last_text(node: ast.expr) -> str:
    """Return the text of a constant, or the last one of an f-string."""
    last = node.values[-1] if isinstance(node, ast.JoinedStr) and node.values else node
    return last.value if isinstance(last, ast.Constant) and isinstance(last.value, str) else ""


def _writes_modules(target: ast.expr) -> bool:
    if not isinstance(target, ast.Subscript):
        return False
    return ast.unparse(target.value) in {"globals()", "vars()", "sys.modules"}


@lru_cache(_KEPT)
def names_of(source: str, module: str, *, is_package: bool) -> Names:
    """Return the names of the module `module` whose text is `source`.

    Raises:
        SyntaxError: it is no Python that this interpreter reads. (ValueError and RecursionError, too.)

    """
    reader = _Reader(module, is_package=is_package)
    for statement in ast.parse(source).body:
        reader.visit(statement)
    exported = frozenset(reader.exported) if reader.exported is not None else None
    return Names(
        bound=frozenset(reader.bound),
        stars=tuple(reader.stars),
        exported=exported,
        declared=frozenset(reader.declared),
        declared_stars=tuple(reader.declared_stars),
        registered=frozenset(reader.registered),
        open=reader.open,
    )


@lru_cache(_KEPT)
def _public(module: str) -> frozenset[str]:
    """Return the names that a module of Python's own library gives to `from MODULE import *`; of another, none."""
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return frozenset()
    try:
        found = importlib.import_module(module)
    except ImportError:
        return frozenset()
    return frozenset(getattr(found, "__all__", None) or (name for name in dir(found) if not name.startswith("_")))


class Library:
    """The modules of one release: its paths, and the text of those that are looked at.

    Args:
        paths: of its files, relative to site-packages.
        text: returns the text of one of them.

    """

    def __init__(self, paths: Iterable[str], text: Callable[[str], str]) -> None:
        self._text = text
        self._paths = frozenset(paths)
        self._folders: set[str] = set()
        self._compiled: set[str] = set()
        for path in self._paths:
            parts = path.split("/")
            self._folders.update("/".join(parts[:n]) for n in range(1, len(parts)))
            if match := _COMPILED.fullmatch(parts[-1]):
                self._compiled.add("/".join([*parts[:-1], match["stem"]]))
        self._names: dict[str, Names | None] = {}
        self._answers: dict[Hashable, Answer] = {}

    def answered(self, question: Hashable, answer: Callable[[], Answer]) -> Answer:
        """Return what `answer` gives, worked out once: most releases of a component ask the same."""
        if question not in self._answers:
            self._answers[question] = answer()
        return self._answers[question]

    @cached_property
    def roots(self) -> frozenset[str]:
        """The names under which its top modules are imported."""
        tops = {path.partition("/")[0].removesuffix(".py") for path in self._paths if path.endswith(".py")}
        tops |= {path for path in self._compiled if "/" not in path}
        return frozenset(top for top in tops if top.isidentifier())

    def source_of(self, module: str) -> str | None:
        """Return the path of the Python file of `module`, or None."""
        stem = module.replace(".", "/")
        return next((path for path in (f"{stem}/__init__.py", f"{stem}.py") if path in self._paths), None)

    def exists(self, module: str) -> Answer:
        """Return whether `module` can be imported, as far as files show it.

        A compiled module may hold others, which a stub names where somebody wrote one.
        """
        stem = module.replace(".", "/")
        if self.source_of(module) is not None or stem in self._compiled:
            return "yes"
        parts = stem.split("/")
        if any("/".join(parts[:n]) in self._compiled for n in range(1, len(parts))):
            return "yes" if self._stubs(stem) else "unknown"
        return "yes" if stem in self._folders or self.is_object(module) else "no"

    def is_object(self, module: str) -> bool:
        """Return whether `module` is no file and an object that its parent registers as a module."""
        parent, _, name = module.rpartition(".")
        if not parent or self.source_of(parent) is None or self.source_of(module) is not None:
            return False
        names = self.names(parent)
        return names is not None and name in names.registered

    def _stubs(self, stem: str) -> list[str]:
        return [path for path in (f"{stem}/__init__.pyi", f"{stem}.pyi") if path in self._paths]

    def is_plain_folder(self, module: str) -> bool:
        """Return whether `module` is a folder without its own source."""
        stem = module.replace(".", "/")
        return self.source_of(module) is None and stem not in self._compiled and stem in self._folders

    def binds(self, module: str, name: str) -> bool:
        """Return whether the source of `module` makes `name` itself."""
        names = self.names(module)
        return names is not None and name in names.bound

    def names(self, module: str) -> Names | None:
        """Return what the source of `module` says, or that of its stub; None where it has neither that can be read."""
        if module not in self._names:
            self._names[module] = self._read(module)
        return self._names[module]

    def _read(self, module: str) -> Names | None:
        source = self.source_of(module)
        stubs = self._stubs(module.replace(".", "/"))
        if source is None:
            found = self._read_file(stubs[0], module) if stubs else None
            # a stub need not have all that a compiled module has
            return Names(bound=found.bound, stars=found.stars, open=True) if found else None
        found = self._read_file(source, module)
        if found is not None and found.open and stubs:
            stub = self._read_file(stubs[0], module)
            # a stub in the syntax of a newer Python shows its names all the same
            names = stub.bound if stub else frozenset(_STUB_NAME.findall(self._text(stubs[0])))
            return replace(found, declared=found.declared | names)
        return found

    def _read_file(self, path: str, module: str) -> Names | None:
        try:
            return names_of(self._text(path), module, is_package="/__init__." in path)
        except (SyntaxError, ValueError, RecursionError):
            return None

    def has(self, module: str, name: str) -> Answer:
        """Return whether `from module import name` finds something, as far as the files show it."""
        return self._has(module, name, 0)

    def _has(self, module: str, name: str, depth: int) -> Answer:
        if self.exists(f"{module}.{name}") == "yes":
            return "yes"
        there = self.exists(module)
        if there != "yes":
            return there
        if self.is_object(module):
            return "yes"  # it makes what it is asked for: any name is a namespace of torch.ops
        names = self.names(module)
        if names is None:
            return "no" if self.is_plain_folder(module) else "unknown"
        if name in names.bound or name in _OF_EVERY_MODULE or (names.open and name in names.declared):
            return "yes"
        if _MADE_BY_TORCH.fullmatch(f"{module}.{name}"):
            return "yes"
        answer: Answer = "unknown" if names.open else "no"
        for star in (*names.stars, *(names.declared_stars if names.open else ())):
            if name in _public(star):
                return "yes"
            if depth >= _DEEPEST or star.partition(".")[0] not in self.roots:
                answer = "unknown"  # of another distribution
                continue
            exported = self._exported(star)
            if name not in exported if exported is not None else name.startswith("_"):
                continue
            inner = self._has(star, name, depth + 1)
            if inner == "yes":
                return "yes"
            answer = "unknown" if inner == "unknown" else answer
        return answer

    def _exported(self, module: str) -> frozenset[str] | None:
        names = self.names(module)
        return names.exported if names is not None and not names.open else None

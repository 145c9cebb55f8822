"""Which Python reads a file: by its grammar, and by the annotations that are evaluated while it is imported."""

import ast
from collections.abc import Iterator

_OLDEST, _NEWEST = 7, 14
"""Minors of Python 3 that are distinguished: one before the oldest that a cell has, and the newest."""
_GENERIC = {"dict", "frozenset", "list", "set", "tuple", "type"}
"""What takes `[...]` from Python 3.9 on."""


def lowest_python(source: str) -> int:
    """Return the minor of the lowest Python 3 that reads `source`, 7 at least.

    `match` needs 3.10, and so does `X | Y` in an annotation; `tuple[int]` in one needs 3.9. Annotations count where they are
    evaluated: not with `from __future__ import annotations`, and not on the variables of a function.

    Raises:
        SyntaxError: no Python up to this interpreter's reads it. (ValueError and RecursionError, too.)

    """
    tree = ast.parse(source)
    lowest = next((minor for minor in range(_OLDEST, _NEWEST) if _reads(source, minor)), _NEWEST)
    if any(isinstance(each, ast.ImportFrom) and each.module == "__future__" and _postponed(each) for each in tree.body):
        return lowest
    for annotation in _evaluated(tree):
        for each in ast.walk(annotation):
            if isinstance(each, ast.BinOp) and isinstance(each.op, ast.BitOr):
                lowest = max(lowest, 10)
            elif isinstance(each, ast.Subscript) and isinstance(each.value, ast.Name) and each.value.id in _GENERIC:
                lowest = max(lowest, 9)
    return lowest


def _reads(source: str, minor: int) -> bool:
    try:
        ast.parse(source, feature_version=(3, minor))
    except SyntaxError:
        return False
    return True


def _postponed(statement: ast.ImportFrom) -> bool:
    return any(name.name == "annotations" for name in statement.names)


def _evaluated(node: ast.AST, *, inside: bool = False) -> Iterator[ast.expr]:
    """Yield the annotations below `node` that importing the file evaluates; `inside` is the body of a function."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            if not inside:
                args = each.args
                every = (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
                yield from (arg.annotation for arg in every if arg and arg.annotation)
                if each.returns:
                    yield each.returns
            # a function in a function is made when the outer one is called, and its class likewise
            yield from _evaluated(each, inside=True)
        elif isinstance(each, ast.AnnAssign) and not inside:
            yield each.annotation
        else:
            yield from _evaluated(each, inside=inside)

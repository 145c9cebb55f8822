"""What the compiled form of Dockerfile.j2 calls: the part of Jinja that the template uses, without importing Jinja.

`scripts/compile_template.py` writes the compiled form (`compiled_dockerfile`) from the template by Jinja's own compiler. It
counts only while the template is the one that it was made from; otherwise, and for a stack, Jinja itself renders. Here a
name or an attribute that does not exist is an error at once, as with Jinja's StrictUndefined.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

from markupsafe import Markup, escape

missing: Any = object()
__all__ = ["LoopContext", "Macro", "Markup", "TemplateRuntimeError", "Undefined", "escape", "identity", "internalcode"]
__all__ += ["Context", "Environment", "markup_join", "missing"]


class TemplateRuntimeError(LookupError):
    """The template names something that does not exist."""


def Undefined(hint: str | None = None, *, name: str = "") -> NoReturn:  # noqa: N802 - Jinja's name
    """Refuse a name without a value."""
    raise TemplateRuntimeError(hint or f"{name!r} is undefined")


def identity(value: Any) -> Any:
    """Return the value."""
    return value


internalcode = identity


def markup_join(parts: Iterable[Any]) -> str:
    """Join what `~` joins; the template joins plain names alone, and what is quoted stays quoted."""
    values = list(parts)
    if any(hasattr(value, "__html__") for value in values):
        return Markup("").join(values)
    return "".join(map(str, values))


class LoopContext:
    """A loop that knows which of its items is the last."""

    def __init__(self, items: Iterable[Any], _undefined: Any) -> None:
        self._items = list(items)
        self.last = False

    def __iter__(self) -> Iterator[tuple[Any, "LoopContext"]]:
        for place, item in enumerate(self._items, 1):
            self.last = place == len(self._items)
            yield item, self


class Macro:
    """A macro of the template, with values for all of its arguments."""

    def __init__(self, _environment: Any, function: Callable[..., str], name: str, *_: Any) -> None:
        self._function, self.name = function, name

    def __call__(self, *arguments: Any) -> Markup:
        return Markup(self._function(*arguments))  # noqa: S704 - it wrote each value through `finalize`


class Context:
    """The values that the template is given."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.vars: dict[str, Any] = dict(values)
        self.exported_vars: set[str] = set()
        self.eval_ctx = SimpleNamespace(autoescape=True)

    def resolve_or_missing(self, name: str) -> Any:
        """Return a value by name."""
        return self.vars.get(name, missing)

    def call(self, function: Callable[..., Any], *arguments: Any, **loop: Any) -> Any:
        """Call a macro, or a method of a value."""
        del loop
        return function(*arguments)


class Environment:
    """Attributes, filters, and how an expression is written."""

    def __init__(self, filters: Mapping[str, Callable[..., Any]], finalize: Callable[[Any], Any]) -> None:
        self.filters = {**filters, "join": _join}
        self.finalize = finalize
        self.undefined = Undefined
        self.concat = "".join

    def getattr(self, value: Any, name: str) -> Any:
        """Return an attribute, or else an item, of a value."""
        try:
            return getattr(value, name)
        except AttributeError:
            return self.getitem(value, name)

    def getitem(self, value: Any, key: Any) -> Any:
        """Return an item of a value."""
        try:
            return value[key]
        except (LookupError, TypeError):
            raise TemplateRuntimeError(f"{type(value).__name__} has no {key!r}") from None


def _join(_context: Any, values: Iterable[Any], by: str = "") -> str:
    parts = list(values)
    if any(hasattr(part, "__html__") for part in parts):
        return escape(by).join(parts)
    return by.join(map(str, parts))

"""Immutable values as plain classes: what `dataclasses.dataclass(frozen=True, kw_only=True)` makes, without its start-up.

`dataclasses` imports `inspect`, and it writes, compiles and runs the source of six methods for every class. For the classes
that a plain `resolve` meets that is 25 ms, as long as all the rest of its answer. Here the methods are written once and
read the fields from the class. Making one instance takes longer (1 µs instead of 0.5), so a class of which there are
thousands is written out, as `solver.clauses.Clause` is.

The functions of `dataclasses` (`replace`, `asdict`, `fields`) take these classes, too; `replace` here does it without them.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, dataclass_transform, get_origin

if TYPE_CHECKING:
    import dataclasses

_Value = TypeVar("_Value", bound="Frozen")


class _Made:
    """A default that is made for each instance."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory = factory


def field(*, default_factory: Callable[[], Any]) -> Any:
    """State a default that is made for each instance, as the function of that name of `dataclasses`."""
    return _Made(default_factory)


class _Fields:
    """`__dataclass_fields__`, made when a function of `dataclasses` asks for it."""

    def __get__(self, instance: object, cls: "type[Frozen]") -> "dict[str, dataclasses.Field[Any]]":
        import dataclasses

        def stated(name: str) -> Any:
            given = cls._defaults.get(name, dataclasses.MISSING)
            if isinstance(given, _Made):
                return (name, Any, dataclasses.field(default_factory=given.factory))
            if type(given).__hash__ is None:  # such as an empty mapping that nothing can write to; refused as a default
                return (name, Any, dataclasses.field(default_factory=lambda: given))
            return (name, Any, dataclasses.field(default=given))

        made: Any = dataclasses.make_dataclass(cls.__name__, map(stated, cls._names), kw_only=True)
        found: dict[str, dataclasses.Field[Any]] = made.__dataclass_fields__
        return found


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Frozen:
    """Base of an immutable class that states its fields by annotation; instances are made from keyword arguments.

    With `eq=False` an instance is equal to itself alone.
    """

    _names: ClassVar[tuple[str, ...]] = ()
    _required: ClassVar[frozenset[str]] = frozenset()
    _defaults: ClassVar[Mapping[str, Any]] = {}
    _made: ClassVar[tuple[str, ...]] = ()
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    else:
        __dataclass_fields__ = _Fields()

    def __init_subclass__(cls, *, eq: bool = True) -> None:
        super().__init_subclass__()
        own = [name for name, kind in vars(cls).get("__annotations__", {}).items() if get_origin(kind) is not ClassVar]
        given = {name: vars(cls)[name] for name in own if name in vars(cls)}
        cls._names = (*(name for name in cls._names if name not in own), *own)
        cls._defaults = {**{k: v for k, v in cls._defaults.items() if k not in own}, **given}
        cls._required = frozenset(cls._names) - cls._defaults.keys()
        cls._made = tuple(name for name, default in cls._defaults.items() if isinstance(default, _Made))
        if not eq:
            cls.__eq__ = object.__eq__  # type: ignore[method-assign]
            cls.__hash__ = object.__hash__  # type: ignore[method-assign]

    if not TYPE_CHECKING:  # there, the fields say what it takes

        def __init__(self, **values: Any) -> None:
            if not self._required <= values.keys() or not values.keys() <= set(self._names):
                missing, unknown = self._required - values.keys(), values.keys() - set(self._names)
                raise TypeError(f"{type(self).__name__}: without {sorted(missing)}, unknown {sorted(unknown)}")
            own = vars(self)
            own.update(self._defaults)
            own.update(values)
            for name in self._made:
                if name not in values:
                    own[name] = own[name].factory()

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: {name}")

    def _values(self) -> tuple[Any, ...]:
        own = vars(self)
        return tuple([own[name] for name in self._names])

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        own = vars(self)
        return f"{type(self).__qualname__}({', '.join(f'{name}={own[name]!r}' for name in self._names)})"

    def _replaced(self, changes: Mapping[str, Any]) -> Self:
        own = vars(self)
        return type(self)(**{name: own[name] for name in self._names} | dict(changes))


def replace(value: _Value, **changes: Any) -> _Value:
    """Return a copy with some fields changed, as the function of that name of `dataclasses`."""
    return value._replaced(changes)  # noqa: SLF001 - the two are one

"""The base of every model of a data file: a plain class, whose checks are pydantic's and load when something is checked.

pydantic takes longer to import than most commands take to answer, and what this installation ships was checked before it
was compiled (`matrix.compiled`). So a `Model` is a plain class that states its fields as a pydantic model does. Whatever
comes from outside goes through `Model(...)`, `model_validate` or `model_validate_json`: these make the pydantic model of
the class, once, and give an instance of that. It is a subclass, so that both kinds are the same to who reads them.
Only `trusted` makes an instance without a check.
"""

import datetime as dt
import types
from collections.abc import Callable, Iterator, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

REQUIRED: Any = object()
"""The default of a field that has none."""
_Method = TypeVar("_Method", bound=Callable[..., Any])


class _Stated:
    """What `Field` states: a default and constraints. In an `Annotated` it adds the constraints to what pydantic checks."""

    def __init__(self, default: Any, alias: str | None, exclude_if: Any, constraints: Mapping[str, Any]) -> None:
        self.default, self.alias, self.exclude_if, self.constraints = default, alias, exclude_if, constraints

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        schema = handler(source)
        if schema["type"] not in {"str", "int"}:
            raise TypeError(f"constraints of a {schema['type']}: state them on the field, not in an Annotated")
        return {**schema, **self.constraints}


def Field(  # noqa: N802 - pydantic's name
    default: Any = REQUIRED,
    *,
    alias: str | None = None,
    exclude_if: Callable[[Any], bool] | None = None,
    **constraints: Any,
) -> Any:
    """State a field's default and constraints, as pydantic's function of that name."""
    return _Stated(default, alias, exclude_if, constraints)


class AfterValidator:
    """A function that checks a value once its type is right, as pydantic's class of that name."""

    def __init__(self, check: Callable[[Any], Any]) -> None:
        self.check = check

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core.core_schema import no_info_after_validator_function

        return no_info_after_validator_function(self.check, handler(source))


def model_validator(*, mode: Literal["after"]) -> Callable[[_Method], _Method]:
    """Make a method a check of the whole model, once its fields are right, as pydantic's function of that name."""
    del mode

    def marked(method: _Method) -> _Method:
        method.checks_all = True  # type: ignore[attr-defined]
        return method

    return marked


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
class Model:
    """Base of every data-file model: immutable, and an unknown key is an error."""

    model_fields: ClassVar[Mapping[str, _Stated]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if type(cls) is not type:
            return  # pydantic's metaclass: the pydantic model of a class
        own = {}
        for name, annotation in vars(cls).get("__annotations__", {}).items():
            if name.startswith("_") or get_origin(annotation) is ClassVar:
                continue
            given = vars(cls).get(name, REQUIRED)
            own[name] = given if isinstance(given, _Stated) else _Stated(given, None, None, {})
            if name in vars(cls):
                delattr(cls, name)
        cls.model_fields = {**cls.model_fields, **own}

    @classmethod
    def checked_type(cls) -> Any:
        """Return the pydantic model of this class, made when it is first asked for."""
        found: Any = vars(cls).get("_checked")
        if found is None:
            from envbuild.util.checked_model import pydantic_of

            found = pydantic_of(cls)
            cls._checked = found  # type: ignore[attr-defined]
            for name, value in (("_checked", found), ("_plain_class", cls)):
                setattr(found, name, value)
        return found

    @classmethod
    def trusted(cls, **values: Any) -> Self:
        """Return an instance without any check: for values of this program and of data that was checked before."""
        made = object.__new__(cls)
        for name, stated in cls.model_fields.items():
            vars(made)[name] = values.pop(name) if name in values else stated.default
            assert vars(made)[name] is not REQUIRED, f"{cls.__name__}.{name} has no value"  # noqa: S101
        assert not values, f"{cls.__name__} has no {', '.join(values)}"  # noqa: S101
        return made

    @classmethod
    def from_plain(
        cls,
        plain: "dict[str, Any] | bytes",
        *,
        later: Mapping[str, Callable[[], Any]] | None = None,
        **kinds: "type[Model]",
    ) -> Self:
        """Return an instance without any check, from what `plain` returned; its values are read when one is asked for.

        Args:
            plain: the values, or their JSON, which is parsed when a value is asked for.
            later: fields that `plain` does not have, each with what returns its value when it is asked for.
            kinds: the models of the fields of which the class says `Any`.

        """
        made = object.__new__(cls)
        vars(made)["_plain"] = plain
        if kinds:
            vars(made)["_kinds"] = kinds
        if later:
            vars(made)["_later"] = later
        return made

    def _read(self) -> None:
        """Make the fields from what `from_plain` got."""
        given = vars(self).pop("_plain")
        if isinstance(given, bytes):
            import json

            given = json.loads(given)
        cls = type(self)
        readers = vars(cls).get("_readers")
        if readers is None:
            readers = {name: _reader(kind) for name, kind in annotations_of(cls)}
            cls._readers = readers  # type: ignore[attr-defined]
        if kinds := vars(self).pop("_kinds", None):
            readers = readers | {name: kind.from_plain for name, kind in kinds.items()}
        later = vars(self).get("_later", ())
        for name, stated in cls.model_fields.items():
            if name in later:
                continue
            if name in given:
                read = readers[name]
                vars(self)[name] = given[name] if read is None else read(given[name])
            else:
                vars(self)[name] = stated.default

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: {name}")

    def __eq__(self, other: object) -> bool:
        mine, names = _plain_class(type(self)), _plain_class(type(self)).model_fields
        if not isinstance(other, Model) or _plain_class(type(other)) is not mine:
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name in type(self).model_fields))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in type(self).model_fields)
        return f"{type(self).__name__}({values})"

    if not TYPE_CHECKING:

        def __new__(cls, **_: Any) -> Self:
            return object.__new__(cls.checked_type())

        def __getattr__(self, name: str) -> Any:
            if "_plain" in vars(self):
                self._read()
            elif name in vars(self).get("_later", ()):
                vars(self)[name] = vars(self)["_later"][name]()
            else:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self, name)

        @classmethod
        def model_validate(cls, value: Any, **options: Any) -> Self:
            """Check a value and return an instance; raises pydantic's ValidationError, which is a ValueError."""
            return cls.checked_type().model_validate(value, **options)

        @classmethod
        def model_validate_json(cls, value: str | bytes, **options: Any) -> Self:
            """Check a text of JSON, likewise."""
            return cls.checked_type().model_validate_json(value, **options)

        @classmethod
        def model_json_schema(cls, **options: Any) -> dict[str, Any]:
            """Return the JSON Schema of the class."""
            return cls.checked_type().model_json_schema(**options)

        def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
            """Return a copy with some values replaced, without a check."""
            made = object.__new__(type(self))
            vars(made).update({name: getattr(self, name) for name in type(self).model_fields} | dict(update or {}))
            return made

        def model_dump(self, *, mode: str = "python", exclude_defaults: bool = False, **options: Any) -> dict[str, Any]:
            """Return the fields by name, as the pydantic model does."""
            if mode != "json" or options:
                return self.as_checked().model_dump(mode=mode, exclude_defaults=exclude_defaults, **options)
            return _dumped(self, exclude_defaults)

        def model_dump_json(self, *, indent: int | None = None, exclude_defaults: bool = False) -> str:
            """Return the fields as JSON, as the pydantic model does."""
            import json

            separators = (",", ":") if indent is None else None
            value = _dumped(self, exclude_defaults)
            return json.dumps(value, indent=indent, separators=separators, ensure_ascii=False)

        def as_checked(self) -> Any:
            """Return the same as an instance of the pydantic model, unchecked."""
            return (
                type(self)
                .checked_type()
                .model_construct(
                    **{
                        name: _each(getattr(self, name), lambda one: one.as_checked())
                        for name in type(self).model_fields
                    }
                )
            )

    else:
        # what the pydantic model has, for who reads types
        @classmethod
        def model_validate(cls, value: Any, *, context: Any = None) -> Self:
            raise NotImplementedError

        @classmethod
        def model_validate_json(cls, value: str | bytes | bytearray) -> Self:
            raise NotImplementedError

        @classmethod
        def model_json_schema(cls, *, by_alias: bool = True) -> dict[str, Any]:
            raise NotImplementedError

        def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
            raise NotImplementedError

        def model_dump(
            self,
            *,
            mode: str = "python",
            include: Any = None,
            exclude: Any = None,
            by_alias: bool | None = None,
            exclude_defaults: bool = False,
            exclude_none: bool = False,
        ) -> dict[str, Any]:
            raise NotImplementedError

        def model_dump_json(self, *, indent: int | None = None, exclude_defaults: bool = False) -> str:
            raise NotImplementedError


class NoFacts(Model):
    """What a release states of itself where its axis asks for nothing."""


def plain(model: Model) -> dict[str, Any]:
    """Return a model as values of JSON from which `from_plain` makes it again; what has its default is left out."""
    return {
        name: _as_json(value)
        for name, stated in _plain_class(type(model)).model_fields.items()
        if (value := getattr(model, name)) != stated.default
    }


def _as_json(value: Any, of_model: Callable[[Model], Any] = plain) -> Any:
    if isinstance(value, Model):
        return of_model(value)
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {key: _as_json(each, of_model) for key, each in value.items()}
    return [_as_json(each, of_model) for each in value] if isinstance(value, list | tuple) else value


def _dumped(model: Model, exclude_defaults: bool) -> dict[str, Any]:
    def dumped(one: Model) -> dict[str, Any]:
        return _dumped(one, exclude_defaults)

    found = {}
    for name, stated in _plain_class(type(model)).model_fields.items():
        value = getattr(model, name)
        if (exclude_defaults and value == stated.default) or (stated.exclude_if and stated.exclude_if(value)):
            continue
        found[name] = _as_json(value, dumped)
    return found


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with `change` applied to each plain model in it."""
    if isinstance(value, Model):
        return change(value) if type(value) is _plain_class(type(value)) else value
    if isinstance(value, tuple):
        return tuple(_each(one, change) for one in value)
    return {key: _each(one, change) for key, one in value.items()} if isinstance(value, dict) else value


def _plain_class(cls: type[Model]) -> type[Model]:
    """Return the class that somebody wrote, of it and its pydantic model."""
    found: type[Model] = vars(cls).get("_plain_class", cls)
    return found


def annotations_of(cls: type[Model]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the type of each field of a class."""
    for base in reversed(cls.__mro__):
        for name, kind in vars(base).get("__annotations__", {}).items():
            if name in cls.model_fields:
                yield name, kind


def _reader(kind: Any) -> Callable[[Any], Any] | None:
    """Return what makes a value of the type `kind` from its JSON; None where that is the value already."""
    origin, arguments = get_origin(kind), get_args(kind)
    if hasattr(kind, "__metadata__"):
        return _reader(arguments[0])
    if isinstance(kind, type) and issubclass(kind, Model):
        return kind.from_plain
    if kind in {dt.date, dt.datetime}:
        read: Callable[[Any], Any] = kind.fromisoformat
        return read
    if origin is tuple:
        one = _reader(arguments[0])
        return tuple if one is None else lambda value: tuple(map(one, value))
    if origin is dict:
        item = _reader(arguments[1])
        return None if item is None else lambda value: {key: item(each) for key, each in value.items()}
    if origin in {Union, types.UnionType}:
        readers = [(each, found) for each in arguments if (found := _reader(each)) is not None]
        if not readers:
            return None
        if len(readers) > 1:
            raise TypeError(f"{kind}: from JSON alone nobody can say which of these a value is")
        of_list, only = get_origin(readers[0][0]) is tuple, readers[0][1]
        return lambda value: only(value) if value is not None and (isinstance(value, list) or not of_list) else value
    return None

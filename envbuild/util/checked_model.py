"""The pydantic model of a `Model`, for what is checked: imported when something is, since pydantic takes longer than most commands."""

import types
from typing import Annotated, Any, Union, get_args, get_origin

import pydantic

from envbuild.util.model import REQUIRED, Model, annotations_of


def _checked_kind(kind: Any) -> Any:
    """Return an annotation with the pydantic model of each class in it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Model):
        return kind.checked_type()
    if hasattr(kind, "__metadata__"):
        return Annotated[(_checked_kind(arguments[0]), *kind.__metadata__)]
    if origin in {Union, types.UnionType}:
        return Union[tuple(map(_checked_kind, arguments))]  # noqa: UP007
    return origin[tuple(map(_checked_kind, arguments))] if origin in {tuple, dict, list} else kind


def pydantic_of(cls: type[Model]) -> type[pydantic.BaseModel]:
    """Return a pydantic model that is a subclass of `cls`, with its fields, constraints and checks."""
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__annotations__": {name: _checked_kind(kind) for name, kind in annotations_of(cls)},
        # deferred: a command checks by a few of the models, and need not wait for the validators of all
        "model_config": pydantic.ConfigDict(
            frozen=True,
            extra="forbid",
            populate_by_name=True,
            defer_build=True,
            allow_inf_nan=False,
            from_attributes=True,  # a plain instance is checked like anything else
        ),
        "__eq__": Model.__eq__,
        "__hash__": Model.__hash__,
    }
    for name, stated in cls.model_fields.items():
        options = dict(stated.constraints)
        options |= {"alias": stated.alias} if stated.alias else {}
        options |= {"exclude_if": stated.exclude_if} if stated.exclude_if else {}
        given = {} if stated.default is REQUIRED else {"default": stated.default}
        if options or given:
            body[name] = pydantic.Field(**given, **options)
    for base in reversed(cls.__mro__):
        for name, each in vars(base).items():
            if getattr(each, "checks_all", False):
                body[name] = pydantic.model_validator(mode="after")(each)
    return types.new_class(cls.__name__, (pydantic.BaseModel, cls), exec_body=lambda namespace: namespace.update(body))

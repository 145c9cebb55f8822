"""click's decorators, as a command's module states them, applied by click or read by `quick`.

Where click is loaded, a decorator here is click's at once. Where it is not, the decorated function becomes a `Declared`,
which keeps what was stated: `quick` reads the options from it, and `program` has click make the command of it.
"""

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Command = TypeVar("_Command", bound=Callable[..., Any])


class Stated:
    """A call of a function of click, such as `option("--json", is_flag=True)`."""

    def __init__(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.name, self.arguments, self.options = name, arguments, options

    def real(self) -> Any:
        """Return what click makes of it."""
        import click

        options = {key: each.real() if isinstance(each, Stated) else each for key, each in self.options.items()}
        return getattr(click, self.name)(*self.arguments, **options)

    def __call__(self, command: _Command) -> _Command:
        """Decorate a function."""
        return cast("_Command", self._applied(command))

    def _applied(self, command: Any) -> Any:
        if isinstance(command, Declared):
            return Declared(command.function, (*command.stated, self))
        return self.real()(command) if "click" in sys.modules else Declared(command, (self,))


class Declared:
    """A function with the decorators that make a command of it, the innermost first."""

    def __init__(self, function: Callable[..., Any], stated: tuple[Stated, ...]) -> None:
        self.function, self.stated = function, stated

    def real(self) -> Any:
        """Return click's command."""
        command: Any = self.function
        for each in self.stated:
            command = each.real()(command)
        return command


def command(*arguments: Any, **options: Any) -> Stated:
    """State click's `command`."""
    return Stated("command", arguments, options)


def option(*arguments: Any, **options: Any) -> Stated:
    """State click's `option`."""
    return Stated("option", arguments, options)


def argument(*arguments: Any, **options: Any) -> Stated:
    """State click's `argument`."""
    return Stated("argument", arguments, options)


def IntRange(*arguments: Any, **options: Any) -> Stated:  # noqa: N802 - click's name
    """State click's type `IntRange`."""
    return Stated("IntRange", arguments, options)


def Choice(*arguments: Any, **options: Any) -> Stated:  # noqa: N802 - click's name
    """State click's type `Choice`."""
    return Stated("Choice", arguments, options)


def Path(*arguments: Any, **options: Any) -> Stated:  # noqa: N802 - click's name
    """State click's type `Path`."""
    return Stated("Path", arguments, options)

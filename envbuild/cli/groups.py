"""Groups of commands: their help has what each command does in whole, and the name of an axis may be one."""

from typing import TYPE_CHECKING

import click

from envbuild.cli.axes import axis_names
from envbuild.cli.complete import complete_axis
from envbuild.errors import UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Group(click.Group):
    """A group whose help wraps the lines about its commands; click cuts them off."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with the first sentence of its help."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(10_000))
                    for name, command in found
                    if command and not command.hidden
                ]
            )


class AxisGroup(Group):
    """A group in which the name of an axis is a command that lists its releases."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a subcommand, or one that lists the axis `cmd_name`."""
        command = super().get_command(ctx, cmd_name)
        if command is not None or cmd_name not in axis_names():
            return command
        from envbuild.cli.matrix_rows import axis_command

        return axis_command(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that `args` name and what is left of them.

        Raises:
            UsageError: there is no such command and no such axis.

        """
        word = args[0]
        if not word.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, word) is None:
            import difflib

            commands = self.list_commands(ctx)
            near = difflib.get_close_matches(word.casefold(), [*commands, *sorted(axis_names())], 1)
            kind = "axis and no such command" if not near else "command" if near[0] in commands else "axis"
            raise UsageError(
                f"no such {kind} {word!r}" + (f", did you mean {near[0]!r}?" if near else ""),
                where=ctx.command_path,
                hint=f"`envbuild matrix list` lists the axes, `{ctx.command_path} --help` the commands",
            )
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        """Complete a subcommand or the name of an axis."""
        return [*super().shell_complete(ctx, incomplete), *complete_axis(ctx, self.params[0], incomplete)]

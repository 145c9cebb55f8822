"""Groups of commands whose help has what each command does in whole."""

import click


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

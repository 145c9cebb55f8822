"""`envbuild completion`: the script that makes a shell complete envbuild's commands, flags and versions."""

import click

from envbuild.cli.output import emit, json_option

_SHELLS = ("bash", "zsh", "fish")

# click's script completes as zsh loads it from a folder of functions, and registers a function as it runs once more: without
# this, the second Tab of a shell completes nothing.
_AGAIN = """
if [[ $funcstack[1] == _envbuild && $zsh_eval_context[-1] != loadautofunc ]]; then
    _envbuild_completion "$@"
fi
"""


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@json_option
def completion(shell: str, as_json: bool) -> None:
    """Print the script that makes SHELL complete commands, flags, versions and stacks.

    \b
    bash   envbuild completion bash > ~/.local/share/bash-completion/completions/envbuild
    zsh    envbuild completion zsh > "${fpath[1]}/_envbuild"
    fish   envbuild completion fish > ~/.config/fish/completions/envbuild.fish

    Then start a new shell.
    """  # noqa: D301 - click reads the character
    from click.shell_completion import get_completion_class

    from envbuild.cli import cli

    found = get_completion_class(shell)
    assert found is not None  # noqa: S101 - click has these three
    text = found(cli, {}, "envbuild", "_ENVBUILD_COMPLETE").source()
    if shell == "fish":
        # fish sorts what it offers: 1.9.0 would come before 1.10.0, and the oldest first
        text = text.replace("complete --no-files", "complete --keep-order --no-files")
    text += _AGAIN if shell == "zsh" else ""
    emit({"shell": shell, "script": text}, as_json=as_json, human=lambda: text, exact=True)

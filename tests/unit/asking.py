"""What a command answers, asked in this process."""

from click.testing import CliRunner

from envbuild.cli.program import cli


def stdout_of(words: str) -> str:
    """Return the stdout of `envbuild WORDS`; its error is raised."""
    return CliRunner().invoke(cli, words.split(), standalone_mode=False, catch_exceptions=False).stdout


def resolved(words: str) -> str:
    """Return the answer of `envbuild resolve WORDS`."""
    return stdout_of(f"resolve {words}")

"""The completion scripts in the shells that read them. A shell that is not installed is skipped."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASH = ["bash", "--norc", "--noprofile", "-i"]
ZSH = ["zsh", "-f", "-i"]
FIRST = {
    # what the page has; the Tab key puts the first answer in, and then the next one
    "bash": "eval \"$(envbuild completion bash)\"; bind 'TAB:menu-complete'",
    "bash-completion": (
        "mkdir -p ~/.local/share/bash-completion/completions; "
        "envbuild completion bash > ~/.local/share/bash-completion/completions/envbuild; "
        ". /usr/share/bash-completion/bash_completion; bind 'TAB:menu-complete'"
    ),
    "zsh": 'envbuild completion zsh >"${fpath[1]}/_envbuild"; autoload -U compinit; compinit -u -D; setopt menu_complete',
}


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """A separate home, and this tree's `envbuild` on the PATH."""
    program = tmp_path / "bin" / "envbuild"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m envbuild "$@"\n')
    program.chmod(0o755)
    return {
        "PATH": f"{program.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "TERM": "dumb",
        "LANG": "C.UTF-8", "ENVBUILD_CACHE_DIR": str(tmp_path / "cache"),
    }  # fmt: skip


def required(shell: str) -> None:
    if shutil.which(shell, path="/usr/bin:/bin") is None:
        pytest.skip(f"{shell} is not installed")


def typed(shell: str, keys: str, environment: dict[str, str], folder: Path) -> str:
    """Return the command line that a shell on a terminal makes of some keys, among them Tab."""
    if shell == "bash-completion":
        if not Path("/usr/share/bash-completion/bash_completion").exists():
            pytest.skip("the package bash-completion is not installed")
    else:
        required(shell)
    (folder / "functions").mkdir(exist_ok=True)
    setup = f"fpath=({folder}/functions $fpath); {FIRST[shell]}" if shell == "zsh" else FIRST[shell]
    out = folder / "line"
    out.unlink(missing_ok=True)
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        ZSH if shell == "zsh" else BASH,
        stdin=end, stdout=end, stderr=end, env=environment, cwd=folder, start_new_session=True,
    )  # fmt: skip
    os.close(end)
    try:
        # Ctrl-A and Ctrl-E: the line becomes the words of a command that writes them down
        os.write(terminal, f"{setup}\r{keys}\x01printf '%s ' \x05>{out}.new; mv {out}.new {out}\r".encode())
        deadline, shown = time.monotonic() + 60, b""
        while not out.exists() and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 65536)
        assert out.exists(), shown.decode(errors="replace")
        return out.read_text().strip()
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


@pytest.mark.parametrize("shell", list(FIRST))
@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("envbuild resol\t--te 2.6\t", "envbuild resolve --te 2.6.0"),
        ("envbuild image --te 2.1\t\t", "envbuild image --te 2.18.0"),  # after 2.19.0
        ("envbuild image --gpu hop\t--stack llama3\t", "envbuild image --gpu hopper --stack llama3-70b"),
    ],
)
def test_the_tab_key_completes_a_line(shell, keys, line, environment, tmp_path):
    assert typed(shell, keys, environment, tmp_path) == line


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_tab_key_completes_a_file(shell, environment, tmp_path):
    (tmp_path / "my-stack.toml").touch()
    line = typed(shell, "envbuild image --stack ./my-st\t", environment, tmp_path)
    assert line == "envbuild image --stack ./my-stack.toml"


def fish(line: str, environment: dict[str, str], folder: Path) -> list[str]:
    """Return what fish offers for a line, in its order, without what it says of each."""
    required("fish")
    place = folder / ".config/fish/completions"
    place.mkdir(parents=True, exist_ok=True)
    script = 'envbuild completion fish > ~/.config/fish/completions/envbuild.fish; complete -C "$argv"'
    done = subprocess.run(
        ["fish", "-c", script, line], env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return [offered.partition("\t")[0] for offered in done.stdout.splitlines()]


def test_fish_offers_versions_newest_first(environment, tmp_path):
    assert fish("envbuild resol", environment, tmp_path) == ["resolve"]
    assert fish("envbuild image --te 2.6", environment, tmp_path) == ["2.6.0"]
    offered = fish("envbuild image --te ", environment, tmp_path)
    assert offered.index("2.12.0") < offered.index("2.6.0") < offered.index("1.9.0") < offered.index("none")
    (tmp_path / "my-stack.toml").touch()
    assert fish("envbuild image --stack ./my-st", environment, tmp_path) == ["./my-stack.toml"]

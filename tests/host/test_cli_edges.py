"""The edges of the command line: odd arguments, closed streams, interrupts, what goes to a terminal, what nobody foresaw."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from envbuild import cli
from envbuild.cli.output import emit, note
from envbuild.util.text import outgoing, printable, redact

ROOT = Path(__file__).parents[2]


def envbuild(*words, before="", after="", **environment):
    """Run the command line in a shell, between `before` and `after`."""
    command = ["sh", "-c", f'{before} exec "$@" {after}', "sh", sys.executable, "-m", "envbuild", *words]
    return subprocess.run(command, capture_output=True, env=os.environ | environment, check=False, timeout=120)


def one_message(done, code):
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stderr.count(b"envbuild: error: ") == 1


# -- options ----------------------------------------------------------------------------------------------------------


def commands(group=cli.cli, path=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def single_options():
    for path, command in commands():
        for option in command.params:
            if isinstance(option, click.Option) and not (option.is_flag or option.multiple or option.count):
                yield pytest.param(path, option, id=f"{'-'.join(path)}{max(option.opts, key=len)}")


def sample(option):
    return option.type.choices[0] if isinstance(option.type, click.Choice) else "1"


@pytest.mark.parametrize(("path", "option"), list(single_options()))
def test_an_option_that_takes_one_value_is_refused_twice_and_empty(path, option, capsys):
    flag = max(option.opts, key=len)
    for words, problem in (
        ([flag, sample(option), flag, sample(option)], f"{flag} is given 2 times"),
        ([option.opts[-1], sample(option), option.opts[0], sample(option)], f"{flag} is given 2 times"),
        ([flag, ""], f"the value of {flag} is empty"),
        ([flag, " "], f"the value of {flag} is empty"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main([*path, *words])
        assert ended.value.code == 2
        assert problem in capsys.readouterr().err


def test_there_are_such_options_in_every_part_of_the_command_line():
    found = {parameter.values[0][0] for parameter in single_options()}
    assert found >= {"resolve", "image", "lock", "render", "matrix", "smoke", "run", "launch", "doctor", "ci"}


def test_an_option_that_takes_several_values_may_be_given_again_and_not_empty():
    done = envbuild("run", "--dry-run", "-e", "A=1", "-e", "B=2", "x:1", "--", "true")
    assert done.returncode == 0, done.stderr
    assert b"A=1" in done.stdout
    assert b"B=2" in done.stdout
    one_message(envbuild("run", "--dry-run", "-e", "", "x:1", "--", "true"), 2)


def test_words_behind_two_dashes_are_the_commands_own():
    done = envbuild("run", "--dry-run", "x:1", "--", "train", "--gpus", "1", "--gpus", "2", "--name", "")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "spec",
    [
        "1" * 5000,
        ">=" + "9" * 5000,
        "1." * 3000 + "1",
        "!" + "9" * 5000,
        "12.6\x1b[2J",
        "12.6\n7",
        ",".join([">=1"] * 3000),
    ],
    ids=["digits", "specifier", "parts", "not", "escape", "line feed", "3000 parts"],
)
@pytest.mark.parametrize("axis", ["--cuda", "--te", "--apex", "--gpu", "--driver", "--base"])
def test_an_odd_version_is_a_usage_error(axis, spec, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["resolve", axis, spec])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert len(printed) < 1000
    assert "\x1b" not in printed
    assert "internal error" not in printed


def test_bytes_that_are_no_utf_8_in_an_argument_are_a_usage_error():
    for words in ((b"resolve", b"--cuda", b"\xff\xfe"), (b"resolve", b"--stack", b"\xff"), (b"check", b"\xff")):
        one_message(envbuild(*words, LC_ALL="C.UTF-8"), 2)


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("resolve", "--cuda", "cpu"), 0),
        (("resolve", "--cuda", "99"), 2),
        (("run", "--dry-run", "x:1", "--", "true"), 0),
    ],
    ids=["answer", "error", "run"],
)
def test_a_closed_stream_changes_neither_code_nor_answer(words, code, closed):
    done = envbuild(*words, after=closed)
    assert done.returncode == code
    assert b"Traceback" not in done.stderr + done.stdout
    assert b"envbuild: error" not in done.stdout  # what is for stderr does not go to stdout where stderr is closed


def test_ctrl_c_while_modules_load_is_one_line(tmp_path):
    loading = {"click": ("check", __file__), "pydantic": ("check", __file__), "json": ("resolve", "--cuda", "cpu")}
    for module, command in loading.items():
        folder = tmp_path / module
        folder.mkdir()
        (folder / f"{module}.py").write_text(
            "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(5)\n"
        )
        done = envbuild(*command, PYTHONPATH=f"{folder}:{ROOT}")
        assert done.returncode == 130, (module, done.stderr)
        assert b"Traceback" not in done.stderr, module
        printed = done.stderr.strip()  # click ends the line that ^C stands in
        assert printed.count(b"\n") == 0
        assert printed.startswith(b"envbuild: interrupted")


def test_the_console_script_starts_where_python_m_does():
    import tomli

    scripts = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"envbuild": "envbuild.__main__:main"}
    loaded = "import envbuild.__main__, sys; print([m for m in ('click', 'envbuild.cli') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", loaded], cwd=ROOT, text=True).strip() == "[]"


def test_an_interrupt_at_any_moment_is_no_traceback():
    for step in range(12):
        process = subprocess.Popen(
            [sys.executable, "-m", "envbuild", "resolve", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            # from where Python itself has started, which is not ours
            process.stderr.fileno()
            signal.sigtimedwait([], 0.12 + step * 0.04)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        if b"site" in err and b"Traceback" in err and b"envbuild" not in err:
            continue  # the interpreter's own start, before any module of ours
        assert b"Traceback" not in err, err.decode()
        assert process.returncode in {0, 130, -signal.SIGINT}
        if process.returncode == 0:
            json.loads(out)


# -- what nobody foresaw ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [KeyError("x\x1b[2J"), RecursionError("deep"), AssertionError(), ZeroDivisionError("z")]
)
def test_an_unforeseen_exception_is_one_message_and_exit_70(error, monkeypatch, capsys):
    def fails(**_):
        raise error

    monkeypatch.delenv("ENVBUILD_DEBUG", raising=False)
    monkeypatch.setattr(cli.cli, "main", fails)
    with pytest.raises(SystemExit) as ended:
        cli.main(["resolve", "--json"])
    printed = capsys.readouterr()
    assert ended.value.code == 70
    assert printed.err.startswith(f"envbuild: error: internal error: {type(error).__name__}")
    assert "please report" in printed.err
    assert "\x1b" not in printed.err
    assert json.loads(printed.out)["exit_code"] == 70
    monkeypatch.setenv("ENVBUILD_DEBUG", "1")
    with pytest.raises(type(error)):
        cli.main(["resolve", "--json"])


def test_too_little_memory_is_the_hosts(monkeypatch, capsys):
    monkeypatch.setattr(cli.cli, "main", lambda **_: bytearray(2**62))
    with pytest.raises(SystemExit) as ended:
        cli.main(["resolve"])
    assert ended.value.code == 8
    assert "memory" in capsys.readouterr().err


# -- what is printed --------------------------------------------------------------------------------------------------


def test_no_control_character_of_the_data_reaches_a_terminal(capsys):
    hostile = "a\x1b]0;title\x07\x1b[2Jb\rc\x9b1mtab\tline\nd\u202eevil\x7f"
    emit({}, as_json=False, human=lambda: hostile)
    note(hostile)
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert not set(text) & set("\x1b\x07\r\x9b\u202e\x7f")
        assert "tab\tline\nd" in text  # tab and line feed stay
        assert r"\x1b]0;title\x07" in text


def test_an_error_prints_no_control_character(tmp_path, capsys):
    file = tmp_path / "x.toml"
    file.write_text('"na\\u001b[2Jme" = 1\n')
    with pytest.raises(SystemExit) as ended:
        cli.main(["resolve", "--stack", str(file)])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    assert r"na\x1b[2Jme" in printed


def test_rich_prints_foreign_text_as_text(capsys):
    from rich.console import Console

    from envbuild.cli.output import marked

    console = Console(stderr=True, force_terminal=True, color_system="truecolor")
    foreign = "[bold]x[/] \x1b[2J [link=file:///]y"
    console.print(f"[green]ok[/] {marked(foreign)}", highlight=False)
    printed = capsys.readouterr().err
    assert "[bold]x[/]" in printed
    assert "\x1b[2J" not in printed
    assert "\x1b[32mok" in printed  # the colours of our own


SECRETS = {
    "https://user:hunter2@index.example/simple/x": "https://***@index.example/simple/x",
    "https://hunter2@index.example": "https://***@index.example",
    "git+ssh://a:hunter2@h/x": "git+ssh://***@h/x",
    "ssh://git@host/x": "ssh://git@host/x",
    "https://h/x?token=hunter2&y=1": "https://h/x?token=***&y=1",
    "HF_TOKEN=hunter2 python": "HF_TOKEN=*** python",
    "access_token=hunter2, x": "access_token=***, x",
    "Authorization: Bearer hunter2hunter2": "Authorization: Bearer ***",
    "authorization=Basic aHVudGVyMg==": "authorization=Basic ***",
    "sent Bearer hunter2hunter2hunter2 to": "sent Bearer *** to",
    '{"Authorization": "hunter2"}': '{"Authorization": "***"}',
    "a bearer of news": "a bearer of news",
    "gpus=2, level=step; see https://docs.example/a@b is kept": "gpus=2, level=step; see https://docs.example/a@b is kept",
}


@pytest.mark.parametrize(("text", "masked"), list(SECRETS.items()))
def test_a_secret_is_masked_in_text_and_json(text, masked, capsys):
    assert redact(text) == masked
    assert redact(masked) == masked
    answer = {"a": [text, {"b": text}], text: 1, "n": [1, 2.5, None, True, "\x1b"]}
    emit(answer, as_json=True, human=lambda: "")
    assert json.loads(capsys.readouterr().out) == {
        "a": [masked, {"b": masked}],
        masked: 1,
        "n": [1, 2.5, None, True, "\x1b"],
    }
    emit(answer, as_json=False, human=lambda: text)
    assert capsys.readouterr().out == masked + "\n"


def test_a_secret_is_masked_by_its_key():
    assert outgoing({"token": "hunter2", "Authorization": "x", "tokens": "7"}) == {
        "token": "***",
        "Authorization": "***",
        "tokens": "7",
    }


def test_a_secret_is_masked_in_an_error(monkeypatch, capsys):
    from envbuild.errors import HostError

    def fails(**_):
        raise HostError("https://u:hunter2@h answered", where="https://hunter2@h/x", hint="token=hunter2")

    monkeypatch.setattr(cli.cli, "main", fails)
    with pytest.raises(SystemExit):
        cli.main(["lock", "--json"])
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err
    assert json.loads(printed.out)["where"] == "https://***@h/x"


@pytest.mark.parametrize("make", [lambda n: "a" * n, lambda n: "://" * n, lambda n: "token=" * n, lambda n: "a:" * n])
def test_masking_takes_time_in_proportion_to_the_text(make):
    import time

    began = time.process_time()
    redact(make(1_000_000))
    printable(make(1_000_000))
    assert time.process_time() - began < 5


def test_what_is_rendered_is_what_a_file_gets(capsys):
    """A mask or an escape in a rendered file would change the build."""
    text = "RUN git clone https://$TOKEN@host/x\n# token=x \x1b\n"
    emit({"text": text}, as_json=True, human=lambda: text, exact=True)
    assert json.loads(capsys.readouterr().out)["text"] == text
    emit({}, as_json=False, human=lambda: text, exact=True)
    assert capsys.readouterr().out == text + "\n"


def test_what_is_rendered_on_a_terminal_has_no_control_characters(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    emit({}, as_json=False, human=lambda: "FROM x \x1b[2J", exact=True)
    assert capsys.readouterr().out == "FROM x \\x1b[2J\n"

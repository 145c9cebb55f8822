"""What every command prints as its help, and how a mistake in its arguments is reported."""

import json
import subprocess
import sys

import click
import pytest

from envbuild.cli import COMMANDS, SECTIONS, cli, main


def commands(group, path=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


EVERY = dict(commands(cli))


def test_every_command_exists_and_stands_in_one_section():
    assert {path[0] for path in EVERY} == set(COMMANDS)
    assert sum(len(section) for section in SECTIONS.values()) == len(COMMANDS)


def test_a_command_that_answers_takes_json():
    without = {
        path
        for path, command in EVERY.items()
        if not isinstance(command, click.Group) and all("--json" not in option.opts for option in command.params)
    }
    assert without == set()


def test_every_command_and_option_has_a_help_text():
    undocumented = [
        (path, option.name)
        for path, command in EVERY.items()
        for option in command.params
        if isinstance(option, click.Option) and not option.help and not isinstance(option.type, click.Choice)
    ]
    assert undocumented == []
    assert [path for path, command in EVERY.items() if not command.help] == []


@pytest.mark.parametrize(
    ("path", "line"), [(("matrix", "try"), "  names      each name"), (("completion",), "  zsh    envbuild")]
)
def test_a_table_in_a_help_text_keeps_its_lines(path, line):
    text = EVERY[path].get_help(click.Context(EVERY[path], terminal_width=100))
    assert f"\n{line}" in text
    assert "\\b" not in text


@pytest.mark.parametrize(
    ("shell", "words"),
    [("fish", "complete --keep-order --no-files --command envbuild "), ("zsh", "if [[ $funcstack[1] == _envbuild ")],
)
def test_what_is_changed_in_clicks_completion_script_is_there(capsys, shell, words):
    """Whatever shells this machine has, and whatever a later click writes."""
    with pytest.raises(SystemExit):
        main(["completion", shell])
    assert words in capsys.readouterr().out


def test_the_list_of_commands_loads_none_of_them():
    code = (
        "import sys, envbuild.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\nprint(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "envbuild.cli.image" not in done.stdout.splitlines()[-1].split()
    assert "resolve" in done.stdout


def test_the_axes_that_people_name_come_first():
    flags = [option.opts[0] for option in EVERY["resolve",].params]
    assert flags[:3] == ["--cuda", "--torch", "--te"]
    assert {"--nccl", "--glibc", "--stack", "--prefer"} <= set(flags)


@pytest.mark.parametrize(
    ("args", "what", "where"),
    [
        (["frobnicate"], "no such command 'frobnicate'", "envbuild"),
        (["resolve", "--cudaa", "12"], "no such option '--cudaa', did you mean '--cuda'?", "envbuild resolve"),
        (["pull", "--registry", "x"], "no such option '--registry'", "envbuild pull"),
        (["completion"], "missing argument '{bash|zsh|fish}'. Choose from: bash, zsh, fish", "envbuild completion"),
        (["help"], "no such command 'help'", "envbuild"),
        (["matrix", "cells"], "missing argument 'AXES...'", "envbuild matrix cells"),
        (["ci", "--limit", "0"], "invalid value for '--limit': 0 is not in the range x>=1", "envbuild ci"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_arguments_is_reported_like_every_other(capsys, args, what, where):
    with pytest.raises(SystemExit) as caught:
        main([*args, "--json"])
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert json.loads(out) == {
        "error": "usage",
        "what": what,
        "where": where,
        "hint": f"`{where} --help` lists what it takes",
        "exit_code": 2,
    }
    assert err.splitlines()[0] == f"envbuild: error: {what}"


@pytest.mark.parametrize("command", [["resolve"], ["matrix", "cells", "te"]])
def test_an_option_without_its_value_names_the_command(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([*command, "--gpu"])
    path = " ".join(["envbuild", *command]).removesuffix(" te")
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "envbuild: error: option '--gpu' requires an argument",
        f"  where: {path}",
        f"  to do: `{path} --help` lists what it takes",
    ]


def test_without_a_command_the_help_is_shown(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "Usage: envbuild" in capsys.readouterr().err


def test_an_image_with_replaced_inputs_is_not_pushed_as_its_locks(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["image", "--cuda", "cpu", "--push", "--build-context", "torch=docker-image://site/torch"])
    assert caught.value.code == 2
    assert "the registry stores images by their lock" in capsys.readouterr().err


def test_an_answer_that_reports_a_failure_is_the_only_json_object(tmp_path, capsys):
    """`lock` prints what it pinned and fails for what it could not; `check` lists its findings."""
    recipe = tmp_path / "Dockerfile"
    recipe.write_text("FROM nvidia/cuda:12.6.3-devel-ubuntu24.04\nENV PATH=/usr/local/cuda-11.8/bin:$PATH\n")
    with pytest.raises(SystemExit) as ended:
        main(["check", str(recipe), "--json"])
    out, _ = capsys.readouterr()
    assert ended.value.code != 0
    assert "error" not in json.loads(out)


def test_a_mistyped_command_gets_the_nearest(capsys):
    for words, near in ((["reslove"], "resolve"), (["matrix", "chekc"], "check")):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
        assert f"no such command '{words[-1]}', did you mean '{near}'?" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_hides_no_finding_of_the_others(tmp_path, capsys):
    (tmp_path / "Dockerfile").write_text("FROM nvidia/cuda:12.6.3-devel-ubuntu24.04\nRUN pip install apex\n")
    (tmp_path / "a.Dockerfile").write_bytes(b"\xff\xfe")
    (tmp_path / "z.Dockerfile").write_bytes(b"\xff\xfe")
    for form in ([], ["--json"], ["--format", "github"], ["--format", "sarif"]):
        with pytest.raises(SystemExit) as ended:
            main(["check", str(tmp_path), *form])
        out, err = capsys.readouterr()
        assert ended.value.code == 2
        assert "recipe-impostor" in out
        assert err.count("is not UTF-8") == 2
        assert f"where: {tmp_path / 'a.Dockerfile'}" in err
        if form == ["--json"]:
            unread = json.loads(out)["unread"]
            assert [each["file"] for each in unread] == [str(tmp_path / f"{each}.Dockerfile") for each in "az"]


def test_an_empty_path_does_not_mean_the_current_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Dockerfile").write_text("FROM debian\n")
    for empty in ("", " "):
        with pytest.raises(SystemExit) as ended:
            main(["check", empty])
        assert ended.value.code == 2
        assert "the value of FILE... is empty" in capsys.readouterr().err


@pytest.mark.parametrize("group", ["cache", "catalog", "matrix", "patch", "wheels"])
def test_the_help_of_a_group_cuts_no_line_off(group):
    text = EVERY[group,].get_help(click.Context(EVERY[group,], info_name=group))
    commands = text[text.index("\nCommands:\n") :]
    assert "..." not in commands
    assert commands.count("  list ") == 1

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from recorded import BARE, ENGINE, GEFORCE, H200, OLD_A100, ROOTLESS, Recording

from envbuild.cli import main
from envbuild.errors import HostError, UsageError
from envbuild.run.container import (
    Container,
    parse_environment,
    parse_image,
    parse_mount,
    parse_network,
    parse_user,
    run_flags,
    run_line,
    shown,
)
from envbuild.run.launch import (
    Job,
    Node,
    is_local,
    login_script,
    plan_launch,
    read_hostfile,
    run_launch,
    variables_script,
)
from envbuild.run.launch.beats import BEATING
from envbuild.settings import Settings

SETTINGS = Settings(cache_dir=Path("/nowhere"))


def flags(machine: Recording, **container: object) -> str:
    return " ".join(run_flags(machine.facts(), Container(image="img", **container))[0])


def test_a_training_node_gets_every_flag() -> None:
    found, notes = run_flags(H200.facts(), Container(image="img"))
    line = run_line(SETTINGS, Container(image="img"), ["python", "x.py"], found, terminal=False)
    assert shlex.join(line) == (
        "docker run --rm --pull never --interactive --gpus all --ipc host --ulimit stack=67108864 --ulimit memlock=-1 "
        "--network host --device /dev/infiniband --cap-add IPC_LOCK img python x.py"
    )
    assert notes == []


def test_without_gpus_the_same_line_has_none() -> None:
    assert flags(ENGINE) == "--ipc host --ulimit stack=67108864 --ulimit memlock=-1 --network host"


@pytest.mark.parametrize(
    ("machine", "gpus", "expected"),
    [
        (H200, "auto", "--gpus all"),
        (H200, "0,3", '--gpus "device=0,3"'),
        (H200, "none", "--env NVIDIA_VISIBLE_DEVICES=void"),
        (GEFORCE, "auto", "--device nvidia.com/gpu=all"),
        (GEFORCE, "0", "--device nvidia.com/gpu=0"),
        (H200.but(folders={"/usr/bin": ()}), "0,1", "--runtime nvidia --env NVIDIA_VISIBLE_DEVICES=0,1"),
        (GEFORCE, "none", ""),
    ],
)
def test_gpus_by_hook_by_runtime_and_by_cdi(machine: Recording, gpus: str, expected: str) -> None:
    assert flags(machine, gpus=gpus).partition("--ipc")[0].strip() == expected


@pytest.mark.parametrize(
    ("machine", "gpus", "says", "fix"),
    [
        (BARE, "all", "no GPU of this machine answers", "driver-installation-guide"),
        (OLD_A100, "all", "cannot see this machine's GPUs", "nvidia-ctk runtime configure"),
        (H200, "8", "8 GPUs, numbered from 0", "doctor"),
    ],
)
def test_gpus_that_cannot_be_had(machine: Recording, gpus: str, says: str, fix: str) -> None:
    with pytest.raises(HostError, match=says) as caught:
        flags(machine, gpus=gpus)
    assert fix in caught.value.hint
    assert caught.value.where == f"--gpus {gpus}"


def test_gpus_that_are_no_gpus() -> None:
    with pytest.raises(UsageError, match="names no GPUs"):
        flags(H200, gpus="some")


def test_auto_goes_on_without_gpus_and_says_so() -> None:
    found, notes = run_flags(OLD_A100.facts(), Container(image="img"))
    assert "--gpus" not in found
    assert "without the 1 GPU " in notes[0]
    assert "nvidia-ctk" in notes[0]


def test_limits_that_the_engine_may_not_lift() -> None:
    nested = H200.but(files={"/proc/11596/status": "CapEff:\t000001fffeffffff\n"})
    for machine in (nested, ROOTLESS):
        found, notes = run_flags(machine.facts(), Container(image="img", gpus="none"))
        assert "memlock=-1" not in found
        assert "locked memory" in notes[0]
        assert run_flags(machine.facts(), Container(image="img", gpus="none", infiniband="off"))[1] == []


def test_infiniband_on_request() -> None:
    assert "/dev/infiniband" not in flags(H200, infiniband="off")
    with pytest.raises(HostError, match="no /dev/infiniband"):
        flags(ENGINE, infiniband="on")


def test_mounts_environment_and_folder(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    container = {
        "mounts": (parse_mount(f"{data}:/data:ro"), parse_mount(f"{tmp_path}:/work")),
        "environment": ("A=1", "WANDB_API_KEY"),
        "workdir": "/work",
        "network": "none",
    }
    found = flags(ENGINE, **container)
    assert f"--volume {data}:/data:ro --volume {tmp_path}:/work --env A=1 --env WANDB_API_KEY --workdir /work" in found
    assert "--network none" in found


@pytest.mark.parametrize(
    ("user", "environment", "expected"),
    [
        ("1000780000:0", (), "--env HOME=/tmp --env USER=envbuild --env LOGNAME=envbuild --user 1000780000:0"),
        ("1000", ("HOME=/data", "USER"), "--env HOME=/data --env USER --env LOGNAME=envbuild --user 1000"),
        ("0:0", (), "--user 0:0"),
        ("ubuntu", (), "--user ubuntu"),
        (None, (), ""),
    ],
)
def test_a_user_whom_the_image_does_not_know_has_a_home_and_a_name(
    user: str | None, environment: tuple[str, ...], expected: str
) -> None:
    found = flags(ENGINE, user=user, environment=environment)
    assert found.partition("--network host")[2].strip() == expected


@pytest.mark.parametrize("text", ["", "-1", "1:", ":1", "1:2:3", "4294967295", "a b", "A", "1;2", "\u0661", "9" * 5000])
def test_what_can_be_no_user_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a user"):
        parse_user(text)
    assert [parse_user(each) for each in ("0", "1000:0", "ubuntu", "4294967294")]


@pytest.mark.parametrize("text", ["/tmp", "/tmp:relative", "/tmp:/a:rx", ":/a", "/tmp:/a:ro:x"])
def test_a_mount_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a mount"):
        parse_mount(text)


def test_a_mount_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no") as caught:
        parse_mount(f"{tmp_path}/gone:/data")
    assert f"mkdir -p {tmp_path}/gone" in caught.value.hint


@pytest.mark.parametrize("text", ["", "a b", "-x", "a\nb"])
def test_what_can_be_no_image_and_no_network_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not an image"):
        parse_image(text)
    with pytest.raises(UsageError, match="is not a network"):
        parse_network(text)
    for image in ("a", "host.example.org:5000/team/a_b.c:1-x", "sha256:0a1b", "a@sha256:0a1b"):
        assert parse_image(image) == image
    for network in ("host", "none", "container:a_b.c-1"):
        assert parse_network(network) == network


@pytest.mark.parametrize("text", ["1A=2", "A B", "=x", ""])
def test_a_variable_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_environment(text)


def test_values_that_look_secret_are_hidden_from_print() -> None:
    assert (
        shown(["docker", "--env", "WANDB_API_KEY=abc", "--env", "A=b c"])
        == "docker --env 'WANDB_API_KEY=***' --env 'A=b c'"
    )


def test_the_engine_of_the_settings_is_used() -> None:
    settings = Settings(cache_dir=Path("/nowhere"), engine_host="ssh://me@builder")
    line = run_line(settings, Container(image="img"), [], [], terminal=True)
    assert line[:4] == ["docker", "--host", "ssh://me@builder", "run"]
    assert "--tty" in line


def hostfile(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "hostfile"
    file.write_text(text)
    return file


def test_hostfiles_of_every_launcher(tmp_path: Path) -> None:
    text = "# a comment\nnode1 slots=8 max_slots=8\n\nnode2.example.org:4   # MPICH's form\n10.0.0.3\nfe80::1 slots=2\n"
    assert read_hostfile(hostfile(tmp_path, text), default_slots=6) == (
        Node(name="node1", slots=8),
        Node(name="node2.example.org", slots=4),
        Node(name="10.0.0.3", slots=6),
        Node(name="fe80::1", slots=2),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no host"),
        ("node1 slots=0", "names no host and slots"),
        ("node1 slots=x", "names no host and slots"),
        ("node1 slot=8", "names no host and slots"),
        ("node1 8", "names no host and slots"),
        ("node1 slots = 8", "names no host and slots"),
        ("node1 slots=99999999999999999999", "names no host and slots"),
        ("localhost slots=8\nnode2 slots=8", "localhost means another machine on each of the hosts"),
        ("-oProxyCommand=x", "names no host and slots"),
        ("a;b", "names no host and slots"),
        ("a\na", "listed twice"),
    ],
)
def test_a_hostfile_that_cannot_be(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_hostfile(hostfile(tmp_path, text), default_slots=1)


def test_a_hostfile_that_is_absent(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_hostfile(tmp_path / "gone", default_slots=1)


def test_which_hosts_are_this_machine() -> None:
    assert is_local("localhost")
    assert is_local("127.0.0.2")
    # Addresses set aside for documentation (RFC 5737), and a name that never resolves (RFC 6761).
    assert not is_local("192.0.2.1")
    assert not is_local("host.invalid")


def job(launcher: str, **changes: object) -> Job:
    values = {
        "nodes": (Node(name="192.0.2.1", slots=8), Node(name="192.0.2.2", slots=8)),
        "launcher": launcher,
        "container": Container(image="img", environment=("TOKEN=s3cret",), workdir="/w"),
        "script": ("train.py", "--lr", "0.1"),
        "name": "job",
    }
    return Job(**values | changes)


def words(command: tuple[str, ...]) -> list[str]:
    """Return the command as the host sees it: what ssh is given, split again."""
    return shlex.split(command[-1]) if command[0] == "ssh" else list(command)


def test_torchrun_needs_no_login_between_containers() -> None:
    plan, _ = plan_launch(job("torchrun"), H200.facts(), SETTINGS)
    assert [step.node for step in plan.steps] == ["192.0.2.1", "192.0.2.2"] * 3
    assert plan.keepers[0].command[:2] == ("ssh", "-o")
    keeper, start = words(plan.keepers[1].command), words(plan.starts[1].command)
    assert keeper[keeper.index("--name") + 1] == "job-1"
    assert "--gpus" in keeper
    assert "IPC_LOCK" in keeper
    assert keeper[-5:] == ["--entrypoint", "sh", "img", "-c", BEATING]
    assert "job-1" in start
    assert start[-9:] == [
        "torchrun", "--nnodes=2", "--nproc-per-node=8", "--node-rank=1", "--master-addr=192.0.2.1", "--master-port=29500",
        "train.py", "--lr", "0.1",
    ]  # fmt: skip
    assert "sshd" not in " ".join(step.about for step in plan.steps)


def test_mpirun_logs_in_on_its_own_port_and_exports_variables() -> None:
    steps = plan_launch(job("mpirun", ssh_port=2222), H200.facts(), SETTINGS)[0].steps
    assert len(steps) == 5
    line = words(steps[-1].command)
    inner = line[line.index("mpirun") :]
    assert inner[inner.index("-np") + 1] == "16"
    assert inner[inner.index("--map-by") + 1] == "ppr:8:node"
    assert inner[inner.index("plm_rsh_args") + 1] == "-p 2222"
    exported = [inner[i + 1] for i, word in enumerate(inner) if word == "-x"]
    assert exported == ["PATH", "LD_LIBRARY_PATH", "MASTER_ADDR", "MASTER_PORT", "TOKEN"]
    assert inner[-4:] == ["python3", "train.py", "--lr", "0.1"]
    assert "OMPI_COMM_WORLD_LOCAL_RANK" in " ".join(inner)
    assert line[line.index("--workdir") :][:2] == ["--workdir", "/w"]


def test_deepspeed_takes_the_port_from_ssh_config_and_any_slots() -> None:
    nodes = (Node(name="192.0.2.1", slots=8), Node(name="192.0.2.2", slots=4))
    steps = plan_launch(job("deepspeed", nodes=nodes), H200.facts(), SETTINGS)[0].steps
    line = words(steps[-1].command)
    assert "--ssh_port" not in line
    assert line[line.index("deepspeed") :][:3] == ["deepspeed", "--hostfile", "/run/envbuild/hostfile"]
    with pytest.raises(UsageError, match="different slots"):
        plan_launch(job("mpirun", nodes=nodes), H200.facts(), SETTINGS)


def test_a_launch_from_a_machine_without_a_gpu_says_that_no_host_gets_one() -> None:
    assert any("no container gets a GPU" in note for note in plan_launch(job("torchrun"), BARE.facts(), SETTINGS)[1])
    without = job("torchrun", container=Container(image="img", gpus="none"))
    for asked, host in ((without, BARE), (job("torchrun"), H200)):
        assert not any("no container gets a GPU" in note for note in plan_launch(asked, host.facts(), SETTINGS)[1])


@pytest.mark.parametrize(("launcher", "program"), [("srun", "srun"), ("mpirun", "ssh")])
def test_a_program_that_a_launch_starts_is_missed_before_anything_runs(
    launcher: str, program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError, match=f"there is no {program}\n") as missed:
        run_launch(job(launcher), H200.facts(), SETTINGS)
    assert missed.value.hint


def test_a_key_without_ssh_keygen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for program in ("ssh", "docker"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError, match="there is no ssh-keygen"):
        run_launch(job("mpirun", ssh_key=tmp_path / "key"), H200.facts(), SETTINGS)


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "deepspeed", "srun"])
def test_no_value_and_no_key_is_on_a_command_line(launcher: str) -> None:
    steps = plan_launch(job(launcher), H200.facts(), SETTINGS)[0].steps
    assert "s3cret" not in " ".join(word for step in steps for word in step.command)


@pytest.mark.parametrize(("launcher", "flag"), [("torchrun", "--no-python"), ("deepspeed", "--no_python")])
def test_a_script_that_is_no_python_runs_by_itself(launcher: str, flag: str) -> None:
    steps = plan_launch(job(launcher, script=("./train.sh",)), H200.facts(), SETTINGS)[0].steps
    assert flag in words(steps[-1].command)
    assert words(steps[-1].command)[-1] == "./train.sh"


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("torchrun", ["--master-port=29500", "-m", "pkg.train", "--lr", "1"]),
        ("srun", ["--master-port=29500", "-m", "pkg.train", "--lr", "1"]),
        ("deepspeed", ["29500", "--module", "pkg.train", "--lr", "1"]),  # its own -m would be the program's
        ("mpirun", ["sh", "python3", "-m", "pkg.train", "--lr", "1"]),
    ],
)
def test_a_module_runs_with_every_launcher(launcher: str, expected: list[str]) -> None:
    asked = job(launcher, script=("-m", "pkg.train", "--lr", "1"))
    line = words(plan_launch(asked, H200.facts(), SETTINGS)[0].steps[-1].command)
    found = shlex.split(next(each for each in line if "exec torchrun" in each)) if launcher == "srun" else line
    assert found[-len(expected) :] == expected
    for script in (("-m",), ("-m", "--lr")):
        with pytest.raises(UsageError, match="names no module"):
            plan_launch(job(launcher, script=script), H200.facts(), SETTINGS)


def test_the_set_up_is_a_shell_script_whatever_the_values(tmp_path: Path) -> None:
    values = {"TOKEN": "a b'c\"$(touch never)\n`touch never`"}
    node = Node(name="192.0.2.1", slots=8)
    login = login_script(job("mpirun"), node, private_key="PRIVATE\n", public_key="PUBLIC")
    script = variables_script(job("mpirun"), values)
    checked = subprocess.run(["sh", "-n"], input=script + login, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "-o ListenAddress=192.0.2.1" in login
    assert "PasswordAuthentication=no" in login
    assert "StrictHostKeyChecking yes" in login
    # What the job's processes read back is the value, character by character, and nothing in it runs.
    script = script.replace("/run/envbuild", "folder") + '. folder/environment; printf %s "$MASTER_ADDR $TOKEN"'
    ran = subprocess.run(["sh", "-s"], input=script, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout == f"192.0.2.1 {values['TOKEN']}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
    assert (tmp_path / "folder" / "environment").stat().st_mode & 0o777 == 0o600


def test_a_name_is_listened_to_on_every_address() -> None:
    node = Node(name="node1", slots=8)
    assert "ListenAddress" not in login_script(job("mpirun"), node, private_key="P", public_key="P")


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("envbuild.host.collect.LocalProbe", lambda: H200)
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("DOCKER_HOST", raising=False)


@pytest.mark.usefixtures("on_h200")
def test_the_run_command_prints_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["run", "img", "--dry-run", "--gpus", "0,1", "--", "python", "-c", "print(1)"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("docker run --rm")
    assert shlex.split(out)[-4:] == ["img", "python", "-c", "print(1)"]
    with pytest.raises(SystemExit):
        main(["run", "img", "--json"])
    assert json.loads(capsys.readouterr().out)["command"][-1] == "img"


@pytest.mark.usefixtures("on_h200")
def test_the_launch_command_prints_its_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = hostfile(tmp_path, "192.0.2.1\n192.0.2.2\n")
    arguments = [
        "launch",
        "img",
        "--hostfile",
        str(file),
        "--launcher",
        "mpirun",
        "--json",
        "--",
        "train.py",
        "--lr",
        "1",
    ]
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [step["host"] for step in steps] == ["192.0.2.1", "192.0.2.2", "192.0.2.1", "192.0.2.2", "192.0.2.1"]
    # Slots are this machine's GPUs where the hostfile gives none.
    assert "-np 16" in steps[-1]["command"][-1]


@pytest.mark.usefixtures("on_h200")
def test_an_option_of_the_command_is_not_taken_for_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["run", "img", "--no-such-flag"])
    assert left.value.code == 2
    assert "no-such-flag" in capsys.readouterr().err


@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize("launcher", ["torchrun", "srun", "mpirun", "deepspeed"])
@pytest.mark.parametrize("flag", ["--ssh-port", "--ssh-key"])
def test_a_flag_of_logins_is_refused_where_there_are_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, launcher: str, flag: str
) -> None:
    file = hostfile(tmp_path, "192.0.2.1\n192.0.2.2\n")
    value = "2222" if flag == "--ssh-port" else str(file)
    line = ["launch", "img", "--hostfile", str(file), "--launcher", launcher, flag, value, "--dry-run", "--", "t.py"]
    with pytest.raises(SystemExit) as left:
        main(line)
    says = capsys.readouterr()
    if launcher in {"mpirun", "deepspeed"}:
        assert left.value.code == 0
    else:
        assert left.value.code == UsageError.exit_code
        assert f"--launcher {launcher} does not read it\n  where: {flag}\n" in says.err

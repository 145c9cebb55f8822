"""How each runtime gives a container the GPUs: what is on the host, what the runtime can do, and what the setting asks for."""

import json

import pytest
from recorded import BARE, ENGINE, GEFORCE, H200, INFO, Recording, docker_info

from envbuild.cli import main
from envbuild.doctor.diagnosis import diagnose
from envbuild.errors import HostError, UsageError
from envbuild.host.gpu_access import Choice, Runtime, gpu_access
from envbuild.host.model import HostFacts, Podman
from envbuild.run.apptainer import container_flags
from envbuild.run.container import Container, run_flags
from envbuild.run.launch import Job, Node, plan_launch
from envbuild.run.podman import podman_flags
from envbuild.settings import Settings

LIBRARY = "    - containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.{0}\n      hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.{0}\n"
HOOKS = "  hooks:\n  - hookName: createContainer\n    path: /usr/bin/nvidia-cdi-hook\n"


def specification(driver: str = "580.159.04", *, hooks: bool = False) -> str:
    """As `nvidia-ctk cdi generate` writes it, shortened."""
    device = "- containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n  name: {}\n"
    return (
        "---\ncdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n"
        + "".join(device.format(name) for name in ('"0"', '"1"', "all"))
        + f"containerEdits:\n{HOOKS if hooks else ''}  mounts:\n{LIBRARY.format(driver)}"
    )


def with_cdi(machine: Recording = H200, text: str | None = None, apptainer: str = "1.5.4") -> HostFacts:
    found = machine.but(
        files={"/etc/cdi/nvidia.yaml": specification() if text is None else text},
        folders={"/etc/cdi": ("nvidia.yaml",)},
        commands={("apptainer", "--version"): f"apptainer version {apptainer}\n"},
    ).facts()
    return found.model_copy(update={"podman": Podman(version="4.3.1")})


def how(host: HostFacts, choice: Choice = "auto") -> dict[str, str]:
    names: tuple[Runtime, ...] = ("docker", "podman", "apptainer")
    return {name: gpu_access(host, name, choice).how for name in names}


@pytest.mark.parametrize(
    ("host", "choice", "docker", "podman", "apptainer"),
    [
        (with_cdi(), "auto", "cdi", "cdi", "cdi"),
        (with_cdi(), "native", "gpus", "none", "nv"),
        # Apptainer runs no hooks, and has no --device before 1.5
        (with_cdi(text=specification(hooks=True)), "auto", "cdi", "cdi", "nv"),
        (with_cdi(text=specification(hooks=True)), "cdi", "cdi", "cdi", "cdi"),
        (with_cdi(apptainer="1.4.5"), "auto", "cdi", "cdi", "nv"),
        (with_cdi(apptainer="1.4.5"), "cdi", "cdi", "cdi", "none"),
        (with_cdi(apptainer="1.10.0-rc.1"), "auto", "cdi", "cdi", "cdi"),
        # of the driver before the last upgrade
        (with_cdi(text=specification("570.133.20")), "auto", "gpus", "none", "nv"),
        (with_cdi(text=specification("570.133.20")), "cdi", "cdi", "cdi", "cdi"),
        (H200.facts(), "auto", "gpus", "none", "nv"),
        (H200.facts(), "cdi", "none", "none", "none"),
        (with_cdi(H200.but(commands={INFO: docker_info(CDISpecDirs=None)})), "auto", "gpus", "cdi", "cdi"),
        (with_cdi(H200.but(commands={INFO: docker_info(CDISpecDirs=None)})), "cdi", "none", "cdi", "cdi"),
    ],
)
def test_who_gets_the_gpus_how(host: HostFacts, choice: Choice, docker: str, podman: str, apptainer: str) -> None:
    assert how(host, choice) == {"docker": docker, "podman": podman, "apptainer": apptainer}


def test_the_flags_of_each_runtime() -> None:
    host = with_cdi()
    for flags in (
        run_flags(host, Container(image="x", gpus="0,1"))[0],
        podman_flags(host, Container(image="x", gpus="0,1"))[0],
        container_flags(host, Container(image="x", gpus="0,1"), folder=None)[0],
    ):
        assert "--device nvidia.com/gpu=0 --device nvidia.com/gpu=1" in " ".join(flags)
        assert not {"--gpus", "--nv"} & set(flags)
    # the devices are chosen: no variable hides some of them
    assert container_flags(host, Container(image="x", gpus="0"), folder=None)[1] == {}
    # a device that the specification does not have
    assert run_flags(host, Container(image="x", gpus="3"))[0][:2] == ["--gpus", '"device=3"']


def test_what_was_asked_for_and_cannot_be_had() -> None:
    with pytest.raises(HostError, match=r"no CDI specification of nvidia.com/gpu=all") as caught:
        run_flags(H200.facts(), Container(image="x", gpus="all"), "cdi")
    assert "nvidia-ctk cdi generate" in (caught.value.hint or "")
    flags, notes = run_flags(H200.facts(), Container(image="x"), "cdi")
    assert "--gpus" not in flags
    assert "without the 8 GPUs" in notes[0]
    old = with_cdi(apptainer="1.4.5")
    with pytest.raises(HostError, match=r"Apptainer 1\.4\.5 takes no CDI devices"):
        container_flags(old, Container(image="x", gpus="all"), folder=None, choice="cdi")
    hooked = with_cdi(text=specification(hooks=True))
    flags, _, notes = container_flags(hooked, Container(image="x"), folder=None, choice="cdi")
    assert "--device" in flags
    assert "libcuda.so.1" in notes[0]
    assert "libcuda" not in " ".join(container_flags(hooked, Container(image="x"), folder=None)[2])


def test_docker_without_a_native_way_says_what_to_install_although_cdi_would_serve() -> None:
    bare = with_cdi(H200.but(commands={INFO: docker_info()}, folders={"/usr/bin": ()}))
    assert how(bare)["docker"] == "cdi"
    with pytest.raises(HostError, match="cannot see this machine's GPUs") as caught:
        run_flags(bare, Container(image="x", gpus="all"), "native")
    assert "nvidia-ctk runtime configure" in (caught.value.hint or "")
    _, notes = run_flags(bare, Container(image="x"), "native")
    assert "nvidia-ctk runtime configure" in notes[0]


def test_gpus_in_apptainers_instances_are_native(tmp_path) -> None:
    sif = tmp_path / "a.sif"
    sif.touch()
    job = Job(
        nodes=(Node(name="one", slots=8),), launcher="torchrun", container=Container(image=str(sif)), script=("t.py",), name="j"
    )  # fmt: skip
    plan, _ = plan_launch(job, with_cdi(), Settings(cache_dir=tmp_path))
    assert " --nv " in plan.keepers[0].command[-1]
    with pytest.raises(UsageError, match="instances take no CDI devices"):
        plan_launch(job, with_cdi(), Settings(cache_dir=tmp_path, gpu_access="cdi"))


def test_json_on_one_line_is_read_as_yaml_is() -> None:
    edits = {"mounts": [{"hostPath": "/usr/lib64/libcuda.so.580.159.04", "containerPath": "/usr/lib64/libcuda.so.1"}]}
    body = {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [{"name": name, "containerEdits": {}} for name in ("0", "all", "../odd", 1)],
        "containerEdits": edits | {"hooks": [{"hookName": "createContainer"}]},
    }
    for text in (json.dumps(body), json.dumps(body, separators=(",", ":"))):
        toolkit = with_cdi(text=text).toolkit
        assert toolkit.cdi_devices == ("nvidia.com/gpu=0", "nvidia.com/gpu=1", "nvidia.com/gpu=all")
        assert (toolkit.cdi_driver, toolkit.cdi_hooks) == ("580.159.04", True)


@pytest.mark.parametrize(
    "text", ["", "[", "kind: nvidia.com/gpu", '{"kind": "nvidia.com/gpu"}', "[" * 100_000, "kind: amd.com/gpu\nname: all"]
)  # fmt: skip
def test_a_specification_of_another_shape_gives_no_device(text: str) -> None:
    assert with_cdi(text=text).toolkit.cdi_devices == ()


PODMAN_INFO = json.dumps({"version": {"Version": "5.8.1"}, "host": {"security": {"rootless": True}}})
PODMAN_HELP = "Options:\n      --cdi-spec-dir strings   Set the CDI spec directory path (may be set multiple times){}\n      --help   Help\n"


def each_in_its_own(folder: str, *, docker: list[str] | None = None, podman: str | None = None) -> HostFacts:
    """A machine with every runtime, and a specification in one folder; `podman` is how its help ends the flag's line."""
    commands = {
        INFO: docker_info(**({"CDISpecDirs": docker} if docker else {})),
        ("podman", "info", "--format", "json"): PODMAN_INFO,
        ("apptainer", "--version"): "apptainer version 1.5.4\n",
    }
    if podman is not None:
        commands["podman", "--help"] = PODMAN_HELP.format(podman)
    return H200.but(
        files={f"{folder}/nvidia.yaml": specification()}, folders={folder: ("nvidia.yaml",)}, commands=commands
    ).facts()


@pytest.mark.parametrize(
    ("host", "docker", "podman", "apptainer"),
    [
        (each_in_its_own("/etc/cdi"), "cdi", "cdi", "cdi"),
        (each_in_its_own("/var/run/cdi"), "cdi", "cdi", "cdi"),
        # daemon.json's cdi-spec-dirs are Docker's alone
        (each_in_its_own("/srv/cdi", docker=["/srv/cdi"]), "cdi", "none", "nv"),
        (each_in_its_own("/etc/cdi", docker=["/srv/cdi"]), "gpus", "cdi", "cdi"),
        # containers.conf's cdi_spec_dirs are podman's alone, as its help states them
        (each_in_its_own("/srv/cdi", podman=" (default [/srv/cdi])"), "gpus", "cdi", "nv"),
        (each_in_its_own("/srv/c,d i", podman=' (default [/etc/cdi,"/srv/c,d i"])'), "gpus", "cdi", "nv"),
        (each_in_its_own("/etc/cdi", podman=" (default [/srv/cdi])"), "cdi", "none", "cdi"),
        (each_in_its_own("/etc/cdi", podman=""), "cdi", "none", "cdi"),
        # podman 5.5
        (each_in_its_own("/var/run/cdi", podman=" (default [/etc/cdi])"), "cdi", "none", "cdi"),
    ],
)
def test_each_runtime_reads_its_own_folders(host: HostFacts, docker: str, podman: str, apptainer: str) -> None:
    assert how(host) == {"docker": docker, "podman": podman, "apptainer": apptainer}
    assert HostFacts.model_validate_json(host.model_dump_json()) == host


def test_the_fix_names_the_folder_that_the_runtime_reads() -> None:
    host = each_in_its_own("/etc/cdi", docker=["/srv/cdi"])
    found = gpu_access(host, "docker", "cdi")
    assert "in /srv/cdi, where docker looks" in found.problem
    assert found.fix == ("sudo nvidia-ctk cdi generate --output=/srv/cdi/nvidia.yaml",)
    assert gpu_access(H200.facts(), "docker", "cdi").fix == (
        "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
    )


def test_facts_of_an_earlier_release_have_one_place_for_all() -> None:
    host = with_cdi()
    old = json.loads(host.model_dump_json())
    del old["apptainer_cdi"], old["podman"]["cdi"]
    assert how(HostFacts.model_validate(old)) == {"docker": "cdi", "podman": "cdi", "apptainer": "cdi"}


def test_another_vendors_devices_are_none_of_nvidias() -> None:
    other = specification().replace("nvidia.com/gpu", "nvidia.com/gpu-other")
    assert with_cdi(text=other).toolkit.cdi_devices == ()


def test_doctor_names_the_way_of_each_runtime() -> None:
    def stated(host: HostFacts, name: str, choice: Choice = "auto") -> str:
        found = next(area for area in diagnose(host, choice) if area.name == name)
        return " ".join(finding.what for finding in found.findings)

    assert "by the CDI device" in stated(with_cdi(), "toolkit")
    assert "by the CDI device" in stated(with_cdi(), "podman")
    assert "with the GPUs by the CDI device" in stated(with_cdi(), "apptainer")
    assert "by --gpus all" in stated(with_cdi(), "toolkit", "native")
    assert "with the GPUs by --nv" in stated(with_cdi(), "apptainer", "native")
    hooked = with_cdi(text=specification(hooks=True))
    assert "by --nv and not by CDI: the CDI specification has hooks" in stated(hooked, "apptainer")
    stale = with_cdi(text=specification("570.133.20"))
    assert "for driver 570.133.20, and 580.159.04 is loaded" in stated(stale, "toolkit")
    assert "for driver 570.133.20" in stated(stale, "podman")
    assert "no CDI specification" in stated(H200.facts(), "toolkit", "cdi")
    assert "CDI" not in stated(H200.facts(), "toolkit")


def test_singularity_is_no_apptainer() -> None:
    machine = ENGINE.but(commands={("singularity", "--version"): "singularity-ce version 4.1.0\n"})
    assert machine.facts().apptainer is None


def test_the_setting_reaches_the_line(monkeypatch, capsys, tmp_path) -> None:
    machine = GEFORCE.but(folders={"/usr/bin": ("nvidia-container-runtime-hook",)})
    monkeypatch.setattr("envbuild.host.collect.LocalProbe", lambda: machine)
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path))
    for choice, expected in (("cdi", "--device nvidia.com/gpu=all"), ("native", "--gpus all")):
        monkeypatch.setenv("ENVBUILD_GPU_ACCESS", choice)
        with pytest.raises(SystemExit) as left:
            main(["run", "img", "--dry-run", "--", "true"])
        assert left.value.code == 0
        assert expected in capsys.readouterr().out


def test_without_a_gpu_no_way_is_named() -> None:
    assert "by" not in next(a for a in diagnose(BARE.facts()) if a.name == "toolkit").findings[0].what.split()

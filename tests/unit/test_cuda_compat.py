"""cuda-compat: which image carries it, which file it is, and when its start script switches it on."""

import gzip
import hashlib
import os
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from cell_inputs import complete, inputs_for, plan_for
from fault_server import FaultServer

from envbuild.errors import DataError, HostError, LockError
from envbuild.lock import find
from envbuild.lock.compat import find_file
from envbuild.lock.make import unlocked
from envbuild.lock.model import COMPAT
from envbuild.matrix.cell import Cell
from envbuild.matrix.driver import Compat, compat_of, driver_verdict
from envbuild.matrix.load import load_matrix
from envbuild.matrix.model import CudaFacts
from envbuild.matrix.spec import version_key
from envbuild.paths import data_dir
from envbuild.plan.apptainer import definition
from envbuild.plan.dockerfile import dockerfile
from envbuild.plan.plan import plan_of
from envbuild.plan.shell import script
from envbuild.settings import load_settings

OLD = {"cuda": "13.0", "gpu": "h100", "driver": "535.104.05"}
CUDA_13 = Compat(cuda="13.0", branch="580", branches=("535", "550", "565", "570", "575"), floor="580")


# --- which image carries it


def test_only_a_driver_that_needs_it_puts_the_package_into_the_image():
    with_it = inputs_for(**OLD)
    assert with_it.compat == CUDA_13
    assert with_it.compat.package == "cuda-compat-13-0"
    for asked in (
        {"cuda": "13.0", "gpu": "h100"},
        {"cuda": "13.0", "gpu": "h100", "driver": "580.95.05"},
        {"cuda": "12.6", "gpu": "h100", "driver": "535.104.05"},
        {"gpu": "h100", "driver": "535.104.05"},
    ):
        assert inputs_for(**asked).compat is None, asked


def test_a_base_that_has_it_gets_no_second_one():
    inputs = inputs_for(base="ngc-25.08", driver="535.104.05", gpu="h100", te="none", apex="none")
    assert inputs.compat is None
    matrix = load_matrix()
    verdict = driver_verdict(matrix, inputs.cell, "535.104.05")
    assert verdict.verdict == "needs-compat"
    assert "which the base image has and its own start script switches on" in verdict.why


def test_the_verdict_says_what_switches_it_on():
    matrix = load_matrix()
    verdict = driver_verdict(matrix, inputs_for(**OLD).cell, "535.104.05")
    assert "the image contains and switches on as it starts" in verdict.why


def test_an_image_without_it_is_as_before_and_one_with_it_differs_in_nothing_else():
    bare, carrying = plan_for(cuda="13.0", gpu="h100"), plan_for(**OLD)
    for text in (dockerfile(bare), definition(bare), script(bare), bare.lock.canonical(), str(bare.environment)):
        assert "compat" not in text
    assert carrying.lock.cell == bare.lock.cell
    assert carrying.tag == f"{bare.tag}-compat"
    files = tuple(f for f in carrying.lock.files if f.name != COMPAT)
    assert carrying.lock.model_copy(update={"files": files}) == bare.lock
    assert {s.name for s in carrying.stages if s.key != bare.stage(s.name).key} == {"image"}


def test_the_dockerfile_takes_the_file_by_its_hash_and_starts_by_the_script():
    plan = plan_for(**OLD)
    text = dockerfile(plan)
    file = plan.lock.source(COMPAT)
    assert f"FROM scratch AS src-cuda-compat\nADD --checksum=sha256:{file.sha256} {file.url} /" in text
    assert "sh /run/envbuild/recipe/cuda-compat /usr/local/cuda-13.0/compat 580" in text
    assert r'ENTRYPOINT ["/bin/sh", "-c", ". /opt/envbuild/cuda-compat.sh; exec \"$@\"", "cuda-compat"]' in text
    assert plan.environment["LD_LIBRARY_PATH"] == "/opt/envbuild/compat"
    assert "src-cuda-compat" in plan.external
    assert "    . /opt/envbuild/cuda-compat.sh\n" in definition(plan)
    assert "cuda-compat-13-0, which this file does not install" in script(plan)


def test_a_lock_of_other_content_has_another_key():
    one, other = complete(inputs_for(**OLD)), complete(inputs_for(**OLD))
    files = tuple(f.model_copy(update={"sha256": "f" * 64}) if f.name == COMPAT else f for f in other.lock.files)
    other = replace(other, lock=other.lock.model_copy(update={"files": files}))
    matrix = load_matrix()
    assert plan_of(matrix, one).key != plan_of(matrix, other).key


def test_a_lock_without_it_is_not_taken_for_a_driver_that_needs_it():
    with_it, without = inputs_for(**OLD), inputs_for(cuda="13.0", gpu="h100")
    assert find.lock_name(with_it) != find.lock_name(without)
    find.check_fits(complete(with_it).lock, with_it, "--lock here")
    find.check_fits(complete(with_it).lock, without, "--lock here")
    with pytest.raises(DataError, match="has no cuda-compat-13-0, and the driver needs it"):
        find.check_fits(complete(without).lock, with_it, "--lock here")


def test_a_package_without_its_hash_is_not_complete():
    inputs = inputs_for(**OLD)
    lock = unlocked(load_matrix(), inputs)
    assert lock.source(COMPAT).sha256 is None
    assert "src-cuda-compat" in {stage for missing in lock.unpinned for stage in missing.stages}
    assert "cuda-compat-13-0" in {m.what.removeprefix("OS package ") for m in find.needed(inputs, load_settings())}


def test_a_lock_with_it_for_a_cuda_that_has_none_is_refused():
    matrix = load_matrix()
    locked = complete(inputs_for(cuda="12.9", gpu="h100"))
    extra = complete(inputs_for(**OLD)).lock.source(COMPAT)
    locked = replace(locked, lock=locked.lock.model_copy(update={"files": (*locked.lock.files, extra)}))
    with pytest.raises(LockError, match=r"none is known for CUDA 12\.9"):
        plan_of(matrix, locked)


def test_each_branch_that_it_extends_is_below_what_the_cuda_needs():
    """The start script compares branches alone, which is right only where each of them lies wholly below the floor."""
    matrix = load_matrix()
    for release in matrix.releases["cuda"]:
        if isinstance(release.facts, CudaFacts) and release.facts.compat_branches:
            floor = version_key(release.facts.driver_minor).major
            assert all(int(branch) < floor for branch in release.facts.compat_branches), release.version
            cell = Cell(versions={"cuda": release.version})
            assert compat_of(matrix, cell).branches == release.facts.compat_branches
            assert int(compat_of(matrix, cell).branch) >= floor


# --- which file it is


def stanza(name, version, arch="amd64", sha256=None, filename=None):
    file = filename or f"./{name}_{version}_{arch}.deb"
    digest = hashlib.sha256(file.encode()).hexdigest() if sha256 is None else sha256
    lines = [f"Package: {name}", f"Version: {version}", f"Architecture: {arch}", f"Filename: {file}"]
    return "\n".join([*lines, *([f"SHA256: {digest}"] if digest else []), ""])


def repository(*stanzas):
    """Return a server that has these packages where NVIDIA's repository has its own."""
    body = gzip.compress("\n".join(stanzas).encode())

    def answer(fault, _):
        if fault.path in {"/repos/ubuntu2204/x86_64/Packages.gz", "/repos/ubuntu2204/sbsa/Packages.gz"}:
            fault.send(body)
        else:
            fault.send(b"", status=404)

    return FaultServer(answer)


def settings_for(server, tmp_path):
    environ = {"HOME": str(tmp_path), "ENVBUILD_CUDA_REPOSITORY": f"{server.url}/repos"}
    return load_settings(environ=environ, root=tmp_path)


PACKAGES = (
    stanza("cuda-compat-13-0", "580.65.06-0ubuntu1"),
    stanza("cuda-compat-13-0", "580.178.04-1ubuntu1"),
    stanza("cuda-compat-13-0", "580.95.05-0ubuntu1"),
    stanza("cuda-compat-13-0", "580.95.05-0ubuntu1", arch="arm64"),
    # an empty package, as cuda-compat-12-8 is at 575.57.08
    stanza("cuda-compat-13-0", "590.44.01-0ubuntu1"),
    stanza("cuda-compat-13-1", "590.48.01-1ubuntu1"),
)


def test_the_newest_file_of_the_right_branch_is_locked_by_its_hash(tmp_path):
    with repository(*PACKAGES) as server:
        found = find_file(settings_for(server, tmp_path), CUDA_13, "x86_64")
        arm = find_file(settings_for(server, tmp_path), CUDA_13, "aarch64")
    name = "cuda-compat-13-0_580.178.04-1ubuntu1_amd64.deb"
    assert found.url == f"{server.url}/repos/ubuntu2204/x86_64/{name}"
    assert found.sha256 == hashlib.sha256(f"./{name}".encode()).hexdigest()
    assert found.name == COMPAT
    assert arm.url.endswith("/repos/ubuntu2204/sbsa/cuda-compat-13-0_580.95.05-0ubuntu1_arm64.deb")


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        (PACKAGES[4:], "lists no cuda-compat-13-0 of driver branch 580"),
        ([stanza("cuda-compat-13-0", "580.95.05-1", sha256="")], "names no .deb with its SHA256"),
        ([stanza("cuda-compat-13-0", "580.95.05-1", sha256="00")], "names no .deb with its SHA256"),
        ([stanza("cuda-compat-13-0", "580.95.05-1", filename="http://else.example/x.deb")], "names no .deb"),
        ([stanza("cuda-compat-13-0", "580.95.05-1", filename="../../x.deb")], "names no .deb"),
    ],
)
def test_an_index_that_names_no_such_file_is_an_error(tmp_path, packages, words):
    with repository(*packages) as server, pytest.raises(LockError, match=words):
        find_file(settings_for(server, tmp_path), CUDA_13, "x86_64")


@pytest.mark.parametrize("body", [b"Package: x\n", gzip.compress(b"Package: x\n" * 1000, mtime=0)[:-40]])
def test_an_index_that_is_damaged_is_an_error(tmp_path, body):
    with FaultServer(lambda fault, _: fault.send(body)) as server, pytest.raises(LockError, match="index is"):
        find_file(settings_for(server, tmp_path), CUDA_13, "x86_64")


def test_a_repository_that_cannot_serve_is_an_error_of_the_host(tmp_path):
    with FaultServer(lambda fault, _: fault.send(b"", status=403)) as server, pytest.raises((HostError, LockError)):
        find_file(settings_for(server, tmp_path), CUDA_13, "x86_64")


# --- when it is switched on: the script itself, on a host that is made up


@cache
def switch() -> str:
    return plan_for(**OLD).lists["lock/cuda-compat.sh"]


class Host:
    """The files that the script looks at, below a folder."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.compat = folder / "cuda/compat"
        self.link = folder / "opt/compat"
        for each in (self.compat, self.link.parent, folder / "proc"):
            each.mkdir(parents=True)
        text = switch()
        assert "@" not in text.replace('"$@"', "")
        moved = {
            "/usr/local/cuda-13.0/compat": str(self.compat),
            "/opt/envbuild/compat": str(self.link),
            "/proc/driver/nvidia": str(folder / "proc"),
            "/.singularity.d": f"{folder}/singularity",
            "/usr/lib": f"{folder}/usr/lib",
            "/usr/local/nvidia": f"{folder}/nvidia",
        }
        for here, there in moved.items():
            assert here in text
            text = text.replace(here, there)
        self.script = folder / "cuda-compat.sh"
        self.script.write_text(text)

    def driver(self, version: str, *, opened: bool = False) -> None:
        kind = "UNIX Open Kernel Module for x86_64" if opened else "UNIX x86_64 Kernel Module"
        tail = "Release Build  (dvs-builder@U22-I3-AF01-21-3)" if opened else "Sat Aug 19 01:15:15 UTC 2023"
        gcc = "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04.2)"
        (self.root / "proc/version").write_text(f"NVRM version: NVIDIA {kind}  {version}  {tail}\n{gcc}\n")

    def board(self, model: str, slot: str = "0000:01:00.0") -> None:
        (self.root / "proc/gpus" / slot).mkdir(parents=True)
        text = f"Model: \t\t {model}\nIRQ:   \t\t 64\nGPU UUID: \t GPU-5a8b\n"
        (self.root / "proc/gpus" / slot / "information").write_text(text)

    def library(self, path: str) -> None:
        (self.root / path).parent.mkdir(parents=True)
        (self.root / path).touch()

    def start(self, shell: str = "sh", flags: str = "-c", **environ: str) -> dict[str, str]:
        """Run a command as the image's entrypoint does, and return its environment."""
        command = [*shell.split(), flags, f'. {self.script}; exec "$@"', "cuda-compat", "env", "-0"]
        done = subprocess.run(
            command, env={"PATH": os.environ["PATH"], **environ}, capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stderr == ""
        return dict(pair.split("=", 1) for pair in done.stdout.split("\0") if pair)

    def is_on(self, **environ: str) -> bool:
        found = self.start(**environ)
        on = str(self.compat) in found.get("LD_LIBRARY_PATH", "").split(":")
        assert found["ENVBUILD_CUDA_COMPAT_STATE"].startswith("on" if on else "off")
        return on


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path / "root")


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(
    ("driver", "on"),
    [
        ("535.104.05", True), ("550.54.15", True), ("575.57.08", True), ("565.57.01", True),
        # as new as CUDA 13.0 needs, or newer
        ("580.65.06", False), ("580.178.04", False), ("590.44.01", False), ("610.43.02", False), ("1000.1", False),
        # older, and of a branch that the package does not extend
        ("525.60.13", False), ("470.256.02", False), ("555.42.06", False), ("53.5", False),
    ],
)  # fmt: skip
def test_it_is_on_where_the_driver_is_older_and_nowhere_else(host, driver, on, opened):
    host.driver(driver, opened=opened)
    host.board("NVIDIA H100 80GB HBM3")
    assert host.is_on() is on


@pytest.mark.parametrize(
    ("board", "on"),
    [
        ("NVIDIA H100 80GB HBM3", True), ("Tesla V100-SXM2-32GB", True), ("Tesla T4", True), ("NVIDIA L40S", True),
        ("NVIDIA A100-SXM4-80GB", True), ("NVIDIA A10G", True), ("NVIDIA GH200 480GB", True), ("NVIDIA B200", True),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
        ("NVIDIA GeForce RTX 4090", False), ("NVIDIA TITAN RTX", False), ("NVIDIA TITAN V", False),
        ("GeForce GTX 1080 Ti", False), ("NVIDIA RTX A6000", False), ("NVIDIA RTX 6000 Ada Generation", False),
        ("Quadro RTX 8000", False), ("NVIDIA T1000 8GB", False), ("NVIDIA T400 4GB", False),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", False),
    ],
)  # fmt: skip
def test_it_is_off_for_geforce_and_workstation_boards(host, board, on):
    host.driver("535.104.05")
    host.board(board)
    assert host.is_on() is on


def test_one_board_that_it_does_not_support_is_enough(host):
    host.driver("535.104.05")
    host.board("NVIDIA A100-SXM4-80GB", "0000:01:00.0")
    host.board("NVIDIA GeForce RTX 3090", "0000:81:00.0")
    assert not host.is_on()


def test_without_a_driver_it_is_off(host):
    assert not host.is_on()
    assert host.start()["ENVBUILD_CUDA_COMPAT_STATE"] == "off: no driver of the host is seen"


@pytest.mark.parametrize(
    "library",
    [
        "usr/lib/x86_64-linux-gnu/libcuda.so.{}", "usr/lib/aarch64-linux-gnu/libcuda.so.{}", "usr/lib64/libcuda.so.{}",
        "singularity/libs/libcuda.so.{}", "nvidia/lib64/libcuda.so.{}",
    ],
)  # fmt: skip
@pytest.mark.parametrize(("driver", "on"), [("535.104.05", True), ("580.95.05", False), ("1.1", False)])
def test_where_proc_is_hidden_the_name_of_libcuda_decides(host, library, driver, on):
    host.library(library.format(driver))
    assert host.is_on() is on


def test_the_kernels_driver_counts_before_the_name_of_a_library(host):
    host.driver("580.95.05")
    host.library("usr/lib/x86_64-linux-gnu/libcuda.so.535.104.05")
    assert not host.is_on()


@pytest.mark.parametrize("shell", ["sh", "bash", "bash --posix", "dash"])
@pytest.mark.parametrize("flags", ["-c", "-euc"])
@pytest.mark.parametrize("driver", ["535.104.05", "580.95.05", None])
def test_every_shell_and_its_strict_modes_run_it(host, shell, flags, driver):
    if driver:
        host.driver(driver)
        host.board("NVIDIA H100 PCIe")
    found = host.start(shell, flags)
    assert ("LD_LIBRARY_PATH" in found) is (driver == "535.104.05")
    assert not [name for name in found if name.startswith("envbuild_")]


def test_the_users_own_word_counts(host):
    host.driver("535.104.05")
    host.board("NVIDIA RTX A6000")
    assert host.is_on(ENVBUILD_CUDA_COMPAT="on")
    host.board("NVIDIA A100 80GB PCIe", "0000:02:00.0")
    assert not host.is_on(ENVBUILD_CUDA_COMPAT="off")
    assert not host.is_on(ENVBUILD_CUDA_COMPAT="")


def test_it_comes_first_once_and_keeps_what_is_there(host):
    host.driver("550.54.15")
    assert host.start(LD_LIBRARY_PATH="/a:/b")["LD_LIBRARY_PATH"] == f"{host.compat}:/a:/b"
    again = host.start(LD_LIBRARY_PATH=f"/a:{host.compat}")["LD_LIBRARY_PATH"]
    assert again == f"/a:{host.compat}"
    host.driver("580.95.05")
    assert host.start(LD_LIBRARY_PATH="/a:/b")["LD_LIBRARY_PATH"] == "/a:/b"


def test_the_link_for_later_processes_follows_the_driver(host):
    host.driver("550.54.15")
    assert host.is_on()
    assert host.link.readlink() == host.compat
    assert host.is_on()
    host.driver("580.95.05")
    assert not host.is_on()
    assert not host.link.is_symlink()


def test_who_may_not_write_the_link_is_served_all_the_same(host):
    host.driver("550.54.15")
    host.link.parent.rmdir()  # nobody can write there, root as little as another
    assert host.is_on()
    assert not host.link.is_symlink()


def test_the_command_gets_its_arguments_and_its_exit_code(host):
    host.driver("550.54.15")
    command = [
        "sh",
        "-c",
        f'. {host.script}; exec "$@"',
        "cuda-compat",
        "sh",
        "-c",
        'echo "$1|$2"; exit 7',
        "x",
        "a b",
        "*",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (7, "a b|*\n")


# --- what the build does with the package


def package(folder: Path, files: list[str]) -> Path:
    """Build a .deb that installs these files, each with its own path in it."""
    tree = folder / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    control = "Package: cuda-compat-13-0\nVersion: 580.95.05-0ubuntu1\nArchitecture: amd64\n"
    (tree / "DEBIAN/control").write_text(f"{control}Maintainer: nobody <n@example.org>\nDescription: planted\n")
    for name in files:
        path = tree / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (folder / "deb").mkdir()
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-b", str(tree), str(folder / "deb/hash-1234")],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return folder / "deb"


def install(tmp_path: Path, files: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    text = (data_dir("dockerfiles") / "recipe" / "cuda-compat").read_text()
    assert "/usr/share/" in text
    text = text.replace("/run/envbuild/deb", str(package(tmp_path, files)))
    text = text.replace('doc" /usr/share/', f'doc" {tmp_path}/share/')
    (tmp_path / "share").mkdir()
    (tmp_path / "recipe").write_text(text)
    return subprocess.run(
        ["sh", str(tmp_path / "recipe"), str(place), "580"], capture_output=True, text=True, check=False, timeout=60
    )


def test_the_package_takes_the_place_of_what_the_base_has(tmp_path):
    place = tmp_path / "cuda/compat"
    place.mkdir(parents=True)
    (place / "libcuda.so.580.65.06").touch()
    names = ["libcuda.so.1", "libcuda.so.580.95.05", "libnvidia-ptxjitcompiler.so.1"]
    done = install(tmp_path, [*(f"{place}/{n}" for n in names), "/usr/share/doc/cuda-compat-13-0/copyright"], place)
    assert done.returncode == 0, done.stderr
    assert sorted(each.name for each in place.iterdir()) == sorted(names)
    assert (tmp_path / "share/doc/cuda-compat-13-0/copyright").is_file()


@pytest.mark.parametrize("names", [[], ["libcuda.so.1", "libcuda.so.575.57.08"], ["libcuda.so.580.95.05"]])
def test_a_package_without_the_right_libcuda_ends_the_build(tmp_path, names):
    place = tmp_path / "cuda/compat"
    place.mkdir(parents=True)
    (place / "libcuda.so.580.65.06").touch()
    done = install(tmp_path, [*(f"{place}/{n}" for n in names), "/usr/share/doc/x/copyright"], place)
    assert done.returncode == 1
    assert "no libcuda of branch 580" in done.stderr
    assert (place / "libcuda.so.580.65.06").is_file()

"""`smoke --gpus`: which of the machine's GPUs a run sees."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from recorded import H200, SMI_NEW

from envbuild.cli.program import main
from envbuild.verify import start
from envbuild.verify.start import Call, in_container


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["x", "--gpus", "none"], "'none' names no GPUs"),
        (["x", "--gpus", "auto"], "'auto' names no GPUs"),
        (["x", "--gpus", "first"], "names no GPUs"),
        (["x", "--gpus", "0;1"], "names no GPUs"),
        (["x", "--gpus", "0,0"], "names no GPUs"),
        (["x", "--gpus", "00"], "names no GPUs"),
        (["x", "--gpus", "0", "--device", "cpu"], "a run on the CPU sees no GPU"),
        (["x", "--gpus", "0", "--device", "cpu", "--", "true"], "a run on the CPU sees no GPU"),
        (["--host", "--gpus", "0", "--nodes", "HOSTS"], "the hostfile says how many GPUs"),
    ],
)
def test_what_names_no_gpus_is_refused_before_anything_runs(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path))
    (tmp_path / "hosts").write_text("node1 slots=2\n")
    with pytest.raises(SystemExit) as ended:
        main(["smoke", *(str(tmp_path / "hosts") if word == "HOSTS" else word for word in words)])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "network"), [("all", "host"), ("1,3", "host"), ("none", "none")])
def test_a_container_gets_the_gpus_that_were_named(
    gpus: str, network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(start, "start_guest", lambda *given, **_: made.append(given[2]))
    call = Call(pytest=tmp_path, expectation=tmp_path / "e.json", arguments=(), environment={})
    image = type("Image", (), {"id": "sha256:1"})()
    in_container(object(), image, call, contextlib.ExitStack(), gpus=gpus, settings=object(), timeout_s=1.0)
    assert (made[0].gpus, made[0].network) == (gpus, network)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = H200.but(commands={SMI_NEW: 2 * "NVIDIA H200, 143771, 9.0\n"}).facts()
    monkeypatch.setattr("envbuild.host.facts", lambda *_: found)
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["--gpus", "1,0"], "1,0 PCI_BUS_ID"),
        (["--gpus", "1"], "1 PCI_BUS_ID"),
        (["--device", "cpu"], " "),
        (["--device", "cuda"], "7 "),
        ([], "7 "),
    ],
)
def test_a_process_of_this_host_sees_these_gpus_alone(
    words: list[str], seen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show = 'echo "sees $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER."'
    with pytest.raises(SystemExit):
        main(["smoke", "--host", *words, "--json", "--", "sh", "-c", show])
    assert f"sees {seen}." in Path(json.loads(capsys.readouterr().out)["log"]).read_text()


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("more", [["--", "true"], ["--expected", "EXPECTED", "--python", sys.executable]])
def test_gpus_that_this_machine_does_not_have(
    more: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    expected = tmp_path / "expected.json"
    expected.write_text('{"cell": {"cuda": "13.0"}, "packages": {}, "components": {}}')
    with pytest.raises(SystemExit) as ended:
        main(["smoke", "--host", "--gpus", "0,9", *(str(expected) if word == "EXPECTED" else word for word in more)])
    assert ended.value.code == 8
    assert "this machine has 2 GPUs, numbered from 0" in capsys.readouterr().err


@pytest.mark.usefixtures("two_gpus")
def test_gpus_for_a_run_that_is_on_the_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    expected = tmp_path / "expected.json"
    expected.write_text('{"cell": {"cuda": "cpu"}, "packages": {}, "components": {}}')
    words = ["--host", "--gpus", "0", "--expected", str(expected), "--python", sys.executable]
    with pytest.raises(SystemExit) as ended:
        main(["smoke", *words])
    assert ended.value.code == 2
    assert "this run is on the CPU and sees no GPU" in capsys.readouterr().err


@pytest.mark.usefixtures("two_gpus")
def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["smoke", "--host", "--workdir", "/nowhere/at/all", "--", "true"])
    assert ended.value.code == 2
    assert "is no folder of this host" in capsys.readouterr().err

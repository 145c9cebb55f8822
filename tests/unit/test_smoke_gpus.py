"""`smoke --gpus`: which of the machine's GPUs a run sees."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from envbuild.cli.program import main
from envbuild.verify import start
from envbuild.verify.start import Call, in_container, only_gpus


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["x", "--gpus", "none"], "none names no GPUs of the run"),
        (["x", "--gpus", "auto"], "auto names no GPUs of the run"),
        (["x", "--gpus", "first"], "names no GPUs"),
        (["x", "--gpus", "0;1"], "names no GPUs"),
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


def test_a_process_of_this_host_sees_these_gpus_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert only_gpus("0,2") == {"CUDA_VISIBLE_DEVICES": "0,2"}
    assert only_gpus("all") == only_gpus("none") == only_gpus("auto") == {}
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    for words, seen in ((["--gpus", "0,2"], "0,2"), ([], "7")):
        with pytest.raises(SystemExit):
            main(["smoke", "--host", *words, "--json", "--", "sh", "-c", 'echo "sees $CUDA_VISIBLE_DEVICES."'])
        assert f"sees {seen}." in Path(json.loads(capsys.readouterr().out)["log"]).read_text()

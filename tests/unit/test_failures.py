"""Why a build failed: which cause the error names."""

import base64
import io
import json
from pathlib import Path

import pytest

from envbuild.engine.failures import stage_failure
from envbuild.engine.progress import Watch
from envbuild.settings import Settings

FULL = "fatal error: error writing to /tmp/cc.s: No space left on device"
NOISE = [f"[{number}/99] g++ -Wno-error=foo -c a{number}.cpp" for number in range(8)]
TRACEBACK = [
    "Traceback (most recent call last):",
    *(f"  File x{number}.py" for number in range(8)),
    "CalledProcessError",
]


def failure(
    tmp_path: Path,
    *lines: str,
    error: str = "process did not complete successfully: exit code: 1",
    stage: str = "build-te",
):
    watch, digest = Watch(log=io.StringIO(), on_change=lambda *_: None), "sha256:1"
    vertex = {"digest": digest, "name": f"[{stage} 3/4] RUN x", "started": "2026-01-01T00:00:00Z"}
    watch.feed(json.dumps({"vertexes": [vertex]}))
    for line in lines:
        data = base64.b64encode(f"{line}\n".encode()).decode()
        watch.feed(json.dumps({"logs": [{"vertex": digest, "data": data}]}))
    watch.feed(json.dumps({"vertexes": [vertex | {"completed": "2026-01-01T00:01:00Z", "error": error}]}))
    return stage_failure(Settings(cache_dir=tmp_path), watch, "wheel-te", tmp_path / "log")


@pytest.mark.parametrize(
    "lines", [[FULL], [*NOISE, FULL, *TRACEBACK], ["/tmp/x: Disk quota exceeded"]], ids=["alone", "hidden", "quota"]
)
def test_a_full_disk_is_named_wherever_the_output_says_so(tmp_path, lines):
    found = failure(tmp_path, *lines)
    assert (found.exit_code, "the disk is full" in found.what) == (8, True)


@pytest.mark.parametrize(
    "error",
    [
        f"failed to compute cache key: content digest sha256:{'a' * 64}: not found",
        "failed to prepare sha256:x as y: parent snapshot sha256:z does not exist: not found",
        'failed to solve: lease "x": not found',
    ],
)
def test_what_the_builder_removed_is_no_fault_of_the_stage(tmp_path, error):
    found = failure(tmp_path, error=error)
    assert (found.exit_code, "the builder removed" in found.what) == (8, True)
    assert "run the same command again" in found.hint


def test_a_compiler_error_is_one_of_the_stage(tmp_path):
    found = failure(tmp_path, "a.cu(3): error: identifier x is undefined", "cp: /x: not found")
    assert (found.exit_code, "stage build-te failed" in found.what) == (5, True)


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ("runtime", "E: Version '1:1.2-3' for 'zlib1g' was not found"),
        ("runtime", "E: Failed to fetch http://m.example/pool/z/zlib1g_1_amd64.deb  404  Not Found [IP: 192.0.2.1 80]"),
        ("runtime", "envbuild: no package lists from http://m.example/debian/InRelease  404  Not Found"),
        ("torch", "  cause: HTTP status client error (404 Not Found) for url (https://m.example/torch.whl)"),
        ("src-te", "fatal: remote error: upload-pack: not our ref 0123456789"),
        (
            "base",
            "failed to resolve source metadata for docker.io/library/x@sha256:1: docker.io/library/x@sha256:1: not found",
        ),
    ],
)
def test_what_a_host_does_not_have_differs_from_a_stage_that_failed(tmp_path, stage, line):
    found = failure(tmp_path, "something before", line, stage=stage)
    assert (found.exit_code, "does not have" in found.what) == (4, True)
    assert line.strip() in found.what
    assert "lock again" in found.hint


def test_a_stage_without_a_network_asked_no_host(tmp_path):
    assert failure(tmp_path, "E: Version '1' for 'zlib1g' was not found").exit_code == 5

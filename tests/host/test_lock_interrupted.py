"""A lock that is interrupted: apt and uv end at once, and so does everything that they started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Each starts a helper, as apt has its methods, and waits.
HANGS = """#!/bin/sh
sleep 600 &
echo $! >"$HELPER.new"
mv "$HELPER.new" "$HELPER"
wait
"""
APT = """
from pathlib import Path
from envbuild.lock.apt import resolve_os_packages
from envbuild.settings import Settings
resolve_os_packages(Settings(cache_dir=Path("cache")), packages=["zlib1g"], suite="bookworm")
"""
UV = """
from pathlib import Path
from envbuild.lock import python
from envbuild.lock.inputs import PythonGroup
from envbuild.settings import Settings
python.uv_executable = lambda: "uv-that-hangs"
python.resolve(Settings(cache_dir=Path("cache")), PythonGroup(name="env", requirements=("torch",)), python="3.12", glibc="2.36")
"""


def wait_for(happened, seconds=30.0):
    end = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(("program", "script"), [("apt-get", APT), ("uv-that-hangs", UV)])
def test_the_helpers_of_a_program_end_with_it(tmp_path, program, script, by):
    place, helper = tmp_path / "bin" / program, tmp_path / "helper"
    place.parent.mkdir()
    place.write_text(HANGS)
    place.chmod(0o755)
    handlers = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "for each in (signal.SIGTERM, signal.SIGHUP): signal.signal(each, signal.default_int_handler)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", handlers + script],
        env=os.environ
        | {
            "PATH": f"{place.parent}:{os.environ['PATH']}",
            "HELPER": str(helper),
            "ENVBUILD_CACHE_DIR": str(tmp_path / "cache"),
            "TMPDIR": str(tmp_path),
        },
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: helper.exists() or process.poll() is not None)
        assert helper.exists(), process.communicate()[1]
        process.send_signal(by)
        assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
        assert not is_running(int(helper.read_text()))
    finally:
        process.kill()
        process.wait()

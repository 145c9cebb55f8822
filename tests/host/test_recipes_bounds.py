"""What a recipe may cost: whatever is in it, the check ends soon, stays small and gives findings or one clear error."""

import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from envbuild.errors import DataError, EnvbuildError
from envbuild.matrix.load import load_matrix
from envbuild.recipes import files
from envbuild.recipes.check import check_recipe
from envbuild.recipes.read import read_recipe

NINES = "9" * 5000

HOSTILE = {
    # a pattern took 293 s for sixteen of them
    "quoted.sh": "docker run --network host " + " ".join(f'-e "A{n}=b"' for n in range(400)) + " image\n",
    "flags.Dockerfile": "FROM a\nRUN " + "--a" * 30 + " x\n",
    "names.Dockerfile": "FROM a\nCOPY " + "_" * 20_000 + " /x\n",
    "installs.sh": "apt-get " + "install " * 20_000 + "\n",
    "compiles.sh": "apt-get install -y cuda-toolkit-12-4\npip install torch==2.6.0+cu118\n" + "pip install " * 20_000 + "\n",
    "lines.sh": "pip install torch==2.8.0\n" * 40_000,
    "few-lines.sh": "pip install torch==2.8.0\n" * 4_000,
    "doubled.sh": "A=xxxxxxxxxx\n" + "A=$A$A$A$A$A$A$A$A$A$A\n" * 12 + "pip install $A\n",
    "doubled.Dockerfile": "FROM a\nENV A=xxxxxxxxxx\n" + "ENV A=$A$A$A$A$A$A$A$A$A$A\n" * 12 + "RUN pip install $A\n",
    "digits.sh": f"pip install torch=={NINES}\n# CUDA {NINES}.1\n# driver {NINES}.1\nconda install python={NINES}\n",
    "digits.toml": f'torch = "{NINES}"\n',
    "number.toml": f"x = {NINES}\n",
    "deep.toml": "x = " + "[" * 20_000 + "]" * 20_000 + "\n",
    "deep.Dockerfile": "FROM a\nRUN " + "[" * 100_000 + "\n",
    "stages.Dockerfile": "FROM ubuntu:22.04 AS s0\n"
    + "".join(f"FROM s{n} AS s{n + 1}\nRUN pip install torch==2.8.0\n" for n in range(3000)),
    "arms.sh": "".join(f"if a; then pip install torch==2.{n % 9}.0; fi\n" for n in range(2000)),
    "different.sh": "".join(f"pip install 'torch>=2.{n}'\n" for n in range(2000)),
    "here.sh": "".join(f"bash <<E{n}\n" for n in range(2000)) + "".join(f"E{n}\n" for n in reversed(range(2000))),
}  # fmt: skip

CHILD = """
import resource, sys, time
from pathlib import Path
from envbuild.errors import DataError
from envbuild.matrix.load import load_matrix
from envbuild.recipes.check import check_recipe
from envbuild.recipes.read import read_recipe
matrix = load_matrix()
begun = time.process_time()
try:
    check_recipe(matrix, read_recipe(matrix, Path(sys.argv[1])))
except DataError as error:
    print(error.what, file=sys.stderr)
print(time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.parametrize("name", HOSTILE)
def test_no_recipe_takes_long_or_much(tmp_path, name):
    path = tmp_path / name
    path.write_text(HOSTILE[name])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)),
    )
    assert done.returncode == 0, done.stderr
    seconds, mebibytes = map(float, done.stdout.split())
    assert seconds < 2
    assert mebibytes < 500


def test_every_line_of_what_is_stated_often_is_listed(tmp_path):
    path = tmp_path / "x.sh"
    path.write_text("# CUDA 12.6\n" + "export CUDA_HOME=/usr/local/cuda-11.8\n" * 500)
    (finding,) = check_recipe(load_matrix(), read_recipe(load_matrix(), path)).findings
    assert finding.lines == tuple(range(1, 502))


def test_a_version_with_thousands_of_digits_is_no_version(tmp_path):
    path = tmp_path / "x.sh"
    path.write_text(HOSTILE["digits.sh"])
    assert not read_recipe(load_matrix(), path).statements


def test_a_recipe_over_the_limit_is_refused(tmp_path):
    path = tmp_path / "x.sh"
    path.write_bytes(b"#" * (files.LIMIT + 1))
    with pytest.raises(DataError, match="more than 1 MiB"):
        files.read_text(path)
    path.write_bytes(b"#" * files.LIMIT)
    assert len(files.read_text(path)) == files.LIMIT


@pytest.mark.parametrize("place", ["/dev/zero", "/dev/null", "/"])
def test_neither_a_device_nor_a_folder_is_read(place):
    with pytest.raises(DataError, match="a folder, a device or a socket"):
        files.read_text(Path(place))


def test_a_fifo_is_read(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def write():
        with fifo.open("w") as file:
            for _ in range(3):
                file.write("pip install apex\n")
                file.flush()
                time.sleep(0.05)

    writer = threading.Thread(target=write)
    writer.start()
    assert files.read_text(fifo) == "pip install apex\n" * 3
    writer.join()


def test_a_fifo_that_nobody_writes_to_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", 0.2)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(DataError, match="was not closed within"):
        files.read_text(fifo)


def test_a_fifo_without_end_is_cut_at_the_limit(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = subprocess.Popen(["sh", "-c", f"exec cat /dev/zero > {fifo}"])
    try:
        with pytest.raises(DataError, match="more than 1 MiB"):
            files.read_text(fifo)
    finally:
        writer.kill()
        writer.wait()


def test_standard_input_without_end_is_cut_at_the_limit():
    code = "from pathlib import Path\nfrom envbuild.recipes.files import read_text\nread_text(Path('-'))"
    with Path("/dev/zero").open("rb") as endless:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=endless, capture_output=True, text=True, timeout=60, check=False
        )
    assert "more than 1 MiB" in done.stderr


@pytest.mark.parametrize("name", ["a.sh", "Dockerfile", "a.toml", "requirements.txt"])
def test_what_is_no_text_is_refused_by_name(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(EnvbuildError, match="byte 0 is not UTF-8"):
        read_recipe(load_matrix(), path)

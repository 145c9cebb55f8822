"""An image as any user, and its Jupyter: a stack on the CPU cell, run as numbers that the image does not know."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import run

STACK = """
name = "mine"
title = "A tree of one script"
about = "What a user writes for their own repository."
source = "https://example.org/mine"
jupyter = true

[repository]
name = "mine"
url = "https://example.invalid/mine.git"
commit = "{commit}"
path = "/workspace/mine"

[stated]
cuda = "cpu"
"""
TAG = f"envbuild-test:any-user-{uuid.uuid4().hex[:8]}"
# OpenShift's: a number that nobody has, in group 0; and one in a group that nobody has, either.
USERS = ("1000780000:0", "54321:54321")
# The folders that torch's and Triton's compilers, C++ extensions and matplotlib take.
CACHES = """
import getpass, os, pathlib
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
from torch.utils.cpp_extension import get_default_build_root
home = pathlib.Path.home()
assert home.stat().st_uid == os.getuid() and home.stat().st_mode & 0o077 == 0
places = [cache_dir(), triton_cache_dir(0), get_default_build_root(), home / ".config/matplotlib", home / ".triton/cache"]
for place in places:
    os.makedirs(f"{place}/x")
    assert os.stat(place).st_uid == os.getuid()
print(getpass.getuser(), os.path.expanduser("~"))
"""
# What cannot be imported: for an unknown user no more than for root.
IMPORTS = """
import contextlib, importlib, importlib.metadata, io
names = sorted(n for n in importlib.metadata.packages_distributions() if n.isidentifier() and n[0] != "_")
failed = []
for name in names:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module(name)
    except Exception as error:
        failed.append(f"{name}: {type(error).__name__}")
print(len(names), *failed)
"""
# What Python would compile again at every start, for who may not write it next to the source.
COMPILED_AGAIN = """
import os, sys
import torch
caches = [m.__spec__.cached for m in list(sys.modules.values()) if getattr(m, "__spec__", None) and m.__spec__.cached]
print(len(caches), *sorted(c for c in caches if not os.path.exists(c)))
"""


@pytest.fixture(scope="module")
def image(engine, tmp_path_factory) -> Iterator[str]:
    """The image of the stack."""
    folder = tmp_path_factory.mktemp("any")
    tree = folder / "sources" / "mine"
    tree.mkdir(parents=True)
    (tree / "train.py").write_text("print('trained')\n")
    git = ["git", "-C", tree, "-c", "user.name=t", "-c", "user.email=t@example.org"]
    date = "2026-01-01T00:00:00Z"  # the same commit every time, and so a lock that is there already
    dates = os.environ | {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True, capture_output=True, env=dates)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (folder / "mine.toml").write_text(STACK.format(commit=commit))
    env = {"ENVBUILD_SOURCES": str(folder / "sources")}
    made = run("image", "--stack", str(folder / "mine.toml"), "--tag", TAG, "--no-smoke", "--json", env=env)
    try:
        assert made.code == 0, made.err
        assert made.answer["audit"]["defects"] == 0
        yield TAG
    finally:
        own = made.answer["tag"] if made.code == 0 else TAG
        engine.image.remove([tag for tag in {TAG, own} if engine.image.exists(tag)], force=True)


def inside(image: str, *command: str, user: str | None = None, flags: tuple[str, ...] = ()) -> str:
    """Run a command as a plain `docker run` does, and as Kubernetes: with a user and no variable."""
    line = ["docker", "run", "--rm", "--network=none", *(["--user", user] if user else []), *flags, image, *command]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.parametrize("user", USERS)
def test_caches_go_where_an_unknown_user_may_write(image, user):
    uid = user.partition(":")[0]
    assert inside(image, "python", "-c", CACHES, user=user) == f"uid{uid} /tmp/home-{uid}"


def test_nothing_is_compiled_again_when_torch_is_imported(image):
    count, *missing = inside(image, "python", "-B", "-c", COMPILED_AGAIN, user=USERS[1]).split()
    assert int(count) > 800
    assert missing == []


def test_what_is_shipped_imports_for_an_unknown_user_as_for_root(image):
    found = inside(image, "python", "-c", IMPORTS, user=USERS[1])
    assert found == inside(image, "python", "-c", IMPORTS)
    assert int(found.split()[0]) > 50
    assert "torch" not in found


@pytest.mark.parametrize("user", USERS)
def test_everything_that_is_shipped_can_be_read(image, user):
    look = "find /opt /workspace /usr/local ! -type l ! -readable; touch /workspace/own && stat -c %A /workspace"
    assert inside(image, "sh", "-c", f"{look} 2>&1", user=user) == "drwxrwxrwt"


def test_pip_works_without_a_home(image, tmp_path):
    tmp_path.chmod(0o755)  # pytest's folders are for their owner alone
    info = "own-1.dist-info"
    with zipfile.ZipFile(tmp_path / "own-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("own.py", "print('own')\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: own\nVersion: 1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    install = "pip install --no-index --find-links /wheels --target /workspace/more own"
    line = f"{install} && PYTHONPATH=/workspace/more python -c 'import own'"
    assert inside(image, "sh", "-c", line, user=USERS[0], flags=("-v", f"{tmp_path}:/wheels:ro")) == "own"


def test_root_and_a_home_that_is_given_stay_as_they_are(image):
    ask = ("python", "-c", "import getpass, os; print(getpass.getuser(), os.environ['HOME'], os.environ.get('USER'))")
    assert inside(image, *ask) == "root /root None"
    assert (
        inside(image, *ask, user=USERS[0], flags=("--env", "HOME=/workspace"))
        == "uid1000780000 /workspace uid1000780000"
    )


def test_a_folder_that_another_user_made_in_its_place_is_not_taken(image):
    uid = int(USERS[1].partition(":")[0])
    child = "import os; print(os.path.expanduser('~'))"
    python = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], user={uid}, env={{'HOME': '/'}})"
    )
    # root's, which this user may read and not write to: what root puts there later would be taken for its own
    line = f"mkdir /tmp/home-{uid} && exec python -c {shlex.quote(python)}"
    assert inside(image, "sh", "-c", line) == f"/var/tmp/home-{uid}"


@pytest.mark.parametrize("user", USERS)
def test_a_kernel_runs(image, user):
    line = "echo 'import torch; print(int(torch.ones(42).sum()))' >/workspace/cell.py && jupyter run /workspace/cell.py"
    # a kernel is reached at 127.0.0.1, which a container without a network has, too
    assert inside(image, "sh", "-c", line, user=user) == "42"


@pytest.mark.parametrize("user", [None, USERS[0]])
def test_jupyter_lab_answers_on_its_port(image, user, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "envbuild", "run", *(["--user", user] if user else []), "--workdir", "/workspace"]
    log = tmp_path / "log"
    with log.open("w") as file:
        started = subprocess.Popen([*line, image, "--", "jupyter", "lab", f"--port={port}"], stdout=file, stderr=file)
    try:
        token = token_in(log)
        assert status(f"http://127.0.0.1:{port}/lab?token={token}") == 200
        assert status(f"http://127.0.0.1:{port}/api/kernelspecs?token={token}") == 200
        assert status(f"http://127.0.0.1:{port}/api/kernelspecs") == 403
        listens = subprocess.run(["ss", "-Hltn", f"sport = :{port}"], capture_output=True, text=True, check=True)
        assert [each.split()[3] for each in listens.stdout.splitlines()] == [f"127.0.0.1:{port}"]
    finally:
        listed = ["docker", "ps", "--no-trunc", "--format={{.ID}} {{.Command}}"]
        ours = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
        found = [line.split()[0] for line in ours if f"--port={port}" in line]
        subprocess.run(["docker", "rm", "--force", *found], capture_output=True, check=True)
        started.wait(60)


def token_in(log: Path) -> str:
    """Return the token that the server prints once it answers."""
    for _ in range(600):
        if found := re.search(r"http://127\.0\.0\.1:\d+/lab\?token=([0-9a-f]{48})", log.read_text()):
            return found[1]
        time.sleep(0.2)
    pytest.fail(f"no server:\n{log.read_text()}")


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code

"""A user whom an image does not know: what its Python does as it starts, by real processes of another user."""

import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from envbuild.paths import data_dir

HOOK = (data_dir("dockerfiles") / "image" / "_envbuild_home.py").read_text()
ASK = "\nimport getpass\nprint(os.environ.get('HOME'), getpass.getuser())\n"
OTHERS = ("/var/tmp", "/dev/shm")


@pytest.fixture
def uid() -> Iterator[int]:
    """The number of a user that nobody here has."""
    number = random.Random().randrange(10**8, 10**9)
    yield number
    for place in OTHERS:
        shutil.rmtree(f"{place}/home-{number}", ignore_errors=True)


@pytest.fixture
def tmp() -> Iterator[Path]:
    """A folder that every user may write to, as /tmp is."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def started(tmp: Path, uid: int, hook: str = HOOK, **variables: str) -> tuple[Path, str]:
    """Return the home and the name of a Python that this user starts."""
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp), "HOME": "/", **variables}
    line = ["/usr/bin/python3", "-c", hook + ASK]
    become: dict[str, int] = {}
    if os.geteuid() == 0:
        become = {"user": uid, "group": uid}
    else:  # this user, by another number
        line = ["unshare", "--user", f"--map-user={uid}", f"--map-group={uid}", *line]
    done = subprocess.run(line, **become, env=env, cwd="/", capture_output=True, text=True, check=True)  # type: ignore[call-overload]
    home, name = done.stdout.split()
    return Path(home), name


def test_such_a_user_gets_a_home_that_nobody_else_reads_and_a_name(tmp, uid):
    assert started(tmp, uid) == (tmp / f"home-{uid}", f"uid{uid}")
    assert (tmp / f"home-{uid}").stat().st_mode & 0o777 == 0o700
    assert started(tmp, uid)[0] == tmp / f"home-{uid}"  # the next process takes the same, with its caches


def test_a_home_and_a_name_that_are_given_stay(tmp, uid):
    assert started(tmp, uid, HOME=str(tmp), USER="me") == (tmp, "me")
    assert list(tmp.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "open", "file"])
def test_a_folder_that_somebody_else_can_write_to_is_not_taken(tmp, uid, kind):
    place = tmp / f"home-{uid}"
    if kind == "link":
        (tmp / "elsewhere").mkdir(mode=0o777)
        place.symlink_to(tmp / "elsewhere")
    elif kind == "open":
        place.mkdir()
        place.chmod(0o777)
        if os.geteuid() == 0:
            os.chown(place, uid, uid)
    else:
        place.touch()
    home, name = started(tmp, uid)
    assert (str(home), name) == (f"{OTHERS[0]}/home-{uid}", f"uid{uid}")


def test_a_place_where_others_could_swap_the_folder_is_passed_over(tmp, uid):
    tmp.chmod(0o777)  # as a volume of Kubernetes is; without the sticky bit
    assert started(tmp, uid)[0] == Path(f"{OTHERS[0]}/home-{uid}")
    assert list(tmp.iterdir()) == []


def test_a_relative_place_is_no_home(tmp, uid):
    assert started(Path("tmp"), uid)[0] == Path(f"{OTHERS[0]}/home-{uid}")


def test_without_a_place_to_write_python_starts_all_the_same(tmp, uid):
    assert started(tmp / "missing", uid, HOOK.replace('"/var/tmp", "/dev/shm"', "")) == (Path("/"), f"uid{uid}")


def test_root_keeps_what_it_has(tmp):
    """Root's home need not even be there."""
    code = f"import os\nos.getuid = lambda: 0\n{HOOK}{ASK}"
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp), "HOME": "/nowhere", "USER": "root"}
    done = subprocess.run(["/usr/bin/python3", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["/nowhere", "root"]
    assert list(tmp.iterdir()) == []

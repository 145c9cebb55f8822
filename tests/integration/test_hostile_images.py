"""Images of somebody else on the real engine: what they print, run and hide harms nobody, and no container is left."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from command import image_names, new_volumes, run, volumes

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from fake_image import SITE, FakeImage, fake_image

from envbuild.engine.guest import CONFINED, LABEL
from envbuild.engine.own_tags import REBUILT, own_tag
from envbuild.engine.reproduce import compare
from envbuild.errors import AuditError, SmokeError
from envbuild.settings import Settings
from envbuild.stacks.model import Use
from envbuild.util.maker import Maker
from envbuild.verify import audit as auditing
from envbuild.verify import stack_proof
from envbuild.verify.target import ImageTarget, look

NAME = "envbuild-hostile"
OURS = f"org.example.hostile={os.getpid()}"  # a label of each image here, and so of its containers


@pytest.fixture(scope="session")
def busybox(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("busybox")
    subprocess.run(["apt-get", "download", "-qq", "busybox-static"], cwd=folder, check=True, capture_output=True)
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
    return folder / "bin" / "busybox"


@pytest.fixture
def make(engine, busybox):
    """Import an image and return its tag; it goes at the end."""
    made = []

    def call(image: FakeImage, *changes: str) -> str:
        tag = f"{NAME}:{os.getpid()}-{len(made)}"
        labels = [f"--change=LABEL {key}={json.dumps(value)}" for key, value in image.labels.items()]
        command = ["docker", "import", f"--change=LABEL {OURS}", *labels]
        command += [*(f"--change={change}" for change in changes), "-", tag]
        subprocess.run(command, input=image.tar(busybox), check=True, capture_output=True)
        made.append(tag)
        return tag

    yield call
    for tag in made:
        subprocess.run(["docker", "image", "rm", "--force", tag], check=False, capture_output=True)


@pytest.fixture
def image() -> FakeImage:
    return fake_image()


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache")


@pytest.fixture(autouse=True)
def nothing_left(engine):
    """Neither a container nor a volume is left by any test."""
    before = volumes()
    yield
    assert guests() == []
    assert not new_volumes(before)


def guests() -> list[str]:
    """Return this file's containers that have envbuild's label."""
    command = ["docker", "ps", "--all", f"--filter=label={LABEL}", f"--filter=label={OURS}", "--format={{.Names}}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def verdicts(found) -> dict[str, tuple[str, str]]:
    return {check.name: (check.verdict, check.text) for check in found.checks}


def test_a_sound_image_passes_and_what_was_not_compared_is_listed(make, image, settings, tmp_path):
    tag = make(image)
    found = auditing.audit(settings, tag)
    assert found.defects == (), found.checks
    assert found.digest.startswith("sha256:")
    assert found.as_json()["digest"] == found.digest
    verdict, text = verdicts(found)["locked wheels"]
    assert verdict == "unproven"
    assert text.startswith("not compared with their wheels, which are")
    assert "numpy, torch (`envbuild audit --deep`" in text
    for filename, body in image.wheels.items():
        (tmp_path / filename).write_bytes(body)
    with_wheels = settings.model_copy(update={"find_links": (str(tmp_path),)})
    assert verdicts(auditing.audit(with_wheels, tag, deep=True))["locked wheels"][0] == "passed"
    # their RECORDs are known from now on, and no index is asked
    assert verdicts(auditing.audit(settings, tag))["locked wheels"][0] == "passed"


def test_an_entry_point_of_the_image_does_not_run(make, image, settings):
    image.files["bin/evil"] = b"#!/bin/sh\necho owned >&2\nexit 9\n"
    tag = make(image, 'ENTRYPOINT ["/bin/evil"]', "USER nobody", "WORKDIR /no/such/folder")
    assert auditing.audit(settings, tag).defects == ()


HOSTILE = {
    "endless": ("#!/bin/sh\nexec yes\n", "printed more than 16,777,216 bytes"),
    "endless on stderr": ("#!/bin/sh\nexec yes >&2\n", "printed more than 16,777,216 bytes"),
    "never ends": ("#!/bin/sh\ntrap '' TERM INT HUP\nwhile :; do sleep 1; done\n", "did not end within 5 s"),
    "silent": ("#!/bin/sh\nexit 0\n", "cannot be read: no answer"),
    "garbage": ("#!/bin/sh\nhead -c 100000 /dev/urandom\n", "cannot be read: no answer"),
    "old mark": ("#!/bin/sh\necho 'envbuild-probe {}'\n", "cannot be read: no answer"),
    "marks": ('#!/bin/sh\necho "envbuild-probe $2 {}"; echo "envbuild-probe $2 {}"\n', "2 answers instead of one"),
    "shape": ('#!/bin/sh\necho "envbuild-probe $2 [1]"\n', "cannot be read: "),
    "deep": (
        '#!/bin/sh\nprintf "envbuild-probe $2 "; head -c 1000000 /dev/zero | tr "\\0" "["; echo\n',
        "nested deeper than 64 levels",
    ),
    "escapes": (
        '#!/bin/sh\nprintf "\\033[2J\\033]0;owned\\007\\n" >&2\nexit 3\n',
        r"does not run: \x1b[2J\x1b]0;owned\x07",
    ),
    "no program": ("#!/no/such/interpreter\n", "does not run"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_python_is_one_clear_error(make, image, settings, kind, monkeypatch):
    image.python, says = HOSTILE[kind]
    if kind == "never ends":
        monkeypatch.setattr(auditing, "_PROBE_S", 5.0)
    begun = time.monotonic()
    with pytest.raises(AuditError) as caught:
        auditing.audit(settings, make(image))
    assert says in str(caught.value)
    assert str(caught.value).replace("\n", "").isprintable()
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("kind", [k for k in HOSTILE if k not in {"old mark", "marks", "shape", "never ends"}])
def test_the_first_look_of_smoke_is_bounded_alike(make, image, settings, kind):
    image.python, _ = HOSTILE[kind]
    if kind == "deep":
        image.python = image.python.replace("envbuild-probe $2 ", '{\\"a\\":')
    with pytest.raises(SmokeError) as caught:
        look(ImageTarget(reference=make(image)), settings)
    assert str(caught.value).replace("\n", "").isprintable()


def test_the_probe_has_no_rights_no_network_and_nowhere_to_write(make, image):
    image.files["tmp/there"] = b""
    tag = make(image)
    command = ["docker", "image", "inspect", "--format", "{{.Id}}", tag]
    id_ = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    script = "cat /proc/self/status; cat /proc/net/dev; touch /x /tmp/x; touch $HOME/ok && echo scratch"
    done = subprocess.run(
        ["docker", "run", "--rm", *CONFINED, "--entrypoint", "sh", id_, "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "CapEff:\t0000000000000002" in done.stdout  # CAP_DAC_OVERRIDE alone
    assert "NoNewPrivs:\t1" in done.stdout
    assert "eth0" not in done.stdout
    assert done.stderr.count("Read-only file system") == 2
    assert "scratch" in done.stdout


def test_a_lie_of_the_images_python_about_versions_is_seen(make, image, settings):
    name = next(n for n in image.files if n.startswith(f"{SITE}/numpy-") and n.endswith("/METADATA"))
    image.files = {p.replace("numpy-1.0.dist-info", "numpy-0.9.dist-info"): b for p, b in image.files.items()}
    assert name not in image.files
    found = verdicts(auditing.audit(settings, make(image)))
    assert found["packages"][0] == "passed"  # so says its Python
    assert "the image's Python reports numpy 1.0, its files are of 0.9" in found["files"][1]


def test_a_distribution_that_the_images_python_hides_is_seen(make, image, settings):
    image.files |= {
        f"{SITE}/evil-6.6.dist-info/RECORD": b"evil-6.6.dist-info/RECORD,,\n",
    }
    found = verdicts(auditing.audit(settings, make(image)))
    assert "evil 6.6 is not in the lock" in found["packages"][1]


def test_an_expectation_that_is_not_the_locks_is_seen(make, image, settings):
    image.labels["io.envbuild.lock"] = "sha256:" + "0" * 64
    check = verdicts(auditing.audit(settings, make(image)))["the lock it carries"]
    assert check[0] == "failed"
    assert "its label names" in check[1]


def test_a_volume_hides_nothing(make, image, settings):
    image.files[f"{SITE}/sitecustomize.py"] = b"import os\n"
    image.files["data/nvcc"] = b"x"
    found = verdicts(auditing.audit(settings, make(image, "VOLUME /opt/venv", "VOLUME /data")))
    assert (
        "no RECORD lists /opt/venv/lib/python3.11/site-packages/sitecustomize.py"
        in found["files of no distribution"][1]
    )
    assert "/data/nvcc is a CUDA compiler" in found["no compiler"][1]
    assert found["volumes"] == (
        "failed",
        "/opt/venv is a volume: a container need not see what the image has there",
    )


def test_a_tag_that_moves_in_between_is_not_followed(make, image, settings, monkeypatch):
    """What runs is what was inspected."""
    tag = make(image)
    evil = fake_image()
    evil.python = "#!/bin/sh\necho owned >&2; exit 66\n"
    other = make(evil)
    from envbuild.engine import guest

    look_up = guest.look_up

    def moved(*args):
        found = look_up(*args)
        subprocess.run(["docker", "tag", other, tag], check=True)
        return found

    monkeypatch.setattr(guest, "look_up", moved)
    found = auditing.audit(settings, tag)
    assert found.defects == ()
    assert look_up(settings, tag).id == look_up(settings, other).id != found.digest


def test_a_proof_runs_the_image_that_was_looked_up_past_its_entry_point(make, image, settings):
    tag = make(image, 'ENTRYPOINT ["/bin/false"]')
    # the two streams of a container come by themselves, and near each other in any order
    shown = stack_proof.show(settings, tag, (Use(name="a", run="echo yes; sleep 0.5; echo oh no >&2; exit 3"),), "cpu")
    assert [(s.outcome, s.reason) for s in shown] == [("failed", "exit 3: oh no")]


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("what", ["audit", "smoke"])
def test_a_signal_leaves_no_container(make, image, tmp_path, what, by):
    image.python = "#!/bin/sh\ntrap '' TERM INT HUP\necho up\nwhile :; do sleep 1; done\n"
    process, _ = started(what, make(image), tmp_path)
    process.send_signal(by)
    printed = process.communicate(timeout=60)[1]
    assert process.returncode == 130, printed
    assert guests() == []


def started(what: str, tag: str, tmp_path: Path) -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "envbuild", what, tag],
        env=os.environ | {"ENVBUILD_CACHE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # under nohup it is ignored, and a command rightly leaves it so
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # noqa: PLW1509
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        up = [name for name in guests() if "Up" in status(name)]
        if up:
            return process, up[0]
        time.sleep(0.05)
    process.kill()
    pytest.fail("no container came up")


def status(name: str) -> str:
    command = ["docker", "ps", "--filter", f"name={name}", "--format", "{{.Status}}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_what_sigkill_leaves_goes_with_the_next_run(make, image, settings, tmp_path):
    image.python = "#!/bin/sh\ntrap '' TERM INT HUP\nwhile :; do sleep 1; done\n"
    process, name = started("audit", make(image), tmp_path)
    process.kill()
    process.communicate()
    assert guests() == [name]
    assert auditing.audit(settings, make(fake_image())).defects == ()
    assert guests() == []


def test_a_container_of_a_living_run_and_one_of_the_users_stay(make, image, settings):
    """An image can have the label: that makes no container of it ours."""
    dead = "0" * 12 + "-1-1-1-1"
    image.labels[LABEL] = dead
    tag = make(image)
    own = f"{NAME}-user-{os.getpid()}"
    alive = f"envbuild-audit-{'0' * 12}"
    try:
        subprocess.run(["docker", "create", "--name", own, tag, "true"], check=True, capture_output=True)
        label = f"{LABEL}={Maker.here(seconds=600)}"
        subprocess.run(
            ["docker", "create", "--name", alive, "--label", label, tag, "true"], check=True, capture_output=True
        )
        auditing.audit(settings, make(fake_image()))
        assert set(guests()) == {own, alive}
    finally:
        subprocess.run(["docker", "rm", "--force", own, alive], check=False, capture_output=True)


def test_the_command_names_tag_and_digest(make, image, tmp_path):
    tag = make(image)
    done = run("audit", tag, "--json", env={"ENVBUILD_CACHE_DIR": str(tmp_path)})
    assert done.code == 0, done.err
    assert (done.answer["image"], done.answer["digest"][:7]) == (tag, "sha256:")
    image.files[f"{SITE}/torch/__init__.py"] = b"import os\n"
    changed = make(image)
    done = run("audit", changed, env={"ENVBUILD_CACHE_DIR": str(tmp_path)})
    assert done.code == 6
    assert f"{changed} (sha256:" in done.err
    assert "is not what torch installed" in done.err


def test_two_images_of_the_engine_are_compared_file_by_file(make, image, client):
    one = make(image)
    image.files |= {"etc/issue": b"two\n", f"{SITE}/e\x1b[2Jvil.py": b""}
    other = make(image)
    found = {d.path: d.what for d in compare(client, one, other) if not d.path.startswith("(configuration)")}
    assert sorted(found) == sorted(["etc/issue", f"{SITE}/e\\x1b[2Jvil.py"])
    assert found["etc/issue"] == f"only in {other}"
    assert list(compare(client, one, one)) == []


def test_each_reproduction_has_a_tag_that_goes_with_it_and_what_a_kill_left_goes_with_the_next(
    make, image, engine, client
):
    tag = make(image)
    left, alive = (
        f"envbuild-reproduce:{maker}-abcdef"
        for maker in (replace(Maker.here(seconds=60), started=1), Maker.here(seconds=60))
    )
    for name in (left, alive):
        engine.tag(tag, name)
    try:
        with pytest.raises(KeyboardInterrupt), own_tag(client, REBUILT) as own, own_tag(client, REBUILT) as another:  # noqa: PT012
            assert own != another
            engine.tag(tag, own)
            raise KeyboardInterrupt
        kept = image_names("envbuild-reproduce:")
        assert left not in kept
        assert own not in kept
        assert alive in kept
    finally:
        engine.image.remove([alive], force=True)

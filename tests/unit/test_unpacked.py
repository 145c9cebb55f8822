"""Images that are files or folders: what names one, what is checked as it is read, and the lines that Apptainer gets."""

import csv
import hashlib
import io
import json
import os
import platform
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from recorded import ENGINE, H200
from saved_images import GZIP, ZSTD, packed
from saved_images import Image as SavedImage
from saved_images import layer as tar_layer

from envbuild.engine import guest
from envbuild.engine.apptainer import labels_of_sandbox
from envbuild.engine.archive import Archive, ImageError, Layout
from envbuild.engine.client import NoImageError
from envbuild.engine.image import Label, image_of
from envbuild.engine.place import is_path, kind_of
from envbuild.engine.unpacked import look_up, make_sandbox
from envbuild.errors import HostError, UsageError
from envbuild.matrix.cell import DEBIAN_ARCH
from envbuild.pipeline.output import check_output
from envbuild.run.apptainer import ApptainerRuntime, bind_flags, container_flags, shared_place
from envbuild.run.container import Container, Mount, parse_image
from envbuild.run.docker import DockerRuntime
from envbuild.run.launch import Job, Node, plan_launch
from envbuild.run.runtime import runtime_for
from envbuild.settings import Settings
from envbuild.util.foreign_tar import Bounds

FOLDER = Path("/cache/apptainer")


def blob(folder: Path, body: bytes, kind: str) -> dict[str, object]:
    name = hashlib.sha256(body).hexdigest()
    (folder / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    (folder / "blobs" / "sha256" / name).write_bytes(body)
    return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{name}", "size": len(body)}


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    """An OCI layout of one layer."""
    folder = tmp_path / "layout"
    text = {"os": "linux", "architecture": "amd64", "config": {"Env": ["A=1"], "Labels": {"l": "v"}}}
    config = blob(folder, json.dumps(text).encode(), "config.v1+json")
    layer = blob(folder, b"a layer", "layer.v1.tar")
    manifest = blob(folder, json.dumps({"config": config, "layers": [layer]}).encode(), "manifest.v1+json")
    (folder / "index.json").write_text(json.dumps({"manifests": [manifest]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


def named(layout: Path) -> Path:
    """The same as a tar whose members have no `./`, as engines write them."""
    path = layout.with_name("named.tar")
    with tarfile.open(path, "w") as tar:
        for file in sorted(each for each in layout.rglob("*") if each.is_file()):
            info = tarfile.TarInfo(file.relative_to(layout).as_posix())
            info.size = file.stat().st_size
            tar.addfile(info, io.BytesIO(file.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("text", "path"),
    [("envbuild:cu126", False), ("host/a/b:tag", False), ("./x", True), ("/x.sif", True), ("~/x", True), ("x/", True)],
)
def test_a_path_is_no_tag(text: str, path: bool) -> None:
    assert is_path(text) is path
    assert parse_image(text) == text


def test_a_file_that_is_there_needs_no_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_path("a.sif")
    (tmp_path / "a.sif").touch()
    assert is_path("a.sif")


def test_a_pipe_is_no_image(layout: Path, tmp_path: Path) -> None:
    """Who opens one for reading waits for a writer, for good."""
    for name in ("a.oci.tar", "a.sif"):
        os.mkfifo(tmp_path / name)
        assert kind_of(tmp_path / name) is None
    (layout / "index.json").unlink()
    os.mkfifo(layout / "index.json")
    with pytest.raises(ImageError, match=r"no index\.json"):
        Layout(layout).image()
    (tmp_path / "box" / ".singularity.d").mkdir(parents=True)
    os.mkfifo(tmp_path / "box" / ".singularity.d" / "labels.json")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        labels_of_sandbox(tmp_path / "box")


def test_a_folder_that_cannot_be_looked_into_is_no_image(tmp_path: Path) -> None:
    place = tmp_path
    while len(str(place)) < 3800:
        place /= "a" * 200
    place /= "a" * (4090 - len(str(place)))  # what it holds has a longer path than Linux takes
    place.mkdir(parents=True)
    assert kind_of(place) is None


def test_each_form_has_its_runtime(layout: Path, tmp_path: Path) -> None:
    sandbox = tmp_path / "root"
    (sandbox / ".singularity.d").mkdir(parents=True)
    (tmp_path / "a.sif").touch()
    assert [kind_of(each) for each in (layout, named(layout), sandbox, tmp_path / "a.sif", tmp_path)] == [
        "layout", "archive", "sandbox", "sif", None,
    ]  # fmt: skip
    settings = Settings(cache_dir=tmp_path)
    assert isinstance(runtime_for(settings, str(layout)), ApptainerRuntime)
    assert isinstance(runtime_for(settings, "envbuild:one"), DockerRuntime)


def test_an_archive_and_its_layout_are_one_image(layout: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    held = Archive(named(layout)).copy_to(tmp_path / "copy")
    assert held.digest == Layout(layout).image().digest == Layout(tmp_path / "copy").image().digest
    files = {each.name for each in (tmp_path / "copy" / "blobs" / "sha256").iterdir()}
    assert files == {each.name for each in (layout / "blobs" / "sha256").iterdir()}


def test_a_changed_layer_is_not_unpacked(layout: Path, tmp_path: Path) -> None:
    layer = layout / "blobs" / "sha256" / hashlib.sha256(b"a layer").hexdigest()
    layer.write_bytes(b"A layer")
    (tmp_path / "copy").mkdir()
    with pytest.raises(ImageError, match="damaged"):
        Layout(layout).copy_to(tmp_path / "copy")


def test_a_link_in_a_layout_leads_nowhere(layout: Path, tmp_path: Path) -> None:
    layer = layout / "blobs" / "sha256" / hashlib.sha256(b"a layer").hexdigest()
    layer.rename(tmp_path / "elsewhere")
    layer.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "copy").mkdir()
    with pytest.raises(ImageError, match="missing"):
        Layout(layout).copy_to(tmp_path / "copy")


HERE = {"os": "linux", "architecture": DEBIAN_ARCH[platform.machine()]}
THERE = {"os": "linux", "architecture": "s390x"}


def another(layout: Path, text: str) -> dict[str, object]:
    """Add a second image to a layout; return its descriptor."""
    config = blob(layout, json.dumps({"os": "linux", "config": {"Labels": {"l": text}}}).encode(), "config.v1+json")
    layer = blob(layout, b"a layer", "layer.v1.tar")
    return blob(layout, json.dumps({"config": config, "layers": [layer]}).encode(), "manifest.v1+json")


def test_of_several_platforms_this_machines_is_taken(layout: Path) -> None:
    (mine,) = json.loads((layout / "index.json").read_text())["manifests"]
    other = another(layout, "other")
    for nested in (False, True):
        listed = {"manifests": [other | {"platform": THERE}, mine | {"platform": HERE}]}
        if nested:
            listed = {"manifests": [blob(layout, json.dumps(listed).encode(), "index.v1+json")]}
        (layout / "index.json").write_text(json.dumps(listed))
        assert Layout(layout).image().listing[-1].digest == mine["digest"]


def test_a_sandbox_is_of_the_image_and_not_of_the_list(layout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of one list, each with another platform's image in it, shared a sandbox: the second ran the first's."""
    made = []

    def unpacks(archive: Archive, target: Path, own: Path) -> None:
        made.append(archive.image().listing[-1].digest)
        target.mkdir()
        (target / "who").write_text(made[-1])

    monkeypatch.setattr("envbuild.engine.unpacked.make_sandbox", unpacks)
    mine = json.loads((layout / "index.json").read_text())["manifests"][0]
    text = {"os": "linux", "architecture": "other", "config": {"Env": ["A=2"]}}
    config = blob(layout, json.dumps(text).encode(), "config.v1+json")
    body = json.dumps({"config": config, "layers": [blob(layout, b"other layer", "layer.v1.tar")]}).encode()
    other = blob(layout, body, "manifest.v1+json")
    listed = blob(
        layout,
        json.dumps({"manifests": [mine | {"platform": HERE}, other | {"platform": THERE}]}).encode(),
        "index.v1+json",
    )
    (layout / "index.json").write_text(json.dumps({"manifests": [listed]}))
    settings = Settings(cache_dir=layout.parent / "cache")
    found = []
    for there, gone in ((mine, other), (other, mine)):
        part = layout.with_name(f"of-{there['digest'][7:15]}")
        shutil.copytree(layout, part)
        (part / "blobs" / "sha256" / str(gone["digest"])[7:]).unlink()
        image = look_up(settings, str(part))
        assert image.digest == listed["digest"]
        found.append((image.place / "who").read_text())
    assert found == made == [mine["digest"], other["digest"]]


def test_of_several_images_none_is_guessed(layout: Path) -> None:
    (mine,) = json.loads((layout / "index.json").read_text())["manifests"]
    other = another(layout, "other")
    for listed, says in (
        ([mine, other], "none of them for linux"),
        ([mine | {"platform": HERE}, other | {"platform": HERE}], "2 of them for linux"),
        ([mine | {"platform": THERE}, other | {"platform": THERE}], "none of them for linux"),
    ):
        (layout / "index.json").write_text(json.dumps({"manifests": listed}))
        with pytest.raises(ImageError, match=says):
            Layout(layout).image()
    # one image under two tags; and a list of platforms of which one is there
    absent = other | {"digest": f"sha256:{'0' * 64}"}
    for listed in ([mine, mine | {"annotations": {"t": "2"}}], [absent, mine]):
        (layout / "index.json").write_text(json.dumps({"manifests": listed}))
        assert Layout(layout).image().digest == mine["digest"]


def test_a_document_that_is_two_things_is_none(layout: Path) -> None:
    """As an index it is one image, as a manifest another: what was checked would not be what runs."""
    (mine,) = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads((layout / "blobs" / "sha256" / mine["digest"].removeprefix("sha256:")).read_text())
    both = blob(layout, json.dumps(manifest | {"manifests": [mine]}).encode(), "manifest.v1+json")
    (layout / "index.json").write_text(json.dumps({"manifests": [both]}))
    with pytest.raises(ImageError, match="an index and a manifest at once"):
        Layout(layout).image()


def changed(layout: Path, which: str, **fields: object) -> None:
    """Write the manifest again with other fields of one of its descriptors."""
    (mine,) = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads((layout / "blobs" / "sha256" / mine["digest"].removeprefix("sha256:")).read_text())
    where = manifest["config"] if which == "config" else manifest["layers"][0]
    where |= fields
    again = blob(layout, json.dumps(manifest).encode(), "manifest.v1+json")
    (layout / "index.json").write_text(json.dumps({"manifests": [again]}))


@pytest.mark.parametrize(
    ("which", "fields"),
    [
        ("layer", {"digest": f"sha256:{'1' * 64}", "urls": ["https://example.com/layer"]}),
        ("layer", {"mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "digest": f"sha256:{'1' * 64}"}),
        ("layer", {"size": 2**63}),
        ("layer", {"size": 10**4000}),
        ("layer", {"size": 0}),
        ("layer", {"size": -1}),
        ("layer", {"size": True, "digest": "sha512:" + "1" * 128}),
        ("layer", {"digest": "sha256:../../../../etc/passwd"}),
        ("layer", {"platform": None}),
        ("config", {"size": 2**40}),
        ("config", {"digest": f"sha256:{'1' * 64}"}),
        ("config", {"mediaType": 3}),
    ],
)  # fmt: skip
def test_an_odd_descriptor_unpacks_nothing(
    layout: Path, tmp_path: Path, which: str, fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apptainer").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tmp_path / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    changed(layout, which, **fields)
    for opened in (lambda: Layout(layout), lambda: Archive(named(layout))):
        target = tmp_path / "copy"
        target.mkdir()
        with pytest.raises(ImageError):
            opened().copy_to(target)
        shutil.rmtree(target)
    (tmp_path / "own").mkdir()
    with pytest.raises(ImageError) as caught:
        make_sandbox(Layout(layout), tmp_path / "box", tmp_path / "own")
    assert caught.value.exit_code == 4
    assert not (tmp_path / "box").exists()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"bytes": 40_000}, "more than"),
        ({"bytes": 60_000}, "more than"),  # of the two layers together
        ({"members": 2}, "more than 1 members"),
        ({}, None),
    ],
)
def test_layers_out_of_bounds_are_not_handed_to_apptainer(
    tmp_path: Path, limits: dict[str, int], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes that unpack to a full disk: Apptainer unpacks whatever is there."""
    (tmp_path / "apptainer").write_text(f'#!/bin/sh\ntouch {tmp_path}/ran\nmkdir -p "$3/.singularity.d"\n')
    (tmp_path / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    bodies = (tar_layer(("a", bytes(30_000))), tar_layer(("b", b"b"), ("c", bytes(30_000))))
    made = SavedImage(*((GZIP, packed(body, GZIP)) for body in bodies)).write(tmp_path)
    (tmp_path / "own").mkdir()

    def make() -> None:
        bounds = Bounds(**{"bytes": 1 << 20, "members": 100} | limits)
        make_sandbox(Archive(made), tmp_path / "box", tmp_path / "own", bounds)

    if says is None:
        make()
        assert (tmp_path / "box").is_dir()
        return
    with pytest.raises(ImageError, match=says):
        make()
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "box").exists()


def test_a_host_that_runs_images_need_not_have_zstd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SavedImage((ZSTD, packed(tar_layer(("a", b"a")), ZSTD))).write(tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "apptainer").write_text('#!/bin/sh\nmkdir -p "$3/.singularity.d"\n')
    (tools / "apptainer").chmod(0o755)
    for name in ("sh", "mkdir"):
        (tools / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tools))
    (tmp_path / "own").mkdir()
    make_sandbox(Archive(made), tmp_path / "box", tmp_path / "own")
    assert (tmp_path / "box" / ".singularity.d" / "labels.json").is_file()


@pytest.mark.parametrize(
    "makes",
    [
        'ln -s "$OUTSIDE" "$3/.singularity.d"',
        'mkdir "$3/.singularity.d"; ln -s "$OUTSIDE/x" "$3/.singularity.d/labels.json"',
        'mkdir "$3/.singularity.d"; echo [ >"$3/.singularity.d/labels.json"',
        'mkdir "$3/.singularity.d"; echo [] >"$3/.singularity.d/labels.json"',
    ],
)
def test_labels_that_an_image_has_in_place_of_apptainers_are_one_error(
    tmp_path: Path, makes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    monkeypatch.setenv("OUTSIDE", str(outside))
    (tmp_path / "apptainer").write_text(f'#!/bin/sh\nmkdir -p "$3"\n{makes}\n')
    (tmp_path / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    made = SavedImage((GZIP, packed(tar_layer(("a", b"a")), GZIP))).write(tmp_path)
    (tmp_path / "own").mkdir()
    with pytest.raises(ImageError, match=r"/\.singularity\.d cannot be used"):
        make_sandbox(Archive(made), tmp_path / "box", tmp_path / "own")
    assert list(outside.iterdir()) == []


def test_a_folder_of_blobs_that_is_a_link_leads_nowhere(layout: Path, tmp_path: Path) -> None:
    (layout / "blobs").rename(tmp_path / "elsewhere")
    (layout / "blobs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ImageError):
        Layout(layout).image()


def test_what_a_configuration_states_becomes_the_image(layout: Path) -> None:
    config = {"os": "linux", "architecture": "arm64", "config": {"Env": ["A=1"], "Labels": {"l": "v"}, "Volumes": {}}}
    label = Label.model_validate({"digest": f"sha256:{'a' * 64}", "config": config})
    image = image_of(label, reference="x.sif", place=layout, confirmed_by="label")
    assert (image.platform, image.environment, image.labels) == ("linux/arm64", ("A=1",), {"l": "v"})
    with pytest.raises(ValueError, match="Labels"):
        image_of(
            Label.model_validate({"digest": f"sha256:{'a' * 64}", "config": {"config": {"Labels": [1]}}}),
            reference="x.sif", place=layout, confirmed_by="label",
        )  # fmt: skip


def test_a_folder_without_an_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no image") as caught:
        look_up(Settings(cache_dir=tmp_path), f"{tmp_path}/")
    assert ".sif" in (caught.value.hint or "")


def test_without_apptainer_the_message_says_how_to_get_a_runtime(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError, match="apptainer is missing") as caught:
        look_up(Settings(cache_dir=tmp_path), str(named(layout)))
    assert "apptainer.org" in (caught.value.hint or "")
    assert "scripts/install-engine" in (caught.value.hint or "")


def test_a_container_sees_what_is_mounted_and_no_value_is_on_the_line() -> None:
    asked = Container(
        image="x.sif",
        environment=("SECRET_KEY=a,b",),
        mounts=(Mount(source=Path("/data,1"), target="/data", read_only=True),),
        network="none",
        workdir="/w",
    )
    flags, variables, _ = container_flags(H200.facts(), asked, folder=FOLDER)
    line = " ".join(flags)
    assert "a,b" not in line
    assert variables == {"APPTAINERENV_SECRET_KEY": "a,b"}
    assert 'type=bind,"source=/data,1",destination=/data,ro' in line
    assert "--contain --cleanenv" in line
    assert "--nv" in line
    assert "--net --network none" in line
    assert "--home /cache/apptainer/home:/root --workdir /cache/apptainer/work" in line


def test_gpus_are_chosen_by_number_and_none_is_none() -> None:
    _, variables, _ = container_flags(H200.facts(), Container(image="x", gpus="0,3"), folder=FOLDER)
    assert variables == {
        "APPTAINERENV_CUDA_VISIBLE_DEVICES": "0,3",
        "APPTAINERENV_CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    flags, _, _ = container_flags(H200.facts(), Container(image="x", gpus="none"), folder=FOLDER)
    assert "--nv" not in flags
    flags, _, _ = container_flags(ENGINE.facts(), Container(image="x"), folder=FOLDER)
    assert "--nv" not in flags
    with pytest.raises(UsageError, match="has no network 'bridge'"):
        container_flags(H200.facts(), Container(image="x", network="bridge"), folder=FOLDER)


def job(image: Path, launcher: str) -> Job:
    nodes = (Node(name="one", slots=8), Node(name="two", slots=8))
    return Job(nodes=nodes, launcher=launcher, container=Container(image=str(image), environment=("K=v",)), script=("t.py",), name="job")  # type: ignore[arg-type]  # fmt: skip


def test_a_launch_keeps_an_instance_on_every_host(tmp_path: Path) -> None:
    sif = tmp_path / "a.sif"
    sif.touch()
    plan, _ = plan_launch(job(sif, "torchrun"), H200.facts(), Settings(cache_dir=tmp_path))
    keeper, setup, start = plan.keepers[1].command, plan.setups[1].command, plan.starts[1].command
    assert keeper[0] == "ssh"
    assert f" sh job-1 {sif} --contain" in keeper[-1]
    assert "apptainer instance stop" in keeper[-1]
    assert "--pid" not in keeper[-1]
    assert setup[-1].endswith("instance://job-1 sh -s")
    assert "torchrun --nnodes=2" in start[-1]
    assert "K=v" not in str(plan)


def test_a_launch_that_apptainer_cannot_make_is_refused(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    sif = tmp_path / "a.sif"
    sif.touch()
    with pytest.raises(UsageError, match="root's sshd needs rights that root gives up in Apptainer"):
        plan_launch(job(sif, "mpirun"), H200.facts(), Settings(cache_dir=tmp_path))
    with pytest.raises(UsageError, match="is an OCI archive"):
        plan_launch(job(named(layout), "torchrun"), H200.facts(), Settings(cache_dir=tmp_path))


def test_what_cannot_be_written_is_refused_before_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check_output(tmp_path / "image.oci.tar")
    with pytest.raises(HostError, match="missing") as caught:
        check_output(tmp_path / "image.sif")
    assert "FILE.oci.tar" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="exists"):
        check_output(tmp_path)
    with pytest.raises(UsageError, match="no directory"):
        check_output(tmp_path / "a" / "b.sif")


@pytest.mark.parametrize(
    "error",
    [NoImageError("there is no image mine here", hint="look"), HostError("there is no docker command")],
)
def test_a_bare_name_that_the_engine_does_not_know_gets_a_hint_where_a_sandbox_of_that_name_lies(
    tmp_path, monkeypatch, error
):
    def image(_):
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(guest, "engine_of", lambda _: SimpleNamespace(image=image))
    settings = Settings(cache_dir=tmp_path / "cache")
    with pytest.raises(HostError) as plain:
        guest.look_up(settings, "mine")
    assert (plain.value.what, plain.value.hint) == (error.what, error.hint)
    (tmp_path / "mine" / ".singularity.d").mkdir(parents=True)
    with pytest.raises(type(error)) as hinted:
        guest.look_up(settings, "mine")
    assert hinted.value.what == error.what
    assert hinted.value.hint == "`./mine` names the sandbox that lies here; without ./ it is a name in the engine"


def test_a_file_of_enroot_is_named_as_one_and_what_runs_it(tmp_path, monkeypatch):
    (tmp_path / "te.sqsh").write_bytes(b"hsqs")
    monkeypatch.chdir(tmp_path)
    assert is_path("te.sqsh")  # and no image of the engine
    assert not is_path("gone.sqsh")
    with pytest.raises(UsageError, match="is an image of enroot") as caught:
        look_up(Settings(cache_dir=tmp_path), "te.sqsh")
    assert "launch --launcher srun" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("te.sqsh", "te.sqsh is an image of enroot"),
        ("gone.sif", "gone.sif does not exist"),
        ("te.tar", "te.tar is an OCI archive, which each host would have to unpack"),
        ("te.img", "te.img is no .sif and no sandbox"),
        ("folder", "folder is no .sif and no sandbox"),
    ],
)
def test_what_no_host_of_a_launch_can_run_says_what_it_is(tmp_path, name, says):
    for file in ("te.sqsh", "te.tar", "te.img"):
        (tmp_path / file).touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError) as caught:
        shared_place(str(tmp_path / name))
    assert caught.value.what.endswith(says)
    assert "make a .sif" in caught.value.hint


def test_a_mount_of_apptainer_is_one_record_of_csv():
    (_, text) = bind_flags(Mount(source=Path('/a,b "c"'), target="/d", read_only=True))
    assert next(csv.reader([text])) == ["type=bind", 'source=/a,b "c"', "destination=/d", "ro"]
    assert bind_flags(Mount(source=Path("/a"), target="/d")) == ["--mount", "type=bind,source=/a,destination=/d"]
    with pytest.raises(UsageError, match="line break") as caught:
        bind_flags(Mount(source=Path("/a\nb"), target="/d"))
    assert caught.value.where == "--mount"

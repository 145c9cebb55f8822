"""Images as an engine saves them, sound, damaged and hostile: what is read of them, and what reading them takes."""

import hashlib
import json
import random
import resource
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from saved_images import GZIP, PLAIN, ZSTD, Image, layer, packed

from envbuild.engine.layers import ImageError, read_image
from envbuild.engine.reproduce import COMPRESSION, Difference, Reproduction, differences_of
from envbuild.errors import LockError
from envbuild.util.foreign_tar import Bounds


def image(*bodies: bytes, media_type: str = ZSTD) -> Image:
    return Image(*((media_type, packed(body, media_type)) for body in bodies))


def read(made: Image, tmp_path: Path, **bounds):
    return read_image(made.write(tmp_path), "an-image", Bounds(**bounds) if bounds else Bounds())


@pytest.mark.parametrize("media_type", [ZSTD, GZIP, PLAIN])
def test_the_files_of_an_image_are_those_that_its_layers_leave(tmp_path, media_type):
    lower = layer(
        ("etc/", None), ("etc/issue", b"one"), ("etc/gone", b"x"), ("old/", None), ("old/a", b"a"), ("old/deep/b", b"b"),
        ("opaque/", None), ("opaque/a", b"a"), ("opaque/below/c", b"c"), ("turns", b"file"), ("folds/in", b"x"),
    )  # fmt: skip
    upper = layer(
        ("etc/.wh.gone", b""), ("etc/issue", b"two"), (".wh.old", b""), ("opaque/.wh..wh..opq", b""), ("opaque/new", b"n"),
        (".wh..wh.plnk", b""), ("turns/", None), ("turns/inside", b"i"), ("folds", "etc"), (".wh.never", b""),
    )  # fmt: skip
    found = read(image(lower, upper, media_type=media_type), tmp_path).files
    assert sorted(found) == ["etc", "etc/issue", "folds", "opaque", "opaque/new", "turns", "turns/inside"]
    assert found["etc/issue"].sha256 == hashlib.sha256(b"two").hexdigest()
    assert (found["folds"].kind, found["folds"].link) == ("link", "etc")


def test_what_a_layer_deletes_and_makes_again_is_there_alone(tmp_path):
    again = layer(("d/", None), ("d/new", b"n"), (".wh.d", b""))
    assert sorted(read(image(layer(("d/old", b"o")), again), tmp_path).files) == ["d", "d/new"]


def test_two_images_differ_where_their_files_do(tmp_path):
    one = read(image(layer(("etc/issue", b"one"), ("a", b"a"), ("e\x1b[2Jvil", b""))), tmp_path)
    other = read(image(layer(("etc/issue", b"two"), ("a", b"a")), layer(("new", b""))), tmp_path)
    what = {d.path: d.what for d in differences_of(one, other, ("one", "other"))}
    assert sorted(what) == [r"e\x1b[2Jvil", "etc/issue", "new"]
    assert what["etc/issue"].startswith("sha256 ")
    assert what["new"] == "only in other"
    cut = read(image(layer(("etc/issue", b"one"), ("a", b"a")), layer(("e\x1b[2Jvil", b""))), tmp_path)
    (only,) = differences_of(one, cut, ("one", "cut"))
    assert only.path == "(layers)"
    assert list(differences_of(one, one, ("one", "one"))) == []


def test_the_same_layers_compressed_in_another_way_are_the_same(tmp_path):
    """What a lock makes is the uncompressed layers: another engine's compressor changes the digests of blobs alone."""
    bodies = layer(("etc/issue", b"one"), ("a", b"a")), layer(("b", b"b"))
    one, other = (read(image(*bodies, media_type=kind), tmp_path) for kind in (ZSTD, GZIP))
    assert one.layers != other.layers
    assert one.diff_ids == other.diff_ids == tuple(f"sha256:{hashlib.sha256(body).hexdigest()}" for body in bodies)
    found = tuple(differences_of(one, other, ("one", "other")))
    assert found == (COMPRESSION,)
    again = Reproduction(digest="sha256:1", again="sha256:2", seconds=1.0, differences=found)
    assert (again.equal, again.same_layers) == (False, True)
    changed = read(image(bodies[0], layer(("b", b"c")), media_type=GZIP), tmp_path)
    found = tuple(differences_of(one, changed, ("one", "changed")))
    assert not Reproduction(digest="sha256:1", again="sha256:2", seconds=1.0, differences=found).same_layers
    # the same files, and no word of compression: another order of members is another layer
    cut = read(image(layer(("a", b"a"), ("etc/issue", b"one")), bodies[1], media_type=GZIP), tmp_path)
    found = tuple(differences_of(one, cut, ("one", "cut")))
    assert not Reproduction(digest="sha256:1", again="sha256:2", seconds=1.0, differences=found).same_layers


def twin(tmp_path, *, config=None, manifest=None, spacing=None, wrapped=0):
    """Return an image of one layer whose documents are changed as asked."""
    text = {
        "os": "linux",
        "config": {"Env": ["A=1"]},
        "history": [{"created_by": "RUN one"}, {"created_by": "RUN two"}],
        "rootfs": {"type": "layers"},
    }
    (config or (lambda _: None))(text)
    made = Image((PLAIN, layer(("etc/issue", b"one"))), config=text)
    (manifest or (lambda _: None))(made.manifest)
    (listed,) = made.index["manifests"] = [made.blob(json.dumps(made.manifest, indent=spacing).encode())]
    if wrapped:
        made.index = {"manifests": [made.blob(json.dumps({"manifests": [listed], "number": wrapped}).encode())]}
    return read(made, tmp_path)


@pytest.mark.parametrize(
    ("changes", "path", "what"),
    [
        (
            {"config": lambda text: text["history"][1].update(created_by="RUN other")},
            "(configuration) history, entry 2",
            '{"created_by": "RUN two"} / {"created_by": "RUN other"}',
        ),
        (
            {"config": lambda text: text["rootfs"].update(type="x")},
            "(configuration) rootfs",
            '{"type": "layers"} / {"type": "x"}',
        ),
        ({"config": lambda text: text.update(os=text.pop("os"))}, "(configuration)", "another order or spacing"),
        ({"manifest": lambda text: text.update(annotations={"a": "b"})}, "(manifest) annotations", 'null / {"a": "b"}'),
        ({"manifest": lambda text: text["config"].update(mediaType="x/y")}, "(manifest) config mediaType", '/ "x/y"'),
        (
            {"manifest": lambda text: text["layers"][0].update(mediaType="application/x.tar")},
            "(manifest) layer 1 mediaType",
            '"application/vnd.oci.image.layer.v1.tar" / "application/x.tar"',
        ),
        ({"spacing": 1}, "(manifest)", "another order or spacing"),
        ({"wrapped": 1}, "(list)", "of a list that names the image"),
    ],
)
def test_two_digests_of_the_same_layers_have_a_reason(tmp_path, changes, path, what):
    """`reproduce` fails where the digests differ: it has to name why, whatever it is."""
    one, other = twin(tmp_path), twin(tmp_path, **changes)
    assert (one.layers, one.files) == (other.layers, other.files)
    assert one.digest != other.digest
    (found,) = differences_of(one, other, ("one", "other"))
    assert found.path == path
    assert what in found.what


def test_two_lists_of_the_same_image_are_named(tmp_path):
    (found,) = differences_of(twin(tmp_path, wrapped=1), twin(tmp_path, wrapped=2), ("one", "other"))
    assert found == Difference(path="(list)", what="the same image in another list")


def test_of_long_values_what_differs_is_shown(tmp_path):
    one, other = (
        twin(tmp_path, config=lambda text, end=end: text["config"].update(Env=[f"A={'x' * 500}{end}"])) for end in "12"
    )
    (found,) = differences_of(one, other, ("one", "other"))
    assert found.path == "(configuration) config"
    assert found.what.count("…") == 2
    assert 'x1"' in found.what
    assert 'x2"' in found.what


def test_a_fifo_and_a_device_are_described_and_not_opened(tmp_path):
    for kind in (tarfile.FIFOTYPE, tarfile.CHRTYPE):
        (entry,) = read(image(layer(("dev/x", b""), type=kind)), tmp_path).files.values()
        assert entry.kind in {"fifo", "device"}
        assert entry.sha256 is None


def spoiled(how: str) -> Image:
    made = image(layer(("a", b"a" * 1000)))
    name = made.manifest["layers"][0]["digest"][7:]
    body = made.blobs[name]
    if how == "changed":
        made.blobs[name] = layer(("a", b"b" * 1000))[: len(body)].ljust(len(body), b"\0")
    elif how == "one bit":
        made.blobs[name] = body[:-1] + bytes([body[-1] ^ 1])
    elif how == "cut":
        made.blobs[name] = body[:-10]
    elif how == "missing":
        del made.blobs[name]
    return made


@pytest.mark.parametrize("how", ["changed", "one bit", "cut", "missing"])
def test_a_damaged_blob_is_a_lock_error_that_names_the_image(tmp_path, how):
    with pytest.raises(LockError) as caught:
        read(spoiled(how), tmp_path)
    assert caught.value.exit_code == 4
    assert caught.value.where == "an-image"


def test_a_blob_whose_content_is_sound_and_whose_digest_is_not_is_refused(tmp_path):
    made = image(layer(("a", b"a")), media_type=PLAIN)
    name = made.manifest["layers"][0]["digest"][7:]
    made.blobs[name] = layer(("a", b"b"))
    with pytest.raises(ImageError, match=f"the blob sha256:{name} is damaged"):
        read(made, tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        b"", b"[" * 100_000, b"[]", b"{}", b'{"manifests": []}', b'{"manifests": 3}', b'{"manifests": [{"digest": "../x"}]}',
        b'{"manifests": [{"digest": "sha256:' + b"0" * 64 + b'", "size": 3}]}', b'{"manifests": [NaN]}', b"\xff",
        b'{"manifests": [{"digest": "sha256:' + b"0" * 64 + b'", "size": -1}]}', b'"' + b"x" * 9_000_000 + b'"',
    ],
)  # fmt: skip
def test_an_index_of_another_shape_is_refused(tmp_path, index):
    made = image(layer(("a", b"a")))
    made.index = index
    with pytest.raises(ImageError):
        read(made, tmp_path)


@pytest.mark.parametrize(
    "manifest",
    [[], 3, {"config": 3, "layers": []}, {"layers": []}, {"config": {"digest": "x", "size": 1}, "layers": [1]}],
)
def test_a_manifest_of_another_shape_is_refused(tmp_path, manifest):
    made = image(layer(("a", b"a")))
    made.index = {"manifests": [made.blob(json.dumps(manifest).encode())]}
    with pytest.raises(ImageError):
        read(made, tmp_path)


def test_an_index_of_platforms_is_followed_past_statements(tmp_path):
    made = image(layer(("a", b"a")))
    (real,) = made.index["manifests"]
    about = made.blob(b'{"config": 3}') | {"platform": {"os": "unknown", "architecture": "unknown"}}
    made.index = {"manifests": [made.blob(json.dumps({"manifests": [about, real]}).encode())]}
    assert sorted(read(made, tmp_path).files) == ["a"]


def test_an_index_that_never_ends_in_a_manifest_is_refused(tmp_path):
    made = image(layer(("a", b"a")))
    for _ in range(5):
        made.index = {"manifests": [made.blob(json.dumps(made.index).encode())]}
    with pytest.raises(ImageError, match="an index in an index"):
        read(made, tmp_path)


@pytest.mark.parametrize(
    ("members", "bounds", "says"),
    [
        ([(f"f{n}", b"") for n in range(30)], {"members": 20}, "more than 20 members"),
        ([("../etc/passwd", b"")], {}, "leads outside"),
        ([("x", b"x" * 100_000)], {"bytes": 50_000}, "more than 50,000 bytes"),
    ],
)
@pytest.mark.parametrize("media_type", [ZSTD, GZIP, PLAIN])
def test_a_layer_out_of_bounds_is_refused(tmp_path, members, bounds, says, media_type):
    with pytest.raises(ImageError, match=says):
        read(image(layer(*members), media_type=media_type), tmp_path, **bounds)


def test_bounds_are_of_all_layers_together(tmp_path):
    with pytest.raises(ImageError, match="unpack to more than 50,000 bytes"):
        read(image(*(layer((f"f{n}", b"x" * 20_000)) for n in range(4))), tmp_path, bytes=50_000)


@pytest.mark.parametrize("media_type", ["application/x", "application/vnd.oci.image.layer.v1.tar+\x1b[2J", ""])
def test_a_layer_of_an_unknown_kind_is_refused(tmp_path, media_type):
    with pytest.raises(ImageError) as caught:
        read(Image((media_type, layer(("a", b"a")))), tmp_path)
    assert str(caught.value).replace("\n", "").isprintable()


BOMB = """
import re, resource, sys
from pathlib import Path
from envbuild.engine.layers import ImageError, read_image
from envbuild.util.foreign_tar import Bounds
try:
    read_image(Path(sys.argv[1]), "bomb", Bounds(bytes=1 << 29))
except ImageError as error:
    print(error.what)
# ru_maxrss of a process counts what the one that it was forked from had
own = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
print(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_a_bomb_takes_no_memory(tmp_path):
    """A file of 768 MiB of zeros in a layer of some KiB."""
    head = tarfile.TarInfo("zeros")
    head.size = 768 << 20
    bomb = tmp_path / "bomb"
    with bomb.open("wb") as out, subprocess.Popen(["zstd", "-q", "-1"], stdin=subprocess.PIPE, stdout=out) as process:
        process.stdin.write(head.tobuf())
        for _ in range(768):
            process.stdin.write(bytes(1 << 20))
    path = Image((ZSTD, bomb.read_bytes())).write(tmp_path)
    done = subprocess.run([sys.executable, "-c", BOMB, path], capture_output=True, text=True, check=True, timeout=120)
    line, sizes = done.stdout.splitlines()
    assert "unpack to more than 536,870,912 bytes" in line
    assert max(map(int, sizes.split())) < 250_000  # KiB


def test_a_damaged_image_is_an_error_of_its_own_kind_whatever_the_damage(tmp_path):
    sound = image(layer(("a/b", b"a" * 5000), ("c", "d")), layer(("a/.wh.b", b""))).write(tmp_path).read_bytes()
    damaged_at = tmp_path / "damaged.tar"
    random_ = random.Random(11)
    for _ in range(150):
        body = bytearray(sound)
        for _ in range(random_.randint(1, 6)):
            body[random_.randrange(len(body))] = random_.randrange(256)
        if random_.random() < 0.3:
            del body[random_.randrange(len(body)) :]
        damaged_at.write_bytes(body)
        try:
            read_image(damaged_at, "x")
        except ImageError:
            continue
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1_000_000


def test_layers_that_another_reader_would_take_are_refused(tmp_path):
    """Go's JSON takes `Layers` for `layers`; the configuration must be of the layers that are read."""
    genuine, other = layer(("a", b"genuine")), layer(("a", b"other"))
    spoiled = image(genuine, media_type=GZIP)
    spoiled.manifest["Layers"] = [spoiled.blob(packed(other, GZIP), GZIP)]
    spoiled.index = {"manifests": [spoiled.blob(json.dumps(spoiled.manifest).encode())]}
    with pytest.raises(ImageError, match="in another case"):
        read(spoiled, tmp_path)
    ids = [f"sha256:{hashlib.sha256(other).hexdigest()}"]
    for stated in (ids, [], None):
        with pytest.raises(ImageError, match="of other layers than the manifest's"):
            read(Image((GZIP, packed(genuine, GZIP)), config={"rootfs": {"diff_ids": stated}}), tmp_path)

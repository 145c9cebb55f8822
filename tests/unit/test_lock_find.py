"""Which lock a cell's commands take, and where a new one goes."""

import pytest
from cell_inputs import complete, inputs_for

from envbuild.cli import main
from envbuild.errors import DataError, LockError
from envbuild.lock import find
from envbuild.lock.files import Locked, read_lock, write_lock
from envbuild.lock.make import unlocked
from envbuild.matrix.load import load_matrix
from envbuild.pipeline import locked
from envbuild.settings import load_settings


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Settings of a user, inputs, their complete lock and one where everything is missing; the committed locks are in a separate folder."""
    settings = load_settings(environ={"HOME": str(tmp_path)}, root=tmp_path)
    monkeypatch.setattr(find, "data_dir", lambda _: tmp_path / "data")
    inputs = inputs_for(cuda="cpu")
    return settings, inputs, complete(inputs), Locked(lock=unlocked(load_matrix(), inputs), pylocks={})


def test_a_complete_lock_is_found_before_ones_with_missing_inputs(place, tmp_path):
    settings, inputs, whole, partial = place
    own, committed = find.own_lock(settings, inputs), tmp_path / "data" / "locks" / find.lock_name(inputs)
    assert find.find_lock(settings, inputs) is None
    write_lock(partial, own)
    assert find.find_lock(settings, inputs)[1] == own
    write_lock(whole, committed)
    assert find.find_lock(settings, inputs)[1] == committed
    write_lock(whole, own)
    assert find.find_lock(settings, inputs)[1] == own


def test_a_lock_with_missing_inputs_replaces_no_complete_one(place):
    settings, inputs, whole, partial = place
    own = find.own_lock(settings, inputs)
    assert find.place_for(own, partial.lock) == own
    write_lock(whole, own)
    assert find.place_for(own, whole.lock) == own
    write_lock(partial, find.place_for(own, partial.lock))
    found, folder = find.find_lock(settings, inputs)
    assert (folder, found.lock.complete) == (own, True)


def test_an_archive_that_does_not_answer_leaves_the_lock_as_it_is(place, monkeypatch):
    settings, inputs, whole, _ = place

    def silent(*_):
        raise LockError("the archive at deb.example.org does not answer")

    monkeypatch.setattr(locked, "current_os", silent)
    notes = []
    assert locked.renewed(settings, load_matrix(), inputs, whole, note=notes.append) is None
    assert "deb.example.org" in notes[0]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            lambda f: f.write_text(f.read_text().replace('version = "2.', 'version = "1.')),
            LockError,
            "other packages than the lock: torch",
        ),
        (lambda f: f.unlink(), DataError, "a file of the lock cannot be read"),
        (lambda f: f.write_bytes(b"\xff"), DataError, "this is not a pylock"),
    ],
    ids=["edited", "deleted", "not text"],
)
def test_a_pylock_that_is_not_the_locks_is_refused(place, tmp_path, change, error, says):
    _, _, whole, _ = place
    write_lock(whole, tmp_path / "lock")
    assert read_lock(tmp_path / "lock").pylocks == whole.pylocks
    change(tmp_path / "lock" / "pylock.torch.toml")
    with pytest.raises(error, match=says):
        read_lock(tmp_path / "lock")


def test_a_damaged_lock_hides_no_good_one_and_is_replaced(place, tmp_path):
    settings, inputs, whole, partial = place
    own, committed = find.own_lock(settings, inputs), tmp_path / "data" / "locks" / find.lock_name(inputs)
    write_lock(whole, own)
    (own / "pylock.torch.toml").write_text("")
    with pytest.raises(LockError, match="other packages"):
        find.find_lock(settings, inputs)
    assert find.place_for(own, partial.lock) == own
    write_lock(whole, committed)
    assert find.find_lock(settings, inputs)[1] == committed


def test_a_disk_that_fills_up_leaves_the_lock_as_it_was(place, tmp_path, monkeypatch):
    _, _, whole, partial = place
    write_lock(whole, tmp_path / "lock")
    before = {p.name: p.read_bytes() for p in (tmp_path / "lock").iterdir()}
    monkeypatch.setattr(type(partial.lock), "model_dump_json", lambda *_, **__: "x" * 10_000)
    write = type(tmp_path).write_text

    def full(self, text, **kwargs):
        if len(text) > 9000:
            raise OSError(28, "No space left on device")
        return write(self, text, **kwargs)

    monkeypatch.setattr(type(tmp_path), "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_lock(Locked(lock=partial.lock, pylocks={"torch": "other"}), tmp_path / "lock")
    assert {p.name: p.read_bytes() for p in (tmp_path / "lock").iterdir()} == before


@pytest.mark.parametrize("text", ["", "root:x:0", '{"cell": {"cuda": "cpu'])
def test_a_file_that_is_no_lock_is_named_as_it_was_given(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(DataError, match="the file is not JSON: ") as caught:
        read_lock(tmp_path / "other.json")
    assert caught.value.where == str(tmp_path / "other.json")
    assert "envbuild lock" in caught.value.hint
    assert "schema" not in caught.value.hint


def test_a_folder_that_cannot_be_written_is_refused_before_any_host_is_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["lock", "--cuda", "cpu", "--out", str(tmp_path / "file" / "below")])
    assert ended.value.code == 8
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "envbuild: error: the lock cannot be written"
    assert err[1] == f"  where: {tmp_path / 'file' / 'below'}"


def test_a_command_without_a_registry_says_where_it_is_set(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ENVBUILD_REGISTRY", raising=False)
    for command, variable in ((["pull", "--cuda", "cpu"], "ENVBUILD_REGISTRY"), (["catalog"], "ENVBUILD_TRUSTED_KEYS")):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2
        err = capsys.readouterr().err
        assert "~/.config/envbuild/config.toml" in err
        assert variable in err

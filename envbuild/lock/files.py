"""A lock on the disk: `lock.json` and its `pylock.<name>.toml` files, written whole, and not trusted when read."""

from collections.abc import Callable
from pathlib import Path

from envbuild.errors import DataError, LockError
from envbuild.lock.model import Lock, PythonSet
from envbuild.util.below import OutsideError, read_below, read_file
from envbuild.util.frozen import Frozen
from envbuild.util.names import shown

_LARGEST_LOCK = 16 * 2**20
_LARGEST_PYLOCK = 32 * 2**20
_WHOLE = "take the whole folder as `envbuild lock` wrote it, or lock again"


class Locked(Frozen):
    """A lock and the pylock files that go with it, by set name."""

    lock: Lock
    pylocks: dict[str, str]
    fresh: bool = False
    """Whether this very run pinned it."""
    unreached: bool = False
    """Whether this very run left inputs out because a host did not answer."""


def write_lock(locked: Locked, folder: Path) -> Path:
    """Write `lock.json` and its `pylock.<name>.toml` files to `folder`; return the lock's path.

    Every file is complete on the disk before the first takes its place.
    """
    from envbuild.util.scratch import scratch

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock.json"
    texts = {folder / f"pylock.{name}.toml": text for name, text in locked.pylocks.items()}
    texts[path] = locked.lock.model_dump_json(indent=1, exclude_defaults=True) + "\n"
    with scratch("lock", folder) as own:
        for place, text in texts.items():
            (own / place.name).write_text(text, encoding="utf-8")
        for place in texts:
            (own / place.name).replace(place)
    return path


def read_lock(path: Path) -> Locked:
    """Read a lock (its folder or its `lock.json`).

    Raises:
        DataError: there is none, or it is malformed.
        LockError: a pylock of it names other packages than lock.json.

    """
    folder = path if path.is_dir() else path.parent
    name = "lock.json" if path.is_dir() else path.name
    try:
        # Of what lies in the folder no link is followed; the folder is the user's to name.
        body = read_below(folder, name, limit=_LARGEST_LOCK) if path.is_dir() else read_file(path, limit=_LARGEST_LOCK)
    except OSError as error:
        raise DataError(
            f"the lock cannot be read: {error.strerror}",
            where=str(folder / name),
            hint="`envbuild lock` writes one",
        ) from error
    except OutsideError as error:
        raise DataError(f"the lock cannot be read: {error}", where=str(folder / name), hint=_WHOLE) from error
    return parse_lock(body, lambda pylock: read_below(folder, pylock, limit=_LARGEST_PYLOCK), str(folder), name)


def parse_lock(body: bytes, pylock: Callable[[str], bytes], where: str, name: str = "lock.json") -> Locked:
    """Return the lock whose `lock.json` is `body`; nothing in it is trusted.

    Args:
        body: what lock.json holds.
        pylock: returns what the file of that name next to it holds; it may raise OSError or OutsideError.
        where: the folder or image that it comes from, for messages.
        name: what the file is called there.

    Raises:
        DataError: it is malformed.
        LockError: a pylock of it names other packages than lock.json.

    """
    from pydantic import ValidationError

    try:
        lock = Lock.model_validate_json(body)
    except ValidationError as error:
        from envbuild.util.toml import explain_validation

        raise explain_validation(error, Path(where) / name, f"name the folder of a lock; {_WHOLE}") from error
    pylocks: dict[str, str] = {s.name: _pylock(s, pylock, where, lock.as_cell.arch) for s in lock.python if s.packages}
    return Locked(lock=lock, pylocks=pylocks)


def _pylock(python_set: PythonSet, read: Callable[[str], bytes], where: str, machine: str) -> str:
    """Return the text of a set's pylock, which must name just what the lock's own list names: one digest covers both."""
    from envbuild.lock.python import packages_of

    name = f"pylock.{python_set.name}.toml"
    place = f"{where}/{name}"
    try:
        text = read(name).decode("utf-8")
        stated = packages_of(text, machine)
    except OSError as error:
        raise DataError(f"a file of the lock cannot be read: {error.strerror}", where=place, hint=_WHOLE) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, LockError) as error:
        raise DataError(f"this is not a pylock: {shown(str(error))}", where=place, hint=_WHOLE) from None
    differing = sorted({p.name for p in set(stated) ^ set(python_set.packages)})
    if differing:
        raise LockError(
            f"this file names other packages than the lock: {', '.join(differing[:5])}", where=place, hint=_WHOLE
        )
    return text

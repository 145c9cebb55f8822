"""The RECORDs of the wheels that a lock names by hash: kept by that hash, since a wheel is large and its RECORD is not."""

import json
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from envbuild.errors import LockError
from envbuild.settings import Settings
from envbuild.util.below import OutsideError, read_below
from envbuild.util.names import Sha256, checked, shown
from envbuild.util.scratch import scratch
from envbuild.verify.installed import Row, read_record

_RECORD_LIMIT = 32 << 20


def read_wheel(path: Path) -> str:
    """Return the RECORD of a wheel.

    Raises:
        ValueError: it is no wheel, or its RECORD is out of bounds.

    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD") and name.count("/") == 1]
            if len(names) != 1:
                raise ValueError("it has no RECORD" if not names else "it has more than one RECORD")
            with archive.open(names[0]) as member:
                body = member.read(_RECORD_LIMIT + 1)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise ValueError(f"it cannot be read: {shown(str(error))}") from None
    if len(body) > _RECORD_LIMIT:
        raise ValueError(f"its RECORD has more than {_RECORD_LIMIT:,} bytes")
    text = body.decode("utf-8", "surrogateescape")
    read_record(text)
    return text


class Wheels:
    """What this machine knows of wheels by their sha256: from its cache, from builds here, from the settings' folders."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = settings.cache_dir / "records"

    def known(self, sha256: str) -> tuple[Row, ...] | None:
        """Return the RECORD of the wheel with this hash, or None where this machine has never seen that wheel."""
        try:
            body = read_below(self.folder, checked(Sha256, sha256), limit=_RECORD_LIMIT)
            return read_record(body.decode("utf-8", "surrogateescape"))
        except (OSError, ValueError, OutsideError):
            return None

    def keep(self, sha256: str, text: str) -> None:
        """Keep the RECORD of the wheel with this hash, which the caller has checked."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=self.folder, prefix=".new-", delete=False) as part:
            part.write(text.encode("utf-8", "surrogateescape"))
        Path(part.name).rename(self.folder / checked(Sha256, sha256))

    def built(self, sha256: str) -> tuple[Row, ...] | None:
        """Return the RECORD of a wheel that a build on this machine made, by the wheel's hash, or None."""
        found = self.known(sha256)
        if found is not None:
            return found
        for record in (self.settings.cache_dir / "wheels").glob("*/record.json"):
            try:
                if json.loads(record.read_text(encoding="utf-8")).get("sha256") != sha256:
                    continue
                (wheel,) = record.parent.glob("*.whl")
                if _sha256_of(wheel) != sha256:
                    continue
                text = read_wheel(wheel)
            except (OSError, ValueError, AttributeError):
                continue
            self.keep(sha256, text)
            return read_record(text)
        return None

    def fetch(
        self, name: str, version: str, hashes: Iterable[str], indexes: Iterable[str], note: Callable[[str], None]
    ) -> None:
        """Fetch the wheels of one distribution from the configured folders and indexes, and keep their RECORDs.

        Each is read in full, since only then its sha256 says that it is the locked one. Addresses in the lock are not
        asked: a lock may come from anybody.

        Args:
            name: of the distribution.
            version: the locked one, for the message.
            hashes: sha256 of each wheel that the lock takes for it.
            indexes: the indexes to ask, one after the other.
            note: called with what is being fetched.

        Raises:
            HostError: an index cannot be reached.
            LockError: no index has one of these wheels, or what it has is no wheel.

        """
        from envbuild.lock.index import files_of
        from envbuild.net.download import download

        wanted = set(hashes)
        for wheel in self._in_folders(name):
            sha256 = _sha256_of(wheel)
            if sha256 in wanted:
                self._read(wheel, sha256)
                return
        missing: LockError | None = None
        for index in indexes:
            try:
                listed = files_of(self.settings, name, index=index)
            except LockError as error:  # this index has no such distribution
                missing = error
                continue
            found = [file for file in listed if file.sha256 in wanted and file.filename.endswith(".whl")]
            for file in found:
                note(f"fetching {shown(file.filename)}")
                with scratch("wheel") as own:
                    path, sha256 = download(self.settings, file.url, file.sha256, own)
                    self._read(path, sha256)
            if found:
                return
        raise LockError(
            f"no index has the wheel that the lock names for {shown(name)} {shown(version)}",
            where=missing.where if missing else None,
            hint="name the index or folder that has it in the settings `index_url`, `extra_index_urls` or `find_links`",
        )

    def _read(self, path: Path, sha256: str) -> None:
        try:
            self.keep(sha256, read_wheel(path))
        except ValueError as error:
            raise LockError(f"{shown(path.name)} is not a wheel: {error}", where=f"sha256 {sha256}") from None

    def _in_folders(self, name: str) -> Iterator[Path]:
        for place in self.settings.find_links:
            for path in Path(place).glob("*.whl") if "://" not in place else ():
                try:
                    if parse_wheel_filename(path.name)[0] == name:
                        yield path
                except InvalidWheelFilename:
                    continue


def _sha256_of(path: Path) -> str:
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

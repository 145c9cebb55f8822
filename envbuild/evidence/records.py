"""Evidence: one record per smoke run, append-only, that are the base of what the matrix claims.

A record is one JSON file whose name and `id` carry the hash of its content, so an edited record is noticed when it is
read. It holds no host name, user name or path of the machine that it was made on.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from envbuild import __version__
from envbuild.errors import DataError, HostError
from envbuild.evidence.content import ImageContent
from envbuild.evidence.report import Level
from envbuild.util.bounded import read_text
from envbuild.util.model import Model, model_validator
from envbuild.util.names import shown

SCHEMA = 1
REPLACED = "replaced by the image's builder"
"""What `built_with` has for an input that did not come from where the lock says."""

_LEVELS = tuple(level.value for level in Level)
"""A run that ends below `step` trains nothing, and proves less than one that took a step."""


class Gpu(Model):
    """One kind of GPU of the machine."""

    name: str
    sm: str
    memory_gib: float
    count: int


class TestRecord(Model):
    """How one test ended."""

    id: str
    level: str
    outcome: Literal["passed", "failed", "skipped"]
    seconds: float
    reason: str = ""
    figures: dict[str, dict[str, Any]] = {}
    tables: list[dict[str, Any]] = []


class Evidence(Model):
    """What ran, where, on what, and how it went."""

    schema_version: Literal[1] = 1
    date: datetime
    cell_id: str
    cell: dict[str, str | None]
    lock_digest: str | None
    target: dict[str, Any]
    """`{"kind": "image", "digest", "digest_from", "runtime"}` or `{"kind": "host", "os", "python"}`. `digest_from` says what the
    digest was compared with: `engine` (its store), `blobs` (unpacked and checked there) or `label` (what a .sif states)."""
    suite: str
    level: str
    device: str
    nproc: int
    nodes: int
    gpus: tuple[Gpu, ...]
    driver: str | None
    software: dict[str, Any]
    """Versions that the machine itself reported: torch, cuda, cudnn, nccl, python."""
    launchers: tuple[str, ...]
    seed: int | None
    verdict: Literal["passed", "failed", "hung", "host", "interrupted"]
    reason: str
    seconds: float
    tests: tuple[TestRecord, ...]
    adopted: dict[str, str] = {}
    """What the environment took from its host instead of the lock, such as torch: distribution -> version."""
    built_with: dict[str, str] = {}
    """Switches of the build that the lock does not state, which leave something out of what was compiled, and the inputs
    that the image's builder replaced, such as `src-te`: name -> value, of an input `REPLACED`."""
    keyword: str = ""
    """The run's `-k`: only tests that match it ran."""
    architecture: str = "x86_64"
    """The host's processor, as `uname -m` says it. The records without this field are all of x86_64."""
    content: ImageContent | None = None
    """What the image is, however its layers are compressed, and what made it. The records without it have the digest alone."""
    id: str = ""

    @model_validator(mode="after")
    def _check_date(self) -> "Evidence":
        if self.date.tzinfo is None:
            raise ValueError("its date has no time zone")
        return self

    @model_validator(mode="after")
    def _check_content(self) -> "Evidence":
        if self.content is not None and self.image is None:
            raise ValueError("it states the content of an image, and its target is no image whose digest was compared")
        return self

    @property
    def passed(self) -> bool:
        """Whether the run passed."""
        return self.verdict == "passed"

    @property
    def image(self) -> str | None:
        """Digest of the image that ran; None where an environment of a host did, or where a label of a .sif alone states it."""
        compared = self.target.get("kind") == "image" and self.target.get("digest_from") != "label"
        digest = self.target.get("digest") if compared else None
        return digest if isinstance(digest, str) and digest else None

    @property
    def other_release(self) -> str | None:
        """The release that built the image that ran, where it is known and another than this one: its recipe may be another, too."""
        release = self.content.release if self.content else None
        return release if release != __version__ else None

    def same_image(self, other: "Evidence") -> bool:
        """Return whether both ran one image: the same digest, or the same layers and configuration in another compression."""
        return other.image is not None and self.is_of(other.image, other.content)

    def is_of(self, digest: str, content: ImageContent | None) -> bool:
        """Return whether an image of this digest and content is the one that ran; where only the content is, another program compressed it."""
        if self.image is None:
            return False
        return self.image == digest or (self.content is not None and self.content.same_image(content))

    @property
    def where(self) -> str:
        """The machine, and the `-k`, in a few words: `2x H200, driver 580` or `CPU`."""
        return f"{self.machine}, only -k {self.keyword!r}" if self.keyword else self.machine

    @property
    def machine(self) -> str:
        """The machine in a few words: `2x H200, driver 580` or `CPU`."""
        if not self.gpus or self.device == "cpu":
            return "CPU"
        name = re.sub(r"^NVIDIA ", "", self.gpus[0].name)
        text = name if self.ranks <= 1 else f"{self.ranks}x {name}"
        return f"{text}, driver {self.driver.partition('.')[0]}" if self.driver else text

    @property
    def ranks(self) -> int:
        """On how many ranks the run went: below `distributed` a test runs on one, whatever the machine has."""
        return self.nproc if self.level in ("distributed", "bench", "train") else 1

    @property
    def depth(self) -> int:
        """How far the run was to go: 0 import, 1 kernels, 2 step, 3 distributed, 4 bench, 5 train."""
        return _LEVELS.index(self.level) if self.level in _LEVELS else len(_LEVELS)

    @property
    def to_step(self) -> bool:
        """Whether the run was to train at least a step; one of less proves less."""
        return self.depth >= _LEVELS.index("step")

    @property
    def replaced(self) -> frozenset[str]:
        """The inputs that the image's builder replaced, such as `src-te`."""
        return frozenset(name for name, how in self.built_with.items() if how == REPLACED)

    def takes_back(self, failed: "Evidence") -> bool:
        """Whether this run, which passed, ran all that the earlier one failed in: as far, on as many ranks, with no more replaced."""
        covers = not self.keyword or self.keyword == failed.keyword
        return covers and self.replaced <= failed.replaced and self.depth >= failed.depth and self.ranks >= failed.ranks


def content_id(record: Mapping[str, Any]) -> str:
    """Return the hash over everything in a record but its `id`.

    Raises:
        ValueError: it holds an infinite number, which JSON cannot hold, or half a surrogate pair.

    """
    body = {key: value for key, value in record.items() if key != "id"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def as_json(evidence: Evidence) -> dict[str, Any]:
    """Return the record as its file holds it."""
    record = evidence.model_dump(mode="json")
    record["date"] = evidence.date.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return record


def record_evidence(evidence: Evidence, folder: Path) -> Path:
    """Add a record to the folder and return its path; records are added, never replaced.

    Raises:
        HostError: the folder cannot be written.
        DataError: a record of that name is there already, or it does not read back as it was.

    """
    record = as_json(evidence)
    stamp = evidence.date.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    path = folder / f"{stamp}-{record['id'].removeprefix('sha256:')[:16]}.json"
    part = path.with_name(f".{path.name}.part")
    if path.exists():
        raise DataError("this record is there already", where=str(path))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Under its name only when all of it is on the disk: half a record would be refused by every command that reads them.
        try:
            part.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            if _read(part, named=path) != evidence:
                raise DataError("the record does not read back as it was written", where=str(path))
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise HostError(f"the record cannot be written: {error.strerror}", where=str(path)) from None
    return path


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def read_evidence(path: Path) -> Evidence:
    """Read one record.

    Raises:
        DataError: it is no record, or it is not what was written.

    """
    return _read(path, named=path)


def _read(path: Path, *, named: Path) -> Evidence:
    try:
        raw = json.loads(read_text(path), parse_constant=_refuse_constant)
        evidence = Evidence.model_validate(raw)
        found = content_id(raw)
    except RecursionError:
        raise DataError("this evidence record does not load: it is nested too deeply", where=str(path)) from None
    except OSError as error:
        raise DataError(f"this evidence record does not load: {error.strerror}", where=str(path)) from None
    except ValueError as error:  # of UTF-8, of JSON, of a number with thousands of digits, of half a surrogate pair
        from pydantic import ValidationError

        first = (
            error.errors(include_url=False, include_input=False)[0]["msg"]
            if isinstance(error, ValidationError)
            else str(error)
        )
        raise DataError(f"this evidence record does not load: {shown(first)}", where=str(path)) from None
    if raw.get("id") != found or not named.stem.endswith("-" + found.removeprefix("sha256:")[:16]):
        raise DataError(
            "this evidence record was edited or renamed after it was written: its name ends with the hash of its content",
            where=str(path),
            hint="restore it, and its name, from version control; a new run makes a new record",
        )
    return evidence


def load_evidence(folder: Path) -> tuple[Evidence, ...]:
    """Read every record of the folder, oldest first; none when there is no such folder.

    Raises:
        DataError: a record does not load or was edited.

    """
    records = [read_evidence(path) for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    return tuple(sorted(records, key=lambda record: (record.date, record.id)))

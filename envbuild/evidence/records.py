"""Evidence: one record per smoke run, append-only, that the matrix's claims rest on.

A record is one JSON file whose name and `id` carry the hash of its content, so an edited record is noticed when it is
read. It holds no host name, user name or path of the machine that it was made on.
"""

import contextlib
import getpass
import hashlib
import ipaddress
import json
import math
import re
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from envbuild.errors import DataError, HostError
from envbuild.util.bounded import read_text
from envbuild.util.names import shown

if TYPE_CHECKING:
    from envbuild.evidence.report import SmokeReport

SCHEMA = 1

_LEVELS = ("import", "kernels", "step", "distributed", "bench")
"""A run that ends below `step` trains nothing, and proves less than one that took a step."""
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
# An address of a host begins with four digits (fe80, 2001): less would be a slice of Python, `[1::2]`.
_IPV6 = re.compile(r"(?<![\w:.])[\da-fA-F]{4}:[\da-fA-F:]*[\da-fA-F](?!\w|:\w)")
# Four numbers with dots are a version, too (cuDNN 9.19.0.56): behind the name of a library, a comparison, or words that
# the suite says of versions.
_BEFORE_VERSION = re.compile(
    r"""(?: (?<![\w/@.-])(?:nvidia|cuda|cudnn|cublas|cufft|curand|cusolver|cusparse|cufile|nccl|nvrtc|nvcc|torch|triton
          |flash|apex|te|transformer|megatron|deepspeed)(?:[-_][\w.+-]*)? (?:\s+(?:is|version))? [\s=<>~!(-]+
        | \b(?:the\ (?:lock|cell)\ says|above|below|versions?|older\ than|newer\ than) \s+
        | \w(?:[=~!<>]=)
        | \bv
        )$""",
    re.IGNORECASE | re.VERBOSE,
)
_AFTER_VERSION = re.compile(r", the (?:lock|cell) says |-(?:py|cp)\d")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)


class Gpu(_Model):
    """One kind of GPU of the machine."""

    name: str
    sm: str
    memory_gib: float
    count: int


class TestRecord(_Model):
    """How one test ended."""

    id: str
    level: str
    outcome: Literal["passed", "failed", "skipped"]
    seconds: float
    reason: str = ""
    figures: dict[str, dict[str, Any]] = {}
    tables: list[dict[str, Any]] = []


Suite = str | Callable[[Collection[str]], str]
"""The hash of the smoke suite, or what gives it for the axes of a cell."""


class Evidence(_Model):
    """What ran, where, on what, and how it went."""

    schema_version: Literal[1] = 1
    date: datetime
    cell_id: str
    cell: dict[str, Any]
    lock_digest: str | None
    target: dict[str, Any]
    """`{"kind": "image", "digest"}` or `{"kind": "host", "os", "python"}`."""
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
    """Build switches that the lock does not state: they leave something out of what was compiled."""
    keyword: str = ""
    """The run's `-k`: only tests that match it ran."""
    id: str = ""

    @property
    def passed(self) -> bool:
        """Whether the run passed."""
        return self.verdict == "passed"

    @property
    def where(self) -> str:
        """The machine in a few words: `2x H200, driver 580.159.04` or `CPU`."""
        if not self.gpus or self.device == "cpu":
            text = "CPU"
        else:
            name = re.sub(r"^NVIDIA ", "", self.gpus[0].name)
            text = name if self.ranks <= 1 else f"{self.ranks}x {name}"
            text = f"{text}, driver {self.driver.partition('.')[0]}" if self.driver else text
        return f"{text}, only -k {self.keyword!r}" if self.keyword else text

    @property
    def ranks(self) -> int:
        """On how many ranks the run went: below `distributed` a test runs on one, whatever the machine has."""
        return self.nproc if self.level in ("distributed", "bench") else 1

    @property
    def caveat(self) -> str:
        """What of the lock did not run as it is, in words; empty when all of it did."""
        parts = []
        if self.adopted:
            parts.append(f"{'torch' if 'torch' in self.adopted else 'packages'} adopted from the host")
        if self.built_with:
            parts.append(
                f"compiled with {len(self.built_with)} switch{'es' * (len(self.built_with) > 1)} beside the lock's"
            )
        return " and ".join(parts)

    @property
    def depth(self) -> int:
        """How far the run was to go: 0 import, 1 kernels, 2 step, 3 distributed, 4 bench."""
        return _LEVELS.index(self.level) if self.level in _LEVELS else len(_LEVELS)

    @property
    def to_step(self) -> bool:
        """Whether the run was to train at least a step; one of less proves less."""
        return self.depth >= _LEVELS.index("step")

    def takes_back(self, failed: "Evidence") -> bool:
        """Whether this run, which passed, ran all that the earlier one failed in: as far, on as many ranks."""
        covers = not self.keyword or self.keyword == failed.keyword
        return covers and self.depth >= failed.depth and self.ranks >= failed.ranks


def content_id(record: Mapping[str, Any]) -> str:
    """Return the hash over everything in a record but its `id`.

    Raises:
        ValueError: it holds an infinite number, which JSON lacks, or half a surrogate pair.

    """
    body = {key: value for key, value in record.items() if key != "id"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return `value` as JSON keeps it: no infinity, which it lacks, and no lone surrogate, which UTF-8 lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _is_version(found: re.Match[str]) -> bool:
    text = found.string
    if re.match(r":\d|<\d|/\d", text[found.end() :]):  # a port, NCCL's interface, a network
        return False
    return bool(
        _BEFORE_VERSION.search(text[max(0, found.start() - 80) : found.start()])
        or _AFTER_VERSION.match(text, found.end())
    )


def _scrub(value: Any, secrets: Sequence[str], addresses: set[str]) -> Any:
    """Take names and addresses of hosts, names of users, and the paths of this machine, out of every text in `value`."""

    def address(found: re.Match[str]) -> str:
        for text in (found[0], found[0].rpartition(":")[0]):  # a port may follow
            with contextlib.suppress(ValueError):
                read = ipaddress.ip_address(text)
                other = read.is_loopback or read.is_unspecified or (read.version == 4 and _is_version(found))
                return found[0] if other and text not in addresses else "***"
        return found[0]

    if isinstance(value, str):
        for secret in secrets:
            value = re.sub(rf"(?<![\w-]){re.escape(secret)}(?![\w-])", "***", value)
        value = re.sub(r"/(?:home|Users)/[^/\s'\"]+", "~", value)
        value = _IPV6.sub(address, _IPV4.sub(address, value))
        # A path keeps its last three parts: enough to find the file in a package.
        return re.sub(r"(?<![\w.])(?:/[\w.+@-]+)+((?:/[\w.+@-]+){3})", r"…\1", value)
    if isinstance(value, Mapping):
        return {key: _scrub(item, secrets, addresses) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_scrub(item, secrets, addresses) for item in value]
    return value


def _addresses(nodes: Iterable[str]) -> set[str]:
    """Return the addresses of this machine and of the nodes, as far as they can be known."""
    found: set[str] = set()
    with contextlib.suppress(OSError):  # the kernel's own list: a machine's name need not resolve to all of them
        routes = Path("/proc/net/fib_trie").read_text(encoding="ascii")
        found.update(re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", routes))
    for name in nodes:
        with contextlib.suppress(OSError, UnicodeError):
            found.update(str(each[4][0]) for each in socket.getaddrinfo(name, None))
    return {each for each in found if not each.startswith("127.") and each != "::1"}


def _names(nodes: Iterable[str]) -> list[str]:
    names = set(nodes) | {socket.gethostname(), socket.gethostname().partition(".")[0]}
    with contextlib.suppress(KeyError, OSError):
        names.add(getpass.getuser())
    # "root" and "localhost" name nobody, and stand in many a message for other reasons.
    return sorted({name for name in names if len(name) > 2} - {"root", "localhost"}, key=len, reverse=True)


def from_report(
    report: "SmokeReport",
    *,
    now: datetime | None = None,
    nodes: Sequence[str] = (),
    adopted: Mapping[str, str] | None = None,
    built_with: Mapping[str, str] | None = None,
    keyword: str | None = None,
) -> Evidence:
    """Make the record of a run.

    Args:
        report: the run.
        now: when it ended; this moment by default.
        nodes: names of the hosts that took part, which are kept out of the record.
        adopted: distributions that came from the host instead of the lock.
        built_with: switches of the compiles that the lock does not state.
        keyword: the run's `-k`.

    """
    machine = report.machine
    kinds: dict[tuple[str, str, float], int] = {}
    for gpu in machine.get("gpus", []):
        key = (gpu["name"], gpu["sm"], gpu["memory_gib"])
        kinds[key] = kinds.get(key, 0) + 1
    target = {
        key: report.target.get(key)
        for key in (("kind", "digest") if report.target["kind"] == "image" else ("kind", "os", "python"))
    }
    record: dict[str, Any] = {
        "schema_version": SCHEMA,
        "date": (now or datetime.now(UTC)).astimezone(UTC).replace(microsecond=0).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "cell_id": report.cell_id,
        "cell": dict(report.cell),
        "lock_digest": report.lock_digest,
        "target": target,
        "suite": report.suite,
        "level": report.level,
        "device": report.device,
        "nproc": report.nproc,
        "nodes": max(1, len(nodes)),
        "gpus": [
            {"name": name, "sm": sm, "memory_gib": memory, "count": count}
            for (name, sm, memory), count in kinds.items()
        ],
        "driver": machine.get("driver"),
        "software": {key: machine.get(key) for key in ("torch", "cuda", "cudnn", "nccl", "python")},
        "launchers": list(report.launchers),
        "seed": report.seed,
        "verdict": report.verdict,
        "reason": report.reason,
        "seconds": report.seconds,
        "tests": [
            {
                "id": test.id,
                "level": test.level,
                "outcome": test.outcome,
                "seconds": test.seconds,
                "reason": test.reason,
                "figures": {key: dict(value) for key, value in test.figures.items()},
                "tables": [dict(table) for table in test.tables],
            }
            for test in report.tests
        ],
        "adopted": dict(adopted or {}),
        "built_with": dict(built_with or {}),
        "keyword": keyword or "",
    }
    record = _plain(record)
    free, addresses = _names(nodes), _addresses(nodes)
    record |= {key: _scrub(record[key], free, addresses) for key in ("reason", "tests")}
    evidence = Evidence.model_validate(record)
    # The hash is over what the file will hold: the model may spell a number otherwise (2 seconds are 2.0).
    return evidence.model_copy(update={"id": content_id(_as_json(evidence))})


def _as_json(evidence: Evidence) -> dict[str, Any]:
    record = evidence.model_dump(mode="json")
    record["date"] = evidence.date.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return record


def record_evidence(evidence: Evidence, folder: Path) -> Path:
    """Add a record to the folder and return its path; records are added, never replaced.

    Raises:
        HostError: the folder cannot be written.
        DataError: a record of that name is there already, or it does not read back as it was.

    """
    record = _as_json(evidence)
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
    raise ValueError(f"{name} is no number in JSON")


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
        first = (
            error.errors(include_url=False, include_input=False)[0]["msg"]
            if isinstance(error, ValidationError)
            else str(error)
        )
        raise DataError(f"this evidence record does not load: {shown(first)}", where=str(path)) from None
    if raw.get("id") != found or not named.stem.endswith("-" + found.removeprefix("sha256:")[:16]):
        raise DataError(
            "this evidence record was edited after it was written",
            where=str(path),
            hint="restore it from version control; a new run makes a new record",
        )
    return evidence


def load_evidence(folder: Path) -> tuple[Evidence, ...]:
    """Read every record of the folder, oldest first; none when there is no such folder.

    Raises:
        DataError: a record does not load or was edited.

    """
    records = [read_evidence(path) for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    return tuple(sorted(records, key=lambda record: (record.date, record.id)))


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What the records say of one cell or lock."""

    status: Literal["verified", "failed", "stale", "never"]
    record: Evidence | None = None
    """The record that the status rests on."""
    why_stale: str = ""

    def describe(self, now: datetime | None = None) -> str:
        """Return it in words: `verified on H200, driver 580, 3 days ago`, `never verified`."""
        if self.record is None:
            return "never verified"
        when = age(self.record.date, now or datetime.now(UTC))
        level = "" if self.record.to_step else f" ({self.record.level})"
        how = f"{f'verified{level}' if self.record.passed else 'failed'} on {self.record.where}, {when}"
        if self.status == "stale":
            return f"stale: {how}, but {self.why_stale}"
        if self.record.passed and self.record.caveat:
            how += f" ({self.record.caveat})"
        return how if self.record.passed else f"{how}: {self.record.reason.partition(chr(10))[0]}"


def age(then: datetime, now: datetime) -> str:
    """Return how long ago `then` was, in one unit."""
    seconds = max(0, int((now - then).total_seconds()))
    for unit, size in (("year", 31557600), ("month", 2629800), ("day", 86400), ("hour", 3600), ("minute", 60)):
        count = seconds // size
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def evidence_for(
    records: Iterable[Evidence], *, cell_id: str, suite: Suite | None = None, lock_digest: str | None = None
) -> Standing:
    """Return what the records say of a cell.

    Runs on GPUs count before runs on a CPU, which prove less; stale ones count where there is no other. A run that failed
    stands until a later one passes that ran the same tests or more, as far and on as many ranks. Of those that passed since, the one
    on the most ranks is told; a run of some tests alone (`-k`) or of a level below `step` only where there is no whole one.

    Args:
        records: as `load_evidence` returns them.
        cell_id: the cell.
        suite: hash of the suite as it is now, or what gives it for a cell; a record of another suite is stale.
        lock_digest: the cell's lock as it is now; a record of another lock is stale.

    """
    mine = [record for record in records if record.cell_id == cell_id]
    # A host that lacks something says nothing about the cell.
    telling = [record for record in mine if record.verdict not in {"host", "interrupted"}]
    if not telling:
        return Standing(status="never")
    ranked = sorted(telling, key=lambda record: (record.device == "cuda", record.date), reverse=True)
    stale: tuple[Evidence, str] | None = None
    passed: list[Evidence] = []
    since: list[Evidence] = []  # whole runs that passed after the last whole one that failed
    mended = False
    for record in ranked:
        if passed and passed[0].device != record.device:
            break
        why = _staleness(record, suite, lock_digest)
        if why:
            stale = stale or (record, why)
        elif record.passed:
            passed.append(record)
            if record.to_step and not record.keyword and not mended:
                since.append(record)
        elif any(later.takes_back(record) for later in passed):
            mended = mended or not record.keyword
        else:
            return Standing(status="failed", record=record)
    if passed:
        return Standing(status="verified", record=max(since, key=lambda record: record.ranks) if since else passed[0])
    if stale is None:
        return Standing(status="never")
    return Standing(status="stale", record=stale[0], why_stale=stale[1])


def _staleness(record: Evidence, suite: Suite | None, lock_digest: str | None) -> str:
    now = suite(record.cell) if callable(suite) else suite
    if now is not None and record.suite != now:
        return "the smoke suite has changed since"
    if lock_digest is not None and record.lock_digest != lock_digest:
        return "the lock has changed since"
    return ""

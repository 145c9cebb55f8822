"""Make the record of a run: what it keeps, and that it names no host, user or path."""

import math
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from envbuild.errors import DataError
from envbuild.evidence.records import SCHEMA, Evidence, as_json, content_id
from envbuild.evidence.redact import redacted
from envbuild.evidence.report import SmokeReport
from envbuild.util.foreign_json import encodable
from envbuild.util.names import shown

_OF_IMAGE = ("kind", "digest", "digest_from", "runtime")
_OF_CONTENT = ("layers", "config", "recipe", "release")


def _plain(value: Any) -> Any:
    """Return `value` as JSON keeps it: no infinity, which JSON cannot hold, and no lone surrogate, which UTF-8 cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def from_report(
    report: SmokeReport,
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

    Raises:
        DataError: the run reported what no record can hold.

    """
    machine = report.machine
    kinds: dict[tuple[str, str, float], int] = {}
    for gpu in machine.get("gpus", []):
        key = (gpu["name"], gpu["sm"], gpu["memory_gib"])
        kinds[key] = kinds.get(key, 0) + 1
    target = {
        key: report.target.get(key)
        for key in (_OF_IMAGE if report.target["kind"] == "image" else ("kind", "os", "python"))
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
        "architecture": machine.get("arch") or platform.machine(),  # the suite's own word: an image may be emulated
    }
    content = {key: report.target[key] for key in _OF_CONTENT if report.target.get(key)}
    # what a label alone states proves nothing, and a record without a digest is of no image
    if content and target.get("digest") and target["kind"] == "image" and target.get("digest_from") != "label":
        record["content"] = content
    record = _plain(record)
    record |= redacted({key: record[key] for key in ("reason", "tests")}, nodes)
    try:
        evidence = Evidence.model_validate(record)
    except ValidationError as error:  # what a container says of itself is checked as it comes; this is the last look
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(f"no record can hold what the run reported: {shown(place)}: {shown(first['msg'])}") from None
    # The hash is over what the file will hold: the model may spell a number otherwise (2 seconds are 2.0).
    return evidence.model_copy(update={"id": content_id(as_json(evidence))})

"""What the smoke suite prints on its stdout: lines `@smoke {json}`, written in an untrusted container."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from envbuild.util.foreign_json import parse_json
from envbuild.util.names import shown

MARK = "@smoke "
LINE = 1 << 20
"""Characters of a line; the suite's longest, with the tables of the bench level, has some thousands."""
_TEXT_LINES = 400
_LINE_SHOWN = 4000


class _Event(BaseModel):
    model_config = ConfigDict(strict=True)


class _Gpu(_Event):
    name: str
    sm: str
    memory_gib: float = Field(ge=0, lt=1e6)


class _Machine(_Event):
    gpus: list[_Gpu] = Field([], max_length=1024)
    driver: str | None = None
    arch: str | None = None
    torch: str | None = None
    cuda: str | None = None
    cudnn: int | str | None = None
    nccl: str | None = None
    python: str | None = None
    os: str | None = None


class _Table(_Event):
    title: str
    columns: list[str]
    rows: list[list[Any]]


class _Collected(_Event):
    event: Literal["collected"]
    total: int = Field(ge=0)
    machine: _Machine
    seed: int | None = None
    nproc: int = Field(default=0, ge=0)


class _Begin(_Event):
    event: Literal["begin"]
    id: str


class _Test(_Event):
    event: Literal["test"]
    id: str
    level: str
    outcome: Literal["passed", "failed", "skipped"]
    seconds: float = Field(ge=0, lt=1e9)
    reason: str = ""
    figures: dict[str, dict[str, Any]] = {}
    tables: list[_Table] = []
    launchers: list[str] = []


class _Verdict(_Event):
    event: Literal["verdict"]
    kind: str
    what: str
    machine: _Machine = _Machine()


class _End(_Event):
    event: Literal["end"]
    code: int | None = None


_EVENT: TypeAdapter[Any] = TypeAdapter(_Collected | _Begin | _Test | _Verdict | _End)


def read_event(line: str) -> dict[str, Any] | None:
    """Return the event that a line of output is, or None for one that is none, such as what a test prints.

    Control characters in its texts are escaped; line breaks and tabs stay.
    """
    if not line.startswith(MARK):
        return None
    try:
        found = parse_json(line.removeprefix(MARK), limit=LINE, measured=True)
        _EVENT.validate_python(found)
    except (ValidationError, ValueError):
        return None
    clean = _clean(found)
    assert isinstance(clean, dict)  # noqa: S101 - every event is one
    return clean


def clean_text(text: str) -> str:
    """Return foreign text with control characters escaped, its line breaks and tabs kept, and bounds on its length."""
    lines = text.split("\n")
    kept = [shown(line.replace("\r", "").replace("\t", "    "), _LINE_SHOWN) for line in lines[:_TEXT_LINES]]
    return "\n".join([*kept, *(["…"] if len(lines) > _TEXT_LINES else [])])


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [_clean(each) for each in value]
    if isinstance(value, dict):
        return {clean_text(key): _clean(each) for key, each in value.items()}
    return value

"""What the probe prints inside an image, read as the output of an untrusted program."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from envbuild.util.foreign_json import parse_json
from envbuild.util.names import shown

MARK = "envbuild-probe"
"""What the line of the answer starts with; a word that only this run knows follows."""
LIMIT = 16 << 20
"""Bytes that a probe may print; the answer of the largest image that we know has 40 KiB."""


class _Facts(BaseModel):
    model_config = ConfigDict(strict=True)


class _Component(_Facts):
    distribution: str = ""
    module: str | None = None
    extensions: list[str] = []
    sms: list[str] | None = None


class Expected(_Facts):
    """What an image says that it is meant to hold; further keys are of no concern here."""

    cell: dict[str, str]
    flavor: str
    packages: dict[str, str]
    components: dict[str, _Component]
    cell_id: str = ""
    lock_digest: str | None = None
    adopted: dict[str, Any] | None = None
    built_with: dict[str, Any] = {}
    altered: str | None = None

    @field_validator("cell")
    @classmethod
    def _with_cuda(cls, value: dict[str, str]) -> dict[str, str]:
        if "cuda" not in value:
            raise ValueError("the cell names no cuda")
        return value


class _Torch(_Facts):
    version: str
    cuda: str | None


class _NoTorch(_Facts):
    error: str


class _Built(_Facts):
    extensions: list[str]
    sha256: str


class _Answer(_Facts):
    expected: Expected | None
    distributions: dict[str, str]
    distributions_of_base: list[str]
    bytes: int = Field(ge=0)
    installed_bytes: int = Field(ge=0)
    cuda_headers: str | None
    built: dict[str, _Built]
    torch: _Torch | _NoTorch
    imports: dict[str, str | None]

    @field_validator("imports")
    @classmethod
    def _by_axis(cls, value: dict[str, str | None]) -> dict[str, str | None]:
        if not all(":" in name for name in value):
            raise ValueError("a module without its component")
        return value


def read_probe(out: bytes, word: str) -> dict[str, Any]:
    """Return the facts in what a probe printed: its one line that starts with the mark and `word`.

    Raises:
        ValueError: there is no such line, or more than one, or it is not what the probe prints.

    """
    start = f"{MARK} {word} ".encode()
    lines = [line for line in out.split(b"\n") if line.startswith(start)]
    if len(lines) != 1:
        raise ValueError(f"{len(lines)} answers instead of one" if lines else "no answer")
    facts = parse_json(lines[0].removeprefix(start), limit=LIMIT)
    _validate(_Answer, facts)
    assert isinstance(facts, dict)  # noqa: S101 - it is an _Answer
    return facts


def read_expectation(text: str) -> dict[str, Any]:
    """Return an image's expectation from its file's text.

    Raises:
        ValueError: it is none.

    """
    found = parse_json(text, limit=LIMIT)
    _validate(Expected, found)
    assert isinstance(found, dict)  # noqa: S101
    return found


def _validate(kind: type[BaseModel], value: Any) -> None:
    try:
        kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{shown(place, 100)}: {shown(first['msg'])}" if place else shown(first["msg"])) from None


def canonical(value: Any) -> str:
    """Return a JSON value as one text, to compare two by."""
    return json.dumps(value, sort_keys=True)

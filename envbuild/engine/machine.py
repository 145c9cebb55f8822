"""The machine that the engine runs on, and how a container on it ended."""

from dataclasses import dataclass

from pydantic import BaseModel, Field


class State(BaseModel):
    """How a container ended."""

    code: int = Field(0, alias="ExitCode")
    error: str = Field("", alias="Error")
    out_of_memory: bool = Field(False, alias="OOMKilled")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that the engine runs on, which need not be this one."""

    cores: int
    memory_gib: float
    platform: str = ""
    """As Docker names it, e.g. linux/amd64; empty where the engine does not say."""

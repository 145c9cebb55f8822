"""The machine that the engine runs on, and how a container on it ended."""

from dataclasses import dataclass

from pydantic import BaseModel, Field

GET_COMMAND = {
    "docker": "scripts/install-engine, then `envbuild doctor`; or podman (ENVBUILD_ENGINE); or name an OCI archive or a .sif",
    "podman": "install podman (apt-get or dnf), or unset the setting `engine` (ENVBUILD_ENGINE) to use Docker",
}
"""What to do where the command of an engine is missing."""


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
    root: str = ""
    """The folder where the engine keeps images; empty where it does not say."""

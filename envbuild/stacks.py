"""Stacks: a training repository at a pin, with its packages, patches, environment, launchers and proof, as data."""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from envbuild.errors import UsageError
from envbuild.matrix.load import explain_validation, read_toml
from envbuild.matrix.model import AxisName, Model, Source
from envbuild.paths import data_dir


class Repository(Model):
    """The training repository, checked out into the image at `path`."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    url: str
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    tag: str | None = None
    subdirectory: str | None = None
    """The part of the repository that is kept."""
    path: str = "/workspace"
    """Where training runs from, in the image."""


class Step(Model):
    """A command that runs in the build once the Python environment is complete, in the repository's folder."""

    name: str
    run: str
    check: str | None = None
    """A command whose failure fails the build: what the step was for."""
    compiles: bool = False
    """Whether it needs the builder's compilers; its products are then copied into the final image."""
    keep: tuple[str, ...] = ()
    """With `compiles`: the files, relative to the repository, that go into the image."""


class Correction(Model):
    """A departure from what the stack's makers stated, and the rule that asks for it."""

    axis: str
    stated: str
    instead: str
    rule: str
    why: str
    source: Source


class Launcher(Model):
    name: Literal["torchrun", "mpirun", "mpiexec", "deepspeed", "srun", "torch.distributed.launch"]
    command: str
    """The command line as users type it in a container; {hostfile}, {nproc} and {nodes} are filled in."""
    note: str | None = None


class Proof(Model):
    """How the image shows that it is right: commands run inside it, none of which may fail."""

    name: str
    run: str
    gpu: bool = False


class Stack(Model):
    """One training environment as people really run it."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str
    about: str
    source: Source
    repository: Repository
    also: tuple[Repository, ...] = ()
    """Other pins that may be asked for, by name."""
    axes: dict[AxisName, str]
    """Pins, as a user would write them on the command line."""
    flavor: Literal["runtime", "devel"] = "runtime"
    system: tuple[str, ...] = ()
    """OS packages of the image."""
    python: tuple[str, ...] = ()
    """Requirements beside the cell's own components."""
    environment: dict[str, str] = {}
    patches: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    launchers: tuple[Launcher, ...] = ()
    proof: tuple[Proof, ...] = ()
    corrections: tuple[Correction, ...] = ()


def stack_names() -> tuple[str, ...]:
    """Return the names of the stacks that this installation ships."""
    return tuple(sorted(path.stem for path in (data_dir("matrices") / "stacks").glob("*.toml")))


def load_stack(name_or_file: str) -> Stack:
    """Load a shipped stack by name, or a user's own from a file of the same schema.

    Raises:
        UsageError: there is neither a stack nor a file of that name.
        DataError: the file is malformed; the message names the key.

    """
    path = Path(name_or_file)
    if path.suffix != ".toml":
        path = data_dir("matrices") / "stacks" / f"{name_or_file}.toml"
    if not path.is_file():
        raise UsageError(
            f"there is no stack {name_or_file!r}",
            where="--stack",
            hint="stacks: " + ", ".join(stack_names()) + "; or name a file of your own (./mine.toml)",
        )
    try:
        return Stack.model_validate(read_toml(path))
    except ValidationError as error:
        raise explain_validation(error, path) from error

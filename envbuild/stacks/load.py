"""Loading a stack: one that this installation ships, by name, or a file of the same schema."""

import errno
from pathlib import Path

from envbuild.errors import UsageError
from envbuild.paths import data_dir
from envbuild.stacks.model import Stack
from envbuild.stacks.parts import patches_of, tools_of
from envbuild.util.names import shown
from envbuild.util.toml import explain_validation, read_toml


def stack_names() -> tuple[str, ...]:
    """Return the names of the stacks that this installation ships."""
    return tuple(sorted(path.stem for path in (data_dir("matrices") / "stacks").glob("*.toml")))


def _can_be_a_path(text: str) -> bool:
    try:
        Path(text).stat()
    except (ValueError, UnicodeEncodeError):  # a NUL, half a surrogate pair
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def _exists(path: Path) -> bool:
    """Return whether `path` is there; what is no regular file is refused when it is read."""
    return path.exists() and not path.is_dir()


def load_stack(name_or_file: str) -> Stack:
    """Load a shipped stack by name, or a user's own from a file of the same schema; `@PIN` chooses another of its pins.

    Raises:
        UsageError: there is neither a stack nor a file of that name, or no such pin.
        DataError: the file is malformed, or names a patch that does not fit; the message names the key.

    """
    if not _can_be_a_path(name_or_file):
        raise UsageError(
            f"there is no stack {shown(name_or_file, 80)!r}", where="--stack", hint="name a stack or a file"
        )
    name, pin = name_or_file, ""
    if "@" in name and not Path(name).exists():
        name, _, pin = name.rpartition("@")  # a folder may have an @ in its name, too
    own = Path(name)
    path = own if own.suffix == ".toml" else data_dir("matrices") / "stacks" / f"{name}.toml"
    if not _exists(path):
        what = f"there is no stack {shown(name, 80)!r}"
        if own.is_dir():
            what = f"{name} is a folder, not a stack file"
        elif own.suffix == ".toml":
            what = f"there is no file {shown(name, 80)!r}"
        elif own.is_file():
            what = f"the name of {name} does not end in .toml"
        hint = "stacks: " + ", ".join(stack_names()) + "; or name a file of your own (./mine.toml)"
        raise UsageError(what, where="--stack", hint=hint)
    try:
        stack = Stack.model_validate(read_toml(path))
    except ValueError as error:
        raise explain_validation(error, path, "`envbuild matrix schema stack` prints what may be in it") from error
    if pin:
        stack = _at(stack, pin)
    patches_of(stack)
    tools_of(stack)
    return stack


def stack_of_lock(name: str, given: str | None) -> Stack:
    """Return the stack that a lock names: the shipped one, or the user's own, whose file is `given`.

    Raises:
        UsageError: the file is of another stack, or of a user's stack there is no file.
        DataError: the file is malformed.

    """
    if given is not None:
        stack = load_stack(given)
        if stack.name != name:
            raise UsageError(f"the lock is of the stack {name}, {given} is {stack.name}", where="--stack")
        return stack
    if name.partition("@")[0] not in stack_names():
        raise UsageError(
            f"the lock is of the stack {name}, which is not one of envbuild's",
            where="--stack",
            hint="name its file: --stack FILE",
        )
    return load_stack(name)


def _at(stack: Stack, pin: str) -> Stack:
    other = next((a for a in stack.also if a.name == pin), None)
    if other is None:
        raise UsageError(
            f"the stack {stack.name} has no pin {pin!r}",
            where="--stack",
            hint="its pins: " + (", ".join(f"{stack.name}@{a.name}" for a in stack.also) or "its own alone"),
        )
    commit = {"commit": other.commit, "ref": other.ref} if other.commit else {}
    return stack.model_copy(
        update={
            # a lock names its stack by this, and loads it again
            "name": f"{stack.name}@{other.name}",
            "repository": stack.repository.model_copy(update=commit),
            "patches": stack.patches if other.patches is None else other.patches,
            "stated": stack.stated | other.axes,
            "corrections": tuple(c for c in stack.corrections if c.item not in other.axes),
        }
    )

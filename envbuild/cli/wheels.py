"""`envbuild wheels`: the compiled wheels that this machine keeps, and an index of them."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.groups import Group
from envbuild.cli.output import doing, emit, json_option, note, progress_options, show_notices, use_cache
from envbuild.util.text import count_of

if TYPE_CHECKING:
    from envbuild.pipeline.wheel_index import Index
    from envbuild.pipeline.wheels import ListedWheel


def _choosing(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose among the wheels."""
    for option in (
        click.option("--key", "keys", multiple=True, metavar="DIGITS", help="Take the wheel whose key starts so."),
        click.option(
            "--python", "pythons", multiple=True, metavar="PATTERN", help="Take wheels for this Python: 3.12."
        ),
        click.option(
            "--torch", multiple=True, metavar="PATTERN", help="Take wheels for this torch build: '2.11.*+cu130'."
        ),
        click.option(
            "--component", "components", multiple=True, metavar="PATTERN", help="Take wheels of this component: te."
        ),
    ):
        command = option(command)
    return command


@click.group(cls=Group, invoke_without_command=True)
@json_option
@click.pass_context
def wheels(ctx: click.Context, as_json: bool) -> None:
    """List the compiled wheels that this machine keeps, or write an index of them.

    A build keeps each wheel that it compiles, by a key over all that it was compiled from. Without a subcommand, this
    lists them.
    """
    if ctx.invoked_subcommand is None:
        nothing: dict[str, Any] = {"components": (), "torch": (), "pythons": (), "keys": ()}
        ctx.invoke(list_wheels, as_json=as_json, quiet=False, verbose=False, progress="auto", **nothing)
    elif as_json:  # before the subcommand, it means that one's answer
        ctx.default_map = {ctx.invoked_subcommand: {"as_json": True}}


@wheels.command("list")
@_choosing
@json_option
@progress_options
def list_wheels(as_json: bool, **chosen: tuple[str, ...]) -> None:
    """List compiled wheels: torch build, Python, GPU code, size and key.

    Every wheel is read in full and compared with its record. An option that is given more than once takes each of its
    patterns.
    """
    found, faults = _found(chosen)
    answer = {"wheels": [wheel.as_json() for wheel in found], "damaged": faults}
    emit(answer, as_json=as_json, human=lambda: _table(found))


@wheels.command()
@click.argument("folder", type=click.Path(path_type=Path))
@_choosing
@json_option
@progress_options
def export(folder: Path, as_json: bool, **chosen: tuple[str, ...]) -> None:
    """Write an index of compiled wheels to FOLDER, which pip and uv install from.

    FOLDER gets an index for each torch build and GPU, as in FOLDER/torch2.11.0-cu130-sm90:

        pip install --no-deps --index-url file:///FOLDER/torch2.11.0-cu130-sm90 apex

    Its pages state the sha256, the torch build, the GPU code and the key of each wheel. FOLDER must be new or empty. Any
    web server can serve it.

    Exits with 2 when two wheels for one torch build and GPU have the same file name, and 4 when there is no wheel.
    """
    from envbuild.pipeline.wheel_index import export as write_indexes

    found, faults = _found(chosen)
    place = folder.absolute()
    doing(f"writing {place}")
    indexes, left_out = write_indexes(found, place)
    for wheel in left_out:
        note(f"{wheel.file.name} is left out: its torch build is not noted; the next build that uses it notes it")
    answer = {
        "folder": str(place),
        "indexes": [
            {
                "name": index.name,
                "url": (place / index.name).as_uri(),
                "torch": index.torch,
                "sm": index.sm,
                "wheels": [wheel.as_json() for wheel in index.wheels],
            }
            for index in indexes
        ],
        "left_out": [wheel.as_json() for wheel in left_out],
        "damaged": faults,
    }
    emit(answer, as_json=as_json, human=lambda: _exported(place, indexes))


@wheels.command()
@_choosing
@json_option
@progress_options
def push(as_json: bool, **chosen: tuple[str, ...]) -> None:
    """Push compiled wheels to the configured registry, signed with the keys of the setting `signing_keys`.

    Each goes to REGISTRY/wheels, under its component and key, with its build record and all inputs of its key. A build
    elsewhere takes it where its settings trust the key (`trusted_keys`).

    A wheel that came from a registry is not pushed: its signature would state that it was compiled here, too.

    Exits with 2 when no registry or no key is set, 4 when what a wheel was compiled from is not known, it was not
    compiled here, or the registry has another wheel under its key, and 8 when the registry cannot be reached.
    """
    from envbuild.errors import DataError, LockError
    from envbuild.pipeline.wheel_sharing import push_kept, wheel_repository, wheel_signers
    from envbuild.pipeline.wheels import require_some
    from envbuild.registry.repository import Repository
    from envbuild.settings import load_settings

    settings = load_settings()
    name, keys = wheel_repository(settings), wheel_signers(settings)
    if not keys:
        raise DataError(
            "no key signs the wheels", where="signing_keys", hint="name a private key: nobody takes what nobody signed"
        )
    found, faults = _found(chosen)
    require_some(found, name)
    pushed, failed = [], []
    with Repository(name, settings) as repository:
        for wheel in found:
            doing(f"pushing {wheel.file.name}")
            try:
                done = push_kept(settings, repository, wheel.kept, keys)
            except LockError as error:
                note(f"{wheel.file.name} is not pushed: {error.what}")
                failed.append((wheel, error))
                continue
            reference = f"{name}:{done.tag}@{done.digest}"
            pushed.append({**wheel.as_json(), "reference": reference, "new": done.new})
    answer = {
        "repository": name,
        "signers": [key.name for key in keys],
        "pushed": pushed,
        "failed": [{**wheel.as_json(), "error": error.as_json()} for wheel, error in failed],
        "damaged": faults,
    }
    emit(answer, as_json=as_json, human=lambda: "\n".join(each["reference"] for each in pushed) or "nothing was pushed")
    if failed:
        raise failed[0][1]


def _found(chosen: dict[str, tuple[str, ...]]) -> "tuple[list[ListedWheel], dict[str, str]]":
    from envbuild.pipeline.wheels import Chosen, listed_wheels
    from envbuild.settings import load_settings
    from envbuild.util.names import shown

    settings = use_cache(show_notices(load_settings()))
    doing("reading wheels")
    found, faults = listed_wheels(settings, Chosen(**chosen))
    for name, why in faults.items():
        note(f"{shown(name)} is passed over: {why}")
    return found, faults


def _table(found: "list[ListedWheel]") -> str:
    from envbuild.cli.quantities import size_text
    from envbuild.cli.show import table

    if not found:
        return "no compiled wheel is kept here"
    rows: list[tuple[str, ...]] = [("wheel", "torch", "GPU code", "size", "key")]
    rows += [
        (w.file.name, w.torch or "not known", ", ".join(w.gpus) or "none", size_text(w.kept.size), w.kept.key[:16])
        for w in found
    ]
    return table(rows, indent="")


def _exported(place: Path, indexes: "list[Index]") -> str:
    lines = [f"{place}: {count_of(len(indexes), 'index', 'indexes')}"]
    for index in indexes:
        lines += ["", (place / index.name).as_uri()]
        lines += [f"  {wheel.file.name}" for members in index.projects.values() for wheel in members]
    return "\n".join(lines)

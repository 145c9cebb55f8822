"""One flag per axis, made from the axis files, and the request that the flags make."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from envbuild.cli import declared as click
from envbuild.cli.complete import complete_stack, completing
from envbuild.components import CHOICES, COMPONENTS
from envbuild.errors import HostError, UsageError
from envbuild.matrix.cell import AUTO, NONE, Pin, Request
from envbuild.matrix.headers import axis_headers
from envbuild.paths import data_dir

# What people ask for first; the axes that are not named here follow.
FIRST = ("cuda", *COMPONENTS, "python", "gpu", "driver", "board", "arch", "os", "base", "flavor", "toolchain")


def axis_order(name: str) -> tuple[int, str]:
    """Return the key that sorts axes as people look for them."""
    return (FIRST.index(name) if name in FIRST else len(FIRST), name)


def keyword(axis: str) -> str:
    """Return the name under which the flag of an axis reaches a command."""
    return "axis_" + axis.replace("-", "_")


@cache
def _headers() -> tuple[tuple[str, str, str], ...]:
    """Return (name, title, use) of every axis, as people look for them."""
    return tuple(sorted(axis_headers(), key=lambda header: axis_order(header[0])))


def axis_names() -> frozenset[str]:
    """Return the names of all axes."""
    return frozenset(name for name, _, _ in _headers())


def _help(name: str, title: str, use: str) -> str:
    notes = {
        "asked": f"Left out by default; `--{name} auto` adds a version that fits.",
        "default": "`none` leaves it out.",
        "derived": "Follows from the other versions; a SPEC narrows it.",
    }
    more = {
        "cuda": "12.6 means 12.6.*; `envbuild resolve --help` lists what a SPEC can be.",
        "gpu": "For example h100, a100 or sm_90; a100,h100,b200 for one image on all of them.",
        "driver": "`auto` uses this host's.",
        "arch": "x86_64 or aarch64; `--gpu gh200` implies aarch64. [default: x86_64]",
        "board": "data-center, workstation, geforce, or a board by name; `--gpu rtx4090` implies geforce.",
        "flavor": "runtime: without a CUDA compiler; devel: with it, for code that compiles kernels as it runs. "
        "[default: runtime, or the stack's]",
    }
    if name in CHOICES:
        notes["asked"] = (
            f"By default nothing of {CHOICES[name]} is left out; `envbuild matrix {name}` lists the choices."
        )
    return " ".join(part for part in (f"{title}.", more.get(name), notes.get(use)) if part)


@cache
def _pin_options() -> tuple[click.Stated, ...]:
    """Return `--stack` and one option per axis, the last first, as decorators are applied; made once for all commands."""
    stacks = ", ".join(sorted(path.stem for path in (data_dir("matrices") / "stacks").glob("*.toml")))
    stack = click.option(
        "--stack",
        metavar="NAME|FILE",
        shell_complete=complete_stack,
        help=f"Add the versions that a stack pins: {stacks}, or your own file.",
    )
    return stack, *(
        click.option(
            f"--{name}",
            keyword(name),
            metavar="SPEC",
            help=_help(name, title, use),
            shell_complete=completing(name),
        )
        for name, title, use in reversed(_headers())
    )


def pin_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add one option per axis and `--stack` to a command; `request_from` reads them from its kwargs."""
    for option in _pin_options():
        command = option(command)
    return command


def axis_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `pin_options` and `--prefer` to a command; `request_from` reads them from its kwargs."""
    prefer = click.option(
        "--prefer",
        type=click.Choice(["proven", "newest"]),
        default="proven",
        show_default=True,
        help="Prefer proven versions, then newer ones; or the newest.",
    )
    return pin_options(prefer(command))


def request_from(
    kwargs: Mapping[str, Any], *, lock: Mapping[str, str] | None = None, repository: bool = False
) -> Request:
    """Return the request that the options of `axis_options` spell.

    Args:
        kwargs: the command's keyword arguments; those of other options are passed over.
        lock: versions that a lock pins, axis by axis.
        repository: whether that lock is of a stack.

    Raises:
        UsageError: the stack does not exist.
        DataError: the stack's file is malformed.
        HostError: `--driver auto` on a host without a driver.

    """
    return Request(
        pins=tuple(_pins(kwargs, lock or {})),
        prefer=kwargs.get("prefer") or "proven",
        repository=repository or kwargs.get("stack") is not None,
    )


def _pins(kwargs: Mapping[str, Any], lock: Mapping[str, str]) -> Iterator[Pin]:
    for name, _, use in _headers():
        if name in lock and not (use == "host" and kwargs.get(keyword(name))):
            yield Pin(axis=name, spec=lock[name], origin="the lock")
        elif lock and use == "default":
            yield Pin(axis=name, spec=NONE, origin="the lock")
    if kwargs.get("stack") is not None:
        from envbuild.stacks.load import load_stack

        stack = load_stack(kwargs["stack"])
        hosts = {name for name, _, use in _headers() if use == "host"}
        for axis, stated in stack.axes.items():
            if axis in hosts and (axis in lock or kwargs.get(keyword(axis))):
                continue  # the makers' own machine and flavor give way to those that are named
            yield Pin(axis=axis, spec=_of_this_host(axis, stated), origin=f"stack {stack.name}")
    if _means_gpus(kwargs, lock):
        yield Pin(axis="cuda", spec=">=1", origin="--driver, so CUDA")
    for name, _, _ in _headers():
        spec: str | None = kwargs.get(keyword(name))
        if name == "driver" and spec == AUTO and (kwargs.get(keyword("cuda")) or "").strip() == "cpu":
            continue  # a CPU image runs with every driver and with none
        if spec is not None:
            if not spec.strip():
                raise UsageError(
                    "the value is empty",
                    where=f"--{name}",
                    hint=f"a shell variable that is not set? Write a version, or leave the flag out; `envbuild matrix {name}` lists them",
                )
            yield Pin(axis=name, spec=_of_this_host(name, spec.strip()), origin=f"--{name}")


def _means_gpus(kwargs: Mapping[str, Any], lock: Mapping[str, str]) -> bool:
    """Return whether a driver alone says that the machine has GPUs: one too old for any CUDA must not give a CPU image."""
    others = [keyword(axis) for axis in ("cuda", "torch", "gpu", "base", "flavor")]
    return bool(kwargs.get(keyword("driver"))) and not lock and not any(kwargs.get(name) for name in (*others, "stack"))


def _of_this_host(axis: str, spec: str) -> str:
    """Return the host's driver where `auto` asks for it, a branch of drivers by its number, else the constraint as it is."""
    if axis == "driver" and re.fullmatch(r"[Rr]\d{3,4}", spec):
        return spec[1:]  # NVIDIA writes R535 for the branch
    if (axis, spec) != ("driver", AUTO):
        return spec
    from envbuild.host import driver_version

    driver = driver_version()
    if driver is None:
        raise HostError(
            "no NVIDIA driver answers on this host",
            where=f"--{axis} {AUTO}",
            hint=f"name the driver of the host that will train (--{axis} 560.35.05), or leave the flag out",
        )
    return driver

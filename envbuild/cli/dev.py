"""`envbuild dev`: a tree of this machine in the place of the repository in a stack's image."""

import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.output import emit, note, show_notices
from envbuild.cli.run import ContainerRequest, container_options, user_option
from envbuild.errors import UsageError

if TYPE_CHECKING:
    from envbuild.engine.image import Image
    from envbuild.host import HostFacts
    from envbuild.settings import Settings
    from envbuild.stacks.model import Stack


@dataclass(frozen=True, kw_only=True)
class DevRequest(ContainerRequest):
    """What `envbuild dev` was asked for."""

    tree: Path
    stack: str | None
    command: tuple[str, ...]
    watch: bool


@click.command
@click.argument("image", metavar="TAG")
@click.argument("tree", metavar="TREE", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("command", metavar="-- CMD", nargs=-1, type=click.UNPROCESSED)
@click.option("--stack", metavar="FILE", help="Take the stack of the image from this file, where it is your own.")
@click.option("--watch", is_flag=True, help="Run CMD again after each edit, with its imports of packages done before.")
@user_option
@container_options
def dev(**options: Any) -> None:
    """Run CMD in a container of the stack's image TAG, with TREE mounted over the stack's repository.

    An edit in TREE is in the next run. What the stack compiles (C++ helpers) is compiled again only where the sources
    changed; it is kept in the cache and written into TREE, as `make` does it.

    First it says which commit TREE is at, which patches of the stack are missing in it, and which of its requirements
    the image does not meet. None of these stops it.

    With --watch CMD runs again after each edit of the tree, and when Enter is pressed, until Ctrl-C. An edit stops a run
    that has not ended. Between the runs the next one is started already: it imports packages of the image, and waits.

    The exit code is CMD's. Without CMD the image's own command runs.
    """
    from envbuild.host import facts
    from envbuild.settings import load_settings

    asked = DevRequest(**options)
    if asked.watch and not asked.command:
        raise UsageError("no command to run again", where="--watch", hint="write it after --: -- python train.py")
    settings = show_notices(load_settings())
    with ThreadPoolExecutor(max_workers=1) as pool:
        # most of it is waiting for `docker info`, while the rest is imported and the image looked up
        _run(asked, settings, pool.submit(facts, settings))


def _run(asked: DevRequest, settings: "Settings", of_host: "Future[HostFacts]") -> None:
    from envbuild.engine.place import is_path
    from envbuild.matrix.cell import DEBIAN_ARCH
    from envbuild.run.container import Mount
    from envbuild.run.dev.state import lock_of_image, state_of
    from envbuild.run.runtime import runtime_for
    from envbuild.stacks.load import stack_of_lock

    container = asked.container()
    if is_path(asked.image):
        raise UsageError("dev runs images of the engine", where=asked.image, hint="name a tag")
    runtime = runtime_for(settings, asked.image)
    image = runtime.look_up(asked.image)
    lock = lock_of_image(settings, image)
    if lock.stack is None:
        raise UsageError(
            "the image holds no repository of a stack, which TREE could replace",
            where=asked.image,
            hint=f"run it with the tree mounted: envbuild run {asked.image} --mount TREE:/workspace/tree -- …",
        )
    stack = stack_of_lock(lock.stack, asked.stack)
    state = state_of(asked.tree, lock, stack)
    for text in state.notes():
        note(f"note: {text}")
    host = of_host.result()
    folder = state.folder
    container = replace(
        container,
        mounts=(Mount(source=folder, target=stack.repository.path), *container.mounts),
        workdir=container.workdir or stack.repository.path,
    )
    line = runtime.line(host, container, asked.command, terminal=sys.stdin.isatty() and sys.stdout.isatty())
    for text in line.notes:
        note(f"note: {text}")
    if asked.starts_nothing:
        answer = {"command": list(line.command), "notes": list(line.notes), "tree": state.as_json()}
        emit(answer, as_json=asked.as_json, human=line.shown)
        return
    if not settings.engine_is_here or image.platform != f"linux/{DEBIAN_ARCH.get(host.arch or '')}":
        runtime.require_runnable(image)  # asks the engine, and loads its library, which take a second
    compile_changed = partial(_compile, settings, image, host, stack, folder)
    if asked.watch:
        from envbuild.run.dev.watch import Watched, watch

        watch(
            Watched(
                runtime=runtime,
                image=image,
                host=host,
                container=container,
                command=asked.command,
                tree=folder,
                target=stack.repository.path,
                prepare=compile_changed,
                note=note,
            )
        )
        return
    compile_changed()
    sys.stdout.flush()
    os.execvpe(line.command[0], line.command, line.environ)  # noqa: S606


def _compile(settings: "Settings", image: "Image", host: "HostFacts", stack: "Stack", folder: Path) -> None:
    from envbuild.run.dev.helpers import prepare

    start = time.monotonic()
    helpers = prepare(settings, image, host, stack, folder, note=lambda text: note(f"note: {text}"))
    if helpers.changed:
        seconds = time.monotonic() - start
        note(f"note: {', '.join(helpers.changed)} {helpers.origin} ({seconds:.1f} s)")

"""`envbuild lock`: every input of a cell by hash, written to a folder."""

from pathlib import Path
from typing import Any

import click

from envbuild.cli.cell_options import asked_from, cell_options
from envbuild.cli.output import doing, emit, json_option, note, progress_options, show_notices, use_cache


@click.command()
@cell_options
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write to this folder. [default: this user's locks]",
)
@click.option(
    "--check", is_flag=True, help="Look up every input of the existing lock again and compare; write nothing."
)
@json_option
@progress_options
def lock(
    out: Path | None,
    check: bool,
    as_json: bool,
    lock_file: Path | None,
    sources: tuple[str, ...],
    **flags: Any,
) -> None:
    """Pin every input of a cell by hash: wheels, sources, images, OS packages.

    Inputs that cannot be reached from here are listed in the lock as missing, and the command exits with 8.
    """
    from envbuild.cli.image_report import left_out_lines, left_out_of
    from envbuild.errors import HostError
    from envbuild.lock.check import differences
    from envbuild.lock.files import read_lock, write_lock
    from envbuild.lock.find import find_lock, incomplete, own_lock, place_for
    from envbuild.lock.make import make_lock
    from envbuild.settings.places import is_writable
    from envbuild.util.text import count_of

    doing("choosing versions")
    asked = asked_from(flags, lock_file=lock_file, sources=sources)
    show_notices(use_cache(asked.settings))
    if check:
        from envbuild.errors import LockError

        found = (read_lock(lock_file), lock_file) if lock_file else find_lock(asked.settings, asked.inputs)
        if found is None:
            raise LockError(
                "this cell has no lock to check", where=asked.solution.cell.id, hint="`envbuild lock` writes one"
            )
        faults = differences(asked.settings, asked.matrix, asked.inputs, found[0], note=note)
        checked = {
            "id": asked.solution.cell.id,
            "lock": found[0].lock.digest,
            "folder": str(found[1]),
            "differences": faults,
        }
        emit(
            checked,
            as_json=as_json,
            human=lambda: (
                f"{found[0].lock.digest} in {found[1]}\n" + ("every input is there, unchanged" if not faults else "")
            ),
        )
        if faults:
            lines = "".join(f"\n  - {fault}" for fault in faults)
            raise LockError(
                f"{count_of(len(faults), 'input is', 'inputs are')} not what the lock names{lines}",
                where=str(found[1]),
                hint="lock again if the change is meant",
            )
        return
    if out and not is_writable(out):  # before the hosts are asked
        raise HostError("the lock cannot be written", where=str(out), hint="name a folder that you may write to")
    made = make_lock(asked.settings, asked.matrix, asked.inputs, note=note)
    folder = place_for(out or own_lock(asked.settings, asked.inputs), made.lock)
    path = write_lock(made, folder)
    packages = sum(len(s.packages) for s in made.lock.python)
    os_packages = sum(len(s.packages) for s in made.lock.os) + (len(made.lock.root.packages) if made.lock.root else 0)
    answer: dict[str, Any] = {
        "id": asked.solution.cell.id,
        "lock": made.lock.digest,
        "file": str(path),
        "complete": made.lock.complete,
        "python_packages": packages,
        "os_packages": os_packages,
        "sources": len(made.lock.sources) + len(made.lock.files),
        "missing": [m.model_dump() for m in made.lock.missing],
        "left_out": left_out_of(asked),
    }
    counts = ", ".join(
        count_of(number, what)
        for number, what in ((packages, "Python package"), (os_packages, "OS package"), (answer["sources"], "source"))
    )
    text = [str(path), f"  {made.lock.digest}", f"  {counts}"]
    if made.lock.missing:
        text.append(f"  not complete: {count_of(len(made.lock.missing), 'input has', 'inputs have')} no hash")
    text += left_out_lines(answer["left_out"])
    emit(answer, as_json=as_json, human=lambda: "\n".join(text))
    if made.lock.missing:
        raise incomplete(made.lock.missing, str(path), unreached=made.unreached)

"""`envbuild render`: the plan of a cell as a file that builds its image, or one that runs it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.cli import declared as click
from envbuild.cli.cell_options import ResolvedRequest, asked_from, cell_options
from envbuild.cli.cluster_options import RUNS, cluster_from, cluster_options, taken_from
from envbuild.cli.output import emit, json_option, show_notices

if TYPE_CHECKING:
    from envbuild.lock.files import Locked
    from envbuild.plan.plan import Plan


@click.command()
@cell_options
@cluster_options
@click.option(
    "--format",
    "form",
    type=click.Choice(["dockerfile", "bake", "apptainer", "shell", "sbatch", "kubernetes", "devcontainer"]),
    default="dockerfile",
    show_default=True,
    help="Print this kind of file.",
)
@click.option(
    "--unlocked", is_flag=True, help="Render without a complete lock, with tags and versions instead of hashes."
)
@json_option
def render(
    form: str,
    unlocked: bool,
    as_json: bool,
    lock_file: Path | None,
    sources: tuple[str, ...],
    command: tuple[str, ...],
    **flags: Any,
) -> None:
    """Print the build of a cell as a file, from its lock; fetch nothing and build nothing.

    sbatch, kubernetes and devcontainer are files that run the built image. COMMAND is what a job runs: a training script
    with its arguments, after `--`. Without one, a job checks every GPU and sums over all ranks.

    Exits with 4 and the list of missing hashes when the cell has no complete lock and --unlocked is not given.
    """
    from envbuild.plan.plan import plan_of

    given = taken_from(flags, command, form)
    asked = asked_from(flags, lock_file=lock_file, sources=sources)
    if lock_file is not None or not unlocked:  # names and versions alone depend on nothing of this machine
        show_notices(asked.settings)
    plan = plan_of(asked.matrix, _locked(asked, lock_file, form=form, unlocked=unlocked), asked.stack)
    text = _run_text(asked, plan, form, given) if form in RUNS else _text(plan, form)
    emit(
        {
            "cell": dict(plan.cell.versions),
            "id": plan.cell.id,
            "lock": plan.lock.digest,
            "complete": plan.lock.complete,
            "format": form,
            "stages": [{"name": s.name, "title": s.title, "key": s.key} for s in plan.stages],
            "left_out": dict(asked.solution.left_out),
            "text": text,
        },
        as_json=as_json,
        human=lambda: text.rstrip("\n"),
        exact=True,
    )


def _text(plan: "Plan", form: str) -> str:
    if form == "bake":
        from envbuild.plan.dockerfile import bake

        return bake(plan)
    if form == "apptainer":
        from envbuild.plan.apptainer import definition

        return definition(plan)
    if form == "shell":
        from envbuild.plan.shell import script

        return script(plan)
    from envbuild.plan.dockerfile import dockerfile

    return dockerfile(plan)


def _run_text(asked: ResolvedRequest, plan: "Plan", form: str, given: dict[str, Any]) -> str:
    cluster = cluster_from(asked, plan, form, given)
    if form == "sbatch":
        from envbuild.plan.sbatch import batch_script

        return batch_script(asked.matrix, plan, cluster, given["runtime"] or "apptainer")
    if form == "kubernetes":
        from envbuild.plan.kubernetes import manifest

        return manifest(asked.matrix, plan, cluster, given["kind"] or "jobset")
    from envbuild.plan.devcontainer import devcontainer

    return devcontainer(plan, cluster)


def _locked(asked: ResolvedRequest, lock_file: Path | None, *, form: str, unlocked: bool) -> "Locked":
    from envbuild.lock.files import Locked, read_lock

    if unlocked and lock_file is None:
        from envbuild.lock.unlocked import unlocked as without_hashes

        return Locked(lock=without_hashes(asked.matrix, asked.inputs), pylocks={})
    from envbuild.lock.find import check_fits, find_lock, incomplete, needed, require_complete

    provided: tuple[str, ...] = ()
    if form == "shell":
        from envbuild.plan.shell import HOST_PROVIDES

        provided = HOST_PROVIDES
    if lock_file is not None:
        named = read_lock(lock_file)
        check_fits(named.lock, asked.inputs, str(lock_file))
        if not unlocked:
            require_complete(named.lock, str(lock_file), provided)
        return named
    found = find_lock(asked.settings, asked.inputs)
    if found is None:
        raise incomplete(needed(asked.inputs, asked.settings), f"cell {asked.solution.cell.id}, which has no lock")
    locked, place = found
    require_complete(locked.lock, str(place), provided)
    return locked

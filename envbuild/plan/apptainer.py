"""Plan -> an Apptainer definition that converts the built image."""

from envbuild.plan.dockerfile import OF_CONTAINERS, rendered
from envbuild.plan.plan import Plan


def definition(plan: Plan) -> str:
    """Return the definition: the image of the plan as a SIF, tested against the lock as it is made."""
    return rendered("apptainer.j2", plan=plan, tag=plan.tag, archive=f"{plan.cell.id}.tar", of_containers=OF_CONTAINERS)

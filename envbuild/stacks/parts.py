"""What a stack refers to: its patches, its programs, the wheels that it compiles; and its digest."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from envbuild.components.base import Wheel
from envbuild.errors import DataError
from envbuild.paths import data_dir
from envbuild.stacks.model import Stack

if TYPE_CHECKING:
    from envbuild.patches.manifest import Patch


def digest_of(stack: Stack) -> str:
    """Return the sha256 (hex) over all that decides what `stack` puts into an image; proof and prose are left out.

    Raises:
        DataError: a patch does not fit, or there is no such program.

    """
    parts = stack.model_dump(
        mode="json",
        include={"repository", "flavor", "system", "python", "builds", "environment", "steps"},
    )
    parts["patches"] = [patch.digest for patch in patches_of(stack)]
    if stack.tools:
        parts["tools"] = tools_of(stack)
    if stack.jupyter:  # left out otherwise: a stack without it has the digest that its locks know
        parts["jupyter"] = True
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def patches_of(stack: Stack) -> tuple["Patch", ...]:
    """Return the stack's patches in the order they apply in.

    Raises:
        DataError: a patch does not exist, is of another repository or another revision, or two change the same lines.

    """
    if not stack.patches:
        return ()
    from envbuild.patches.manifest import in_order, load_patches

    return tuple(in_order(_chosen(stack, load_patches())))


def _chosen(stack: Stack, known: Mapping[str, "Patch"]) -> Iterable["Patch"]:
    repository = stack.repository
    where = f"stack {stack.name}: patches"
    for name in stack.patches:
        patch = known.get(name)
        if patch is None:
            raise DataError(f"there is no patch {name!r}", where=where, hint=f"the patches are {', '.join(known)}")
        if patch.repo.removesuffix(".git") != repository.url.removesuffix(".git"):
            raise DataError(f"patch {name} is for {patch.repo}, not for {repository.url}", where=where)
        if repository.commit not in {revision.commit for revision in patch.revisions}:
            raise DataError(
                f"patch {name} is for another revision: it knows {patch.known()}, and the stack pins {repository.commit}",
                where=where,
                hint="pin a revision that the patch knows, or leave the patch out",
            )
        yield patch


def tools_of(stack: Stack) -> dict[str, str]:
    """Return the stack's programs, name -> text.

    Raises:
        DataError: there is no such program.

    """
    folder = data_dir("dockerfiles") / "tools"
    known = sorted(path.name for path in folder.iterdir())
    for name in stack.tools:
        if name not in known:
            raise DataError(
                f"there is no tool {name!r}", where=f"stack {stack.name}: tools", hint="the tools: " + ", ".join(known)
            )
    return {name: (folder / name).read_text(encoding="utf-8") for name in stack.tools}


def wheels_of(stack: Stack, mpi_prefix: str | None) -> tuple[Wheel, ...]:
    """Return how the distributions that a stack builds from source are compiled.

    Args:
        stack: the stack.
        mpi_prefix: where the cell's MPI is when the build compiles it; None when it comes with the OS.

    """
    return tuple(
        Wheel(
            axis=build.name,
            distribution=build.name,
            module=build.module,
            extensions=build.extensions,
            nvcc=build.nvcc,
            job_gib=2.0,
            environment=build.environment
            | ({"MPICC": f"{mpi_prefix}/bin/mpicc" if mpi_prefix else "mpicc"} if build.mpi else {}),
            tools=("packaging", "wheel", *build.tools),
            version=build.version or str(build.commit)[:12],
            alone=True,
            mpi=build.mpi,
        )
        for build in stack.builds
    )

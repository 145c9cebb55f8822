"""What `render` asks for the formats that run an image: which image, on how many nodes and GPUs, which command."""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from envbuild.cli import declared as click
from envbuild.cli.cell_options import parse_digest
from envbuild.errors import LockError, UsageError
from envbuild.util.names import ImageReference, checked, shown

if TYPE_CHECKING:
    from envbuild.cli.cell_options import ResolvedRequest
    from envbuild.plan.cluster import Cluster, Shared
    from envbuild.plan.plan import Plan

RUNS = ("sbatch", "kubernetes", "devcontainer")
"""The formats that run an image, and build none."""
_TAKES = {
    "runtime": ("sbatch",),
    "kind": ("kubernetes",),
    "image": RUNS,
    "digest": RUNS,
    "name": ("sbatch", "kubernetes"),
    "nodes": ("sbatch", "kubernetes"),
    "gpus_per_node": ("sbatch", "kubernetes"),
    "rdma": ("kubernetes",),
    "cpus": ("kubernetes",),
    "memory": ("kubernetes",),
    "mounts": ("sbatch",),
    "claims": ("kubernetes",),
    "command": ("sbatch", "kubernetes"),
}
_DST = r"(?P<target>/[^:\x00-\x1f\x7f]*)(?P<mode>:ro|:rw)?"
_MOUNT = re.compile(rf"(?P<source>/[^:\x00-\x1f\x7f]*):{_DST}")
_CLAIM = re.compile(rf"(?P<source>[a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?):{_DST}")
_NAMES = {
    "kubernetes": (
        re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"),
        "write lower-case letters, digits and -, a letter first: at most 40 characters, as operators add to it",
    ),
    "sbatch": (
        re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"),
        "write letters, digits, ., _ and -, at most 64 characters",
    ),
}
"""Names of jobs. A JobSet's pods are NAME-node-0-99999-abcde, a label of RFC 1035, which has at most 63 characters."""
_CPUS = re.compile(r"(?=.*[1-9])[0-9]{1,6}(\.[0-9]{1,3})?|[1-9][0-9]{0,8}m")
# The unit must be written: Kubernetes reads 512 as bytes and 512m as thousandths of a byte.
_MEMORY = re.compile(r"(?=.*[1-9])[0-9]{1,15}(\.[0-9]{1,3})?([KMGTP]i|[kMGTP])")
_GPUS = ("nvidia.com/gpu", "nvidia.com/mig-", "amd.com/gpu")
_RESOURCE = re.compile(r"([a-z0-9][a-z0-9.-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?:=([1-9]\d{0,2}))?")


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags to a command; `cluster_from` reads them."""
    for option in (
        click.argument("command", nargs=-1, required=False),
        click.option(
            "--rdma",
            metavar="RESOURCE[=N]",
            help="kubernetes: ask for InfiniBand adapters by this resource, such as rdma/rdma_shared_device_a.",
        ),
        click.option(
            "--cpus", metavar="N", help="kubernetes: ask for so many cores on each node, such as 64 or 1500m."
        ),
        click.option(
            "--memory", metavar="SIZE", help="kubernetes: ask for so much memory on each node, such as 512Gi."
        ),
        click.option(
            "--mount",
            "mounts",
            multiple=True,
            metavar="SRC:DST[:ro]",
            help="sbatch: mount this folder of the nodes, too; repeat it for more.",
        ),
        click.option(
            "--claim",
            "claims",
            multiple=True,
            metavar="NAME:DST[:ro]",
            help="kubernetes: mount this PersistentVolumeClaim; repeat it for more.",
        ),
        click.option(
            "--gpus-per-node", type=click.IntRange(0, 64), help="sbatch, kubernetes: GPUs of each node. [default: 8]"
        ),
        click.option(
            "--name", metavar="NAME", help="sbatch, kubernetes: name of the job. [default: the stack's or the cell's]"
        ),
        click.option("--nodes", type=click.IntRange(1, 100_000), help="sbatch, kubernetes: nodes. [default: 2]"),
        click.option(
            "--digest",
            metavar="sha256:…",
            help="Name the image by this digest. [default for kubernetes: the known one]",
        ),
        click.option(
            "--image",
            metavar="NAME:TAG|FILE",
            help="Run this image, or with Apptainer or pyxis this file. [default: the cell's]",
        ),
        click.option(
            "--kind",
            type=click.Choice(["jobset", "trainjob", "mpijob"]),
            help="kubernetes: the kind of job. [default: jobset]",
        ),
        click.option(
            "--runtime",
            type=click.Choice(["apptainer", "pyxis", "docker"]),
            help="sbatch: what runs containers on the nodes. [default: apptainer]",
        ),
    ):
        command = option(command)
    return command


def taken_from(flags: dict[str, Any], command: tuple[str, ...], form: str) -> dict[str, Any]:
    """Take the flags of `cluster_options` out of `flags`.

    Raises:
        UsageError: a flag is given that `form` does not read.

    """
    given = {name: flags.pop(name, None) for name in _TAKES if name != "command"}
    given |= {name: given[name] or None for name in ("mounts", "claims")}
    given |= {"command": command or None}
    for name, value in given.items():
        if value is not None and form not in _TAKES[name]:
            flag = {"command": "COMMAND", "mounts": "--mount", "claims": "--claim"}.get(
                name, f"--{name.replace('_', '-')}"
            )
            hint = f"it goes with --format {' or --format '.join(_TAKES[name])}"
            raise UsageError(f"--format {form} does not read it", where=flag, hint=hint)
    return given


def cluster_from(asked: "ResolvedRequest", plan: "Plan", form: str, given: Mapping[str, Any]) -> "Cluster":
    """Return what runs the image of a plan, and where.

    Raises:
        UsageError: a flag has a value that cannot be.
        LockError: Kubernetes needs the image's digest, and none is known.

    """
    from envbuild.plan.cluster import Cluster, require_module, uses_gpus

    runtime = given["runtime"] or "apptainer"
    digest = parse_digest(given["digest"])
    if form == "sbatch" and runtime != "docker":
        suffix = {"apptainer": "sif", "pyxis": "sqsh"}[runtime]
        image = _file(given["image"], runtime) or f"./{plan.tag.partition(':')[2]}.{suffix}"
        if digest:
            hint = "leave it out: the job itself compares the lock that the file holds"
            raise UsageError("a file has no digest to be named by", where="--digest", hint=hint)
    else:
        image = _image(asked, plan, form, given["image"])
        if form == "kubernetes" and digest is None:
            digest = _known_digest(asked, plan)
    for word in given["command"] or ():
        _require_words(word, "COMMAND")
    require_module(given["command"] or ())
    gpus = given["gpus_per_node"]
    return Cluster(
        image=image,
        digest=digest,
        name=_name(given["name"], form),
        nodes=given["nodes"] or 2,
        gpus=(8 if uses_gpus(plan) else 0) if gpus is None else gpus,
        command=given["command"] or (),
        rdma=_rdma(given["rdma"]),
        cpus=_quantity(given["cpus"], _CPUS, "--cpus", "cores, such as 64, 1.5 or 1500m"),
        memory=_quantity(given["memory"], _MEMORY, "--memory", "a number with its unit, such as 512Gi or 500G"),
        shared=tuple(_mount(text) for text in given["mounts"] or ()),
        claims=tuple(_claim(text) for text in given["claims"] or ()),
    )


def _require_words(text: str, where: str) -> None:
    """Raise UsageError for a text with a line break or another control character: a script shows it as it is."""
    if not text.isprintable():
        raise UsageError(
            f"{shown(text)!r} has a character that no script can show", where=where, hint="put such a text into a file"
        )


def _name(text: str | None, form: str) -> str | None:
    if text is None:
        return None
    names, hint = _NAMES[form]
    if names.fullmatch(text) is None:
        where = "Kubernetes" if form == "kubernetes" else "Slurm"
        raise UsageError(f"{shown(text)!r} is no name of a job of {where}", where="--name", hint=hint)
    return text


def _file(named: str | None, runtime: str) -> str | None:
    """Return the file or folder that `--image` names for Apptainer or pyxis, which run none of an engine's images."""
    if named is None:
        return None
    _require_words(named, "--image")
    other = {"apptainer": (".sqsh", ".tar"), "pyxis": (".sif", ".tar")}[runtime]
    if named.endswith(other):
        takes = {"apptainer": "a .sif or a sandbox", "pyxis": "a .sqsh, which `enroot import` makes"}[runtime]
        raise UsageError(
            f"{shown(named)!r} is no image for {runtime}",
            where="--image",
            hint=f"it takes {takes}; --runtime chooses another",
        )
    if runtime == "apptainer" and not named.endswith(".sif") and not named.startswith(("/", "./", "../", "~/")):
        what = "names an engine's image" if "/" in named else "is no file"
        raise UsageError(
            f"{shown(named)!r} {what}",
            where="--image",
            hint="name a .sif or a sandbox (./FOLDER); --runtime docker runs an engine's image",
        )
    return named


def _shared(form: "re.Pattern[str]", text: str, what: str, where: str, hint: str) -> "Shared":
    from envbuild.plan.cluster import Shared

    found = form.fullmatch(text)
    if found is None or not text.isprintable():
        raise UsageError(f"{shown(text)!r} is no {what}", where=where, hint=f"write {hint}")
    return Shared(source=found["source"], target=found["target"], read_only=found["mode"] == ":ro")


def _mount(text: str) -> "Shared":
    return _shared(_MOUNT, text, "mount", "--mount", "SRC:DST or SRC:DST:ro, both absolute paths")


def _claim(text: str) -> "Shared":
    hint = "NAME:DST or NAME:DST:ro, the name of a PersistentVolumeClaim and an absolute path"
    return _shared(_CLAIM, text, "claim", "--claim", hint)


def _image(asked: "ResolvedRequest", plan: "Plan", form: str, named: str | None) -> str:
    if named is not None:
        try:
            return checked(ImageReference, named)
        except ValueError:
            hint = "write it as registry.example.org/team/image:tag, and its digest with --digest"
            raise UsageError(f"{shown(named)!r} names no image", where="--image", hint=hint) from None
    if form != "kubernetes":
        return plan.tag
    from envbuild.pipeline.prebuilt import registry_reference

    reference = registry_reference(asked.settings, plan.lock)
    if reference is None:
        raise UsageError(
            "no registry is set that the cluster could pull the image from",
            where="--format kubernetes",
            hint="name the image with --image, or set `registry` in the settings",
        )
    return reference


def _known_digest(asked: "ResolvedRequest", plan: "Plan") -> str | None:
    """Return the one digest that the image of a locked plan has; None for a plan without a lock."""
    if not plan.lock.complete:
        return None
    from envbuild.pipeline.prebuilt import expected_of

    expected = expected_of(asked.settings, plan, None)
    if expected is None or len(expected.records) != 1:
        if expected is None:
            what = "no digest of the image is known"
        elif expected.records:
            what = "several digests of the image are known"
        else:
            what = "no digest of the image by this release's recipe is known, only by another recipe"
        raise LockError(
            what,
            where=f"lock {plan.lock.digest[:19]}",
            hint="give --digest, which `envbuild image … --json` prints",
        )
    return next(iter(expected.records))


def _quantity(text: str | None, form: "re.Pattern[str]", where: str, hint: str) -> str | None:
    if text is not None and form.fullmatch(text) is None:
        raise UsageError(f"{shown(text)!r} is no quantity of Kubernetes", where=where, hint=f"write {hint}")
    return text


def _rdma(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    match = _RESOURCE.fullmatch(text)
    if match is None:
        hint = "write it as `kubectl describe node` lists it: rdma/rdma_shared_device_a=1"
        raise UsageError(f"{shown(text)!r} is no resource of a node", where="--rdma", hint=hint)
    if match[1].startswith(_GPUS):
        hint = "--gpus-per-node says how many GPUs; name the resource of the InfiniBand adapters here"
        raise UsageError(f"{match[1]} is a resource of GPUs", where="--rdma", hint=hint)
    return match[1], int(match[2] or 1)

"""What buildx says of a builder: its driver, its nodes, and the limits that its maker set."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from envbuild.engine.machine import Machine
from envbuild.errors import HostError
from envbuild.host.build_tools import BUILDKIT, BUILDX, older
from envbuild.settings import Settings
from envbuild.util.processes import ProcessResult, bounded

_VERSION_S = 60.0
_OPTION = re.compile(r'([a-z][\w.-]*)="((?:[^"\\]|\\.)*)"', re.ASCII)
# binary and decimal suffixes of Kubernetes (its resource model), and Docker's, which are binary (docker run --memory)
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_DOCKER = {"b": 1, "": 1, "k": 2**10, "kb": 2**10, "m": 2**20, "mb": 2**20, "g": 2**30, "gb": 2**30}


@dataclass(frozen=True, kw_only=True)
class BuilderFacts:
    """A builder, as `docker buildx inspect` prints it.

    Attributes:
        driver: `docker`, `docker-container`, `remote` or `kubernetes`; empty where it does not say.
        endpoints: where each node is.
        options: the driver's options of the first node.
        buildkit: the version of each node's BuildKit, where it says.

    """

    driver: str = ""
    endpoints: tuple[str, ...] = ()
    options: Mapping[str, str]
    buildkit: tuple[str, ...] = ()

    @property
    def is_engines(self) -> bool:
        """Whether it is the engine's own, which keeps its layers where the engine keeps its images."""
        return self.driver == "docker"

    @property
    def on_engines_machine(self) -> bool:
        """Whether its steps run where the engine's containers run: only there the engine's cores and memory count."""
        if self.driver == "docker-container":
            return all(endpoint == "default" or endpoint.startswith("unix://") for endpoint in self.endpoints)
        return self.driver in {"docker", ""}

    @property
    def cores(self) -> float | None:
        """Cores that its maker allows it, None without such a limit."""
        found = [_quantity(self.options.get("limits.cpu"), {"m": 1e-3, "": 1.0})]
        quota = _quantity(self.options.get("cpu-quota"), {"": 1.0})
        if quota:
            found.append(quota / (_quantity(self.options.get("cpu-period"), {"": 1.0}) or 100_000))
        found.append(_cpus(self.options.get("cpuset-cpus", "")))
        known = [each for each in found if each]
        return min(known) if known else None

    @property
    def memory_gib(self) -> float | None:
        """GiB of memory that its maker allows it, None without such a limit."""
        known = [
            _quantity(self.options.get("limits.memory"), _UNITS),
            _quantity(self.options.get("memory"), _DOCKER),
        ]
        return min((each / 2**30 for each in known if each), default=None)

    def within(self, machine: Machine) -> Machine:
        """Return a machine with no more than its maker allows the builder."""
        return Machine(
            cores=max(1, int(min(machine.cores, self.cores or machine.cores))),
            memory_gib=min(machine.memory_gib, self.memory_gib or machine.memory_gib),
            platform=machine.platform,
        )


def read_builder(text: str) -> BuilderFacts:
    """Read what `docker buildx inspect` prints. Its form is for people; what is missing or unknown is left out."""
    driver = re.search(r"^Driver: +([a-z-]+) *$", text, re.MULTILINE | re.ASCII)
    endpoints = re.findall(r"^Endpoint: +(\S+) *$", text, re.MULTILINE)
    options = re.search(r"^Driver Options: +(.*)$", text, re.MULTILINE)
    return BuilderFacts(
        driver=driver[1] if driver else "",
        endpoints=tuple(endpoints),
        options=dict(_OPTION.findall(options[1])) if options else {},
        buildkit=tuple(
            re.findall(r"^Build[Kk]it(?: version)?: +(v?[0-9][\w.+~-]{0,60}) *$", text, re.MULTILINE | re.ASCII)
        ),
    )


def facts_of(settings: Settings, ran: ProcessResult) -> BuilderFacts:
    """Return what `docker buildx inspect` printed of the builder of the settings; nothing of it where it did not answer.

    Raises:
        HostError: buildx has no builder of that name.

    """
    if missing := says_missing(settings, ran.err.decode("utf-8", "replace")):
        raise missing
    return read_builder(ran.out.decode("utf-8", "replace"))


def says_missing(settings: Settings, text: str) -> HostError | None:
    """Return the error for a named builder that buildx does not have, where `text`, which buildx printed, says so."""
    if not settings.builder or f'no builder "{settings.builder}" found' not in text:
        return None
    return HostError(
        f"buildx has no builder named {settings.builder}",
        where="--builder, or the setting `builder`",
        hint="`docker buildx ls` lists the existing ones; leave it out to use the engine's own",
    )


def require_able(settings: Settings, facts: BuilderFacts) -> None:
    """Check that buildx and the builder are new enough to build.

    Args:
        settings: say how the engine is called.
        facts: of the builder.

    Raises:
        HostError: one of them is too old.

    """
    ran = bounded([*settings.docker_command, "buildx", "version"], seconds=_VERSION_S, limit=1 << 16)
    # `github.com/docker/buildx v0.29.1 COMMIT`
    version = re.search(r"\bv?[0-9]+\.[0-9]+[\w.+~-]{0,60}", ran.out.decode("utf-8", "replace"), re.ASCII)
    if version is not None and older(version[0], BUILDX):
        raise HostError(
            f"buildx {version[0]} is too old to build with: it takes {BUILDX} or later",
            where="docker buildx version",
            hint="install a newer one: https://github.com/docker/buildx#installing; `envbuild doctor` looks",
        )
    for each in facts.buildkit:
        if older(each, BUILDKIT):
            raise HostError(
                f"the builder's BuildKit {each} is too old to build with: it takes {BUILDKIT} or later",
                where=settings.builder or "docker buildx inspect",
                hint="name another builder with --builder, or update this one",
            )


def _quantity(text: str | None, units: Mapping[str, float]) -> float | None:
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([a-zA-Z]{0,2})", text or "", re.ASCII)
    if found is None or found[2].lower() not in units:
        return None
    return float(found[1]) * units[found[2].lower()] or None


def _cpus(text: str) -> float | None:
    """Return how many cores a list such as `0-3,8` names."""
    count = 0
    for part in text.split(",") if text else ():
        found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part, re.ASCII)
        if found is None:
            return None
        count += max(0, int(found[2] or found[1]) - int(found[1]) + 1)
    return count or None


ASKED = "envbuild-machine"
"""The target that asks a builder for its cores and memory."""
_ANSWER = re.compile(r"cores ([0-9]{1,6})\nkib ([0-9]{1,12})\n", re.ASCII)


def asking(dockerfile: str, once: str) -> str:
    """Return a Dockerfile that ends in a target which holds what the builder says of its machine, in the file `machine`.

    buildx knows no builder's cores, so a step asks. It runs in the stage of the compilers, which is needed anyway.

    Args:
        dockerfile: the build's own.
        once: what no other run has, so that the answer comes from no cache.

    """
    return (
        f"{dockerfile.rstrip()}\n\nFROM builder AS {ASKED}-step\n"
        f"RUN --network=none : {once} && echo cores $(nproc) >/{ASKED}"
        f" && sed -n 's/^MemTotal: *\\([0-9]*\\) kB$/kib \\1/p' /proc/meminfo >>/{ASKED}\n\n"
        f"FROM scratch AS {ASKED}\nCOPY --from={ASKED}-step /{ASKED} /machine\n"
    )


def read_answer(text: str) -> Machine | None:
    """Return the machine that a step described, None where it did not."""
    found = _ANSWER.fullmatch(text)
    return Machine(cores=max(1, int(found[1])), memory_gib=int(found[2]) / 2**20) if found else None

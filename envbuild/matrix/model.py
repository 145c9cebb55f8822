"""The compatibility matrix as data: axes, releases and rules, as `matrices/*.toml` states them.

Nothing here decides anything: `spec` says what a constraint matches, `solve` chooses. Every release and every rule
carries its source; data without one does not load.
"""

import datetime as dt
import re
from typing import Annotated, Any, Literal

from envbuild.components import COMPONENTS
from envbuild.util.model import AfterValidator, Field, Model, NoFacts, model_validator
from envbuild.util.patterns import pattern

AxisName = str
Spec = str | tuple[str, ...]
"""A constraint on one axis: PEP 440 specifiers (`>=12.1,<13`), a prefix (`12.6`), names, or a list of alternatives."""

_SOURCE = pattern(
    r"""^(?:
        https?://\S+                       # a page
      | [A-Za-z0-9._-]+/[A-Za-z0-9._-]+@[^\s:]+(?::\S+)?   # owner/repo@ref:path
      | [A-Za-z0-9._-]+/[A-Za-z0-9._-]+\#\d+              # owner/repo#thread
      | PyPI:\S+                           # a distribution's own metadata or content, PyPI:name==version[:file]
      | Debian:\S+ | Ubuntu:\S+            # a distribution's package, Debian:suite/package
      | NGC:\S+                            # an NGC image's release notes, NGC:pytorch:25.03-py3
      | image:\S+                          # a fact read from an image's own configuration
      | evidence:\S+                       # a record under matrices/evidence
      | trial:[0-9a-f]{16}                 # a record under matrices/trials
      | run:\S.*                           # a command that was run, and on what
    )$""",
    re.VERBOSE,
)


def _check_source(value: str) -> str:
    if not _SOURCE.match(value):
        raise ValueError(
            f"source {value!r} is not of a known form: a URL, owner/repo@ref:path, owner/repo#number, PyPI:name==version, "
            "Debian:suite/package, NGC:image:tag, image:reference, evidence:id, trial:id or run:command"
        )
    return value


Source = Annotated[str, AfterValidator(_check_source)]


def _check_specifiers(value: str) -> str:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(value)
    except InvalidSpecifier:
        raise ValueError(f"{value!r} is not a PEP 440 specifier such as `>=1.24,<2`") from None
    return value


class Axis(Model):
    """One dimension of the matrix.

    `use` says when a cell has it: `always`; `default` (unless the request makes it impossible); `asked` (only when a flag
    or a stack names it); `host` (stated in addition to the cell, only when given, and no part of its id: the machine's driver and
    board, the image's flavor); `derived` (fixed by another axis' release). The host's architecture is stated likewise, and is
    part of the id where it is not x86_64.
    """

    name: AxisName = Field(pattern=r"^[a-z][a-z0-9-]*$")
    title: str
    about: str
    scheme: Literal["pep440", "name"]
    use: Literal["always", "default", "asked", "host", "derived"]
    dated: bool = False
    """Whether this axis' release dates count in the spread of a cell."""
    open: bool = False
    """Whether a version that is not listed may be asked for (an exact driver version)."""


class CudaFacts(Model):
    driver_full: dict[str, str] = {}
    """Toolkit update -> lowest Linux driver with every feature of it, e.g. {"12.6.3": "560.35.05"}."""
    driver_minor: str | None = None
    """The floor of minor-version compatibility for this major."""
    compat_branches: tuple[str, ...] = ()
    """Driver branches that the cuda-compat package of this release supports (data-center GPUs)."""


class NvccFacts(Model):
    archs: tuple[str, ...]
    """SM numbers that ptxas accepts, e.g. ("80", "90", "90a")."""
    pypi: str | None = None
    """Version of PyPI's `cuda-toolkit` whose wheels hold a working nvcc, if they do."""


class GpuFacts(Model):
    sm: str = Field(pattern=r"^\d+$")
    names: tuple[str, ...] = ()
    """Data-center and workstation boards, as NVIDIA's page of compute capabilities calls them."""
    data_center: bool = True
    geforce: tuple[str, ...] = ()
    """GeForce and TITAN boards, likewise; cuda-compat supports none of them, whatever its architecture."""
    workstation: tuple[str, ...] = ()
    """Those of `names` that are workstation boards, and what people write for them; cuda-compat supports some of them."""
    first_driver: str | None = None
    """The first driver branch that knows the architecture, e.g. 570."""
    last_driver: str | None = None
    """The last driver branch that knows it, where NVIDIA dropped it from later ones."""
    aarch64: tuple[str, ...] = ()
    """Those of `names` that share a board or a chip with an Arm processor: their hosts are aarch64."""
    open_modules: Source | None = None
    """Where it is stated that the driver must be of NVIDIA's open kernel modules; None where either kind will do."""
    open_modules_on: tuple[str, ...] = ()
    """Those of `aarch64` that `open_modules` speaks of, where it is not every board."""

    @property
    def sms(self) -> tuple[str, ...]:
        """The SM numbers that a cell with it is compiled for: its own."""
        return (self.sm,)


class OsFacts(Model):
    suite: str
    """Archive suite, e.g. bookworm or noble."""
    python: str
    """major.minor of the OS's own Python, e.g. 3.11."""


class BaseFacts(Model):
    kind: Literal["root", "nvidia-cuda", "ngc"]
    builder: str | None = None
    """Image reference (repository:tag) of the builder; None for a root that envbuild bootstraps."""
    runtime: str | None = None
    """Image reference of the slim runtime; None for a bootstrapped root."""
    digests: dict[str, str] = {}
    """Image reference -> sha256 digest of its linux/amd64 manifest, where a lock of x86_64 may take it from."""


class ManagedPython(Model):
    managed: str
    """python-build-standalone archive URL (install_only_stripped), as uv lists it."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class PythonFacts(Model):
    managed: str | None = None
    """python-build-standalone archive URL for x86_64 Linux (install_only_stripped), as uv lists it."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    build: str | None = None
    """Full version of that build, e.g. 3.12.11."""
    aarch64: ManagedPython | None = None
    """The same build for aarch64 Linux."""


FACTS: dict[AxisName, type[Model]] = {
    "cuda": CudaFacts,
    "nvcc": NvccFacts,
    "gpu": GpuFacts,
    "os": OsFacts,
    "base": BaseFacts,
    "python": PythonFacts,
    **{axis: component.facts for axis, component in COMPONENTS.items() if component.facts is not NoFacts},
}
"""What a release of each axis states beyond its relations; axes not named here state nothing more."""


class Release(Model):
    """One version on an axis, with what it needs of other axes and what it fixes on derived ones."""

    version: str
    source: Source
    date: dt.date | None = None
    aliases: tuple[str, ...] = ()
    commit: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")
    needs: dict[AxisName, Spec] = {}
    """Constraints on other axes, where those are in use."""
    with_: tuple[AxisName, ...] = Field(default=(), alias="with")
    """Axes that must be in use together with this release."""
    without: tuple[AxisName, ...] = ()
    """Axes that must not be in use together with this release."""
    fixes: dict[AxisName, str] = {}
    """The value that this release gives to derived axes."""
    facts: Any = None
    """An instance of `FACTS[axis]`; the loader validates it."""
    asked: bool = False
    """Taken only when a pin on its own axis names it (`any` and `auto` do not): nothing prefers it by itself."""
    note: str | None = None


class Rule(Model):
    """One relation between axes.

    `requires` refuses a cell; `inert` says that `component` would be ignored and refuses a cell that holds it;
    `tested-with` only ranks; `note` says what to know of a cell. A rule applies where every axis of `when` is in use and
    matches. It then demands all of `needs`, one whole alternative of `any_of` (both hold for an axis that is not in use),
    the axes in `with`, none of `without`, and one major.minor on those axes of `same` that are in use. An `inert` rule
    applies only together with its `component`, and a `note`, which demands nothing, where none of `without` is in use.
    """

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    kind: Literal["requires", "inert", "tested-with", "note"]
    topic: str
    """The class of rule, e.g. driver-floor, gpu-arch, nvcc-equals-torch, fa3-lookup."""
    when: dict[AxisName, Spec] = {}
    needs: dict[AxisName, Spec] = {}
    any_of: tuple[dict[AxisName, Spec], ...] = ()
    with_: tuple[AxisName, ...] = Field(default=(), alias="with")
    without: tuple[AxisName, ...] = ()
    same: tuple[AxisName, ...] = ()
    component: AxisName | None = None
    of_wheel: bool = False
    """Whether it is about a wheel on PyPI that a stack does without: the stack's repository is in its place."""
    why: str
    source: Source

    @model_validator(mode="after")
    def _shape(self) -> "Rule":
        demands = bool(self.needs or self.any_of or self.with_ or self.without or self.same)
        if self.kind == "note":
            if not self.when or self.needs or self.any_of or self.with_ or self.same:
                raise ValueError(f"rule {self.id}: a note has `when`, perhaps `without`, and no other condition")
        elif self.kind != "tested-with" and not demands:
            raise ValueError(
                f"rule {self.id}: a {self.kind} rule must require something (needs, any_of, with, without or same)"
            )
        if self.kind == "tested-with" and (len(self.when) < 2 or demands):
            raise ValueError(f"rule {self.id}: a tested-with rule names at least two axes in `when`, and nothing else")
        if (self.kind == "inert") != (self.component is not None):
            raise ValueError(f"rule {self.id}: `component` is only for kind inert")
        return self

    @property
    def refuses(self) -> bool:
        """Whether a cell that breaks it is refused."""
        return self.kind in {"requires", "inert"}


class AxisFile(Model):
    """One file of `matrices/`: an axis, its releases (oldest first; for names, preferred first) and rules."""

    axis: Axis
    release: tuple[Release, ...] = ()
    rule: tuple[Rule, ...] = ()


class RuleFile(Model):
    """`matrices/rules.toml`: relations that belong to no single axis."""

    rule: tuple[Rule, ...]


class Cap(Model):
    """A bound on a Python distribution that no axis stands for, where the axes of `when` are in use and match."""

    distribution: str = Field(pattern=r"^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$")
    spec: Annotated[str, AfterValidator(_check_specifiers)]
    """PEP 440 specifiers, e.g. `<2`."""
    when: dict[AxisName, Spec] = Field(min_length=1)
    why: str
    source: Source


class Impostor(Model):
    """A distribution on PyPI that has a component's name and is something else; it must never be installed."""

    distribution: str
    instead: str
    """Where the real one comes from."""
    why: str
    source: Source


class PackagesFile(Model):
    """`matrices/packages.toml`: caps and impostors for the step that locks Python packages."""

    cap: tuple[Cap, ...] = ()
    impostor: tuple[Impostor, ...] = ()

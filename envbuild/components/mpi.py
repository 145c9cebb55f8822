"""The MPI of launchers and of mpi4py: the OS' package, or Open MPI compiled from its release."""

from envbuild.components.base import Component, Download, Sources, View
from envbuild.util.model import Field, Model


class MpiFacts(Model):
    package: str | None = None
    """The OS package, when it comes from the OS."""
    also: dict[str, tuple[str, ...]] = {}
    """What else it takes on a release of the os axis, whose package does not depend on it."""
    url: str | None = None
    """The source archive, when it is compiled; with `sha256`, `prefix` and `configure`."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    prefix: str | None = Field(default=None, pattern=r"^/[A-Za-z0-9_./-]+$")
    """Where it is installed, in the builder and in the image."""
    configure: tuple[str, ...] = ()
    """Arguments of its configure script, besides the prefix."""
    needs_packages: tuple[str, ...] = ()
    """OS packages that its build needs besides the compilers."""
    environment: dict[str, dict[str, str]] = {}
    """Variables that a process under it needs, by the release of the os axis whose package it is."""


class Mpi(Component):
    """An MPI implementation."""

    axis = "mpi"
    place = 90
    facts = MpiFacts
    ran = False

    def sources(self, view: View) -> Sources:
        facts: MpiFacts = view.release("mpi").facts
        return Sources(files=(Download(name="mpi", url=facts.url, sha256=facts.sha256),) if facts.url else ())

    def environment(self, view: View, *, site: str, devel: bool) -> dict[str, str]:
        del site, devel
        facts: MpiFacts = view.release("mpi").facts
        return facts.environment.get(view.versions["os"], {})


component = Mpi()

"""Whether this engine makes and runs what is for another processor: an image is for one kind."""

from envbuild.engine.client import EngineClient
from envbuild.errors import HostError
from envbuild.matrix.cell import DEBIAN_ARCH, Cell


def platform_of(cell: Cell) -> str:
    """Return the platform of a cell's image as Docker names it, e.g. linux/arm64."""
    return f"linux/{DEBIAN_ARCH[cell.arch]}"


def require_platform(client: EngineClient, cell: Cell) -> None:
    """Check that the builder makes images for the cell's processor, and that the engine runs them, which the audit needs.

    The engine's own processor costs no question; another one must be among the platforms that the builder and the engine
    list, which they do where they emulate it.

    Raises:
        HostError: it is not.

    """
    wanted, here = platform_of(cell), client.machine().platform
    if here in {"", wanted}:
        return
    builder = client.settings.builder
    makers = client.platforms(builder)
    if wanted not in makers:
        raise HostError(
            f"the cell is for {cell.arch} ({wanted}), and the builder makes images for {', '.join(makers) or here}",
            where=builder or here,
            hint=f"build on a machine with an {cell.arch} processor, or let this one emulate it (QEMU and binfmt_misc), "
            "which is many times slower",
        )
    if builder and wanted not in client.platforms():
        raise HostError(
            f"the builder {builder} makes images for {wanted}, and this engine ({here}) cannot run one to audit it",
            where=builder,
            hint="name the engine of that machine instead: docker context use, or DOCKER_HOST",
        )

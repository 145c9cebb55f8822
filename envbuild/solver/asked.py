"""A request read against the matrix: which values each pin leaves, and what the pins let in by naming it."""

from collections.abc import Iterable, Mapping, Sequence

from envbuild.components import CHOICES, absent
from envbuild.errors import UsageError
from envbuild.matrix.cell import ARCHITECTURE, AUTO, NONE, Pin, Request
from envbuild.matrix.fleet import GPU, fleet_of, names_fleet, pieces
from envbuild.matrix.load import Matrix, without_wheels
from envbuild.matrix.model import AxisName, Release
from envbuild.matrix.spec import check_spec, check_text, matches, version_key
from envbuild.matrix.spelling import (
    board_of,
    has_arm_host,
    is_data_center,
    is_geforce,
    spellings,
    unlisted_gpu,
)
from envbuild.solver.clauses import UNUSED, Clauses, compile_matrix
from envbuild.util.frozen import Frozen, replace
from envbuild.util.patterns import pattern

_ARM = "aarch64"
_NO_DRIVER = pattern(r"(1[0-9]|9)\.\d")
"""What nvidia-smi prints as the version of CUDA."""

ANY = "any"
"""A synonym of `auto` in a pin."""


def is_open_pin(pin: Pin) -> bool:
    """Return whether `pin` asks for its axis without saying which release."""
    return pin.spec in {AUTO, ANY}


class ReadRequest(Frozen):
    """A request read against the matrix."""

    compiled: Clauses
    """The matrix, with what the pins name let in."""
    request: Request
    masks: tuple[tuple[Pin, int, int], ...]
    """Each pin with its axis number and the values it leaves."""
    added: Mapping[AxisName, Release]
    guarded: Clauses
    """The matrix with every release kept out that is taken only when a pin names it."""

    def pinned(self, pins: Sequence[Pin] | None = None) -> dict[int, int]:
        """Return axis -> values that `pins` (all by default) leave together."""
        result: dict[int, int] = {}
        for pin, axis, mask in self.masks:
            if pins is None or pin in pins:
                result[axis] = result.get(axis, mask) & mask
        return result

    def of(self, pins: Sequence[Pin]) -> tuple[Clauses, list[int]]:
        """Return the clauses and domains of a request with only `pins`, some of this one's."""
        return _with_named(self.guarded, pins), self.guarded.domains(self.pinned(pins))


def _near(word: str, choices: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, choices, n=4, cutoff=0.4)
    return ", ".join(close or list(choices)[-6:])


def _held(matrix: Matrix, axis: AxisName) -> Sequence[Release]:
    """Return the releases of an axis that some cell has when they alone are named, or all where none is so."""
    from envbuild.solver.search import solvable

    guarded = compile_matrix(matrix)
    number = guarded.number[axis]
    compiled = guarded.without_guards({number: guarded.full[number]} if number in guarded.guards else {})
    held = [
        release
        for release in matrix.releases[axis]
        if solvable(compiled, compiled.domains({number: compiled.mask(number, release.version)}))
    ]
    return held or matrix.releases[axis]


def no_release(matrix: Matrix, axis: AxisName, spec: str, origin: str) -> UsageError:
    """Return the error that no release of `axis` matches `spec`, which `origin` asks for."""
    names = [name for release in _held(matrix, axis) for name in (release.version, *release.aliases)]
    named = ""
    if _is_update(matrix, axis, spec):
        named = f"CUDA is named by major.minor; `--nvcc {spec}` asks for an update of it; "
    elif axis == "python" and spec.count(".") == 2:
        named = "Python is named by major.minor; "
    elif axis in CHOICES:
        named = f"without {origin}, or with `{absent(axis)}`, nothing of {CHOICES[axis]} is left out; "
    why = unlisted_gpu(spec) if axis == GPU else None
    return UsageError(
        f"no release of {axis} matches {spec!r}" + (f": {why}" if why else ""),
        where=origin,
        hint=named + ("" if why else f"similar: {_near(spec, names)}; ") + f"`envbuild matrix {axis}` lists them all",
    )


def _is_update(matrix: Matrix, axis: AxisName, spec: str) -> bool:
    """Return whether `spec` names an update of CUDA, as nvcc's releases do: `12.6.3`, and `12.6.0` too."""
    return axis == "cuda" and any(release.version == spec for release in matrix.releases.get("nvcc", ()))


def _check_driver(matrix: Matrix, pin: Pin) -> None:
    """Raise UsageError where a driver is asked for by a number that is none of any driver."""
    if pin.axis == "driver" and _NO_DRIVER.fullmatch(pin.spec) and not _is_listed(matrix, pin):
        raise UsageError(
            f"{pin.spec} is not a driver version",
            where=pin.origin,
            hint="nvidia-smi prints it after 'Driver Version', such as 560.35.05; what stands after 'CUDA Version' is --cuda",
        )


def matching(matrix: Matrix, name: AxisName, spec: str, origin: str) -> Sequence[Release]:
    """Return the releases of an axis that `spec` matches, in whichever spelling a flag may have.

    Raises:
        UsageError: there is none, or `spec` can be no constraint.

    """
    axis, listed = matrix.axes[name], matrix.releases[name]
    check_text(name, spec, origin)
    for text in (spec, *spellings(axis, spec, listed)):
        if found := [release for release in listed if matches(axis, text, release)]:
            return found
    check_spec(axis, spec, origin, listed)
    raise no_release(matrix, name, spec, origin)


def _with_named(guarded: Clauses, pins: Iterable[Pin]) -> Clauses:
    named: dict[int, int] = {}
    for pin in pins:
        axis = guarded.number[pin.axis]
        if mask := guarded.named(axis, pin.spec):
            named[axis] = named.get(axis, 0) | mask
    return guarded.without_guards(named)


def _with_arch(matrix: Matrix, request: Request) -> Request:
    """Add what a GPU's name says of its host: the processor of a GH200 is aarch64.

    Raises:
        UsageError: the request asks for that GPU in a machine of another architecture.

    """
    if ARCHITECTURE not in matrix.axes or GPU not in matrix.axes:
        return request
    axis, listed = matrix.axes[ARCHITECTURE], matrix.releases[ARCHITECTURE]
    stated = [pin for pin in request.pins if pin.axis == ARCHITECTURE]
    arm: list[Pin] = []
    for pin in request.pins:
        if pin.axis != GPU or is_open_pin(pin) or pin.spec == NONE:
            continue
        on_arm = {piece: _has_arm_host(matrix, piece) for piece in pieces(pin.spec)}
        if not any(on_arm.values()):
            continue
        if not all(on_arm.values()) and not stated:
            without = next(piece for piece, arm in on_arm.items() if not arm)
            raise UsageError(
                f"one image cannot serve hosts of two architectures: {pin.spec} names a GPU whose host is {_ARM}, and {without}",
                where=pin.origin,
                hint=f"make two images, or add --arch {_ARM} where every host is {_ARM}",
            )
        for other in stated:
            if not any(release.version == _ARM and matches(axis, other.spec, release) for release in listed):
                if is_open_pin(other):
                    continue
                raise UsageError(
                    f"{pin.spec} has a host of {_ARM}, and {other.origin} asks for {other.spec}",
                    where=pin.origin,
                    hint=f"leave {other.origin} out, or name another GPU",
                )
        arm.append(Pin(axis=ARCHITECTURE, spec=_ARM, origin=f"{pin.origin} {pin.spec}"))
    kept = tuple(pin for pin in request.pins if not (arm and pin.axis == ARCHITECTURE))
    return replace(request, pins=(*kept, *dict.fromkeys(arm))) if arm else request


def _has_arm_host(matrix: Matrix, text: str) -> bool:
    """Return whether each GPU that `text` names has an Arm processor of its host."""
    axis, listed = matrix.axes[GPU], matrix.releases[GPU]
    named = [release for release in listed if matches(axis, text, release)]
    named = named or [each for spec in spellings(axis, text, listed) for each in listed if matches(axis, spec, each)]
    return bool(named) and all(has_arm_host(release, text) for release in named)


def _is_listed(matrix: Matrix, pin: Pin) -> bool:
    """Return whether an open axis lists what is asked: the very release, or a branch (`535`) of which it lists some."""
    return matrix.has(pin.axis, pin.spec) or (
        "." not in pin.spec and any(matches(matrix.axes[pin.axis], pin.spec, r) for r in matrix.releases[pin.axis])
    )


def _with_board(matrix: Matrix, request: Request) -> Request:
    """Add what a GPU's name says besides its architecture: an RTX 4090 is sm_89 and a GeForce board.

    Raises:
        UsageError: the board that is asked for is another one.

    """
    gpus = [pin for pin in request.pins if pin.axis == GPU]
    if not gpus or "board" not in matrix.axes:
        return request
    stated = [pin for pin in request.pins if pin.axis == "board" and not is_open_pin(pin)]
    for pin, board in ((pin, board) for pin in gpus for board in stated):
        if any(
            _is_other(matrix, release, piece, board.spec)
            for release in matrix.releases[GPU]
            for piece in pieces(pin.spec)
        ):
            raise UsageError(
                f"{pin.spec} is no {board.spec} board, which {board.origin} asks for",
                where=pin.origin,
                hint=f"leave {board.origin} out, or name another GPU",
            )
    if any(pin.axis == "board" for pin in request.pins):
        return request
    with_driver = any(pin.axis == "driver" for pin in request.pins)
    named = []
    for pin in gpus:
        boards = {
            found
            for release in matrix.releases[GPU]
            for piece in pieces(pin.spec)
            if (found := board_of(release, piece, matrix.releases["board"]))
        }
        # of a fleet, what rules something out counts; a board by itself matters only to a driver
        ruled_out = [each for each in ("geforce", "workstation") if each in boards]
        only = [*boards] if len(boards) == 1 and not names_fleet(pin.spec) else []
        kind = next(iter([*ruled_out, *only]), None)
        if kind and matrix.has("board", kind) and (with_driver or kind == "geforce"):
            named.append(Pin(axis="board", spec=kind, origin=f"{pin.origin} {pin.spec}"))
    return replace(request, pins=(*request.pins, *named)) if named else request


def _is_other(matrix: Matrix, release: Release, text: str, board: str) -> bool:
    """Return whether `text` names a board that is no `board`; a workstation board may be one that NVIDIA supports as data-center."""
    if board == "data-center":
        return is_geforce(release, text)
    named = board_of(release, text, matrix.releases["board"])
    if board in {"geforce", "workstation"}:
        return named != board and (is_data_center(release, text) or is_geforce(release, text))
    return named is not None and named not in {board, "data-center"}


def _spelled(compiled: Clauses, pin: Pin) -> Pin:
    """Return the pin in a listed spelling, where it matches nothing as it is and another spelling does."""
    if pin.axis in CHOICES and pin.spec.casefold() == absent(pin.axis):
        return replace(pin, spec=NONE)
    number = compiled.number[pin.axis]
    if is_open_pin(pin) or pin.spec == NONE or compiled.pinned(number, pin.spec):
        return pin
    for spec in spellings(compiled.axes[number], pin.spec, compiled.values[number]):
        if compiled.pinned(number, spec):
            return replace(pin, spec=spec)
    return pin


def _fleets(matrix: Matrix, request: Request) -> dict[Pin, Release]:
    """Return what each pin means that names several GPUs: a fleet, or one architecture where all are of it.

    Raises:
        UsageError: a piece names no GPU or several, or two pins name different fleets.

    """
    found: dict[Pin, Release] = {}
    for pin in request.pins:
        if pin.axis == GPU and names_fleet(pin.spec):
            named = [_one_gpu(matrix, piece, pin) for piece in pieces(pin.spec)]
            found[pin] = fleet_of(named, pin.spec)
    versions = {release.version: pin for pin, release in found.items()}
    if len(versions) > 1:
        one, other, *_ = versions.values()
        raise UsageError(
            f"{other.origin} asks for {other.spec}, and {one.origin} for {one.spec}",
            where=other.origin,
            hint="an image is for one fleet: leave one of the two out",
        )
    return found


def _one_gpu(matrix: Matrix, text: str, pin: Pin) -> Release:
    axis, listed = matrix.axes[GPU], matrix.releases[GPU]
    plain = not (is_open_pin(replace(pin, spec=text)) or text == NONE or set(text) & set("*?[!"))
    for spec in (text, *spellings(axis, text, listed)) if plain and text else ():
        named = [release for release in listed if matches(axis, spec, release)]
        if len(named) == 1:
            return named[0]
    names = [name for release in listed for name in (release.version, *release.aliases)]
    why = unlisted_gpu(text) if text else None
    raise UsageError(
        f"{text!r} in {pin.spec!r} names no GPU of the matrix" + (f": {why}" if why else "")
        if text
        else f"{pin.spec!r} has an empty place between its commas",
        where=pin.origin,
        hint="name each GPU of the fleet, such as a100,h100,b200"
        + (f"; similar: {_near(text, names)}" if text and not why else ""),
    )


def read_request(matrix: Matrix, request: Request) -> ReadRequest:
    """Read every pin.

    Raises:
        UsageError: a pin names an axis that does not exist, or matches no release of it.

    """
    if request.repository:
        matrix = without_wheels(matrix)
    request = _with_board(matrix, request)
    added: dict[AxisName, Release] = {}
    for pin in request.pins:
        axis = matrix.axes.get(pin.axis)
        if axis is None:
            raise UsageError(
                f"there is no axis {pin.axis!r}",
                where=pin.origin,
                hint=f"similar: {_near(pin.axis, list(matrix.axes))}; `envbuild matrix list` lists the axes",
            )
        check_text(pin.axis, pin.spec, pin.origin)
        _check_driver(matrix, pin)
        if axis.open and version_key(pin.spec) and not _is_listed(matrix, pin):
            added[pin.axis] = Release(version=pin.spec, source=f"run:asked as {pin.origin}")
    fleets = _fleets(matrix, request) if GPU in matrix.axes else {}
    for release in fleets.values():
        if not matrix.lists(GPU, release.version):
            added[GPU] = release
    compiled = compile_matrix(matrix, added)
    request = _with_arch(matrix, replace(request, pins=tuple(_spelled(compiled, pin) for pin in request.pins)))
    masks = []
    for pin in dict.fromkeys(request.pins):
        number = compiled.number[pin.axis]
        if pin.spec == NONE:
            mask = UNUSED
        elif is_open_pin(pin):
            mask = compiled.real[number]
        else:
            mask = (
                1 << compiled.position[number][fleets[pin].version]
                if pin in fleets
                else compiled.pinned(number, pin.spec)
            )
            if not mask:
                check_spec(compiled.axes[number], pin.spec, pin.origin, matrix.releases[pin.axis])
            if pin.axis in added and pin.spec == added[pin.axis].version:
                mask = 1 << compiled.position[number][pin.spec]  # exactly the host's driver, not a listed 560.28.3.x
            # a file may write 12.6.0 for 12.6
            if not mask or (pin.origin.startswith("-") and _is_update(matrix, pin.axis, pin.spec)):
                raise no_release(matrix, pin.axis, pin.spec, pin.origin)
        masks.append((pin, number, mask))
    return ReadRequest(
        compiled=_with_named(compiled, request.pins),
        request=request,
        masks=tuple(masks),
        added=added,
        guarded=compiled,
    )

"""cell -> lock: the one place that looks up the inputs at indexes, upstreams, archives and registries.

Who only reads a lock (`render`) waits for none of what asks, so those modules load where they are used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from envbuild.components import AXIS_OF_DISTRIBUTION, COMPONENTS
from envbuild.components.base import Sdist
from envbuild.errors import HostError, LockError
from envbuild.lock.compat import find_file, likely_file
from envbuild.lock.files import Locked
from envbuild.lock.inputs import Inputs, PythonGroup
from envbuild.lock.model import (
    COMPAT,
    BaseImage,
    FileSource,
    GitSource,
    Kind,
    Lock,
    Missing,
    OsPackage,
    OsSet,
    PythonSet,
    Root,
)
from envbuild.lock.sdists import requires_dist, sdist_url
from envbuild.lock.unlocked import root_epoch, unlocked, uv_wheel
from envbuild.matrix.cell import DEBIAN_ARCH
from envbuild.matrix.load import Matrix
from envbuild.stacks.parts import digest_of
from envbuild.util.names import shown

if TYPE_CHECKING:
    from envbuild.settings import Settings

__all__ = ["OsSide", "make_lock", "unlocked", "uv_wheel"]

Note = Callable[[str], None]

# SOURCE_DATE_EPOCH of an image: 1980-01-01, the first date that a zip file can hold. The export sets whatever is newer to it.
# A lock's own day would not do: a stage that another lock built the day before comes from the cache with that day's times,
# older than the lock, and they would stay.
EPOCH = 315532800


def make_lock(settings: "Settings", matrix: Matrix, inputs: Inputs, *, note: Note, epoch: int = EPOCH) -> Locked:
    """Pin every input of a cell.

    What cannot be reached is listed in the lock's `missing`, each with the host that holds it; everything else is pinned.

    Args:
        settings: where to ask.
        matrix: the data that the cell was chosen from.
        inputs: what the cell is made of.
        note: called with what is being looked up.
        epoch: SOURCE_DATE_EPOCH, seconds since 1970.

    Raises:
        LockError: an answer contradicts a pin, or requirements cannot be satisfied.
        HostError: a tool is missing on this machine (apt-get, git).

    """
    return _Maker(settings, matrix, inputs, note, epoch).run()


@dataclass(frozen=True, kw_only=True)
class OsSide:
    """The OS side of a lock: the root, and what stages add to it."""

    root: Root | None
    os: tuple[OsSet, ...]


def current_os(settings: "Settings", matrix: Matrix, inputs: Inputs) -> OsSide:
    """Return the OS side as the archive has it now.

    Raises:
        ArchiveError: the archive cannot be reached or cannot serve now.
        LockError: the archive does not have a package.

    """
    maker = _Maker(settings, matrix, inputs, lambda _: None, 0)
    root, sets = maker.os_side()
    return OsSide(root=root, os=sets)


class _Maker:
    def __init__(self, settings: "Settings", matrix: Matrix, inputs: Inputs, note: Note, epoch: int) -> None:
        self.settings = settings
        self.matrix = matrix
        self.inputs = inputs
        self.note = note
        self.epoch = epoch
        self.missing: list[Missing] = []
        self.unreached = False
        self.pylocks: dict[str, str] = {}

    def run(self) -> Locked:
        inputs, cell = self.inputs, self.inputs.cell
        images = tuple(self._image(image) for image in inputs.images)
        root, os_sets = self._os()
        files = tuple(self._sdist(s) for s in inputs.sdists)
        trees = tuple(self._tree(i) for i in range(len(inputs.trees)))
        python = self._python(files)
        lock = Lock(
            cell=dict(cell.versions),
            commits=dict(cell.commits),
            matrix=self.matrix.digest,
            flavor=inputs.flavor,
            stack=inputs.stack.name if inputs.stack else None,
            stack_digest=digest_of(inputs.stack) if inputs.stack else None,
            te_source=inputs.te_source,
            components=tuple(c.axis for c in inputs.components),
            epoch=self.epoch,
            uv=uv_wheel(cell.arch),
            images=images,
            root=root,
            os=os_sets,
            python=python,
            sources=trees,
            files=(*files, *(self._file(f) for f in inputs.files), *self._compat()),
            missing=tuple(self.missing),
        )
        return Locked(lock=lock, pylocks=self.pylocks, fresh=True, unreached=self.unreached)

    def _miss(self, kind: Kind, what: str, error: Exception, host: str, *stages: str, component: str = "") -> None:
        self.unreached = self.unreached or isinstance(error, HostError)
        why = shown(str(error).splitlines()[0], 1000)
        self.missing.append(
            Missing(what=shown(what, 2000), host=shown(host), why=why, component=component, kind=kind, stages=stages)
        )

    def _image(self, image: BaseImage) -> BaseImage:
        from envbuild.net.registry import find_digest, parse_reference

        if image.digest:
            return image
        self.note(f"looking up the digest of {image.reference}")
        host = parse_reference(image.reference).host
        try:
            digest = find_digest(image.reference, settings=self.settings)
        except HostError as error:
            self._miss("image", f"digest of {image.reference} ({image.stage})", error, host, image.stage)
            return image
        if digest is None:
            raise LockError(
                f"{host} has no image {image.reference}", hint="see which tags it lists, or choose another base"
            )
        return image.model_copy(update={"digest": digest})

    def os_side(self) -> tuple[Root | None, tuple[OsSet, ...]]:
        from envbuild.lock.apt import resolve_on_image, resolve_os_packages

        inputs = self.inputs
        suite = self.matrix.release("os", inputs.cell.versions["os"]).facts.suite
        arch = DEBIAN_ARCH[inputs.cell.arch]
        base: tuple[OsPackage, ...] = ()
        renewed: tuple[OsPackage, ...] = ()
        if inputs.root_suite:
            base = resolve_os_packages(self.settings, suite=suite, packages=(), arch=arch)
            runtime = resolve_os_packages(
                self.settings, suite=suite, packages=inputs.os_runtime, installed=base, arch=arch
            )
        else:
            runtime, renewed = resolve_on_image(self.settings, suite=suite, packages=inputs.os_runtime, arch=arch)
        builder: tuple[OsPackage, ...] = ()
        if inputs.os_builder:
            builder = resolve_os_packages(
                self.settings, suite=suite, packages=inputs.os_builder, installed=(*base, *runtime), arch=arch
            )
        sets = (
            OsSet(name="runtime", wanted=inputs.os_runtime, packages=runtime, renewed=renewed),
            OsSet(name="builder", wanted=inputs.os_builder, packages=builder, renewed=renewed),
        )
        root = Root(suite=suite, epoch=root_epoch(self.matrix, inputs), packages=base) if inputs.root_suite else None
        return root, sets

    def _os(self) -> tuple[Root | None, tuple[OsSet, ...]]:
        from envbuild.lock.apt import ArchiveError
        from envbuild.lock.archives import mirrors_of

        inputs = self.inputs
        suite = self.matrix.release("os", inputs.cell.versions["os"]).facts.suite
        self.note(f"resolving OS packages on {suite}")
        try:
            return self.os_side()
        except (ArchiveError, LockError) as error:
            mirror, _ = mirrors_of(self.settings, suite, DEBIAN_ARCH[inputs.cell.arch])
            wanted = ", ".join((*inputs.os_runtime, *inputs.os_builder))
            bases = [image.stage for image in inputs.images] or ["base"]
            self._miss("os", f"OS packages on {suite}: {wanted}", error, urlsplit(mirror).hostname or suite, *bases)
            sets = (OsSet(name="runtime", wanted=inputs.os_runtime), OsSet(name="builder", wanted=inputs.os_builder))
            return (Root(suite=suite, epoch=root_epoch(self.matrix, inputs)) if inputs.root_suite else None), sets

    def _sdist(self, sdist: Sdist) -> FileSource:
        from envbuild.lock.index import files_of
        from envbuild.net.address import place_of

        self.note(f"looking up the source of {sdist.distribution} {sdist.version}")
        suffix = f"-{sdist.version}.tar.gz"
        try:
            files = files_of(self.settings, sdist.distribution)
        except HostError as error:
            self._miss(
                "sdist",
                f"source of {sdist.distribution} {sdist.version}",
                error,
                urlsplit(self.settings.index_url).hostname or "index",
                f"src-{sdist.name}",
            )
            return FileSource(name=sdist.name, url=sdist_url(sdist))
        for file in files:
            if file.filename.endswith(suffix) and file.sha256:
                return FileSource(name=sdist.name, url=file.url, sha256=file.sha256)
        refused = files.why_not(suffix)
        raise LockError(
            f"the index has no source of {sdist.distribution} {sdist.version} with a hash"
            + (f" that can be used; it lists {refused}" if refused else ""),
            where=place_of(self.settings.index_url),
            hint=f"see which versions it lists, or build {sdist.name} from git",
        )

    def _file(self, file: FileSource) -> FileSource:
        if file.sha256 is None:
            host = urlsplit(file.url).hostname or file.url
            why = "the matrix knows no hash of it, so another release is the way"
            what = f"hash of {file.url.rsplit('/', 1)[-1]}"
            self.missing.append(Missing(what=what, host=host, why=why, kind="file", stages=(f"src-{file.name}",)))
        return file

    def _compat(self) -> tuple[FileSource, ...]:
        compat, arch = self.inputs.compat, self.inputs.cell.arch
        if compat is None:
            return ()
        self.note(f"looking up the package {compat.package}")
        try:
            return (find_file(self.settings, compat, arch),)
        except HostError as error:
            host = urlsplit(self.settings.cuda_repository).hostname or "NVIDIA's repository"
            self._miss("file", f"OS package {compat.package}", error, host, f"src-{COMPAT}")
            return (likely_file(self.matrix, compat, arch),)

    def _tree(self, number: int) -> GitSource:
        from envbuild.lock.objects import NotAllowedError
        from envbuild.lock.sources import SourceStore

        wanted = self.inputs.trees[number]
        self.note(f"pinning the source of {wanted.name} at {wanted.commit[:12]}")
        store = SourceStore(settings=self.settings, note=self.note)
        try:
            return store.pin(wanted)
        except (HostError, NotAllowedError) as error:
            plain = GitSource(name=wanted.name, url=wanted.url, commit=wanted.commit)
            folder = store.plain_folder(plain)
            if folder is not None:
                return plain.model_copy(update={"tree": store.tree_of(folder)})
            if isinstance(error, NotAllowedError):
                raise
            host = urlsplit(wanted.url).hostname or wanted.url
            what = f"source tree of {wanted.name} at {wanted.commit}"
            self._miss("tree", what, error, host, f"src-{wanted.name}", component=wanted.name)
            return plain

    def _python(self, files: tuple[FileSource, ...]) -> tuple[PythonSet, ...]:
        from envbuild.lock import python as pylock

        cell = self.inputs.cell
        glibc = cell.versions["glibc"]
        sets: list[PythonSet] = []
        held: list[str] = []
        torch_is_missing = False
        for group in self.inputs.python:
            # The environment grows on torch's set; tools and toolchain are in separate folders.
            shared = group.name == "env"
            asked = self._with_requirements_of(group, files) if shared else group
            if not asked.requirements:
                sets.append(PythonSet(name=group.name, requirements=()))
                continue
            if shared and torch_is_missing:  # by itself it would take another torch
                self._miss_set(asked, HostError("it grows on the torch packages, which are missing"))
                sets.append(PythonSet(name=group.name, requirements=asked.requirements, index=group.index))
                continue
            self.note(f"resolving the {group.name} packages")
            shared_env = group.name in {"torch", "env"}
            constraints = [*_caps(self.matrix, self.inputs, compiling=not shared_env), *(held if shared else ())]
            without = [line.split("==")[0] for line in held] if shared else []
            try:
                text, found = pylock.resolve(
                    self.settings,
                    asked,
                    python=cell.versions["python"],
                    glibc=glibc,
                    machine=cell.arch,
                    constraints=constraints,
                    without=without,
                    excludes=self.inputs.provided,
                )
            except HostError as error:
                self._miss_set(asked, error)
                torch_is_missing = torch_is_missing or group.name == "torch"
                sets.append(PythonSet(name=group.name, requirements=asked.requirements, index=group.index))
                continue
            self.pylocks[group.name] = text
            sets.append(found)
            if group.name == "torch":
                held = [f"{p.name}=={p.version}" for p in found.packages]
        return tuple(sets)

    def _miss_set(self, group: PythonGroup, error: HostError) -> None:
        host = urlsplit(group.index or self.settings.index_url).hostname or "index"
        # the stage that installs this set alone; the whole environment has none
        within = {"torch": ("torch",), "tools": ("builder",), "toolchain": ("builder",)}.get(group.name, ())
        self._miss("python", f"{group.name} packages: {', '.join(group.requirements)}", error, host, *within)

    def _with_requirements_of(self, group: PythonGroup, files: tuple[FileSource, ...]) -> PythonGroup:
        """Add what the compiled wheels will ask for at run time, as their sources' metadata states it."""
        from envbuild.net.download import download

        extra: list[str] = []
        from packaging.requirements import Requirement
        from packaging.utils import canonicalize_name

        own = {canonicalize_name(c.distribution) for c in self.inputs.components}
        for file in files:
            if file.sha256 is None:
                continue
            path, _ = download(self.settings, file.url, file.sha256, self.settings.cache_dir / "files")
            for line in requires_dist(path):
                requirement = Requirement(line)
                name = canonicalize_name(requirement.name)
                # A variant is pinned by CUDA major; an sdist's metadata was made on one of them.
                if (
                    requirement.marker is None
                    and name not in own
                    and AXIS_OF_DISTRIBUTION.get(name) not in self.inputs.cell.versions
                    and not name.startswith(tuple(v for c in COMPONENTS.values() for v in c.variants))
                ):
                    extra.append(line)
        for wheel in reversed(self.inputs.components):
            if wheel.axis in COMPONENTS:
                extra += COMPONENTS[wheel.axis].runtime
        return PythonGroup(
            name=group.name, requirements=(*group.requirements, *dict.fromkeys(extra)), index=group.index
        )


def _caps(matrix: Matrix, inputs: Inputs, *, compiling: bool) -> list[str]:
    """Return the ceilings on packages that the cell's components break above, as constraint lines.

    With `compiling`, only those of what takes part in a compile: what Megatron requires changes no build tool, or
    another Megatron would compile everything again.
    """
    from envbuild.matrix.packages import caps_for

    parts = {"cuda", "python", "torch", *(c.axis for c in inputs.components)}
    return [
        f"{cap.distribution}{cap.spec}"
        for cap in caps_for(matrix, inputs.cell)
        if not compiling or parts.issuperset(cap.when)
    ]

"""Plan -> image, through `docker buildx bake` on the user's builder."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.engine.bootstrap import bootstrap_root, checksum_of, end_of
from envbuild.engine.leftovers import clear
from envbuild.engine.progress import StageTime, Watch
from envbuild.engine.site import jobs, secrets
from envbuild.errors import BuildError, EnvbuildError, HostError, LockError
from envbuild.lock.model import PythonSet, Root
from envbuild.lock.python import local_wheel
from envbuild.lock.sources import SourceStore
from envbuild.net.download import download
from envbuild.plan.dockerfile import bake, dockerfile
from envbuild.plan.plan import Plan
from envbuild.settings import Settings
from envbuild.util import quote
from envbuild.util.names import FileName, checked
from envbuild.util.processes import followed
from envbuild.util.scratch import scratch

if TYPE_CHECKING:
    from python_on_whales import DockerClient

# zstd level 1 exports three times faster than gzip and unpacks faster still; every layer is written anew, so that file
# times newer than the lock's date are cut to it and the digest follows from the content alone.
_EXPORT = "compression=zstd,compression-level=1,force-compression=true,oci-mediatypes=true,rewrite-timestamp=true"

# How uv and os-install say that a file's hash is not the lock's.
_FOREIGN = re.compile(r"[Hh]ash mismatch for|which the lock does not name")

# How os-install, uv, git and the engine say that a host did not answer, or answered that it cannot serve now.
_UNREACHED = re.compile(
    r"no package lists from (?!\S+\s+4(?:03|04|10)\b)|Temporary failure|[Cc]ould not resolve|no such host"
    r"|[Cc]onnection (?:refused|reset|timed out|failed)|[Uu]nable to connect|dns error|error sending request"
    r"|HTTP status server error|returned error: 5\d\d|unexpected status.*: 5\d\d|i/o timeout"
)

# The stages whose steps have no network: what they reach for is missing in the lock or in the source.
_OFFLINE = re.compile(r"(?:build|compiled|tree)-|stack$")


def no_answer(stage: str, lines: Iterable[str]) -> bool:
    """Return whether a stage failed because a host that it asked did not answer; `lines` are the last of its output."""
    return not _OFFLINE.match(stage) and any(_UNREACHED.search(line) for line in lines)


_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

# Bytes of a wheel's record and of a root's checksum that are read; each has fewer.
_RECORD_BYTES = 2**20

# Bytes of a log's end that are searched for a cause.
_LOG_END = 2**20

# Less than this where the cache lies, and a failure is the disk's.
_NO_SPACE_GIB = 0.06

Change = Callable[[str, str], None]


@dataclass(frozen=True, kw_only=True)
class Built:
    """An image in the engine's store.

    Attributes:
        tag: its name, `envbuild:<cell id>` unless another was asked for.
        digest: sha256 digest of its manifest.
        size: bytes, unpacked.
        stages: what took part in this run; empty when the image was there already.
        log: the build's output.

    """

    tag: str
    digest: str
    size: int
    seconds: float = 0.0
    stages: tuple[StageTime, ...] = ()
    log: Path | None = None

    @property
    def executed(self) -> int:
        """How many build steps ran, rather than coming from the cache."""
        return sum(s.executed for s in self.stages)


def engine_client(settings: Settings) -> "DockerClient":
    """Return a client of the user's engine.

    Raises:
        HostError: docker or buildx is missing, or no engine answers.

    """
    from python_on_whales import DockerClient
    from python_on_whales.exceptions import DockerException

    hint = "start Docker, or run scripts/install-engine (Debian, Ubuntu); `envbuild doctor` says what is missing"
    if shutil.which("docker") is None:
        raise HostError("the docker command is missing", hint=hint)
    client = DockerClient(host=settings.engine_host) if settings.engine_host else DockerClient()
    try:
        info = client.system.info()
    except DockerException as error:
        said = (error.stderr or "").strip().splitlines()
        raise HostError("no Docker engine answers" + (f": {said[-1]}" if said else ""), hint=hint) from error
    if not client.buildx.is_installed():
        raise HostError("docker's buildx plugin is missing", hint=hint)
    if not any("snapshotter" in str(pair) or "containerd" in str(pair) for pair in (info.driver_status or [])):
        raise HostError(
            "the engine keeps images in its old store, which cannot hold these images by digest",
            where="/etc/docker/daemon.json",
            hint='add {"features": {"containerd-snapshotter": true}} and restart Docker',
        )
    return client


def _note_of_build(settings: Settings, plan: Plan) -> Path:
    # Not `made`: notes of that name were written for images that came from a registry, too.
    return settings.cache_dir / "built" / plan.key


def remember_built(settings: Settings, plan: Plan, digest: str) -> None:
    """Note that this machine built the image `digest` from exactly this plan. Only a build may say so.

    The note is kept here and not in the image, whose bytes follow from the lock alone.
    """
    place = _note_of_build(settings, plan)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(digest, encoding="utf-8")


def built_digest(settings: Settings, plan: Plan) -> str | None:
    """Return the digest (`sha256:…`) of the image that this machine built from exactly this plan, or None."""
    try:
        digest = _note_of_build(settings, plan).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return digest if _DIGEST.fullmatch(digest) else None


def find_built(settings: Settings, client: "DockerClient", plan: Plan, tag: str) -> Built | None:
    """Return the image `tag` when the engine has it and this machine built it from exactly this plan."""
    digest = built_digest(settings, plan)
    return None if digest is None else find_image(client, tag, digest)


def find_image(client: "DockerClient", tag: str, digest: str) -> Built | None:
    """Return the image `tag` when the engine has it and its digest is `digest`."""
    from python_on_whales.exceptions import DockerException

    try:
        image = client.image.inspect(tag)
    except DockerException:
        return None
    return Built(tag=tag, digest=image.id, size=image.size) if image.id == digest else None


def kept_wheel(settings: Settings, plan: Plan, axis: str) -> Path | None:
    """Return the folder of the wheel that an earlier build made from the same inputs, or None."""
    folder = settings.cache_dir / "wheels" / f"{axis}-{plan.stage(f'wheel-{axis}').key[:32]}"
    return folder if _wheel_fault(folder) is None else None


def _wheel_fault(folder: Path) -> str | None:
    """Return what is wrong with a kept wheel: `missing`, or why it is not what its record says; None when all is right."""
    record = folder / "record.json"
    try:
        with record.open("rb") as file:
            stated = json.loads(file.read(_RECORD_BYTES))
        name, digest = checked(FileName, stated["wheel"]), stated["sha256"]
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "its record cannot be read"
    return None if _sha256(folder / name) == digest else f"{name} is not the file of its record"


def _sha256(file: Path) -> str | None:
    """Return the sha256 of a file's content, or None when there is no such file."""
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError:
        return None


def _root_state(kept: Path) -> str:
    """Return `whole`, `damaged` or `missing`: how a kept root compares with the checksum beside it."""
    if not kept.is_file():
        return "missing"
    try:
        with checksum_of(kept).open(encoding="ascii", errors="replace") as file:
            stated = file.read(_RECORD_BYTES).strip()
    except OSError:
        stated = ""
    return "whole" if stated and stated == _sha256(kept) else "damaged"


def write_context(plan: Plan, folder: Path) -> None:
    """Write Dockerfile and bake file to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "Dockerfile").write_text(dockerfile(plan), encoding="utf-8")
    (folder / "docker-bake.json").write_text(bake(plan), encoding="utf-8")


@dataclass
class Builder:
    """One build of one plan."""

    settings: Settings
    plan: Plan
    client: "DockerClient"
    on_change: Change
    note: Callable[[str], None]
    cache: bool = True
    substitutes: Mapping[str, str] = field(default_factory=dict)

    def build(self, tag: str) -> Built:
        """Build the image and give it `tag`; nothing is tagged unless everything succeeded.

        Raises:
            BuildError: a stage failed; the message names it, the log, and the lines that matter.
            HostError: an input cannot be reached, or the disk is full.
            LockError: an input is not what the lock names.

        """
        started = time.monotonic()
        folder = self._root("builds") / self.plan.key[:16]
        with self._alone(folder):
            if self.cache and not self.substitutes:
                found = find_built(self.settings, self.client, self.plan, tag)
                if found is not None:  # another run made it while this one waited
                    return found
            write_context(self.plan, folder)
            log = folder / "build.log"
            with (
                log.open("w", encoding="utf-8") as output,
                scratch("secrets") as private,
            ):
                watch = Watch(log=output, on_change=self.on_change)
                run = _Run(self, folder, private, watch, log)
                run.prepare()
                for component in self.plan.components:
                    run.wheel(component.axis)
                built = run.image(tag)
            if not self.substitutes:
                remember_built(self.settings, self.plan, built.digest)
            clear(self.settings)  # once more: at the start, what a killed run had started may still have been ending
        return Built(
            tag=tag,
            digest=built.digest,
            size=built.size,
            seconds=time.monotonic() - started,
            stages=tuple(watch.times()),
            log=log,
        )

    def _root(self, name: str) -> Path:
        folder = self.settings.cache_dir / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextlib.contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        """Hold the lock of this plan: two builds of one cell take turns, and the second finds the first one's image."""
        with folder.with_suffix(".lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.note("another envbuild is building this cell; waiting for it")
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield


class _Run:
    """The state of one build: contexts, secrets, the bake file that names them."""

    def __init__(self, builder: Builder, folder: Path, private: Path, watch: Watch, log: Path) -> None:
        self.b = builder
        self.plan = builder.plan
        self.settings = builder.settings
        self.folder = folder
        self.watch = watch
        self.log = log
        self.contexts: dict[str, str] = {}
        self.secrets = secrets(builder.settings, builder.plan, private)
        self.private = private

    def prepare(self) -> None:
        """Bring every external input here, verified, as a named context."""
        plan, settings = self.plan, self.settings
        if plan.lock.root and "base" not in self.b.substitutes:
            self._rootfs()
        uv, _ = download(settings, plan.lock.uv.url, plan.lock.uv.sha256, settings.cache_dir / "files")
        self.contexts["uv-wheel"] = str(self._folder_of("uv-wheel", {"uv.whl": uv}))
        if settings.debs:
            self.contexts["debs"] = str(settings.debs)
        wheels = self._local_wheels()
        if wheels:
            self.contexts["wheels"] = str(self._folder_of("wheels", wheels))
        store = SourceStore(settings=settings, note=self.b.note)
        kept = {name for c in plan.components if self._kept_wheel(c.axis) for name in (c.axis, *c.downloads)}
        for source in plan.lock.sources:
            if source.name not in kept and f"src-{source.name}" not in self.b.substitutes:
                self.b.note(f"bringing the source of {source.name} at {source.commit[:12]}")
                self.contexts[f"src-{source.name}"] = str(store.checkout(source))
        for file in plan.lock.files:
            if file.name not in kept and f"src-{file.name}" not in self.b.substitutes:
                path, _ = download(settings, file.url, file.sha256, settings.cache_dir / "files")
                self.contexts[f"src-{file.name}"] = str(self._folder_of(f"src-{file.name}", {path.name: path}))
        self.contexts |= dict(self.b.substitutes)
        engine = self.b.client.system.info()  # of the machine that compiles, which need not be this one
        cores = engine.n_cpu or os.cpu_count() or 1
        memory = (engine.mem_total or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2**30
        for component in plan.components:
            count = self.private / f"jobs-{component.axis}"
            count.write_text(
                str(jobs(settings, job_gib=component.job_gib, cores=cores, memory_gib=memory)), encoding="utf-8"
            )
            self.secrets[f"jobs-{component.axis}"] = count

    def _rootfs(self) -> None:
        root = self.plan.lock.root
        assert root is not None  # noqa: S101
        kept = self.b._root("roots") / f"{self.plan.stage('base').key[:32]}.tar"  # noqa: SLF001
        state = _root_state(kept)
        if state == "damaged":
            self.b.note(f"the kept root {kept.name} is not the one that was made; making it again")
        if state != "whole":
            self.b.on_change("base", "started")
            begun = time.monotonic()
            try:
                self._bootstrap(root, kept)
            except BuildError as error:
                raise self._disk_or(error, end_of(self.folder / "bootstrap.log", _LOG_END)) from error
            self.watch.stages["base"] = StageTime(name="base", seconds=time.monotonic() - begun, executed=1)
            self.b.on_change("base", "done")
        target = self.folder / "rootfs.tar"
        target.unlink(missing_ok=True)
        os.link(kept, target)

    def _bootstrap(self, root: Root, kept: Path) -> None:
        bootstrap_root(
            self.settings,
            suite=root.suite,
            packages=(),
            epoch=root.epoch,
            dest=kept,
            log=self.folder / "bootstrap.log",
            locked=root.packages or None,
        )

    def _local_wheels(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        sets: tuple[PythonSet, ...] = self.plan.lock.python
        for name in (w for s in sets for w in s.local_wheels):
            path = local_wheel(self.settings, name)
            if path is None:
                raise LockError(
                    f"the lock takes {name} from a find-links folder, and no folder of the settings has it",
                    hint="name the folder that holds it in the setting `find_links`, or lock again where the index serves it",
                )
            digest = _sha256(path)
            if not any(digest in p.hashes for s in sets for p in s.packages):
                raise LockError(
                    f"{name} is not the wheel that the lock names: its sha256 is {digest}",
                    where=str(path.parent),
                    hint="put the right file there, or lock again if the change is meant",
                )
            found[name] = path
        return found

    def _folder_of(self, name: str, files: Mapping[str, Path]) -> Path:
        folder = self.folder / "contexts" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for target, source in files.items():
            try:
                os.link(source, folder / target)
            except OSError:
                shutil.copyfile(source, folder / target)
        return folder

    def _kept_wheel(self, axis: str) -> Path | None:
        return kept_wheel(self.settings, self.plan, axis) if self.b.cache and not self.b.substitutes else None

    def wheel(self, axis: str) -> None:
        """Have the wheel of `axis`: the one kept for its key, or a new one."""
        kept = self._kept_wheel(axis)
        name = f"wheel-{axis}"
        if kept is None:
            self._say_damaged(axis)
            with scratch("wheel", self.b._root("wheels")) as folder:  # noqa: SLF001
                made = folder / "made"
                self._bake(name, quote.csv_fields(type="local", dest=str(made)))
                if self.b.substitutes:
                    return  # what stands in for an input must not be taken for the real thing later
                kept = self.b._root("wheels") / f"{axis}-{self.plan.stage(name).key[:32]}"  # noqa: SLF001
                self._keep(made, kept)
        else:
            self.watch.stages.setdefault(name, StageTime(name=name)).cached += 1
            self.b.on_change(name, "kept")
        self.contexts[name] = str(kept)  # without a cache, too: this run compiled it, and compiles it once

    def _say_damaged(self, axis: str) -> None:
        folder = self.settings.cache_dir / "wheels" / f"{axis}-{self.plan.stage(f'wheel-{axis}').key[:32]}"
        fault = _wheel_fault(folder)
        if self.b.cache and fault not in {None, "missing"}:
            self.b.note(f"the kept wheel of {axis} is damaged ({fault}); making it again")

    def _keep(self, made: Path, kept: Path) -> None:
        """Move a finished wheel to its place in one step: whoever finds it there finds all of it."""
        if self.b.cache and _wheel_fault(kept) is None:
            return  # another cell's run was faster, and may be reading it
        with contextlib.suppress(FileNotFoundError):
            kept.rename(made.with_name("replaced"))
        try:
            made.rename(kept)
        except OSError:
            if _wheel_fault(kept) is not None:  # another run's, put there meanwhile, is as good
                raise

    def image(self, tag: str) -> Built:
        """Build the image, load it and tag it."""
        with scratch("image", self.b._root("builds")) as folder:  # noqa: SLF001
            archive = folder / "image.tar"
            metadata = self._bake("image", f"{quote.csv_fields(type='oci', dest=str(archive), name=tag)},{_EXPORT}")
            digest = metadata["image"]["containerimage.digest"]
            self.b.on_change("load", "started")
            begun = time.monotonic()
            said: deque[str] = deque(maxlen=50)
            load = ("image", "load", "--quiet", "--input", str(archive))
            if followed([*self.b.client.client_config.docker_cmd, *load], feed=said.append):
                raise self._disk_or(
                    BuildError("the engine did not take the image", where=tag, hint="".join(said).strip()[-300:])
                )
            self.watch.stages["load"] = StageTime(name="load", seconds=time.monotonic() - begun, executed=1)
            self.b.on_change("load", "done")
        image = self.b.client.image.inspect(tag)
        return Built(tag=tag, digest=digest, size=image.size)

    def _bake(self, target: str, output: str) -> dict[str, Any]:
        """Run one target of the bake file with this build's contexts and secrets; return buildx's metadata."""
        definition = json.loads(bake(self.plan))
        for item in definition["target"].values():
            item.pop("tags", None)  # the output names the image as it was asked for
            item["contexts"] = {k: quote.bake(v) for k, v in self.contexts.items() if k != target}
            item["secret"] = [
                quote.bake(quote.csv_fields(id=name, src=str(path))) for name, path in self.secrets.items()
            ]
        definition["target"][target]["output"] = [quote.bake(output)]
        file = self.private / "bake.json"
        file.write_text(json.dumps(definition), encoding="utf-8")
        metadata = self.private / "metadata.json"
        command = [
            *self.b.client.client_config.docker_cmd,
            "buildx",
            "bake",
            "--file",
            str(file),
            "--progress",
            "rawjson",
        ]
        command += ["--metadata-file", str(metadata)]
        if self.settings.builder:
            command += ["--builder", self.settings.builder]
        if not self.b.cache:
            command.append("--no-cache")
        # Contexts, secrets and the archive lie outside the folder that bake reads, on purpose.
        env = os.environ | {"BUILDX_BAKE_ENTITLEMENTS_FS": "0"}
        if followed([*command, target], cwd=self.folder, env=env, feed=self.watch.feed):
            raise self._failure(target)
        answer: dict[str, Any] = json.loads(metadata.read_text(encoding="utf-8"))
        return answer

    def _failure(self, target: str) -> EnvbuildError:
        stage, lines = self.watch.failure()
        self.watch.log.flush()
        if self.settings.builder and any(f'no builder "{self.settings.builder}" found' in line for line in lines):
            return HostError(
                f"buildx has no builder named {self.settings.builder}",
                where="--builder, or the setting `builder`",
                hint="`docker buildx ls` lists those that there are; leave it out to use the engine's own",
            )
        foreign = [line for line in lines if _FOREIGN.search(line)]
        if foreign:
            return LockError(
                f"stage {stage or target} was handed a file that the lock does not name:\n    " + "\n    ".join(lines),
                where=f"the whole log is in {self.log}",
                hint="ask the keepers of the index or mirror why it changed; lock again only if the change is meant",
            )
        what = f"stage {stage or target} failed:\n    " + "\n    ".join(lines)
        where = f"the whole log is in {self.log}"
        again = "then run the same command again: finished stages come from the cache"
        if no_answer(stage, lines):
            check = "check that the engine's containers reach the network and resolve names, and the mirror, proxy and index settings"
            return self._disk_or(HostError(what, where=where, hint=f"{check}; {again}"))
        return self._disk_or(BuildError(what, where=where, hint=f"fix the cause; {again}"))

    def _disk_or(self, error: EnvbuildError, said: str = "") -> EnvbuildError:
        text = f"{error.what} {error.hint} {said}"
        free = shutil.disk_usage(self.settings.cache_dir).free / 2**30
        if "no space left on device" in text.lower() or free < _NO_SPACE_GIB:
            return HostError(
                f"the disk is full ({free:.1f} GiB free where the cache lies)",
                where=f"the whole log is in {self.log}",
                hint="free some (docker builder prune, docker image prune) and run again; finished stages come from the cache",
            )
        return error

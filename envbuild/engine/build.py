"""Plan -> image, through `docker buildx bake` on the user's builder."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from envbuild.engine.bootstrap import bootstrap_root, end_of
from envbuild.engine.builders import ASKED, BuilderFacts, read_answer
from envbuild.engine.built import Built, find_built, note_of, remember_built, with_content
from envbuild.engine.client import EngineClient, EngineError
from envbuild.engine.contexts import contexts_of
from envbuild.engine.details import Details, part_of
from envbuild.engine.exports import (
    CACHE_ONLY,
    archive_output,
    bake_file,
    cache_of,
    folder_output,
    registry_output,
    store_output,
    write_context,
)
from envbuild.engine.failures import disk_or, stage_failure
from envbuild.engine.kept import (
    input_replaced,
    keep_inputs,
    keep_wheel,
    kept_wheel,
    place_of_wheel,
    remember_compiled,
    root_state,
    wheel_fault,
)
from envbuild.engine.leftovers import clear
from envbuild.engine.machine import Machine
from envbuild.engine.own_tags import EXPORTED, own_tag
from envbuild.engine.parts import Times, parts_of
from envbuild.engine.progress import StageTime, Watch
from envbuild.engine.registry import pull_verified
from envbuild.engine.room import require_ready
from envbuild.engine.shared_wheels import SharedWheels, Taken
from envbuild.engine.site import jobs, secrets
from envbuild.engine.stored import write_listing
from envbuild.errors import BuildError
from envbuild.lock.model import Root
from envbuild.matrix.cell import DEBIAN_ARCH
from envbuild.plan.plan import Plan
from envbuild.settings import Settings
from envbuild.util.below import OutsideError, read_below
from envbuild.util.logs import new_log
from envbuild.util.scratch import scratch

_LOG_END = 2**20  # bytes of a log's end that are searched for a cause

Change = Callable[[str, str], None]


@dataclass(kw_only=True)
class Builder:
    """One build of one plan.

    Attributes:
        client: the engine that gets the image; its settings say which builder makes it.
        plan: what is built.
        on_change: takes the name of a stage and what became of it.
        note: takes a line about what is done.
        details: takes what running stages print and how far they are.
        cache: whether wheels and steps of earlier builds are used.
        substitutes: external inputs that come from elsewhere, by the name of their stage.
        pull: whether compiled wheels of the settings' registry will do.
        push_to: the repository that a builder elsewhere pushes the image to itself, where it is to be pushed.
        folder: the build's folder, once `prepare` has run.
        log: where the build's output is written.
        contexts: where each external input is, by the name of its context.
        secrets: files that steps of the build may read, by id.

    """

    client: EngineClient
    plan: Plan
    on_change: Change
    note: Callable[[str], None]
    details: Details = field(default_factory=Details)
    cache: bool = True
    substitutes: Mapping[str, str] = field(default_factory=dict)
    pull: bool = False
    push_to: str | None = None
    folder: Path = field(init=False)
    log: Path = field(init=False)
    contexts: dict[str, str] = field(init=False, default_factory=dict)
    secrets: dict[str, Path] = field(init=False, default_factory=dict)
    _private: Path = field(init=False)
    _watch: Watch = field(init=False)

    @property
    def settings(self) -> Settings:
        """The settings of the engine's client."""
        return self.client.settings

    @cached_property
    def facts(self) -> BuilderFacts:
        """What buildx says of the builder."""
        return self.client.builder()

    def build(self, tag: str) -> Built:
        """Build the image and give it `tag`; nothing is tagged unless everything succeeded.

        Raises:
            BuildError: a stage failed; the message names it, the log, and the lines that matter.
            HostError: an input cannot be reached, or the disk is full.
            LockError: an input is not what the lock names.

        """
        started = time.monotonic()
        with self._alone(folder := self._cache("builds") / self.plan.key[:16]):
            found = find_built(self.client, self.plan, tag) if self.cache and not self.substitutes else None
            if found is not None:
                return found  # another run made it meanwhile
            require_ready(self.client, self.facts, self.plan.cell, self.note)
            write_context(self.plan, folder)
            with self._new_log("build") as output, scratch("secrets") as private:
                self.log = Path(output.name)
                self.details.log(self.log)
                taken = self._take_wheels()
                self.prepare(folder, private, output)
                for component in self.plan.components:
                    self._have_wheel(component.axis)
                built = self._make_image(tag)
            if not self.substitutes:
                own = note_of(self.settings, self.plan, built.digest, cache=self.cache)
                remember_built(self.settings, self.plan, with_content(self.client, own))
            clear(self.settings)  # once more: at the start, what a killed run had started may still have been ending
        return replace(
            built,
            seconds=time.monotonic() - started,
            stages=tuple(self._watch.times()),
            log=self.log,
            taken=taken,
        )

    def _take_wheels(self) -> tuple[Taken, ...]:
        """Take the wheels that this machine has not compiled from the registry, where that has them."""
        if not self.pull or not self.cache:
            return ()
        shared = SharedWheels(self.settings, self.note)
        for component in self.plan.components:
            if not input_replaced(self.plan, component.axis, self.substitutes) and not self._kept_wheel(component.axis):
                shared.take(self.plan, component)
        return tuple(shared.taken)

    def prepare(self, folder: Path, private: Path, output: TextIO) -> None:
        """Download every external input, verified, as a named context, and write the secrets.

        Args:
            folder: the build's folder.
            private: a folder that only this user reads, for secrets.
            output: takes the log.

        Raises:
            BuildError, HostError, LockError: as `build`.

        """
        self.folder, self._private = folder, private
        self._watch = Watch(log=output, on_change=self.on_change, details=self.details)
        if self.plan.lock.root and "base" not in self.substitutes:
            self._have_root(self.plan.lock.root)
        kept = {name for c in self.plan.components if self._kept_wheel(c.axis) for name in (c.axis, *c.downloads)}
        self.contexts, whole = contexts_of(
            self.settings, self.plan, folder, kept=kept, substitutes=self.substitutes, note=self.note
        )
        self.secrets = secrets(self.settings, self.plan, private, offline=whole)
        if self.plan.components:
            self._count_jobs(self._machine())

    def _machine(self) -> Machine:
        """Return the machine that compiles: the engine's, or the builder's where that is another one."""
        facts = self.facts
        if facts.on_engines_machine:
            return facts.within(self.client.machine())
        if self.settings.jobs or all(self._kept_wheel(component.axis) for component in self.plan.components):
            return Machine(cores=1, memory_gib=1.0)  # nothing is counted from it
        self.note("asking the builder for its cores and memory")
        with scratch("machine", self._cache("builds")) as folder:
            self._bake(ASKED, folder_output(folder / "made"))
            try:
                answer = read_answer(read_below(folder / "made", "machine", limit=1000).decode("ascii", "replace"))
            except (OSError, OutsideError):
                answer = None
        if answer is None:
            self.note("the builder does not say what it has; compiling with one job at a time (--jobs)")
            return Machine(cores=1, memory_gib=1.0)
        return facts.within(answer)

    def _count_jobs(self, machine: Machine) -> None:
        """Choose how many compile jobs each component runs at once, and write them as secrets."""
        for component in self.plan.components:
            count = self._private / f"jobs-{component.axis}"
            allowed = jobs(self.settings, job_gib=component.job_gib, cores=machine.cores, memory_gib=machine.memory_gib)
            count.write_text(str(allowed), encoding="utf-8")
            self.secrets[f"jobs-{component.axis}"] = count

    def _cache(self, name: str) -> Path:
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

    def _new_log(self, kind: str) -> TextIO:
        """Open a log of this plan; the last five of a kind are kept."""
        return new_log(self._cache("logs"), kind, self.plan.key[:8])

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Report a step that the builder knows nothing of."""
        self.on_change(stage, "started")
        begun = time.monotonic()
        try:
            yield
        except BaseException as error:
            self.on_change(stage, "failed" if isinstance(error, Exception) else "stopped")
            raise
        seconds = time.monotonic() - begun
        self._watch.stages[stage] = StageTime(name=stage, seconds=seconds, executed=1)
        self._keep_times({stage: seconds})
        self.on_change(stage, "done")

    def _keep_times(self, seconds: Mapping[str, float]) -> None:
        """Keep how long stages took, by the part of the plan that each belongs to, for later runs of the same key."""
        keys = {part.name: part.key for part in parts_of(self.plan)}
        sums: dict[str, float] = {}
        for stage, took in seconds.items():
            sums[part_of(stage)] = sums.get(part_of(stage), 0.0) + took
        times = Times(self.settings)
        for part, took in sums.items():
            if part in keys:
                times.keep(keys[part], took)

    def _have_root(self, root: Root) -> None:
        """Have the Debian root: the one kept for its key, or a new one."""
        kept = self._cache("roots") / f"{self.plan.stage('base').key[:32]}.tar"
        state = root_state(kept)
        if state == "damaged":
            self.note(f"the kept root {kept.name} is not the one that was made; making it again")
        if state != "whole":
            with self._timed("base"):
                self._bootstrap(root, kept)
        target = self.folder / "rootfs.tar"
        target.unlink(missing_ok=True)
        os.link(kept, target)

    def _bootstrap(self, root: Root, kept: Path) -> None:
        with self._new_log("bootstrap") as output:
            self._bootstrap_into(root, kept, Path(output.name))

    def _bootstrap_into(self, root: Root, kept: Path, log: Path) -> None:
        try:
            bootstrap_root(
                self.settings,
                suite=root.suite,
                packages=(),
                epoch=root.epoch,
                dest=kept,
                log=log,
                locked=root.packages or None,
                arch=DEBIAN_ARCH[self.plan.cell.arch] if self.plan.platform else None,
            )
        except BuildError as error:
            raise disk_or(self.settings, self.log, error, end_of(log, _LOG_END)) from error

    def _kept_wheel(self, axis: str) -> Path | None:
        return kept_wheel(self.settings, self.plan, axis, self.substitutes) if self.cache else None

    def _have_wheel(self, axis: str) -> None:
        """Have the wheel of `axis`: the one kept for its key, or a new one."""
        kept, name = self._kept_wheel(axis), f"wheel-{axis}"
        if kept is None:
            self._note_damage(axis)
            with scratch("wheel", self._cache("wheels")) as folder:
                made = folder / "made"
                self._bake(name, folder_output(made))
                if input_replaced(self.plan, axis, self.substitutes):
                    return  # what stands in for an input must not be taken for the real thing later
                kept = place_of_wheel(self.settings, self.plan, axis)
                remember_compiled(self.settings, made)
                keep_wheel(made, kept, replace=not self.cache)
        else:
            self._watch.stages.setdefault(name, StageTime(name=name)).cached += 1
            self.on_change(name, "kept")
        keep_inputs(kept, self.plan.stage(name))
        self.contexts[name] = str(kept)  # without a cache, too: this run compiled it, and compiles it once

    def _note_damage(self, axis: str) -> None:
        fault = wheel_fault(place_of_wheel(self.settings, self.plan, axis))
        if self.cache and fault not in {None, "missing"}:
            self.note(f"the kept wheel of {axis} is damaged ({fault}); making it again")

    def _make_image(self, tag: str) -> Built:
        """Build the image, have it in the engine, unpacked, and tag it."""
        if self.facts.is_engines:
            return self._into_store(tag) or self._through_archive(tag)
        if self.push_to and not self.facts.on_engines_machine:
            return self._through_registry(tag, self.push_to)
        return self._through_archive(tag)

    def _into_store(self, tag: str) -> Built | None:
        """Build the image where the engine keeps its images; None where its builder cannot do that."""
        # a name that only this build has: what has it afterwards is what was built now
        with own_tag(self.client, EXPORTED) as name:
            self._bake("image", store_output(self.client.settings, self.plan, name))
            image = self.client.find_image(name)
            if image is None or image.manifest is None:
                return None
            if self.settings.cache_to and self._watch.stored:  # its error comes before the cache is written
                self._bake("image", CACHE_ONLY)
            with scratch("image", self._cache("builds")) as folder:
                write_listing(folder / "image.tar", image.manifest, tag)
                self._load(folder / "image.tar", tag)
        return Built(tag=tag, digest=image.digest, size=self.client.image(tag).size)

    def _through_archive(self, tag: str) -> Built:
        """Build the image anywhere, download it and load it."""
        with scratch("image", self._cache("builds")) as folder:
            archive = folder / "image.tar"
            metadata = self._bake("image", archive_output(self.client.settings, self.plan, archive, tag))
            self._load(archive, tag)
        digest = metadata["image"]["containerimage.digest"]
        return Built(tag=tag, digest=digest, size=self.client.image(tag).size)

    def _through_registry(self, tag: str, repository: str) -> Built:
        """Have the builder push the image, under its digest alone, and pull it for the tests."""
        metadata = self._bake("image", registry_output(self.client.settings, self.plan, repository))
        digest = str(metadata["image"]["containerimage.digest"])
        with self._timed("load"):
            pinned = pull_verified(self.client, f"{repository}@{digest}", digest)
        self.client.tag(pinned, tag)
        return Built(tag=tag, digest=digest, size=self.client.image(tag).size, pushed=repository)

    def _load(self, archive: Path, tag: str) -> None:
        with self._timed("load"):
            try:
                self.client.load(archive)
            except EngineError as error:
                refused = BuildError("the engine did not take the image", where=tag, hint=error.output.strip()[-300:])
                raise disk_or(self.settings, self.log, refused) from None

    def _bake(self, target: str, output: str) -> dict[str, Any]:
        """Run one target of the bake file with this build's contexts and secrets; return buildx's metadata, if it has any."""
        file = self._private / "bake.json"
        text = bake_file(
            self.plan,
            target,
            output,
            contexts=self.contexts,
            secrets=self.secrets,
            shared={} if self.substitutes else cache_of(self.settings, self.plan, target, taken=self.cache),
            replaced=self.substitutes,
        )
        file.write_text(text, encoding="utf-8")
        watch = self._watch
        watch.exports, watch.stored = target == "image", False
        before = {name: (stage.seconds, stage.cached) for name, stage in watch.stages.items()}
        made = None
        try:
            made = self.client.bake(
                file,
                target,
                folder=self.folder,
                metadata=self._private / "metadata.json",
                cache=self.cache or target == ASKED,  # it runs in a stage that is built afterwards
                watch=watch,
            )
        finally:
            watch.ended(well=made is not None or watch.stored)
            for why in watch.take_cache_errors():
                self.note(why)
        if made is None and not watch.stored:
            raise stage_failure(self.settings, watch, target, self.log)
        took = {}
        for name, stage in watch.stages.items():
            seconds, cached = before.get(name, (0.0, 0))
            if stage.seconds > seconds and stage.cached == cached and (watch.exports or name != "export"):
                took[name] = stage.seconds - seconds  # all of its steps ran
        self._keep_times(took)
        return made or {}

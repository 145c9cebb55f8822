"""Trials of names: whether what a component's Python imports from other packages is there."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.curate.trials.files import Files
from envbuild.curate.trials.imports import Item, Need, State, judged, needs_of
from envbuild.curate.trials.modules import Answer, Library
from envbuild.curate.trials.subject import Subject
from envbuild.curate.trials.syntax import lowest_python
from envbuild.util.bounded import read_text
from envbuild.util.names import shown

ROOTS = frozenset({"torch", "numpy", "onnx", "transformer_engine", "setuptools"})
"""What is asked about; of another package no release belongs to a pair."""

_NOT_INSTALLED = re.compile(r"(?:^|/)(?:tests?|testing|examples?|benchmarks?|docs?|csrc|3rdparty|third_party)/")


@dataclass(frozen=True, kw_only=True)
class Module:
    """One Python file of the component."""

    name: str
    path: str
    is_package: bool
    items: tuple[Item, ...]
    python: int
    """The minor of the lowest Python 3 that reads it."""


@dataclass(kw_only=True)
class Consumer:
    """The Python of a component, by module."""

    modules: dict[str, Module] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    """Files that are no Python of this interpreter."""
    _reached: dict[tuple[str, ...], set[str]] = field(default_factory=dict)

    def add(self, path: str, text: str) -> None:
        """Take one file, whose path is relative to where modules are imported from."""
        parts = path.removesuffix(".py").split("/")
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        if not name or name in self.modules:
            return
        try:
            items, python = needs_of(text, name, is_package=is_package), lowest_python(text)
        except (SyntaxError, ValueError, RecursionError):
            self.unread.append(path)
            return
        self.modules[name] = Module(name=name, path=path, is_package=is_package, items=items, python=python)

    @property
    def roots(self) -> frozenset[str]:
        """The top names of its modules."""
        return frozenset(name.partition(".")[0] for name in self.modules)

    def reached(self, entries: tuple[str, ...]) -> set[str]:
        """Return the modules that are imported, without a guard, when any of `entries` is."""
        if entries not in self._reached:
            self._reached[entries] = self._reach(entries)
        return self._reached[entries]

    def _reach(self, entries: Iterable[str]) -> set[str]:
        own = self.roots

        def of_its_own(need: Need) -> Answer | None:
            return "no" if need.module.partition(".")[0] in own else None

        waiting = [entry for entry in entries if entry in self.modules]
        found: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in found or name not in self.modules:
                continue
            found.add(name)
            parts = name.split(".")
            waiting += [".".join(parts[:n]) for n in range(1, len(parts))]
            for need, state in judged(self.modules[name].items, of_its_own):
                # `missing` is what is in the open here: the answer is no for every module of the component
                if state == "missing" and not need.attribute:
                    waiting.append(need.module)
                    waiting += [f"{need.module}.{each}" for each in need.names[:1]]
        return found

    def left_out(self, stated: tuple[str, ...]) -> set[str]:
        """Return the modules at and below each name of `stated` that no module elsewhere imports, wherever it would."""
        found: set[str] = set()
        for each in stated:
            inside = {name for name in self.modules if f"{name}.".startswith(f"{each}.")}
            asked = {name for name in self.modules.keys() - inside if self._asks_for(name, each)}
            if not asked:
                found |= inside
        return found

    def _asks_for(self, name: str, wanted: str) -> bool:
        needs = (need for need, _ in judged(self.modules[name].items, lambda _: "no"))
        return any(f"{need}.".startswith(f"{wanted}.") for need in needs)


def read_consumer(files: Files, subject: Subject) -> Consumer:
    """Return the Python of `subject`: of its tree, its wheels, and of sdists what wheels do not have.

    Raises:
        LockError: a file cannot be read.
        HostError: the index cannot be reached.

    """
    consumer = Consumer()
    for wheel in subject.wheels:
        paths = [p for p in files.paths(wheel) if p.endswith(".py") and not _NOT_INSTALLED.search(p)]
        for path, text in sorted(files.texts(wheel, paths).items()):
            consumer.add(path, text)
    for folder in (*(files.source(sdist) for sdist in subject.sdists), *((subject.tree,) if subject.tree else ())):
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder).as_posix()
            if not _NOT_INSTALLED.search(relative):
                consumer.add(relative, _text(path))
    return consumer


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError):
        return "("  # no Python: it counts as unread


def library_of(files: Files, subject: Subject) -> Library:
    """Return the modules that `subject` gives to others."""
    place = {path: wheel for wheel in reversed(subject.wheels) for path in files.paths(wheel)}
    tree = subject.tree
    if tree is not None:
        inside = [p.relative_to(tree).as_posix() for p in tree.rglob("*") if p.suffix in {".py", ".pyi", ".so"}]
        return Library(inside, lambda path: _text(tree / path))
    return Library(place, lambda path: files.text(place[path], path))


@dataclass(frozen=True, kw_only=True)
class NamesFound:
    """What one trial of names found."""

    asked: int
    """How much is asked of the module that the trial is about."""
    counts: Mapping[State, int]
    missing: tuple[str, ...]
    """`FILE:LINE: NAME` of what is imported as soon as the component is, and is not there."""
    doubtful: tuple[str, ...]
    """The same of what could not be decided, or lies where the component's entry does not lead."""


def try_names(
    consumer: Consumer,
    *,
    entry: str | None,
    libraries: Mapping[str, Library],
    of: str,
    unimportable: tuple[str, ...] = (),
    python: str = "",
) -> NamesFound:
    """Look up each name that `consumer` asks of `libraries`.

    Args:
        consumer: the component's Python.
        entry: the module that a program imports; without one, every module counts as imported.
        libraries: top module -> its library.
        of: the top module that the trial is about: what imports it in the open counts as an entry, unless it is torch.
        unimportable: modules and packages in which a missing name is counted and decides nothing, as long as no other
            module imports them.
        python: the oldest Python of the cells, which has to read what importing the component leads to; empty for any.

    """
    own = consumer.roots

    def has(need: Need) -> Answer | None:
        root = need.module.partition(".")[0]
        if root not in libraries or root in own:
            return None
        return libraries[root].answered((need.module, need.names, need.attribute), lambda: _met(libraries[root], need))

    entries = _entries(consumer, entry)
    entries += [name for name in consumer.modules if name == "setup"]
    if of != "torch":
        entries += [name for name, module in consumer.modules.items() if _imports_in_the_open(module, of)]
    reached = consumer.reached(tuple(entries))
    left_out = consumer.left_out(unimportable) - reached
    counts: Counter[State] = Counter()
    asked = 0
    missing, doubtful = [], []
    minor = int(python.partition(".")[2] or "99")
    for name, module in sorted(consumer.modules.items()):
        if name in reached and name != "setup" and module.python > minor:
            missing.append(shown(f"{module.path}: Python 3.{module.python} reads it, and {python} does not"))
        for need, state in judged(module.items, has):
            counts[state] += 1
            asked += need.module.partition(".")[0] == of
            if state in {"present", "guarded"}:
                continue
            line = shown(f"{module.path}:{need.line}: {need}")
            if state == "missing" and name in reached:
                missing.append(line)
            elif state == "missing" and name not in left_out:
                doubtful.append(f"{line} is missing, and importing {entry} does not lead there")
            elif state == "late" and name in reached:
                doubtful.append(f"{line} is missing, and imported when a function is called")
            elif state == "unknown" and name in reached:
                doubtful.append(f"{line} is in no source that can be read")
    return NamesFound(
        asked=asked,
        counts=counts,
        missing=tuple(dict.fromkeys(missing)),
        doubtful=tuple(dict.fromkeys(doubtful)),
    )


def _entries(consumer: Consumer, entry: str | None) -> list[str]:
    """Return the modules that a program imports; every one where `entry` is not known."""
    if entry is None or entry in consumer.modules:
        return [entry] if entry else list(consumer.modules)
    # a setup that installs its folder under another name: the module lies there by its last part
    last = entry.rpartition(".")[2]
    return [last] if last in consumer.modules else list(consumer.modules)


def _imports_in_the_open(module: Module, root: str) -> bool:
    def has(need: Need) -> Answer | None:
        return "no" if need.module.partition(".")[0] == root else None

    return any(state == "missing" for _, state in judged(module.items, has))


def _met(library: Library, need: Need) -> Answer:
    there = library.exists(need.module)
    if there != "yes":
        # `from a import b` and then `b.c`: b need not be a module
        return "yes" if need.attribute else there
    module = need.module
    for name in need.names:
        inner = f"{module}.{name}"
        # a plain folder stands back behind a name of the module: torch.ops is an object, and torch/ops a folder
        if library.exists(inner) != "yes" or (library.is_plain_folder(inner) and library.binds(module, name)):
            return library.has(module, name)
        module = inner
    return "yes"


def lines(found: NamesFound) -> Iterator[str]:
    """Yield what is wrong, the worst first."""
    yield from found.missing
    yield from found.doubtful

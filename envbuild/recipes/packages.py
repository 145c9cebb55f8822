"""What a system's package manager, NVIDIA's installer and a site's modules install."""

import re
from collections.abc import Sequence

from envbuild.recipes.reader import Reader
from envbuild.recipes.syntax import Word

_TOOLKIT = re.compile(
    r"(?:nvidia-cuda-toolkit|cuda(?:-(?:toolkit|nvcc|compiler|minimal-build|libraries-dev))?(?:-(\d+)(?:-(\d+))?)?)"
)
_RPM_VERSION = re.compile(r"(?:-\d+\.[\w.+~^]*-\d[\w.+~^]*?)?(?:\.(?:x86_64|aarch64|noarch))?$")
"""What may follow a package's name on dnf's command line: `-VERSION-RELEASE`, `.ARCH`."""
_LONGEST_NAME = 200
_INSTALLER = re.compile(r"(?:\S*/)?cuda_(\d+\.\d+\.\d+)_[\d.]+_linux\w*\.run")
_SHELL = re.compile(r"(?:.*/)?(?:ba|da|z)?sh")
_CUDA_MODULE = re.compile(
    r"(?:\S*/)?cuda(?:toolkit(?:-standalone)?)?[/-](\d+(?:\.\d+){0,2})(?![\d.])\S*", re.IGNORECASE
)

# The subcommands of `module` and `ml`; any other word is a module's name to `ml`.
_MODULES = {
    **dict.fromkeys(("load", "add"), "load"),
    **dict.fromkeys(("unload", "rm", "del", "delete"), "unload"),
    **dict.fromkeys(("swap", "switch"), "swap"),
    **dict.fromkeys(("purge", "reset"), "purge"),
    **dict.fromkeys(("avail", "help", "list", "restore", "save", "show", "spider", "use", "whatis"), ""),
}


def of_os(reader: Reader, words: Sequence[Word]) -> None:
    """Read what apt-get, dnf or yum is given."""
    recipe = reader.recipe
    for word in words[words.index(Word("install", 0)) + 1 :]:
        if len(word) > _LONGEST_NAME:
            continue
        package, _, pinned = word.partition("=")
        if not words[0].rpartition("/")[2].startswith("apt"):
            package = _RPM_VERSION.sub("", package)
        toolkit = _TOOLKIT.fullmatch(package)
        python = re.fullmatch(r"python(3\.\d+)(?:-dev|-devel|-venv)?", package)
        if toolkit:
            reader.stage.toolkit = True
            version = re.match(r"(?:\d+:)?(\d+\.\d+)", pinned)
            if toolkit[2] or version:
                named = f"{toolkit[1]}.{toolkit[2]}" if toolkit[2] else version[1] if version else ""
                recipe.state("nvcc", named, word.line, toolkit=True)
        elif python:
            recipe.state("python", python[1], word.line, toolkit=True)
        elif word in {"openmpi-bin", "libopenmpi-dev", "openmpi", "openmpi-devel"}:
            recipe.state("mpi", "openmpi", word.line)
        elif word in {"mpich", "libmpich-dev", "mpich-devel"}:
            recipe.state("mpi", "mpich", word.line)
        elif gcc := re.fullmatch(r"g(?:cc|\+\+)-(\d+)", word):
            recipe.state("gcc", gcc[1], word.line)


def installer(reader: Reader, words: Sequence[Word]) -> None:
    """Read a call of NVIDIA's `cuda_….run`."""
    called = words[1] if _SHELL.fullmatch(words[0]) and words[1:] else words[0]
    found = _INSTALLER.fullmatch(called) if len(called) < _LONGEST_NAME else None
    if found and ("--driver" not in words or "--toolkit" in words):
        reader.stage.toolkit = True
        reader.recipe.state("nvcc", found[1], called.line, toolkit=True)


def module(reader: Reader, words: Sequence[Word]) -> None:
    """Read the words after `module` or `ml`."""
    named = words[0] == "module" or words[1:2] == [] or words[1] in _MODULES
    did = _MODULES.get(words[1] if words[1:] else "", "") if named else "load"
    names = [name for name in (words[2:] if named else words[1:]) if len(name) < _LONGEST_NAME]
    gone = [name.partition("/")[0] for name in (names[:1] if did == "swap" else names)]
    cuda = any(_CUDA_MODULE.fullmatch(f"{name}/1.0") for name in gone)
    if did == "purge" or (did in {"unload", "swap"} and cuda):
        reader.drop(None, module=True)
    for name in {"load": names, "swap": names[1:]}.get(did, []):
        if found := _CUDA_MODULE.fullmatch(name):
            reader.recipe.state("nvcc", found[1], name.line, module=True)

"""What each Python of a container of `envbuild dev --watch` does before its own first line.

Python imports this file as each process starts, because its folder is mounted in that container and on PYTHONPATH. A
process whose script lies in the tree:

- where there is no file `go` next to this one: imports what an earlier run imported of the image's packages, and waits
  for `go`. So a run that is started before an edit has all that the edit cannot change. Where one of those packages
  imports a module of the tree, Python starts again without these imports, and waits;
- then notes what it imports of the image's packages, in the file `names` of the folder ENVBUILD_DEV_NOTES.

Other processes (torchrun, compilers) go on at once. Standard library of Python 3.8 on.
"""
# ruff: noqa: BLE001, ARG002 - it must survive any error of an import, and its callbacks have fixed arguments

import atexit
import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
NAMES = os.path.join(os.environ.get("ENVBUILD_DEV_NOTES", HERE), "names")
GO = os.path.join(HERE, "go")
TREE = os.path.realpath(os.environ["ENVBUILD_DEV_TREE"]) if os.environ.get("ENVBUILD_DEV_TREE") else ""
PLAIN = "ENVBUILD_DEV_PLAIN"  # set for a Python that starts again
LARGEST = 16 << 20  # bytes of names: each rank of a first run notes all that it imports
POLL_S = 0.01
TAKE_A_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of Python


def is_below(path, folder):
    """Return whether a path is in a folder, or the folder."""
    real = os.path.realpath(path)
    return real == folder or real.startswith(folder + os.sep)


def folder_of(words, tree):
    """Return the folder that Python, started by these words, looks in first for modules; None where its script is not in the tree."""
    rest = iter(words[1:])
    for word in rest:
        if word in TAKE_A_VALUE:
            next(rest, None)
        elif word.startswith(("--", "-W", "-X")):
            continue
        elif not word.startswith("-") or word == "-":
            script = os.path.realpath(word)
            return os.path.dirname(script) if os.path.isfile(script) and is_below(script, tree) else None
        elif "m" in word and "c" not in word.partition("m")[0]:
            module = (word.partition("m")[2] or next(rest, "")).partition(".")[0]
            path = os.path.join(os.getcwd(), module)
            is_here = os.path.isdir(path) or os.path.isfile(path + ".py")
            return os.getcwd() if module and is_here and is_below(path, tree) else None
        elif "c" in word:
            return None
    return None


def is_of_the_image(package):
    """Return whether a package is found first among the image's packages, or in Python's own library."""
    try:
        spec = importlib.machinery.PathFinder.find_spec(package)
    except Exception:
        return False
    if spec is None or spec.origin is None or not spec.has_location:
        return False
    place = os.path.realpath(spec.origin)
    if TREE and is_below(place, TREE):
        return False
    return "-packages" + os.sep in place or is_below(place, os.path.dirname(os.path.realpath(os.__file__)))


class Recorder:
    """A finder that finds nothing: it notes the modules of the image's packages that are imported.

    It is asked before each import, and as well where a package only wants to know whether another is there. So a name is
    noted when a later call, or the end of the process, finds the module loaded.
    """

    def __init__(self, path):
        self.path = path
        self.known = set(names_of(path))
        self.packages = {}
        self.asked = {}

    def find_spec(self, name, path=None, target=None):
        """Note what was asked for before and is loaded now; return None."""
        with contextlib.suppress(Exception):  # a full disk, say, is no reason for an import to fail
            self.note()
        package = name.partition(".")[0]
        if package not in self.packages:
            self.packages[package] = is_of_the_image(package)
        if self.packages[package] and name not in self.known:
            self.asked[name] = None

    def note(self):
        """Write the names that were asked for and are loaded."""
        loaded = [name for name in list(self.asked) if name in sys.modules]  # other threads import, too
        for name in loaded:
            self.asked.pop(name, None)
        self.known.update(loaded)
        if loaded:
            # opened each time: a program may close all descriptors
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                if os.fstat(file).st_size < LARGEST:
                    os.write(file, "".join(name + "\n" for name in loaded).encode("utf-8", "replace"))
            finally:
                os.close(file)

    def note_the_last(self):
        """Note what the end of the process finds."""
        with contextlib.suppress(Exception):
            self.note()


def names_of(path):
    """Return the modules that are noted in a file, each once, in their order."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return list(dict.fromkeys(file.read(LARGEST).split("\n")[:-1]))
    except OSError:
        return []


def import_all(names, folder):
    """Import modules by name; one that fails, or whose package the tree has now, is passed over."""
    packages = {}
    sys.path.insert(0, folder)
    try:
        for name in names:
            package = name.partition(".")[0]
            if package not in packages:
                packages[package] = is_of_the_image(package)
            if packages[package] and name not in sys.modules:
                with contextlib.suppress(Exception):  # the script's own import says what is wrong
                    importlib.import_module(name)
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def has_modules_of(tree):
    """Return whether a module that is loaded lies in a folder. torch has some that state a file which does not exist."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return any(isinstance(file, str) and os.path.isfile(file) and is_below(file, tree) for file in files)


def start(words):
    """Wait for `go` and note imports, where the process of these words runs a script of the tree."""
    folder = folder_of(words, TREE) if TREE else None
    if folder is None:
        return
    if not os.path.exists(GO):
        if not os.environ.pop(PLAIN, ""):
            import_all(names_of(NAMES), folder)
            if has_modules_of(TREE):
                os.environ[PLAIN] = "1"
                os.execv(sys.executable, [sys.executable, *words[1:]])  # noqa: S606
        while not os.path.exists(GO):
            time.sleep(POLL_S)
    recorder = Recorder(NAMES)
    sys.meta_path.insert(0, recorder)
    atexit.register(recorder.note_the_last)


def words_of_this_process():
    """Return the command line with the options of Python, which `sys.argv` leaves out."""
    with open("/proc/self/cmdline", "rb") as file:
        return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]


def run_the_other():
    """Run the image's own sitecustomize, which this file hides."""
    path = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    try:
        run_the_other()
    finally:
        start(words_of_this_process())

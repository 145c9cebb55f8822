"""A registry, a relay in front of it that counts bytes, and two engines: one that publishes, one that pulls."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from envbuild.util.processes import followed

ROOT = Path(__file__).resolve().parents[1]
INSTALL = ROOT / "scripts" / "install-engine"
REPOSITORY = "cells"
SIGNER = "release"
ERROR = "envbuild: error: "
_PIECE = 1 << 20


class StepError(Exception):
    """A command of a step ended badly."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(what)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What passed the relay since it was last reset."""

    down: int
    """Bytes from the registry, headers too."""
    up: int
    """Bytes to the registry."""
    seconds: float
    """From the first byte of the registry to its last."""


class Relay:
    """Passes TCP connections of a loopback port on to another one, and counts their bytes."""

    def __init__(self, port: int, to: int) -> None:
        self._to = to
        self._lock = threading.Lock()
        self.reset()
        self._listening = socket.create_server(("127.0.0.1", port), backlog=64)
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self) -> None:
        """Set the counts to zero."""
        with self._lock:
            self._down = self._up = 0
            self._first = self._last = 0.0

    @property
    def traffic(self) -> Traffic:
        """What passed since the last reset."""
        with self._lock:
            return Traffic(down=self._down, up=self._up, seconds=round(self._last - self._first, 1))

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                client.close()
                continue
            for source, target, down in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pass, args=(source, target, down), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, down: bool) -> None:
        room = memoryview(bytearray(_PIECE))
        with contextlib.suppress(OSError):
            while count := source.recv_into(room):
                self._count(count, down)
                target.sendall(room[:count])
        # The end of one side is passed on; when the server's side ends, the connection is over.
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
        if down:
            source.close()
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)
            target.close()

    def _count(self, count: int, down: bool) -> None:
        with self._lock:
            if not down:
                self._up += count
                return
            self._down += count
            self._last = time.monotonic()
            self._first = self._first or self._last


def free_port() -> int:
    """Return a port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(kw_only=True)
class Site:
    """Everything that a run starts. Leaving it stops the engines and the registry."""

    folder: Path
    """Keeps the registry's data, the caches, the keys and the logs."""
    verbose: bool = False
    began: float = field(default_factory=time.monotonic)
    engines: dict[str, str] = field(default_factory=dict)
    """The address of each engine that runs, by what it does: `publisher`, `client`."""
    relay: Relay = field(init=False)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._port = 0
        # The signature of a catalogue is for the registry's name: a folder that is used again needs the same port.
        self.address = int(self.kept("port", free_port()))
        try:
            self._start_registry()
            self.start("publisher")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything, whatever goes wrong with a part of it; another Ctrl-C must not leave an engine behind."""
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        steps = [partial(self.stop, what) for what in tuple(self.engines)]
        if self._port:
            steps += [partial(self._install, "--stop-registry", str(self._port)), self.relay.close]
        for step in steps:
            try:
                step()
            except StepError as error:
                self.say(str(error))
        for number, handler in before.items():
            signal.signal(number, handler)

    @property
    def registry(self) -> str:
        """The address of the registry's repository: the relay's."""
        return f"127.0.0.1:{self.address}/{REPOSITORY}"

    def say(self, text: str) -> None:
        """Print what is done now."""
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        print(f"{minutes:3}:{seconds:02}  {text}", file=sys.stderr, flush=True)

    def kept(self, name: str, value: Any = None) -> Any:
        """Return a value that an earlier run with this folder kept; otherwise keep `value` and return it."""
        place = self.folder / f"{name}.json"
        if not place.exists():
            self.keep(name, value)
        return json.loads(place.read_text())

    def keep(self, name: str, value: Any) -> None:
        """Keep a value for a later run with this folder."""
        place = self.folder / f"{name}.json"
        place.with_suffix(".new").write_text(json.dumps(value, indent=1))
        place.with_suffix(".new").replace(place)

    # ---- what runs

    def _start_registry(self) -> None:
        while (port := free_port()) == self.address:
            pass
        self._install("--registry", str(port), "--data", str(self.folder / "registry"))
        self.relay = Relay(self.address, port)
        self._port = port
        keys = self.folder / "keys"
        if not keys.exists():
            keys.mkdir()
            self.envbuild(self.publisher, "catalog", "keygen", SIGNER, "--out", str(keys))

    def start(self, what: str) -> None:
        """Start an engine with nothing in it; one that runs as `what` is removed first."""
        self.stop(what)
        self.engines[what] = ""
        self.engines[what] = self._install("--second", self._name(what)).strip()

    def stop(self, what: str) -> None:
        """Stop an engine and delete what it holds."""
        if what in self.engines:
            self._install("--stop", self._name(what))
            del self.engines[what]  # not before: Ctrl-C in the middle leaves it to the end of the run

    def _name(self, what: str) -> str:
        return f"{what[0]}-{os.getpid() % 10**7}"

    def _install(self, *words: str) -> str:
        env = os.environ | {"XDG_STATE_HOME": str(self.folder / "state")}
        # In a separate session: Ctrl-C ends this process, which then stops what was started.
        done = subprocess.run(
            [INSTALL, *words], env=env, check=False, text=True, capture_output=True, start_new_session=True
        )
        if done.returncode:
            raise StepError(f"{INSTALL.name} {' '.join(words)}: {done.stderr.strip()[-500:]}", done.returncode)
        return done.stdout

    def fresh_client(self) -> None:
        """Have an engine for those who pull, with nothing in it, and a home with nothing in it."""
        self.start("client")
        shutil.rmtree(self.folder / "client", ignore_errors=True)
        (self.folder / "client" / "home").mkdir(parents=True)

    # ---- who runs commands

    @property
    def publisher(self) -> dict[str, str]:
        """The environment of who publishes: this machine's settings, with an engine, a cache and a key for this run."""
        return os.environ | {
            "DOCKER_HOST": self.engines.get("publisher", ""),
            "ENVBUILD_CACHE_DIR": str(self.folder / "publisher"),
            "ENVBUILD_REGISTRY": self.registry,
            "ENVBUILD_TRUSTED_KEYS": str(self.folder / "keys" / f"{SIGNER}.pub"),
            "ENVBUILD_SIGNING_KEYS": str(self.folder / "keys" / f"{SIGNER}.key"),
            "COSIGN_PASSWORD": "",
            "PYTHONPATH": str(ROOT),
        }

    @property
    def client(self) -> dict[str, str]:
        """The environment of who pulls: an empty home, the registry's address and the public key, and nothing else."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder / "client" / "home"),
            "LANG": "C.UTF-8",
            "DOCKER_HOST": self.engines["client"],
            "ENVBUILD_REGISTRY": self.registry,
            "ENVBUILD_TRUSTED_KEYS": str(self.folder / "keys" / f"{SIGNER}.pub"),
            "PYTHONPATH": str(ROOT),
        }

    @property
    def builder(self) -> dict[str, str]:
        """The environment of who builds on the second engine: this machine's indexes, no wheel and no key that signs."""
        own = {name: value for name, value in self.publisher.items() if name != "ENVBUILD_SIGNING_KEYS"}
        place = str(self.folder / "client" / "cache")
        return own | {"DOCKER_HOST": self.engines["client"], "ENVBUILD_CACHE_DIR": place}

    def envbuild(
        self,
        env: Mapping[str, str],
        *words: str,
        events: list[dict[str, Any]] | None = None,
        accepted: Collection[int] = (0,),
    ) -> dict[str, Any]:
        """Run `envbuild … --json` from an empty folder; return its answer.

        Args:
            env: its environment.
            words: what follows `envbuild`.
            events: gets those of `--progress json`.
            accepted: the exit codes with which it has an answer.

        Raises:
            StepError: it ended with another one; the text is its own error.

        """
        answer, cwd = self.folder / "answer.json", self.folder / "empty"
        cwd.mkdir(exist_ok=True)
        keep = ["sh", "-c", 'answer=$1; shift; exec "$@" >"$answer"', "envbuild", str(answer)]
        last = ""
        with (self.folder / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"$ envbuild {' '.join(words)}\n")

            def feed(line: str) -> None:
                nonlocal last
                if not last.startswith(ERROR):  # what follows it says more, and is no error
                    last = line.strip() or last
                log.write(line)
                log.flush()
                if events is not None:
                    with contextlib.suppress(ValueError):
                        events.append(json.loads(line))
                if self.verbose:
                    print(f"        {line.rstrip()}", file=sys.stderr, flush=True)

            command = [*keep, sys.executable, "-m", "envbuild", *words, "--json"]
            code = followed(command, feed=feed, env=env, cwd=cwd, patience=90.0)
        found: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            found = json.loads(answer.read_text(encoding="utf-8"))
        if code not in accepted:
            raise StepError(str(found.get("what") or last.removeprefix(ERROR) or f"exit code {code}"), code)
        return found

    def docker(self, env: Mapping[str, str], *words: str) -> str:
        """Run docker; return what it printed.

        Raises:
            StepError: it ended badly.

        """
        done = subprocess.run(["docker", *words], env=env, check=False, text=True, capture_output=True)
        if done.returncode:
            raise StepError(f"docker {words[0]}: {done.stderr.strip()[-500:]}", done.returncode)
        return done.stdout

    @property
    def free_gb(self) -> float:
        """GB that are free where the engines keep what they hold."""
        return shutil.disk_usage("/var/lib").free / 1e9


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Give this process an environment for a while: what it calls reads its settings from there."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)

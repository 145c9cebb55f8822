"""Start a worker script on several ranks, watch them, and say which one hung, died or failed. Leaves no process behind."""

import contextlib
import ctypes
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from typing import Any, Dict, List, Optional

from smokelib.rank import MARK

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MARKER = "SMOKE_RUN_ID"


USED: List[str] = []
"""The launchers that this process has started ranks with."""
# What the ranks need of this environment travels to other hosts: a session of ssh inherits nothing. Prefixes.
TRAVELS = (
    "SMOKE_",
    "NVTE_",
    "NCCL_",
    "CUDA_",
    "OMP_",
    "ENVBUILD_",
    "PYTHON",
    "LD_LIBRARY_PATH",
    "PATH",
    "HF_",
    "OPAL_PREFIX",
)


class RanksFailed(AssertionError):
    """A launch that did not end well; the message names the rank and the cause."""


def free_port() -> int:
    """Return a port that nobody listens on and that the kernel gives nobody by itself: the ranks listen seconds later."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)  # Linux gives out 32768 and above
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _die_with_parent():
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def processes_of(run_id: str) -> List[int]:
    """Return the processes that carry this run's mark in their environment: torchrun's and mpirun's children have sessions
    of their own, so a process group alone does not hold them all."""
    needle = "{}={}".format(MARKER, run_id).encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            with open("/proc/{}/environ".format(entry), "rb") as handle:
                if needle in handle.read().split(b"\0") and _alive(int(entry)):
                    found.append(int(entry))
    return found


def _alive(pid: int) -> bool:
    try:
        with open("/proc/{}/stat".format(pid), encoding="utf-8", errors="replace") as handle:
            return handle.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def kill_all(run_id: str) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        alive = processes_of(run_id)
        if not alive:
            return
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    raise RanksFailed("processes {} do not die".format(processes_of(run_id)))


def hostfile() -> Optional[str]:
    """Return the hostfile of a run on several hosts; run.py sets it."""
    return os.environ.get("SMOKE_NODES")


def read_hostfile(path: str) -> List[Dict[str, Any]]:
    """Read lines of `host slots=N` (Open MPI's and DeepSpeed's form) or `host:N` (MPICH's); one slot where none is named."""
    hosts = []
    with open(path, encoding="utf-8") as handle:
        for line in handle:
            words = line.split("#")[0].split()
            if words:
                name, colon, count = words[0].rpartition(":")
                if not (colon and count.isdigit() and ":" not in name):
                    name, count = words[0], "1"
                slots = [int(w.split("=")[1]) for w in words[1:] if w.startswith("slots=")]
                hosts.append({"host": name, "slots": slots[0] if slots else int(count)})
    if not hosts:
        raise RanksFailed("the hostfile names no host")
    return hosts


def spread(hosts: List[Dict[str, Any]], world: int) -> List[Dict[str, Any]]:
    """Return how many of `world` ranks each host starts: the same on each, on as many hosts as that allows.

    Two ranks on two hosts of eight slots are one on each, so that every count of ranks crosses the network. Where the same on
    each does not go, every host in turn starts what it can.
    """
    for count in range(len(hosts), 0, -1):
        share, rest = divmod(world, count)
        fit = [h for h in hosts if h["slots"] >= share]
        if not rest and share and len(fit) >= count:
            return [dict(h, slots=share) for h in fit[:count]]
    filled, left = [], world
    for host in hosts:
        share = min(host["slots"], left)
        filled += [dict(host, slots=share)] if share else []
        left -= share
    if left:
        raise RanksFailed(
            "{} ranks do not fit on {}".format(
                world, ", ".join("{} slots={}".format(h["host"], h["slots"]) for h in hosts)
            )
        )
    return filled


def available(launcher: str) -> bool:
    return launcher in ("torchrun", "env") or shutil.which(launcher) is not None


def _torchrun() -> List[str]:
    """Return torch's own launcher as arguments of Python; before 1.9 it had another name and wanted to be told."""
    import importlib.util

    # a launching host need not have torch itself
    if importlib.util.find_spec("torch") and importlib.util.find_spec("torch.distributed.run") is None:
        return ["-m", "torch.distributed.launch", "--use_env"]
    return ["-m", "torch.distributed.run"]


def _commands(
    launcher: str,
    worker: str,
    world: int,
    port: int,
    env: Dict[str, str],
    hosts: Optional[List[Dict[str, Any]]],
    folder: str,
) -> List[Dict[str, Any]]:
    script = [os.path.join(HERE, "workers", worker + ".py")]
    python = sys.executable
    # The folder of byte code is this host's: another would keep what nobody removes.
    travels = sorted(name for name in env if name.startswith(TRAVELS) and name != "PYTHONPYCACHEPREFIX")
    if hosts and launcher == "torchrun":
        export = " ".join("{}={}".format(name, shlex.quote(env[name])) for name in travels)
        agent = shlex.split(os.environ.get("SMOKE_RSH", "ssh -tt -o BatchMode=yes -o StrictHostKeyChecking=accept-new"))
        return [
            {
                "argv": agent
                + [
                    h["host"],
                    "cd {} && exec env {} {} {} --nnodes {} --nproc_per_node {} --node_rank {} "
                    "--master_addr {} --master_port {} {}".format(
                        shlex.quote(HERE),
                        export,
                        python,
                        " ".join(_torchrun()),
                        len(hosts),
                        h["slots"],
                        i,
                        hosts[0]["host"],
                        port,
                        " ".join(script),
                    ),
                ],
                "env": {},
            }
            for i, h in enumerate(hosts)
        ]
    if launcher == "torchrun":
        argv = [python] + _torchrun() + ["--nnodes", "1", "--nproc_per_node", str(world)]
        return [{"argv": argv + ["--master_addr", "127.0.0.1", "--master_port", str(port)] + script, "env": {}}]
    if launcher == "mpirun":
        version = subprocess.run(
            ["mpirun", "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ).stdout
        argv = ["mpirun", "-n", str(world)]
        open_mpi = "Open MPI" in version or "OpenRTE" in version
        if open_mpi:
            argv += ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
            for name in travels:
                argv += ["-x", name]
        if hosts:
            form = "{} slots={}\n" if open_mpi else "{}:{}\n"
            hostfile = os.path.join(folder, "hostfile")
            with open(hostfile, "w", encoding="utf-8") as handle:
                handle.write("".join(form.format(h["host"], h["slots"]) for h in hosts))
            argv += ["--hostfile", hostfile] if open_mpi else ["-f", hostfile]
            # The folder of the suite is the same on every host, and this one's is not where ssh arrives.
            argv += ["-wdir", HERE]
        return [{"argv": argv + [python] + script, "env": {}}]
    if launcher == "env":
        return [
            {
                "argv": [python] + script,
                "env": {"RANK": str(r), "WORLD_SIZE": str(world), "LOCAL_RANK": str(r), "MASTER_PORT": str(port)},
            }
            for r in range(world)
        ]
    raise ValueError(launcher)


class _Watch:
    """What the ranks have said so far."""

    def __init__(self, world: int) -> None:
        self.last: Dict[int, Dict[str, Any]] = {}
        self.results: Dict[int, Dict[str, Any]] = {r: {} for r in range(world)}
        self.errors: Dict[int, str] = {}
        self.done: set = set()
        self.output: List[str] = []
        self.moved = time.monotonic()
        self.lock = threading.Lock()

    def read(self, stream: Any) -> None:
        for line in stream:
            with self.lock:
                if not line.startswith(MARK):
                    if line.strip():
                        self.output.append(line.rstrip("\n")[:400])
                        del self.output[:-400]
                    continue
                try:
                    said = json.loads(line[len(MARK) :])
                except ValueError:
                    continue
                rank = int(said["rank"])
                self.moved = time.monotonic()
                if "at" in said:
                    self.last[rank] = dict(said, time=time.monotonic())
                elif "result" in said:
                    self.results.setdefault(rank, {}).update(said["result"])
                elif "error" in said:
                    self.errors[rank] = "{} ({})".format(said["error"], said["where"])
                elif said.get("done"):
                    self.done.add(rank)


def _list(ranks: Any) -> str:
    ranks = sorted(ranks)
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(r) for r in ranks)


def _hang_message(watch: _Watch, world: int, waited: float, folder: str) -> str:
    open_ranks = [r for r in range(world) if r not in watch.done]
    if not open_ranks:
        return "every rank had done its work; their launcher did not end within {:.0f} s".format(waited)
    silent = [r for r in open_ranks if r not in watch.last]
    if silent:
        return "{} never started within {:.0f} s".format(_list(silent), waited)
    lowest = min(watch.last[r]["sequence"] for r in open_ranks)
    behind = [r for r in open_ranks if watch.last[r]["sequence"] == lowest]
    others = [r for r in range(world) if r not in behind]
    parts = ["no progress for {:.0f} s: {} stopped at '{}'".format(waited, _list(behind), watch.last[behind[0]]["at"])]
    for rank in others:
        parts.append(
            "rank {} {}".format(
                rank, "is done" if rank in watch.done else "waits at '{}'".format(watch.last[rank]["at"])
            )
        )
    if not others:
        parts.append("every rank is there, so a collective did not complete")
    for rank in behind[:8]:
        with contextlib.suppress(OSError):
            with open(os.path.join(folder, "rank{}".format(rank)), encoding="utf-8") as handle:
                frames = [line.strip() for line in handle if line.strip().startswith("File")]
            if frames:
                parts.append("rank {} is in {}".format(rank, frames[0]))
    return "; ".join(parts)


def run_ranks(
    worker: str,
    world: int,
    launcher: str = "torchrun",
    args: Optional[Dict[str, Any]] = None,
    env: Optional[Dict[str, str]] = None,
    timeout: float = 300.0,
    stall: float = 120.0,
    nodes: Optional[str] = None,
) -> List[Dict[str, Any]]:
    """Run workers/<worker>.py on `world` ranks and return each rank's results in rank order.

    Args:
        launcher: torchrun, mpirun, or env (plain processes with RANK and WORLD_SIZE set).
        timeout: seconds for the whole launch. stall: seconds without any rank reporting progress ($SMOKE_STALL overrides it).
        nodes: a hostfile, for torchrun over ssh ($SMOKE_RSH instead) or mpirun; the suite, the environment and the temporary
            folders of its tests lie at the same paths on every host.

    Raises:
        RanksFailed: a rank raised, died, hung, or ended without a result.

    """
    stall = float(os.environ.get("SMOKE_STALL", stall))
    hosts = spread(read_hostfile(nodes), world) if nodes else None
    if launcher not in USED:
        USED.append(launcher)
    run_id = uuid.uuid4().hex
    folder = tempfile.mkdtemp(prefix="smoke-")
    port = free_port()
    full = dict(os.environ)
    full.update(env or {})
    full.update(
        {MARKER: run_id, "SMOKE_ARGS": json.dumps(args or {}), "SMOKE_STACKS": folder, "SMOKE_MASTER_PORT": str(port)}
    )
    if hosts:
        full["SMOKE_MASTER_ADDR"] = hosts[0]["host"]
    full["PYTHONPATH"] = HERE + (os.pathsep + full["PYTHONPATH"] if full.get("PYTHONPATH") else "")
    full["PYTHONUNBUFFERED"] = "1"
    full.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        full.pop(name, None)
    watch = _Watch(world)
    started = []
    threads = []
    try:
        for command in _commands(launcher, worker, world, port, full, hosts, folder):
            process = subprocess.Popen(
                command["argv"],
                env=dict(full, **command["env"]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                universal_newlines=True,
                errors="replace",
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            started.append(process)
            thread = threading.Thread(target=watch.read, args=(process.stdout,), daemon=True)
            thread.start()
            threads.append(thread)
        _follow(watch, started, world, timeout, stall, folder, local=hosts is None)
        kill_all(run_id)  # what a rank left behind holds the pipe open
        for thread in threads:
            thread.join(10)
        _judge(watch, started, world)
    finally:
        for process in started:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        kill_all(run_id)
        for process, thread in zip(started, threads):
            process.wait()
            thread.join(10)
            if not thread.is_alive():
                process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)
    return [watch.results[r] for r in range(world)]


def _follow(
    watch: _Watch, started: List[Any], world: int, timeout: float, stall: float, folder: str, local: bool
) -> None:
    begin = time.monotonic()
    failed_since: Optional[float] = None
    while any(process.poll() is None for process in started):
        time.sleep(0.05)
        now = time.monotonic()
        with watch.lock:
            pids = {r: said["pid"] for r, said in watch.last.items()}
            moved, erred = watch.moved, bool(watch.errors)
        if local:
            for rank, pid in pids.items():
                if rank not in watch.done and rank not in watch.errors and not _alive(pid):
                    last_words = time.monotonic() + 1.5  # they may still be on their way, through mpirun for one
                    while time.monotonic() < last_words and rank not in watch.done and rank not in watch.errors:
                        time.sleep(0.05)
                    with watch.lock:
                        if rank not in watch.done and rank not in watch.errors:
                            watch.errors[rank] = "died at '{}' without a word{}".format(
                                watch.last[rank]["at"], _exit_note(started, pid)
                            )
                            erred = True
        if erred or any(process.poll() not in (None, 0) for process in started):
            # The others now wait for a rank that is gone; give them a moment to say so, then end it.
            failed_since = failed_since or now
            if now - failed_since > 2.0:
                return
        elif now - moved > stall or now - begin > timeout:
            for pid in pids.values() if local else ():  # another host's numbers mean other processes here
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGUSR1)  # each rank writes where it is
            time.sleep(0.5)
            with watch.lock:
                raise RanksFailed(_hang_message(watch, world, now - (moved if now - moved > stall else begin), folder))


def _exit_note(started: List[Any], pid: int) -> str:
    for process in started:
        if process.pid == pid:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=2)
                return " (killed by signal {})".format(-code) if code < 0 else " (exit code {})".format(code)
    return ""


def _judge(watch: _Watch, started: List[Any], world: int) -> None:
    tail = "\n".join(watch.output[-25:])
    if watch.errors:
        # A rank that is gone breaks the others' sockets; the one that died silently, or spoke first, is the cause.
        first = sorted(watch.errors, key=lambda r: (not watch.errors[r].startswith("died"),))[0]
        rest = [r for r in watch.errors if r != first]
        message = "rank {} failed: {}".format(first, watch.errors[first])
        if rest:
            message += "; then {}: {}".format(_list(rest), watch.errors[rest[0]][:200])
        raise RanksFailed("{}\n--- output ---\n{}".format(message, tail))
    codes = [process.poll() for process in started]
    missing = [r for r in range(world) if r not in watch.done]
    if missing or any(codes):
        where = ", ".join(
            "rank {} at '{}'".format(r, watch.last[r]["at"]) if r in watch.last else "rank {} never started".format(r)
            for r in missing
        )
        if not missing:
            crash = [line for line in watch.output if line.startswith(("terminate called", "Fatal Python error"))]
            where = "every rank had done its work; what failed is its end" + (": " + crash[0] if crash else "")
        raise RanksFailed("the launch ended with {} ({})\n--- output ---\n{}".format(codes, where, tail))

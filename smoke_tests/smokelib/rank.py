"""The worker's side of a launch: who am I, where am I, what came out. Spoken as lines on stdout that start with `@rank `."""

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback

MARK = "@rank "
LINE_LIMIT = 4000  # a write of up to PIPE_BUF (4096 bytes) is atomic, so ranks cannot cut each other's lines


def _first(*names):
    for name in names:
        if os.environ.get(name):
            return int(os.environ[name])
    return None


class Rank:
    """One rank: its place in the world, its arguments, and the reports it makes."""

    def __init__(self):
        # Open MPI, MPICH/Hydra, Slurm and torchrun each name the same three numbers.
        self.rank = _first("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "SLURM_PROCID") or 0
        self.world = _first("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "SLURM_NTASKS") or 1
        self.local = _first("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK", "SLURM_LOCALID")
        self.local = self.rank if self.local is None else self.local
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.world), LOCAL_RANK=str(self.local))
        os.environ.setdefault("MASTER_ADDR", os.environ.get("SMOKE_MASTER_ADDR", "127.0.0.1"))
        os.environ.setdefault("MASTER_PORT", os.environ.get("SMOKE_MASTER_PORT", "29500"))
        self.args = json.loads(os.environ.get("SMOKE_ARGS", "{}"))
        self.sequence = 0
        self.grouped = False  # whether init_process_group was called
        kind, _, which = os.environ.get("SMOKE_FAULT", "").partition(":")
        self.fault = kind if kind and int(which or -1) == self.rank else ""

    def _say(self, **fields):
        line = MARK + json.dumps(dict(fields, rank=self.rank))
        if len(line) > LINE_LIMIT:
            raise ValueError("a report of {} characters would not be atomic".format(len(line)))
        # A newline first: a library may have left an unfinished line on this pipe.
        os.write(1, ("\n" + line + "\n").encode())

    def at(self, point):
        """Report that this rank has reached `point`; called before everything that can wait for another rank."""
        # The injected faults are the real thing: a rank that never arrives, a rank that is killed.
        if self.fault == "stall" and self.sequence == 3:
            time.sleep(86400)
        if self.fault == "die" and self.sequence == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        self.sequence += 1
        self._say(at=point, sequence=self.sequence, pid=os.getpid())

    def result(self, **values):
        """Report results; several calls add up."""
        for key, value in values.items():
            self._say(result={key: value})


def _die_with_parent():
    # PR_SET_PDEATHSIG: a launcher that is killed must not leave ranks holding a GPU.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def main(function):
    """Run `function(rank)` as the body of a worker script and report how it ended."""
    _die_with_parent()
    faulthandler.enable()
    rank = Rank()
    folder = os.environ.get("SMOKE_STACKS")
    if folder and os.path.isdir(folder):  # the launching host's, and another may not see it
        stacks = open(os.path.join(folder, "rank{}".format(rank.rank)), "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    rank.at("start")
    try:
        function(rank)
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = "{}: {}".format(type(error).__name__, str(error))[:1500]
        rank._say(error=text, where="{}:{} in {}".format(os.path.basename(place.filename), place.lineno, place.name))
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a normal exit would wait in NCCL's or gloo's destructors for ranks that never come
    rank._say(done=True)
    sys.stdout.flush()
    sys.stderr.flush()
    if rank.grouped:
        # DDP keeps gloo's threads alive after destroy_process_group (seen with torch 2.13). One that still drops a tensor while
        # the interpreter ends is killed inside a destructor: "terminate called without an active exception", SIGABRT.
        os._exit(0)


def init_process_group(rank, device):
    """Initialise torch.distributed for `device` (cuda or cpu) and return the torch device of this rank."""
    import datetime

    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank.local)
    rank.at("init")
    rank.grouped = True
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=float(os.environ.get("SMOKE_RANK_TIMEOUT", "300"))),
    )
    return torch.device("cuda", rank.local) if device == "cuda" else torch.device("cpu")

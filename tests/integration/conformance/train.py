"""A training job that checks itself: exact sums over all ranks, a checkpoint, a resume. All numbers are small powers of two's
multiples, so that every order of adding gives the same."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]  # which deepspeed puts first
folder, steps = Path(words[0]), int(words[1])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
sums = torch.arange(1 << 16, dtype=torch.float64) * (rank + 1)
dist.all_reduce(sums)
exact = torch.equal(sums, torch.arange(1 << 16, dtype=torch.float64) * (world * (world + 1) // 2))

weights, done = torch.zeros(64, dtype=torch.float64), 0
kept = folder / "checkpoint.pt"
if kept.exists():
    held = torch.load(kept, weights_only=True)
    weights, done = held["weights"], held["step"]
started = done
while steps == 0 or done < steps:
    # the gradient of w*x for this rank's batch
    gradient = torch.arange(64, dtype=torch.float64) + rank * 64 + done
    dist.all_reduce(gradient)
    weights -= gradient / 4
    done += 1
    if done == (steps or started + 1):
        row = {
            "rank": rank, "local": int(os.environ["LOCAL_RANK"]), "world": world, "exact": exact, "resumed": started,
            "step": done, "node": str(Path("/proc/self/ns/net").readlink()), "weights": weights.tolist(),
        }  # fmt: skip
        (folder / f"{steps}-{rank}.json").write_text(json.dumps(row))
    if steps == 0:
        time.sleep(0.1)
if rank == 0:
    torch.save({"weights": weights, "step": done}, kept)
dist.barrier()
dist.destroy_process_group()

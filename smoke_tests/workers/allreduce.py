"""Check that an all-reduce gives the exact sum on every rank, and time it (bus bandwidth as NCCL's own tests count it)."""

import time

import torch
import torch.distributed as dist

from smokelib import rank as ranks
from smokelib.numerics import digest


def body(rank):
    args = rank.args
    device = ranks.init_process_group(rank, args["device"])
    # Small integers add up exactly in float32, so the sum is known bit for bit.
    count = args["bytes"] // 4
    source = torch.Generator().manual_seed(args["seed"])
    base = torch.randint(-1000, 1000, (min(count, 1 << 16),), generator=source).float()
    mine = (base * (rank.rank + 1)).to(device)
    rank.at("all-reduce")
    dist.all_reduce(mine)
    right = base * (rank.world * (rank.world + 1) // 2)
    rank.result(exact=bool(torch.equal(mine.cpu(), right)), digest=digest([mine]))
    payload = torch.randn(count, device=device)
    times = []
    for turn in range(args["warmup"] + args["turns"]):
        rank.at("timed all-reduce {}".format(turn))
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        dist.all_reduce(payload)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        payload.div_(rank.world)  # keep the values in range
    best = sorted(times[args["warmup"] :])[args["turns"] // 2]
    rank.result(seconds=best, bus_gb_s=args["bytes"] / best / 1e9 * 2 * (rank.world - 1) / rank.world)
    rank.at("barrier")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks.main(body)

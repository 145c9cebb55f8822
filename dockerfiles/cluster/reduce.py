"""What a job runs that is given no command: one all-reduce over all ranks, whose sum is their number."""

import os

import torch
import torch.distributed as dist

gpu = torch.cuda.is_available()
if gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if gpu else "gloo")
ones = torch.ones(1, device="cuda" if gpu else "cpu")
dist.all_reduce(ones)
if int(ones) != dist.get_world_size():
    raise SystemExit(f"envbuild: the sum over {dist.get_world_size()} ranks is {int(ones)}")
if dist.get_rank() == 0:
    print(f"envbuild: {dist.get_world_size()} ranks summed by {dist.get_backend()}", flush=True)
dist.destroy_process_group()

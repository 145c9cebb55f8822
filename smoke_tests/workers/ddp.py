"""Train the plain GPT under torch DDP; report losses, batch and parameter digests; save and resume half way."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from smokelib import data, gpt
from smokelib import rank as ranks
from smokelib.numerics import digest


def train(rank):
    args = rank.args
    device = ranks.init_process_group(rank, args["device"])
    model = gpt.seeded(args["seed"], vocab=data.VOCAB, **args["model"]).to(device)
    model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args["lr"])
    first = 0
    if args.get("load"):
        rank.at("load")
        saved = torch.load(os.path.join(args["load"], "ddp.pt"), map_location=device)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    share = args["batch"] // rank.world
    losses = []
    for step in range(first, args["steps"]):
        rank.at("step {}".format(step))
        rows = data.batch(args["seed"], step, args["batch"], args["model"]["seq"], rank.rank)
        if step == first:
            rank.result(batch=digest([rows]))
        rows = rows[rank.rank * share : (rank.rank + 1) * share].to(device)
        loss = gpt.loss_of(model, rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        rank.at("step {}: all-reduce of the loss".format(step))
        dist.all_reduce(mean)
        losses.append(float(mean) / rank.world)
        if args.get("save") and step + 1 == args["save_at"] and rank.rank == 0:
            torch.save(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1},
                os.path.join(args["save"], "ddp.pt"),
            )
    rank.result(
        losses=losses, parameters=digest(model.parameters()), backend=dist.get_backend(), world=dist.get_world_size()
    )
    rank.at("barrier")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks.main(train)

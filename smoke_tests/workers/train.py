"""Train a tiny GPT in the deterministic mode from each of some seeds; report every loss and every gradient norm."""

import contextlib
import zlib

import torch

from smokelib import data, gpt
from smokelib import rank as ranks
from smokelib.numerics import digest

LEVEL = "train"
SHARE = 40
"""Numbers in one report: a longer line would not be atomic."""
SDPA_DETERMINISTIC = (2, 6)
"""From this torch on its fused attention keeps to the deterministic mode (github.com/pytorch/pytorch/pull/182551). Of older
releases it is not known here, and they take the plain attention."""


def deterministic():
    """Ask torch for the same bits every time; the variables of cuBLAS and TE are set by the test that starts this."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < SDPA_DETERMINISTIC and hasattr(torch.backends.cuda, "enable_flash_sdp"):
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)


def place(model, seed):
    """Write the weights from the seed and their names, on the CPU: the same on every device and in every release."""
    for name, parameter in model.named_parameters():
        source = torch.Generator().manual_seed(seed * 31 + zlib.crc32(name.encode()) % 65521)
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.05)
            elif name.endswith("bias"):  # what is left, the weights of the norms, is 1 in every release
                parameter.zero_()


def build(args, device):
    if args["layers"] == "torch":
        return gpt.Gpt(data.VOCAB, **args["model"]).to(device)
    import speed  # the worker next to this one
    import transformer_engine.pytorch as te

    return speed.TeGpt(te, **args["model"]).to(device, torch.bfloat16)


def norm_of(model):
    """The norm of all gradients, summed in float64 in the order of the parameters."""
    squares = [p.grad.detach().double().pow(2).sum() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def curve(rank, args, device, seed):
    model = build(args, device)
    place(model, seed)
    alone = model
    if rank.world > 1:
        model = torch.nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args["lr"])
    share = args["batch"] // rank.world
    losses, norms = [], []
    for step in range(args["steps"]):
        rank.at("seed {}, step {}".format(seed, step))
        # The data are the same for every seed: what the seeds differ in is the start alone.
        rows = data.batch(args["data_seed"], step, args["batch"], args["model"]["seq"], rank.rank)
        rows = rows[rank.rank * share : (rank.rank + 1) * share].to(device)
        low = args["autocast"] and torch.autocast(device.type, dtype=torch.bfloat16)
        with low or contextlib.nullcontext():
            loss = gpt.loss_of(model, rows)
        optimizer.zero_grad()
        loss.backward()
        norms.append(norm_of(alone))
        optimizer.step()
        mean = loss.detach().float()
        if rank.world > 1:
            torch.distributed.all_reduce(mean)
        losses.append(float(mean) / rank.world)
    return losses, norms, digest(alone.parameters())


def train(rank):
    args = rank.args
    if rank.world > 1:
        device = ranks.init_process_group(rank, args["device"])
    else:
        device = torch.device("cuda", rank.local) if args["device"] == "cuda" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
    deterministic()
    for seed in args["seeds"]:
        losses, norms, parameters = curve(rank, args, device, seed)
        for kind, values in (("losses", losses), ("norms", norms)):
            for first in range(0, len(values), SHARE):
                rank.result(
                    **{"{}/{}/{:06d}".format(seed, kind, first): [str(v) for v in values[first : first + SHARE]]}
                )
        rank.result(**{"{}/parameters".format(seed): parameters})
    if rank.world > 1:
        rank.at("barrier")
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    ranks.main(train)

"""Training batches that a model can learn from in a few steps, and that every rank can rebuild alike from the seed."""

import os

import torch

from smokelib.numerics import digest

VOCAB = 256


def other_data(rank: int) -> bool:
    """Whether the fault injection gives this rank other data (SMOKE_FAULT=other-data:RANK)."""
    kind, _, which = os.environ.get("SMOKE_FAULT", "").partition(":")
    return kind == "other-data" and int(which or -1) == rank


def batch(seed: int, step: int, size: int, seq: int, rank: int = 0) -> torch.Tensor:
    """Return the global batch of `step`, [size, seq + 1]: arithmetic progressions modulo the vocabulary, drawn on the CPU."""
    source = torch.Generator().manual_seed(seed * 1009 + step + (7919 if other_data(rank) else 0))
    start = torch.randint(0, VOCAB, (size, 1), generator=source)
    stride = torch.randint(1, 4, (size, 1), generator=source)
    return (start + stride * torch.arange(seq + 1)) % VOCAB


def batch_digest(seed: int, step: int, size: int, seq: int, rank: int = 0) -> str:
    return digest([batch(seed, step, size, seq, rank)])


def name_strangers(results, seed, step, size, seq):
    """Return the ranks whose reported batch is not the one the seed gives, or an empty list."""
    right = batch_digest(seed, step, size, seq, rank=-1)
    return [r for r, said in enumerate(results) if said["batch"] != right]

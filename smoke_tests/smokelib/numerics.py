"""How far a fast path may be from a reference, and the references themselves (float64, plain torch operations)."""

import hashlib
import math

import torch


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the reference, in float64; anything not finite is infinite."""
    out64, ref64 = out.detach().double(), ref.detach().double().to(out.device)
    if out64.shape != ref64.shape:
        raise AssertionError("shape {} where the reference has {}".format(tuple(out64.shape), tuple(ref64.shape)))
    if not bool(torch.isfinite(out64).all()):
        return math.inf
    return float((out64 - ref64).norm() / ref64.norm().clamp_min(1e-30))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """Reference attention on [batch, seq, heads, dim], in the precision of its inputs."""
    scale = 1.0 / math.sqrt(q.shape[-1])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if causal:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(mask, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def rotate(t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Reference rotary embedding on [seq, batch, heads, dim]: rotate the first freqs.shape[-1] channels, pass the rest."""
    width = freqs.shape[-1]
    head, rest = t[..., :width], t[..., width:]
    left, right = head.chunk(2, dim=-1)
    turned = head * freqs.cos() + torch.cat((-right, left), dim=-1) * freqs.sin()
    return torch.cat((turned, rest), dim=-1)


def digest(tensors):
    """Return a short hash over the exact bytes of `tensors`: equal only for bit-for-bit equal values."""
    sha = hashlib.sha256()
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous()
        sha.update(str((tuple(data.shape), data.dtype)).encode())
        # an integer of the same size: NumPy has no bfloat16, and torch before 1.10 no view of another size
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()]
        sha.update(data.view(whole).numpy().tobytes() if data.numel() and data.dim() else str(data.tolist()).encode())
    return sha.hexdigest()[:16]

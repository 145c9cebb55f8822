"""TE's DotProductAttention once, forward and backward: its error, the backend that TE reports, the kernels that ran."""

import torch

from smokelib import numerics, traces
from smokelib import rank as ranks
from smokelib import te as te_recipes


def body(rank):
    import transformer_engine.pytorch as te

    args = rank.args
    torch.cuda.set_device(0)
    torch.manual_seed(args["seed"])
    seq, batch, heads, dim = 256, 2, 8, args["dim"]
    module = te.DotProductAttention(heads, dim, attn_mask_type="causal", qkv_format="sbhd").cuda()
    q, k, v = (
        torch.randn(seq, batch, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    grad = torch.randn(seq, batch, heads * dim, device="cuda", dtype=torch.bfloat16)
    out = []

    def run():
        for tensor in (q, k, v):
            tensor.grad = None
        if args.get("fp8"):
            from transformer_engine.common import recipe

            low = recipe.DelayedScaling(
                fp8_format=recipe.Format.HYBRID, amax_history_len=4, amax_compute_algo="max", fp8_dpa=True
            )
            with te_recipes.autocast(te, low):
                out[:] = [module(q, k, v)]
        else:
            out[:] = [module(q, k, v)]
        out[0].backward(grad)

    rank.at("attention")
    try:
        for _ in range(3 if args.get("fp8") else 1):
            run()
    except Exception as error:  # TE before 1.13 says so with a bare one
        text = str(error)
        none = "No dot product attention" in text or (isinstance(error, TypeError) and "fp8_dpa" in text)
        if args.get("fp8") and (none or "cudnn" in text.lower()):
            rank.result(refused="{}: {}".format(type(error).__name__, text[:300]))
            return
        raise
    names = traces.kernel_names(run)
    exact = [t.detach().double().transpose(0, 1).requires_grad_() for t in (q, k, v)]
    right = numerics.attention(*exact).transpose(0, 1).reshape(seq, batch, heads * dim)
    right.backward(grad.double())
    errors = {"forward": numerics.relative_error(out[0], right)}
    for name, mine, reference in zip("qkv", (q, k, v), exact):
        errors["d" + name] = numerics.relative_error(mine.grad, reference.grad.transpose(0, 1))
    rank.result(
        errors=errors,
        path=traces.attention_path(names),
        backend=traces.te_reported_backend(),
        kernels=[name[:150] for name in names[:16]],
    )


if __name__ == "__main__":
    ranks.main(body)

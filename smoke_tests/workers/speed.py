"""Time one training step of a GPT in one implementation, or the GEMM ceiling of this GPU."""

import contextlib

import torch

from smokelib import gpt, traces
from smokelib import rank as ranks

VOCAB = 32000


def timed(function, warmup, turns):
    """Median seconds of `function` on the device, by events."""
    for _ in range(warmup):
        function()
    torch.cuda.synchronize()
    pairs = []
    for _ in range(turns):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return sorted(b.elapsed_time(e) for b, e in pairs)[turns // 2] / 1e3


def gemm(rank, args):
    """The bf16 matrix product through torch, on random data, inputs rotated so that no cache holds them."""
    rates, kernels = [], []
    for size in args["sizes"]:
        rate, ran = _gemm_rate(size)
        rates.append(rate)
        kernels.append(ran[0][:120])
        torch.cuda.empty_cache()
    rank.result(tflops=max(rates), rates=rates, kernels=kernels)


def _gemm_rate(size):
    """The best of three rounds, in TFLOP/s, and the kernels; a round has the work of 40 products of 8192, as far as 8 to 160 products go."""
    sets = [[torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(4)]
    turn = [0]

    def product():
        left, right = sets[turn[0] % len(sets)]
        turn[0] += 1
        return left @ right

    names = traces.kernel_names(product)
    turns = max(8, int(40 * (8192 / size) ** 3))
    seconds = min(timed(product, turns // 4, min(turns, 160)) for _ in range(3))
    return 2 * size**3 / seconds / 1e12, names


class TeGpt(torch.nn.Module):
    """The same GPT with TE's layers; embedding and head stay torch's, so that only the layers differ."""

    def __init__(self, te, hidden, layers, heads, seq):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCAB, hidden)
        self.positions = torch.nn.Embedding(seq, hidden)
        self.blocks = torch.nn.ModuleList(
            [
                te.TransformerLayer(
                    hidden, 4 * hidden, heads, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True,
                    self_attn_mask_type="causal", params_dtype=torch.bfloat16, activation="gelu",
                )
                for _ in range(layers)
            ]
        )  # fmt: skip
        self.norm = torch.nn.LayerNorm(hidden)
        self.head = torch.nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = x.transpose(0, 1).contiguous()  # TE's layers take [seq, batch, hidden]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.transpose(0, 1)))


def flops_per_token(hidden, layers, seq):
    """Model FLOPs of one token, forward and backward: GEMMs of the layers and the head, causal attention counted once."""
    forward = layers * (24 * hidden**2 + 2 * hidden * seq) + 2 * hidden * VOCAB
    return 3 * forward


def step(rank, args):
    model_args = args["model"]
    torch.manual_seed(args["seed"])
    context = contextlib.nullcontext
    if args["kind"] == "eager":
        model = gpt.Gpt(VOCAB, **model_args)
    else:
        import transformer_engine.pytorch as te

        model = TeGpt(te, **model_args)
        if args.get("fp8"):
            from transformer_engine.common import recipe

            from smokelib import te as te_recipes

            low = recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=16, amax_compute_algo="max")

            def context():
                return te_recipes.autocast(te, low)

    model = model.to("cuda", torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    if rank.world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank.local], gradient_as_bucket_view=True)
    if args["optimizer"] == "apex":
        from apex.optimizers import FusedAdam

        optimizer = FusedAdam(model.parameters(), lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = torch.randint(0, VOCAB, (args["batch"], model_args["seq"] + 1), device="cuda")
    last = []

    def once():
        optimizer.zero_grad()  # apex's takes no argument
        with context():
            loss = gpt.loss_of(model, rows)
        loss.backward()
        optimizer.step()
        last[:] = [loss.detach()]

    rank.at("warm-up")
    once()
    first = float(last[0])
    names = traces.kernel_names(once)
    rank.at("timing")
    seconds = timed(once, 3, args["turns"])
    tokens = args["batch"] * model_args["seq"] * rank.world
    rank.result(
        tokens_per_second=tokens / seconds,
        tflops=tokens
        * flops_per_token(model_args["hidden"], model_args["layers"], model_args["seq"])
        / seconds
        / 1e12
        / rank.world,
        step_ms=seconds * 1e3,
        parameters=parameters,
        first=first,
        last=float(last[0]),
        backend=traces.te_reported_backend(),
        peak_gib=torch.cuda.max_memory_allocated() / 2**30,
        attention=[n[:90] for n in traces.matching(names, r"(?i)sdpa|flash|fmha|mha_|attention|softmax")][:8],
    )


def body(rank):
    args = rank.args
    torch.cuda.set_device(rank.local)
    if rank.world > 1:
        ranks.init_process_group(rank, "cuda")
    {"gemm": gemm, "step": step}[args["what"]](rank, args)
    if rank.world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    ranks.main(body)

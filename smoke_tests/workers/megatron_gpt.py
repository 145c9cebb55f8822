"""Train megatron-core's GPT at TP x PP x DP with its own layers or TE's, Adam (distributed optimizer or not) or sgd.

Weights come from the seed and the parameter's global name, so every layout starts from the same model; on a GPU the whole
of megatron-core runs (its DDP, schedules, optimizer, checkpoints), on a CPU its model and tensor parallelism over gloo.
"""

import functools
import json
import os
import re
import sys
import zlib

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron-core asks for it beside tensor parallelism
if json.loads(os.environ.get("SMOKE_ARGS", "{}")).get("device") == "cpu":
    # megatron-core takes their norms and streams wherever they import, and those need a GPU
    sys.modules.update({"apex": None, "transformer_engine": None})

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer.transformer_config import TransformerConfig

from smokelib import data, traces
from smokelib import rank as ranks
from smokelib.numerics import digest


def config_of(args, device, world):
    gpu = device.type == "cuda"
    fields = {
        "num_layers": args["layers_count"],
        "hidden_size": args["hidden"],
        "num_attention_heads": args["heads"],
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": args["tp"],
        "pipeline_model_parallel_size": args["pp"],
        "sequence_parallel": gpu and args["tp"] > 1,
        "use_cpu_initialization": not gpu,
        "params_dtype": torch.bfloat16 if gpu else torch.float32,
        "pipeline_dtype": torch.bfloat16 if gpu else torch.float32,
        "bf16": gpu,
        "gradient_accumulation_fusion": gpu and has_gradient_fusion(),
        "bias_activation_fusion": False,
    }
    fields.update(args.get("config", {}))
    if args.get("fp8"):
        fields.update(fp8="hybrid", fp8_recipe={"delayed": "delayed", "current": "tensorwise"}[args["fp8"]])
    return TransformerConfig(**fields)


def has_gradient_fusion():
    try:
        import fused_weight_gradient_mlp_cuda  # noqa: F401
    except ImportError:
        return False
    return True


class CpuAttention(torch.nn.Module):
    """Causal attention over this rank's heads: megatron-core's own core attention takes its scratch memory on a GPU."""

    def __init__(self, config, *_, **__):
        super().__init__()

    def forward(self, query, key, value, *_, **__):
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [seq, batch, heads, dim]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def build(args, config):
    if args["layers"] == "te":
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec()
        if not config.bf16:
            spec.submodules.self_attention.submodules.core_attention = CpuAttention
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=data.VOCAB,
        max_sequence_length=args["seq"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope" if config.bf16 else "learned_absolute",  # its rotary cache lives on a GPU
        parallel_output=True,
    )


def place(args, model):
    """Write every weight from the seed and its global name, and this rank's shard of it."""
    tp, mine = args["tp"], parallel_state.get_tensor_model_parallel_rank()
    first = {id(layer): layer.layer_number - 1 for layer in model.decoder.layers}
    offset = list(first.values())[0] if first else 0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        name = re.sub(
            r"decoder\.layers\.(\d+)\.", lambda m: "decoder.layers.{}.".format(int(m.group(1)) + offset), name
        )
        sharded = tp > 1 and getattr(parameter, "tensor_model_parallel", False)
        shape = list(parameter.shape)
        dim = getattr(parameter, "partition_dim", 0)
        if sharded:
            shape[dim] *= tp
        source = torch.Generator().manual_seed(args["seed"] * 31 + zlib.crc32(name.encode()) % 65521)
        full = torch.randn(shape, generator=source) * 0.05
        if sharded:
            full = full.chunk(tp, dim)[mine]
        with torch.no_grad():
            parameter.copy_(full)


def rows_of(args, step, rank, device):
    """This data-parallel rank's part of the batch."""
    rows = data.batch(args["seed"], step, args["batch"], args["seq"], rank.rank)
    said = digest([rows])
    share = args["batch"] // parallel_state.get_data_parallel_world_size()
    begin = share * parallel_state.get_data_parallel_rank()
    return rows[begin : begin + share].to(device), said


def positions(rows):
    return torch.arange(rows.shape[1] - 1, device=rows.device).expand(rows.shape[0], -1)


def digests(model):
    """(all parameters, those that every tensor-parallel rank holds whole) of this rank."""
    everything = [p for _, p in sorted(model.named_parameters())]
    shared = [p for _, p in sorted(model.named_parameters()) if not getattr(p, "tensor_model_parallel", False)]
    return {"parameters": digest(everything), "shared": digest(shared)}


def train_cpu(rank, args, model, device):
    """The model and its tensor parallelism; megatron-core's schedules and optimizer allocate on a GPU."""
    optimizer = torch.optim.Adam(model.parameters(), lr=args["lr"])
    group = parallel_state.get_data_parallel_group()
    mask = torch.ones(1, 1, args["seq"], args["seq"], dtype=torch.bool, device=device).triu(1)
    losses = []
    for step in range(args["steps"]):
        rank.at("step {}".format(step))
        rows, said = rows_of(args, step, rank, device)
        if step == 0:
            rank.result(batch=said)
        loss = model(rows[:, :-1], positions(rows), mask, labels=rows[:, 1:].contiguous()).float().mean()
        optimizer.zero_grad()
        loss.backward()
        rank.at("step {}: all-reduce of the gradients".format(step))
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= dist.get_world_size(group)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        losses.append(float(mean) / dist.get_world_size(group))
    return losses, None


def train_gpu(rank, args, model, device, config):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    wide = args.get("distributed_optimizer", False)
    wrapped = Float16Module(config, model)
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=wide), wrapped
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=args["optimizer"], lr=args["lr"], min_lr=args["lr"], weight_decay=0.01, clip_grad=0.0, bf16=True,
            params_dtype=torch.bfloat16, use_distributed_optimizer=wide, sgd_momentum=0.9,
        ),
        [wrapped],
    )  # fmt: skip
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    shadow = SaiShadow(inner(optimizer)) if args["optimizer"] == "sgd" and not args.get("load") else None
    schedule = get_forward_backward_func()
    first = load(rank, args, wrapped, optimizer) if args.get("load") else 0
    group = parallel_state.get_data_parallel_group()
    losses = []

    def forward(iterator, module):
        rows = next(iterator)
        out = module(rows[:, :-1].contiguous(), positions(rows), None, labels=rows[:, 1:].contiguous())

        def loss_function(values):
            loss = values.float().mean()
            return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place

        return out, loss_function

    def forward_and_backward(rows, out):
        micro = min(args["microbatch"], rows.shape[0])
        out[:] = schedule(
            forward_step_func=forward, data_iterator=iter(rows.split(micro)), model=[wrapped],
            num_microbatches=rows.shape[0] // micro, seq_length=args["seq"], micro_batch_size=micro,
            decoder_seq_length=args["seq"], forward_only=False,
        )  # fmt: skip

    for step in range(first, args["steps"]):
        rank.at("step {}".format(step))
        rows, said = rows_of(args, step, rank, device)
        if step == first:
            rank.result(batch=said)
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        out = []
        if step + 1 == args["steps"]:
            kernels = traces.kernel_names(functools.partial(forward_and_backward, rows, out))
            rank.result(attention=traces.attention_path(kernels))
            for kind, pattern in (("products", traces.GEMM), ("fused", "softmax|LayerNorm|sdpa|fmha|flash")):
                found = [name[:90] for name in traces.matching(kernels, pattern)]
                rank.result(**{kind: found[:30]})  # a report is small
        else:
            forward_and_backward(rows, out)
        good, _, _ = optimizer.step()
        assert good, "megatron-core skipped step {}: a gradient is not finite".format(step)
        if parallel_state.is_pipeline_last_stage():
            mean = torch.stack([entry["loss"] for entry in out]).mean()
            rank.at("step {}: all-reduce of the loss".format(step))
            dist.all_reduce(mean, group=group)
            losses.append(float(mean) / dist.get_world_size(group))
        else:
            # As many points a step as on the last stage: who is behind is told by counting them.
            rank.at("step {}: no loss on this stage".format(step))
        if args.get("save") and step + 1 == args["save_at"]:
            save(rank, args, wrapped, optimizer, step + 1)
    if shadow:
        rank.result(update_error=shadow.worst)
    return losses, optimizer


def inner(optimizer):
    """The torch optimizer inside megatron-core's wrappers."""
    while hasattr(optimizer, "chained_optimizers"):
        optimizer = optimizer.chained_optimizers[0]
    return getattr(optimizer, "optimizer", optimizer)


def inner_class(optimizer):
    kind = type(inner(optimizer))
    return "{}.{}".format(kind.__module__, kind.__name__)


class SaiShadow:
    """Follows SGD_sai in float64 through megatron-core's wrappers: `worst` is the largest relative error of an update.

    What rounding the parameter itself to float32 explains (a weight of 1 and an update of 1e-4, say) is no error.
    """

    def __init__(self, optimizer):
        self.optimizer, self.worst, self.scale, self.buffer = optimizer, 0.0, {}, {}
        self.step, optimizer.step = optimizer.step, self.follow

    def follow(self, *args, **kwargs):
        right = []
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, before = p.grad.double(), p.detach().double().clone()
                if p not in self.scale:
                    self.scale[p] = grad.norm() / (grad.std().nan_to_num() + group["eps"])
                    self.buffer[p] = grad
                else:
                    self.buffer[p] = group["momentum"] * self.buffer[p] + (1 - group["momentum"]) * grad
                step = -group["lr"] * (group["weight_decay"] * before + self.scale[p] * self.buffer[p])
                right.append((p, before, step))
        done = self.step(*args, **kwargs)
        for p, before, step in right:
            off = (p.detach().double() - before - step).norm() - torch.finfo(torch.float32).eps * before.norm()
            self.worst = max(self.worst, float(off / step.norm().clamp_min(1e-30)))
        return done


def _sharded(wrapped, optimizer, loading):
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    # Named as the model names them: through the wrappers every key gets a prefix that loading does not know.
    states = wrapped.module.module.sharded_state_dict()
    more = {}
    if hasattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats"):
        # 0.15 and later: the default format still names one that the same release can no longer write.
        more["metadata"] = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    return {"model": states, "optimizer": optimizer.sharded_state_dict(states, is_loading=loading, **more)}


def save(rank, args, wrapped, optimizer, step):
    rank.at("save after step {}".format(step - 1))
    if args.get("distributed_optimizer"):
        from megatron.core import dist_checkpointing

        folder = os.path.join(args["save"], "dist")
        if rank.rank == 0:
            os.makedirs(folder, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(_sharded(wrapped, optimizer, False), folder)
    else:
        # One file per rank, as Megatron's --ckpt-format torch does.
        states = {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(states, os.path.join(args["save"], "rank{}.pt".format(rank.rank)))
    if rank.rank == 0:
        with open(os.path.join(args["save"], "step"), "w") as handle:
            handle.write(str(step))


def load(rank, args, wrapped, optimizer):
    rank.at("load")
    if args.get("distributed_optimizer"):
        from megatron.core import dist_checkpointing

        states = dist_checkpointing.load(_sharded(wrapped, optimizer, True), os.path.join(args["load"], "dist"))
    else:
        path = os.path.join(args["load"], "rank{}.pt".format(rank.rank))
        try:
            states = torch.load(path, map_location="cuda", weights_only=False)
        except TypeError:  # torch 1.x has no weights_only
            states = torch.load(path, map_location="cuda")
    wrapped.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    with open(os.path.join(args["load"], "step")) as handle:
        return int(handle.read())


def train(rank):
    args = rank.args
    device = ranks.init_process_group(rank, args["device"])
    rank.at("model parallel groups")
    parallel_state.initialize_model_parallel(args["tp"], args["pp"])
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(args["seed"])
    config = config_of(args, device, rank.world)
    model = build(args, config)
    place(args, model)
    model = model.to(device)
    if device.type == "cuda":
        losses, optimizer = train_gpu(rank, args, model, device, config)
    else:
        losses, optimizer = train_cpu(rank, args, model, device)
    rank.result(
        losses=losses,
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
    )
    rank.result(optimizer_class=inner_class(optimizer) if optimizer else "torch.optim.Adam", **digests(model))
    if device.type == "cuda":
        rank.result(reported=traces.te_reported_backend(), peak_gib=torch.cuda.max_memory_allocated() / 2**30)
    rank.at("barrier")
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks.main(train)

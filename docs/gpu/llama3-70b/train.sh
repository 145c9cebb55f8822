#!/bin/bash
# In the image of llama3-70b, with an empty folder at /w: train 20 steps with sgd; 10, a checkpoint, and 10 more; the same
# with adam and a distributed checkpoint; convert the first one to TP2 PP2 and back; compare.
# envbuild run TAG --gpus 0 --mount DIR:/w -- bash /w/train.sh [RANKS [TP]]
set -u
ranks=${1:-1} tp=${2:-1}
export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 NCCL_ALGO=Ring CUBLAS_WORKSPACE_CONFIG=:4096:8 OMP_NUM_THREADS=4
export CUDA_DEVICE_MAX_CONNECTIONS=1
flags=(
    --num-layers 8 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 --group-query-attention
    --num-query-groups 4 --seq-length 1024 --max-position-embeddings 1024 --position-embedding-type rope
    --rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --micro-batch-size 4 --global-batch-size 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000
    --num-workers 0 --split 100,0,0 --eval-iters 0 --log-interval 1 --train-iters 20 --lr 1e-2
    --lr-decay-style constant --weight-decay 0.01 --attention-dropout 0 --hidden-dropout 0 --ckpt-format torch --bf16
    --deterministic-mode --optimizer sgd --sgd-momentum 0.9 --transformer-impl transformer_engine
    --data-cache-path /w/cache --tensor-model-parallel-size "$tp"
)
if [ "$tp" -gt 1 ]; then flags+=(--sequence-parallel); fi
cd /workspace/megatron-lm || exit

train() {
    local name=$1
    shift
    torchrun --standalone --nproc-per-node "$ranks" pretrain_gpt.py "${flags[@]}" "$@" >"/w/$name.log" 2>&1
    echo "$name: exit code $?"
    sed -nE 's/.* iteration +([0-9]+)\/ .* lm loss: (\S+) .*grad norm: (\S+) .*/\1 \2 \3/p' "/w/$name.log" >"/w/$name.steps"
}

convert() {
    local from=$1 to=$2 size=$3
    python tools/checkpoint/convert.py --model-type GPT --loader core --saver core --load-dir "/w/$from" --save-dir "/w/$to" \
        --target-tensor-parallel-size "$size" --target-pipeline-parallel-size "$size" >"/w/$to.log" 2>&1
    echo "$from to $to: exit code $?"
}

train whole
train first --exit-interval 10 --save /w/kept --save-interval 10
train second --load /w/kept --save /w/kept --save-interval 20
cat /w/first.steps /w/second.steps | cmp - /w/whole.steps && echo "stopped and resumed: the same steps"
# SGD_sai refuses Megatron's default format, which needs the patch dist-checkpoint; Adam does not
adam=(--optimizer adam --lr 1e-4 --ckpt-format torch_dist)
train adam-whole "${adam[@]}"
train adam-first "${adam[@]}" --exit-interval 10 --save /w/distributed --save-interval 10
train adam-second "${adam[@]}" --load /w/distributed --save /w/distributed --save-interval 20
cat /w/adam-first.steps /w/adam-second.steps | cmp - /w/adam-whole.steps && echo "by a distributed checkpoint: the same steps"
trained=kept
if [ "$tp" -gt 1 ]; then trained=one && convert kept one 1; fi
convert kept parts 2
convert parts back 1
python - "$trained" <<'PYTHON'
import sys

import torch


def model(folder):
    path = f"/w/{folder}/iter_0000020/mp_rank_00/model_optim_rng.pt"
    return torch.load(path, map_location="cpu", weights_only=False)["model"]


before, after = model(sys.argv[1]), model("back")
tensors = {name: value for name, value in before.items() if torch.is_tensor(value)}
# rows past the trained ones are padding of the vocabulary
same = [name for name, value in tensors.items() if torch.equal(value.float(), after[name].float()[: value.shape[0]])]
print(len(same), "of", len(tensors), "tensors have the values that were trained")
PYTHON
train again --load /w/back --finetune --exit-interval 3

"""Save a distributed checkpoint with Megatron-core on the processor, load it again, and print what became of it."""

import json
import sys
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor


def state(tensor: torch.Tensor, more: object) -> dict:
    """Return a state of one tensor and one object: the writer has a way for each."""
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", tensor),
        "more": ShardedObject("more", more, (1,), (0,)),
    }


def main(place: Path) -> None:
    torch.cuda.synchronize = lambda *_: None  # the writer waits for copies from a GPU
    torch.cuda.current_device = lambda: "cpu"
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}.store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    saved = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    place.mkdir()
    dist_checkpointing.save(state(saved, {"step": 7}), str(place))
    loaded = dist_checkpointing.load(state(torch.zeros(3, 4), None), str(place))
    print(json.dumps({"weight": torch.equal(loaded["weight"], saved), "more": loaded["more"]}))


if __name__ == "__main__":  # the writer starts this file again
    main(Path(sys.argv[1]))

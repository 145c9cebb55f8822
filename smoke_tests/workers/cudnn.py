"""Load torch's cuDNN, then Transformer Engine, and report which cuDNN libraries this process then holds."""

import os

import torch

from smokelib import rank as ranks
from smokelib import te, traces


def body(rank):
    version = torch.backends.cudnn.version()
    error = ""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError, RuntimeError) as failure:
        error = te.load_failure(failure)[:1500]
    folders = sorted({os.path.dirname(os.path.realpath(path)) for path in traces.loaded_libraries(r"libcudnn[_.]")})
    rank.result(version=version, error=error, folders=folders)


if __name__ == "__main__":
    ranks.main(body)

"""Plan -> devcontainer.json: the image as an editor's container, with what training needs."""

import json
from typing import Any

from envbuild.errors import LockError
from envbuild.plan.cluster import Cluster, name_of, uses_gpus
from envbuild.plan.plan import Plan
from envbuild.util import quote


def devcontainer(plan: Plan, cluster: Cluster) -> str:
    """Return the file's text.

    Raises:
        LockError: a value would be replaced by the tool that reads the file.

    """
    # `--gpus` here, and not hostRequirements: a host without GPUs is then an error, and not a start without them
    flags = ["--gpus=all"] if uses_gpus(plan) else []
    # no limit on locked memory is lifted: an engine that may not would not start, and one host has no RDMA to train over
    flags += ["--ipc=host", "--ulimit=stack=67108864"]
    try:
        found: dict[str, Any] = {
            "name": quote.devcontainer(name_of(plan)),
            "image": quote.devcontainer(cluster.reference),
            "runArgs": flags,
            # the image's own user; a copy with other numbers would be another image
            "updateRemoteUserUID": False,
        }
        if plan.compat:
            # an editor's container starts without the image's entrypoint; this makes the link that LD_LIBRARY_PATH names
            found["postStartCommand"] = ["sh", "-c", ". /opt/envbuild/cuda-compat.sh"]
        jupyter = plan.stack is not None and plan.stack.jupyter
        if jupyter:
            # an editor forwards it from the container's 127.0.0.1, where the server listens
            found["forwardPorts"] = [8888]
            found["portsAttributes"] = {"8888": {"label": "Jupyter", "onAutoForward": "silent"}}
        found["customizations"] = {
            "vscode": {
                "extensions": ["ms-python.python", *(["ms-toolsai.jupyter"] if jupyter else [])],
                "settings": {"python.defaultInterpreterPath": "/opt/venv/bin/python"},
            }
        }
    except ValueError as error:
        raise LockError(
            f"a value cannot be written into devcontainer.json: {error}",
            where="--format devcontainer",
            hint="give the image another name: --image",
        ) from error
    return json.dumps(found, indent=2) + "\n"

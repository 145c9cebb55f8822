"""Stop a job before it trains where its image, driver or GPUs are not what it was rendered for.

Runs in the image, on every node: LOCK GPUS FLOOR CUDA. An empty LOCK or FLOOR is not compared.
Exits with 4 for another image, and with 8 for a host that cannot run it.
"""

import json
import os
import re
import sys


def stop(code, why):
    """End with a message that names the node."""
    sys.stderr.write(f"envbuild: {os.uname().nodename}: {why}\n")
    sys.exit(code)


def numbers(version):
    """Return a version for comparing."""
    return [int(number) for number in re.findall(r"\d+", version)]


lock, gpus, floor, cuda = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
if lock:
    try:
        with open("/opt/envbuild/expected.json", encoding="utf-8") as file:
            found = json.load(file)["lock_digest"]
    except OSError:
        found = "none"
    if found != lock:
        stop(4, f"the image holds lock {found}, and this job is for {lock}")
if gpus:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            match = re.search(r"\s(\d+(?:\.\d+)+)\s", file.readline())
    except OSError:
        match = None
    compat = os.environ.get("ENVBUILD_CUDA_COMPAT_STATE", "").startswith("on")
    if floor and match and not compat and numbers(match[1]) < numbers(floor):
        stop(8, f"the driver is {match[1]}, and CUDA {cuda} needs {floor} or newer")
    import torch

    try:
        count = torch.cuda.device_count()
        for number in range(min(count, gpus)):
            torch.ones(1, device=f"cuda:{number}").item()
    except Exception as error:  # noqa: BLE001 - whatever CUDA says, training cannot start
        stop(8, f"a GPU does not start: {error}")
    if count < gpus:
        stop(8, f"the container sees {count} GPUs, and the job asks for {gpus}")

"""The report on the ranks of a watched command, from what its processes wrote; and the hook that writes it."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from envbuild.cli import main
from envbuild.paths import data_dir
from envbuild.verify.watched import Fabric, read_ranks

IB = {"name": "mlx5_0", "layer": "InfiniBand", "state": "4: ACTIVE", "driver": "mlx5_core"}
EFA = {"name": "rdmap0s6", "layer": "Unspecified", "state": "4: ACTIVE", "driver": "efa"}
ROCE = {"name": "mlx5_1", "layer": "Ethernet", "state": "4: ACTIVE", "driver": "mlx5_core"}
SOCKETS = "n:1:1 [0] NCCL INFO NET/IB : No device found.\nn:1:1 [0] NCCL INFO Using network Socket\n"
IN_IB = "n:1:1 [0] NCCL INFO Using network IB\n"


def wrote(folder: Path, pid: int, log: str | None = None, **facts: Any) -> None:
    values = {"pid": pid, "rank": 0, "world": 1, "steps": 5, "profiled": True, "program": "train.py"} | facts
    (folder / f"process-{pid}.json").write_text(json.dumps(values))
    if log is not None:
        (folder / f"nccl-{pid}.log").write_text(log)


def test_a_rank_with_te_and_fp8(tmp_path: Path) -> None:
    wrote(
        tmp_path,
        7,
        selected={"FusedAttention (sub-backend 1)": 3},
        disabled={"Disabling FlashAttention due to NVTE_FLASH_ATTN=0": 3},
        fp8={"DelayedScaling": 24, "off": 1},
        kernels={
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob": 2,
            "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>": 1,
            "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64": 12,
            "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<...>": 4,
            "void scaled_upper_triang_masked_softmax_warp_forward<...>": 1,
            "nvjet_qqtst_128x256_128x5_2x1_v_bz_coopB_TNT": 2,
            "void cutlass::device_kernel<flash::enable_sm90<FlashAttnFwdSm90<cutlass::float_e4m3_t>>>": 1,
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": 2,
            "void at::native::vectorized_elementwise_kernel<4>": 9,
        },
        gpu="NVIDIA H100 80GB HBM3",
    )
    (rank,), faults = read_ranks(tmp_path)
    assert not faults
    assert rank.attention == (
        "Transformer Engine: FusedAttention (sub-backend 1)",
        "kernel: cuDNN fused",
        "kernel: FlashAttention",
    )
    assert rank.not_taken == ("Disabling FlashAttention due to NVTE_FLASH_ATTN=0",)
    assert rank.fused == {"fused Adam": 1, "fused norm": 4, "fused softmax": 1}
    assert rank.fp8 == {"on": True, "recipes": ["DelayedScaling"], "kernels": {"FP8 GEMM": 14, "FP8 attention": 1}}


@pytest.mark.parametrize(
    ("operator", "backend"),
    [
        ("aten::_scaled_dot_product_flash_attention", "torch: flash"),
        ("aten::_scaled_dot_product_cudnn_attention", "torch: cuDNN"),
        ("aten::_scaled_dot_product_attention_math", "torch: math (unfused)"),
    ],
)
def test_what_torch_chose(tmp_path: Path, operator: str, backend: str) -> None:
    wrote(tmp_path, 7, operators={operator: 1, "aten::scaled_dot_product_attention": 1})
    assert read_ranks(tmp_path)[0][0].attention == (backend,)


def test_no_fused_attention_at_all(tmp_path: Path) -> None:
    wrote(tmp_path, 7, kernels={"ampere_bf16_s16816gemm_bf16_128x64": 3})
    assert read_ranks(tmp_path)[0][0].attention == ("unfused: no fused attention ran in the profiled step",)


def test_the_launcher_is_no_rank_and_a_rank_is_its_process_with_most_steps(tmp_path: Path) -> None:
    wrote(tmp_path, 1, rank=None, world=None, steps=0, profiled=False, program="torchrun")
    wrote(tmp_path, 2, rank=0, world=2)
    wrote(tmp_path, 3, rank=1, world=2, backends=["nccl"], steps=4)
    wrote(tmp_path, 4, rank=1, world=2, backends=["gloo"], steps=0, program="helper.py")
    ranks, _ = read_ranks(tmp_path)
    assert [(each.rank, each.program, each.steps) for each in ranks] == [(0, "train.py", 5), (1, "train.py", 4)]
    assert ranks[1].problems == ("NCCL wrote no log: it was not used, or the command sets NCCL_DEBUG_FILE for itself",)


@pytest.mark.parametrize(
    ("adapter", "log", "words"),
    [
        (IB, SOCKETS, "uses sockets past mlx5_0 (InfiniBand, active): the process has no /dev/infiniband/uverbs*"),
        (EFA, SOCKETS, "uses sockets past rdmap0s6 (EFA, active): NCCL says nothing of its network plugin"),
        (IB, IN_IB, ""),
        (ROCE, SOCKETS, ""),
        ({**IB, "state": "1: DOWN"}, SOCKETS, ""),
    ],
)
def test_sockets_past_an_adapter(tmp_path: Path, adapter: dict[str, str], log: str, words: str) -> None:
    wrote(tmp_path, 7, log, backends=["nccl"], adapters=[adapter], versions={"nccl": "2.27.5"})
    sockets = read_ranks(tmp_path)[0][0].sockets
    assert words in sockets
    assert bool(sockets) == bool(words)


def test_an_adapter_that_only_the_host_sees(tmp_path: Path) -> None:
    wrote(tmp_path, 7, SOCKETS, backends=["nccl"])
    fabric = Fabric(adapters={"mlx5_0": ("InfiniBand", True)})
    assert "sockets past mlx5_0 (InfiniBand, active)" in read_ranks(tmp_path, fabric)[0][0].sockets


def test_hostile_files_are_named_and_nothing_of_them_reaches_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "process-1.json").write_text("{")
    (tmp_path / "process-2.json").write_text(json.dumps({"pid": 2, "rank": -1}))
    (tmp_path / "process-3.json").symlink_to("/etc/passwd")
    (tmp_path / "process-4.json").write_text(json.dumps({"pid": 4, "kernels": {"k" * 100_000: 1}}))
    (tmp_path / "process-5.json").write_bytes(b" " * (1 << 21))
    wrote(tmp_path, 6, program="\x1b[31mx", selected={"\x1b]0;t\x07": 1}, problems=["\x1b[2J"], gpu="\x9b31m")
    ranks, faults = read_ranks(tmp_path)
    assert len(ranks) == 1
    assert len(faults) == 5
    assert "\\x1b" in json.dumps(ranks[0].program)
    assert all(character.isprintable() for character in "".join([str(ranks[0]), *faults]))


def test_names_that_are_slow_to_match_cost_no_time(tmp_path: Path) -> None:
    wrote(tmp_path, 1, kernels={"flash" * 60: 1, **{f"{number:04}" + "flash" * 59: 1 for number in range(990)}})
    wrote(tmp_path, 2, rank=1, kernels={"flash" * 799: 1})
    began = time.process_time()
    ranks, faults = read_ranks(tmp_path)
    assert time.process_time() - began < 10
    assert [rank.rank for rank in ranks] == [0]
    assert len(faults) == 1
    assert faults[0].startswith("process-2.json: kernels.flash")


# The hook, with packages of the same shape as torch's and Transformer Engine's where it takes hold of them.
TORCH = """
class cuda:
    is_available = is_initialized = staticmethod(lambda: False)
__version__ = "9.9"
class version:
    cuda = None
"""
OPTIMIZER = """
hooks = []
def register_optimizer_step_post_hook(hook):
    hooks.append(hook)
class Optimizer:
    def step(self):
        for hook in hooks:
            hook(self, (), {})
"""
DISTRIBUTED = """
from . import distributed_c10d
from .distributed_c10d import *
def is_available():
    return True
"""
C10D = """
def init_process_group(backend):
    pass
def get_backend():
    return "gloo"
def get_backend_config():
    return "cpu:gloo,cuda:nccl"
def get_rank():
    return 3
def get_world_size():
    return 4
"""
FP8 = """
class DelayedScaling:
    pass
class FP8GlobalStateManager:
    on = False
    @classmethod
    def NAME(cls, enabled=False, fp8_recipe=None):
        cls.on = enabled
    @classmethod
    def is_fp8_enabled(cls):
        return cls.on
    @classmethod
    def get_fp8_recipe(cls):
        return DelayedScaling()
"""


def hook(tmp_path: Path, program: str, *, steps: int = 0, enter: str = "fp8_autocast_enter") -> dict[str, Any]:
    """Run a program under the hook, next to packages that look like torch and TE; return what it wrote."""
    module = "fp8" if enter.startswith("fp8") else "quantization"
    files = {
        "torch/__init__.py": TORCH + "from . import optim, distributed\n",
        "torch/optim/__init__.py": "from . import optimizer\n",
        "torch/optim/optimizer.py": OPTIMIZER,
        "torch/distributed/__init__.py": DISTRIBUTED,
        "torch/distributed/distributed_c10d.py": C10D,
        "transformer_engine/__init__.py": "__version__ = '2.6'\n",
        "transformer_engine/pytorch/__init__.py": "",
        f"transformer_engine/pytorch/{module}.py": FP8.replace("NAME", enter),
        "sitecustomize.py": "import os\nos.environ['OWN'] = 'yes'\n",
        "main.py": program,
    }
    for name, text in files.items():
        place = tmp_path / "site" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "site" / "main.py")],
        env={
            "PYTHONPATH": f"{data_dir('dockerfiles') / 'watch'}:{tmp_path / 'site'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "ENVBUILD_WATCH_OUT": str(out),
            "ENVBUILD_WATCH_STEPS": str(steps),
            "RANK": "1",
            "NCCL_DEBUG": "WARN",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (written,) = out.glob("process-*.json")
    found: dict[str, Any] = json.loads(written.read_text())
    return found | {"stdout": done.stdout, "stderr": done.stderr}


@pytest.mark.parametrize("enter", ["fp8_autocast_enter", "autocast_enter"])
def test_the_hook_notes_te(tmp_path: Path, enter: str) -> None:
    module = "fp8" if enter.startswith("fp8") else "quantization"
    found = hook(
        tmp_path,
        "import logging, os, torch, transformer_engine\n"
        f"from transformer_engine.pytorch.{module} import FP8GlobalStateManager as manager\n"
        "logger = logging.getLogger('DotProductAttention')\n"
        "logger.debug('Disabling FlashAttention due to %s', 'NVTE_FLASH_ATTN=0')\n"
        "logger.debug('Selected backend = %s.', 'FusedAttention (sub-backend 1)')\n"
        f"manager.{enter}(enabled=True)\n"
        f"manager.{enter}(enabled=False)\n"
        "print(os.environ['OWN'], os.environ['NCCL_DEBUG'], os.environ['NVTE_DEBUG_LEVEL'])\n",
        enter=enter,
    )
    assert found["selected"] == {"FusedAttention (sub-backend 1)": 1}
    assert found["disabled"] == {"Disabling FlashAttention due to NVTE_FLASH_ATTN=0": 1}
    assert found["fp8"] == {"DelayedScaling": 1, "off": 1}
    assert found["rank"] == 1
    assert found["versions"]["te"] == "2.6"
    # the environment's own sitecustomize ran, too, and the command's NCCL_DEBUG gave way
    assert found["stdout"] == "yes INFO 2\n"


def test_the_hook_ends_a_rank_after_its_steps(tmp_path: Path) -> None:
    found = hook(
        tmp_path,
        "import torch\n"
        "torch.distributed.init_process_group('gloo')\n"
        "one, other = torch.optim.optimizer.Optimizer(), torch.optim.optimizer.Optimizer()\n"
        "for step in range(100):\n"
        "    one.step()\n"
        "    other.step()\n"
        "    print(step, flush=True)\n",
        steps=5,
    )
    assert found["steps"] == 5
    assert found["stdout"].split() == ["0", "1", "2", "3"]
    assert (found["rank"], found["world"], found["backends"]) == (3, 4, ["gloo", "nccl"])
    # this torch has no profiler: that is noted, and the command goes on
    assert not found["profiled"]
    assert found["problems"][0].startswith("start_profile: ")


def test_the_hook_changes_nothing_for_a_command_that_fails(tmp_path: Path) -> None:
    found = hook(tmp_path, "import torch, sys\ntry:\n    torch.nothing\nexcept AttributeError:\n    print('as ever')\n")
    assert found["stdout"] == "as ever\n"
    assert found["steps"] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--", "true"], "name an image, or give --host"),
        (["x", "--host", "--", "true"], "name an image, or give --host"),
        (["x", "--"], "no command follows"),
        (["x", "--steps", "5"], "this option is of a command"),
        (["x", "--level", "bench", "--", "true"], "--level is of the smoke tests"),
        (["--host", "--mount", "/tmp:/x", "--", "true"], "sees its folders as they are"),
        (["x", "--mount", "nothing", "--", "true"], "is not a mount"),
        (["x", "--env", "=1", "--", "true"], "sets no variable"),
        (["\x1b[2J", "--", "true"], "is not an image"),
    ],
)
def test_what_cannot_be_asked_of_a_command(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["smoke", *words])
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert says in err
    assert "\x1b" not in err


def test_options_of_the_command_are_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["smoke", "--host", "--json", "--", "echo", "--steps", "1", "--steps", "2", "--level", "x", "--", "y"])
    out, _ = capsys.readouterr()
    answer = json.loads(out)
    assert ended.value.code == 7
    assert answer["command"] == ["echo", "--steps", "1", "--steps", "2", "--level", "x", "--", "y"]
    assert answer["exit_code"] == 0
    assert "--steps 1 --steps 2 --level x -- y" in Path(answer["log"]).read_text()

"""The lr-scheduler patch: DeepSpeed 0.5.1 takes the schedule, and its curve is what it was."""

import json
import subprocess
import tarfile

import pytest
from patch_support import PROBES, REQUIREMENTS, sdist, the_patch, venv, write_sides

DEEPSPEED = "067d95579eeb13a04a4cb49c83ae5c570dac5e37f5578fda656b177a06e720f9"
PATCH = the_patch("lr-scheduler")
PATH = PATCH.files[0].path

# a schedule of our own, around the patch's lines
BETWEEN = {
    0: "import math\n",
    2: """
    def __init__(self, optimizer, start_lr, warmup_iter, total_iters, decay_style, last_iter, min_lr=0.0,
                 use_checkpoint_lr_scheduler=True, override_lr_scheduler=False):
""",
    3: """        self.start_lr, self.min_lr, self.decay_style = start_lr, min_lr, decay_style
        self.warmup_iter, self.end_iter, self.num_iters = warmup_iter, total_iters, last_iter
        self.override = override_lr_scheduler
        self.step(last_iter)
        print_rank_0(decay_style)

    def rate(self):
        if self.num_iters < self.warmup_iter:
            return self.start_lr * self.num_iters / self.warmup_iter
        done = min(1.0, (self.num_iters - self.warmup_iter) / self.end_iter)
        falling = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "exponential": 0.5 ** done}
        return max(self.min_lr, self.start_lr * falling.get(self.decay_style, 1.0))

    def step(self, step_num=None):
        self.num_iters = self.num_iters + 1 if step_num is None else step_num
        new_lr = self.rate()
        for group in self.optimizer.param_groups:
""",
    4: """    def state_dict(self):
        return {"start_lr": self.start_lr, "num_iters": self.num_iters, "decay_style": self.decay_style,
                "warmup_iter": self.warmup_iter}

    def load_state_dict(self, state):
        if not self.override:
            vars(self).update(state)
        self.step(state["num_iters"])
""",
}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["stand-in", "real"])
def result(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lr")
    write_sides(request.param, PATCH, PATH, BETWEEN, folder / "before.py", folder / "after.py")
    python = venv(*REQUIREMENTS)
    with tarfile.open(sdist(python, "deepspeed", "0.5.1", DEEPSPEED)) as archive:
        engine = archive.extractfile("deepspeed-0.5.1/deepspeed/runtime/engine.py")
        (folder / "engine.py").write_bytes(engine.read())
    command = [python, PROBES / "lr_scheduler.py", *(folder / n for n in ("before.py", "after.py", "engine.py", "out"))]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "out").read_text())


def test_deepspeed_takes_it_and_refused_it_before(result):
    assert result["is_a"]
    assert result["deepspeed"]["after"] == "accepted"
    assert result["deepspeed"]["before"].startswith("refused: Client LR Scheduler is of unexpected type")


def test_the_curve_is_the_same_point_by_point(result):
    assert result["points"] == 4 * 2 * 3 * 62
    assert result["different"] == []


def test_last_rates_are_kept_current(result):
    assert result["last_lr_wrong"] == 0


def test_the_state_dict_is_the_same_and_goes_round(result):
    assert result["state"] == result["old_state"]
    ours, theirs = result["round_trip"]
    assert ours == theirs
    assert ours["state"]["num_iters"] == 30
    assert result["overridden"] == ["linear", 30]

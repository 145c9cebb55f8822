"""How long a command takes to answer, next to `hpccm --recipe` of an equal recipe: one paired run of whole commands.

Run: python benchmarks/bench_start.py [--json] [--runs N] [--cpu N] [--hpccm PROGRAM]

Without --hpccm, hpccm comes from the package index into a virtual environment in a temporary folder. The commands take
turns: each round runs every one of them once, in a new order, on one core. The figures are medians over the rounds. The
ratios are medians of the ratio to hpccm in the same round, so that what else the machine does weighs on both sides.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "headline.hpccm.py"
HPCCM = "hpccm==26.5.0"
HEADLINE = ["--cuda", "12.6", "--te", "2.6", "--gpu", "h100", "--flash-attn-hopper", "auto"]
REFERENCE = "hpccm --recipe"

# command -> (its arguments, variables, at most this ratio to hpccm, at most this many milliseconds)
COMMANDS: dict[str, tuple[list[str], dict[str, str], float | None, float | None]] = {
    "envbuild render --unlocked": (["render", "--unlocked", *HEADLINE], {}, 1.0, None),
    "envbuild resolve": (["resolve", *HEADLINE], {}, 0.9, None),
    "envbuild --help": (["--help"], {}, None, 60.0),
    "a shell completion": (
        [],
        {"_ENVBUILD_COMPLETE": "bash_complete", "COMP_WORDS": "envbuild render --t", "COMP_CWORD": "2"},
        None,
        100.0,
    ),
}


def install(folder: Path) -> Path:
    """Return the program `hpccm` of a new virtual environment in `folder`."""
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", HPCCM], check=True)
    return folder / "bin" / "hpccm"


def timed(command: list[str], variables: dict[str, str]) -> tuple[float, float]:
    """Run a command and return its wall and its CPU time (user and system) in milliseconds."""
    # byte code is kept, as after any installation; the first round, which does not count, writes it
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | variables
    start = time.perf_counter()
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    _, status, used = os.wait4(child.pid, 0)
    wall = (time.perf_counter() - start) * 1e3
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return wall, (used.ru_utime + used.ru_stime) * 1e3


def measure(commands: dict[str, tuple[list[str], dict[str, str]]], runs: int) -> dict[str, list[tuple[float, float]]]:
    """Return (wall, CPU) of every run of each command, round by round."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for command, variables in commands.values():  # byte code, caches of the disk, envbuild's compiled data
        timed(command, variables)
    shuffled, generator = list(commands), random.Random(1)
    for _ in range(runs):
        generator.shuffle(shuffled)
        for name in shuffled:
            times[name].append(timed(*commands[name]))
    return times


def figures(times: dict[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Return a row per command: medians in milliseconds, and medians of the ratios to hpccm, round by round."""
    rows = []
    for name, own in times.items():
        row: dict[str, Any] = {"command": name, "runs": len(own)}
        for place, what in enumerate(("wall", "cpu")):
            row[f"{what}_ms"] = round(statistics.median(each[place] for each in own), 1)
            row[f"{what}_best_ms"] = round(min(each[place] for each in own), 1)
            pairs = zip(own, times[REFERENCE], strict=True)
            row[f"{what}_ratio"] = round(statistics.median(one[place] / other[place] for one, other in pairs), 2)
        if name in COMMANDS:
            _, _, row["target_ratio"], row["target_ms"] = COMMANDS[name]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=21, help="rounds; each runs every command once (default 21)")
    parser.add_argument("--cpu", type=int, help="the core that all commands run on (default: the last one)")
    parser.add_argument("--hpccm", type=Path, help="the hpccm to compare with, instead of one from the package index")
    parser.add_argument("--envbuild", type=Path, help="the envbuild to measure (default: next to this Python)")
    arguments = parser.parse_args()
    core = max(os.sched_getaffinity(0)) if arguments.cpu is None else arguments.cpu
    with tempfile.TemporaryDirectory() as folder:
        hpccm = arguments.hpccm or install(Path(folder))
        envbuild = arguments.envbuild or Path(sys.executable).with_name("envbuild")
        os.sched_setaffinity(0, {core})
        commands = {REFERENCE: ([str(hpccm), "--recipe", str(RECIPE)], dict[str, str]())}
        commands |= {name: ([str(envbuild), *words], env) for name, (words, env, *_) in COMMANDS.items()}
        interpreter = Path(envbuild).with_name("python")
        commands["the interpreter itself"] = ([str(interpreter), "-c", "pass"], {})
        before = os.getloadavg()
        rows = figures(measure(commands, arguments.runs))
    load = {"before": round(before[0], 1), "after": round(os.getloadavg()[0], 1), "cores": os.cpu_count()}
    if arguments.json:
        print(json.dumps({"load": load, "figures": rows}, indent=2))
        return
    print(
        f"{load['cores']} cores, load {load['before']} before and {load['after']} after; medians of {arguments.runs} rounds\n"
    )
    print(f"{'':28}{'CPU ms':>9}{'best':>8}{'to hpccm':>10}{'wall ms':>10}{'best':>8}{'to hpccm':>10}{'target':>10}")
    for row in rows:
        target = f"{row['target_ratio']}x" if row.get("target_ratio") else ""
        target = target or (f"{row['target_ms']:g} ms" if row.get("target_ms") else "")
        print(
            f"{row['command']:28}{row['cpu_ms']:>9}{row['cpu_best_ms']:>8}{row['cpu_ratio']:>10}"
            f"{row['wall_ms']:>10}{row['wall_best_ms']:>8}{row['wall_ratio']:>10}{target:>10}"
        )


if __name__ == "__main__":
    main()

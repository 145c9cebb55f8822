#!/usr/bin/env python3
"""Compile small components whole against torch's headers, and compare each with its trials.

    scripts/compile_pairs.py                                   # the sample of docs/results/trials.md
    scripts/compile_pairs.py causal-conv1d=1.7.0,torch=2.13.0  # other pairs
    scripts/compile_pairs.py --clone apex=/src/apex --jobs 4

Every file that the component's extension is made of is compiled with the flags that its build states, .cu files by nvcc for
sm_90 alone, and the objects are linked into one library. The headers come from the wheels of torch and CUDA, so that torch
is not installed; what the library asks of torch's own libraries is not looked up. A build stops at its first error, and so
does this: the unit that the trial names is compiled first.

Needs g++ and, for .cu files, an nvcc of CUDA 13 on the PATH (from PyPI: nvidia-cuda-nvcc). Prints a table in Markdown, a row
as soon as it is known. Exits with 1 when a pair that fails was tried and passed, or the other way round.
"""

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from envbuild.components import COMPONENTS
from envbuild.curate.trials.files import Files
from envbuild.curate.trials.headers import stated_flags
from envbuild.curate.trials.resolution import requirements_for, resolved
from envbuild.curate.trials.sources import cuda_tools, include_folders, torch_standard
from envbuild.curate.trials.subject import cuda_major, find
from envbuild.evidence.trials import Ledger, committed_trials
from envbuild.matrix.load import Matrix, load_matrix
from envbuild.settings import load_settings

PYTHONS = ("3.12", "3.11", "3.10")
# What one extension of a component is made of; of apex and DeepSpeed the ones without a kernel.
UNITS = {
    "apex": ("csrc/flatten_unflatten.cpp",),
    "causal-conv1d": ("csrc/*.cpp", "csrc/*.cu"),
    "deepspeed": ("csrc/adam/cpu_adam.cpp", "csrc/adam/cpu_adam_impl.cpp"),
    "grouped-gemm": ("csrc/*.cu",),
    "mamba-ssm": ("csrc/selective_scan/*.cpp", "csrc/selective_scan/*.cu"),
    "te": ("csrc/*.cpp", "csrc/extensions/*.cpp", "csrc/extensions/*/*.cpp"),
}
CXX_FLAGS = {"deepspeed": ("-fopenmp", "-D__DISABLE_CUDA__")}
SAMPLE = (
    "apex=25.09.post20251222,torch=2.15.0",
    "apex=25.09.post20251222,torch=2.10.0",
    "apex=25.09.post20250821,torch=2.13.0",
    "apex=24.04.01,torch=2.13.0",
    "deepspeed=0.19.8,torch=2.15.0",
    "deepspeed=0.18.9,torch=2.15.0",
    "deepspeed=0.18.9,torch=2.13.0",
    "deepspeed=0.16.9,torch=2.10.0",
    "causal-conv1d=1.7.0,torch=2.15.0",
    "te=2.17.0,torch=2.10.0",
    "mamba-ssm=2.3.2.post1,torch=2.15.0",
    "causal-conv1d=1.5.2,torch=2.15.0",
    "causal-conv1d=1.7.0,torch=2.13.0",
    "causal-conv1d=1.6.0,torch=2.10.0",
    "mamba-ssm=2.3.2.post1,torch=2.13.0",
)


@dataclass(frozen=True)
class Built:
    """What became of one pair."""

    done: int
    units: int
    seconds: float
    error: str = ""


def compile_pair(
    files: Files, matrix: Matrix, pair: dict[str, str], ledger: Ledger, clones: dict[str, Path], jobs: int
) -> Built:
    """Compile every unit of the component, and link them."""
    (component, version), (_, torch) = pair.items()
    cuda = cuda_major(files, torch)
    subject = find(files, matrix, component, version, cuda=cuda, trees={}, clones=clones)
    other = find(files, matrix, "torch", torch, cuda=cuda, trees={}, clones={})
    if subject is None or other is None:
        sys.exit(f"neither the index nor a clone has {component} {version}")
    asked = requirements_for(matrix, {"torch": torch}, other.requirements)
    found = next((each for python in PYTHONS if (each := resolved(files, asked, python)).packages), None)
    if found is None:
        sys.exit(f"no Python gets torch {torch}")
    tools = resolved(files, cuda_tools({name: v for name, (v, _) in found.packages.items()}), found.python)
    named = {**found.packages, **tools.packages}
    wheels = [w for name, (_, hashes) in named.items() if (w := files.by_hash(name, hashes)) is not None]
    includes = include_folders(files, wheels)
    sources = COMPONENTS[component].host_sources
    folder = subject.tree or next(f for sdist in subject.sdists if (f := files.source(sdist)) and (f / "csrc").is_dir())
    defines, stated = stated_flags(folder, sources)
    standard = stated or torch_standard(files, next(w for w in wheels if w.filename.startswith("torch-")))
    flags = [f"-std=c++{standard}", "-O0", "-w", "-DTORCH_EXTENSION_NAME=compiled", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    flags += [*defines, *CXX_FLAGS.get(component, ()), f"-I{sysconfig.get_paths()['include']}"]
    flags += [f"-I{folder / each}" for each in sources.includes] + [f"-isystem{path}" for path in includes]
    nvcc = ["nvcc", "-gencode", "arch=compute_90,code=sm_90", "--expt-relaxed-constexpr", "--expt-extended-lambda"]
    nvcc += ["-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"]
    units = [path for pattern in UNITS[component] for path in sorted(folder.glob(pattern))]
    tried = ledger.of(pair)
    suspect = next((trial.first for trial in tried.trials if trial.verdict == "failed"), "") if tried else ""
    units.sort(key=lambda path: str(path.relative_to(folder)) not in suspect)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compile-pairs-") as place:

        def one(numbered: tuple[int, Path]) -> str:
            number, unit = numbered
            if errors:
                return ""
            start = [*nvcc, "-Xcompiler", "-fPIC"] if unit.suffix == ".cu" else ["g++", "-fPIC", "-fmax-errors=1"]
            line = [*start, *flags, "-c", str(unit), "-o", f"{place}/{number}.o"]
            ran = subprocess.run(line, capture_output=True, text=True, errors="replace", check=False)
            if ran.returncode:
                first = next((each for each in ran.stderr.splitlines() if "error" in each), ran.stderr[-200:])
                errors.append(f"{unit.relative_to(folder)}: {'/'.join(first.split('/')[-2:])}")
            return "" if ran.returncode else f"{place}/{number}.o"

        errors: list[str] = []
        # the first alone: it is the one that the trial names
        objects = [one((0, units[0]))]
        with ThreadPoolExecutor(jobs) as pool:
            objects += pool.map(one, enumerate(units[1:], 1))
        objects = [each for each in objects if each]
        if not errors:
            linked = subprocess.run(
                ["g++", "-shared", *objects, "-o", f"{place}/compiled.so"], capture_output=True, text=True, check=False
            )
            errors += [linked.stderr.strip().splitlines()[-1]] if linked.returncode else []
    return Built(done=len(objects), units=len(units), seconds=time.monotonic() - begun, error=next(iter(errors), ""))


def main() -> int:
    """Compile the pairs that are asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", metavar="COMPONENT=VERSION,torch=VERSION")
    parser.add_argument("--clone", action="append", default=[], metavar="AXIS=PATH")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--records", type=Path, help="the folder of trials; this tree's when not given")
    arguments = parser.parse_args()
    if shutil.which("g++") is None or shutil.which("nvcc") is None:
        sys.exit("g++ and nvcc must be on the PATH")
    from envbuild.evidence.trials import load_trials

    files, matrix = Files(load_settings()), load_matrix()
    ledger = Ledger(load_trials(arguments.records) if arguments.records else committed_trials())
    clones = {axis: Path(path) for axis, _, path in (each.partition("=") for each in arguments.clone)}
    print("| component | torch | trials | compiled | files | first error |\n|---|---|---|---|---|---|", flush=True)
    differs = False
    for text in arguments.pairs or SAMPLE:
        pair = dict(each.split("=", 1) for each in text.split(","))
        built = compile_pair(files, matrix, pair, ledger, clones, arguments.jobs)
        tried = ledger.of(pair)
        kinds = [t for t in tried.trials if t.kind in {"headers", "sources"}] if tried else []
        words = ", ".join(f"{trial.kind} {trial.verdict}" for trial in kinds) or "none"
        failed = any(trial.verdict == "failed" for trial in kinds)
        differs |= bool(kinds) and failed != bool(built.error)
        (component, version), (_, torch) = pair.items()
        came = "failed" if built.error else "yes"
        print(
            f"| {component} {version} | {torch} | {words} | {came} | {built.done} of {built.units} "
            f"| {built.error.replace('|', '/')[:160]} |",
            flush=True,
        )
        print(f"{text}: {built.seconds:.0f} s", file=sys.stderr, flush=True)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())

"""A matrix small enough to know by heart, in the real one's axes."""

import datetime as dt

from envbuild.components.apex import ApexFacts
from envbuild.components.torch import TorchFacts
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import Axis, CudaFacts, GpuFacts, Release, Rule
from envbuild.solver.asked import read_request
from envbuild.solver.order import best_values

PAGE = "https://example.org/page"


def axis(name, use, scheme="pep440", **more):
    return Axis(name=name, title=name, about="-", use=use, scheme=scheme, **more)


def release(version, date=None, **more):
    return Release(version=version, source=PAGE, date=dt.date.fromisoformat(date) if date else None, **more)


def requires(name, **more):
    return Rule(**{"id": name, "kind": "requires", "topic": name, "why": f"{name} says so", "source": PAGE, **more})


def small_matrix():
    axes = [
        axis("apex", "default", dated=True),
        axis("base", "always", "name"),
        axis("cuda", "always"),
        axis("cudnn", "derived"),
        axis("driver", "host", open=True),
        axis("flash-attn", "asked", dated=True),
        axis("gpu", "default", "name"),
        axis("python", "always"),
        axis("te", "default", dated=True),
        axis("torch", "always", dated=True),
    ]
    releases = {
        "apex": (
            release("25.05", "2025-05-01", commit="a" * 40, facts=ApexFacts(build="environment")),
            release("25.08", "2025-08-01", commit="b" * 40, facts=ApexFacts(build="environment")),
            release("25.08.post1", "2025-08-05", commit="c" * 40, asked=True),
        ),
        "base": (release("slim"), release("full"), release("ngc-1", asked=True, needs={"torch": "2.7.1+cu126"})),
        "cuda": (
            release(
                "12.6",
                facts=CudaFacts(
                    driver_full={"12.6.2": "560.35.03", "12.6.3": "560.35.05"},
                    driver_minor="525.60.13",
                    compat_branches=("470",),
                ),
            ),
            release("12.8", facts=CudaFacts(driver_full={"12.8.0": "570.26"}, driver_minor="525.60.13")),
            release("cpu"),
        ),
        "cudnn": (release("9.1"), release("9.5")),
        "driver": (release("535.54.03"), release("570.26")),
        "flash-attn": (release("2.7.4", "2025-01-29"), release("2.8.3", "2025-08-14")),
        "gpu": (
            release("sm_90", aliases=("h100",), facts=GpuFacts(sm="90")),
            release("sm_70", aliases=("v100",), facts=GpuFacts(sm="70")),
            release("sm_120", aliases=("rtx5090",), facts=GpuFacts(sm="120", data_center=False)),
        ),
        "python": (release("3.10"), release("3.11"), release("3.12")),
        "te": (release("2.5.0", "2025-06-20"), release("2.6.0", "2025-08-06"), release("2.9.0", "2025-11-11")),
        "torch": (
            release("2.6.0+cu126", "2025-01-29", needs={"cuda": "12.6"}, fixes={"cudnn": "9.1"}),
            release("2.7.1+cu126", "2025-06-04", needs={"cuda": "12.6"}, fixes={"cudnn": "9.5"}),
            release(
                "2.8.0+cu126",
                "2025-08-06",
                needs={"cuda": "12.6"},
                fixes={"cudnn": "9.5"},
                facts=TorchFacts(index="pypi", toolkit="12.6.2"),
            ),
            release("2.8.0+cu128", "2025-08-06", needs={"cuda": "12.8"}, fixes={"cudnn": "9.10"}),
            release("2.9.0+cu128", "2025-10-15", needs={"cuda": "12.8"}, fixes={"cudnn": "9.10"}),
            release("2.8.0+cpu", "2025-08-06", needs={"cuda": "cpu"}),
        ),
    }
    rules = (
        requires(
            "te-cudnn",
            when={"te": ">=2"},
            needs={"cudnn": ">=9.3"},
            why="TE 2 needs cuDNN 9.3",
        ),
        requires("cpu-te", when={"cuda": "cpu"}, without=("te",), why="Transformer Engine needs CUDA."),
        requires("cpu-apex", when={"cuda": "cpu"}, without=("apex",)),
        requires("cpu-gpu", when={"cuda": "cpu"}, without=("gpu",)),
        requires("volta", when={"gpu": "sm_70", "te": "any"}, needs={"te": "<2.6"}, why="TE 2.6 left sm_70 behind."),
        requires("driver-12", when={"cuda": ">=12"}, needs={"driver": ">=525.60.13"}),
        Rule(
            id="fa-cap",
            kind="inert",
            topic="te-flash-attn-cap",
            when={"te": "<2.9"},
            needs={"flash-attn": "<=2.8.1"},
            component="flash-attn",
            why="TE before 2.9 ignores flash-attention above 2.8.1.",
            source="NVIDIA/TransformerEngine@v2.6:utils.py",
        ),
    )
    return Matrix(axes={a.name: a for a in axes}, releases=releases, rules=rules, digest="sha256:small")


def locked_together(name, **when):
    return Rule(id=name, kind="tested-with", topic="lock", when=when, why="They are locked together.", source=PAGE)


def with_rules(matrix, *rules):
    return Matrix(axes=matrix.axes, releases=matrix.releases, rules=(*matrix.rules, *rules), digest=matrix.digest)


def request(prefer="proven", origin=None, **pins):
    return Request(
        pins=tuple(
            Pin(axis=a.replace("_", "-"), spec=s, origin=origin or "--" + a.replace("_", "-")) for a, s in pins.items()
        ),
        prefer=prefer,
    )


def best_cell(matrix, request):
    """Return the best cell, or None without finding out why there is none, which takes several times longer."""
    asked = read_request(matrix, request)
    values = best_values(asked, (), asked.compiled.domains(asked.pinned()))
    return None if values is None else asked.compiled.cell(values)

"""Small random matrices, requests and evidence: everything that the model can say, in combinations nobody thought of."""

import datetime as dt

from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import Axis, Release, Rule
from envbuild.solver.proof import EvidenceRef

# names of real software axes, so that evidence applies
SHAPES = [
    ("apex", "default", "pep440", True, False),
    ("base", "always", "name", False, False),
    ("cudnn", "derived", "pep440", False, False),
    ("driver", "host", "pep440", False, True),
    ("megatron", "asked", "pep440", True, False),
    ("te", "default", "pep440", True, False),
    ("torch", "always", "pep440", True, False),
]
VERSIONS = ["1.0", "1.1", "2.0", "2.1.1"]
NAMES = ["x-one", "x-two", "y-one"]
SPECS = ["1", "1.1", ">=1.1", "<2", "!=1.0", ">=2.0,<2.1", ">2.0", "==1.0||>=2.1", "2.1", "<1", ("1.0", "2.0"), "any"]
NAME_SPECS = ["x-one", "x-*", "!x-two", ("x-two", "y-one"), "any"]


def source(random):
    return random.choice(["https://example.org/notes", "owner/repo@main:file", "PyPI:thing==1.0"])


def random_matrix(random):
    axes, releases = {}, {}
    names = [shape[0] for shape in SHAPES]
    for name, use, scheme, dated, is_open in SHAPES:
        axes[name] = Axis(name=name, title=name, about="-", use=use, scheme=scheme, dated=dated, open=is_open)

    def spec(axis):
        return random.choice(NAME_SPECS if axes[axis].scheme == "name" else SPECS)

    def others(axis, chance):
        return [n for n in names if n != axis and random.random() < chance]

    for name, use, scheme, dated, _ in SHAPES:
        pool = NAMES if scheme == "name" else VERSIONS
        chosen = random.sample(pool, random.randint(1, 3))
        if scheme == "pep440":
            chosen.sort()
        found = []
        for version in chosen:
            rare = random.random() < 0.15
            found.append(
                Release(
                    version=version,
                    source=source(random),
                    date=dt.date(2025, 1, random.randint(1, 28)) if dated and random.random() < 0.9 else None,
                    needs={other: spec(other) for other in others(name, 0.08)} if use != "host" else {},
                    **{"with": tuple(others(name, 0.08)) if rare else ()},
                    without=tuple(others(name, 0.1)) if rare else (),
                    asked=use != "derived" and random.random() < 0.08,
                    # values that the derived axis lists, and some that it does not
                    fixes={"cudnn": random.choice(VERSIONS)}
                    if (name == "torch" and random.random() < 0.8) or (name in {"base", "te"} and random.random() < 0.1)
                    else {},
                )
            )
        releases[name] = tuple(found)
    rules = []
    for number in range(random.randint(0, 8)):
        kind = random.choice(["requires", "requires", "inert", "tested-with", "tested-with", "note"])
        when_axes = random.sample(names, random.randint(2, 3) if kind == "tested-with" else random.randint(1, 2))
        body = {"when": {a: spec(a) for a in when_axes}}
        if kind == "note":
            left = [n for n in names if n not in when_axes]
            body["without"] = tuple(random.sample(left, random.randint(0, 1)))
        elif kind != "tested-with":
            left = [n for n in names if n not in when_axes]
            form = random.choice(["needs", "needs", "any_of", "with", "without", "same"])
            if form == "needs":
                body["needs"] = {a: spec(a) for a in random.sample(left, random.randint(1, 2))}
            elif form == "any_of":
                body["any_of"] = tuple(
                    {a: spec(a) for a in random.sample(left, random.randint(1, 2))} for _ in range(2)
                )
            elif form == "same":
                body["same"] = tuple(random.sample(["apex", "cudnn", "te", "torch"], random.randint(2, 3)))
            else:
                body[form] = (random.choice(left),)
        if kind == "inert":
            body["component"] = random.choice(names)
        rules.append(
            Rule(id=f"rule-{number}", kind=kind, topic="test", why=f"reason {number}", source=source(random), **body)
        )
    return Matrix(axes=axes, releases=releases, rules=tuple(rules), digest=f"sha256:{random.random()}")


def random_request(random, matrix):
    pins = []
    for name, axis in matrix.axes.items():
        for _ in range(1 + (random.random() < 0.03)):  # a stack and a flag may both name an axis
            if random.random() > 0.35:
                continue
            versions = [r.version for r in matrix.releases[name]]
            choices = [random.choice(versions), "auto", "none"]
            if axis.scheme == "name":
                choices += ["x-*", "!x-two"]
            if axis.scheme == "pep440":
                choices += [">=1.1", "<2", "!=1.0", "1.5" if axis.open else "1"]
            pins.append(Pin(axis=name, spec=random.choice(choices), origin=f"--{name}"))
    return Request(pins=tuple(pins), prefer="newest" if random.random() < 0.2 else "proven")


def random_evidence(random, matrix):
    names = ["apex", "megatron", "te", "torch"]
    return tuple(
        EvidenceRef(
            id=f"proof-{number}",
            level=random.choice(["gpu", "cpu", "built"]),
            versions={
                name: random.choice([*(r.version for r in matrix.releases[name]), "9.9"])
                for name in names
                if random.random() < 0.7
            },
            # a GPU and a Python in the real matrix; here, axes that are no software
            place={
                name: random.choice([*(r.version for r in matrix.releases[name]), "none", "x-nine"])
                for name in ("base", "cudnn", "unlisted")
                if name in matrix.axes and random.random() < 0.5
            },
            altered=frozenset(name for name in names if random.random() < 0.15),
            image="sha256:" + "0" * 64 if random.random() < 0.4 else None,
        )
        for number in range(random.choice([0, 0, 1, 3]))
    )

"""`masks` answers for a whole axis what `spec.matches` answers for one release."""

import random

import pytest

from envbuild.matrix.model import Axis, Release
from envbuild.matrix.spec import matches
from envbuild.solver.masks import AxisMasks

VERSIONS = [
    "1.9", "1.9.0", "2.0", "2.0.0a0+7c8ec84dab", "2.0.dev1", "2.0rc1", "2.0.post1", "2.0+cu118", "2.0.0+cu121", "2.0.1", "2.1",
    "2.1.0.post2", "2.6.0", "2.6.0.post1", "2.8.3", "2.8.3.post1", "2.8.3.post2", "2.8.4", "2.10", "2.10.0+cu130", "2.99.1",
    "3.0.0b1.post20250315", "13", "1!1.0", "1!2.6.0", "cpu", "ngc",
]  # fmt: skip
TEXTS = [
    "2",
    "2.0",
    "2.6",
    "2.10",
    "2.8.3",
    "2.0.0",
    "2.0rc1",
    "2.0.post1",
    "3.0.0b1",
    "1!2",
    "1.9",
    "13",
    "2.8.3.post1",
]
OPERATORS = ["==", "!=", ">=", "<=", ">", "<", "~="]
COMMIT = "3ea68ad6aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"


def held_against_matches(axis, releases, spec):
    values = (None, *releases)
    expected = sum(1 << i for i, r in enumerate(values) if r is not None and matches(axis, spec, r))
    assert AxisMasks(axis, values).mask(spec) == expected, spec


@pytest.mark.parametrize("chunk", range(5))
def test_versions(chunk):
    generator = random.Random(chunk)
    axis = Axis(name="a", title="a", about="a", scheme="pep440", use="always")
    for _ in range(200):
        releases = [
            Release(
                version=v,
                source="run:test",
                aliases=("named",) if v == "2.6.0" else (),
                commit=COMMIT if v == "2.10" else None,
            )
            for v in generator.sample(VERSIONS, generator.randint(1, len(VERSIONS)))
        ]
        parts = []
        for _ in range(generator.randint(1, 2)):
            operator = generator.choice(OPERATORS)
            text = generator.choice(TEXTS)
            if operator == "~=" and "." not in text.split("!")[-1]:
                text += ".1"
            parts.append(operator + text)
        spec = generator.choice(
            [
                ",".join(parts),
                "||".join(parts),
                generator.choice(TEXTS),
                "==" + generator.choice(["2.0.*", "2.*", "2.8.3.*", "1!2.*", "2.10.*"]),
                "!=" + generator.choice(["2.0.*", "2.6.*"]),
                (parts[0], "2.6.0"),
                "any",
                "named",
                "cpu",
                "3ea68ad6",
                "2.0+cu118",
                "nothing",
            ]
        )
        held_against_matches(axis, releases, spec)


@pytest.mark.parametrize(
    "spec", ["one", "o*", "!o*", "!one", "any", ("one", "t?o"), "alias", "none-of-them", "3ea68ad6"]
)
def test_names(spec):
    axis = Axis(name="a", title="a", about="a", scheme="name", use="always")
    releases = [
        Release(version="one", source="run:test"),
        Release(version="other", source="run:test", aliases=("alias",)),
        Release(version="two", source="run:test", commit=COMMIT),
    ]
    held_against_matches(axis, releases, spec)

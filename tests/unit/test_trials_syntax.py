"""Which Python reads a component's file, as a trial of names asks."""

import pytest

from envbuild.curate.trials.names import Consumer, try_names
from envbuild.curate.trials.syntax import lowest_python


@pytest.mark.parametrize(
    ("text", "lowest"),
    [
        ("x = 1\n", 7),
        ("if (n := 1):\n    pass\n", 8),
        ("def f(a, /):\n    pass\n", 8),
        ("with (a as b, c as d):\n    pass\n", 9),
        ("def f() -> tuple[int, int]:\n    pass\n", 9),
        ("def f(*args: list[int]):\n    pass\n", 9),
        ("class A:\n    x: dict[str, int] = {}\n", 9),
        ("if True:\n    x: list[int] = []\n", 9),
        ("match x:\n    case 1:\n        pass\n", 10),
        ("def f(a: int | None):\n    pass\n", 10),
        ("class A:\n    def f(self) -> 'int | None':\n        pass\n", 7),
        ("def f():\n    x: list[int] = []\n", 7),  # never evaluated
        ("def f():\n    def g() -> list[int]:\n        pass\n", 7),  # not while the file is imported
        ("from typing import List\ndef f(a: List[int]):\n    pass\n", 7),
        ("from __future__ import annotations\ndef f(a: int | None) -> list[int]:\n    pass\n", 7),
        ("try:\n    pass\nexcept* ValueError:\n    pass\n", 11),
    ],
)
def test_the_lowest_python_that_reads_a_file(text: str, lowest: int) -> None:
    assert lowest_python(text) == lowest


@pytest.mark.parametrize(("python", "missing"), [("3.9", 1), ("3.10", 0), ("", 0)])
def test_a_module_that_the_oldest_python_does_not_read_fails_the_trial(python: str, missing: int) -> None:
    consumer = Consumer()
    consumer.add("te/__init__.py", "import torch\nfrom te import attention\n")
    consumer.add("te/attention.py", "match x:\n    case 1:\n        pass\n")
    consumer.add("te/unused.py", "match x:\n    case 1:\n        pass\n")
    consumer.add("setup.py", "match x:\n    case 1:\n        pass\n")
    found = try_names(consumer, entry="te", libraries={}, of="torch", python=python)
    assert len(found.missing) == missing
    if missing:
        assert found.missing == ("te/attention.py: Python 3.10 reads it, and 3.9 does not",)

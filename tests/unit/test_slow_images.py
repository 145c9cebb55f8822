"""Images that were planted slow, by the records of their runs on an H100: each is found, and what changed is named."""

from pathlib import Path

import pytest

from envbuild.evidence.baseline import check_baseline, next_to
from envbuild.evidence.named import altered, run_differences
from envbuild.evidence.records import Evidence, read_evidence

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "gpu" / "image"
ONE = RECORDS / "20261125T220235Z-f8b2d1d643483aa2.json"
"""The bench of the image on one H100."""
TWO = ROOT / "matrices" / "evidence" / "20261125T220137Z-52770ef7e66c0643.json"
"""The same on two."""
LOCKS = (ROOT / "matrices" / "locks",)


def read(name: str) -> Evidence:
    (path,) = RECORDS.glob(f"*-{name}.json")
    return read_evidence(path)


@pytest.mark.parametrize(
    ("name", "baseline", "says", "kernels"),
    [
        ("f9d4ab32b5acdd86", ONE, "TE FP8 has 98,523 tokens per second, 81.7% of the baseline's 120,590", 2),
        ("608c8a84f0822ce0", ONE, "TE FP8 has 89,894 tokens per second, 74.5% of the baseline's 120,590", 0),
        ("3efbf4a747eb9004", TWO, "TE BF16, DDP x2 has 28,965 tokens per second, 17.3% of the baseline's 167,858", 0),
    ],
    ids=["unfused attention", "FP8 off", "one rank on sockets"],
)
def test_a_planted_image_is_slow_and_what_changed_is_named(name: str, baseline: Path, says: str, kernels: int) -> None:
    before, run = read_evidence(baseline), read(name)
    check_baseline(before, str(baseline))
    answer, slow = next_to(run, before, baseline, LOCKS)
    assert slow.startswith(f"slow: {says}")
    assert slow.endswith("both images are of one lock: `envbuild audit` names the files that it does not give")
    differ = {each["what"]: (each["first"], each["second"]) for each in answer["runs_differ"]}
    assert differ.pop("ran") == (f"image {before.image}", f"image {run.image}")
    assert differ.pop("layers of the image") == ("28, 0 of them not in the second", "29, 1 of them not in the first")
    assert len(differ) == kernels
    assert all(what.startswith("attention kernel: TE") and values[1] == "-" for what, values in differ.items())
    assert answer["locks_differ"] == []


def test_the_same_image_again_is_not_slow() -> None:
    before = read_evidence(ONE)
    again = [
        record for path in RECORDS.glob("20261125T221*.json") if (record := read_evidence(path)).same_image(before)
    ]
    assert len(again) == 4
    for run in again:
        answer, slow = next_to(run, before, ONE, LOCKS)
        assert not slow
        assert answer["runs_differ"] == []
        assert not altered(before, run)


def test_an_exchanged_layer_is_another_image() -> None:
    before = read_evidence(ONE)
    assert before.content is not None
    layers = before.content.layers
    for changed, says in (
        ((*layers[:-1], "sha256:" + "0" * 64), ("28, 1 of them not in the second", "28, 1 of them not in the first")),
        (layers[::-1], ("28, in the order of the first", "28, in the order of the second")),
    ):
        content = before.content.model_copy(update={"layers": changed})
        target = {**before.target, "digest": "sha256:" + "1" * 64}
        other = before.model_copy(update={"content": content, "target": target})
        assert altered(before, other)
        differ = {each.what: (each.first, each.second) for each in run_differences(before, other)}
        assert differ["layers of the image"] == says

"""An image's documents: what another reader would read otherwise is refused."""

import json

import pytest

from envbuild.util.foreign_json import parse_json
from envbuild.util.oci_json import parse_oci

MANIFEST = {"schemaVersion": 2, "config": {"digest": "a"}, "layers": [{"digest": "b"}]}


@pytest.mark.parametrize(
    "value",
    [
        {**MANIFEST, "Layers": [{"digest": "c"}]},
        {"schemaVersion": 2, "config": {"digest": "a"}, "LAYERS": []},
        {**MANIFEST, "layers": [{"digest": "b", "Digest": "c"}]},
        {**MANIFEST, "layer\u017f": []},  # Go folds the long s, too
        {"manifests": [{"digest": "a", "platform": {"OS": "linux"}}]},
        {"config": {"Env": ["A=1"], "env": ["LD_PRELOAD=/x"]}, "rootfs": {"diff_ids": []}},
        {"rootfs": {"diff_ids": [], "Diff_ids": ["x"]}},
    ],
)
def test_a_field_in_another_case_is_refused(value):
    with pytest.raises(ValueError, match="in another case"):
        parse_oci(json.dumps(value), limit=10_000)


def test_names_that_are_no_fields_may_be_any():
    value = {
        "config": {
            "Labels": {"layers": "1", "Layers": "2"},
            "Volumes": {"/Config": {}},
            "ExposedPorts": {"80/tcp": {}},
        },
        "annotations": {"Digest": "x", "digest": "y"},
        "org.example.other": {"a": 1},
    }
    assert parse_oci(json.dumps(value), limit=10_000) == value


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '[{"b": {"a": 1, "b": 2, "a": 1}}]'])
def test_a_name_twice_in_one_object_is_refused(text):
    with pytest.raises(ValueError, match="'a' twice in one object"):
        parse_json(text, limit=1000)


def test_very_many_names_take_no_time():
    text = json.dumps({str(number): 0 for number in range(200_000)})
    assert len(parse_json(text, limit=len(text))) == 200_000
    with pytest.raises(ValueError, match="twice"):
        parse_json(text[:-1] + ', "0": 1}', limit=2 * len(text))

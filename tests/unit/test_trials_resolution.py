"""Which sets of packages are those of some cell."""

import pytest

from envbuild.curate.trials.resolution import set_refused_by
from envbuild.matrix.load import load_matrix

RULE = "rule te-cudnn-9.12 refuses"


@pytest.mark.parametrize(
    ("te", "package", "version", "refused"),
    [
        ("2.20.2", "nvidia-cudnn-cu12", "9.10.2.21", True),
        ("2.20.2", "nvidia-cudnn-cu13", "9.11.1.4", True),  # no release of the matrix
        ("2.20.2", "nvidia-cudnn-cu13", "9.15.1.9", False),
        ("2.19.0", "nvidia-cudnn-cu12", "9.10.2.21", False),
        ("2.20.2", "nvidia-cudnn-frontend", "1.0.0", False),
    ],
)
def test_a_set_whose_cudnn_no_cell_has_next_to_the_pair_is_named(te, package, version, refused):
    found = set_refused_by(load_matrix(), {"te": te, "torch": "2.10.0"}, {package: (version, ())})
    assert (RULE in found) == refused
    assert bool(found) == refused

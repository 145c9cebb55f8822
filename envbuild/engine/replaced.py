"""Which inputs of an image were replaced while it was built: a label of the image, so that no run of it counts for the lock's."""

import re
from collections.abc import Collection, Mapping

LABEL = "io.envbuild.replaced"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_MOST = 50


def label_of(stages: Collection[str]) -> dict[str, str]:
    """Return the label of an image that was built with these inputs from elsewhere; none where there are none.

    Args:
        stages: their names, such as `src-te`. Where they came from is the builder's own affair.

    """
    return {LABEL: " ".join(sorted(stages))} if stages else {}


def replaced_in(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the inputs that an image's labels state as replaced: foreign words, of which names of stages alone are taken."""
    return tuple(word for word in labels.get(LABEL, "").split() if _NAME.fullmatch(word))[:_MOST]

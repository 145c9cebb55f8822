"""Tags that one run gives to an image while it works on it: no other run has them, and none stays."""

import contextlib
import uuid
from collections.abc import Iterator

from envbuild.engine.client import EngineClient
from envbuild.util.maker import Maker

EXPORTED = "envbuild-export"
"""Repository of images on their way from a build to their name."""
REBUILT = "envbuild-reproduce"
"""Repository of the images that `reproduce` builds to compare them."""
_LASTS_S = 2 * 86400.0


@contextlib.contextmanager
def own_tag(client: EngineClient, repository: str) -> Iterator[str]:
    """Yield a tag of `repository` that no other run has; it goes at the end, and so do those of runs that SIGKILL ended."""
    remove_left_tags(client, repository)
    tag = f"{repository}:{Maker.here(seconds=_LASTS_S)}-{uuid.uuid4().hex[:6]}"
    try:
        yield tag
    finally:
        client.untag(tag)


def remove_left_tags(client: EngineClient, *repositories: str) -> None:
    """Remove the tags of runs whose makers are gone, in both repositories where none is named."""
    for repository in repositories or (EXPORTED, REBUILT):
        for tag in client.tags(repository):
            maker = Maker.parse(tag.removeprefix(f"{repository}:").rpartition("-")[0])
            if maker is not None and maker.gone:
                client.untag(tag)

"""What an image is, however its layers are compressed, and what made it: what a record keeps next to the image's digest."""

from envbuild.util.model import Field, Model
from envbuild.util.names import Digest, Version

MOST_LAYERS = 256
"""An engine mounts 127 at most."""


class ImageContent(Model):
    """What is known of an image apart from the digest of its manifest, which depends on the program that compressed the layers.

    What follows from a lock and a recipe is `layers` and `config`. A field that is not known has its default.
    """

    layers: tuple[Digest, ...] = Field(default=(), max_length=MOST_LAYERS)
    """Digest of each layer, uncompressed, the lowest first."""
    config: Digest | None = None
    """Digest of how a container of it starts, and for which platform, as `engine.image` computes it from every image's
    configuration: not the digest of the configuration's blob."""
    recipe: Digest | None = None
    """Digest of the Dockerfile that built it (`plan.dockerfile.recipe_digest`): the lock's, as one release of envbuild writes it."""
    release: Version | None = None
    """The envbuild that built it."""

    def same_image(self, other: "ImageContent | None") -> bool:
        """Return whether both are known to be one image, of which only the compression may differ.

        What is not known of one of them is not taken as equal.
        """
        return (
            other is not None
            and bool(self.layers)
            and self.layers == other.layers
            and self.config is not None
            and self.config == other.config
        )

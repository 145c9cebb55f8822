"""Which kernels of flash-attention 3 are compiled: named choices, each by the switches of its `hopper/setup.py`."""

from envbuild.components.base import Component
from envbuild.util.model import Field, Model


class KernelFacts(Model):
    """What a choice of kernels leaves out."""

    without: tuple[str, ...] = Field(min_length=1)
    """Switches of `hopper/setup.py`, each without its beginning FLASH_ATTENTION_DISABLE_; one that a tree does not read
    leaves out what that tree does not have."""
    head_dims: tuple[int, ...] = Field(min_length=1)
    """The head dimensions that are left."""


class Fa3Kernels(Component):
    """The choice of kernels. It is no package: the wheel of flash-attention 3 is another one with it."""

    axis = "fa3-kernels"
    place = 41
    chooses = "flash-attn-hopper"
    ran = False
    facts = KernelFacts
    sms = ("90",)


component = Fa3Kernels()

"""Reproducible container environments for Megatron-LM and Megatron-DeepSpeed training."""

__version__ = "0.1.0"

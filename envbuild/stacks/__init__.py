"""Stacks: a training repository at a pin, with its packages, patches, environment, launchers and proof, as data."""

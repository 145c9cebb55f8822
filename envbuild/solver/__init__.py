"""Choosing one release on every axis, and saying why. No network, no clock, no process."""

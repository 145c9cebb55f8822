"""Trials: whether two releases fit, found out without a GPU or an image."""

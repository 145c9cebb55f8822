"""Trials: whether two releases fit, found out without a GPU and without a whole build."""

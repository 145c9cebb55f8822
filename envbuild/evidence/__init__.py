"""Records of smoke runs, and what they say of a cell."""

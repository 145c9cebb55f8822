"""Records of smoke runs, and what they prove of a cell."""

"""Keeping the matrix true: new releases, checks against upstream, the page and the schemas."""

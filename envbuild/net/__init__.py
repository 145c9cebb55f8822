"""Everything that envbuild asks of another host over HTTP, with the bounds that a foreign answer needs."""

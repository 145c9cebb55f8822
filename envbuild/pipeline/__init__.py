"""The steps of `envbuild image`, in order: a cell's lock, its image (found, pulled or built), what is proven of it."""

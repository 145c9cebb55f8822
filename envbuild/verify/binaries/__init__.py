"""What the binaries of an image, a wheel or a folder need, contain and miss, read without running any of them."""

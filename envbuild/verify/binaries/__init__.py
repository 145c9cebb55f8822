"""What the binaries of an image, a wheel or a folder need, hold and lack, read without running any of them."""

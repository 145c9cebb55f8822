"""Working on a stack's repository: a tree of the host in place of the one in the image."""

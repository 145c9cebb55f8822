"""The patches of training repositories: their manifests, checking a tree against them, applying and undoing them.

A patch fits a tree when every file that it touches has the git blob id that its manifest states, and it has worked when
every file has the stated id afterwards. Nothing else decides: not an exit status, not a tag's name, no fuzz, no offset.
`git apply` alone turns the one into the other, here and in a build. The data lies in the repository's folder `patches/`.
"""

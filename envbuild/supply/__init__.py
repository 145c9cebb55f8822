"""What an image is made of and who made it, in the formats that others read: an SBOM (CycloneDX) and provenance (SLSA).

Both follow from the lock and from the image's files, so that the same image has the same ones. They are attached to the
image in the registry as referrers, and signed by the keys that sign the catalogue; the image's digest stays.
"""

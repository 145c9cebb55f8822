"""Image references, taken apart as docker does."""

import pytest

from envbuild.errors import UsageError
from envbuild.net.registry import parse_reference

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "repository", "tag", "digest"),
    [
        ("debian", "docker.io/library/debian", "latest", None),
        ("nvidia/cuda:12.6.3-cudnn-devel-ubuntu24.04", "docker.io/nvidia/cuda", "12.6.3-cudnn-devel-ubuntu24.04", None),
        ("127.0.0.1:5000/cell", "127.0.0.1:5000/cell", "latest", None),
        ("localhost/a/b:1", "localhost/a/b", "1", None),
        ("nvcr.io/nvidia/pytorch:26.04-py3", "nvcr.io/nvidia/pytorch", "26.04-py3", None),
        (f"ghcr.io/acme/e@{DIGEST}", "ghcr.io/acme/e", "latest", DIGEST),
        (f"ghcr.io/acme/e:v1@{DIGEST}", "ghcr.io/acme/e", "v1", DIGEST),
        ("[::1]:5000/cell:x", "[::1]:5000/cell", "x", None),
    ],
)
def test_parts(text, repository, tag, digest):
    ref = parse_reference(text)
    assert (ref.repository, ref.tag, ref.digest) == (repository, tag, digest)


@pytest.mark.parametrize(
    "text", ["", "A/b", "a b", "host.io/", "a:", "a:-x", "a@sha256:12", "a@", "https://host.io/a", "a//b", "../a"]
)
def test_what_is_no_reference(text):
    with pytest.raises(UsageError, match="not an image reference"):
        parse_reference(text)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("127.0.0.1:5000/a", True),
        ("localhost:5000/a", True),
        ("[::1]:5000/a", True),
        ("10.0.0.1:5000/a", False),
        ("a", False),
    ],
)
def test_plain_http_is_for_loopback_only(text, loopback):
    assert parse_reference(text).loopback is loopback

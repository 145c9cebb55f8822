"""Level import: NVIDIA's libraries that torch loads are those of the lock, by their own word."""

import pytest

from smokelib import cuda_libraries

SINCE = "2026-11-25T22:40:00Z"


def test_import_cuda_libraries_equal_lock(expected, figure):
    """cuBLAS, cuDNN, NCCL and the others are the releases of the lock, wherever they were loaded from."""
    if not expected.is_cuda:
        pytest.skip("a CPU cell has no libraries of CUDA")
    try:
        import torch  # noqa: F401  (it loads them)
    except (ImportError, OSError) as error:
        pytest.skip("torch does not load; its own test says why: {}".format(error))
    with open("/proc/self/maps") as maps:
        found = cuda_libraries.loaded(maps)
    wrong, said = [], []
    for path, name in sorted(found.items()):
        version, wanted = cuda_libraries.stated(name, path), cuda_libraries.locked(name, expected.packages)
        if version is None or wanted is None:
            continue
        said.append("{} {}".format(name, ".".join(map(str, version))))
        if version != cuda_libraries.release(wanted):
            wrong.append("{}, the lock says {} ({})".format(said[-1], wanted, path))
    if not said:
        pytest.skip("the lock lists no wheel of a library that torch loads")
    figure("libraries", ", ".join(said))
    assert not wrong, "not the libraries of the lock: {}".format("; ".join(wrong))

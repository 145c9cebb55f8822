"""What `uv` says when it cannot resolve: that nothing satisfies the requirements is one thing, a full disk another."""

import pytest

from envbuild.errors import HostError
from envbuild.lock.inputs import PythonGroup
from envbuild.lock.python import resolve
from envbuild.settings import Settings


def test_a_cache_that_cannot_be_written_is_no_fault_of_the_requirements(tmp_path):
    (tmp_path / "uv").write_text("a file where a folder should be")
    group = PythonGroup(name="env", requirements=("packaging==25.0",))
    with pytest.raises(HostError, match="os error") as error:
        resolve(Settings(cache_dir=tmp_path), group, python="3.11", glibc="2.36")
    assert "free space" in error.value.hint

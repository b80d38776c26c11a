"""The library of native loops, made before the first test that wants it, however busy the machine is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from farandole.comm.native import build
from farandole.comm.native.build import loops
from farandole.core.host.installed import C

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, C)), reason="needs a C compiler (apt-get install gcc libc6-dev)"
)


@pytest.fixture(scope="session", autouse=True)
def patient_compiler() -> Iterator[None]:
    """Give the compiler more time than a training run would; ranks find what it made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "COMPILE_SECONDS", 50.0)
        loops()
        yield

"""Ranks tests share one pool of processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.native import patient_compiler
from tests.ranks.pool import close_pool

__all__ = ["patient_compiler"]


@pytest.fixture(scope="session", autouse=True)
def _pool_of_ranks() -> Iterator[None]:
    yield
    close_pool()

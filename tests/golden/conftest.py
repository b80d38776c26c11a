"""Golden trainings run on ranks of the shared pool."""

from tests.ranks.conftest import _pool_of_ranks

__all__ = ["_pool_of_ranks"]

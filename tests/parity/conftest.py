"""All tests here compute with one thread, on ranks of the shared pool."""

from tests.ranks.conftest import _pool_of_ranks
from tests.threads import one_thread

__all__ = ["_pool_of_ranks", "one_thread"]

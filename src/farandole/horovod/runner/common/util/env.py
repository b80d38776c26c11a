"""Rank and size from the environment, before `init`."""

from __future__ import annotations

from .....core.rank_variables import read_rank_variables


def get_env_rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks as the launcher says; (0, 1) without a launcher."""
    place = read_rank_variables()
    return (0, 1) if place is None else (place.rank, place.size)

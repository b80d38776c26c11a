"""The schedule of link measurements: every pair of hosts once, and no host in two pairs at a time."""

from __future__ import annotations

from collections.abc import Sequence


def pair_rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return rounds of pairs: one seat stays, the others move on around the table.

    >>> pair_rounds(["a", "b", "c"])
    [[('b', 'c')], [('a', 'c')], [('a', 'b')]]
    """
    seats: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        met = [(one, other) for one, other in pairs if one is not None and other is not None]
        rounds.append([tuple(sorted(pair, key=list(names).index)) for pair in met])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [[(pair[0], pair[1]) for pair in each] for each in rounds if each]

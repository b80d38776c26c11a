"""Least squares with coefficients that are not negative, for a few coefficients."""

from __future__ import annotations

from collections.abc import Sequence

_ZERO = 1e-12
_ROUNDS = 10
"""Times the number of coefficients: a bound that no problem has been seen to reach."""


def non_negative_least_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float], *, near: Sequence[float], pull: float
) -> list[float]:
    """Return x >= 0 that minimises ``|rows x - targets|^2 + pull |x - near|^2``.

    `pull` is positive, so that there is one answer: what `rows` do not tell stays `near`. By the active set method
    on the normal equations: Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23.

    >>> [round(x, 3) for x in non_negative_least_squares([[1, 0], [0, 1]], [2, -1], near=[1, 1], pull=1e-9)]
    [2.0, 0.0]
    """
    size = len(near)
    squares = [[sum(row[i] * row[j] for row in rows) + (pull if i == j else 0.0) for j in range(size)]
               for i in range(size)]  # fmt: skip
    wanted = [sum(row[i] * target for row, target in zip(rows, targets, strict=True)) + pull * near[i]
              for i in range(size)]  # fmt: skip
    found, free = [0.0] * size, set[int]()
    for _ in range(_ROUNDS * size):
        slopes = [wanted[i] - sum(a * x for a, x in zip(squares[i], found, strict=True)) for i in range(size)]
        held = [i for i in range(size) if i not in free and slopes[i] > _ZERO * max(1.0, abs(wanted[i]))]
        if not held:
            break
        free.add(max(held, key=lambda i: slopes[i]))
        while True:
            order = sorted(free)
            solved = dict(zip(order, _solve(squares, wanted, order), strict=True))
            below = [i for i in order if solved[i] <= 0]
            if not below:
                found = [solved.get(i, 0.0) for i in range(size)]
                break
            ways = {i: found[i] / (found[i] - solved[i]) if found[i] > solved[i] else 0.0 for i in below}
            first = min(ways, key=lambda i: ways[i])
            found = [x + ways[first] * (solved[i] - x) if i in free else 0.0 for i, x in enumerate(found)]
            free.discard(first)
            found[first] = 0.0
    return found


def _solve(squares: Sequence[Sequence[float]], wanted: Sequence[float], order: Sequence[int]) -> list[float]:
    """Return the solution of the equations of `order`, by elimination; the matrix is positive definite."""
    table = [[squares[i][j] for j in order] + [wanted[i]] for i in order]
    size = len(order)
    for at in range(size):
        pivot = table[at]
        for row in table[at + 1 :]:
            factor = row[at] / pivot[at]
            for j in range(at, size + 1):
                row[j] -= factor * pivot[j]
    found = [0.0] * size
    for at in reversed(range(size)):
        rest = sum(table[at][j] * found[j] for j in range(at + 1, size))
        found[at] = (table[at][size] - rest) / table[at][at]
    return found

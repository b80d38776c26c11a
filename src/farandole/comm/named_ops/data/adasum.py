"""Adasum: a sum that does not count twice what two gradients have in common.

For two: ``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``; for more: neighbours in pairs, level by level, in the
order of ranks. When a level has an odd number the last one goes up as it is, so any number of ranks is
possible; for powers of two it is the published tree. Source: Maleki et al., "Scaling Distributed Training with
Adaptive Summation", 2020.

Each rank holds one piece of every rank's vector. The products of a level are added up over the pieces in
float64, in the order of ranks, so all ranks use the same coefficients.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from ...messages.message import Message

Products = Generator[Message, torch.Tensor, torch.Tensor]


def adasum(rows: Sequence[torch.Tensor], *, shared: bool) -> Products:
    """Return the Adasum of the whole vectors, of which `rows` are this rank's pieces, one a rank.

    `rows`: float32 or float64, 1-D. `shared`: the other pieces are on other ranks, so each level is one round of
    messages; otherwise no message is needed.
    """
    level = list(rows)
    while len(level) > 1:
        pairs = [(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        products = torch.stack([_products(a, b) for a, b in pairs])
        if shared:
            everyone = yield Message(products, "all_gather")
            products = everyone[0].clone()
            for other in everyone[1:]:
                products += other
        combined = [_combine(a, b, *products[i].tolist()) for i, (a, b) in enumerate(pairs)]
        level = combined + level[2 * len(pairs) :]
    return level[0]


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.double(), b.double()
    return torch.stack([a.dot(a), b.dot(b), a.dot(b)])


def _combine(a: torch.Tensor, b: torch.Tensor, aa: float, bb: float, ab: float) -> torch.Tensor:
    of_a = 1.0 - ab / (2.0 * aa) if aa else 1.0
    of_b = 1.0 - ab / (2.0 * bb) if bb else 1.0
    return a * of_a + b * of_b

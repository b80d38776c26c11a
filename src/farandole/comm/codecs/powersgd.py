"""PowerSGD: a matrix as the product of two thin ones, found by one warm-started power iteration a step.

With M the mean gradient (rows, columns): P = M Q, orthonormalise P, Q = M^T P, mean = P Q^T. Both products
are sums over ranks, so r (rows + columns) numbers travel. Factors are kept as (rank, n), the layout in
which thin products run at memory speed. Only the directions in Q matter to the next step: it is kept with
its rows scaled to 1, as products of two gradients would leave float32 on both ends.

Source: Vogels et al., "PowerSGD", NeurIPS 2019, algorithm 1. Here a rank's own contribution is the
projection P P^T M_rank, which keeps the spread between ranks out of the residual.
"""

from __future__ import annotations

import torch

from ..messages.message import Codec, Encoding, GroupRank, Message, State


def power_sgd(rank: int) -> Codec:
    """Return the matrix codec of rank `rank`."""

    def codec(grad: torch.Tensor, state: State, seat: GroupRank) -> Encoding:
        rows, columns = grad.shape
        fitting = min(rank, rows, columns)
        q = state.get("q")
        if q is None or q.shape != (fitting, columns):
            q = _first_q(fitting, columns).to(grad.device)
        p = yield Message(torch.mm(q, grad.t()), "sum")
        p = _orthonormal_rows(p)
        mine = torch.mm(p, grad)
        q = (yield Message(mine.clone(), "sum")).div_(seat.size)
        state["q"] = _next_q(q)
        thin = p.t()
        return torch.mm(thin, q), torch.mm(thin, mine)

    return codec


def _first_q(rank: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * rank + columns)
    return torch.randn(rank, columns, dtype=torch.float32, generator=generator)


def _next_q(q: torch.Tensor) -> torch.Tensor:
    """Return the rows of `q` scaled to 1; those of zeros, which would find nothing ever again, begin anew."""
    scale = q.abs().amax(1, keepdim=True)
    dead = scale == 0
    if bool(dead.any()):
        return torch.where(dead, _first_q(*q.shape).to(q.device), q / scale.masked_fill(dead, 1.0))
    return q / scale


def _orthonormal_rows(p: torch.Tensor) -> torch.Tensor:
    """Return rows that span what those of `p` (rank, n) do, at right angles.

    A gradient of zeros, or of lower rank, gives arbitrary further rows, which multiply zeros.
    """
    scale = p.abs().amax()
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    q: torch.Tensor = torch.linalg.qr((p / safe).t())[0]
    return q.t().contiguous()


def low_rank_pays(rows: int, columns: int, rank: int) -> bool:
    """Return whether the thin factors are smaller than half of the matrix."""
    return rank <= min(rows, columns) and 2 * rank * (rows + columns) <= rows * columns

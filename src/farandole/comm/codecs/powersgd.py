"""PowerSGD: a matrix as the product of two thin ones, found by one warm-started power iteration a step.

With M the mean gradient (rows, columns): P = M Q, orthonormalise P, Q = M^T P, mean = P Q^T. Both products
are sums over ranks, so r (rows + columns) numbers travel. Factors are kept as (rank, n), the layout in
which thin products run at memory speed. Only the directions in Q matter to the next step: it is kept with
its rows scaled to 1, as products of two gradients would leave float32 on both ends.

Source: Vogels et al., "PowerSGD", NeurIPS 2019, algorithm 1. Here a rank's own contribution is the
projection P P^T M_rank, which keeps the spread between ranks out of the residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from ..device.streams import streams_of
from ..messages import Encoded, Encoding, GroupRank, Message


class PowerState(NamedTuple):
    """What PowerSGD keeps."""

    q: torch.Tensor
    """Directions, (rank, columns): the start of the next power iteration."""


@dataclass(frozen=True)
class PowerSGD:
    """The matrix codec of rank `rank`."""

    rank: int

    def init(self, grad: torch.Tensor, group: GroupRank) -> PowerState:
        """See `Codec`."""
        rows, columns = grad.shape
        return PowerState(_first_q(min(self.rank, rows, columns), columns, grad.device).clone())

    def encode(self, grad: torch.Tensor, state: PowerState, group: GroupRank) -> Encoding:
        """See `Codec`."""
        p = yield Message(torch.mm(state.q, grad.t()), "all_reduce")
        p = _orthonormal_rows(p)
        local = torch.mm(p, grad)
        q = (yield Message(local.clone(), "all_reduce")).div_(group.size)
        thin = p.t()
        return Encoded(torch.mm(thin, q), torch.mm(thin, local), PowerState(_next_q(q)))


@cache
def _first_q(rank: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return the directions of the first step, alike on all ranks; shared by all matrices of this shape."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + columns)
    return torch.randn(rank, columns, dtype=torch.float32, generator=generator).to(device)


def _next_q(q: torch.Tensor) -> torch.Tensor:
    """Return the rows of `q` scaled to 1; those of zeros, which would find nothing ever again, begin anew."""
    scale = q.abs().amax(1, keepdim=True)
    dead = scale == 0
    if streams_of(q.device) is None and not bool(dead.any()):
        return q / scale
    return torch.where(dead, _first_q(q.shape[0], q.shape[1], q.device), q / scale.masked_fill(dead, 1.0))


def _orthonormal_rows(p: torch.Tensor) -> torch.Tensor:
    """Return rows that span what those of `p` (rank, n) do, at right angles.

    A gradient of zeros, or of lower rank, gives arbitrary further rows, which multiply zeros.
    """
    scale = p.abs().amax()
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    q: torch.Tensor = torch.linalg.qr((p / safe).t())[0]
    return q.t().contiguous()

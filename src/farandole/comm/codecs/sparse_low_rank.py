"""Codecs that send part of a tensor: few numbers and where they belong, or two thin factors (PowerSGD).

Every rank gathers the chosen entries of all: (N-1) k entries travel, which pays while N is small beside 1/density.
How positions are written is chosen by density, the same way on all ranks: see `Positions`. Random-k needs no
positions (all ranks draw the same), and its values are simply summed.

Sources: Aji and Heafield, EMNLP 2017; Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import torch

from ..device.streams import streams_of
from ..messages import Encoded, Encoding, GroupRank, Message, reduce_scatter_all_gather

# How the positions of sparse entries are written: by density, the same way on all ranks.
#
# On an accelerator the same bytes are made of tensors there, whose sizes the host knows: none depends on a
# number.

WORD_SPAN = 65536


@dataclass(frozen=True)
class Positions:
    """The coding of `kept` ascending positions among `count`.

    ``bits``: one bit an element. ``words``: 16 bits a position, and for every span of 65,536 elements how
    many fall into it. The shorter one is used.
    """

    count: int
    kept: int

    @property
    def spans(self) -> int:
        """How many spans of 65,536 elements there are."""
        return max(1, -(-self.count // WORD_SPAN))

    @property
    def coding(self) -> Literal["bits", "words"]:
        """Which coding is shorter."""
        return "bits" if -(-self.count // 8) <= 2 * self.kept + 4 * self.spans else "words"

    @property
    def nbytes(self) -> int:
        """Bytes of the coded positions, a multiple of 4."""
        plain = -(-self.count // 8) if self.coding == "bits" else 2 * self.kept + 4 * self.spans
        return -(-plain // 4) * 4

    def encode(self, positions: np.ndarray) -> np.ndarray:
        """Return the bytes that stand for `positions` (int64, ascending)."""
        out = np.zeros(self.nbytes, np.uint8)
        if self.coding == "bits":
            mask = np.zeros(self.count, np.uint8)
            mask[positions] = 1
            packed = np.packbits(mask)
            out[: packed.size] = packed
        else:
            head = 4 * self.spans
            out[:head] = np.bincount(positions // WORD_SPAN, minlength=self.spans).astype(np.int32).view(np.uint8)
            out[head : head + 2 * self.kept] = (positions % WORD_SPAN).astype(np.uint16).view(np.uint8)
        return out

    def decode(self, coded: np.ndarray) -> np.ndarray:
        """Return the positions."""
        if self.coding == "bits":
            return np.flatnonzero(np.unpackbits(coded[: -(-self.count // 8)], count=self.count))
        head = 4 * self.spans
        counts = coded[:head].view(np.int32)
        low = coded[head : head + 2 * self.kept].view(np.uint16).astype(np.int64)
        return low + np.repeat(np.arange(self.spans, dtype=np.int64) * WORD_SPAN, counts)

    def encode_on_device(self, positions: torch.Tensor, out: torch.Tensor) -> None:
        """Write what `encode` returns into `out` (uint8, zeros, on the device of `positions`)."""
        device = positions.device
        if self.coding == "bits":
            flags = torch.zeros(-(-self.count // 8) * 8, dtype=torch.uint8, device=device)
            flags.index_fill_(0, positions, 1)
            out[: flags.numel() // 8].copy_((flags.view(-1, 8) << _bit_shifts(device)).sum(1))
            return
        head = 4 * self.spans
        counts = torch.zeros(self.spans, dtype=torch.int32, device=device)
        ones = torch.ones(1, dtype=torch.int32, device=device).expand(self.kept)
        out[:head].view(torch.int32).copy_(counts.index_add_(0, positions // WORD_SPAN, ones))
        low = (positions % WORD_SPAN).to(torch.int32).view(torch.uint8).view(-1, 4)[:, :2]
        out[head : head + 2 * self.kept].view(-1, 2).copy_(low)

    def add_on_device(self, coded: torch.Tensor, values: torch.Tensor, total: torch.Tensor) -> None:
        """Add `values` (kept,) to `total` (count,) at the positions that `coded` stands for."""
        device = coded.device
        if self.coding == "bits":
            bits = (coded[: -(-self.count // 8)].view(-1, 1) >> _bit_shifts(device)) & 1
            is_kept = bits.view(-1)[: self.count].bool()
            number = is_kept.cumsum(0).sub_(1).clamp_(min=0)
            total.add_(torch.where(is_kept, values[number], 0.0))
            return
        head = 4 * self.spans
        ends = coded[:head].view(torch.int32).cumsum(0)
        spans = torch.searchsorted(ends, torch.arange(self.kept, dtype=torch.int64, device=device), right=True)
        low = coded[head : head + 2 * self.kept].view(-1, 2).to(torch.int64)
        total.index_add_(0, low[:, 0] + 256 * low[:, 1] + spans * WORD_SPAN, values)


def _bit_shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


_SAMPLE_ELEMENTS = 8192

Choice = Callable[[np.ndarray, int, int], np.ndarray]
"""Takes a float32 array, how many positions to keep, and the step. Returns the positions, ascending."""


def exact_top(values: np.ndarray, kept: int, step: int) -> np.ndarray:
    """Choose the largest magnitudes."""
    if kept >= values.size:
        return np.arange(values.size)
    return np.sort(np.argpartition(np.abs(values), values.size - kept)[values.size - kept :])


def sampled_top(values: np.ndarray, kept: int, step: int) -> np.ndarray:
    """Choose about the largest magnitudes: those over a threshold estimated from a sample.

    Ten times faster than exact. Where more pass than fit, a rotating part of them is taken; where fewer
    pass, the places left are filled with others.
    """
    if kept >= values.size or values.size <= 2 * _SAMPLE_ELEMENTS:
        return exact_top(values, kept, step)
    magnitudes = np.abs(values)
    stride = values.size // _SAMPLE_ELEMENTS
    sample = magnitudes[step % stride :: stride]
    rank = max(1, round(sample.size * kept / values.size))
    threshold = np.partition(sample, sample.size - rank)[sample.size - rank]
    passed = np.flatnonzero(magnitudes >= threshold)
    if passed.size >= kept:
        start = (step * 40503) % passed.size
        chosen = np.concatenate([passed[start:], passed[:start]])[:kept]
        return np.sort(chosen)
    mask = np.zeros(values.size, bool)
    mask[passed] = True
    rest = np.flatnonzero(~mask)[: kept - passed.size]
    return np.sort(np.concatenate([passed, rest]))


class TopKState(NamedTuple):
    """What top-k keeps."""

    turn: int = 0
    """Steps so far, by which samples and ties rotate."""
    warm_up_step: int = 0


@dataclass(frozen=True)
class TopK:
    """Sends the part `density` of each gradient that `choose` chooses; on an accelerator always the largest.

    In the first `warm_up_steps` steps the density falls exponentially from 0.25. Source: Lin et al., ICLR 2018,
    section 3.3.
    """

    density: float
    warm_up_steps: int
    choose: Choice

    def init(self, grad: torch.Tensor, group: GroupRank) -> TopKState:
        """See `Codec`."""
        return TopKState()

    def encode(self, grad: torch.Tensor, state: TopKState, group: GroupRank) -> Encoding:
        """See `Codec`."""
        count = grad.numel()
        if count == 0:
            return Encoded(grad, grad, state)
        state = TopKState(state.turn + 1, state.warm_up_step + 1)
        kept = min(count, max(1, math.ceil(count * self._density_at(state.warm_up_step))))
        if streams_of(grad.device) is not None:
            mean, own = yield from _gather_top_on_device(grad, Positions(count, kept), group)
            return Encoded(mean, own, state)
        values = grad.detach().cpu()
        chosen = self.choose(values.numpy(), kept, state.turn)
        sent = values[torch.from_numpy(chosen)]
        mean, own = yield from _gather_entries(grad, Positions(count, kept), chosen, sent, group)
        return Encoded(mean, own, state)

    def _density_at(self, step: int) -> float:
        if self.warm_up_steps == 0 or step > self.warm_up_steps:
            return self.density
        return float(max(self.density, 0.25 * (self.density / 0.25) ** (step / self.warm_up_steps)))


class SharedDraws(NamedTuple):
    """What random-k keeps: how often all ranks drew the same positions."""

    shared_draws: int = 0


@dataclass(frozen=True)
class RandomK:
    """Sends entries drawn alike on all ranks: one of every stratum of 1/density elements."""

    density: float

    def init(self, grad: torch.Tensor, group: GroupRank) -> SharedDraws:
        """See `Codec`."""
        return SharedDraws()

    def encode(self, grad: torch.Tensor, state: SharedDraws, group: GroupRank) -> Encoding:
        """See `Codec`."""
        count = grad.numel()
        if count == 0:
            return Encoded(grad, grad, state)
        kept = min(count, max(1, math.ceil(count * self.density)))
        state = SharedDraws(state.shared_draws + 1)
        generator = torch.Generator().manual_seed(state.shared_draws)
        edges = (torch.arange(kept + 1, dtype=torch.float64) * (count / kept)).long()
        edges[-1] = count
        width = edges[1:] - edges[:-1]
        inside = (torch.rand(kept, generator=generator, dtype=torch.float64) * width).long()
        where = edges[:-1] + torch.minimum(inside, width - 1)
        streams = streams_of(grad.device)
        where = where.to(grad.device) if streams is None else streams.to_device(where)
        sent = grad[where]
        total = yield from reduce_scatter_all_gather(sent, group)
        mean = torch.zeros_like(grad)
        mean[where] = total / group.size
        own = torch.zeros_like(grad)
        own[where] = sent
        return Encoded(mean, own, state)


@dataclass(frozen=True)
class Threshold:
    """Sends every entry of at least `value` in magnitude.

    How many those are differs from rank to rank and step to step, so a round of counts comes first, and the
    shorter messages are filled up. Source: Strom, Interspeech 2015.
    """

    value: float

    def init(self, grad: torch.Tensor, group: GroupRank) -> None:
        """See `Codec`."""

    def encode(self, grad: torch.Tensor, state: None, group: GroupRank) -> Encoding:
        """See `Codec`."""
        values = grad.detach().cpu()
        mask = np.abs(values.numpy()) >= self.value
        chosen = np.flatnonzero(mask)
        counts = yield Message(torch.tensor([chosen.size], dtype=torch.int64, device=grad.device), "all_gather")
        longest = int(counts.max())
        if longest == 0:
            return Encoded(torch.zeros_like(grad), torch.zeros_like(grad))
        where = np.sort(np.concatenate([chosen, np.flatnonzero(~mask)[: longest - chosen.size]]))
        sent = values[torch.from_numpy(where)] * torch.from_numpy(mask[where])
        mean, own = yield from _gather_entries(grad, Positions(grad.numel(), longest), where, sent, group)
        return Encoded(mean, own)


def _gather_entries(
    grad: torch.Tensor, coding: Positions, where: np.ndarray, sent: torch.Tensor, group: GroupRank
) -> Generator[Message, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Send the entries `sent` at `where`, gather those of all ranks, return mean and own contribution."""
    packed = torch.empty(coding.nbytes + 4 * coding.kept, dtype=torch.uint8)
    packed[: coding.nbytes] = torch.from_numpy(coding.encode(where))
    packed[coding.nbytes :].view(torch.float32).copy_(sent)
    everyone = (yield Message(packed.to(grad.device), "all_gather")).cpu()
    mean = torch.zeros(coding.count, dtype=torch.float32)
    own = torch.zeros_like(mean)
    for row in everyone:
        places = torch.from_numpy(coding.decode(row[: coding.nbytes].numpy()))
        mean.index_add_(0, places, row[coding.nbytes :].view(torch.float32))
    own[torch.from_numpy(where)] = sent
    return mean.div_(group.size).to(grad.device), own.to(grad.device)


def _gather_top_on_device(
    grad: torch.Tensor, coding: Positions, group: GroupRank
) -> Generator[Message, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Send the largest entries, gather those of all ranks, return mean and own contribution; on the device."""
    where = torch.topk(grad.abs(), coding.kept, sorted=False).indices.sort().values
    sent = grad[where]
    packed = torch.zeros(coding.nbytes + 4 * coding.kept, dtype=torch.uint8, device=grad.device)
    coding.encode_on_device(where, packed[: coding.nbytes])
    packed[coding.nbytes :].view(torch.float32).copy_(sent)
    everyone = yield Message(packed, "all_gather")
    mean = torch.zeros_like(grad)
    for row in everyone:
        coding.add_on_device(row[: coding.nbytes], row[coding.nbytes :].view(torch.float32), mean)
    return mean.div_(group.size), torch.zeros_like(grad).index_copy_(0, where, sent)


# PowerSGD: a matrix as the product of two thin ones, found by one warm-started power iteration a step.
#
# With M the mean gradient (rows, columns): P = M Q, orthonormalise P, Q = M^T P, mean = P Q^T. Both products are
# sums over ranks, so r (rows + columns) numbers travel. Factors are kept as (rank, n), the layout in which thin
# products run at memory speed. Only the directions in Q matter to the next step: it is kept with its rows scaled
# to 1, as products of two gradients would leave float32 on both ends.
#
# Source: Vogels et al., "PowerSGD", NeurIPS 2019, algorithm 1. Here a rank's own contribution is the projection P
# P^T M_rank, which keeps the spread between ranks out of the residual.


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

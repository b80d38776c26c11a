"""Sparse codecs: few numbers, and where they belong.

Every rank gathers everybody's chosen entries: (N-1) k entries travel, which pays while N is small beside
1/density. How positions are written is chosen by density, the same way on all ranks: see `Positions`.
Random-k needs no positions (all ranks draw the same), and its values are simply summed.

Sources: Aji and Heafield, EMNLP 2017; Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ..messages.message import Codec, Encoding, GroupRank, Message, State, sum_by_parts

_SAMPLE_ELEMENTS = 8192
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


Choice = Callable[[np.ndarray, int, State], np.ndarray]
"""Returns `kept` ascending positions of a float32 array."""


def exact_top(values: np.ndarray, kept: int, state: State) -> np.ndarray:
    """Choose the largest magnitudes."""
    if kept >= values.size:
        return np.arange(values.size)
    return np.sort(np.argpartition(np.abs(values), values.size - kept)[values.size - kept :])


def sampled_top(values: np.ndarray, kept: int, state: State) -> np.ndarray:
    """Choose about the largest magnitudes: those over a threshold estimated from a sample.

    Ten times faster than exact. Where more pass than fit, a rotating part of them is taken; where fewer
    pass, the places left are filled with others.
    """
    if kept >= values.size or values.size <= 2 * _SAMPLE_ELEMENTS:
        return exact_top(values, kept, state)
    magnitudes = np.abs(values)
    stride = values.size // _SAMPLE_ELEMENTS
    turn = state["turn"] = state.get("turn", 0) + 1
    sample = magnitudes[turn % stride :: stride]
    rank = max(1, round(sample.size * kept / values.size))
    threshold = np.partition(sample, sample.size - rank)[sample.size - rank]
    passed = np.flatnonzero(magnitudes >= threshold)
    if passed.size >= kept:
        start = (turn * 40503) % passed.size
        chosen = np.concatenate([passed[start:], passed[:start]])[:kept]
        return np.sort(chosen)
    mask = np.zeros(values.size, bool)
    mask[passed] = True
    rest = np.flatnonzero(~mask)[: kept - passed.size]
    return np.sort(np.concatenate([passed, rest]))


def top_k(density: Callable[[State], float], choose: Choice) -> Codec:
    """Return the codec that sends the chosen part `density(state)` of each gradient."""

    def codec(grad: torch.Tensor, state: State, seat: GroupRank) -> Encoding:
        count = grad.numel()
        if count == 0:
            return grad, grad
        kept = min(count, max(1, math.ceil(count * density(state))))
        coding = Positions(count, kept)
        values = grad.detach().cpu()
        chosen = choose(values.numpy(), kept, state)
        sent = values[torch.from_numpy(chosen)]
        return (yield from _gather_entries(grad, coding, chosen, sent, seat))

    return codec


def random_k(density: float) -> Codec:
    """Return the codec that sends entries drawn alike on all ranks: one of every stratum of 1/density elements."""

    def codec(grad: torch.Tensor, state: State, seat: GroupRank) -> Encoding:
        count = grad.numel()
        if count == 0:
            return grad, grad
        kept = min(count, max(1, math.ceil(count * density)))
        draws = state["shared_draws"] = state.get("shared_draws", 0) + 1
        generator = torch.Generator().manual_seed(state.get("shared_seed", 0) * 1_000_003 + draws)
        edges = (torch.arange(kept + 1, dtype=torch.float64) * (count / kept)).long()
        edges[-1] = count
        width = edges[1:] - edges[:-1]
        inside = (torch.rand(kept, generator=generator, dtype=torch.float64) * width).long()
        where = (edges[:-1] + torch.minimum(inside, width - 1)).to(grad.device)
        sent = grad[where]
        total, _ = yield from sum_by_parts(sent, seat)
        mean = torch.zeros_like(grad)
        mean[where] = total / seat.size
        own = torch.zeros_like(grad)
        own[where] = sent
        return mean, own

    return codec


def warm_up(density: float, steps: int) -> Callable[[State], float]:
    """Return the density of each step: from 0.25 down to `density`, exponentially over `steps` steps.

    Source: Lin et al., ICLR 2018, section 3.3. Steps are counted in the state.
    """

    def now(state: State) -> float:
        step = state["warm_up_step"] = state.get("warm_up_step", 0) + 1
        if steps == 0 or step > steps:
            return density
        return float(max(density, 0.25 * (density / 0.25) ** (step / steps)))

    return now


def threshold(value: float) -> Codec:
    """Return the codec that sends every entry of at least `value` in magnitude.

    How many those are differs from rank to rank and step to step, so a round of counts comes first, and
    the shorter messages are filled up. Source: Strom, Interspeech 2015.
    """

    def codec(grad: torch.Tensor, state: State, seat: GroupRank) -> Encoding:
        count = grad.numel()
        values = grad.detach().cpu()
        mask = np.abs(values.numpy()) >= value
        chosen = np.flatnonzero(mask)
        counts = yield Message(torch.tensor([chosen.size], dtype=torch.int64, device=grad.device), "gather")
        longest = int(counts.max())
        if longest == 0:
            return torch.zeros_like(grad), torch.zeros_like(grad)
        where = np.sort(np.concatenate([chosen, np.flatnonzero(~mask)[: longest - chosen.size]]))
        sent = values[torch.from_numpy(where)] * torch.from_numpy(mask[where])
        return (yield from _gather_entries(grad, Positions(count, longest), where, sent, seat))

    return codec


def _gather_entries(
    grad: torch.Tensor, coding: Positions, where: np.ndarray, sent: torch.Tensor, seat: GroupRank
) -> Encoding:
    """Send the entries `sent` at `where`, gather everybody's, and return the mean and what this rank gave."""
    packed = torch.empty(coding.nbytes + 4 * coding.kept, dtype=torch.uint8)
    packed[: coding.nbytes] = torch.from_numpy(coding.encode(where))
    packed[coding.nbytes :].view(torch.float32).copy_(sent)
    everyone = (yield Message(packed.to(grad.device), "gather")).cpu()
    mean = torch.zeros(coding.count, dtype=torch.float32)
    own = torch.zeros_like(mean)
    for row in everyone:
        places = torch.from_numpy(coding.decode(row[: coding.nbytes].numpy()))
        mean.index_add_(0, places, row[coding.nbytes :].view(torch.float32))
    own[torch.from_numpy(where)] = sent
    return mean.div_(seat.size).to(grad.device), own.to(grad.device)

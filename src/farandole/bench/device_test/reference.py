"""What all ranks must come to, by one process on the CPU: codecs in lock step, without buckets or streams.

Shares with the engine the codecs' eager code and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...comm.codecs.codec import leaves
from ...comm.codecs.registry import CodecInstance, make_codec
from ...comm.gradients.grad_ownership import replace_grad
from ...comm.messages.message import GroupRank
from ...comm.messages.simulator import simulate
from ...comm.sessions.segments import MULTIPLE
from ...core.vocabulary.codec_spec import CodecSpec
from .script import Played, Replica, Script, play, replicas_of


class _Unit:
    """Parameters that a codec gets as one tensor, and its states, by rank."""

    def __init__(self, codec: CodecInstance, parameters: Sequence[torch.Tensor], size: int) -> None:
        self.codec, self.size = codec, size
        self.shapes = [parameter.shape for parameter in parameters]
        self.numels = [parameter.numel() for parameter in parameters]
        whole = sum(self.numels)
        self.padding = 0 if codec.granularity == "matrix" else -whole % (MULTIPLE * size)
        like = self.flat([torch.zeros(shape, dtype=torch.float32) for shape in self.shapes])
        self.groups = [GroupRank(rank, size) for rank in range(size)]
        self.states: list[Any] = [codec.init(like, group) for group in self.groups]

    def flat(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return tensors, one a parameter, as the codec gets them."""
        if self.codec.granularity == "matrix":
            return tensors[0].clone()
        zeros = torch.zeros(self.padding, dtype=torch.float32)
        return torch.cat([*(each.flatten() for each in tensors), zeros])

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of each parameter, in its shape; views."""
        pieces = flat.view(-1)[: sum(self.numels)].split(self.numels)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def residual(self, rank: int) -> torch.Tensor | None:
        """Return what a rank has not sent yet."""
        found = leaves(self.states[rank]).get("residual")
        return found if isinstance(found, torch.Tensor) else None

    def exchange(self, gradients: Sequence[Sequence[torch.Tensor | None]]) -> list[torch.Tensor]:
        """Return the mean of each parameter. `gradients`: by rank and parameter; None: it has none there."""
        asked, kept = [], []
        for rank, each in enumerate(gradients):
            pairs = zip(each, self.shapes, strict=True)
            flat = self.flat([torch.zeros(shape) if gradient is None else gradient for gradient, shape in pairs])
            residual = self.residual(rank)
            for i, gradient in enumerate(each):
                if gradient is None and residual is not None:  # what it has not sent waits for its next gradient
                    self.parts(flat)[i].copy_(-self.parts(residual)[i])
                    kept.append((rank, i, self.parts(residual)[i].clone()))
            asked.append(flat)
        exchanged = simulate(
            [self.codec.encode(flat, state, group)
             for flat, state, group in zip(asked, self.states, self.groups, strict=True)]
        )  # fmt: skip
        self.states = exchanged.states
        for rank, i, before in kept:
            left = self.residual(rank)
            assert left is not None, "a codec keeps a residual from its first step on"
            self.parts(left)[i].add_(before)
        return self.parts(exchanged.means[0])

    def rescale(self, change: float) -> None:
        """Multiply what is linear in the gradients."""
        for rank in range(self.size):
            like = self.residual(rank)
            for value in leaves(self.states[rank]).values():
                if like is not None and isinstance(value, torch.Tensor) and value.shape == like.shape:
                    value.mul_(change)


class ReferenceExchange:
    """A `ReplicaExchange` of all ranks on the CPU."""

    def __init__(self, spec: CodecSpec, replicas: Sequence[Replica], *, in_one_bucket: bool) -> None:
        """`in_one_bucket`: whether the parameters share a bucket; else each has its own."""
        self._replicas = replicas
        codec = make_codec(spec)
        matrices = list(replicas[0].model.parameters())
        together = in_one_bucket and codec.granularity != "matrix"
        self._groups = [list(range(len(matrices)))] if together else [[i] for i in range(len(matrices))]
        self._units = [_Unit(codec, [matrices[i] for i in group], len(replicas)) for group in self._groups]

    def local(self) -> AbstractContextManager[Any]:
        """See `ReplicaExchange`."""
        return nullcontext()

    def finish(self, change: float) -> None:
        """See `ReplicaExchange`."""
        rows = [list(replica.model.parameters()) for replica in self._replicas]
        for group, unit in zip(self._groups, self._units, strict=True):
            if change != 1.0:
                unit.rescale(change)
            gradients = [[row[i].grad for i in group] for row in rows]
            held = [each for row in gradients for each in row if each is not None]
            is_finite = all(bool(torch.isfinite(each).all()) for each in held)
            means = unit.exchange(gradients) if is_finite else [torch.full(s, torch.nan) for s in unit.shapes]
            for row in rows:
                for i, mean in zip(group, means, strict=True):
                    replace_grad(row[i], mean.clone())

    def reload(self) -> None:
        """See `ReplicaExchange`. Here nothing is lost that would have to be loaded."""

    def residuals(self) -> list[list[torch.Tensor]]:
        """See `ReplicaExchange`."""
        found: list[list[torch.Tensor]] = []
        for rank in range(len(self._replicas)):
            flats = [(unit, unit.residual(rank)) for unit in self._units]
            found.append([part for unit, flat in flats if flat is not None for part in unit.parts(flat)])
        return found


def play_reference(script: Script, spec: CodecSpec, size: int, *, in_one_bucket: bool) -> list[Played]:
    """Return what each of `size` ranks ends with. `in_one_bucket`: see `ReferenceExchange`."""
    cpu = torch.device("cpu")
    replicas = replicas_of(range(size), cpu)
    exchange = ReferenceExchange(spec, replicas, in_one_bucket=in_one_bucket)
    return play(script, replicas, exchange, size=size, device=cpu)

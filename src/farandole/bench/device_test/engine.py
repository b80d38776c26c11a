"""The whole engine on the devices of all ranks: hooks, buckets, the backend's collectives, `fd.distribute`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

import farandole as fd

from ...comm.reducer.reducer import GradientReducer
from ...comm.world.world import World
from ...core.vocabulary.codec_spec import CodecSpec
from ...parallel.apply import reducer_of
from .script import Played, Replica, Script, play, replicas_of


class EngineExchange:
    """A `ReplicaExchange` of one rank, by the reducer."""

    def __init__(self, plan: fd.Plan, replica: Replica, device: torch.device) -> None:
        self._plan, self._replica, self._device = plan, replica, device
        self._distribute()

    def local(self) -> AbstractContextManager[Any]:
        """See `ReplicaExchange`."""
        return fd.accumulate()

    def finish(self, change: float) -> None:
        """See `ReplicaExchange`. The backward pass has done it; the loss scale is the scaler's."""

    def reload(self) -> None:
        """See `ReplicaExchange`."""
        saved = self._reducer.exchange_state()
        self._replica.renew(self._device)
        self._distribute()
        self._reducer.load_exchange_state(saved)

    def residuals(self) -> list[list[torch.Tensor]]:
        """See `ReplicaExchange`."""
        entries = self._reducer.exchange_state()
        names = [name for name, _ in self._replica.model.named_parameters()]
        found = [entries[name]["elements"].get("residual") for name in names if name in entries]
        return [[each for each in found if each is not None]]

    def _distribute(self) -> None:
        replica = self._replica
        fd.distribute(replica.model, replica.optimizer, self._plan)
        reducer = reducer_of(replica.model)
        assert reducer is not None, "several ranks have one"
        self._reducer: GradientReducer = reducer


def play_on_ranks(script: Script, spec: CodecSpec, world: World, device: torch.device) -> Played:
    """Return what this rank, with its model on `device`, ends with; called by all ranks.

    Each parameter has a bucket of its own.
    """
    # Routes by memory that ranks share cut buckets otherwise; a bucket of one byte holds one parameter.
    plan = fd.Plan(codec=spec.to_text(), bucket_bytes=1, first_bucket_bytes=1, route="flat")
    replicas = replicas_of([world.rank], device)
    exchange = EngineExchange(plan, replicas[0], device)
    return play(script, replicas, exchange, size=world.size, device=device)[0]

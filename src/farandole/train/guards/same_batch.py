"""Says when ranks train on the same samples, which is never meant: a loader that was not divided.

Looks at the first training pass of a run and no other: each rank leaves a hash of its inputs in the store, and
after the first step, when all ranks have been through an exchange, rank 0 compares what is there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import nn

from ...comm.batch_weight.nested_tensors import tensors_in
from ...comm.world.world import World
from ...core.vocabulary.notice import write_notice
from ...core.vocabulary.rank_lists import name_ranks
from ...parallel.instrument.phase_hooks import observe_passes

_MOST_TENSORS, _MOST_ELEMENTS = 8, 65536


class FirstBatch:
    """Watches a world of several ranks until its first step is done."""

    def __init__(self, here: World) -> None:
        self._world = here
        prefix = here.topic("first batch")
        self._keys = [f"{prefix}/{rank}" for rank in range(here.size)]
        self._has_hashed = False
        self._remove: Any = observe_passes(self)
        here.session.steps.after_step(self._after_step)
        here.session.call_on_close(self.close)

    def close(self) -> None:
        """Look no more."""
        if self._remove is not None:
            self._remove()
            self._remove = None

    def forward_begins(self, model: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Leave the hash of what a model is given first."""
        if self._has_hashed or not model.training:
            return
        self._has_hashed = True
        digest = _hash((arguments, named))
        if digest and self._world.store is not None:
            with suppress(RuntimeError):  # a store that fails is found by who needs it
                self._world.store.set(self._keys[self._world.rank], digest)

    def forward_ends(self, model: nn.Module, output: Any) -> None:
        """Nothing is to be seen here."""

    def _after_step(self, _: int) -> None:
        if self._remove is None:
            return
        self.close()
        if self._world.rank:
            return
        groups = sorted(_same_ranks(self._read_digests()), key=len)
        if groups:
            ranks = name_ranks(groups[-1])
            write_notice(
                f"warning: {ranks} trained on the same first batch, so they do the same "
                "work and not more of it; divide the samples: loader = farandole.shard(loader)"
            )

    def _read_digests(self) -> list[str]:
        store = self._world.store
        digests = [""] * len(self._keys)
        with suppress(RuntimeError):
            for rank, key in enumerate(self._keys):
                if store is not None and store.check([key]):  # without waiting for a rank that has not trained
                    digests[rank] = store.get(key).decode()
        return digests


def _same_ranks(digests: list[str]) -> list[list[int]]:
    """Return the groups of ranks with equal digests."""
    distinct = (digest for digest in dict.fromkeys(digests) if digest)
    groups = ([rank for rank, other in enumerate(digests) if other == digest] for digest in distinct)
    return [ranks for ranks in groups if len(ranks) > 1]


def _hash(inputs: Any) -> str:
    digest = hashlib.sha256()
    count = 0
    for tensor in islice(tensors_in(inputs), _MOST_TENSORS):
        with suppress(
            RuntimeError, NotImplementedError, TypeError
        ):  # sparse or quantised ones, or of another library
            flat = tensor.detach().reshape(-1)[:_MOST_ELEMENTS].cpu().contiguous()
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(flat.view(torch.uint8).numpy().data)
            count += flat.numel()
    return digest.hexdigest() if count > 1 else ""

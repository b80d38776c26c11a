"""Says when ranks train on the same samples, which is never meant: a loader that was not divided.

Looks at the first training pass of a run and no other: the first that a gradient comes back to. Each rank leaves a
hash of its inputs in the store then, and after the first step, when all ranks have been through an exchange,
rank 0 compares what is there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from ...comm.batch_weight.nested_tensors import tensors_in
from ...comm.messages.element_bytes import bytes_of
from ...comm.world.world import World
from ...core.vocabulary.degrees import ORDER, OTHER_SAMPLES
from ...core.vocabulary.notice import write_notice
from ...core.vocabulary.rank_lists import name_ranks
from ...parallel.instrument.phase_hooks import observe_passes

_MOST_TENSORS, _MOST_ELEMENTS = 8, 65536
WITHOUT_A_LOADER = (
    "without a loader, draw other samples on each rank: farandole.seed(1, per_rank=True) instead of "
    "torch.manual_seed, or the rank in the seed of the generator that draws them"
)
"""What a script does that draws its batches itself: from an array, or from an environment that it acts in."""


class BatchDigests:
    """The hashes of the ranks' first batches, in the store."""

    def __init__(self, here: World, topic: str, remedy: str) -> None:
        self._world, self._remedy = here, remedy
        prefix = here.topic(topic)
        self._keys = [f"{prefix}/{rank}" for rank in range(here.size)]

    def leave(self, digest: str) -> None:
        """Leave this rank's."""
        if self._world.store is not None:
            with suppress(RuntimeError):  # a store that fails is found by who needs it
                self._world.store.set(self._keys[self._world.rank], digest)

    def compare(self) -> None:
        """On rank 0: warn of ranks with the same one. Ranks that left none are not waited for.

        Ranks that divide a model are to have the same samples: the first of them is compared.
        """
        if self._world.rank:
            return
        groups = sorted(_same_ranks(self._read()), key=len)
        if groups:
            ranks = name_ranks(groups[-1])
            write_notice(
                f"warning: {ranks} trained on the same first batch, so they do the same "
                f"work and not more of it; divide the samples: {self._remedy}"
            )

    def _read(self) -> list[str]:
        store = self._world.store
        digests = [""] * len(self._keys)
        with suppress(RuntimeError):
            together = [name for name in ORDER if name not in OTHER_SAMPLES]
            for rank in self._world.degrees.first_ranks(together):
                key = self._keys[rank]
                if store is not None and store.check([key]):  # without waiting for a rank that has not trained
                    digests[rank] = store.get(key).decode()
        return digests


class FirstBatch:
    """Watches a world of several ranks until its first step is done."""

    def __init__(self, here: World) -> None:
        self._digests = BatchDigests(here, "first batch", f"loader = farandole.shard(loader); {WITHOUT_A_LOADER}")
        self._digest = ""
        """The hash of the inputs of the pass that is going on."""
        self._has_set = False
        self._remove: Any = observe_passes(here, self)
        here.session.steps.after_step(self._after_step)
        here.session.call_on_close(self.close)

    def close(self) -> None:
        """Look no more."""
        if self._remove is not None:
            self._remove()
            self._remove = None

    def forward_begins(self, model: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Look at what a model is given."""
        wanted = model.training and not self._has_set
        self._digest = _hash((arguments, named)) if wanted else ""

    def forward_ends(self, model: nn.Module, output: Any) -> None:
        """Leave the hash when a gradient comes back: a pass without one is no training."""
        if not self._digest:
            return
        leave = partial(self._leave, self._digest)
        self._digest = ""
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(leave)

    def _leave(self, digest: str, _: torch.Tensor) -> None:
        if self._has_set or self._remove is None:
            return
        self._has_set = True
        self._digests.leave(digest)

    def _after_step(self, _: int) -> None:
        if self._remove is None:
            return
        self.close()
        self._digests.compare()


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
            flat = tensor.detach().reshape(-1)[:_MOST_ELEMENTS].cpu()
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(bytes_of(flat).numpy().data)
            count += flat.numel()
    return digest.hexdigest() if count > 1 else ""

"""What the ranks of a context group compare before they compute: the same whole samples, parts of one shape."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from ...comm.messages.element_bytes import bytes_of
from ...core.vocabulary.errors import Mismatch
from ...core.vocabulary.rank_lists import name_ranks
from .group import ContextGroup

_MOST_ELEMENTS = 65536
_MOST_DIMENSIONS = 6


class Compared:
    """What one rank says of some tensors, and what all ranks of the group said."""

    def __init__(
        self, group: ContextGroup, operation: str, tensors: Sequence[torch.Tensor], extra: str = ""
    ) -> None:
        self._group, self._operation = group, operation
        first = list(tensors[0].shape[:_MOST_DIMENSIONS]) if tensors else []
        shapes = ";".join(f"{tuple(each.shape)} {each.dtype}" for each in tensors)
        padded = [*first, *[-1] * (_MOST_DIMENSIONS - len(first))]
        numbers = [zlib.crc32(f"{shapes} {extra}".encode()), _digest(tensors), *padded]
        self._said = group.gather_numbers(numbers, operation)

    def require_same_shapes(self, what: str) -> None:
        """Raise `Mismatch`, on all ranks of the group, where shapes differ."""
        if len({said[0] for said in self._said}) == 1:
            return
        shapes = [tuple(size for size in said[2:] if size >= 0) for said in self._said]
        texts = [f"of shape {shape}" for shape in shapes]
        if len(set(texts)) == 1:
            texts = [f"of kind {said[0]:08x}" for said in self._said]
        self._raise(f"{what} is {self._by_rank(texts)}", "give all ranks of a context group the same samples")

    def require_same_values(self, what: str) -> None:
        """Raise `Mismatch`, on all ranks of the group, where values differ."""
        if not self.are_values_same:
            texts = [f"sample {said[1]:08x}" for said in self._said]
            self._raise(
                f"{what} is not the same sample on all ranks ({self._by_rank(texts)})",
                "divide samples by fd.shard(loader), after fd.distribute; draw random numbers from one seed",
            )

    @property
    def are_values_same(self) -> bool:
        """Whether the tensors of all ranks have the same values."""
        return len({said[1] for said in self._said}) == 1

    def _by_rank(self, texts: Sequence[str]) -> str:
        parts = {text: [self._group.ranks[i] for i, other in enumerate(texts) if other == text] for text in texts}
        return ", ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in list(parts.items())[:4])

    def _raise(self, what: str, remedy: str) -> None:
        raise Mismatch(what, rank=self._group.world.job_rank, operation=self._operation, remedy=remedy)


def is_constant(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether each tensor has one value alone: parts of such ones are equal on all ranks."""
    return all(each.numel() < 2 or bool((each == each.reshape(-1)[0]).all()) for each in tensors)


def _digest(tensors: Sequence[torch.Tensor]) -> int:
    digest = 0
    for each in tensors:
        flat = each.detach().reshape(-1)[:_MOST_ELEMENTS].cpu()
        digest = zlib.crc32(bytes_of(flat).numpy().data, digest)
    return digest

"""What packing loses of gradients on their way to the owners of rows, as entries of an exchange state.

The entries are those of `sessions.saved_state`, so that they can be merged with them: one tensor ``residual`` in
the shape of the parameter. A rank does not pack its own rows, so nothing is lost there.

[Note: residuals of rows] What a rank packs is its part of the mean, already divided by the number of ranks N.
So what is missing of the mean is the sum of the residuals over the ranks, which is the mean of N times them:
``scale`` is N. After a change of ranks, stage or route each rank gets that mean R. Rows are packed by all ranks of
a circle but their owner: each of these S ranks asks for R / S more.

[Note: a place among owners] Bits come back only to the rank that packed for the same owners. ``place`` says which
rank of how many in the circle it was, and which slice of a host it carries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.errors import ConfigError
from ..sessions.saved_state import Entry

_MARK = -1
_DRAWS = "draws"


@dataclass(frozen=True)
class RowPlace:
    """Where a rank stands among the owners of rows. See [Note: a place among owners]."""

    codec: CodecSpec
    world_size: int
    circle_size: int
    circle_rank: int
    slice_number: int = 0

    def entry(self, residual: torch.Tensor | None, draws: int) -> Entry:
        """Return the entry of a parameter. `residual`: in its shape, float32; None: the codec keeps none.

        `draws`: random numbers that were used so far.
        """
        return {
            "codec": self.codec.to_text(),
            "scale": self.world_size,
            "place": self._numbers,
            "elements": {} if residual is None else {"residual": residual.detach().to("cpu", copy=True)},
            "padding": {},
            "numbers": [{_DRAWS: draws}],
            "others": {},
        }

    def residual(self, name: str, entry: Entry) -> torch.Tensor | None:
        """Return the residual that an entry brings here, in the parameter's shape; None: it has none.

        What belongs to this rank's own rows is not to be used.

        Raises:
            ConfigError: it is that of another rank or layout.
        """
        found: torch.Tensor | None = entry["elements"].get("residual")
        if found is None or entry["place"] == self._numbers:
            return found
        if entry["place"]:
            raise ConfigError(
                f"exchange state: what was lost of {name!r} was saved at another ZeRO stage or by another route: "
                f"its place was {entry['place']}, and is {self._numbers}",
                remedy="give the list of all ranks' states, in order of rank",
            )
        return found / (self.circle_size - 1)

    @property
    def _numbers(self) -> list[int]:
        return [_MARK, self.world_size, self.circle_size, self.circle_rank, self.slice_number]


def draws_of(entries: Iterable[Entry]) -> int:
    """Return how many random numbers were used before, by the parameters that travel together."""
    return max((int(numbers.get(_DRAWS, 0)) for entry in entries for numbers in entry["numbers"]), default=0)


def require_shapes(entries: Mapping[str, Entry], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ConfigError` for entries of other parameters than those of `shapes`."""
    for name, entry in entries.items():
        for key, tensor in entry["elements"].items():
            if tuple(tensor.shape) != shapes.get(name):
                raise ConfigError(
                    f"exchange state: {key} of {name!r} has shape {tuple(tensor.shape)}, and the parameter has "
                    f"{shapes.get(name, 'another name')}",
                    remedy="load it into the model it was saved from",
                )

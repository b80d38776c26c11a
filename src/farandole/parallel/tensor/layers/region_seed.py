"""Random numbers inside of split regions: each rank its own, and those after them again the same on all ranks.

[Note: seeds of a region] Dropout outside of split regions must drop the same elements on all tensor ranks,
and inside others on each rank, because a rank has other heads and features there. So a region begins with a
number that all ranks draw alike, and seeds the generator with it and the rank; at its end the generator is as
it was after that draw. A block that is computed again in backward draws the same number, because its
generator is restored before.
"""

from __future__ import annotations

import torch
from torch import nn

from ....comm.device.accelerator import generator_of

_SPAN = 2**31


class RegionSeed:
    """The generator of one device, inside and outside of split regions."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device, self.rank = device, rank
        self._outside: torch.Tensor | None = None

    def begin(self) -> None:
        """Draw numbers of this rank's own from now on."""
        if self._outside is not None:
            return
        drawn = int(torch.randint(_SPAN, (), dtype=torch.int64))
        generator = self._generator()
        self._outside = generator.get_state()
        generator.manual_seed((drawn + 1) * _SPAN + self.rank)

    def end(self) -> None:
        """Draw numbers that are the same on all ranks."""
        if self._outside is not None:
            self._generator().set_state(self._outside)
            self._outside = None

    def _generator(self) -> torch.Generator:
        return generator_of(self.device) or torch.default_generator


def has_dropout(module: nn.Module) -> bool:
    """Return whether `module` drops elements in training, as far as its attributes say."""
    for each in module.modules():
        if isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0:
            return True
        for key, value in vars(each).items():
            if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float) and value > 0:
                return True
    return False

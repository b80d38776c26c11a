"""Random numbers inside of split regions: each rank its own, and those after them again the same on all ranks.

[Note: seeds of a region] Dropout outside of split regions must drop the same elements on all tensor ranks,
and inside others on each rank, because a rank has other heads and features there. So a region begins with a
number that all ranks draw alike, and seeds the generator with it and the rank; at its end the generator is as
it was after that draw. A block that is computed again in backward draws the same number, because its
generator is restored before. What a module draws in a region for all ranks, such as which samples leave a branch
out, would be another on each: the proof finds it (`undivided_draw`), by draws as large as those of the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ....comm.device.accelerator import generator_of
from ...seeds import kept_generators

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
        drawn = int(torch.randint(_SPAN, (), generator=torch.default_generator, dtype=torch.int64))
        generator = self._generator()
        self._outside = generator.get_state()
        generator.manual_seed((drawn + 1) * _SPAN + self.rank)

    def end(self) -> None:
        """Draw numbers that are the same on all ranks."""
        if self._outside is not None:
            self._generator().set_state(self._outside)
            self._outside = None

    @property
    def is_inside(self) -> bool:
        """Whether a region has begun."""
        return self._outside is not None

    @contextmanager
    def left_as_it_is(self) -> Iterator[None]:
        """Let what draws numbers in between leave the generators as they were."""
        begun = self._outside
        with kept_generators(self._generator()):
            yield
        self._outside = begun

    def _generator(self) -> torch.Generator:
        return generator_of(self.device) or torch.default_generator


class _Draws(TorchDispatchMode):
    """Watch what is drawn by no generator that the caller names: shapes, and whether in a region."""

    def __init__(self, seed: RegionSeed) -> None:
        super().__init__()
        self._seed = seed
        self.found: list[tuple[torch.Size, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        first = made[0] if isinstance(made, (tuple, list)) else made
        is_draw = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        if is_draw and isinstance(first, torch.Tensor):
            self.found.append((first.shape, self._seed.is_inside))
        return made


def undivided_draw(seed: RegionSeed, plain: Callable[[], Any], split: Callable[[], Any]) -> str:
    """Return what is drawn in a region, and is as large as in the plain module; an empty text if nothing.

    Both run a forward pass in training. Where they do not draw as many times nothing is known. See
    [Note: seeds of a region].
    """
    with torch.enable_grad(), seed.left_as_it_is():
        try:
            with _Draws(seed) as expected:
                plain()
            if not expected.found:
                return ""
            with _Draws(seed) as found:
                split()
        except Exception as error:  # the module's own code
            return f"does not run in training: {error}"
    if len(expected.found) == len(found.found):
        for (whole, _), (mine, is_inside) in zip(expected.found, found.found, strict=True):
            if is_inside and mine.numel() == whole.numel():
                return f"draws random numbers of shape {list(mine)}, which all ranks need alike, on each its own"
    return ""


def has_dropout(module: nn.Module) -> bool:
    """Return whether `module` drops elements in training, as far as its attributes say."""
    for each in module.modules():
        if isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0:
            return True
        for key, value in vars(each).items():
            if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float) and value > 0:
                return True
    return False

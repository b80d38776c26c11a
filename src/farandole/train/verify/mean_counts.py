"""What a rank's loss is the mean of: tokens that are not ignored, of which ranks may have different numbers.

Seen by standing in front of `torch.nn.functional.cross_entropy`, ``nll_loss`` and `fd.chunked_cross_entropy`; only
while a script is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.vocabulary.rank_lists import name_ranks
from ..fused import chunked_cross_entropy
from .verify import Check

_NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
REMEDY = "call fd.weight(count) with the number of these elements before backward(), in every step"


class MeanCounts:
    """The counts of a script's losses, one for each call, from `start` to `stop`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: list[tuple[float, float]] = []
        self._pending: list[float] = []
        """Counts of losses whose backward pass has not begun: until then the loop may give their weight."""
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin to count."""
        self._undo = count_means(self._pending.append)

    def backward_begins(self) -> None:
        """Note the weight of the losses since the last call."""
        factor = self._world.session.batch_weight.factor
        self._seen += [(count, factor) for count in self._pending]
        self._pending.clear()

    def stop(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def checks(self) -> list[Check]:
        """Name a mean over elements whose numbers do not go with the ranks' weights; to be called by all ranks."""
        here = self._world
        self.backward_begins()
        gathered = all_gather_json(here, "verify/elements of the loss", self._seen)
        for step, row in enumerate(zip(*gathered, strict=False)):
            counts, factors = [float(count) for count, _ in row], [float(factor) for _, factor in row]
            if not goes_with(counts, factors):
                answer = f"in call {step + 1} it is over {_listed(counts)}, and ranks are averaged by samples"
                return [Check("mean of the loss", None, answer, REMEDY, word="not exact")]
        return []


def count_means(note: Callable[[float], object]) -> list[Callable[[], None]]:
    """Call `note` with what each loss is a mean over; return what ends it."""

    def counted(original: Any, *arguments: Any, **named: Any) -> Any:
        loss = original(*arguments, **named)
        count = _elements_of_mean(arguments, named)
        if count is not None and torch.is_grad_enabled():
            note(count)
        return loss

    plain = [replaced(functional, name, counted) for name in ("cross_entropy", "nll_loss")]
    return [*plain, replaced(chunked_cross_entropy, "loss_by_chunks", counted)]


def goes_with(counts: Sequence[float], factors: Sequence[float]) -> bool:
    """Return whether ranks weigh as much as they have elements, or that is not known."""
    if len(counts) < 2 or min(counts) <= 0 or min(factors) <= 0:
        return True
    wanted = (count * len(counts) / sum(counts) for count in counts)
    return all(abs(a - b) < 1e-6 for a, b in zip(factors, wanted, strict=True))


def _listed(counts: Sequence[float]) -> str:
    ranks = name_ranks(list(range(len(counts))))
    return f"{', '.join(f'{count:g}' for count in counts[:8])} elements on {ranks}"


def _elements_of_mean(arguments: tuple[Any, ...], named: dict[str, Any]) -> float | None:
    """Return what a loss is a mean over: the targets that are not ignored. None for other losses."""
    given = {**dict(zip(_NAMES, arguments, strict=False)), **named}
    target = given.get("target")
    if given.get("reduction", "mean") != "mean" or given.get("weight") is not None:
        return None
    if not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    return float((target != given.get("ignore_index", -100)).sum())


def replaced(place: Any, name: str, watcher: Any) -> Callable[[], None]:
    """Replace a function by one that goes through `watcher`; return what puts it back."""
    original = getattr(place, name)

    def through(*arguments: Any, **named: Any) -> Any:
        return watcher(original, *arguments, **named)

    setattr(place, name, through)

    def put_back() -> None:
        if getattr(place, name) is through:
            setattr(place, name, original)

    return put_back

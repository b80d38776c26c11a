"""`fd.weight`: what this rank's loss is a mean of, where that is not samples: tokens, boxes, nodes.

See [Note: weights by count] in `comm.batch_weight`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..comm.reducer.count_calls import CountCalls
from ..comm.world.store_sync import all_gather_json
from ..comm.world.world import World, world
from ..core.vocabulary.errors import ConfigError, Mismatch
from ..core.vocabulary.text import name_ranks
from .context.context import Context
from .distribute import local_policies


def weight(count: float | torch.Tensor | None) -> float:
    """Weigh this rank's gradients by `count` instead of samples, in this step. Call it on all ranks.

    For a loss that is a mean over tokens: with the number of tokens of this rank's batch, the gradient is that of
    one mean over all tokens of all ranks. Call it before each ``backward()``, before or after the forward pass; it
    serves the backward passes until the next call or the optimizer's step. It costs one small exchange.

    Args:
        count: what the loss is a mean over, a number or a tensor with one element; 0 if there is nothing.
            None: weigh by samples again.

    Returns:
        The sum of the counts over the ranks; 0.0 for None.

    Raises:
        ConfigError: a count is negative or not finite, or all are 0; raised on every rank.
        Mismatch: some ranks gave None, or left the call out in this step; raised on every rank.
    """
    here = world()
    if local_policies(here):
        raise ConfigError(
            "fd.weight is not there yet while ranks train on their own (plan key sync): meetings go by samples",
            remedy="leave fd.weight or sync out; fd.step(count=...) weighs the micro-batches of a rank",
        )
    share = here.session.batch_weight
    own, is_valid = as_number(count)
    if share.by_samples == 0.0:
        own = 0.0  # a placeholder
    total, without, invalid = CountCalls.of(here).add_up(own, is_none=count is None, is_invalid=not is_valid)
    if invalid:
        _refuse(here, "count", f"{count!r}", is_valid, "expected a number of at least 0")
    if without and without < here.size:
        gathered = all_gather_json(here, "fd.weight/None", count is None)
        ranks = name_ranks([rank for rank, each in enumerate(gathered) if each])
        raise Mismatch(
            f"{ranks} gave None and the others a count", rank=here.rank, operation="fd.weight",
            remedy="give a count on all ranks, or None on all",
        )  # fmt: skip
    if without:
        share.set_by_count(None)
        return 0.0
    if total == 0.0:
        raise ConfigError(
            "weight: the count is 0 on all ranks, and a mean over nothing has no gradient",
            remedy="leave the batch out on all ranks",
        )
    context = here.session.kept(Context)
    if context is not None:
        own = context.weigh(own)
    share.set_by_count(own * here.size / total)
    return total / here.degrees.size_over(("pipeline", "tensor"))  # these ranks counted the same samples


def as_number(count: Any) -> tuple[float, bool]:
    """Return the count, 0.0 for none, and whether it is one."""
    if count is None:
        return 0.0, True
    if isinstance(count, torch.Tensor):
        if count.numel() != 1 or count.is_complex():
            return 0.0, False
        count = float(count.detach())
    if isinstance(count, bool):
        return 0.0, False
    try:
        number = float(count)
    except (TypeError, ValueError):
        return 0.0, False
    return (number, True) if math.isfinite(number) and number >= 0 else (0.0, False)


def _refuse(here: World, what: str, shown: str, is_valid: bool, expected: str) -> None:
    gathered = all_gather_json(here, f"fd.weight/{what}", "" if is_valid else shown[:80])
    wrong = [f"{text} on rank {rank}" for rank, text in enumerate(gathered) if text]
    raise ConfigError(f"weight: the {what} is {', '.join(wrong[:4])}; {expected}")

"""Parts of a model that meet together: which parameters they have, and what is kept between meetings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.sync_spec import SyncSpec

Means = dict[str, torch.Tensor] | None
"""Mean changes by name; None: no rank had a sample."""


@dataclass(eq=False)
class Fragment:
    """Parameters that meet together."""

    number: int
    parameters: Mapping[str, torch.Tensor]
    """By name: the model's own."""
    outer: list[torch.Tensor] = field(default_factory=list)
    """The averaged ones, after the last meeting."""
    velocity: list[torch.Tensor] = field(default_factory=list)
    sent: list[torch.Tensor] = field(default_factory=list)
    """What the parameters were when they were sent, while the mean is on its way."""
    means: Future[Means] | None = None
    sent_at: int = 0
    """The step after which they were sent last."""
    weight_at: float = 0.0
    """What the rank's samples had added up to then."""


def deal_fragments(model: nn.Module, optimizers: Sequence[Optimizer], spec: SyncSpec, text: str) -> list[Fragment]:
    """Deal the parameters that train to the fragments of `spec`, each to the one with least bytes.

    Neighbours in the model come into different fragments: as the strided ones of 2501.18512. `text`: the
    plan's key. Raises `ConfigError` for more fragments than parameters.
    """
    stepped = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    found = {name: each for name, each in model.named_parameters() if each.requires_grad and id(each) in stepped}
    if len(found) < spec.fragments:
        raise ConfigError(
            f'plan: sync = "{text}" has {spec.fragments} fragments, but {len(found)} parameters train',
            remedy="set fewer fragments",
        )
    dealt: list[dict[str, torch.Tensor]] = [{} for _ in range(spec.fragments)]
    loads = [0] * spec.fragments
    for name, each in found.items():
        least = min(range(len(loads)), key=loads.__getitem__)
        dealt[least][name] = each
        loads[least] += each.nbytes
    return [Fragment(number, each) for number, each in enumerate(dealt)]

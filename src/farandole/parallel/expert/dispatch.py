"""One layer's pass: tokens to their experts, wherever these are, and the weighted sum of the outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...core.vocabulary.errors import ConfigError
from .expert_ranks import ExpertRanks, ExpertSeconds, ReturnRows, SendRows, Way
from .routing import Routing, count_choices, taken_choices

RunExperts = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""Tokens (n, hidden), sorted by this rank's experts, and how many each of these gets -> outputs (n, hidden)."""

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Load(NamedTuple):
    """What the experts of a layer got in one pass, over all ranks."""

    chosen: torch.Tensor
    """int64 (experts): how often each was chosen."""
    taken: torch.Tensor
    """The same without what was over the capacity."""
    seconds: ExpertSeconds | None = None
    """What this rank's experts took; None where they are not divided, or run on an accelerator."""


@dataclass(frozen=True)
class Placed:
    """A layer and where its experts are."""

    name: str
    """For errors."""
    routing: Routing
    ranks: ExpertRanks | None
    """Who has the experts; None: this process alone."""


@dataclass(frozen=True)
class TokenChoice:
    """Which experts the tokens of this rank go to."""

    weights: torch.Tensor
    """(tokens, top_k)."""
    chosen: torch.Tensor
    """int64 (tokens, top_k)."""
    broken: int = 0
    """Tokens whose router output is not finite."""


def mix(placed: Placed, tokens: torch.Tensor, choice: TokenChoice, run: RunExperts) -> tuple[torch.Tensor, Load]:
    """Return of each token the weighted sum of its experts' outputs, and what the experts got on all ranks.

    Args:
        placed: the layer; to be called by all its ranks.
        tokens: (n, hidden); n may be 0, and another on each rank.
        choice: of these tokens.
        run: the experts of this rank.

    Raises:
        ConfigError: some rank's router gave what is not finite; on all ranks.
        Mismatch: the ranks' tokens are of other widths or types, or take gradients on some alone; on all ranks.
    """
    ranks = placed.ranks
    table = _count_everywhere(placed, tokens, choice)
    taken = taken_choices(table, placed.routing.capacity(int(table[:, 0].sum())))
    place = 0 if ranks is None else ranks.place
    order = _sorted_choices(choice.chosen, table[place], taken[place])
    source = order % max(1, tokens.shape[0])
    if ranks is None or ranks.size == 1:
        out = run(tokens[source], taken[place].sum(0).tolist())
        seconds = None
    else:
        out, seconds = _run_elsewhere(ranks, placed.name, tokens[source], taken.sum(1), run)
    out = out * choice.weights.t().reshape(-1)[order, None].to(out.dtype)
    mixed = torch.zeros(tokens.shape[0], out.shape[1], dtype=out.dtype, device=out.device)
    mixed = mixed.index_add(0, source, out).to(tokens.dtype)
    return mixed, Load(table.sum((0, 1)), taken.sum((0, 1)), seconds)


def _count_everywhere(placed: Placed, tokens: torch.Tensor, choice: TokenChoice) -> torch.Tensor:
    """Return how often each expert is chosen: int64 (ranks, top_k, experts)."""
    ranks, counts = placed.ranks, count_choices(choice.chosen, placed.routing.num_experts)
    if ranks is None:
        table, lost, names = counts[None], [choice.broken], []
    else:
        takes = torch.is_grad_enabled()
        facts = [
            ("the width of a token", tokens.shape[-1]),
            ("the number of the tokens' type", _TYPES.index(tokens.dtype) if tokens.dtype in _TYPES else -1),
            ("whether gradients are taken (0 or 1)", int(takes)),
            ("whether the tokens take gradients (0 or 1)", int(takes and tokens.requires_grad)),
        ]
        broken = torch.tensor([choice.broken], dtype=torch.int64, device=counts.device)
        whole = ranks.gather_counts(placed.name, torch.cat([counts.reshape(-1), broken]), facts)
        table, lost, names = whole[:, :-1].reshape(-1, *counts.shape), whole[:, -1].tolist(), ranks.batch_ranks()
    if any(lost):
        place = next(place for place, number in enumerate(lost) if number)
        where = f" on rank {names[place]}" if names else ""
        raise ConfigError(
            f"the router of {placed.name} gave NaN or infinity for {lost[place]} tokens{where}: "
            "they belong to no expert",
            remedy="lower the learning rate, clip gradients, or give the router z loss more weight",
        )
    return table


def _sorted_choices(chosen: torch.Tensor, counts: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """Return the choices that are taken, sorted by expert: numbers ``choice * tokens + token``."""
    num_experts = counts.shape[1]
    flat = chosen.t().reshape(-1)
    if not torch.equal(counts, taken):
        choice = torch.arange(flat.numel(), device=flat.device, dtype=torch.int64) // max(1, chosen.shape[0])
        entries = choice * num_experts + flat
        by_entry = entries.argsort(stable=True)
        starts = counts.reshape(-1).cumsum(0) - counts.reshape(-1)
        position = torch.empty_like(by_entry)
        position[by_entry] = torch.arange(flat.numel(), device=flat.device, dtype=torch.int64)
        position -= starts[entries]
        kept = (position < taken.reshape(-1)[entries]).nonzero()[:, 0]
        return kept[flat[kept].argsort(stable=True)]
    return flat.argsort(stable=True)


def _run_elsewhere(
    ranks: ExpertRanks, layer: str, rows: torch.Tensor, taken: torch.Tensor, run: RunExperts
) -> tuple[torch.Tensor, ExpertSeconds]:
    """Return the outputs of `rows`, which are sorted by expert: most of them are computed by other ranks.

    `taken`: int64 (ranks, experts).
    """
    own = taken.shape[1] // ranks.size
    mine = taken[ranks.place].view(ranks.size, own).sum(1).tolist()
    first = ranks.rank * own
    arriving = taken[list(ranks.members), first : first + own]  # (ranks of the group, experts of this rank)
    expert = torch.arange(own, device=taken.device, dtype=torch.int64).repeat(ranks.size)
    by_expert = expert.repeat_interleave(arriving.reshape(-1)).argsort(stable=True)
    places = by_expert.argsort().split(arriving.sum(1).tolist())
    there = Way(ranks, layer, mine, places)
    came: torch.Tensor = SendRows.apply(rows, there)
    begin = time.perf_counter()
    out = run(came, arriving.sum(0).tolist())
    there.seconds.forward = time.perf_counter() - begin
    back: torch.Tensor = ReturnRows.apply(out, there)
    return back, there.seconds

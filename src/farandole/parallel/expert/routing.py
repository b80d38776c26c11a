"""Which experts a token goes to, how many an expert takes, and the two losses of a router. Pure functions.

[Note: capacity of the global batch] With a capacity, an expert takes ``ceil(capacity_factor * top_k * T / E)`` of
the T tokens of the global batch: those of all ranks, first choices before second ones, and within a choice by rank
and then by place in the rank's batch. So the same tokens are dropped as by one process that has the batches of all
ranks one after the other. A dropped token contributes nothing for that choice; weights are not scaled up for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from ...core.vocabulary.errors import ConfigError


@dataclass(frozen=True)
class Routing:
    """How tokens are routed."""

    num_experts: int
    top_k: int
    capacity_factor: float | None = None
    """None: no token is dropped. See [Note: capacity of the global batch]."""

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise ConfigError(f"MixtureOfExperts: num_experts = {self.num_experts}, expected at least 1")
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"MixtureOfExperts: top_k = {self.top_k} of {self.num_experts} experts",
                remedy=f"choose top_k from 1 to {self.num_experts}",
            )
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise ConfigError(
                f"MixtureOfExperts: capacity_factor = {self.capacity_factor}, expected a positive number",
                remedy="use a factor such as 1.25, or None to drop no token",
            )

    def capacity(self, tokens: int) -> int | None:
        """Return how many of `tokens` an expert takes; None: any number."""
        if self.capacity_factor is None:
            return None
        return max(1, math.ceil(self.capacity_factor * self.top_k * tokens / self.num_experts))


def choose_experts(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the probabilities of all experts, and weights and numbers of the `top_k` most probable ones.

    Weights of a token add up to 1, as in Mixtral (Jiang et al. 2024, section 2.1). A single one is its
    probability, as in Switch (Fedus et al. 2022, equation 2): divided by itself it would teach the router nothing.

    Args:
        logits: float32 or float64, (tokens, experts).
        top_k: how many experts a token goes to.

    Returns:
        Like `logits` (tokens, experts) and (tokens, top_k); int64 (tokens, top_k).
    """
    probabilities = logits.softmax(-1)
    weights, chosen = probabilities.topk(top_k, -1)
    if top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return probabilities, weights, chosen


def count_choices(chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return how often each expert is a first, second, ... choice: int64, (top_k, experts)."""
    top_k = chosen.shape[1]
    offsets = torch.arange(top_k, device=chosen.device, dtype=torch.int64) * num_experts
    counts = torch.bincount((chosen + offsets).reshape(-1), minlength=top_k * num_experts)
    return counts.view(top_k, num_experts)


def taken_choices(counts: torch.Tensor, capacity: int | None) -> torch.Tensor:
    """Return how many of `counts`, int64 (ranks, top_k, experts), are taken: the first ones of each entry.

    See [Note: capacity of the global batch].
    """
    if capacity is None:
        return counts
    ordered = counts.transpose(0, 1)  # first choices of all ranks come first
    flat = ordered.reshape(-1, counts.shape[-1])
    before = flat.cumsum(0) - flat
    taken = (capacity - before).clamp(min=0).minimum(flat)
    return taken.view(ordered.shape).transpose(0, 1).contiguous()


def balance_loss(probabilities: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the load-balancing loss of Switch (Fedus et al. 2022, equations 4 to 6).

    It is ``E * sum_i f_i P_i``: f_i is expert i's share of the choices of all ranks, P_i its mean probability over
    this rank's tokens; 1 when all experts get as many tokens. Its mean over ranks with as many tokens each is the
    loss of one process that has them all.

    Args:
        probabilities: float32 or float64 (tokens, experts), of this rank.
        counts: int64 (experts), choices of all ranks.
    """
    shares = counts.to(probabilities.dtype) / counts.sum().clamp(min=1)
    mean = probabilities.sum(0) / max(1, probabilities.shape[0])
    return probabilities.shape[1] * (shares * mean).sum()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """Return the router z loss of ST-MoE (Zoph et al. 2022, equation 5): the mean of logsumexp(logits) squared."""
    return logits.logsumexp(-1).square().sum() / max(1, logits.shape[0])


def experts_of_mlp(tokens: torch.Tensor, up: torch.Tensor, down: torch.Tensor, kind: str) -> torch.Tensor:
    """Return one expert's output: "swiglu" ``down(silu(gate) * up)``, "gelu" ``down(gelu(up))``.

    Args:
        tokens: (n, hidden).
        up: (2 * width, hidden) with the gate's rows first, or (width, hidden).
        down: (hidden, width).
        kind: "swiglu" or "gelu".
    """
    inside = functional.linear(tokens, up)
    if kind == "swiglu":
        gate, inside = inside.chunk(2, -1)
        return functional.linear(functional.silu(gate) * inside, down)
    return functional.linear(functional.gelu(inside), down)

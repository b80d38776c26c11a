"""Experts of transformers' models (Mixtral, Qwen-MoE and others of their form), divided without a change of code.

Such a module has each weight of all experts in one parameter, whose first dimension is ``num_experts``, and is
called with tokens, the numbers of their experts and weights: the block around it has the router, which stays whole
on each rank. Divided, the module's own forward pass computes this rank's experts for the tokens that arrive.

[Note: proven before it is divided] Whether a module computes what its form suggests, a weighted sum of independent
experts, is tried on a few random tokens before the first parameter is cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...core.vocabulary.errors import ConfigError, PlanError
from ..changed_class import ChangedClass, change_class, make_kin, plain_class_of
from .dispatch import Placed, TokenChoice, mix, note_load
from .expert_ranks import with_divided_gradient

_INDEX_NAMES = ("top_k_index", "router_indices", "selected_experts")
_WEIGHT_NAMES = ("top_k_weights", "routing_weights")
_STATE = "_farandole_experts"
_TRIED_TOKENS = 6


@dataclass(frozen=True)
class _State:
    placed: Placed
    own: int
    """Experts of this rank."""


def is_experts_module(module: nn.Module) -> bool:
    """Return whether `module` has the form of transformers' experts."""
    count = vars(module).get("num_experts")
    parameters = list(module.parameters())
    if not isinstance(count, int) or len(parameters) < 2 or next(module.buffers(), None) is not None:
        return False
    if any(each.dim() < 2 or each.shape[0] != count for each in parameters):
        return False
    if len(list(module.parameters(recurse=False))) != len(parameters):
        return False
    names = list(inspect.signature(plain_class_of(module).forward).parameters)[1:]
    return len(names) >= 3 and names[1] in _INDEX_NAMES and names[2] in _WEIGHT_NAMES


def prove_experts(name: str, module: nn.Module) -> None:
    """Raise `PlanError` when `module` is no weighted sum of experts. See [Note: proven before it is divided]."""
    module_: Any = module
    width = getattr(module_, "hidden_dim", None) or getattr(module_, "hidden_size", None)
    first = next(module.parameters())
    count = int(module_.num_experts)
    if not isinstance(width, int):
        raise PlanError(f"plan: expert: {name} does not say how wide its tokens are (hidden_dim)")
    generator = torch.Generator().manual_seed(17)
    tokens = torch.randn(_TRIED_TOKENS, width, generator=generator, dtype=torch.float32).to(first)
    numbers = torch.stack([torch.randperm(count, generator=generator)[:2] for _ in range(_TRIED_TOKENS)])
    chosen = numbers.to(first.device)
    weights = torch.rand(*chosen.shape, generator=generator, dtype=torch.float32).to(first)
    with torch.no_grad():
        whole = module(tokens, chosen, weights)
        parts = [
            module(tokens, chosen[:, i : i + 1], torch.ones_like(weights[:, :1])) for i in range(chosen.shape[1])
        ]
    summed = sum(part * weights[:, i : i + 1] for i, part in enumerate(parts))
    bound = 1e-4 if first.dtype == torch.float32 else 0.05
    error = float((whole - summed).abs().max()) / max(1e-12, float(whole.abs().max()))
    if not error <= bound:
        raise PlanError(
            f"plan: expert: {name} ({type(module).__name__}) is not the weighted sum of its experts: on random "
            f"tokens it differs by {error:.2g} of the largest output",
            remedy="leave expert out for this model",
        )


def divide_experts_module(module: nn.Module, placed: Placed, own: int) -> None:
    """Let `module`, which has `own` of its experts now, send tokens to the ranks of `placed`."""
    vars(module)[_STATE] = _State(placed, own)
    kind: Any = type(module)
    change_class(module, make_kin(_DividedExperts, kind), "plan: expert")


class _DividedExperts(ChangedClass):
    """An experts module of which this rank has a part."""

    def forward(self, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the outputs of the tokens' experts, as the plain module does.

        Args:
            hidden_states: (tokens, hidden).
            chosen: int64 (tokens, top_k).
            weights: (tokens, top_k).
        """
        state: _State | None = vars(self).get(_STATE)
        if state is None:
            raise ConfigError(
                f"this {type(self).__name__} is a copy of one that was divided over ranks, and lacks experts",
                remedy="copy the model before farandole.distribute",
            )
        ranks = state.placed.ranks
        divisor = 1 if ranks is None else ranks.size
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])

        def run(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
            with _local_experts(self, state.own, divisor):
                return _run_plain(self, rows, counts)

        broken = int((~weights.isfinite().all(-1)).sum())
        choice = TokenChoice(weights.reshape(flat.shape[0], -1), chosen.reshape(flat.shape[0], -1), broken)
        mixed, load = mix(state.placed, flat, choice, run)
        if self.training:
            note_load(state.placed.name, load)
        return mixed.view(hidden_states.shape)


def _run_plain(module: nn.Module, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the outputs of `rows`, sorted by expert, by the module's own forward pass."""
    none = rows.shape[0] == 0
    if none:  # a token of zeros, whose output is dropped: the gradients are zeros, not missing
        rows, counts = rows.new_zeros(1, rows.shape[1]), [1, *[0] * (len(counts) - 1)]
    numbers = torch.arange(len(counts), device=rows.device, dtype=torch.int64)
    chosen = numbers.repeat_interleave(torch.tensor(counts, device=rows.device, dtype=torch.int64))[:, None]
    ones = torch.ones(rows.shape[0], 1, device=rows.device, dtype=rows.dtype)
    out: torch.Tensor = plain_class_of(module).forward(module, rows, chosen, ones)
    return out[:0] if none else out


@contextmanager
def _local_experts(module: nn.Module, own: int, divisor: int) -> Iterator[None]:
    """Let `module` seem to have its `own` experts alone, whose gradients are divided."""
    stand_ins: dict[str, Any] = {
        name: with_divided_gradient(each, divisor) for name, each in module.named_parameters(recurse=False)
    }
    count = vars(module)["num_experts"]
    vars(module).update(stand_ins, num_experts=own)
    try:
        yield
    finally:
        for name in stand_ins:
            del vars(module)[name]
        vars(module)["num_experts"] = count

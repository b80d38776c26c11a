"""A mixture-of-experts layer: a router, experts that are plain MLPs, and shared experts that see every token.

::

    layer = fd.MixtureOfExperts(256, 512, num_experts=8, top_k=2)
    out = layer(tokens)                        # (..., 256)
    loss = loss_function(out) + fd.router_loss(model, balance=0.01, z=0.001)

It needs no plan and no other rank. Under ``expert = N`` each rank has 1/N of the experts: see `apply_expert`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from ...core.vocabulary.errors import ConfigError
from ..tensor.regions import TensorRanks, end_region
from .dispatch import (
    Load,
    Placed,
    Routing,
    TokenChoice,
    balance_loss,
    choose_experts,
    experts_of_mlp,
    mix,
    note_load,
    z_loss,
)
from .expert_ranks import ExpertRanks, with_divided_gradient

Activation = Literal["swiglu", "gelu"]


class ExpertMLPs(nn.Module):
    """The experts of a layer in two parameters: all of them, or those of this rank.

    ``up``: (experts, 2 * expert_size or expert_size, hidden_size); ``down``: (experts, hidden_size, expert_size).
    """

    def __init__(
        self, hidden_size: int, expert_size: int, num_experts: int, *, activation: Activation = "swiglu",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if activation not in ("swiglu", "gelu"):
            raise ConfigError(f'MixtureOfExperts: activation = {activation!r}, expected "swiglu" or "gelu"')
        self.activation = activation
        rows = 2 * expert_size if activation == "swiglu" else expert_size
        self.up = nn.Parameter(torch.empty(num_experts, rows, hidden_size, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, expert_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights as `nn.Linear` does."""
        for each in (self.up, self.down):
            bound = 1 / math.sqrt(each.shape[-1])
            nn.init.uniform_(each, -bound, bound)

    def forward(self, tokens: torch.Tensor, counts: list[int], divisor: int = 1) -> torch.Tensor:
        """Return the outputs of `tokens`, (n, hidden), sorted by expert; `counts`: tokens of each.

        `divisor`: by what gradients of the experts are divided.
        """
        ups = with_divided_gradient(self.up, divisor).unbind(0)
        downs = with_divided_gradient(self.down, divisor).unbind(0)
        parts = tokens.split(counts)
        return torch.cat(
            [experts_of_mlp(*each, self.activation) for each in zip(parts, ups, downs, strict=True)]
        )  # fmt: skip

    def extra_repr(self) -> str:
        """See `nn.Module`."""
        return f"experts={self.up.shape[0]}, up={tuple(self.up.shape[1:])}, activation={self.activation!r}"


class LayerState:
    """What a layer keeps that is no parameter: its ranks and its last pass. A copy of the layer starts without."""

    def __init__(self) -> None:
        self.ranks: ExpertRanks | None = None
        self.token_ranks: TensorRanks | None = None
        """The ranks that have the other tokens of the same samples (`sequence_parallel`)."""
        self.is_in_pipeline = False
        self.name = "MixtureOfExperts"
        self.balance_loss: torch.Tensor | None = None
        self.z_loss: torch.Tensor | None = None
        self.load: Load | None = None

    def __reduce__(self) -> tuple[type[LayerState], tuple[()]]:
        return (LayerState, ())

    def __deepcopy__(self, _: Any) -> LayerState:
        return LayerState()


class MixtureOfExperts(nn.Module):
    """A feed-forward layer of which each token sees `top_k` of `num_experts` experts.

    Routers are computed in float32 (float64 for float64), also under autocast. After a forward pass `last` has the
    losses of the router and the load of the experts; `farandole.router_loss` adds up the losses of all layers.

    Args:
        hidden_size: width of a token.
        expert_size: inner width of an expert.
        num_experts: how many there are.
        top_k: how many a token goes to; their weights add up to 1 (a single one has its probability).
        capacity_factor: an expert takes at most this many times its even share of the tokens of the global batch,
            others are dropped and counted; None: drops none. See `dispatch`.
        activation: of experts: "swiglu" or "gelu".
        shared_size: inner width of an expert of the same kind that sees every token; 0: none.

    Raises:
        ConfigError: `top_k` is more than `num_experts`; a size or `capacity_factor` is not positive.
    """

    def __init__(
        self, hidden_size: int, expert_size: int, *, num_experts: int, top_k: int = 2,
        capacity_factor: float | None = None, activation: Activation = "swiglu", shared_size: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, value in (("hidden_size", hidden_size), ("expert_size", expert_size)):
            if value < 1:
                raise ConfigError(f"MixtureOfExperts: {name} = {value}, expected at least 1")
        if shared_size < 0:
            raise ConfigError(f"MixtureOfExperts: shared_size = {shared_size}, expected 0 or more")
        self.routing = Routing(num_experts, top_k, capacity_factor)
        self.router = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = ExpertMLPs(hidden_size, expert_size, num_experts, activation=activation)
        self.shared = ExpertMLPs(hidden_size, shared_size, 1, activation=activation) if shared_size else None
        self.last = LayerState()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for `tokens`, (..., hidden_size), in the same shape and type.

        Raises:
            ConfigError: the router gives NaN or infinity, on all ranks; this is a copy that lacks experts.
        """
        flat = tokens.reshape(-1, tokens.shape[-1])
        last, routing = self.last, self.routing
        ranks = last.ranks
        self._require_experts(ranks)
        if ranks is not None and ranks.size == 1 and not torch.is_grad_enabled():
            ranks = None  # this rank has all experts, and may evaluate alone
        with torch.autocast(flat.device.type, enabled=False):
            wide = torch.promote_types(flat.dtype, torch.float32)
            logits = functional.linear(flat.to(wide), self.router.weight.to(wide))
        broken = int((~logits.isfinite().all(-1)).sum())
        probabilities, weights, chosen = choose_experts(logits, routing.top_k)
        divisor = 1 if ranks is None else ranks.size

        def run(rows: torch.Tensor, counts: Any) -> torch.Tensor:
            found: torch.Tensor = self.experts(rows, counts, divisor)
            return found

        choice = TokenChoice(weights, chosen, broken)
        mixed, last.load = mix(Placed(last.name, routing, ranks), flat, choice, run)
        last.balance_loss = _mean_over_tokens(balance_loss(probabilities, last.load.chosen), last)
        last.z_loss = _mean_over_tokens(z_loss(logits), last)
        if self.training:
            note_load(last.name, last.load)
        if self.shared is not None:
            mixed = mixed + self.shared(flat, [flat.shape[0]]).to(mixed.dtype)
        return mixed.view(tokens.shape)

    def _require_experts(self, ranks: ExpertRanks | None) -> None:
        here, expected = self.experts.up.shape[0], self.routing.num_experts // (1 if ranks is None else ranks.size)
        if here != expected:
            raise ConfigError(
                f"{self.last.name} has {here} of {self.routing.num_experts} experts and no ranks with the others: "
                "it is a copy of a layer that was divided over ranks",
                remedy="copy the model before farandole.distribute, or save it with farandole.save and load that",
            )

    def extra_repr(self) -> str:
        """See `nn.Module`."""
        factor = self.routing.capacity_factor
        dropless = "" if factor is None else f", capacity_factor={factor}"
        return f"num_experts={self.routing.num_experts}, top_k={self.routing.top_k}{dropless}"


def _mean_over_tokens(loss: torch.Tensor, last: LayerState) -> torch.Tensor:
    """Return the mean of the losses of ranks with as many tokens each; its gradient is this rank's part."""
    ranks = last.token_ranks
    return loss if ranks is None else end_region(loss / ranks.size, None, ranks, f"the router loss of {last.name}")


def router_loss(model: nn.Module, *, balance: float = 0.01, z: float = 0.0) -> torch.Tensor:
    """Return the losses of the routers of `model` in their last forward pass, weighted and added up.

    Add it to the loss of the batch. It is the sum over all `MixtureOfExperts` layers of ``balance *
    balance_loss + z * z_loss``. The first counts the choices of all ranks, and both average over this rank's
    tokens: their mean over ranks with as many tokens each is what one process has on the joined batch.

    Args:
        model: a model with `MixtureOfExperts` layers; only those of this rank count.
        balance: weight of the load-balancing loss, which is 1 when all experts get as many tokens.
        z: weight of the router z loss, which keeps the router's outputs small.

    Returns:
        A float32 number with gradients; float64 for tokens in float64.

    Raises:
        ConfigError: `model` has no such layer, or one that has seen no forward pass; or it is cut into stages.
    """
    layers = [each for each in model.modules() if isinstance(each, MixtureOfExperts)]
    if any(each.last.is_in_pipeline for each in layers):
        raise ConfigError(
            "router_loss: the layers of the model are on different ranks (pipeline), and the loss function sees "
            "the last ones only",
            remedy="leave it out of the loss function, and give its weights to the step: "
            "farandole.step(model, loss_function, inputs, targets, balance=0.01, z=0.001)",
        )
    found = losses_of_layers(model, balance=balance, z=z)
    if found is None:
        raise ConfigError("router_loss: the model has no MixtureOfExperts layer")
    return found


def losses_of_layers(module: nn.Module, *, balance: float, z: float) -> torch.Tensor | None:
    """Return what `router_loss` does of the layers in `module`; None if it has none."""
    parts = []
    for name, layer in module.named_modules():
        if not isinstance(layer, MixtureOfExperts):
            continue
        own_balance, own_z = layer.last.balance_loss, layer.last.z_loss
        if own_balance is None or own_z is None:
            raise ConfigError(
                f"router_loss: {name or 'the layer'} has seen no forward pass",
                remedy="call it after model(inputs)",
            )
        parts.append(balance * own_balance + z * own_z)
    return torch.stack(parts).sum() if parts else None

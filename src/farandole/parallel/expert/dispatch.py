"""One layer's pass: tokens to their experts, wherever these are, and the weighted sum of the outputs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from ...comm.world.session import next_power_of_two
from ...comm.world.world import World, has_world, world
from ...core.vocabulary import events
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.events import Logged, Setup
from .expert_ranks import ExpertRanks, ExpertSeconds, ReturnRows, SendRows, Way

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


# Which experts a token goes to, how many an expert takes, and the two losses of a router. Pure functions.
#
# [Note: capacity of the global batch] With a capacity, an expert takes ``ceil(capacity_factor * top_k * T / E)``
# of the T tokens of the global batch: those of all ranks, first choices before second ones, and within a choice by
# rank and then by place in the rank's batch. So the same tokens are dropped as by one process that has the batches
# of all ranks one after the other. A dropped token contributes nothing for that choice; weights are not scaled up
# for it.


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


# The share of tokens that each expert gets, recorded: as metrics of a step, and as facts for a diagnosis.
#
# [Note: windows of loads] A diagnosis reads facts, of which the last value stays. They are of the steps since the
# last time they were noted, and are noted after steps 1, 2, 4, 8, ...: the last ones are of half of the training.


PREFIX = "experts/"
"""Begins the names of metrics: ``experts/LAYER/imbalance``, ``.../dropped``, ``.../share/0``."""


@dataclass
class _LoadWindow:
    """What the experts of one layer got since the facts were noted last."""

    chosen: torch.Tensor
    taken: torch.Tensor


class ExpertLoads:
    """The loads of all layers of one world, which keeps it."""

    def __init__(self, here: World) -> None:
        self._here = here
        self._windows: dict[str, _LoadWindow] = {}
        self._seconds: list[ExpertSeconds] = []
        self._noted_step = here.session.steps.done
        here.session.steps.after_step(self.after_step)

    def add(self, layer: str, load: Load) -> None:
        """Count the load of one pass; the metrics of the first rank are of the last pass of a step."""
        window = self._windows.get(layer)
        then, now = None if window is None else window.chosen, load.chosen
        if window is None or then is None or (then.shape, then.device) != (now.shape, now.device):
            self._windows[layer] = _LoadWindow(load.chosen.clone(), load.taken.clone())
        else:
            window.chosen += load.chosen
            window.taken += load.taken
        if load.seconds is not None and load.chosen.device.type == "cpu":
            self._seconds.append(load.seconds)
        if self._here.rank == 0:
            self._here.session.recorder.record(Logged(metrics=metrics_of(layer, load.chosen, load.taken)))

    def after_step(self, step: int) -> int:
        """Note facts for a diagnosis, ever more rarely. See [Note: windows of loads]."""
        if step & (step - 1) or not self._windows:
            return next_power_of_two(step)
        steps, self._noted_step = max(1, step - self._noted_step), step
        layer = max(self._windows, key=lambda name: imbalance_of(self._windows[name].chosen))
        chosen, taken = self._windows[layer].chosen, self._windows[layer].taken
        seconds = sum(each.forward + each.backward for each in self._seconds) / steps
        self._here.session.recorder.record(
            Setup(
                {
                    events.SETUP_EXPERT_LAYER: layer,
                    events.SETUP_EXPERTS: chosen.numel(),
                    events.SETUP_EXPERT_BUSIEST: int(chosen.argmax()),
                    events.SETUP_EXPERT_IMBALANCE: round(imbalance_of(chosen), 4),
                    events.SETUP_EXPERT_DROPPED: round(dropped_of(chosen, taken), 4),
                    events.SETUP_EXPERT_SECONDS: round(seconds, 6),
                }
            )
        )
        self._windows.clear()
        self._seconds.clear()
        return next_power_of_two(step)


def imbalance_of(chosen: torch.Tensor) -> float:
    """Return how many times the mean the busiest expert gets; 1 for no tokens."""
    total = int(chosen.sum())
    return float(chosen.max()) * chosen.numel() / total if total else 1.0


def dropped_of(chosen: torch.Tensor, taken: torch.Tensor) -> float:
    """Return the share of choices that were over the capacity, 0 to 1."""
    total = int(chosen.sum())
    return 1 - int(taken.sum()) / total if total else 0.0


def metrics_of(layer: str, chosen: torch.Tensor, taken: torch.Tensor) -> dict[str, float]:
    """Return the metrics of one pass: imbalance, share of dropped choices, and each expert's share of choices."""
    shares = (chosen.to(torch.float64) / chosen.sum().clamp(min=1)).tolist()
    found = {
        f"{PREFIX}{layer}/imbalance": imbalance_of(chosen),
        f"{PREFIX}{layer}/dropped": dropped_of(chosen, taken),
    }
    return found | {f"{PREFIX}{layer}/share/{i}": round(share, 6) for i, share in enumerate(shares)}


def note_load(layer: str, load: Load) -> None:
    """Note what the experts of `layer` got in a training pass, if this process is a rank of a world."""
    if has_world():
        here = world()
        here.session.keep(ExpertLoads, lambda: ExpertLoads(here)).add(layer, load)

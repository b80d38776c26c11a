"""What a program trains: a small model of text whose parts are those that plans divide."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch

import torch
from torch import nn
from torch.nn import functional

import farandole as fd

from .program import TOKENS, PlanProgram

RATES = {
    "sgd": 0.1,
    "momentum": 0.05,
    "adamw": 0.01,
    "amsgrad": 0.01,
    "adagrad": 0.05,
    "rmsprop": 0.005,
    "nadam": 0.01,
}
_KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda groups, rate: torch.optim.SGD(groups, rate, weight_decay=0.01),
    "momentum": lambda groups, rate: torch.optim.SGD(groups, rate, momentum=0.9, nesterov=True),
    "adamw": lambda groups, rate: torch.optim.AdamW(groups, rate, eps=1e-3, weight_decay=0.1),
    "amsgrad": lambda groups, rate: torch.optim.Adam(groups, rate, eps=1e-3, amsgrad=True),
    "adagrad": lambda groups, rate: torch.optim.Adagrad(groups, rate, eps=1e-3, initial_accumulator_value=0.1),
    "rmsprop": lambda groups, rate: torch.optim.RMSprop(groups, rate, eps=1e-2, momentum=0.5),
    "nadam": lambda groups, rate: torch.optim.NAdam(groups, rate, eps=1e-3),
}
OPTIMIZERS = tuple(_KINDS)


class Attention(nn.Module):
    """Attention by torch's function."""

    def __init__(self, program: PlanProgram) -> None:
        super().__init__()
        width, self.heads, self.size = program.width, program.heads, program.width // program.heads
        self.causal = program.causal
        few = program.key_heads * self.size
        self.query = nn.Linear(width, width, bias=program.bias)
        self.key = nn.Linear(width, few, bias=False)
        self.value = nn.Linear(width, few, bias=program.bias)
        self.out = nn.Linear(width, width, bias=program.bias)
        if program.head_norms:
            self.query_norm, self.key_norm = nn.RMSNorm(self.size), nn.RMSNorm(self.size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if hasattr(self, "query_norm"):
            query, key = self.query_norm(query), self.key_norm(key)
        times = query.shape[1] // key.shape[1]
        if times > 1:
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        found: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class WholeAttention(nn.Module):
    """Attention by torch's module."""

    def __init__(self, program: PlanProgram) -> None:
        super().__init__()
        self.causal = program.causal
        self.inner = nn.MultiheadAttention(program.width, program.heads, batch_first=True, bias=program.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = _later(x) if self.causal else None
        found: torch.Tensor = self.inner(x, x, x, need_weights=False, attn_mask=mask, is_causal=self.causal)[0]
        return found


class Gated(nn.Module):
    """A perceptron with a gate."""

    def __init__(self, program: PlanProgram) -> None:
        super().__init__()
        width, bias = program.width, program.bias
        self.gate, self.up = nn.Linear(width, 2 * width, bias=bias), nn.Linear(width, 2 * width, bias=bias)
        self.down = nn.Linear(2 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return found


class Block(nn.Module):
    """Two residual branches; or one layer of torch's encoder."""

    def __init__(self, program: PlanProgram, number: int) -> None:
        super().__init__()
        width, self.causal = program.width, program.causal
        norm = nn.LayerNorm if program.norm == "layer" else nn.RMSNorm
        if program.mix == "encoder":
            self.layer = nn.TransformerEncoderLayer(
                width, program.heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True,
                norm_first=program.norm == "layer", bias=program.bias,
            )  # fmt: skip
            return
        if program.mix != "none":
            self.first = norm(width)
            self.mix = Attention(program) if program.mix == "sdpa" else WholeAttention(program)
        self.second = norm(width)
        self.feed = _feed(program, number)
        self.drop = nn.Dropout(program.dropout)
        if program.zero_branches:
            self._begin_at_zero()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "layer"):
            mask = _later(x) if self.causal else None
            whole: torch.Tensor = self.layer(x, src_mask=mask, is_causal=self.causal)
            return whole
        if hasattr(self, "mix"):
            x = x + self.drop(self.mix(self.first(x)))
        found: torch.Tensor = x + self.drop(self.feed(self.second(x)))
        return found

    def _begin_at_zero(self) -> None:
        for branch in (getattr(self, "mix", None), self.feed):
            lasts = [each for each in branch.modules() if isinstance(each, nn.Linear)] if branch else []
            for parameter in lasts[-1].parameters() if lasts else ():
                nn.init.zeros_(parameter)


def _feed(program: PlanProgram, number: int) -> nn.Module:
    width, bias = program.width, program.bias
    if program.feed == "experts" and number % 2 == program.seed % 2:
        return fd.MixtureOfExperts(
            width, width, num_experts=program.experts, top_k=program.top_k, capacity_factor=program.capacity,
            shared_size=program.shared,
        )  # fmt: skip
    if program.feed == "gated":
        return Gated(program)
    return nn.Sequential(nn.Linear(width, 2 * width, bias=bias), nn.GELU(), nn.Linear(2 * width, width, bias=bias))


def _later(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)


class Text(nn.Module):
    """Words, blocks and an output layer."""

    def __init__(self, program: PlanProgram) -> None:
        super().__init__()
        self.program = program
        width = program.width
        self.left_out: frozenset[int] = frozenset()
        """Numbers of the blocks that do not run."""
        self.rate = 1.0
        self.words = nn.Embedding(program.words, width)
        if program.places != "none":
            self.places = nn.Embedding(TOKENS, width)
        if program.scale:
            self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(1))
        if program.buffer:
            self.register_buffer("fixed", torch.linspace(0.5, 1.5, width))
        if program.unused:
            self.unused = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(Block(program, number) for number in range(program.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, program.words, bias=not program.tied)
        if program.tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(tokens)
        if places is not None:
            x = x + self.places(places)
        elif self.program.places == "inside":
            x = x + self.places(fd.context_positions(tokens.shape[1]))
        if self.program.buffer:
            x = x * self.fixed
        if self.program.scale:
            x = x * self.scale + self.shift
        begin = x = x * self.rate if self.program.warms else x
        for number, block in enumerate(self.blocks):
            if number in self.left_out:
                continue
            x = block(x)
            if self.program.twice and number == 0:
                x = block(x)
        if self.program.far:
            x = x + begin
        found: torch.Tensor = self.head(self.norm(x))
        return found


def make_model(program: PlanProgram) -> Text:
    """Return the model as it begins, the same in every process."""
    torch.manual_seed(program.seed)
    model = Text(program).to(torch.float32 if program.single else torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and bool(parameter.any()):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    if program.adapters:
        fd.low_rank_adapters(model, "blocks.*", rank=2)
    for name, parameter in model.named_parameters():
        is_late = program.late_by == "loop" and is_named(name, program.late)
        parameter.requires_grad_(not (is_named(name, program.frozen) or is_late))
    return model


def is_named(name: str, patterns: str) -> bool:
    """Return whether a parameter's name fits one of the patterns, which ``|`` divides."""
    return any(fnmatch(name, each) for each in patterns.split("|"))


def thaw(program: PlanProgram, model: nn.Module) -> None:
    """Let late parameters train."""
    for name, parameter in model.named_parameters():
        if is_named(name, program.late) and not is_named(name, program.frozen):
            parameter.requires_grad_(True)


def make_optimizers(program: PlanProgram, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of all that trains, or will."""
    named = [each for name, each in model.named_parameters() if each.requires_grad or is_named(name, program.late)]
    rate = RATES[program.optimizer]
    if program.optimizers > 1:
        return [_KINDS[program.optimizer](part, rate) for part in (named[::2], named[1::2]) if part]
    parts = [named]
    if program.groups > 1:
        parts = [[each for each in named if (each.dim() > 1) is large] for large in (True, False)]
    groups = [{"params": part, "lr": rate / (1 + number)} for number, part in enumerate(parts) if part]
    return [_KINDS[program.optimizer](groups, rate)]


def make_schedulers(
    program: PlanProgram, optimizers: list[torch.optim.Optimizer]
) -> list[torch.optim.lr_scheduler.LRScheduler]:
    """Return the schedulers of learning rates."""
    if program.scheduler == "step":
        return [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    if program.scheduler == "exponential":
        return [torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in optimizers]
    return []

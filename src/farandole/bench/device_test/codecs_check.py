"""Codecs alone, on a device, against the same on the CPU: several pretend ranks in lock step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...comm.codecs.codec import leaves
from ...comm.codecs.registry import CodecInstance, make_codec
from ...comm.messages.message import Exchange, Exchanged, GroupRank
from ...comm.messages.simulator import simulate
from .compare import NEAR, first_difference
from .forms import Form

RANKS = 4
"""A power of two: a division by it is exact on every device."""
STEPS = 3
_COUNTS = (1, 5001, 24_576)
"""Elements of a gradient: one, no whole blocks, and whole ones for every rank."""
_MATRIX = (96, 80)


class CodecRun(NamedTuple):
    """What the steps on one gradient brought, in CPU memory."""

    means: list[list[torch.Tensor]]
    """By step and rank."""
    residuals: list[torch.Tensor]
    """By rank, after the last step."""


def gradients_of(form: Form) -> dict[str, list[list[torch.Tensor]]]:
    """Return what a codec is tried on, by what it is: by step and rank, in CPU memory."""
    if form.spec.is_low_rank:
        return {"matrix": _drawn(_MATRIX, 1.0, 1.0)}
    tried = {f"{count:,} elements": _drawn((count,), 1.0, 1.0) for count in _COUNTS}
    count = (_COUNTS[-1],)
    return tried | {
        "zeros": _drawn(count, 0.0, 1.0),
        "tiny numbers": _drawn(count, 1e-30, 1.0),
        "numbers of many magnitudes": _drawn(count, 1.0, 1e3),
    }


def _drawn(shape: tuple[int, ...], factor: float, spread: float) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)

    def one() -> torch.Tensor:
        values = torch.randn(shape, dtype=torch.float32, generator=generator) * factor
        powers = torch.rand(shape, dtype=torch.float32, generator=generator) * 2 - 1
        return values * spread**powers

    return [[one() for _ in range(RANKS)] for _ in range(STEPS)]


def run_codec(form: Form, gradients: Sequence[Sequence[torch.Tensor]], device: torch.device, how: str) -> CodecRun:
    """Exchange `gradients` on `device`. `how`: "engine", by what the engine runs; "eager", by the codec itself."""
    codec = make_codec(form.spec)
    exchange: Callable[[torch.Tensor, Any, GroupRank], Exchange] = (
        codec.exchange if how == "engine" else _eager(codec)
    )
    groups = [GroupRank(rank, RANKS) for rank in range(RANKS)]
    states = [codec.init(each.to(device), group) for each, group in zip(gradients[0], groups, strict=True)]
    means: list[list[torch.Tensor]] = []
    with torch.no_grad():
        for rows in gradients:
            units = [row.to(device, copy=True) for row in rows]
            done = simulate(
                [cast_rounds(exchange(unit, state, group))
                 for unit, state, group in zip(units, states, groups, strict=True)]
            )  # fmt: skip
            states = [exchanged.state for exchanged in done.results]
            means.append([unit.cpu() for unit in units])
    kept = [leaves(state).get("residual") for state in states]
    return CodecRun(means, [each.cpu().clone() for each in kept if isinstance(each, torch.Tensor)])


def cast_rounds(exchange: Exchange) -> Any:
    """Return an exchange as rounds of any result."""
    return exchange


def _eager(codec: CodecInstance) -> Callable[[torch.Tensor, Any, GroupRank], Exchange]:
    def exchange(unit: torch.Tensor, state: Any, group: GroupRank) -> Exchange:
        mean, _, new_state = yield from codec.encode(unit, state, group)
        unit.copy_(mean)
        return Exchanged(True, new_state)

    return exchange


def fault_of(found: CodecRun, expected: CodecRun, *, by_bits: bool) -> str:
    """Return how a run differs from the one expected; empty: it does not."""
    near = 0.0 if by_bits else NEAR
    for step, (ours, theirs) in enumerate(zip(found.means, expected.means, strict=True)):
        unequal = first_difference(ours[1:], [ours[0]] * (len(ours) - 1), near=0.0)
        if unequal:
            return f"step {step}: ranks have different means: {unequal}"
        if wrong := first_difference(ours, theirs, near=near):
            return f"mean of step {step}: {wrong}"
    largest = max(float(mean.double().norm()) for means in expected.means for mean in means)
    wrong = first_difference(found.residuals, expected.residuals, near=near, size=largest)
    return f"residual: {wrong}" if wrong else ""

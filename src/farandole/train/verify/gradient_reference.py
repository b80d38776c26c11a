"""How far gradients are from their reference, and what that looks like. See [Note: the oracle] in `replay`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...comm.world.comm_errors import translated
from ...comm.world.world import World
from .replay import Gradients, RecordedPass

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Difference:
    """How far one gradient is from its reference."""

    name: str
    error: float
    """Relative to the reference."""
    cause: str


def compare_gradients(actual: Gradients, reference: Gradients, own: Gradients, size: int) -> list[Difference]:
    """Return how far each gradient is from its reference, with the likely cause."""
    total = sum(g.numel() for g in reference.values())
    typical = (sum(float(g.square().sum()) for g in reference.values()) / max(total, 1)) ** 0.5
    found = []
    for name, expected in reference.items():
        given = actual[name].double()
        # Where the true gradient is rounding noise (a bias before BatchNorm), the others' size counts.
        scale = float(expected.norm()) + 1e-2 * typical * expected.numel() ** 0.5
        difference = float((given - expected).norm())
        error = difference / scale if scale else difference
        found.append(Difference(name, error, _likely_cause(given, expected, own.get(name), size)))
    return found


def _likely_cause(given: torch.Tensor, expected: torch.Tensor, own: torch.Tensor | None, size: int) -> str:
    norm = float(expected.norm())
    if not norm:
        return ""
    if not float(given.norm()):
        return ": it is zero"
    if own is not None and float((given - own.double() * size).norm()) < 1e-3 * norm:
        return ": it is this rank's own gradient, which never met the others'"
    ratio = float((given * expected).sum()) / norm**2
    if float((given - ratio * expected).norm()) < 1e-3 * norm:
        hint = " (added up, and not divided)" if abs(ratio - size) < 1e-3 else ""
        return f": it is {ratio:.4g} times that{hint}"
    return ""


def weighted(passes: Sequence[RecordedPass], size: int) -> Gradients:
    """Return this rank's part of the mean over ranks."""
    total: Gradients = {}
    for each in passes:
        if not each.factor:
            continue  # a placeholder
        with torch.enable_grad():
            replayed = each.replay()
        for name, gradient in replayed.items():
            part = _dense(gradient).double() * (each.factor / size)
            total[name] = part if name not in total else total[name] + part
    return total


def summed(here: World, parameters: Mapping[str, nn.Parameter], own: Gradients) -> Gradients:
    """Return the sum of `own` over all ranks, in float64 and by a plain all-reduce; zeros where none has one."""
    sums = {}
    for name, parameter in parameters.items():
        mine = own.get(name)
        part = torch.zeros(parameter.shape, dtype=torch.float64, device=parameter.device) if mine is None else mine
        part = part.contiguous().clone()
        with translated(here, "gradients of one process"):
            dist.all_reduce(part, group=here.group)
        sums[name] = part
    return sums


def change(parameter: nn.Parameter, before: torch.Tensor | None) -> torch.Tensor:
    """Return what was added to a parameter's gradient."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    now = _dense(parameter.grad)
    return now if before is None else now.double() - _dense(before).double()


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return it whole: at zero = 1 and 2 a rank has its rows, and all ranks ask for the same one."""
    if isinstance(gradient, DTensor):
        gradient = gradient.full_tensor()
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()


def relative(actual: Gradients, reference: Gradients) -> float:
    """Return how far all gradients together are from their reference, as a part of it."""
    norm = sum(float(g.double().square().sum()) for g in reference.values()) ** 0.5
    apart = sum(float((actual[name].double() - g).square().sum()) for name, g in reference.items()) ** 0.5
    return float(apart / norm) if norm else float(apart)


def tolerance(parameter: torch.Tensor) -> float:
    """Return the largest error that rounding explains."""
    return _TOLERANCE.get(parameter.dtype, 1e-3)

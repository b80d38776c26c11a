"""Whether an optimizer updates each element by that element alone, so that its work can be divided by rows.

Tried and not looked up: the optimizer updates a small tensor whole, and the same numbers in two parts. Norms of
whole parameters (LARS, LAMB), factors of rows and columns (Adafactor), orthogonalised matrices (Muon) and line
searches (LBFGS) give other numbers then, or an error.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from ...comm.gradients.grad_ownership import replace_grad

_STEPS = 3
_ROWS, _COLUMNS, _CUT = 6, 4, 2


def why_not_elementwise(optimizer: Optimizer) -> str:
    """Return why the work of `optimizer` cannot be divided by rows; an empty text if it can."""
    try:
        for group in optimizer.param_groups:
            generator = torch.Generator().manual_seed(1)
            numbers = torch.randn(_STEPS + 1, _ROWS, _COLUMNS, dtype=torch.float32, generator=generator)
            whole = _updated(optimizer, group, [numbers])
            parts = _updated(optimizer, group, [numbers[:, :_CUT], numbers[:, _CUT:]])
            if not torch.allclose(whole, parts, rtol=1e-6, atol=1e-9, equal_nan=True):
                return "its update of an element depends on others of the same parameter"
    except Exception as problem:
        first = (str(problem).splitlines() or [""])[0]
        return f"its step cannot be tried on a small tensor ({type(problem).__name__}: {first})"
    return ""


@torch.no_grad()
def _updated(optimizer: Optimizer, group: dict[str, Any], numbers: list[torch.Tensor]) -> torch.Tensor:
    """Return what becomes of ``numbers[i][0]`` with the gradients that follow it, joined over i."""
    parameters = [torch.nn.Parameter(each[0].clone()) for each in numbers]
    twin = object.__new__(type(optimizer))
    own = {key: value for key, value in vars(optimizer).items() if key != "step"}
    hooks = {
        key: OrderedDict[int, Any]() for key in own if key.startswith("_optimizer_") and key.endswith("_hooks")
    }
    options = {key: value for key, value in group.items() if key != "param_names"}
    vars(twin).update(own | hooks)
    twin.state, twin.param_groups = defaultdict(dict), [{**options, "params": parameters}]
    update: Any = type(optimizer).step
    if getattr(update, "hooked", False):  # torch's: its hooks are for steps of trainings
        update = getattr(update, "__wrapped__", update)
    for step in range(1, _STEPS + 1):
        for parameter, each in zip(parameters, numbers, strict=True):
            replace_grad(parameter, each[step].clone())
        update(twin)
    return torch.cat([parameter.detach() for parameter in parameters])

"""Whether an optimizer's work can be divided: by rows of a parameter, by parameters, and over sharded tensors.

Tried and not looked up: the optimizer updates a small tensor whole, and the same numbers in two parts. Norms of
whole parameters (LARS, LAMB), factors of rows and columns (Adafactor), orthogonalised matrices (Muon) and line
searches (LBFGS) give other numbers then, or an error. The parts are in one optimizer, and in two that do not see
each other, as on ranks: there bounds of a norm over all parameters and learned step sizes (D-Adaptation, Prodigy)
differ. Gradients are also large ones, so that bounds bite, and steady ones, so that learned steps grow.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from ...comm.engine.grad_ownership import replace_grad
from ...core.vocabulary.errors import ConfigError
from ..model import Strategy

_STEPS = 24
"""D-Adaptation begins with a step of 1e-6, and looks like SGD until it has grown."""
_ROWS, _COLUMNS, _CUT = 6, 4, 2
_LEAST_RATE = 0.01
_OF_PARAMETERS = ("params", "param_names", "lr", "initial_lr", "weight_decay")
"""Keys of a group in which it may differ from another one, and be tried with it."""
_BY_PARAMETERS = "use an optimizer that treats each parameter alone, such as torch.optim.AdamW"
_GRADIENTS = ((100.0, 0.0), (1.0, 4.0))
"""Size of the random part, and of one that is the same in each step, by which learned step sizes grow."""


def why_not_elementwise(optimizer: Optimizer) -> str:
    """Return why the work of `optimizer` cannot be divided by rows; an empty text if it can."""

    def try_group(group: dict[str, Any], numbers: torch.Tensor) -> str:
        parts = _halves(numbers)
        whole, together = _updated(optimizer, group, [numbers]), _updated(optimizer, group, parts)
        if _are_close(whole, together) and _are_close(whole, _apart(optimizer, group, parts)):
            return ""
        is_alone = _are_close(whole, together, rtol=1e-4)  # a norm of all is summed in another order
        return _ALL if is_alone else "its update of an element depends on others of the same parameter"

    return _first_reason(optimizer, try_group)


def why_not_by_parameters(optimizer: Optimizer) -> str:
    """Return why parameters cannot be updated by several optimizers like this one; an empty text if they can."""

    def try_group(group: dict[str, Any], numbers: torch.Tensor) -> str:
        both = _halves(numbers)
        is_alike = _are_close(_updated(optimizer, group, both), _apart(optimizer, group, both))
        return "" if is_alike else _ALL

    return _first_reason(optimizer, try_group)


def why_not_sharded(optimizer: Optimizer, mesh: DeviceMesh) -> str:
    """Return why `optimizer` cannot step with tensors sharded over the last dimension of `mesh`; "" if it can.

    To be called by all ranks of the mesh, which may exchange norms meanwhile.
    """
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]

    def shard(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor.to(mesh.device_type), mesh, placements, src_data_rank=None)

    def try_group(group: dict[str, Any], numbers: torch.Tensor) -> str:
        both = _halves(numbers)
        found = _updated(optimizer, group, both, shard)
        # Norms of shards are summed in another order.
        is_alike = _are_close(_updated(optimizer, group, both), found.to(numbers.device), rtol=1e-4)
        return "" if is_alike else "with sharded tensors its update is another one: it reads what this rank has"

    return _first_reason(optimizer, try_group)


_ALL = "its update of a parameter depends on other parameters"


def _first_reason(optimizer: Optimizer, try_group: Callable[[dict[str, Any], torch.Tensor], str]) -> str:
    """Return the first reason that `try_group` gives: for each group, and for several kinds of gradients."""
    try:
        for group in _kinds_of_groups(optimizer):
            for size, steady in _GRADIENTS:
                generator = torch.Generator().manual_seed(1)
                numbers = torch.randn(_STEPS + 1, _ROWS, _COLUMNS, dtype=torch.float32, generator=generator)
                numbers[1:] = numbers[1:] * size + numbers[:1] * steady
                why = try_group(group, numbers)
                if why:
                    return why
    except Exception as problem:
        first = (str(problem).splitlines() or [""])[0]
        return f"its step cannot be tried on a small tensor ({type(problem).__name__}: {first})"
    return ""


def _kinds_of_groups(optimizer: Optimizer) -> Iterable[dict[str, Any]]:
    """Return a group for each set of options, with a learning rate that shows: a schedule may begin at 0."""
    if any(isinstance(each, Optimizer) for each in vars(optimizer).values()):
        raise TypeError("it steps another optimizer")
    kinds: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in _OF_PARAMETERS}
        kind = kinds.setdefault(repr(options), dict(group))
        rate = kind.get("lr")
        if isinstance(rate, (int, float, torch.Tensor)) and float(rate) < _LEAST_RATE:
            kind["lr"] = torch.full_like(rate, _LEAST_RATE) if isinstance(rate, torch.Tensor) else _LEAST_RATE
    return kinds.values()


def _halves(numbers: torch.Tensor) -> list[torch.Tensor]:
    return [numbers[:, :_CUT], numbers[:, _CUT:]]


def _are_close(one: torch.Tensor, other: torch.Tensor, rtol: float = 1e-6) -> bool:
    return torch.allclose(one, other, rtol=rtol, atol=1e-9, equal_nan=True)


def _apart(optimizer: Optimizer, group: dict[str, Any], numbers: list[torch.Tensor]) -> torch.Tensor:
    """Return what `_updated` does, by an optimizer for each parameter."""
    return torch.cat([_updated(optimizer, group, [each]) for each in numbers])


@torch.no_grad()
def _updated(
    optimizer: Optimizer,
    group: dict[str, Any],
    numbers: list[torch.Tensor],
    place: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> torch.Tensor:
    """Return what becomes of ``numbers[i][0]`` with the gradients that follow it, joined over i."""
    parameters = [torch.nn.Parameter(place(each[0])) for each in numbers]
    twin: Any = object.__new__(type(optimizer))
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
    if callable(getattr(twin, "train", None)):
        twin.train()  # optimizers that average the parameters they evaluate with
    for step in range(1, _STEPS + 1):
        for parameter, each in zip(parameters, numbers, strict=True):
            replace_grad(parameter, place(each[step]))
        update(twin)
    found: list[Any] = [parameter.detach() for parameter in parameters]
    after = torch.cat([each.full_tensor() if isinstance(each, DTensor) else each for each in found])
    if torch.equal(after.cpu(), torch.cat([each[0] for each in numbers])):
        raise ValueError("it changes nothing")
    return after


class DividedSteps(Strategy):
    """Optimizers whose work a plan divides: refuses those that need whole parameters, or all of them."""

    keys = ("zero", "pipeline", "tensor", "expert")

    def check(self) -> None:
        """Raise `ConfigError`, by the optimizer's name."""
        degrees = self.mesh.degrees
        for optimizer in self.optimizers:
            kind = type(optimizer).__name__
            if self.mesh.here.size > 1 and self.plan.zero in (1, 2) and (why := why_not_elementwise(optimizer)):
                raise ConfigError(
                    f"plan: zero = {self.plan.zero} divides the work of the optimizer by rows, but that of {kind} "
                    f"cannot be divided: {why}",
                    remedy="use one that works element by element, such as torch.optim.AdamW, or set zero = 0",
                )
            if degrees.pipeline > 1 and isinstance(optimizer, torch.optim.LBFGS):
                raise ConfigError(
                    f"plan: pipeline = {degrees.pipeline}, but {kind} joins all parameters into one vector, and a "
                    "rank has those of its stage",
                    remedy=_BY_PARAMETERS,
                )
            if degrees.pipeline > 1 and (why := why_not_by_parameters(optimizer)):
                raise ConfigError(
                    f"plan: pipeline = {degrees.pipeline} leaves a rank the parameters of its stage, and the work "
                    f"of {kind} cannot be divided: {why}",
                    remedy=_BY_PARAMETERS,
                )
            divided = [name for name in ("tensor", "expert") if self.mesh.size(name) > 1]
            if divided and (why := why_not_elementwise(optimizer)):
                raise ConfigError(
                    f"plan: {divided[0]} = {self.mesh.size(divided[0])}: {kind} cannot update parts of "
                    f"parameters: {why}",
                    remedy="use an optimizer that works element by element, such as torch.optim.AdamW",
                )

"""Parameters and gradients in bfloat16, without master weights: plan key ``bf16_parameters``.

The optimizer computes in float32 all the same, and its state is float32: in its step parameters and gradients
are float32, one part of them at a time, and the new parameters are rounded stochastically.

[Note: one part at a time] The optimizers of `torch.optim` treat each parameter alone, so their step can be made
for a part of the parameters, then for the next: the float32 copies need little memory. An optimizer of another
class may count steps or combine parameters, and steps once, for all of them.

[Note: rounding of shards] The noise of an element goes by step, parameter and place in the whole parameter. So a
rank that steps with its rows alone (ZeRO) rounds each element as a rank with the whole parameter does.

An update smaller than half the distance of two bfloat16 numbers is lost by rounding to the nearest, each time.
Rounded stochastically it counts with its probability. (Zamirai et al. 2020, "Revisiting BFloat16 Training",
section 3.)

[Note: the same noise everywhere] The noise is a hash of step, parameter and element, not a generator's: the
numbers of a generator on a GPU depend on the GPU, and all ranks must round alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ...comm.engine.grad_ownership import drop_grads, replace_grad
from ...comm.engine.parameters import rows_of
from ...core.vocabulary.errors import ConfigError, PlanError
from ..model import Handle, Strategy
from .step_hooks import is_nested_step, undo_after_errors

# Stochastic rounding from float32 to bfloat16: up or down with probabilities that make the mean exact.
_GOLDEN = 0x9E3779B9
_LOW_BITS = 0xFFFF
_HIGH_BITS = -0x10000
"""The bits of an int32 that bfloat16 keeps."""


def round_stochastically(values: torch.Tensor, seed: int, first: int = 0) -> torch.Tensor:
    """Return float32 `values` of any shape in bfloat16; the same for the same `seed` on all devices.

    Each becomes one of its two neighbours, the nearer one more likely: the expectation is the value. NaN and
    infinity stay what they are. `first`: elements of a larger tensor before these, whose noise is theirs then.
    """
    flat = values.contiguous()
    bits = flat.view(torch.int32)
    index = torch.arange(first, first + bits.numel(), dtype=torch.int32, device=bits.device)
    noise = _hash(index, seed).view(bits.shape)
    rounded = bits.add(noise.bitwise_and_(_LOW_BITS)).bitwise_and_(_HIGH_BITS).view(torch.float32)
    return torch.where(torch.isfinite(flat), rounded, flat).to(torch.bfloat16)


def seed_of(*numbers: int) -> int:
    """Return one seed of several numbers, 32 bits."""
    seed = _GOLDEN
    for number in numbers:
        seed = _mix(seed ^ (number * _GOLDEN & 0xFFFFFFFF))
    return seed


def _hash(index: torch.Tensor, seed: int) -> torch.Tensor:
    """Return 32 well mixed bits for each index, in place: the finalizer of MurmurHash3 (Appleby)."""
    index.mul_(_signed(_GOLDEN)).add_(_signed(seed))
    index.bitwise_xor_(_shifted(index, 16)).mul_(_signed(0x85EBCA6B))
    index.bitwise_xor_(_shifted(index, 13)).mul_(_signed(0xC2B2AE35))
    return index.bitwise_xor_(_shifted(index, 16))


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the bits moved right, zeros from the left."""
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)


def _mix(number: int) -> int:
    number = (number ^ number >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    number = (number ^ number >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return number ^ number >> 16


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


_PART_ELEMENTS = 1 << 24
"""Elements of a part, about."""
FirstElement = Callable[[torch.Tensor], int]
"""Returns how many elements of its parameter come before those of a tensor that an optimizer's group holds."""


class RoundedSteps:
    """The steps of one model's optimizers, counted for the noise."""

    def __init__(self) -> None:
        self.done = 0
        """Steps of all optimizers together: the same on all ranks."""


@dataclass(frozen=True)
class _Wide:
    """A parameter that is float32 for the optimizer."""

    parameter: torch.Tensor
    """What the groups of the optimizer hold between steps."""
    gradient: torch.Tensor
    number: int
    """The parameter's, in the order of the groups."""
    narrow: torch.Tensor
    """The bfloat16 numbers here, where the rounded ones go."""
    held: torch.Tensor
    """What the groups hold meanwhile: the parameter itself, or a DTensor that stands for it."""


class RoundedStep:
    """The hooks around the steps of one optimizer."""

    def __init__(self, steps: RoundedSteps, first_element: FirstElement | None) -> None:
        self._steps, self._first_element = steps, first_element
        self._wide: list[_Wide] = []
        self._groups: list[list[torch.Tensor]] = []
        """What the groups of the optimizer hold."""

    def before(self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Make the step for all parts but the last, and widen that one."""
        if is_nested_step(optimizer):
            return
        if callable(named.get("closure")) or any(map(callable, arguments[1:])):
            raise ConfigError(
                "plan: bf16_parameters = true, but the optimizer's step evaluates the model, by a closure",
                remedy="call backward() before step(), or leave bf16_parameters out",
            )
        self._steps.done += 1
        self._groups = [group["params"] for group in optimizer.param_groups]
        *first, last = _parts(optimizer)
        step: Callable[..., Any] = type(optimizer).step
        step = getattr(step, "__wrapped__", step)
        for part in first:
            self._widen(optimizer, part)
            step(optimizer)
            self._round(optimizer)
        self._widen(optimizer, last)

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """Round the last part."""
        if is_nested_step(optimizer):
            return
        self._round(optimizer)
        self._restore_groups(optimizer)

    def undo(self, optimizer: Optimizer) -> None:
        """After an error in a step: leave parameters as they were, except for parts that have made it."""
        for each in self._wide:
            self._narrow(optimizer, each)
        self._wide = []
        if self._groups and self._first_element is None:  # otherwise they were restored already
            self._restore_groups(optimizer)

    def _restore_groups(self, optimizer: Optimizer) -> None:
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        self._groups = []

    @torch.no_grad()
    def _widen(self, optimizer: Optimizer, part: set[int]) -> None:
        """Let the optimizer hold the parameters numbered in `part` alone, in float32."""
        number = 0
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = []
            for parameter in parameters:
                if number in part:
                    held = parameter
                    if parameter.dtype == torch.bfloat16 and parameter.grad is not None:
                        self._wide.append(_widen(optimizer, parameter, parameter.grad, number))
                        held = self._wide[-1].held
                    group["params"].append(held)
                number += 1

    @torch.no_grad()
    def _round(self, optimizer: Optimizer) -> None:
        for each in self._wide:
            wide = each.held.to_local() if isinstance(each.held, DTensor) else each.held.data
            first = self._first_of(each.parameter)
            rounded = round_stochastically(wide, seed_of(self._steps.done, each.number), first)
            self._narrow(optimizer, each)
            each.narrow.copy_(rounded)
        self._wide = []

    @torch.no_grad()
    def _narrow(self, optimizer: Optimizer, wide: _Wide) -> None:
        """Let a parameter be bfloat16 again, with the numbers that it had."""
        parameter, held = wide.parameter, wide.held
        replace_grad(held, None)
        if held is not parameter:
            if held in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(held)
            return
        parameter.data = wide.narrow
        replace_grad(parameter, wide.gradient)

    def _first_of(self, parameter: torch.Tensor) -> int:
        """Return how many elements of the parameter come before those here. See [Note: rounding of shards]."""
        if isinstance(parameter, DTensor):
            return _first_element(parameter)
        return 0 if self._first_element is None else self._first_element(parameter)


def _widen(optimizer: Optimizer, parameter: torch.Tensor, gradient: torch.Tensor, number: int) -> _Wide:
    if isinstance(parameter, DTensor):
        narrow = parameter.to_local().detach()
        held: torch.Tensor = DTensor.from_local(
            narrow.float(), parameter.device_mesh, parameter.placements,
            run_check=False, shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
        if parameter in optimizer.state:
            optimizer.state[held] = optimizer.state.pop(parameter)
        replace_grad(held, gradient.float())
        return _Wide(parameter, gradient, number, narrow, held)
    narrow = parameter.data
    replace_grad(parameter, None)
    parameter.data = narrow.float()
    replace_grad(parameter, gradient.float())
    return _Wide(parameter, gradient, number, narrow, parameter)


def _first_element(parameter: DTensor) -> int:
    """Return how many elements of a parameter come before those of this rank, which has rows of it."""
    mesh = parameter.device_mesh
    rows = [axis for axis, placement in enumerate(parameter.placements) if placement.is_shard(0)]
    if not rows:
        return 0
    begin, _ = rows_of(parameter.shape[0], mesh.size(rows[0]), mesh.get_local_rank(rows[0]))
    return begin * math.prod(parameter.shape[1:])


def _parts(optimizer: Optimizer) -> list[set[int]]:
    """Return the numbers of the parameters that are treated at once. See [Note: one part at a time]."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, torch.optim.LBFGS):
        return [set(range(len(parameters)))]
    parts: list[set[int]] = [set()]
    elements = 0
    for number, parameter in enumerate(parameters):
        if elements >= _PART_ELEMENTS:
            parts.append(set())
            elements = 0
        parts[-1].add(number)
        elements += parameter.numel()
    return parts


class Bf16Parameters(Strategy):
    """The plan key: parameters of the model in bfloat16, but for normalisations with running statistics."""

    keys = ("bf16_parameters",)

    def check(self) -> None:
        """Raise `PlanError` when there is none to make so."""
        if not narrowable(self.model):
            raise PlanError(
                f"plan: bf16_parameters = true has no effect: this {type(self.model).__name__} has no parameter "
                "in float32",
                remedy="leave bf16_parameters out",
            )

    def prepare(self) -> None:
        """Make them bfloat16 in place."""
        chosen = narrowable(self.model)
        drop_grads(chosen)
        for parameter in chosen:
            parameter.data = parameter.data.to(torch.bfloat16)

    def finish(self) -> None:
        """Round them in each step from now on."""
        own = self.distributed
        rows = [step.first_element for step in own.sharded_steps]
        own.rounded_steps = round_steps(self.optimizers, rows, own.hooks)


def round_steps(
    optimizers: Sequence[Optimizer], first_elements: Sequence[FirstElement], hooks: list[Handle]
) -> RoundedSteps:
    """Round the parameters stochastically in each step of `optimizers` from now on.

    `first_elements`: by optimizer, where what its groups hold in a step begins; empty: they hold the parameters.
    `hooks`: gets what was hooked.
    """
    steps = RoundedSteps()
    for number, optimizer in enumerate(optimizers):
        rounded = RoundedStep(steps, first_elements[number] if first_elements else None)
        handle = optimizer.register_step_post_hook(rounded.after)
        after: Any = optimizer._optimizer_step_post_hooks
        after.move_to_end(handle.id, last=False)  # rows are rounded before they are sent
        hooks += [optimizer.register_step_pre_hook(rounded.before), handle]
        undo_after_errors(optimizer, rounded.undo)
    return steps


def widen_parameters(model: nn.Module) -> None:
    """Let the bfloat16 parameters of `model` be float32 again."""
    narrow = [parameter for parameter in model.parameters() if parameter.dtype == torch.bfloat16]
    drop_grads(narrow)
    for parameter in narrow:
        parameter.data = parameter.data.float()


def narrowable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that `Bf16Parameters` makes so."""
    kept = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _NormBase)
        for parameter in module.parameters(recurse=False)
    }
    return [each for each in model.parameters() if each.dtype == torch.float32 and id(each) not in kept]

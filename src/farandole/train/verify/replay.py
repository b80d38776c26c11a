"""What one process computes of a forward and backward pass that was recorded: an oracle without ranks.

[Note: the oracle] A pass is recorded as what went in (copies of the model and its inputs, the state of the random
numbers) and the gradient of what came out. Run again on the copy, which no reducer knows, it gives this rank's own
gradient; the weighted sum over ranks, added up by a plain all-reduce in float64, is what ``parameter.grad`` must
be.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...comm.batch_weight import tensors_in
from ...comm.device.accelerator import random_states, set_random_states

Gradients = dict[str, torch.Tensor]


class RecordedPass:
    """One forward pass of a model, and the gradients that reached its outputs."""

    def __init__(
        self, model: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any], factor: float
    ) -> None:
        self.factor = factor
        """The weight with which the reducer counts it."""
        self.samples = _rows(next(iter(tensors_in((arguments, named))), None))
        self.copy = copy.deepcopy(model)
        self.arguments, self.named = map_tensors((arguments, dict(named)), _keep)
        self.output_gradients: dict[int, torch.Tensor] = {}
        self.is_random = False
        self._random = _random_state()
        self._autocast = _autocast_state()

    def watch_outputs(self, output: Any) -> None:
        """Note the gradient of every output of the forward pass, which has just ended."""
        self.is_random = any(not torch.equal(a, b) for a, b in zip(self._random, _random_state(), strict=True))
        for index, tensor in enumerate(differentiable(output)):

            def note(gradient: torch.Tensor, index: int = index) -> None:
                known = self.output_gradients.get(index)
                fresh = gradient.detach().clone()
                self.output_gradients[index] = fresh if known is None else known + fresh

            tensor.register_hook(note)

    def replay(self) -> Gradients:
        """Return the gradient of every parameter that this pass had a part in."""
        with _as_it_was(self._random, self._autocast):
            output = self.copy(*self.arguments, **self.named)
        return gradients_of(self.copy, differentiable(output), self.output_gradients)

    def replay_joined(self, inputs: Any, output_gradients: Mapping[int, torch.Tensor]) -> Gradients:
        """Return the gradients of a pass over other inputs: the joined batch of all ranks."""
        arguments, named = inputs
        with _as_it_was(self._random, self._autocast):
            output = self.copy(*arguments, **named)
        return gradients_of(self.copy, differentiable(output), output_gradients)


def differentiable(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output that gradients can reach, each once."""
    found = {id(tensor): tensor for tensor in tensors_in(output) if tensor.requires_grad}
    return list(found.values())


def gradients_of(
    model: nn.Module, outputs: Sequence[torch.Tensor], totals: Mapping[int, torch.Tensor]
) -> Gradients:
    """Return the parameters' gradients, given what reached each output in total.

    An output that others are computed from (logits, of which the model made a loss) has in its total what came by
    way of them: that is taken off, so that nothing counts twice.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    reached = [ancestors(tensor) for tensor in outputs]
    order = sorted(totals, key=lambda i: sum(outputs[i].grad_fn in nodes for nodes in reached))
    used: list[int] = []
    direct: list[torch.Tensor] = []
    for i in order:
        gradient = totals[i]
        later = [k for k, j in enumerate(used) if outputs[i].grad_fn in reached[j]]
        if later:
            (via,) = torch.autograd.grad(
                [outputs[used[k]] for k in later], outputs[i], [direct[k] for k in later],
                retain_graph=True, allow_unused=True,
            )  # fmt: skip
            gradient = gradient if via is None else gradient - via
        used.append(i)
        direct.append(gradient)
    if not used:
        return {}
    found = torch.autograd.grad([outputs[i] for i in used], list(parameters.values()), direct, allow_unused=True)
    return {name: g.detach() for name, g in zip(parameters, found, strict=True) if g is not None}


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a nest of containers with every tensor replaced; other objects are copied with theirs."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(each, change) for each in value))
    if type(value) in (list, tuple):
        return type(value)(map_tensors(each, change) for each in value)
    if type(value) is dict:
        return {key: map_tensors(each, change) for key, each in value.items()}
    if hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and _has_tensors(value):
        twin = copy.copy(value)
        for name, each in vars(value).items():
            object.__setattr__(twin, name, map_tensors(each, change))
        return twin
    return value


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _has_tensors(value: Any) -> bool:
    return next(tensors_in(value), None) is not None


def _rows(tensor: torch.Tensor | None) -> int:
    return tensor.shape[0] if tensor is not None and tensor.dim() else 0


def ancestors(tensor: torch.Tensor) -> set[Any]:
    """Return the nodes that `tensor` is computed from, without its own."""
    found: set[Any] = set()
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        for following, _ in () if node is None else node.next_functions:
            if following is not None and following not in found:
                found.add(following)
                waiting.append(following)
    return found


def _random_state() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *random_states()]


def _set_random_state(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    set_random_states(states[1:])


def _autocast_state() -> tuple[str, bool, torch.dtype]:
    device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


@contextmanager
def _as_it_was(random: Sequence[torch.Tensor], autocast: tuple[str, bool, torch.dtype]) -> Iterator[None]:
    """Draw the same random numbers and cast alike; leave the random numbers as they are now."""
    now = _random_state()
    device, enabled, dtype = autocast
    _set_random_state(random)
    try:
        with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
            yield
    finally:
        _set_random_state(now)

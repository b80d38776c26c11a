"""What the layers of a model cost, measured: seconds of forward and backward, bytes of states and activations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...comm.device.accelerator import synchronize
from ...core.schedule.partition import LayerCost
from ..frozen.encode_model import stored_tensors
from .program import Program, Segment, cut_program, run_segment

REPEATS = 2
_STATE_FACTOR = 4
"""Parameters, gradients, and two states of the optimizer."""


def measure_layers(
    model: nn.Module,
    program: Program,
    starts: Sequence[int],
    inputs: list[torch.Tensor],
    loss_of: Callable[[Any], torch.Tensor],
) -> list[LayerCost]:
    """Run every layer forward and backward on a micro-batch; return the costs.

    Args:
        model: with all of its parameters.
        program: its program.
        starts: positions of the calls at which a stage may begin, but for the first, which begins at 0.
        inputs: tensors of the micro-batch.
        loss_of: computes the loss; it counts to the last layer.
    """
    carried: dict[int, torch.Tensor] = {}
    found = []
    for segment in cut_program(program, starts):
        received = {number: carried[number] for number in segment.receives}
        seconds, nbytes = float("inf"), 0
        for _ in range(REPEATS):
            spent, nbytes, carried = _once(model, program, segment, inputs, received, loss_of=loss_of)
            seconds = min(seconds, spent)
        names = {name for call in segment.calls for name in program.parameters_of(call, model)}
        states = _STATE_FACTOR * sum(model.get_parameter(name).nbytes for name in names)
        modules = [call.target for call in segment.calls if call.function is None]
        border = sum(program.specs[number].nbytes for number in segment.receives)
        found.append(LayerCost(modules[0] if modules else "", seconds, states, nbytes, border))
    return found


def _once(
    model: nn.Module,
    program: Program,
    segment: Segment,
    inputs: list[torch.Tensor],
    received: dict[int, torch.Tensor],
    *,
    loss_of: Callable[[Any], torch.Tensor],
) -> tuple[float, int, dict[int, torch.Tensor]]:
    kept: dict[int, int] = {}
    parameters = {each.untyped_storage().data_ptr() for each in stored_tensors(list(model.parameters()))}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    values = {number: inputs[number] for number in segment.needs_inputs}
    leaves = []
    for number, tensor in received.items():
        leaf = tensor.clone()
        if program.specs[number].trains:
            leaves.append(leaf.requires_grad_())
            leaf = leaf.clone()  # what is computed in place may not be a leaf
        values[number] = leaf
    _wait(model)
    begin = time.perf_counter()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run_segment(segment, model, values)
        roots = [values[number] for number in segment.sends]
        if segment.output is not None:
            roots = [loss_of(output)]
    roots = [root for root in roots if root.requires_grad]
    names = {name for call in segment.calls for name in program.parameters_of(call, model)}
    ends = [*leaves, *(p for p in map(model.get_parameter, sorted(names)) if p.requires_grad)]
    if roots and ends:
        torch.autograd.grad(roots, ends, [torch.ones_like(root) for root in roots], allow_unused=True)
    _wait(model)
    spent = time.perf_counter() - begin
    return spent, sum(kept.values()), {number: values[number].detach() for number in segment.sends}


def _wait(model: nn.Module) -> None:
    parameter = next(model.parameters(), None)
    if parameter is not None:
        synchronize(parameter.device)

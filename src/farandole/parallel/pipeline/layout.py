"""Where a model is cut: into stages by measured cost, or where the plan says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ...comm.device.accelerator import synchronize
from ...core.schedule import LayerCost, partition
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.text import did_you_mean
from ..blocks import repeated_blocks
from ..frozen_model import stored_tensors
from .program import Program, Segment, cut_program, run_segment

# What the layers of a model cost, measured: seconds of forward and backward, bytes of states and activations.

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


def module_calls(program: Program) -> list[int]:
    """Return the positions of the calls of modules."""
    return [position for position, call in enumerate(program.calls) if call.function is None]


def starts_of_layers(program: Program, model: nn.Module) -> list[int]:
    """Return the positions at which a stage may begin: calls of modules with parameters, but for the first one."""
    positions = [
        position for position in module_calls(program)
        if next(model.get_submodule(program.calls[position].target).parameters(), None) is not None
    ]  # fmt: skip
    return positions[1:]


def require_names(model: nn.Module, cuts: Sequence[str]) -> list[str]:
    """Return the names of the modules that the plan's cuts name; raise `PlanError` for one that names nothing.

    A number counts the repeated blocks of the model from 0, or the entries of a sequence.
    """
    blocks = [name for name, _ in repeated_blocks(model)]
    if not blocks and isinstance(model, nn.Sequential):
        blocks = [name for name, _ in model.named_children()]
    names = [name for name, _ in model.named_modules() if name]
    found = []
    for cut in cuts:
        if cut in names:
            found.append(cut)
        elif cut.isascii() and cut.isdigit() and int(cut) < len(blocks):
            found.append(blocks[int(cut)])
        else:
            close = did_you_mean(cut, names)
            numbers = f"numbers from 0 to {len(blocks) - 1}, of the repeated blocks" if blocks else "no numbers"
            raise PlanError(
                f"plan: pipeline_cuts has {cut!r}, which is no module of this {type(model).__name__}",
                remedy=f"{close if len(close) < 200 else 'see model.named_modules()'} (and {numbers})",
            )
    return found


def require_count(names: Sequence[str], stages: int) -> None:
    """Raise `PlanError` unless there is a name for each stage but the first."""
    if len(names) != stages - 1:
        raise PlanError(
            f"plan: pipeline_cuts has {len(names)} names, and {stages} stages have {stages - 1} cuts between them",
            remedy="name the first module of each stage but the first",
        )


def find_cuts(program: Program, names: Sequence[str], stages: int) -> list[int]:
    """Return the positions of the first calls of the modules `names`, each the begin of a stage."""
    require_count(names, stages)
    cuts = []
    for name in names:
        positions = [
            position for position in module_calls(program)
            if program.calls[position].target == name or fnmatchcase(program.calls[position].target, f"{name}.*")
        ]  # fmt: skip
        if not positions:
            raise PlanError(
                f"plan: pipeline_cuts has {name!r}, which forward does not call",
                remedy=f"modules that are called: {', '.join(_called(program))}",
            )
        cuts.append(positions[0])
    if cuts != sorted(set(cuts)) or (cuts and cuts[0] == 0):
        order = ", ".join(f"{name} at call {cut}" for name, cut in zip(names, cuts, strict=True))
        raise PlanError(
            f"plan: pipeline_cuts are not in the order in which forward calls them, after its first call: {order}",
            remedy="sort them, and name no module twice or that begins the model",
        )
    return cuts


def balance(
    costs: Sequence[LayerCost],
    starts: Sequence[int],
    stages: int,
    *,
    in_flight: Sequence[int],
    limit_bytes: int | None,
) -> list[int]:
    """Return the positions of the calls at which stages begin, so that the slowest is as fast as can be.

    `starts`: positions of the layers but for the first.
    """
    chosen = partition(costs, stages, in_flight=in_flight, limit_bytes=limit_bytes)
    return [starts[layer - 1] for layer in chosen]


def _called(program: Program) -> list[str]:
    names = [program.calls[position].target for position in module_calls(program)]
    return names if len(names) <= 12 else [*names[:6], "...", *names[-5:]]

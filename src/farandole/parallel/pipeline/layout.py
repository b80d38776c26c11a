"""Where a model is cut: into stages by measured cost, or where the plan says."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from ...core.schedule.partition import LayerCost, partition
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.suggestions import did_you_mean
from ..blocks import repeated_blocks
from .program import Program


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

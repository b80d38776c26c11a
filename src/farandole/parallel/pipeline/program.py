"""The program of a model's forward pass: calls of modules and functions in order, and how they fall into stages.

[Note: what a program is] Modules are called as they are, with their own Python code and hooks; the code around
them (of the model's `forward`, down to the modules that are called whole) was recorded once as calls of torch
functions with the shapes, numbers and flags of that pass. `trace` makes it.

[Note: what every stage computes] Values that depend on the model's inputs alone, without parameters, modules and
random numbers (masks, positions), are computed by each stage that needs them. Other values that a later stage
needs are carried through all stages between: skip connections, and what `forward` returns from the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...core.vocabulary.errors import PlanError


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the program, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or a buffer of the model that the code around the modules uses, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """The shape and type of a value in one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trains: bool
    """Whether it has a gradient."""

    @property
    def nbytes(self) -> int:
        """Bytes."""
        count = 1
        for each in self.shape:
            count *= each
        return count * self.dtype.itemsize


@dataclass(slots=True)
class ProgramCall:
    """One call of a module or of a function."""

    target: str
    """Name of the module, or of the function."""
    function: Callable[..., Any] | None
    """None: the module `target`."""
    arguments: Any
    """(positional, named), with `Value` and `Held` for tensors."""
    results: tuple[int | None, ...]
    """Numbers of the values among the leaves of what it returns."""
    is_shared: bool = False
    """See [Note: what every stage computes]."""
    form: Any = None
    """What it returned, with `Value` for tensors."""
    renames: tuple[tuple[int, int], ...] = ()
    """(before, after): values that it changes in place have another number after it."""

    def reads(self) -> list[int]:
        """Return the numbers of the values that the call needs."""
        arguments = [leaf.number for leaf in _leaves(self.arguments) if isinstance(leaf, Value)]
        return [*arguments, *(before for before, _ in self.renames)]

    def makes(self) -> list[int]:
        """Return the numbers of the values that are there after the call, and were not before."""
        return [*(each for each in self.results if each is not None), *(after for _, after in self.renames)]

    def holds(self) -> list[str]:
        """Return the names of the parameters and buffers among the arguments."""
        return [leaf.name for leaf in _leaves(self.arguments) if isinstance(leaf, Held)]


@dataclass(slots=True)
class Program:
    """The calls of a forward pass, and what goes in and out."""

    inputs: int
    """The first so many values are the tensors of the input."""
    calls: list[ProgramCall]
    output: Any
    """What `forward` returns, with `Value` for tensors."""
    specs: list[ValueSpec]
    guards: list[tuple[int, str, Any]] = field(default_factory=list)
    """(position in `calls`, method, result): decisions of the code that depend on values of the inputs."""

    def shared_segment(self, numbers: tuple[int, ...]) -> Segment:
        """Return the calls that make the values `numbers` of the inputs. See [Note: what every stage computes]."""
        maker = {number: call for call in self.calls for number in call.makes()}
        _, needed = _with_shared(numbers, maker)
        order = {id(call): position for position, call in enumerate(self.calls)}
        calls = sorted(needed, key=lambda call: order[id(call)])
        return Segment(0, 0, calls, (), numbers, tuple(range(self.inputs)))

    def parameters_of(self, call: ProgramCall, model: nn.Module) -> list[str]:
        """Return the names of the parameters that `call` uses; a tied one by its first name."""
        first = first_names(model)
        if call.function is not None:
            return [first[name] for name in call.holds() if name in first]
        module = model.get_submodule(call.target)
        prefix = f"{call.target}." if call.target else ""
        return [first[prefix + name] for name, _ in module.named_parameters(remove_duplicate=True)]


def first_names(model: nn.Module) -> dict[str, str]:
    """Return of each name of a parameter the first name of the same parameter."""
    names: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[name] = names.setdefault(id(parameter), name)
    return found


@dataclass(slots=True)
class Segment:
    """The calls of one stage."""

    stage: int
    begin: int
    """Position of its first own call."""
    calls: list[ProgramCall]
    """Its own, and shared ones that it needs, in order."""
    receives: tuple[int, ...]
    """Values from the stage before, ascending."""
    sends: tuple[int, ...]
    """Values to the next stage."""
    needs_inputs: tuple[int, ...]
    output: Any = None
    """What `forward` returns, in the last stage."""
    drops: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Values that no later call needs after the one at a position of `calls`."""


class CutProgram(NamedTuple):
    """A program and its segments, by stage."""

    program: Program
    segments: list[Segment]


def cut_program(program: Program, cuts: Sequence[int]) -> list[Segment]:
    """Return the segments of `program`; `cuts`: positions of calls at which the next stage begins, ascending."""
    bounds = [0, *cuts, len(program.calls)]
    stage_of: dict[int, int] = {}
    maker: dict[int, ProgramCall] = {}
    for stage in range(len(bounds) - 1):
        for call in program.calls[bounds[stage] : bounds[stage + 1]]:
            for number in call.makes():
                maker[number] = call
                if not call.is_shared:
                    stage_of[number] = stage
    _refuse_divided_views(program, stage_of)
    last = len(bounds) - 2
    output_values = [leaf.number for leaf in _leaves(program.output) if isinstance(leaf, Value)]
    wanted: list[set[int]] = []
    shared: list[list[ProgramCall]] = []
    for stage in range(last + 1):
        own = [call for call in program.calls[bounds[stage] : bounds[stage + 1]] if not call.is_shared]
        numbers = {number for call in own for number in call.reads()}
        if stage == last:
            numbers.update(output_values)
        needed, calls = _with_shared(numbers, maker)
        wanted.append(needed)
        shared.append(calls)
    crossing = [_crossing(stage, stage_of, wanted) for stage in range(last + 2)]
    order = {id(call): position for position, call in enumerate(program.calls)}
    segments = []
    for stage in range(last + 1):
        own = [call for call in program.calls[bounds[stage] : bounds[stage + 1]] if not call.is_shared]
        calls = sorted([*own, *shared[stage]], key=lambda call: order[id(call)])
        segment = Segment(
            stage, bounds[stage], calls, crossing[stage], crossing[stage + 1],
            tuple(sorted(number for number in wanted[stage] if number < program.inputs)),
            program.output if stage == last else None,
        )  # fmt: skip
        segment.drops = _drops(segment, output_values if stage == last else [])
        segments.append(segment)
    return segments


def _refuse_divided_views(program: Program, stage_of: Mapping[int, int]) -> None:
    """Values of one memory would be copies of their own in the next stage, and one change is no longer both's."""
    for call in program.calls:
        arguments = {leaf.number for leaf in _leaves(call.arguments) if isinstance(leaf, Value)}
        for before, after in call.renames:
            if before not in arguments and stage_of.get(before) != stage_of[after]:
                raise PlanError(
                    f"pipeline: {call.target!r} changes a tensor in place, and an earlier stage has a view of it",
                    remedy="cut the model elsewhere by pipeline_cuts, or change a copy",
                )


def _crossing(stage: int, stage_of: Mapping[int, int], wanted: Sequence[set[int]]) -> tuple[int, ...]:
    """Return the values that cross from the stage before `stage` into it."""
    if not stage or stage == len(wanted):
        return ()
    later = set().union(*wanted[stage:])
    return tuple(sorted(number for number in later if stage_of.get(number, stage) < stage))


def _with_shared(numbers: Iterable[int], maker: Mapping[int, ProgramCall]) -> tuple[set[int], list[ProgramCall]]:
    """Return the values that are needed for `numbers`, and the shared calls that make some of them."""
    needed, calls, found = set[int](), list[ProgramCall](), set[int]()
    rest = list(numbers)
    while rest:
        number = rest.pop()
        if number in needed:
            continue
        needed.add(number)
        call = maker.get(number)
        if call is not None and call.is_shared and id(call) not in found:
            found.add(id(call))
            calls.append(call)
            rest += call.reads()
    return needed, calls


def _drops(segment: Segment, kept: Iterable[int]) -> dict[int, tuple[int, ...]]:
    last: dict[int, int] = {}
    for position, call in enumerate(segment.calls):
        for number in (*call.reads(), *call.makes()):
            last[number] = position
    stay = {*kept, *segment.sends}
    drops: dict[int, list[int]] = {}
    for number, position in last.items():
        if number not in stay:
            drops.setdefault(position, []).append(number)
    return {position: tuple(numbers) for position, numbers in drops.items()}


def run_segment(segment: Segment, model: nn.Module, values: dict[int, torch.Tensor]) -> Any:
    """Run the calls of `segment`; `values` holds what it needs, and gets what it makes. Returns the output."""
    for position, call in enumerate(segment.calls):
        run_call(call, model, values)
        for number in segment.drops.get(position, ()):
            values.pop(number, None)
    return None if segment.output is None else fill(segment.output, model, values)


def run_call(call: ProgramCall, model: nn.Module, values: dict[int, torch.Tensor]) -> None:
    """Make one call, and keep its results in `values`."""
    arguments, named = fill(call.arguments, model, values)
    function = model.get_submodule(call.target) if call.function is None else call.function
    leaves = pytree.tree_leaves(function(*arguments, **named))
    if len(leaves) != len(call.results):
        raise PlanError(
            f"pipeline: {call.target!r} returned {len(leaves)} values, and {len(call.results)} at the first step",
            remedy="a module at the border of a stage must return the same kind of result at every step",
        )
    made = zip(call.results, leaves, strict=True)
    values.update((number, leaf) for number, leaf in made if number is not None)
    for before, after in call.renames:
        values[after] = values[before]


def fill(nest: Any, model: nn.Module, values: Mapping[int, torch.Tensor]) -> Any:
    """Return `nest` with tensors for `Value` and `Held`."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return values[leaf.number]
        if isinstance(leaf, Held):
            owner, _, name = leaf.name.rpartition(".")
            return getattr(model.get_submodule(owner), name)
        return leaf

    return pytree.tree_map(one, nest, is_leaf=is_marker)


def is_marker(leaf: Any) -> bool:
    """Return whether `leaf` stands for a tensor."""
    return isinstance(leaf, (Value, Held))


def _leaves(nest: Any) -> list[Any]:
    return pytree.tree_leaves(nest, is_leaf=is_marker)

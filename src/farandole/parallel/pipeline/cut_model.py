"""How a model is cut into stages: at the first step, and for batches of other shapes.

[Note: the first step] Which code runs and how long layers take is known when there is a batch. So at the first
step every rank, which still has the whole model, records the program on one micro-batch, checks that it computes
what the model computes, measures the layers, and agrees with the others on the cuts. Then it frees what is not its
own. A batch of other shapes is recorded again, module by module, by the ranks that have them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ...comm.device.accelerator import memory_of, random_states, set_random_states
from ...comm.engine.grad_ownership import drop_grads, replace_grad, zero_missing_grads
from ...comm.world.comm_errors import translated
from ...comm.world.store_sync import all_gather_json, require_same
from ...core.schedule import LayerCost
from ...core.schedule_simulation import Schedule, in_flight
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import write_notice
from ..split import mark_copy
from .layout import (
    balance,
    find_cuts,
    measure_layers,
    module_calls,
    require_count,
    require_names,
    starts_of_layers,
)
from .messages import PipelinePeers
from .micro_batches import LossFunction, as_call, describe, fingerprint, tensors_of
from .program import CutProgram, Program, Segment, cut_program, first_names, is_marker, run_segment
from .stage import leaves_of, require_loss
from .trace import trace, traced_through

_MOST_KEYS = 64
_MANY_CHANGES = 8
_MOST_VALUES = 256
"""A larger collection (a vocabulary) is taken for what it was when code was recorded, as these are read often."""
_TORCHS = frozenset(vars(nn.Module()))
REMEDIES = {
    "the attributes of the model": "let what a forward pass decides by be the same on the ranks of one pipeline",
    "the shapes of the batch": "give the ranks of one pipeline the same batch",
    "the samples of the batch": "give the ranks of one pipeline the same samples in the same order",
    "whether gradients are computed": "call fd.step alike on all ranks of a pipeline",
}
"""By what `CutModel.numbers_of` returns."""


class CutModel:
    """The stages of one model."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        plan: Plan,
        peers: PipelinePeers,
        schedule: Schedule,
    ) -> None:
        """Raises `PlanError` when the plan's cuts name nothing, or are not as many as the stages need."""
        self._model, self._optimizers, self._plan = model, list(optimizers), plan
        self._peers, self._schedule = peers, schedule
        self._names = require_names(model, plan.pipeline_cuts)
        if self._names:
            require_count(self._names, schedule.stages)
        self._through = traced_through(model, self._names)
        self.costs: list[LayerCost] = []
        """Costs of the layers, if they were measured."""
        self.own: Ownership | None = None
        """None before the first step."""
        self._targets: list[str] = []
        """Modules in the order of their calls."""
        self._begins: list[int] = []
        """Which of these calls begin a stage."""
        self._cuts: dict[str, list[CutProgram]] = {}
        self._seen: dict[str, int] = {}
        """Attributes of the model, and which change it was that made them so."""
        self._changes = 0
        """By shapes and modes; several where the code decides by values of the inputs."""

    @property
    def stage_names(self) -> list[str]:
        """The first module of each stage but the first."""
        return [self._targets[call] for call in self._begins]

    def autocast(self) -> Any:
        """Return what the passes run in."""
        if self._plan.precision != "bf16":
            return nullcontext()
        return torch.autocast(self._peers.here.device.type, torch.bfloat16)

    # -- the first step ----------------------------------------------------------------------------

    def prepare(self, loss_function: LossFunction, inputs: Any, targets: Any) -> None:
        """See [Note: the first step]."""
        here, stages = self._peers.here, self._schedule.stages
        with _undisturbed(self._model):
            program = self._record_whole(loss_function, inputs, targets)
            starts = starts_of_layers(program, self._model)
            called = [program.calls[position].target for position in module_calls(program)]
            remedy = "give ranks of one pipeline the same batch, and all a first one whose values choose the same"
            require_same(here, "cutting the model", [("calls of modules", called)], remedy=remedy)
            if self._names:
                cuts = find_cuts(program, self._names, stages)
            else:
                cuts = self._balanced(program, starts, loss_function, inputs, targets)
        self._targets = called
        self._begins = [module_calls(program).index(cut) for cut in cuts]
        require_same(here, "cutting the model", [("cuts", self._begins)])
        segments = cut_program(program, cuts)
        users = users_of(self._model, program, segments, self._schedule.stage_ranks)
        buffers = buffer_users(self._model, program, segments, self._schedule.stage_ranks)
        own = Ownership(self._model, self._peers, users, buffers)
        if own.tied and self._plan.zero:
            raise PlanError(
                f"plan: zero = {self._plan.zero} with {own.tied[0][1]!r}, which two ranks of the pipeline use, is "
                "not there yet",
                remedy='set zero = 0, or schedule = "zb-v", where one rank has the first and the last stage',
            )
        self.own = own
        self.own.free_others(self._optimizers)
        self._cuts[self._key(inputs)] = [CutProgram(program, segments)]

    def _record_whole(self, loss_function: LossFunction, inputs: Any, targets: Any) -> Program:
        arguments, named = as_call(inputs)
        state = torch.get_rng_state()
        program, output = trace(self._model, arguments, named, self._through)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        values = dict(enumerate(tensors_of((arguments, named))))
        with torch.no_grad(), self.autocast():
            again = run_segment(cut_program(program, [])[0], self._model, values)
        leaves = [pytree.tree_leaves(each) for each in (output, again)]
        if not torch.equal(after, torch.get_rng_state()) or not all(map(_is_same, *leaves)):
            raise PlanError(
                f"pipeline: forward of {type(self._model).__name__} gave something else at a second call with the "
                "same inputs, so it keeps a state outside of its modules and cannot be cut",
                remedy="keep that state in a module that is called whole, or in a buffer",
            )
        self._check_loss(loss_function, again, targets)
        return program

    def _check_loss(self, loss_function: LossFunction, output: Any, targets: Any) -> None:
        """Raise unless the loss is a number, and made of `output` and `targets` alone."""

        def as_received(leaf: Any) -> Any:
            floats = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            return leaf.detach().requires_grad_().clone() if floats else leaf

        with torch.enable_grad():
            loss = require_loss(loss_function(pytree.tree_map(as_received, output), targets), trains=False)
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        found = next((names[id(each)] for each in leaves_of(loss) if id(each) in names), None)
        if found is not None:
            raise PlanError(
                f"pipeline: the loss function computes with the model's parameter {found!r}, and the rank that "
                "has the output does not have all parameters",
                remedy="compute it in the model's forward and return it with the output; what regularises weights "
                "belongs to the optimizer (weight_decay)",
            )

    def _balanced(
        self, program: Program, starts: list[int], loss_function: LossFunction, inputs: Any, targets: Any
    ) -> list[int]:
        tensors = tensors_of(as_call(inputs))
        with self.autocast():
            mine = measure_layers(
                self._model, program, starts, tensors, lambda output: loss_function(output, targets)
            )
        everyones = all_gather_json(self._peers.here, "cost of layers", [cost.seconds for cost in mine])
        means = [sum(each) / len(each) for each in zip(*everyones, strict=True)]
        self.costs = [
            LayerCost(cost.name, seconds, cost.state_bytes, cost.activation_bytes, cost.border_bytes)
            for cost, seconds in zip(mine, means, strict=True)
        ]
        kept = in_flight(self._schedule)
        by_stage = [kept[rank] for rank in self._schedule.stage_ranks]
        return balance(
            self.costs, starts, self._schedule.stages, in_flight=by_stage, limit_bytes=self._limit_bytes()
        )

    def _limit_bytes(self) -> int | None:
        device = self._peers.here.device
        memory = memory_of(device)
        if memory is None:
            return None
        smallest: int = min(all_gather_json(self._peers.here, "memory of a device", memory.total))
        return smallest // (self._schedule.stages // self._peers.size)

    # -- programs ----------------------------------------------------------------------------------

    def _key(self, inputs: Any) -> str:
        trains = "".join("01"[parameter.requires_grad] for parameter in self._model.parameters())
        modes = "".join("01"[module.training] for module in self._model.modules())
        return f"{describe(as_call(inputs))} {trains} {modes} {self._number_of_attributes()}"

    def _number_of_attributes(self) -> int:
        """Return which of those seen the attributes of the model are now.

        Ranks may have different ones, such as their rank. What changes on one rank alone is a number that others
        have not.
        """
        text = self._attributes()
        if text not in self._seen:
            self._seen[text] = self._changes = self._changes + 1
            if len(self._seen) > _MOST_KEYS:
                del self._seen[next(iter(self._seen))]
            if self._changes == _MANY_CHANGES and self._peers.here.rank == 0:
                write_notice(
                    f"note: attributes of the {type(self._model).__name__} have had {_MANY_CHANGES} values, and a "
                    "pipeline records its code anew for each, which is slower than a step: make counters buffers"
                )
        return self._seen[text]

    def _attributes(self) -> str:
        """Return the plain attributes of modules whose code is recorded: it decides and computes by them."""
        found = []
        for module in self._model.modules():
            if module in self._through:
                texts = {name: plain_text(each) for name, each in vars(module).items() if name not in _TORCHS}
                found.append(sorted((name, text) for name, text in texts.items() if text is not None))
        return str(found)

    def programs_for(self, parts: list[tuple[Any, Any]]) -> list[CutProgram]:
        """Return the program of each micro-batch, recorded when there is none for its shapes.

        Raises `Mismatch`, on every rank, when the ranks of the pipeline were given different batches.
        """
        self._peers.agree(self.numbers_of(parts), REMEDIES)
        return self.agreed_programs(parts, lambda: None)

    def numbers_of(self, parts: list[tuple[Any, Any]]) -> dict[str, int]:
        """Return what is the same on all ranks of the pipeline if they were given the same batch, by its name."""
        return {
            "the attributes of the model": self._number_of_attributes(),
            "the shapes of the batch": zlib.crc32(self._key(parts[0][0]).encode()),
            "the samples of the batch": fingerprint([inputs for inputs, _ in parts]),
            "whether gradients are computed": int(torch.is_grad_enabled()),
        }

    def agreed_programs(
        self, parts: list[tuple[Any, Any]], before_recording: Callable[[], None]
    ) -> list[CutProgram]:
        """Return the programs of a batch that is the same on all ranks, or is once `before_recording` returns."""
        known = self._cuts.setdefault(self._key(parts[0][0]), [])
        if len(self._cuts) > _MOST_KEYS:  # an attribute that changes in each step
            del self._cuts[next(key for key, programs in self._cuts.items() if programs is not known)]
        found = []
        for inputs, _ in parts:
            tensors = tensors_of(as_call(inputs))
            match = next((each for each in known if _guards_hold(each.program, self._model, tensors)), None)
            if match is None:
                before_recording()
                with _undisturbed(self._model):
                    match = self._record_again(inputs)
                known.append(match)
            found.append(match)
        return found

    def _record_again(self, inputs: Any) -> CutProgram:
        """Record a program for other shapes: each module is called where it is. See [Note: the first step]."""
        assert self.own is not None, "recorded again before the first step"
        arguments, named = as_call(inputs)
        own, calls = self.own, [0]
        reference = next(each for programs in self._cuts.values() for each in programs).program
        plain = [reference.calls[position] for position in module_calls(reference)]

        def answer(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            position = calls[0]
            calls[0] += 1
            before = self._targets[position] if position < len(self._targets) else "nothing"
            if before != name:
                raise PlanError(
                    f"pipeline: forward calls {name!r} where it called {before!r} at the first step",
                    remedy="let the order of the layers be the same for all batches, or move it into one module",
                )
            source = self._schedule.stage_ranks[sum(cut <= position for cut in self._begins)]
            result = module(*args, **kwargs) if source == self._peers.index else None
            specs = [
                [list(leaf.shape), str(leaf.dtype).removeprefix("torch.")]
                if isinstance(leaf, torch.Tensor)
                else None
                for leaf in pytree.tree_leaves(result)
            ]
            told = self._peers.broadcast_json(specs, source)
            if source == self._peers.index:
                return result
            leaves = iter(told)
            return pytree.tree_map(
                lambda leaf: _zeros_or(leaf, next(leaves), self._peers.here.device),
                plain[position].form,
                is_leaf=is_marker,
            )

        with self.autocast(), _gathered(self._model):
            program, _ = trace(self._model, arguments, named, self._through, answer=answer, stand_in=own.stand_in)
        positions = module_calls(program)
        if len(positions) != len(self._targets):
            raise PlanError(
                f"pipeline: forward calls {len(positions)} modules, and {len(self._targets)} at the first step",
                remedy="let the layers be the same for all batches, or move them into one module",
            )
        return CutProgram(program, cut_program(program, [positions[call] for call in self._begins]))


def plain_text(value: object) -> str | None:
    """Return a number, a text or a few of them as a text that all ranks with equal ones have; else None."""
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    if isinstance(value, dict):
        value = list(value.items())
    if not isinstance(value, list | tuple | set | frozenset) or len(value) > _MOST_VALUES:
        return None
    texts = [plain_text(each) for each in value]
    known = [each for each in texts if each is not None]
    ordered = sorted(known) if isinstance(value, set | frozenset) else known
    return f"[{', '.join(ordered)}]" if len(known) == len(texts) else None


def _guards_hold(program: Program, model: nn.Module, tensors: list[torch.Tensor]) -> bool:
    if not program.guards:
        return True
    wanted = tuple(sorted({number for number, _, _ in program.guards}))
    values = dict(enumerate(tensors))
    run_segment(program.shared_segment(wanted), model, values)
    return all(getattr(values[number], method)() == result for number, method, result in program.guards)


@contextmanager
def _gathered(model: nn.Module) -> Iterator[None]:
    """Have the parameters of a sharded model that belong to no block; blocks gather their own."""
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def _zeros_or(leaf: Any, spec: list[Any], device: torch.device) -> Any:
    """Return zeros of the shape `spec` instead of a tensor, and `leaf` as it is if it stands for none."""
    if not is_marker(leaf):
        return leaf
    return torch.zeros(spec[0], dtype=getattr(torch, spec[1]), device=device)


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.equal(one.isnan(), other.isnan())
        and (torch.allclose(one.nan_to_num(), other.nan_to_num(), rtol=1e-5, atol=1e-6))
    )


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Leave buffers and generators as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random = torch.get_rng_state()
    on_devices = random_states()
    try:
        yield
    finally:
        torch.set_rng_state(random)
        set_random_states(on_devices)
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):  # backward of another batch may have saved it as it is
                    buffer.copy_(before)


# Which rank of a pipeline keeps which parameters, and parameters that two ranks use (tied weights).


def users_of(
    model: nn.Module, program: Program, segments: Sequence[Segment], stage_ranks: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Return of each parameter the ranks of the pipeline that use it; an unused one is rank 0's.

    Raises `PlanError` when stages of two ranks share a module whose buffers change.
    """
    users: dict[str, set[int]] = {name: set() for name, _ in model.named_parameters()}
    owners: dict[str, int] = {}
    for segment in segments:
        rank = stage_ranks[segment.stage]
        for call in segment.calls:
            for name in program.parameters_of(call, model):
                users[name].add(rank)
            if (
                call.function is None
                and owners.setdefault(call.target, rank) != rank
                and _counts(model, call.target)
            ):
                raise PlanError(
                    f"pipeline: {call.target!r} is called by stages of two ranks, and its statistics change",
                    remedy="cut the model by pipeline_cuts so that one stage makes all of its calls",
                )
    return {name: tuple(sorted(ranks)) or (0,) for name, ranks in users.items()}


def buffer_users(
    model: nn.Module, program: Program, segments: Sequence[Segment], stage_ranks: Sequence[int]
) -> dict[str, int]:
    """Return of each name of the model's state but parameters the rank of the pipeline whose value counts.

    It is the first that calls the module, or uses the buffer; of an unused one rank 0.
    """
    first: dict[int, str] = {}
    shared = {
        name: first.setdefault(id(buffer), name) for name, buffer in model.named_buffers(remove_duplicate=False)
    }
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    users: dict[str, int] = {}
    names = [name for name in model.state_dict() if name not in parameters]
    for segment in segments:
        rank = stage_ranks[segment.stage]
        for call in segment.calls:
            held = set(call.holds())
            prefix = f"{call.target}." if call.target else ""
            for name in names:
                if name in held or (call.function is None and name.startswith(prefix)):
                    one = shared.get(name, name)
                    users[one] = min(rank, users.get(one, rank))
    return {name: users.get(shared.get(name, name), 0) for name in names}


def _counts(model: nn.Module, name: str) -> bool:
    norms = (nn.modules.batchnorm._NormBase,)
    return any(isinstance(each, norms) and each.training for each in model.get_submodule(name).modules())


class Ownership:
    """The parameters of this rank of a pipeline."""

    def __init__(
        self, model: nn.Module, peers: PipelinePeers, users: dict[str, tuple[int, ...]], buffers: dict[str, int]
    ) -> None:
        self._model, self._peers = model, peers
        self.users, self._buffers = users, buffers
        """Ranks of the pipeline by the parameter's name, and the one whose value counts by that of a buffer."""
        self.shapes: dict[int, tuple[int, ...]] = {}
        """Whole shapes of the parameters that are not here, by id."""
        self._absent: list[nn.Parameter] = []
        self._first = first_names(model)
        self._aside: list[tuple[nn.Parameter, torch.Tensor | None]] | None = None

    def is_here(self, name: str) -> bool:
        """Return whether this rank keeps the parameter `name`."""
        return self._peers.index in self.users[self._first[name]]

    def elsewhere(self) -> dict[str, tuple[int, ...] | None]:
        """Return names of the model's state that other ranks save, and the shapes of those that are not here."""
        found: dict[str, tuple[int, ...] | None] = {
            name: self.shapes[id(parameter)]
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            if id(parameter) in self.shapes
        }
        return found | {name: None for name, rank in self._buffers.items() if rank != self._peers.index}

    @property
    def tied(self) -> list[tuple[tuple[int, ...], str]]:
        """Parameters of several ranks: (these, name)."""
        return [(ranks, name) for name, ranks in sorted(self.users.items()) if len(ranks) > 1]

    def free_others(self, optimizers: Sequence[Optimizer]) -> None:
        """Free the parameters that this rank does not use, and take them out of the optimizers, in place."""
        drop = {}
        for name, parameter in self._model.named_parameters():
            if not self.is_here(name):
                drop[id(parameter)] = parameter
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [each for each in group["params"] if id(each) not in drop]
            for parameter in drop.values():
                optimizer.state.pop(parameter, None)
        drop_grads(drop.values())
        for parameter in drop.values():
            self.shapes[id(parameter)] = tuple(parameter.shape)
            parameter.data = parameter.data.new_empty((0, *parameter.shape[1:]))
            self._absent.append(parameter)
        for ranks, name in self.tied:
            if self._peers.index in ranks[1:]:
                mark_copy(self._model.get_parameter(name))

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor of the shape of a parameter that is not here; None for any other tensor."""
        shape = self.shapes.get(id(tensor))
        return None if shape is None else tensor.detach().new_zeros(()).expand(shape)

    def set_tied_aside(self) -> None:
        """Before the first pass: gradients that were there are added up already."""
        names = [name for ranks, name in self.tied if self._peers.index in ranks]
        if self._aside is None and names:
            self._aside = [(p, p.grad) for p in map(self._model.get_parameter, names)]
            drop_grads(parameter for parameter, _ in self._aside)

    def add_tied(self) -> None:
        """Add up the gradients of tied parameters over the ranks that use them: all of them get the same bits."""
        for ranks, name in self.tied:
            parameter = self._model.get_parameter(name)
            if self._peers.index not in ranks or not parameter.requires_grad:
                continue
            zero_missing_grads([parameter])
            assert parameter.grad is not None, "given zeros above"
            with translated(self._peers.here, f"gradient of the tied parameter {name!r}"):
                self._add_up(ranks, parameter.grad)
        for parameter, before in self._aside or ():
            if before is not None and parameter.grad is not None:
                replace_grad(parameter, before.add_(parameter.grad))
        self._aside = None

    def _add_up(self, ranks: tuple[int, ...], gradient: torch.Tensor) -> None:
        """Each of `ranks` sends its own to the others, and adds all in the order of ranks."""
        group, mine = self._peers.group, gradient.detach().contiguous().clone()
        others = [rank for rank in ranks if rank != self._peers.index]
        parts = {rank: torch.empty_like(mine) for rank in others} | {self._peers.index: mine}
        calls = [dist.P2POp(dist.irecv, parts[rank], group=group, group_peer=rank) for rank in others]
        calls += [dist.P2POp(dist.isend, mine, group=group, group_peer=rank) for rank in others]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        total = parts[ranks[0]].clone()
        for rank in ranks[1:]:
            total += parts[rank]
        gradient.copy_(total)

"""The optimizer's step at ZeRO stages 1 and 2: each rank updates its rows, then all get the rows of all.

While ``optimizer.step()`` runs, the parameter groups hold this rank's rows (views of the parameters), and the
state is that of the rows. Before and after it, the groups hold the parameters as the user gave them.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
section 5.1.

torch's own optimizers keep everything by parameter, and their `step` does nothing else: called for each part of
the parameters it does what one call does. A subclass may count its calls, or look at
all gradients.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from ...comm.engine.grad_ownership import replace_grad
from ...comm.engine.parameters import rows_of
from ...comm.engine.reducer import GradientReducer
from ...comm.engine.row_gather import RowGather, may_be_late
from ...comm.transport.comm_thread import BucketWork
from ...comm.world.comm_errors import translated
from ...core.vocabulary.errors import ConfigError
from ..instrument.phase_hooks import inner_exchange
from ..model import DistributedModel
from ..optim.step_hooks import is_nested_step, undo_after_errors

# The state of an optimizer of which each rank keeps its rows: in `state_dict`, and back from one.
#
# ``optimizer.state`` holds this rank's rows. In ``optimizer.state_dict()`` they are DTensors of the parameters'
# shapes, so `fd.save` writes every row once, and any number of ranks can load them.


class StateShard(DTensor):
    """This rank's rows of a state, as a DTensor that is not pickled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StateShard:
        """Return a copy with its own rows."""
        rows = self.to_local().clone()
        return shard_of(rows, self.device_mesh, tuple(self.shape), self.stride())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise `ConfigError`: a file of `torch.save` would hold the rows of one rank alone."""
        raise ConfigError(
            "the optimizer's state is sharded (plan key zero), and pickle would keep this rank's rows alone",
            remedy="use fd.save, or call value.full_tensor() on all ranks for each value",
        )


def shard_of(rows: torch.Tensor, mesh: DeviceMesh, shape: tuple[int, ...], stride: tuple[int, ...]) -> StateShard:
    """Return this rank's `rows` of a tensor of `shape`, divided over `mesh` along the first dimension."""
    made = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)
    made.__class__ = StateShard
    assert isinstance(made, StateShard), "its class was changed"
    return made


Places = Callable[[torch.Tensor], tuple[int, int] | None]
"""Gives the first of this rank's rows of a parameter, and the one behind its last; None for one that is whole."""


class StateShards:
    """The three hooks of one optimizer."""

    def __init__(self, optimizer: Optimizer, mesh: DeviceMesh, places: Places) -> None:
        self._mesh, self._places = mesh, places
        optimizer.register_state_dict_post_hook(self.wrap)
        optimizer.register_load_state_dict_pre_hook(self.unwrap)
        optimizer.register_load_state_dict_post_hook(self.keep_types)
        self._loaded: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}
        """This rank's rows of the states that `load_state_dict` loads, with their parameters, by index."""

    def wrap(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict whose rows are DTensors; called by `state_dict`."""
        state = {}
        for index, (parameter, values) in self._by_index(optimizer, saved["state"]).items():
            place = self._places(parameter)
            lengths = None if place is None else (place[1] - place[0], *parameter.shape[1:])
            state[index] = {
                key: shard_of(value, self._mesh, tuple(parameter.shape), parameter.stride())
                if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) == lengths
                else value
                for key, value in values.items()
            }
        return {**saved, "state": {**saved["state"], **state}}

    def unwrap(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with this rank's rows of every state; called by `load_state_dict` on all ranks."""
        self._loaded = {
            index: (parameter, {key: self._rows(value, parameter) for key, value in values.items()})
            for index, (parameter, values) in self._by_index(optimizer, saved["state"]).items()
        }
        state = {index: values for index, (_, values) in self._loaded.items()}
        return {**saved, "state": {**saved["state"], **state}}

    def keep_types(self, optimizer: Optimizer) -> None:
        """Undo what torch does after `unwrap`: it casts states to the parameter's type, of fewer bits perhaps."""
        for parameter, values in self._loaded.values():
            own = optimizer.state.get(parameter, {})
            for key, value in values.items():
                now = own.get(key)
                if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                    own[key] = value.to(now.device)
        self._loaded = {}

    def _by_index(
        self, optimizer: Optimizer, state: Mapping[Any, Any]
    ) -> dict[int, tuple[torch.Tensor, Mapping[str, Any]]]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {
            index: (parameters[index], values)
            for index, values in state.items()
            if isinstance(index, int) and index < len(parameters) and isinstance(values, Mapping)
        }

    def _rows(self, value: Any, parameter: torch.Tensor) -> Any:
        place = self._places(parameter)
        if place is None or not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(parameter.shape):
            return value
        if isinstance(value, DTensor):
            if value.device_mesh == self._mesh and tuple(value.placements) == (Shard(0),):
                return value.to_local()
            value = value.full_tensor()
        return value[place[0] : place[1]].clone()


def own_rows(parameter: torch.Tensor, mesh: DeviceMesh) -> tuple[int, int] | None:
    """Return the rows of `parameter` that are this rank's; None for a parameter without dimensions."""
    return rows_of(parameter.shape[0], mesh.size(), mesh.get_local_rank()) if parameter.dim() else None


# What packing parameters has lost of the rows that each rank owns, as part of a checkpoint.
#
# At ZeRO stages 1 and 2 with plan key ``weight_codec`` all ranks hold the parameters as they were packed, and
# the owner of rows remembers what that lost. It belongs to the parameters and not to ranks: saved once, and
# divided anew over any number of ranks.


def packs_weights(model: nn.Module) -> bool:
    """Return whether the parameters of a model travel packed, so that something can be lost."""
    return any(step.packs for step in DistributedModel.of(model).sharded_steps)


def weight_residuals(model: nn.Module) -> dict[str, StateShard]:
    """Return what was lost so far, by name of the parameter and in its shape; this rank has its rows."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [pair for step in DistributedModel.of(model).sharded_steps for pair in step.lost()]
    return {names[id(parameter)]: lost for parameter, lost in found if id(parameter) in names}


def load_weight_residuals(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Replace what was lost by what `weight_residuals` returned, whole; to be called by all ranks."""
    parameters = dict(model.named_parameters())
    for step in DistributedModel.of(model).sharded_steps:
        step.load_lost({parameters[name]: whole for name, whole in saved.items() if name in parameters})


def warn_of_lost_weights() -> None:
    """Say that the parameters of a checkpoint go on as all ranks had them, without what packing lost."""
    warnings.warn(
        'farandole: the checkpoint holds what weight_codec = "int8" has lost of the parameters; nothing is packed '
        "here, so it is dropped, and the parameters go on as all ranks had them",
        RuntimeWarning,
        stacklevel=2,
    )


# Whether an optimizer's step may be taken in parts, some parameters after the others.
KNOWN = (
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip
_OURS = __name__.partition(".")[0]


def step_without_hooks(optimizer: Optimizer, begin: int) -> Callable[[Optimizer], Any] | None:
    """Return the step of `optimizer` that may be called for parts; None if it is to be called once.

    `begin`: number of the pre-hook that leaves a part of the parameters in the groups. Hooks of the script that
    come after it, and read the groups, would miss the others: then there is one call.
    """
    if type(optimizer) not in KNOWN:
        return None
    inner = getattr(type(optimizer).step, "__wrapped__", None)
    if inner is None or inner.__module__ != type(optimizer).__module__:
        return None  # another library has put its own in its place
    numbers = list(optimizer._optimizer_step_pre_hooks)
    later = [optimizer._optimizer_step_pre_hooks[i] for i in numbers[numbers.index(begin) + 1 :]]
    if any(type(hook).__module__.partition(".")[0] != _OURS for hook in later):
        return None
    found: Callable[[Optimizer], Any] = inner
    return found


_GATHERING = "gathering updated parameters"


class ShardedStep:
    """The step of one optimizer of a distributed model. Its hooks run after those that make gradients ready."""

    def __init__(self, optimizer: Optimizer, reducer: GradientReducer, mesh: DeviceMesh) -> None:
        """`optimizer`: one that `refuse_rows` lets pass."""
        self._reducer = weakref.ref(reducer)
        self._mesh, self._size, self._rank = mesh, mesh.size(), mesh.get_local_rank()
        self._packs = False
        """Whether parameters travel packed; then the rows are this rank's own, and not views."""
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """The parameter and this rank's rows of it, by identity of the parameter."""
        self._first: dict[int, int] = {}
        """How many elements of a parameter come before its rows, by identity of the rows."""
        self._whole: list[list[torch.Tensor]] | None = None
        """The parameters of each group while the groups hold rows."""
        self._lost: dict[int, torch.Tensor] = {}
        """What packing has lost of this rank's rows so far, by identity of the parameter."""
        self._gather: RowGather | None = None
        self._gathered: list[tuple[int, bool]] = []
        """The parameters of `_gather`, and whether each travels packed."""
        self._optimizer = weakref.ref(optimizer)
        self._step: Callable[[Optimizer], Any] | None = None
        """What steps for a part of the parameters; None while the step that runs is one for all."""
        self._parts: list[list[list[torch.Tensor]]] = []
        """The rows that are updated before a chunk is gathered, by chunk, then by group."""
        StateShards(optimizer, mesh, functools.partial(own_rows, mesh=mesh))
        self._cut_state(optimizer)
        self._number = optimizer.register_step_pre_hook(self._begin).id
        handle = optimizer.register_step_post_hook(self._end)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(handle.id, last=False)  # those of others see whole parameters
        undo_after_errors(optimizer, self.restore)

    # -- hooks ---------------------------------------------------------------------------------

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_nested_step(optimizer):
            return
        reducer = self._reducer()
        if reducer is None or not reducer.is_open:
            raise ConfigError(
                "an optimizer whose state is sharded steps, but its ranks exchange gradients no more",
                remedy="step before farandole.shutdown() and undistribute(), or make a new optimizer",
            )
        if callable(kwargs.get("closure")) or (len(args) > 1 and callable(args[1])):
            raise ConfigError(
                "plan: with zero = 1 and 2 a step takes no closure: the model would run on other ranks' old rows",
                remedy="call backward() before step(), or set zero = 0",
            )
        self.restore(optimizer)
        if reducer.plan.overlap_gather:
            reducer.late_rows().arrive_all()
        self._packs = reducer.packs_rows
        self._whole = [list(group["params"]) for group in optimizer.param_groups]
        with torch.no_grad():  # with gradients `to_local` takes much longer
            entered = [[self._enter(optimizer, parameter) for parameter in group] for group in self._whole]
        self._prepare(reducer)
        self._step = step_without_hooks(optimizer, self._number)
        self._parts = self._cut_groups(entered) if self._step is not None else [entered]
        self._hold(optimizer, 0)

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        if is_nested_step(optimizer):
            return
        reducer, gather = self._reducer(), self._gather
        assert reducer is not None, "it was there when the step began"
        assert gather is not None, "it was made when the step began"
        works: list[tuple[Sequence[torch.Tensor], BucketWork, bool]] = []
        for number, chunk in enumerate(gather.chunks):
            if number and self._step is not None:
                self._hold(optimizer, number)
                self._step(optimizer)
            if any(parameter.grad is not None for parameter in chunk):
                gather.look_up(number)
                is_late = reducer.plan.overlap_gather and may_be_late(chunk, list(map(self._views_of, chunk)))
                with translated(reducer.world, _GATHERING):
                    works.append((chunk, gather.start(number), is_late))
        self.restore(optimizer)
        for chunk, work, is_late in works:
            counted = functools.partial(inner_exchange, reducer.world, "shard", functools.partial(_sent, work))
            if is_late:
                reducer.late_rows().defer(chunk, work, functools.partial(self._has_arrived, chunk, counted))
                continue
            with translated(reducer.world, _GATHERING), counted():
                work.wait()
            self._note_lost(chunk)

    def _views_of(self, parameter: torch.Tensor) -> int:
        """Return how many tensors on its memory there are of ours: rows, and what these are views of."""
        held = self._rows.get(id(parameter))
        has_rows = held is not None and held[1].untyped_storage()._cdata == parameter.untyped_storage()._cdata
        return self._size + 1 + 2 * has_rows

    def _has_arrived(
        self, chunk: Sequence[torch.Tensor], counted: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Note what a chunk that was late has sent: the wait is the forward pass's."""
        with counted():
            self._note_lost(chunk)

    def _note_lost(self, chunk: Sequence[torch.Tensor]) -> None:
        for key in map(id, chunk):
            if key in self._lost:
                parameter, rows = self._rows[key]
                torch.sub(rows, self._own_part(parameter), out=self._lost[key])

    def _prepare(self, reducer: GradientReducer) -> None:
        """Have what gathers the parameters of the groups; agreed with all ranks when these have changed."""
        assert self._whole is not None, "the groups hold rows"
        parameters = [
            parameter
            for group in self._whole
            for parameter in group
            if parameter.dim() and (parameter.requires_grad or parameter.grad is not None)
        ]
        at = [(id(parameter), id(parameter) in self._lost) for parameter in parameters]
        if self._gather is None or at != self._gathered:
            exact = [self._rows[key][1] if packed else None for key, packed in at]
            with translated(reducer.world, _GATHERING):
                self._gather = reducer.row_gather(parameters, exact if self._lost else None)
            self._gathered = at

    def _cut_groups(self, entered: list[list[torch.Tensor]]) -> list[list[list[torch.Tensor]]]:
        """Return what the groups hold for each chunk; the first also has what is not gathered."""
        assert self._whole is not None, "the groups hold rows"
        assert self._gather is not None, "prepared before"
        chunk_of = {id(each): i for i, chunk in enumerate(self._gather.chunks) for each in chunk}
        parts: list[list[list[torch.Tensor]]] = [[[] for _ in entered] for _ in self._gather.chunks or [()]]
        for i, (group, held) in enumerate(zip(self._whole, entered, strict=True)):
            for parameter, rows in zip(group, held, strict=True):
                parts[chunk_of.get(id(parameter), 0)][i].append(rows)
        return parts

    def _hold(self, optimizer: Optimizer, number: int) -> None:
        for group, rows in zip(optimizer.param_groups, self._parts[number], strict=True):
            group["params"][:] = rows

    def restore(self, optimizer: Optimizer) -> None:
        """Let the groups hold the parameters again, if they hold rows."""
        whole, self._whole = self._whole, None
        if whole is None:
            return
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"][:] = [self._leave(optimizer, parameter) for parameter in parameters]

    def first_element(self, held: torch.Tensor) -> int:
        """Return how many elements of its parameter come before those that a group holds in a step."""
        return self._first.get(id(held), 0)

    # -- what packing loses; see `weight_residuals` -----------------------------------------------

    @property
    def packs(self) -> bool:
        """Whether parameters travel packed."""
        reducer = self._reducer()
        return reducer is not None and reducer.is_open and reducer.packs_rows

    def lost(self) -> list[tuple[torch.Tensor, StateShard]]:
        """Return parameters, and this rank's rows of what packing has lost of each."""
        reducer = self._reducer()
        if reducer is not None and reducer.plan.overlap_gather:
            reducer.late_rows().arrive_all()
        found = [(self._rows[key][0], lost) for key, lost in self._lost.items()]
        return [(each, shard_of(lost, self._mesh, tuple(each.shape), each.stride())) for each, lost in found]

    def load_lost(self, whole: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Replace what is lost of this optimizer's parameters by the rows of `whole`, by parameter."""
        for lost in self._lost.values():
            lost.zero_()
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        for parameter in [each for group in groups for each in group["params"]]:
            place = self._place(parameter)
            if parameter in whole and place is not None:
                self._exact_rows(parameter, self._own_part(parameter))
                self._lost[id(parameter)].copy_(whole[parameter][place[0] : place[1]])

    # -- one parameter -------------------------------------------------------------------------

    def _enter(self, optimizer: Optimizer, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None and parameter not in optimizer.state:
            return parameter  # which an optimizer leaves out
        place = self._place(parameter)
        rows = self._rows_of(parameter, place)
        self._first[id(rows)] = 0 if place is None else place[0] * math.prod(parameter.shape[1:])
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        elif gradient is not None and place is not None:  # the user's own, whole on every rank
            gradient = gradient[place[0] : place[1]]
        replace_grad(rows, gradient)
        if parameter in optimizer.state:
            optimizer.state[rows] = optimizer.state.pop(parameter)
        return rows

    def _leave(self, optimizer: Optimizer, parameter: torch.Tensor) -> torch.Tensor:
        held = self._rows.get(id(parameter))
        if held is not None:
            rows = held[1]
            replace_grad(rows, None)
            if rows in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(rows)
        return parameter

    def _rows_of(self, parameter: torch.Tensor, place: tuple[int, int] | None) -> torch.Tensor:
        """Return this rank's rows, a view that is made anew when the parameter has other memory."""
        rows = self._own_part(parameter)
        if place is not None and rows.dtype == torch.float32 and self._packs:
            return self._exact_rows(parameter, rows)
        held = self._rows.get(id(parameter))
        if held is None:
            held = self._rows[id(parameter)] = parameter, rows
        elif held[1].data_ptr() != rows.data_ptr() or held[1].dtype != rows.dtype:
            held[1].data = rows
        return held[1]

    def _exact_rows(self, parameter: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows with what packing lost, which all ranks' `rounded` ones are without."""
        held = self._rows.get(id(parameter))
        if held is None:
            held = self._rows[id(parameter)] = parameter, rounded.clone()
            self._lost[id(parameter)] = torch.zeros_like(held[1])
        else:
            torch.add(rounded, self._lost[id(parameter)], out=held[1])
        return held[1]

    def _own_part(self, parameter: torch.Tensor) -> torch.Tensor:
        place = self._place(parameter)
        return parameter.detach() if place is None else parameter.detach()[place[0] : place[1]]

    def _place(self, parameter: torch.Tensor) -> tuple[int, int] | None:
        """As `own_rows`, without asking the mesh, which takes long."""
        return rows_of(parameter.shape[0], self._size, self._rank) if parameter.dim() else None

    @torch.no_grad()
    def _cut_state(self, optimizer: Optimizer) -> None:
        """Keep this rank's rows of a state that was there before, which is whole on every rank."""
        for parameter, values in optimizer.state.items():
            place = self._place(parameter) if isinstance(parameter, torch.Tensor) else None
            if place is None:
                continue
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    values[key] = value[place[0] : place[1]].clone()


def _sent(work: BucketWork) -> int:
    return work.sent_bytes

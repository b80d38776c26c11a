"""Which rank of a pipeline keeps which parameters, and parameters that two ranks use (tied weights)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...comm.gradients.grad_ownership import drop_grads, replace_grad, zero_missing_grads
from ...comm.world.comm_errors import translated
from ...core.vocabulary.errors import PlanError
from ..split import mark_copy
from .messages import PipelinePeers
from .program import Program, Segment, first_names


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

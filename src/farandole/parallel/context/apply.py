"""Dividing the sequences of a model over the context ranks of a mesh.

[Note: the function's place] The function is replaced where models look it up, as long as the world has a context:
as torch.nn.functional's, and under the names by which the modules that define the model's classes have imported
it. A call that finds the original all the same is found by the proof at the model's first pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import handle_torch_function, has_torch_function

from ...comm.batch_weight import tensors_in
from ...comm.world.world import world
from ...core.job_plan import resolve_plan
from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.spec import Plan
from ..changed_class import ChangedClass, change_class, make_kin
from ..model import OUTER_PASS, Strategy
from .attention import AttentionCall, DividedAttention
from .context import Context
from .group import Compared, ContextGroup, cut, is_constant, join, positions_of
from .proof import prove
from .transformers_models import Inputs, prepare, require_right_kind

# `fd.context_shard` and its kin: what a loop calls to cut sequences, and to put them together.

_IGNORED = -100
"""A target that counts for nothing: the default of torch's cross-entropy."""


def context_shard(*tensors: torch.Tensor, dim: int | Sequence[int] = 1) -> Any:
    """Return this rank's part of tensors that hold whole sequences: tokens, targets, positions, padding.

    Where the plan has ``context`` above 1, the ranks of a context group hold the same samples, and each trains on
    some of their tokens: two runs of them, one from each half, so that a causal mask is the same work on all
    ranks. Else the tensors are returned as they are, so a loop may always call it. Targets that are the next
    tokens must be shifted before, in the whole sequence. The length must divide by 2 x ``context``.

    Args:
        tensors: whole sequences, the same on all ranks of the group, of any dtype.
        dim: the dimension of the sequence, or one for each tensor.

    Returns:
        A tensor for one tensor, else a tuple; copies without gradient history of their own rank's tokens.

    Raises:
        ConfigError: a length does not divide, lengths differ between tensors, or `dim` is no dimension; raised on
            every rank of the group.
        Mismatch: the ranks of the group were given different tensors; raised on each of them.
    """
    context = _context()
    dims = [dim] * len(tensors) if isinstance(dim, int) else list(dim)
    if context is None:
        _checked(tensors, dims, 1)
        return tensors[0] if len(tensors) == 1 else tensors
    group = context.group
    if all(isinstance(each, torch.Tensor) for each in tensors):
        compared = Compared(group, "fd.context_shard", tensors, extra=str(dims))
        compared.require_same_shapes("what is to be cut")
        compared.require_same_values("what is to be cut")
    dims = _checked(tensors, dims, group.size)
    parts = []
    for tensor, along in zip(tensors, dims, strict=True):
        part = cut(tensor, along, group.rank, group.size)
        context.note_cut(part, along, is_ragged=_is_ragged(tensor, along, group.size))
        parts.append(part)
    return parts[0] if len(parts) == 1 else tuple(parts)


def context_positions(length: int, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the positions of this rank's tokens in their sequence: what ``torch.arange(length)`` is elsewhere.

    A model that makes its own positions, for learned or rotary embeddings, calls this with the number of tokens
    that it was given; so may the loop, with tokens that were cut. Elsewhere, and without a ``context`` degree,
    they are 0 to `length` - 1.

    Args:
        length: the number of tokens of this rank.
        device: of the result; by default the world's.

    Returns:
        int64, of shape (length,).

    Raises:
        ConfigError: `length` is no even number, as each rank has two runs of tokens.
    """
    context = _context()
    where = torch.device(device) if device is not None else world().device
    if context is None or not context.is_part(length):
        return torch.arange(length, dtype=torch.int64, device=where)
    if length % 2:
        raise ConfigError(
            f"context_positions: {length} tokens of this rank, expected an even number: two runs of them",
            remedy="cut sequences with fd.context_shard",
        )
    group = context.group
    return positions_of(length * group.size, group.rank, group.size, where)


def context_gather(tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Return whole sequences from the parts of all ranks, in their order: the inverse of `context_shard`.

    To be called by all ranks of a context group. No gradient flows through it. Without a ``context`` degree the
    tensor is returned as it is.

    Args:
        tensor: this rank's part, of one shape and dtype on all ranks.
        dim: the dimension of the sequence.

    Raises:
        ConfigError: `dim` is no dimension of the tensor.
        Mismatch: shapes differ between ranks; raised on each of them.
    """
    context = _context()
    if context is None:
        return tensor
    along = _checked([tensor], [dim], 1, "context_gather")[0]
    compared = Compared(context.group, "fd.context_gather", [tensor])
    compared.require_same_shapes("what is to be gathered")
    return join(context.group.all_gather(tensor, "fd.context_gather"), along)


def _context() -> Context | None:
    here = world()
    found = here.session.kept(Context)
    if found is None and here.size > 1 and resolve_plan(None).context != 1:
        raise ConfigError(
            "context_shard: the plan divides sequences, but no model is distributed yet",
            remedy="call fd.distribute before",
        )
    return found


def _checked(tensors: Sequence[Any], dims: Sequence[int], size: int, name: str = "context_shard") -> list[int]:
    """Return the dimensions from 0 on; raise `ConfigError` for what cannot be cut into 2 x `size`."""
    if not tensors:
        raise ConfigError(f"{name}: there is nothing to cut", remedy="give it tokens, targets, ...")
    if len(dims) != len(tensors):
        raise ConfigError(f"{name}: {len(dims)} dimensions for {len(tensors)} tensors")
    found, lengths = [], []
    for tensor, dim in zip(tensors, dims, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"{name}: expected tensors, got a {type(tensor).__name__}",
                remedy="give the tensors of a batch one by one",
            )
        if not -tensor.dim() <= dim < tensor.dim():
            raise ConfigError(f"{name}: a tensor of shape {tuple(tensor.shape)} has no dimension {dim}")
        found.append(dim % tensor.dim())
        lengths.append(tensor.shape[dim])
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"{name}: sequences of {', '.join(map(str, lengths))} tokens in one call",
            remedy="give dim=(...), one dimension for each tensor; or call it for each",
        )
    if size > 1 and (lengths[0] % (2 * size) or not lengths[0]):
        above = (lengths[0] // (2 * size) + 1) * 2 * size
        raise ConfigError(
            f"{name}: {lengths[0]} tokens do not divide by 2 x context = {2 * size}, in dimension "
            f"{found[0]} of shape {tuple(tensors[0].shape)}",
            remedy=f"pad to {above} tokens, with targets of {_IGNORED}, or choose another dim",
        )
    return found


def _is_ragged(targets: torch.Tensor, dim: int, size: int) -> bool:
    """Return whether the parts of the ranks have unequal numbers of targets that count."""
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        return False
    counts = (
        (targets != _IGNORED).transpose(0, dim).flatten(1).sum(1) if targets.dim() > 1 else targets != _IGNORED
    )
    return len({int(cut(counts, 0, rank, size).sum()) for rank in range(size)}) > 1


# The forward pass of a model whose sequences are divided: agree, prove once, divide attention.


class DividedSequences(ChangedClass):
    """The first base of a kin whose attention is divided over a context group."""

    _farandole_context: ModelPass

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the user's forward pass on this rank's tokens."""
        return self._farandole_context.run(self, super().forward, Inputs(arguments, named))


class ModelPass:
    """The forward passes of one model."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._is_proven = False
        self._is_in_pieces = False
        """Whether something else runs the model's own code. See `parallel.model.OuterPass`."""

    def run(self, model: nn.Module, plain: Any, inputs: Inputs) -> Any:
        """Run `plain`, the model's own forward pass, with divided attention."""
        context = self._context
        if context.is_closed or self._is_in_pieces:
            return plain(*inputs.arguments, **inputs.named)
        ready = self._ready(model, plain, inputs)
        with context.open_pass(ready.padding):
            output = plain(*ready.arguments, **ready.named)
        return context.weigh_outputs(output)

    def _ready(self, model: nn.Module, plain: Any, inputs: Inputs) -> Inputs:
        self._agree(model, inputs)
        ready = prepare(model, inputs, self._context.group)
        if not self._is_proven:
            prove(self._context, model, plain, inputs)
            self._is_proven = True
        return ready

    # -- a pass in pieces, an `OuterPass` ------------------------------------------------------------

    def begin(self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Check the inputs of a pass; return those of the model's own code, a tuple or a dict."""
        plain: Any = super(DividedSequences, model)
        ready = self._ready(model, plain.forward, Inputs(arguments, named))
        if ready.padding is not None:
            raise ConfigError(
                f"context: a batch of this {type(model).__qualname__} has padding, and with a pipeline passes "
                "overlap that would have different padding, which is not there yet",
                remedy="use samples without padding, or pipeline = 1 in the plan",
            )
        return ready.named if ready.named else ready.arguments

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Divide attention in pieces of the model's own code."""
        before, self._is_in_pieces = self._is_in_pieces, True
        try:
            with self._context.open_pass(None):
                yield
        finally:
            self._is_in_pieces = before

    def end(self, output: Any) -> Any:
        """Return the model's output, through which gradients are weighed."""
        return self._context.weigh_outputs(output)

    def _agree(self, model: nn.Module, inputs: Inputs) -> None:
        tensors = list(tensors_in((inputs.arguments, inputs.named)))
        compared = Compared(self._context.group, "forward pass of divided sequences", tensors)
        compared.require_same_shapes("the input of the model")
        if tensors and compared.are_values_same and not is_constant(tensors):
            raise ConfigError(
                f"context: all ranks of a context group give this {type(model).__qualname__} the same input of "
                f"shape {tuple(tensors[0].shape)}, so sequences were not cut",
                remedy="tokens, targets = fd.context_shard(tokens, targets), before the model is called",
            )


# Calls of `torch.nn.functional.scaled_dot_product_attention`, led to a world's context.
_NAME = "scaled_dot_product_attention"


class AttentionCatcher:
    """What stands in the function's place. The world's session keeps one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._plain = context.attention.plain
        self._places: list[tuple[dict[str, Any], str]] = []
        attend: Any = torch.compiler.disable(self._attend)
        self._standing = attend

    def install(self, model: nn.Module) -> None:
        """Take the function's place where `model` looks it up."""
        defining = [sys.modules.get(type(module).__module__) for module in model.modules()]
        homes = [vars(home) for home in dict.fromkeys(defining) if home is not None]
        for home in [vars(functional), *homes]:
            for name, value in list(home.items()):
                if value is self._plain:
                    home[name] = self._standing
                    self._places.append((home, name))

    def remove(self) -> None:
        """Put torch's own function back."""
        for home, name in self._places:
            if home.get(name) is self._standing:
                home[name] = self._plain
        self._places.clear()

    def _attend(self, *arguments: Any, **named: Any) -> torch.Tensor:
        tensors = [each for each in (*arguments, *named.values()) if isinstance(each, torch.Tensor)]
        if has_torch_function(tensors):  # a function mode: what records the model's code sees one call, this
            found: torch.Tensor = handle_torch_function(self._standing, tensors, *arguments, **named)
            return found
        try:
            call = AttentionCall(*arguments, **named)
        except TypeError:
            return self._plain(*arguments, **named)  # torch's own error
        return self._context.attend(call)


class ContextParallel(Strategy):
    """The sequences of a model, divided over the context ranks of its mesh; the loop's objects stay."""

    keys = ("context",)

    def check(self) -> None:
        """Raise `ConfigError` for layers that cannot be divided along the sequence.

        And `PlanError` if another model of this world has other context ranks.
        """
        _refuse_sequences(self.model, self.plan)
        context, ranks = self.mesh.here.session.kept(Context), self.mesh.ranks("context")
        if context is not None and tuple(context.group.ranks) != ranks:
            raise PlanError(
                f"context: another model of this world divides sequences over ranks {list(context.group.ranks)}, "
                f"and this one would over {list(ranks)}",
                remedy="give all models one plan",
            )

    def apply(self) -> None:
        """Let attention see the tokens of all context ranks."""
        session = self.mesh.here.session
        context = session.keep(Context, self._make_context)
        catcher = session.keep(AttentionCatcher, lambda: AttentionCatcher(context))
        catcher.install(self.model)
        session.call_on_close(catcher.remove)
        session.call_in_forked_child(catcher.remove)
        for entry in _entries(self.model):
            vars(entry)[OUTER_PASS] = ModelPass(context)
            kind: Any = type(entry)
            change_class(entry, make_kin(DividedSequences, kind), "plan: context")

    def _make_context(self) -> Context:
        mesh, group = self.mesh, self.mesh.group("context")
        assert group is not None, "a degree above 1 has a group"
        ranks = ContextGroup(mesh.here, group, mesh.rank("context"), mesh.size("context"), mesh.ranks("context"))
        return Context(DividedAttention(ranks, self.plan.context_kind, functional.scaled_dot_product_attention))


def _entries(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are called: the model, or the modules of a list or dict of them."""
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        return [entry for child in model.children() for entry in _entries(child)]
    return [model]


def _refuse_sequences(model: nn.Module, plan: Plan) -> None:
    """Raise `ConfigError` for layers that cannot be divided along the sequence."""
    require_right_kind(model)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not plan.sync_batch_norm:
            raise ConfigError(
                f"context: {name!r} is a {type(module).__name__}, whose statistics would be of one rank's tokens",
                remedy="set sync_batch_norm = true",
            )
        if isinstance(module, nn.RNNBase):
            raise ConfigError(
                f"context: {name!r} is a {type(module).__name__}, which goes through a sequence token by token",
                remedy="set context = 1 for this model",
            )

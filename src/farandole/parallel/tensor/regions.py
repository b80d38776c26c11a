"""Where a split region begins and ends, as autograd functions: each collective beside its transpose.

[Note: split region] Between a layer split by columns and one split by rows, a rank has some of the features
(heads), and all tokens. At the beginning (Shoeybi et al. 2019, section 3, f) the forward pass copies, and
backward sums the ranks' gradients; at the end (g) the forward pass sums, and backward copies. With
`sequence_parallel` a rank has some of the tokens outside, with all features: f gathers them, and g sums and
scatters (Korthikanti et al. 2022, section 4.2.2). Layers by columns keep the tokens that the rank has, which
backward gathers again for the gradients of their weights: `GatheredTokens`.

``gives`` of a function: what its backward pass hands to each tensor that it took, a gradient that all ranks have
"whole" or this rank's "part"; "same": what it gets. See [Note: partial gradients] in `partial_gradients`.

[Note: seeds of a region] Dropout outside of split regions must drop the same elements on all tensor ranks,
and inside others on each rank, because a rank has other heads and features there. So a region begins with a
number that all ranks draw alike, and seeds the generator with it and the rank; at its end the generator is as
it was after that draw. A block that is computed again in backward draws the same number, because its
generator is restored before. What a module draws in a region for all ranks, such as which samples leave a branch
out, would be another on each: the proof finds it (`undivided_draw`), by draws as large as those of the plain one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ...comm.device.accelerator import generator_of
from ...comm.engine.parameters import refuse_second_order
from ...comm.world.comm_errors import translated
from ...comm.world.world import World
from ...core.link import ring_sent_bytes
from ...core.vocabulary.errors import ConfigError
from ..instrument.phase_hooks import inner_exchange
from ..mesh import Mesh
from ..seeds import kept_generators

# The ranks of one tensor group, and their collectives: errors translated, any layout, calls counted.

DEGREE = "tensor"


@dataclass(frozen=True, eq=False)
class TensorRanks:
    """The ranks that share the layers of one copy of the model, seen from one of them."""

    part: World
    group: dist.ProcessGroup
    rank: int
    size: int
    calls: Counter[str] = field(default_factory=Counter)
    """Collectives so far, by kind."""
    bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of their tensors, as one rank has them whole, by kind."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorRanks:
        return self  # a copy of a layer is split over the same ranks

    def all_reduce(self, tensor: torch.Tensor, what: str, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Return the sum of `tensor` over the ranks, in its memory if it is contiguous."""
        tensor = tensor.contiguous()
        self._count("all_reduce", tensor)
        with translated(self.part, f"all-reduce of {what}"), self._inner(tensor.nbytes, 2):
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, what: str, dim: int, lengths: tuple[int, ...] = ()) -> torch.Tensor:
        """Return the ranks' tensors, joined along `dim`; `lengths` there if they are not equal."""
        tensor = tensor.movedim(dim, 0)
        longest = max(lengths, default=tensor.shape[0])
        if tensor.shape[0] < longest:
            rest = tensor.new_zeros((longest - tensor.shape[0], *tensor.shape[1:]))
            tensor = torch.cat([tensor, rest])
        tensor = tensor.contiguous()
        out = tensor.new_empty((self.size, *tensor.shape))
        self._count("all_gather", out)
        with translated(self.part, f"all-gather of {what}"), self._inner(out.nbytes):
            dist.all_gather(list(out.unbind(0)), tensor, group=self.group)
        if lengths and min(lengths) < longest:
            whole = torch.cat([each[:length] for each, length in zip(out, lengths, strict=True)])
        else:
            whole = out.flatten(0, 1)
        return whole.movedim(0, dim).contiguous()

    def reduce_scatter(self, tensor: torch.Tensor, what: str, dim: int) -> torch.Tensor:
        """Return this rank's piece along `dim`, which the number of ranks divides, of the sum over the ranks."""
        pieces = [each.contiguous() for each in tensor.chunk(self.size, dim)]
        self._count("reduce_scatter", tensor)
        out = torch.empty_like(pieces[self.rank])
        with translated(self.part, f"reduce-scatter of {what}"), self._inner(tensor.nbytes):
            dist.reduce_scatter(out, pieces, group=self.group)
        return out

    def _inner(self, nbytes: int, passes: int = 1) -> AbstractContextManager[None]:
        return inner_exchange(self.part, DEGREE, ring_sent_bytes(nbytes, self.size, passes))

    def _count(self, kind: str, tensor: torch.Tensor) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += tensor.nbytes


def tensor_ranks(mesh: Mesh) -> TensorRanks:
    """Return this rank's tensor group; to be called by all ranks."""
    group = mesh.group(DEGREE)
    assert group is not None, f"{mesh} has one tensor rank"
    return TensorRanks(mesh.part(DEGREE), group, mesh.rank(DEGREE), mesh.size(DEGREE))


# Random numbers inside of split regions: each rank its own, and those after them again the same on all ranks.

_SPAN = 2**31


class RegionSeed:
    """The generator of one device, inside and outside of split regions."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device, self.rank = device, rank
        self._outside: torch.Tensor | None = None

    def begin(self) -> None:
        """Draw numbers of this rank's own from now on."""
        if self._outside is not None:
            return
        drawn = int(torch.randint(_SPAN, (), generator=torch.default_generator, dtype=torch.int64))
        generator = self._generator()
        self._outside = generator.get_state()
        generator.manual_seed((drawn + 1) * _SPAN + self.rank)

    def end(self) -> None:
        """Draw numbers that are the same on all ranks."""
        if self._outside is not None:
            self._generator().set_state(self._outside)
            self._outside = None

    @property
    def is_inside(self) -> bool:
        """Whether a region has begun."""
        return self._outside is not None

    @contextmanager
    def left_as_it_is(self) -> Iterator[None]:
        """Let what draws numbers in between leave the generators as they were."""
        begun = self._outside
        with kept_generators(self._generator()):
            yield
        self._outside = begun

    def _generator(self) -> torch.Generator:
        return generator_of(self.device) or torch.default_generator


class _Draws(TorchDispatchMode):
    """Watch what is drawn by no generator that the caller names: shapes, and whether in a region."""

    def __init__(self, seed: RegionSeed) -> None:
        super().__init__()
        self._seed = seed
        self.found: list[tuple[torch.Size, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        first = made[0] if isinstance(made, (tuple, list)) else made
        is_draw = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        if is_draw and isinstance(first, torch.Tensor):
            self.found.append((first.shape, self._seed.is_inside))
        return made


def undivided_draw(seed: RegionSeed, plain: Callable[[], Any], split: Callable[[], Any]) -> str:
    """Return what is drawn in a region, and is as large as in the plain module; an empty text if nothing.

    Both run a forward pass in training. Where they do not draw as many times nothing is known. See
    [Note: seeds of a region].
    """
    with torch.enable_grad(), seed.left_as_it_is():
        try:
            with _Draws(seed) as expected:
                plain()
            if not expected.found:
                return ""
            with _Draws(seed) as found:
                split()
        except Exception as error:  # the module's own code
            return f"does not run in training: {error}"
    if len(expected.found) == len(found.found):
        for (whole, _), (mine, is_inside) in zip(expected.found, found.found, strict=True):
            if is_inside and mine.numel() == whole.numel():
                return f"draws random numbers of shape {list(mine)}, which all ranks need alike, on each its own"
    return ""


def has_dropout(module: nn.Module) -> bool:
    """Return whether `module` drops elements in training, as far as its attributes say."""
    for each in module.modules():
        if isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0:
            return True
        for key, value in vars(each).items():
            if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float) and value > 0:
                return True
    return False


SEQUENCE = 1
"""The dimension of tokens in activations (batch, tokens, features)."""


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward pass with a collective, which autograd does not see: a pass through it is refused."""

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        refuse_second_order(
            "tensor", "would miss what the other tensor ranks have",
            remedy="leave the terms of the loss out that need them, or train without tensor in the plan",
        )  # fmt: skip
        return backward(ctx, *grads)

    return run


class _Copy(torch.autograd.Function):
    """Forward: the same tensor; backward: the sum of the ranks' gradients."""

    gives = ("whole",)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorRanks, what: str) -> torch.Tensor:
        ctx.ranks, ctx.what = ranks, what
        return x.detach()  # no view: a view holds `x`, which holds it (`_once`), and nothing would ever free them

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Any) -> Any:
        # The engine may hand the same memory to others.
        return ctx.ranks.all_reduce(grads[0].clone(memory_format=torch.contiguous_format), ctx.what), None, None


class _Sum(torch.autograd.Function):
    """Forward: the sum of the ranks' tensors, and a bias once; backward: the same gradient."""

    gives = ("part", "same")

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, ranks: TensorRanks, what: str
    ) -> torch.Tensor:
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.mark_dirty(x)
        summed = ranks.all_reduce(x, what)
        if summed is not x:
            x.copy_(summed)
        if bias is not None:
            x.add_(bias)
        return x

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        wants = ctx.bias_shape is not None and ctx.needs_input_grad[1]
        return grad, grad.sum_to_size(ctx.bias_shape) if wants else None, None, None


class _GatherParts(torch.autograd.Function):
    """Forward: the ranks' features joined; backward: this rank's part of a gradient that all have."""

    gives = ("part",)

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any, x: torch.Tensor, dim: int, lengths: tuple[int, ...], ranks: TensorRanks, what: str
    ) -> torch.Tensor:
        ctx.dim, ctx.lengths, ctx.ranks = dim, lengths, ranks
        return ranks.all_gather(x, what, dim, lengths)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Any) -> Any:
        at = sum(ctx.lengths[: ctx.ranks.rank])
        return grads[0].narrow(ctx.dim, at, ctx.lengths[ctx.ranks.rank]), None, None, None, None


class _Take(torch.autograd.Function):
    """Forward: this rank's piece of a tensor that all have; backward: the ranks' gradients joined."""

    gives = ("whole",)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, ranks: TensorRanks, what: str) -> torch.Tensor:
        ctx.dim, ctx.ranks, ctx.what = dim, ranks, what
        return x.chunk(ranks.size, dim)[ranks.rank].contiguous()

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.ranks.all_gather(grads[0], ctx.what, ctx.dim), None, None, None


class _GatherTokens(torch.autograd.Function):
    """Forward: the ranks' tokens joined; backward: the sum of the ranks' gradients, scattered."""

    gives = ("part",)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorRanks, what: str) -> torch.Tensor:
        ctx.ranks, ctx.what = ranks, what
        return ranks.all_gather(x, what, SEQUENCE)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.ranks.reduce_scatter(grads[0], ctx.what, SEQUENCE), None, None


class _ScatterSum(torch.autograd.Function):
    """Forward: the sum of the ranks' tensors, scattered by tokens; backward: the ranks' gradients joined."""

    gives = ("part",)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: TensorRanks, what: str) -> torch.Tensor:
        ctx.ranks, ctx.what = ranks, what
        return ranks.reduce_scatter(x, what, SEQUENCE)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.ranks.all_gather(grads[0], ctx.what, SEQUENCE), None, None


class _SavedTensor(NamedTuple):
    """What a graph keeps of a tensor: the tensor, or this rank's tokens of it with its type and shape."""

    tensor: torch.Tensor
    version: int
    whole: tuple[torch.dtype, torch.Size] | None


class GatheredTokens:
    """What was gathered from the ranks' tokens, for layers whose graphs keep those of this rank."""

    def __init__(self, mine: torch.Tensor, whole: torch.Tensor, ranks: TensorRanks, what: str) -> None:
        self._mine, self._ranks, self._what = mine.detach(), ranks, what
        self._versions = mine._version, whole._version
        self._again: dict[torch.dtype, torch.Tensor] = {}
        self._users = self._left = 0

    def is_as_gathered(self, whole: torch.Tensor) -> bool:
        """Return whether nothing changed it since."""
        return whole._version == self._versions[1]

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return `torch.nn.functional.linear` of all tokens `x`."""
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:  # as autocast does
            x = x.to(torch.get_autocast_dtype(x.device.type))
        place = x.data_ptr(), x.numel()  # not `x`: hooks live as long as what they keep

        def keep(tensor: torch.Tensor) -> _SavedTensor:
            if (tensor.data_ptr(), tensor.numel()) != place or not tensor.is_contiguous():
                return _SavedTensor(tensor, tensor._version, None)
            self._users += 1
            self._left += 1
            return _SavedTensor(self._mine, self._versions[0], (tensor.dtype, tensor.shape))

        with saved_tensors_hooks(keep, self._give):
            return functional.linear(x, weight, bias)

    def _give(self, kept: _SavedTensor) -> torch.Tensor:
        if kept.version != kept.tensor._version:  # autograd does not look where hooks keep something
            raise RuntimeError(
                f"{self._what!r}: a variable needed for gradient computation has been modified by an inplace "
                f"operation: its version is {kept.tensor._version}, expected {kept.version}"
            )
        if kept.whole is None:
            return kept.tensor
        dtype, shape = kept.whole
        whole = self._again.get(dtype)
        if whole is None:
            whole = self._ranks.all_gather(self._mine.to(dtype), self._what, SEQUENCE)
        self._left -= 1
        self._again = {dtype: whole} if self._left else {}
        self._left = self._left or self._users  # a graph that is kept may run again
        return whole.view(shape)


def linear_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `torch.nn.functional.linear`, which keeps this rank's tokens of `x` if they were gathered."""
    tokens: GatheredTokens | None = getattr(x, "_farandole_tokens", None)
    if tokens is None or torch.compiler.is_compiling() or not tokens.is_as_gathered(x):
        return functional.linear(x, weight, bias)
    hooks = _top_saved_tensors_default_hooks(False)
    # A block that is computed again decides what is kept, on all ranks; hooks of others may be those of one rank.
    is_again = hooks is not None and hooks[0].__module__ == checkpoint.__module__
    return functional.linear(x, weight, bias) if is_again else tokens.linear(x, weight, bias)


def begin_region(x: torch.Tensor, ranks: TensorRanks, what: str) -> torch.Tensor:
    """Return `x`, whose gradient will be the sum over the ranks; once for all layers that get the same `x`."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _once(x, ranks, what, _Copy.apply)


def begin_region_of_tokens(x: torch.Tensor, ranks: TensorRanks, what: str) -> torch.Tensor:
    """Return all tokens of `x`, of which each rank has some; once for all layers that get the same `x`."""
    whole = _once(x, ranks, what, _GatherTokens.apply)
    if torch.is_grad_enabled() and not (x.is_inference() or hasattr(whole, "_farandole_tokens")):
        whole._farandole_tokens = GatheredTokens(x, whole, ranks, what)  # type: ignore[attr-defined]
    return whole


def end_region(x: torch.Tensor, bias: torch.Tensor | None, ranks: TensorRanks, what: str) -> torch.Tensor:
    """Return the sum of the ranks' `x`, which is overwritten, and `bias` added once."""
    summed: torch.Tensor = _Sum.apply(x, bias, ranks, what)
    return summed


def end_region_by_tokens(
    x: torch.Tensor, bias: torch.Tensor | None, ranks: TensorRanks, what: str
) -> torch.Tensor:
    """Return this rank's tokens of the sum of the ranks' `x`, and `bias` added once."""
    check_tokens(x, ranks, what)
    mine: torch.Tensor = _ScatterSum.apply(x, ranks, what)
    return mine if bias is None else mine + bias


def gather_features(
    x: torch.Tensor, dim: int, lengths: tuple[int, ...], ranks: TensorRanks, what: str
) -> torch.Tensor:
    """Return the ranks' `x` joined along `dim`; `lengths` are those of all ranks there."""
    whole: torch.Tensor = _GatherParts.apply(x, dim, lengths, ranks, what)
    return whole


def take_piece(x: torch.Tensor, dim: int, ranks: TensorRanks, what: str) -> torch.Tensor:
    """Return this rank's piece along `dim` of `x`, which all ranks have."""
    piece: torch.Tensor = _Take.apply(x, dim, ranks, what)
    return piece


def check_tokens(x: torch.Tensor, ranks: TensorRanks, what: str) -> None:
    """Raise `ConfigError` if the tokens of `x` cannot be divided over the ranks."""
    if x.dim() <= SEQUENCE + 1 or x.shape[SEQUENCE] % ranks.size:
        raise ConfigError(
            f"sequence_parallel: {what} has an activation of shape {list(x.shape)}, expected (batch, tokens, "
            f"features) with tokens that tensor = {ranks.size} divides",
            remedy="pad the sequences, or leave sequence_parallel out",
        )


def _once(x: torch.Tensor, ranks: TensorRanks, what: str, function: Any) -> torch.Tensor:
    """Return ``function(x, ranks, what)``; the same tensor as for the last call with this `x`."""
    key = (function, 0 if x.is_inference() else x._version, torch.is_grad_enabled())
    kept = getattr(x, "_farandole_region", None)
    if kept is None or kept[0] != key or kept[1] is not ranks:
        kept = (key, ranks, function(x, ranks, what))
        x._farandole_region = kept  # type: ignore[attr-defined]
    found: torch.Tensor = kept[2]
    return found

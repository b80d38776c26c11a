"""Tensors of which each rank has a part, and which are gathered when something needs them whole.

[Note: lazily whole] The logits of a split output layer look whole: `shape` is, and every operation of torch
gathers them first, once. What needs no gathering does none: views that leave the split dimension alone,
casts, and `torch.nn.functional.cross_entropy`, which sums over the ranks what it needs (Shoeybi et al. 2019,
section 3). So a loop that only takes the loss never has whole logits. Gathering is a collective: all ranks of
the tensor group must use the tensor in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from .regions import TensorRanks, first_order, gather_features


class LazyWhole(torch.Tensor):
    """A tensor of the whole shape, of which this rank has ``local``. See [Note: lazily whole]."""

    local: torch.Tensor
    split_dim: int
    lengths: tuple[int, ...]
    """Lengths of the ranks' parts along `split_dim`."""
    ranks: TensorRanks
    layer: str
    """The layer it comes from."""
    gathered: torch.Tensor | None

    @staticmethod
    def of(local: torch.Tensor, dim: int, lengths: tuple[int, ...], ranks: TensorRanks, name: str) -> LazyWhole:
        """Return a tensor without autograd graph of its own: see `expose`."""
        shape = list(local.shape)
        shape[dim] = sum(lengths)
        made: LazyWhole = torch.Tensor._make_wrapper_subclass(
            LazyWhole, shape, dtype=local.dtype, device=local.device
        )
        made.local, made.split_dim, made.lengths, made.ranks, made.layer = local, dim, lengths, ranks, name
        made.gathered = None
        return made

    def whole(self) -> torch.Tensor:
        """Return the whole tensor; a collective the first time."""
        if self.gathered is None:
            with torch.enable_grad():  # it is kept for operations that may need its graph
                self.gathered = gather_features(self.local, self.split_dim, self.lengths, self.ranks, self.layer)
        return self.gathered

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lazy = next((each for each in args if isinstance(each, LazyWhole)), None)
        if function in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        is_local = function is _T.register_hook or (lazy is not None and lazy.gathered is None)
        if function in _AGAIN and not torch.is_grad_enabled() and lazy is not None and lazy.local.requires_grad:
            is_local = False  # an autograd function's forward pass: the part would lose the graph it is to get
        if lazy is not None and is_local and function in _LOCAL:
            found = _LOCAL[function](lazy, *args[1:], **kwargs) if args[0] is lazy else NotImplemented
            if found is not NotImplemented:
                return found
        return function(*_whole(args), **_whole(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Below autograd, whose graph `expose` has made: an autograd function got the tensor itself."""
        with torch.no_grad():
            return function(*_whole(args), **_whole(kwargs or {}))


class _Expose(torch.autograd.Function):
    """Forward: the lazy tensor; backward: this rank's part of its gradient."""

    gives = ("part",)

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any, local: torch.Tensor, dim: int, lengths: tuple[int, ...], ranks: TensorRanks, name: str
    ) -> LazyWhole:
        ctx.dim, ctx.lengths, ctx.rank = dim, lengths, ranks.rank
        return LazyWhole.of(local, dim, lengths, ranks, name)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Any) -> Any:
        at = sum(ctx.lengths[: ctx.rank])
        return grads[0].narrow(ctx.dim, at, ctx.lengths[ctx.rank]), None, None, None, None


def expose(local: torch.Tensor, dim: int, lengths: tuple[int, ...], ranks: TensorRanks, name: str) -> LazyWhole:
    """Return `local` as part of a tensor that looks whole, with a graph. See [Note: lazily whole]."""
    found: LazyWhole = _Expose.apply(local, dim, lengths, ranks, name)
    found.local = local  # as the caller has it, with its graph
    return found


def _whole(values: Any) -> Any:
    return tree_map_only(LazyWhole, lambda each: each.whole(), values)


def _again(lazy: LazyWhole, local: torch.Tensor, dim: int) -> LazyWhole:
    return expose(local, dim, lazy.lengths, lazy.ranks, lazy.layer)


def _cast(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def cast(lazy: LazyWhole, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, torch.Tensor) for each in (*args, *kwargs.values())):
            return NotImplemented
        return _again(lazy, function(lazy.local, *args, **kwargs), lazy.split_dim)

    return cast


def _reshape(lazy: LazyWhole, *shape: Any) -> Any:
    """Views that keep the split dimension as the last one."""
    if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)):
        shape = tuple(shape[0])
    whole = sum(lazy.lengths)
    if not all(isinstance(each, int) for each in shape) or lazy.split_dim != lazy.local.dim() - 1:
        return NotImplemented
    count = 1
    for each in lazy.shape:
        count *= each
    known = 1
    for each in shape:
        known *= each if each != -1 else 1
    full = [each if each != -1 else count // max(known, 1) for each in shape]
    if not full or full[-1] != whole:
        return NotImplemented
    local = lazy.local.reshape(*full[:-1], lazy.local.shape[-1])
    return _again(lazy, local, len(full) - 1)


def _flatten(lazy: LazyWhole, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = (each % lazy.local.dim() for each in (start_dim, end_dim))
    if not (end < lazy.split_dim or start > lazy.split_dim):
        return NotImplemented
    dim = lazy.split_dim - (end - start) if end < lazy.split_dim else lazy.split_dim
    return _again(lazy, lazy.local.flatten(start, end), dim)


def _transpose(lazy: LazyWhole, dim0: int, dim1: int) -> Any:
    first, second = dim0 % lazy.local.dim(), dim1 % lazy.local.dim()
    dim = {first: second, second: first}.get(lazy.split_dim, lazy.split_dim)
    return _again(lazy, lazy.local.transpose(first, second), dim)


def _index(lazy: LazyWhole, key: Any) -> Any:
    """Slices of dimensions before the split one, such as ``logits[:, :-1]`` and ``logits[..., :-1, :]``."""
    keys = key if isinstance(key, tuple) else (key,)
    if any(not (isinstance(each, slice) or each is Ellipsis) for each in keys) or keys.count(Ellipsis) > 1:
        return NotImplemented
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        rest = lazy.local.dim() - len(keys) + 1
        keys = (*keys[:at], *[slice(None)] * rest, *keys[at + 1 :])
    if len(keys) > lazy.split_dim and keys[lazy.split_dim] != slice(None):
        return NotImplemented
    return _again(lazy, lazy.local[keys], lazy.split_dim)


def _register_hook(lazy: LazyWhole, hook: Any) -> Any:
    """Hooks that look at no gradient need not have it whole: ours take the time, FSDP2's gathers parameters."""
    inner = getattr(hook, "func", hook)
    is_blind = str(getattr(inner, "__module__", "")).startswith(("farandole.", "torch.distributed.fsdp."))
    return lazy.local.register_hook(hook) if is_blind and lazy.local.requires_grad else NotImplemented


def _cross_entropy(  # noqa: PLR0917 - the signature of torch
    lazy: LazyWhole,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    classes = 0 if lazy.local.dim() == 1 else 1
    is_plain = size_average is None and reduce is None and weight is None and type(target) is torch.Tensor
    if not is_plain or lazy.split_dim != classes or target.is_floating_point() or reduction not in _REDUCTIONS:
        return NotImplemented
    local = lazy.local.movedim(classes, -1)
    words = Vocabulary(sum(lazy.lengths[: lazy.ranks.rank]), sum(lazy.lengths), lazy.ranks, lazy.layer)
    losses = split_cross_entropy(
        local.flatten(0, -2) if local.dim() > 1 else local.unsqueeze(0),
        target.flatten(),
        words,
        ignore_index=ignore_index,
        smoothing=label_smoothing,
    )
    return _REDUCTIONS[reduction](losses.view(target.shape), target != ignore_index)


_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "none": lambda losses, is_counted: losses,
    "sum": lambda losses, is_counted: losses.sum(),
    "mean": lambda losses, is_counted: losses.sum() / is_counted.sum(),
}
_T: Any = torch.Tensor
_FACTS = {
    _T.shape.__get__, _T.dtype.__get__, _T.device.__get__, _T.ndim.__get__, _T.size, _T.dim, _T.numel,
    _T.layout.__get__, _T.is_floating_point, torch.is_floating_point, torch.numel, _T.nelement, _T.__len__,
    _T.requires_grad.__get__, _T.is_cuda.__get__, _T.element_size, _T.is_complex, torch.is_complex,
    _T.is_sparse.__get__, _T.is_quantized.__get__, _T.grad_fn.__get__, _T.is_leaf.__get__, _T._is_view,
    _T._base.__get__,
}  # fmt: skip
"""What does not depend on values, or is the graph's own."""
_AGAIN: dict[Any, Callable[..., Any]] = {
    **{each: _cast(each) for each in (_T.float, _T.double, _T.half, _T.bfloat16, _T.to, _T.contiguous, _T.clone)},
    _T.view: _reshape, _T.reshape: _reshape, torch.reshape: _reshape,
    _T.flatten: _flatten, torch.flatten: _flatten,
    _T.transpose: _transpose, torch.transpose: _transpose,
    _T.__getitem__: _index,
}  # fmt: skip
"""What gives a tensor of which each rank has a part, again."""
_LOCAL: dict[Any, Callable[..., Any]] = {
    **_AGAIN, _T.register_hook: _register_hook, functional.cross_entropy: _cross_entropy,
}  # fmt: skip


# The cross-entropy of logits of which each rank has some of the vocabulary: no rank ever has all of a token's.


_BYTES_OF_16_BITS = 2


class Vocabulary(NamedTuple):
    """What the loss must know of a split vocabulary."""

    start: int
    """Where this rank's part begins."""
    whole: int
    """Words of all ranks."""
    ranks: TensorRanks
    layer: str
    """The name of the output layer, for errors."""


class _SplitCrossEntropy(torch.autograd.Function):
    """As in Shoeybi et al. 2019, section 3: three numbers a token are exchanged instead of its logits."""

    gives = ("part",)

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        words: Vocabulary,
        ignore_index: int,
        smoothing: float,
    ) -> torch.Tensor:
        ranks, values = words.ranks, logits.float() if logits.element_size() == _BYTES_OF_16_BITS else logits
        most = values.max(1).values if values.shape[1] else values.new_full((values.shape[0],), -torch.inf)
        most = ranks.all_reduce(most.clone(), words.layer, dist.ReduceOp.MAX)
        shifted = values - most.unsqueeze(1)
        is_counted = target != ignore_index
        is_here = is_counted & (target >= words.start) & (target < words.start + values.shape[1])
        place = torch.where(is_here, target - words.start, 0).unsqueeze(1)
        found = shifted.gather(1, place).squeeze(1) if values.shape[1] else torch.zeros_like(most)
        right = torch.where(is_here, found, 0.0)
        exp = shifted.exp()
        total = shifted.sum(1) if smoothing else torch.zeros_like(right)
        sums = ranks.all_reduce(torch.stack([exp.sum(1), right, total]), words.layer)
        log_sum = sums[0].log()
        loss = log_sum - sums[1]
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (log_sum - sums[2] / words.whole)
        ctx.save_for_backward(exp.div_(sums[0].unsqueeze(1)), is_here, is_counted, place)
        ctx.smoothing, ctx.whole, ctx.dtype = smoothing, words.whole, logits.dtype
        return torch.where(is_counted, loss, 0.0).to(logits.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Any) -> Any:
        share, is_here, is_counted, place = ctx.saved_tensors
        grad = share - ctx.smoothing / ctx.whole
        if grad.shape[1]:
            grad.scatter_add_(1, place, (is_here.to(grad.dtype) * (ctx.smoothing - 1)).unsqueeze(1))
        scale = torch.where(is_counted, grads[0].to(grad.dtype), 0.0)
        return grad.mul_(scale.unsqueeze(1)).to(ctx.dtype), None, None, None, None


def split_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, words: Vocabulary, *, ignore_index: int, smoothing: float
) -> torch.Tensor:
    """Return the cross-entropy of each token, the same on all ranks.

    Args:
        logits: (tokens, part of the vocabulary), in float.
        target: (tokens,), classes of the whole vocabulary.
        words: which part this rank has.
        ignore_index: targets that count 0.
        smoothing: as `label_smoothing` of `torch.nn.functional.cross_entropy`.

    Raises:
        IndexError: a target is no class, as torch's own says.
    """
    wrong = (target != ignore_index) & ((target < 0) | (target >= words.whole))
    if target.device.type == "cpu" and bool(wrong.any()):
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")
    losses: torch.Tensor = _SplitCrossEntropy.apply(logits, target, words, ignore_index, smoothing)
    return losses

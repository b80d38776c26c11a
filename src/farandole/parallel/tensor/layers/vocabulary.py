"""The cross-entropy of logits of which each rank has some of the vocabulary: no rank ever has all of a token's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .regions import TensorRanks, first_order

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

"""Masks of attention, as what is added to the scores of the keys of each rank.

A mask that is made from this rank's tokens alone says nothing of the other ranks' keys. Three forms say enough:
one row of this rank's keys (padding), which the ranks tell each other; one row of all keys; and a row of all keys
for each of this rank's queries. Keys of a whole sequence are in their natural order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.vocabulary.errors import ConfigError
from .group import ContextGroup, cut, join
from .heads import to_heads

_FORMS = (
    "use is_causal=True for a causal mask; give padding as (batch, 1, 1, {here}), of this rank's keys, and any "
    "other mask as ({here}, {whole}): rows of fd.context_positions({here}), columns of all tokens in their order"
)


def biases_of(
    group: ContextGroup, mask: torch.Tensor | None, padding: torch.Tensor | None, query: torch.Tensor
) -> list[torch.Tensor] | None:
    """Return what is added to the scores of the keys of each rank; None for nothing.

    Args:
        group: the ranks of the sequence.
        mask: that of `scaled_dot_product_attention`, bool or added; None: there is none.
        padding: of shape (batch, tokens of this rank), False where a token is padding; None: there is none.
        query: of shape (batch, heads, tokens of this rank, width).

    Returns:
        4-dimensional tensors of the type of `query`, to be broadcast.

    Raises:
        ConfigError: the mask has none of the three forms, or needs a gradient.
    """
    masks = [_split(group, each, query) for each in (mask, None if padding is None else padding[:, None, None])
             if each is not None]  # fmt: skip
    if not masks:
        return None
    return [torch.stack(torch.broadcast_tensors(*each)).sum(0) if len(each) > 1 else each[0]
            for each in zip(*masks, strict=True)]  # fmt: skip


def whole_bias(group: ContextGroup, biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what is added to the scores of this rank's heads, for all queries and keys in their natural order."""
    bias = join(biases, -1)
    rows = bias.shape[-2]
    if bias.shape[1] > 1:
        heads = bias.expand(-1, -1, 2, -1) if rows == 1 else bias  # an even number of rows divides
        bias = to_heads(group, heads)[0]
        return bias[:, :, :1] if rows == 1 else bias
    return bias if rows == 1 else join(group.all_gather(bias, "rows of an attention mask", is_counted=True), -2)


def _split(group: ContextGroup, mask: torch.Tensor, query: torch.Tensor) -> list[torch.Tensor]:
    if mask.requires_grad:
        raise ConfigError(
            "context: the mask of an attention trains (a learned bias of positions), and its gradient would be of "
            "this rank's tokens alone",
            remedy="use rotary or learned position embeddings, or set context = 1",
        )
    shape = tuple(mask.shape)
    here, whole = query.shape[2], query.shape[2] * group.size
    mask = mask.view((1,) * (4 - mask.dim()) + shape) if mask.dim() < 4 else mask
    if mask.shape[-2] > 1 and mask.stride(-2) == 0:  # expanded: the same for all queries
        mask = mask[:, :, :1]
    rows, columns = mask.shape[-2:]
    if columns == here and rows == 1:
        parts = group.all_gather(_added(mask, query.dtype), "padding of keys", is_counted=True)
    elif columns == whole and rows in (1, here):
        added = _added(mask, query.dtype)
        parts = [cut(added, -1, other, group.size) for other in range(group.size)]
    else:
        raise ConfigError(
            f"context: a mask of shape {shape} says nothing of the other ranks' tokens: this rank holds {here} of "
            f"{whole}, at the positions fd.context_positions({here})",
            remedy=_FORMS.format(here=here, whole=whole),
        )
    return parts


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)

"""`scaled_dot_product_attention` for a sequence that is divided over ranks: checks, masks, and which form runs.

Two forms, both exact: `ring` passes keys and values around and works for any number of heads; `heads` divides the
heads for the time of attention, and keeps dropout.

[Note: by heads] An all-to-all turns all heads of some tokens into some heads of all tokens; after attention
another one turns the output back (Jacobs et al. 2023, "DeepSpeed Ulysses", section 3). Queries, keys and values
travel as one message. With c ranks, n tokens a rank, h heads of queries and k of keys, and elements of w bytes, a
rank sends (c - 1) / c batch n width (h + 2 k) w bytes in one message and (c - 1) / c batch n width h w bytes in
another, forward, and the same backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ...core.vocabulary.errors import ConfigError
from .group import ContextGroup, cut, join
from .ring import RingAttention, RingCall

# Attention over a sequence that is divided over ranks: for the time of attention, heads are divided instead.


def to_heads(group: ContextGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return, of tensors (batch, heads, tokens of this rank, width), (batch, heads / c, all tokens, width)."""
    made: tuple[torch.Tensor, ...] = _ToHeads.apply(group, *tensors)
    return made


def to_tokens(group: ContextGroup, tensor: torch.Tensor) -> torch.Tensor:
    """Return, of a tensor (batch, heads / c, all tokens, width), (batch, heads, tokens of this rank, width)."""
    made: torch.Tensor = _ToTokens.apply(group, tensor)
    return made


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ContextGroup, *tensors: torch.Tensor) -> Any:
        ctx.group = group
        return tuple(_divide_heads(group, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *_divide_tokens(ctx.group, grads)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ContextGroup, tensor: torch.Tensor) -> Any:
        ctx.group = group
        return _divide_tokens(group, [tensor])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, _divide_heads(ctx.group, [grad])[0]


def _divide_heads(group: ContextGroup, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pieces = [tensor.chunk(group.size, 1) for tensor in tensors]
    received = _exchange(group, pieces)
    return [join(parts, 2) for parts in received]


def _divide_tokens(group: ContextGroup, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pieces = [[cut(tensor, 2, rank, group.size) for rank in range(group.size)] for tensor in tensors]
    received = _exchange(group, pieces)
    return [torch.cat(parts, 1) for parts in received]


def _exchange(group: ContextGroup, pieces: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Send piece i of each tensor to rank i, in one message; return each tensor's pieces from all ranks."""
    size = group.size
    counts = [each[0].numel() for each in pieces]
    send = torch.cat([each[rank].reshape(-1) for rank in range(size) for each in pieces]).view(size, -1)
    received = group.all_to_all(send)
    begins = [0, *itertools.accumulate(counts)]
    return [
        [received[rank, begin : begin + count].view(each[0].shape) for rank in range(size)]
        for begin, count, each in zip(begins, counts, pieces, strict=False)
    ]


# Masks of attention, as what is added to the scores of the keys of each rank.
#
# A mask that is made from this rank's tokens alone says nothing of the other ranks' keys. Three forms say
# enough: one row of this rank's keys (padding), which the ranks tell each other; one row of all keys; and a row
# of all keys for each of this rank's queries. Keys of a whole sequence are in their natural order.

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


Kind = Literal["auto", "ring", "heads"]
Plain = Callable[..., torch.Tensor]


class AttentionCall(NamedTuple):
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`, by its names."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


@dataclass(frozen=True)
class DividedAttention:
    """Attention over the ranks of a group, in one form."""

    group: ContextGroup
    kind: Kind
    """The form, or "auto": by heads where they divide, else by ring."""
    plain: Plain
    """Torch's own function."""

    def attend(self, call: AttentionCall, padding: torch.Tensor | None = None) -> torch.Tensor:
        """Return what `plain` would return for this rank's queries and the keys of all ranks.

        Args:
            call: the arguments, for this rank's tokens, which are those of [Note: zigzag].
            padding: of shape (batch, tokens of this rank), False where a token is padding; None: no token is.

        Raises:
            ConfigError: the call cannot be made exact.
        """
        _refuse(call)
        shape, call = (*call.query.shape[:-1], call.value.shape[-1]), _four_dimensional(call)
        with torch.autocast(call.query.device.type, enabled=False):
            is_ring = self._is_ring(call)
            biases = biases_of(self.group, call.attn_mask, padding, call.query)
            output = _ring(call, self.group, biases) if is_ring else self._by_heads(call, biases)
        return output.view(shape) if len(shape) < 4 else output

    def _by_heads(self, call: AttentionCall, biases: list[torch.Tensor] | None) -> torch.Tensor:
        bias = None if biases is None else whole_bias(self.group, biases)
        query, key, value = to_heads(self.group, *call[:3])
        call = call._replace(query=query, key=key, value=value, attn_mask=bias)
        if bias is not None and call.is_causal:  # torch's function takes one of the two
            if call.dropout_p == 0.0:
                return to_tokens(self.group, _ring(call, None, [bias]))
            length = query.shape[2]
            later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu_(1)
            call = call._replace(attn_mask=bias.masked_fill(later, -torch.inf), is_causal=False)
        options: dict[str, Any] = {"scale": call.scale}
        if query.shape[1] != key.shape[1]:
            options["enable_gqa"] = True
        return to_tokens(self.group, self.plain(*call[:6], **options))

    def _is_ring(self, call: AttentionCall) -> bool:
        """Return whether the ring form runs; raise `ConfigError` for a call that the form cannot do."""
        size, heads, key_heads = self.group.size, call.query.shape[1], call.key.shape[1]
        divides = heads % size == 0 and key_heads % size == 0
        if self.kind == "heads" and not divides:
            raise ConfigError(
                f'plan: context_kind = "heads", but attention has {heads} heads of queries and {key_heads} of '
                f"keys, which do not both divide by context = {size}",
                remedy='set context_kind = "ring"',
            )
        is_ring = self.kind == "ring" or not divides
        if is_ring and call.dropout_p > 0.0:
            form = "ring" if self.kind == "ring" else f"ring, since {key_heads} heads do not divide by {size}"
            raise ConfigError(
                f"context: attention has dropout {call.dropout_p:g}, which the form {form} does not have",
                remedy="set the model's attention dropout to 0"
                + (', or context_kind = "heads"' if divides else ""),
            )
        return is_ring


def _ring(call: AttentionCall, group: ContextGroup | None, biases: list[torch.Tensor] | None) -> torch.Tensor:
    assert call.scale is not None, "the scale is known by now"
    ring = RingCall(group, biases, call.is_causal, call.scale)
    output: torch.Tensor = RingAttention.apply(*call[:3], ring)
    return output


def _four_dimensional(call: AttentionCall) -> AttentionCall:
    """Return the call with batch and heads, cast as autocast would cast, and with a scale."""
    mask = call.attn_mask
    if mask is not None and call.query.dim() == 3 and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    three = [_four(each) for each in (call.query, call.key, call.value)]
    scale = 1 / math.sqrt(call.query.shape[-1]) if call.scale is None else call.scale
    return call._replace(query=three[0], key=three[1], value=three[2], attn_mask=mask, scale=scale)


def _four(tensor: torch.Tensor) -> torch.Tensor:
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.dtype != torch.float64:
        tensor = tensor.to(torch.get_autocast_dtype(device))
    tensor = tensor.unsqueeze(0) if tensor.dim() == 2 else tensor
    return tensor.unsqueeze(1) if tensor.dim() == 3 else tensor


def _refuse(call: AttentionCall) -> None:
    query, key, value = call.query, call.key, call.value
    shapes = f"queries {tuple(query.shape)}, keys {tuple(key.shape)}, values {tuple(value.shape)}"
    if query.is_nested or key.is_nested or value.is_nested:
        raise ConfigError("context: attention of nested tensors", remedy="pad the sequences to one length")
    if not 2 <= query.dim() <= 4 or not query.dim() == key.dim() == value.dim():
        raise ConfigError(f"context: attention of {shapes}; expected 2 to 4 dimensions, as many for all")
    if call.attn_mask is not None and call.is_causal:
        raise ConfigError(
            "context: attention with both attn_mask and is_causal=True",
            remedy="give one of them: is_causal=True, or rows of this rank's tokens with all columns",
        )
    if query.shape[-2] != key.shape[-2] or key.shape[-2] != value.shape[-2]:
        raise ConfigError(
            f"context: attention between sequences of different lengths ({shapes}): to another sequence, or "
            "with a cache of keys",
            remedy="set context = 1 for such a model; generate text with a copy of it",
        )
    if query.shape[:-3] != key.shape[:-3] or query.shape[:-3] != value.shape[:-3]:
        raise ConfigError(f"context: attention of {shapes}: batches of different sizes")
    if query.dim() > 2 and query.shape[-3] != key.shape[-3]:
        divides = query.dim() == 4 and call.enable_gqa and query.shape[1] % key.shape[1] == 0
        if not divides or key.shape[1] != value.shape[1]:
            raise ConfigError(f"context: attention of {shapes}: heads of keys must divide those of queries")
    if query.shape[-2] % 2:
        raise ConfigError(
            f"context: attention over {query.shape[-2]} tokens of this rank, which are not two chunks",
            remedy="cut sequences with fd.context_shard, and leave them as they are cut",
        )

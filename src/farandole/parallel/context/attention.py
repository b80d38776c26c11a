"""`scaled_dot_product_attention` for a sequence that is divided over ranks: checks, masks, and which form runs.

Two forms, both exact: `ring` passes keys and values around and works for any number of heads; `heads` divides the
heads for the time of attention, and keeps dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from ...core.vocabulary.errors import ConfigError
from .group import ContextGroup
from .heads import to_heads, to_tokens
from .masks import biases_of, whole_bias
from .ring import RingAttention, RingCall

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

"""torch's `MultiheadAttention` with some of the heads (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ....core.vocabulary.errors import ConfigError
from .regions import gather_features, linear_of
from .split_layers import SplitLayer


class SplitAttention(SplitLayer):
    """Attention over some of the heads: projections by columns, the output's by rows.

    The attributes of `torch.nn.MultiheadAttention` are its own, but `num_heads`, which is that of this rank.
    """

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    out_proj: nn.Linear
    num_heads: int
    head_dim: int
    embed_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool

    def forward(  # noqa: PLR0917 - the signature of torch
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `torch.nn.MultiheadAttention`, of all heads: (output, weights or None)."""
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        is_batched = query.dim() == 3
        if self._farandole_begins == "tokens" and not (is_batched and self.batch_first):
            raise ConfigError(
                f"sequence_parallel: {self._farandole_name!r} takes its tokens in the first dimension",
                remedy="make it with batch_first=True, or leave sequence_parallel out",
            )
        ready = {id(each): self._ready(each, is_batched) for each in (query, key, value)}
        q, k, v = self._project(*(ready[id(each)] for each in (query, key, value)))
        q, k, v, extra = self._with_extra(q, k, v)
        mask = self._mask(q, k, key_padding_mask, attn_mask, extra)
        p = self.dropout if self.training else 0.0
        weights: torch.Tensor | None = None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = functional.dropout(torch.softmax(scores if mask is None else scores + mask, -1), p)
            mixed = weights @ v
        elif is_causal and key_padding_mask is None and not extra:
            mixed = functional.scaled_dot_product_attention(q, k, v, None, p, is_causal=True)
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, p)
        out = functional.linear(mixed.transpose(1, 2).flatten(2), self.out_proj.weight)
        out = self._end(out, self.out_proj.bias)
        if not is_batched:
            out = out.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out, None if weights is None else self._weights(weights, average_attn_weights, is_batched)

    def _ready(self, x: torch.Tensor, is_batched: bool) -> torch.Tensor:
        """Return (batch, tokens, features), at the beginning of the split region."""
        x = self._begin(x)
        if not is_batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _project(self, *tensors: torch.Tensor) -> Any:
        biases: Any = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if self.in_proj_weight is not None and tensors[0] is tensors[1] is tensors[2]:
            projected: Any = linear_of(tensors[0], self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            matrices = separate if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
            projected = map(linear_of, tensors, matrices, biases)
        return [each.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for each in projected]

    def _with_extra(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        """Return q, k, v, and how many keys were added that no mask knows."""
        batch, heads, _, width = q.shape
        extra = 0
        if self.bias_k is not None and self.bias_v is not None:
            own = [each.view(1, heads, 1, width).expand(batch, -1, -1, -1) for each in (self.bias_k, self.bias_v)]
            k, v, extra = torch.cat([k, own[0]], 2), torch.cat([v, own[1]], 2), extra + 1
        if self.add_zero_attn:
            zero = q.new_zeros(batch, heads, 1, width)
            k, v, extra = torch.cat([k, zero], 2), torch.cat([v, zero], 2), extra + 1
        return q, k, v, extra

    def _mask(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        padding: torch.Tensor | None,
        mask: torch.Tensor | None,
        extra: int,
    ) -> torch.Tensor | None:
        """Return what is added to the scores (batch, heads, queries, keys): 0, or minus infinity where masked."""
        batch, heads = q.shape[:2]
        found: torch.Tensor | None = None
        if mask is not None:
            mask = _added(mask, q.dtype)
            if mask.dim() == 3:  # (batch x all heads, queries, keys)
                ranks = self._farandole_ranks
                mask = mask.unflatten(0, (batch, heads * ranks.size)).narrow(1, ranks.rank * heads, heads)
            found = functional.pad(mask, (0, extra))
        if padding is not None:
            hidden = functional.pad(_added(padding, q.dtype), (0, extra)).view(-1, 1, 1, k.shape[2])
            found = hidden if found is None else found + hidden
        return found

    def _weights(self, weights: torch.Tensor, is_mean: bool, is_batched: bool) -> torch.Tensor:
        """Return the attention weights (batch, heads, queries, keys) of all heads, or their mean."""
        ranks = self._farandole_ranks
        whole = gather_features(weights, 1, (self.num_heads,) * ranks.size, ranks, self._farandole_name)
        whole = whole.mean(1) if is_mean else whole
        return whole if is_batched else whole.squeeze(0)


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask that is added to scores: of truth values, minus infinity where they are true."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)

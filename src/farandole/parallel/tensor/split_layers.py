"""Layers of which each rank has a part: kins of torch's classes with plain, local parameters.

A copy of such a layer in this process is split as it is. It takes no way into a file by itself:
`farandole.save` does.
"""

from __future__ import annotations

import copy
import threading
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from ...core.vocabulary.errors import ConfigError
from ..changed_class import ChangedClass, is_transposed, plain_class_of
from ..split import mark_split, split_of
from .lazy import LazyWhole, expose
from .regions import (
    RegionSeed,
    TensorRanks,
    begin_region,
    begin_region_of_tokens,
    end_region,
    end_region_by_tokens,
    gather_features,
    linear_of,
    take_piece,
)

LAST = -1


class _Inside(threading.local):
    depth = 0


inside = _Inside()
"""How many split layers are being called in this thread, one inside the other."""


class SplitLayer(ChangedClass):
    """A layer whose parameters, or some of them, are this rank's part."""

    _farandole_ranks: TensorRanks
    _farandole_name: str
    """The name of the layer in the model."""
    _farandole_begins: Literal["copy", "tokens", "before"]
    """The split region begins here with whole tensors, or with some of the tokens, or it began before."""
    _farandole_by_tokens: bool
    """Whether a rank has, after the split region, some of the tokens."""
    _farandole_seed: RegionSeed | None
    """If elements are dropped in the region."""
    _farandole_whole: dict[str, Any]
    """Attributes that were changed, as they were."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitLayer:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for name, value in vars(self).items():
            vars(made)[name] = value if name.startswith("_farandole") else copy.deepcopy(value, memo)
        for name, parameter in made.named_parameters(recurse=False):
            split = split_of(self.get_parameter(name))
            if split is not None:
                mark_split(parameter, split)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            f"{self._farandole_name!r}, a {plain_class_of(self).__name__}, is one of "
            f"{self._farandole_ranks.size} parts, and a file would hold this part alone",
            remedy="save the model with farandole.save, which writes whole parameters",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `torch.nn.Module`; what happens in it may use split parameters."""
        inside.depth += 1
        try:
            return super().__call__(*args, **kwargs)
        finally:
            inside.depth -= 1

    def _begin(self, x: torch.Tensor) -> torch.Tensor:
        if self._farandole_seed is not None and self.training:
            self._farandole_seed.begin()
        if self._farandole_begins == "before":
            return x
        begin = begin_region_of_tokens if self._farandole_begins == "tokens" else begin_region
        return begin(x, self._farandole_ranks, self._farandole_name)

    def _end(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._farandole_seed is not None:
            self._farandole_seed.end()
        end = end_region_by_tokens if self._farandole_by_tokens else end_region
        return end(x, bias, self._farandole_ranks, self._farandole_name)


class ByColumns(SplitLayer):
    """A linear layer with some of the output features: y_i = x A_i (Shoeybi et al. 2019, section 3)."""

    _farandole_lengths: tuple[int, ...] = ()
    """Output features of each rank, if the output is gathered."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take (..., features) whole; return this rank's output features, or all if they are gathered."""
        out = linear_of(self._begin(x), _weight(self), _bias(self))
        if self._farandole_lengths:
            return gather_features(out, LAST, self._farandole_lengths, self._farandole_ranks, self._farandole_name)
        return out


class ByRows(SplitLayer):
    """A linear layer with some of the input features: y = sum_i x_i A_i (Shoeybi et al. 2019, section 3)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take this rank's features, or all; return the whole output."""
        weight = _weight(self)
        if x.shape[LAST] != weight.shape[1] and x.shape[LAST] == weight.shape[1] * self._farandole_ranks.size:
            x = take_piece(x, LAST, self._farandole_ranks, self._farandole_name)
        return self._end(functional.linear(x, weight), _bias(self))


class VocabularyOutput(SplitLayer):
    """An output layer with the logits of some of the vocabulary. See [Note: lazily whole]."""

    _farandole_lengths: tuple[int, ...]

    def forward(self, x: torch.Tensor) -> LazyWhole:
        """Take (..., features); return logits (..., vocabulary) that are split until they are needed whole."""
        local = functional.linear(self._begin(x), _weight(self), _bias(self))
        ranks = self._farandole_ranks
        return expose(local, local.dim() - 1, self._farandole_lengths, ranks, self._farandole_name)


class VocabularyEmbedding(SplitLayer):
    """An embedding with some of the vocabulary: other ranks' tokens are zero here, and the sum has all."""

    _farandole_start: int
    padding_idx: int | None
    weight: nn.Parameter

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take tokens (...); return (..., features), the same on all ranks."""
        start, count = self._farandole_start, self.weight.shape[0]
        _check_range(tokens, self)
        is_here = (tokens >= start) & (tokens < start + count)
        local = torch.where(is_here, tokens - start, 0)
        padding = self.padding_idx
        if padding is not None:  # its row gets no gradient
            is_here_and_trains = is_here & (tokens != padding)
            rows = functional.embedding(local, self.weight)
            kept = rows.detach() * (is_here & (tokens == padding)).unsqueeze(-1)
            rows = rows * is_here_and_trains.unsqueeze(-1) + kept
        else:
            rows = functional.embedding(local, self.weight) * is_here.unsqueeze(-1)
        return end_region(rows, None, self._farandole_ranks, self._farandole_name)


class FeatureEmbedding(SplitLayer):
    """An embedding with some of the features of each token, which are gathered."""

    _farandole_lengths: tuple[int, ...]
    padding_idx: int | None
    weight: nn.Parameter

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take tokens (...); return (..., features), the same on all ranks."""
        rows = functional.embedding(tokens, self.weight, self.padding_idx)
        return gather_features(rows, LAST, self._farandole_lengths, self._farandole_ranks, self._farandole_name)


def is_linear(layer: nn.Module) -> bool:
    """Return whether `layer` is a linear layer, torch's or transformers', with the forward of its class."""
    kind = plain_class_of(layer)
    return (isinstance(layer, nn.Linear) and kind.forward is nn.Linear.forward) or is_transposed(layer)


def _weight(layer: nn.Module) -> torch.Tensor:
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    return weight.t() if is_transposed(layer) else weight


def _bias(layer: nn.Module) -> torch.Tensor | None:
    bias: torch.Tensor | None = layer.bias  # type: ignore[assignment]
    return bias


def _check_range(tokens: torch.Tensor, layer: VocabularyEmbedding) -> None:
    """Raise `IndexError`, as torch does, for a token that no rank has: its row would be zero."""
    if tokens.device.type != "cpu" or not tokens.numel():
        return  # on accelerators torch's own assertion would need a wait for the device
    whole = layer._farandole_whole["num_embeddings"]
    least, most = (int(each) for each in torch.aminmax(tokens))
    if least < 0 or most >= whole:
        raise IndexError(
            f"{layer._farandole_name!r}: token {least if least < 0 else most} of {whole}: index out of range"
        )


# torch's `MultiheadAttention` with some of the heads (Shoeybi et al. 2019, section 3).


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

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

from ....core.vocabulary.errors import ConfigError
from ...changed_class import ChangedClass, is_transposed, plain_class_of
from ...split import mark_split, split_of
from .lazy import LazyWhole, expose
from .ranks import TensorRanks
from .region_seed import RegionSeed
from .regions import (
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

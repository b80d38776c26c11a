"""What the step benchmark trains: a model, random batches of its shape on each rank, a loss. No data is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from ..models import BERT_VOCABULARY, Bert, LanguageModel, SmallCNN, mlp, resnet50, vgg16

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Work:
    """Something to train."""

    make: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.Generator], Batch]
    """From a number of samples to the batch of one rank."""
    loss: Callable[[nn.Module, Batch], torch.Tensor]


def _images(shape: tuple[int, ...], classes: int, batch: int, generator: torch.Generator) -> Batch:
    images = torch.randn(batch, *shape, generator=generator)
    return images, torch.randint(0, classes, (batch,), generator=generator)


def _classified(model: nn.Module, batch: Batch) -> torch.Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def _tokens(vocabulary: int, length: int, batch: int, generator: torch.Generator) -> Batch:
    return (torch.randint(0, vocabulary, (batch, length + 1), generator=generator),)


def _next_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    (tokens,) = batch
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


_MASK, _IGNORED, _MASKED_SHARE = 103, -100, 0.15
BERT_LENGTH, GPT_LENGTH = 128, 128


def _masked_tokens(batch: int, generator: torch.Generator) -> Batch:
    shape = (batch, BERT_LENGTH)
    tokens = torch.randint(1000, BERT_VOCABULARY, shape, generator=generator)
    masked = torch.rand(shape, generator=generator) < _MASKED_SHARE
    masked[:, 1] = True  # a batch with nothing to guess has no loss
    wanted = tokens.masked_fill(~masked, _IGNORED)
    sentences = (torch.arange(BERT_LENGTH) >= BERT_LENGTH // 2).long().expand(shape)
    return tokens.masked_fill(masked, _MASK), sentences, wanted, torch.randint(0, 2, (batch,), generator=generator)


def _pre_trained(model: nn.Module, batch: Batch) -> torch.Tensor:
    tokens, sentences, wanted, following = batch
    logits, follows = model(tokens, sentences)
    return cross_entropy(logits.flatten(0, 1), wanted.flatten()) + cross_entropy(follows, following)


def _language(make: Callable[[], nn.Module], vocabulary: int, length: int) -> Work:
    return Work(make, partial(_tokens, vocabulary, length), _next_token)


def _pictures(make: Callable[[], nn.Module], shape: tuple[int, ...], classes: int) -> Work:
    return Work(make, partial(_images, shape, classes), _classified)


WORKS = {
    "lm27": _language(partial(LanguageModel, 512, 8, 8, 128, 4096), 4096, 128),
    "small": _language(partial(LanguageModel, 128, 2, 4, 32), 256, 32),
    "resnet50": _pictures(resnet50, (3, 224, 224), 1000),
    "vgg16": _pictures(vgg16, (3, 224, 224), 1000),
    "bert": Work(Bert, _masked_tokens, _pre_trained),
    "gpt": _language(partial(LanguageModel, 768, 12, 12, 1024, 50_257), 50_257, GPT_LENGTH),
    "cifar-cnn": _pictures(partial(SmallCNN, 3, 32), (3, 32, 32), 10),
    "mlp": _pictures(mlp, (784,), 10),
}
"""``lm27`` has 27.4 M parameters, ``small`` 0.4 M; ``bert`` is BERT-base, ``gpt`` GPT-2 small, on 128 tokens."""


_RANDOM = {"normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_", "xavier_normal_"}


class _NoRandomValues(TorchFunctionMode):
    """Leaves out the random values that modules begin with."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func.__name__ in _RANDOM:
            return args[0] if args else named["tensor"]
        return func(*args, **named)


def parameters_of(name: str) -> int:
    """Return how many parameters the model has, without allocating them."""
    with torch.device("meta"), _NoRandomValues():  # random values on meta would import the compiler, for seconds
        return sum(parameter.numel() for parameter in WORKS[name].make().parameters())

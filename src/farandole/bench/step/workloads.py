"""What the step benchmark trains: a model, random batches of its shape on each rank, a loss. No data is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from ...core.vocabulary.codec_spec import AUTO, OPTIONS
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.suggestions import did_you_mean
from ...core.vocabulary.sync_spec import EVERY_STEP
from ..models.bert import VOCABULARY as BERT_VOCABULARY
from ..models.bert import Bert
from ..models.cnn import SmallCNN
from ..models.language import LanguageModel
from ..models.mlp import mlp
from ..models.resnet import resnet50
from ..models.vgg import vgg16

# The names of the models that are trained for measuring, without torch. `works` has what they stand for.

MODELS = ("lm27", "small", "resnet50", "vgg16", "bert", "gpt", "cifar-cnn", "mlp")
PRECISIONS = ("fp32", "bf16", "fp16")


# The names of the step benchmark's contenders, checked before anything starts and without torch.

RIVALS = ("ddp", "ddp-fp16", "ddp-powersgd", "ddp-nosync")
TUNED = "ddp-tuned"
TUNED_FROM = ("ddp:1", "ddp:5", "ddp:25", "ddp:100")
_WITH_NUMBER = ("ddp", "ddp-powersgd")


Settings = Mapping[str, Any]
"""Keys of a plan."""


def read_contenders(text: str, settings: Settings = MappingProxyType({})) -> list[str]:
    """Return the names in ``a;b;c``, each a plan with `settings` too.

    Raises `ConfigError` for a name that is unknown or doubled, and for none at all.
    """
    names = [word.strip() for word in text.split(";") if word.strip()]
    if not names:
        raise ConfigError("--contenders: expected names", remedy='for example: --contenders "ddp;none;bf16;int8"')
    for name in names:
        check_contender(name, settings)
        if not name.startswith("ddp") and plan_of(name, settings).sync != EVERY_STEP:
            raise ConfigError(
                f"contender {name!r}: with sync most steps exchange nothing, and a median step says little",
                remedy="time whole trainings: python benchmarks/time_to_loss.py",
            )
        if names.count(name) > 1:
            raise ConfigError(f"--contenders: {name!r} is given twice")
    return names


def check_contender(name: str, settings: Settings = MappingProxyType({})) -> None:
    """Raise `ConfigError` unless `name` is a rival's or a plan's; see `contenders.make_contender`."""
    kind, colon, value = name.partition(":")
    if kind in RIVALS:
        if colon and (kind not in _WITH_NUMBER or not value.isdecimal() or not int(value)):
            raise ConfigError(f"contender {name!r}: expected {_expected(kind)}")
        return
    if name == TUNED:
        return
    codec = name.partition("+")[0].partition(":")[0]
    if "." not in codec and codec not in OPTIONS and codec != AUTO:
        raise ConfigError(
            f"contender {name!r}: unknown codec or rival {codec!r}",
            remedy=did_you_mean(codec, [*OPTIONS, *RIVALS, TUNED]),
        )
    plan_of(name, settings)


def plan_of(name: str, settings: Settings = MappingProxyType({})) -> Plan:
    """Return the plan that ``codec+key=value+key=value`` stands for, on top of `settings`."""
    codec, *own = name.split("+")
    pairs: dict[str, Any] = dict(settings)
    for setting in own:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"contender {name!r}: {setting!r} is no key=value", remedy="for example: none+bucket_bytes=4MiB"
            )
        pairs[key] = value
    return Plan.from_mapping({"codec": codec, **pairs}, where=f"contender {name!r}")


def settings_of(plan: Plan) -> dict[str, Any]:
    """Return the keys of a plan that all contenders share: those that are no defaults.

    Raises `ConfigError` for a plan that chooses a codec, which is what contenders differ in.
    """
    settings = {key: pair[0] for key, pair in plan.differences(Plan()).items()}
    if "codec" in settings:
        raise ConfigError(
            f"bench step: the plan says codec = {settings['codec']!r}, and contenders are codecs",
            remedy=f'for example: --contenders "ddp;none;{settings["codec"]}"',
        )
    return settings


def expand(names: Sequence[str]) -> list[str]:
    """Return what is to be run for `names`: each once, and for ``ddp-tuned`` those it is chosen from."""
    found: list[str] = []
    for name in names:
        found += [each for each in (TUNED_FROM if name == TUNED else (name,)) if each not in found]
    return found


def is_reference(name: str) -> bool:
    """Return whether other contenders may be compared with this one: a DDP that exchanges plain gradients."""
    return name.partition(":")[0] in ("ddp", TUNED)


def _expected(kind: str) -> str:
    after = {"ddp": "the megabytes of a bucket", "ddp-powersgd": "a rank"}.get(kind)
    return f"{kind}, or {kind}:N with {after} of at least 1" if after else f"{kind} alone"


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

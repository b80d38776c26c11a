"""The names of the step benchmark's contenders, checked before anything starts and without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..core.vocabulary.codec_spec import AUTO, OPTIONS
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.sync_spec import EVERY_STEP
from ..core.vocabulary.text import did_you_mean

# Models that are trained for measuring, by name: `workloads` has what they stand for, and needs torch.
MODELS = ("lm27", "small", "resnet50", "vgg16", "bert", "gpt", "cifar-cnn", "mlp")
PRECISIONS = ("fp32", "bf16", "fp16")

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

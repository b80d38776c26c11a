"""``farandole bench step``: training steps of our engine under several plans, beside the rivals'."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..core.vocabulary.codec_spec import AUTO, OPTIONS
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.sync_spec import EVERY_STEP
from ..core.vocabulary.text import did_you_mean, format_table
from ..core.vocabulary.units import format_bytes, format_rate, format_seconds
from ..observe.figures.figures import throughput
from .intervals import median_interval, paired_ratio
from .launch_ranks import Hosts, Say, run_on_hosts

WARM_UP = 2


def bench_step(
    hosts: Hosts, *, contenders: Sequence[str], rounds: int, batch: int, model: str, precision: str,
    settings: Settings = MappingProxyType({}), say: Say,
) -> dict[str, Any]:  # fmt: skip
    """Measure; return the result as plain values. `settings` are plan keys that all our contenders share."""
    words = ["--contenders", ";".join(expand(contenders)), "--rounds", str(rounds), "--batch", str(batch)]
    words += ["--model", model, "--precision", precision, "--warm-up", str(WARM_UP)]
    words += ["--settings", json.dumps(dict(settings))] if settings else []
    found = run_on_hosts(hosts, "farandole.bench.step_worker", words, say=say)
    shape = {
        **hosts.to_mapping(), "congestion_control": found["congestion_control"], "model": model,
        "parameters": found["parameters"], "precision": precision,
        "batch": batch, "rounds": rounds, "device": found["device"], "settings": dict(settings),
    }  # fmt: skip
    return {**shape, **compare(contenders, found["contenders"], found["absent"], step_samples=batch * hosts.size)}


def compare(
    names: Sequence[str], measured: dict[str, dict[str, list[float]]], absent: dict[str, str], *, step_samples: int
) -> dict[str, Any]:
    """Return a row for each contender that ran, compared with the first DDP that did, and why others did not.

    A step is of `step_samples` samples, of all ranks together.
    """
    samples = dict(measured)
    reasons = dict(absent)
    chosen: dict[str, str] = {}
    if TUNED in names:
        candidates = [name for name in TUNED_FROM if name in measured]
        if candidates:
            chosen[TUNED] = min(candidates, key=lambda name: statistics.median(measured[name]["seconds"]))
            samples[TUNED] = measured[chosen[TUNED]]
        else:
            reasons[TUNED] = reasons[TUNED_FROM[0]]
    reference = next((name for name in names if is_reference(name) and name in samples), None)
    rows = [
        _row(name, samples[name], None if reference is None else samples[reference], chosen.get(name))
        for name in names
        if name in samples
    ]
    for row in rows:
        row["samples_per_second"] = throughput(step_samples, row["seconds"])
    tuned = {name: statistics.median(measured[name]["seconds"]) for name in TUNED_FROM if name in measured}
    return {
        "reference": reference,
        "rows": rows,
        "tuned_seconds": tuned if TUNED in names else {},
        "absent": [{"contender": name, "reason": reasons[name]} for name in names if name in reasons],
    }


def _row(
    name: str, samples: dict[str, list[float]], reference: dict[str, list[float]] | None, chosen: str | None
) -> dict[str, Any]:
    seconds, interval = median_interval(samples["seconds"])
    ratio, ratio_interval = (
        (None, None) if reference is None else paired_ratio(samples["seconds"], reference["seconds"])
    )
    return {
        "contender": name,
        "chosen": chosen,
        "seconds": seconds,
        "interval": interval,
        "ratio": ratio,
        "ratio_interval": ratio_interval,
        "processor_seconds": statistics.median(samples["processor_seconds"]),
        "sent_bytes": statistics.median(samples["sent_bytes"]),
        "loss": samples["loss"][-1],
        "samples": samples["seconds"],
    }


def format_step(result: dict[str, Any]) -> str:
    """Return the result as a table, and what did not run."""
    against = result["reference"] or "ddp"
    head = [
        "contender",
        "step",
        "95 % interval",
        "samples/s",
        f"x {against}",
        "95 % interval",
        "processor",
        "sent",
        "loss",
    ]
    rows = []
    for row in result["rows"]:
        low, high = row["interval"]
        between = row["ratio_interval"]
        rows.append(
            [
                row["contender"] + (f" ({row['chosen']})" if row["chosen"] else ""),
                format_seconds(row["seconds"]),
                f"{format_seconds(low)} to {format_seconds(high)}",
                format_rate(row["samples_per_second"]),
                "" if row["ratio"] is None else f"{row['ratio']:.3f}",
                "" if between is None else f"{between[0]:.3f} to {between[1]:.3f}",
                format_seconds(row["processor_seconds"]),
                format_bytes(row["sent_bytes"]),
                f"{row['loss']:.4f}",
            ]
        )
    lines = [format_table(head, rows)] if rows else []
    lines += [f"did not run: {gone['contender']}: {gone['reason']}" for gone in result["absent"]]
    return "\n".join(lines)


# The names of the step benchmark's contenders, checked before anything starts and without torch.


# Models that are trained for measuring, by name: `step_worker` has what they stand for, and needs torch.
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

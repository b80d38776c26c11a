"""``farandole bench step``: training steps of our engine under several plans, beside the rivals'."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from ..core.vocabulary.units import format_bytes, format_rate, format_seconds
from ..observe.figures.figures import throughput
from .contender_names import TUNED, TUNED_FROM, Settings, expand, is_reference
from .intervals import format_table, median_interval, paired_ratio
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

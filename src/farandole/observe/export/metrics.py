"""The figures of a run as text for Prometheus, for the node exporter's textfile collector, or as OpenMetrics.

Labels: ``run`` on everything, ``rank`` and ``host`` where it is a rank's; never a label a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.vocabulary.events import Sample
from ..figures.step_parts import rows_of
from ..figures.summary import Summary, summarise
from ..records.rows import step_seconds
from ..records.timeline_reader import RankTimeline
from .source import ExportSource, needed, wall_seconds, write_output

COUNTER, GAUGE, SUMMARY, INFO = "counter", "gauge", "summary", "info"
_SUFFIXES = {COUNTER: "_total", INFO: "_info"}
QUANTILES = (0.5, 0.9, 0.99)
Labels = dict[str, str]
_RATE = "Throughput of all ranks, after warm-up."


def _family(name: str, kind: str, text: str, unit: str = "") -> Any:
    """Return an empty family; `name` ends with its unit where it has one, a counter's has no ``_total``."""
    return needed("prometheus_client.metrics_core", "prometheus").Metric(name, text, kind, unit)


def _add(family: Any, labels: Labels, value: float | None, suffix: str = "") -> None:
    """Add a value; what is not known, or not a number, is left out."""
    if value is not None and math.isfinite(value):
        family.add_sample(family.name + (suffix or _SUFFIXES.get(family.type, "")), labels, value)


def write_metrics(exposition: str, records: ExportSource, out: Path) -> list[Path]:
    """Write the metrics as a module `exposition` does, renamed into place as the collector wants it."""
    text: bytes = needed(exposition, "prometheus").generate_latest(RunCollector(records))
    return [write_output(out, [text])]


class RunCollector:
    """All metrics of a run that are known, as the exposition of `prometheus_client` takes them."""

    def __init__(self, records: ExportSource) -> None:
        self._records = records

    def collect(self) -> list[Any]:
        """Return the families: `prometheus_client.Metric`s."""
        records = self._records
        whole = {"run": records.name}
        summary = summarise(records.directory)
        ranks = [({**whole, "rank": str(t.started.rank), "host": t.started.host}, t) for t in records.timelines]
        made = [_info(records, whole), *_of_the_run(summary, whole), *_of_ranks(ranks), *_of_hosts(ranks)]
        return [family for family in made if family.samples]


def _info(records: ExportSource, labels: Labels) -> Any:
    family = _family("farandole_run", INFO, "What ran: versions and commit.")
    versions = records.facts.get("versions")
    known = dict(versions) if isinstance(versions, Mapping) else {}
    said = {
        "version": known.get("farandole"), "torch": known.get("torch"), "python": known.get("python"),
        "commit": records.facts.get("commit"), "started": records.facts.get("started"),
    }  # fmt: skip
    _add(family, {**labels, **{key: str(value) for key, value in said.items() if value}}, 1.0)
    return family


def _of_the_run(summary: Summary, labels: Labels) -> list[Any]:
    parts = _family("farandole_step_part_ratio", GAUGE, "Share of the step time by part, after warm-up.", "ratio")
    for part, value in (summary.shares or {}).items():
        if value is not None:
            _add(parts, {**labels, "part": part}, value)
    compared = summary.comparison
    gain, share = (compared.speedup, compared.efficiency) if compared else (None, None)
    single: list[tuple[str, str, str, float | None]] = [
        ("farandole_ranks", "Ranks of the run.", "", summary.size),
        ("farandole_training_seconds", "From the first step's begin to the last's end.", "seconds",
         summary.training_seconds),
        ("farandole_samples_per_second", _RATE, "", summary.samples_per_second),
        ("farandole_tokens_per_second", _RATE, "", summary.tokens_per_second),
        ("farandole_speedup_ratio", "Throughput beside one process.", "ratio", gain),
        ("farandole_efficiency_ratio", "Speedup over ranks.", "ratio", share),
        ("farandole_compute_deviation_ratio", "Standard deviation of the ranks' compute over its mean.", "ratio",
         summary.compute_deviation_share),
        ("farandole_loss", "The last loss that was logged, mean over the ranks.", "", summary.last_loss),
    ]  # fmt: skip
    gauges = []
    for name, text, unit, known in single:
        gauges.append(_family(name, GAUGE, text, unit))
        _add(gauges[-1], labels, known)
    return [*gauges, parts]


def _of_ranks(ranks: Sequence[tuple[Labels, RankTimeline]]) -> list[Any]:
    steps = _family("farandole_steps", COUNTER, "Optimizer steps.")
    samples = _family("farandole_samples", COUNTER, "Training samples.")
    sent = _family("farandole_sent_bytes", COUNTER, "Bytes sent in exchanges.", "bytes")
    phases = _family(
        "farandole_phase_seconds", COUNTER, "Time by phase; together the time of all steps.", "seconds"
    )
    times = _family("farandole_step_seconds", SUMMARY, "Time of a step.", "seconds")
    last = _family("farandole_last_step_timestamp_seconds", GAUGE, "When the last step ended.", "seconds")
    for labels, timeline in ranks:
        rows, thinned = timeline.steps, timeline.thinned
        _add(steps, labels, timeline.step_count)
        _add(samples, labels, sum(row.samples for row in rows) + sum(row.samples for row in thinned))
        _add(sent, labels, sum(row.sent_bytes for row in rows) + sum(row.sent_bytes for row in thinned))
        for phase, seconds in _phase_totals(timeline).items():
            _add(phases, {**labels, "phase": phase}, seconds)
        lengths = sorted(row.end_seconds - row.begin_seconds for row in rows)
        for quantile in QUANTILES if lengths else ():
            at = min(len(lengths) - 1, int(quantile * len(lengths)))
            _add(times, {**labels, "quantile": str(quantile)}, lengths[at])
        if lengths:
            _add(times, labels, sum(lengths) + sum(r.end_seconds - r.begin_seconds for r in thinned), "_sum")
            _add(times, labels, timeline.step_count, "_count")
        wall = wall_seconds(timeline.started.wall_time)
        if rows and wall:
            _add(last, labels, round(wall + rows[-1].end_seconds - timeline.started.begin_seconds, 3))
    return [steps, samples, sent, phases, times, last]


def _phase_totals(timeline: RankTimeline) -> dict[str, float]:
    """Return a rank's seconds by phase over the whole run."""
    total: dict[str, float] = {}
    for part in [*(step_seconds(row) for row in rows_of(timeline)), *(row.seconds for row in timeline.thinned)]:
        for phase, seconds in part.items():
            total[phase] = total.get(phase, 0.0) + seconds
    return total


_HOST: list[tuple[str, str, str, str]] = [
    ("farandole_resident_bytes", "bytes", "resident_bytes", "Memory of the process."),
    ("farandole_available_bytes", "bytes", "available_bytes", "Memory of the machine that is free."),
    ("farandole_process_cores", "", "process_cores", "Cores the process kept busy."),
    ("farandole_machine_busy_ratio", "ratio", "machine_share", "Share of the machine's cores that was busy."),
    ("farandole_accelerator_busy_ratio", "ratio", "gpu_share", "Share of time the accelerator was busy."),
    ("farandole_accelerator_used_bytes", "bytes", "gpu_used_bytes", "Memory in use on the accelerator."),
]


def _of_hosts(ranks: Sequence[tuple[Labels, RankTimeline]]) -> list[Any]:
    """The last sample of each rank."""
    found = []
    for name, unit, attribute, text in _HOST:
        family = _family(name, GAUGE, text + " Last sample.", unit)
        for labels, timeline in ranks:
            _add(family, labels, _last(timeline.samples, attribute))
        found.append(family)
    return found


def _last(samples: Sequence[Sample], attribute: str) -> float | None:
    known: list[Any] = [getattr(sample, attribute) for sample in samples]
    return next((value for value in reversed(known) if value is not None), None)

"""A typical step of a run as the step model takes it, to ask what it would be with another batch or codec."""

from __future__ import annotations

import statistics
from pathlib import Path

from ...core.step_model.prediction import MeasuredStep
from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.degrees import ORDER
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.events import OPTIMIZER, OTHER, SETUP_CRITICAL_BATCH, SETUP_ZERO
from ...core.vocabulary.rules import MOST_ZERO
from ..figures.figures import mean
from ..figures.inexact import codec_of
from ..records.run_reader import read_run
from .finders.codec_fixes import PREDICTED, SPARSE, CodecCosts, codec_ratio
from .finders.network import network_of
from .finders.step_table import StepTable, make_step_table

PREDICTED_UNTIMED = [name for name in PREDICTED if name != SPARSE]
"""Finding the largest is slow: nothing is said of it without its measured time."""
_DIVIDING = [name for name in ORDER if name not in ("data", "shard")]


def measured_step(run_directory: Path, costs: CodecCosts | None = None) -> MeasuredStep:
    """Return a typical step of a run of data parallelism.

    `costs`: CPU seconds of codecs for a byte of float32, where they were measured. Raises `DataError` when the
    directory is not a run's, and `ConfigError` when its records do not say what a step exchanges.
    """
    records = read_run(run_directory, for_diagnosis=True)
    table = make_step_table(records) if records.timelines else None
    if table is None or not table.steps:
        raise ConfigError(f"{run_directory}: no step is known of all ranks", remedy="train for 20 steps or more")
    if len(table.cells) < 2:
        raise ConfigError(f"{run_directory} is a run of one rank: nothing is exchanged", remedy="run it on two")
    _refuse_divided(run_directory, table)
    samples = sum(mean([float(cell.samples) for cell in own]) for own in table.cells)
    if samples <= 0:
        raise ConfigError(
            f"{run_directory}: samples are unknown",
            remedy="loader = fd.shard(loader), or fd.log(samples=...)",
        )
    cells = [cell for own in table.cells for cell in own]
    exposed = mean([cell.communication for cell in cells])
    counts = [len(row.exchanges) for own in table.rows for row in own]
    usual = max(1, statistics.mode(counts))
    network = network_of(table, exposed / usual)
    if network is None:
        raise ConfigError(
            f"{run_directory}: the times of buckets were not recorded",
            remedy="train with fd.distribute, and farandole run --run-dir",
        )
    fixed = mean([cell.phases.get(OPTIMIZER, 0.0) + cell.phases.get(OTHER, 0.0) for cell in cells])
    codec = codec_of(table.records)
    ratios = {codec: 1.0}
    notes = [
        "forward and backward are taken to grow in proportion to the samples: a measured run at another batch "
        "is surer"
    ]
    if codec == NONE:
        found = {
            name: codec_ratio(table, name)
            for name in PREDICTED
            if name in (PREDICTED_UNTIMED if costs is None else costs)
        }
        ratios.update({name: ratio for name, ratio in found.items() if ratio is not None})
        if costs is None:
            notes.append("the CPU time of codecs is not counted: --measure-codecs measures it here")
        notes.append("what a lossy codec costs in steps is not counted")
    critical = table.records.timelines[0].setup.get(SETUP_CRITICAL_BATCH)
    return MeasuredStep(
        ranks=records.size,
        global_batch=max(1, round(samples)),
        growing_seconds=max(0.0, table.step_seconds - fixed - exposed),
        fixed_seconds=fixed,
        exposed_seconds=exposed,
        exchanges=usual,
        buckets=tuple(network.buckets),
        link=network.link,
        codec=codec,
        ratios=ratios,
        codec_seconds_per_byte=dict(costs or {}),
        critical_batch=float(critical) if isinstance(critical, (int, float)) and critical > 0 else None,
        notes=(*notes, *table.notes),
    )


def _refuse_divided(run_directory: Path, table: StepTable) -> None:
    """Raise `ConfigError` where a step exchanges more than gradients after backward."""
    plan, setup = table.records.plan, table.records.timelines[0].setup
    divided = [f"{name} = {plan[name]}" for name in _DIVIDING if plan.get(name, 1) != 1]
    if setup.get(SETUP_ZERO) == MOST_ZERO or plan.get("zero") == MOST_ZERO:
        divided.append(f"zero = {MOST_ZERO}")
    if divided:
        raise ConfigError(
            f"{run_directory}: with {', '.join(divided)} a step exchanges more than gradients behind backward, "
            "which is not replayed",
            remedy="ask the planner: farandole plan",
        )

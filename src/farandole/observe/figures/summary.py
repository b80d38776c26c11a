"""The closing figures of a run, from what all its ranks recorded. Definitions: `docs/check/slow.md`.

Warm-up (the first three steps, or the first tenth if that is more) is left out of rates and shares,
and of the run compared with; training time counts everything.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.events import SETUP_FRONT_END, SETUP_SHARES
from ...core.vocabulary.run_files import METRICS, RUN, SUMMARY, TUNE, TUNED_PLAN, write_private
from ...core.vocabulary.text import in_columns
from ...core.vocabulary.units import format_bytes, format_rate, format_seconds, format_share
from ..records.rows import StepRow, ThinnedRow
from ..records.run_reader import RunRecords, read_facts, read_run
from ..records.timeline_reader import RankTimeline
from .figures import efficiency, mean, median, speedup, standard_deviation, throughput
from .inexact import (
    CriticalBatch,
    codec_notes,
    counted_steps,
    critical_batch_of,
    exchanges_none,
    few_steps,
    inexact_notes,
    sees_exchanges,
    warm_up,
)
from .prediction_check import PredictionCheck, check_prediction
from .step_parts import StepParts, shares_of, step_parts, undivided_share

MOST_EFFICIENCY = 1.02
"""A larger efficiency is no matter of sharing the work out, nor of noise."""
NOT_SEEN = (
    "no exchange of gradients was seen, so communication and waiting are unknown (part of compute): give "
    "fd.record the model as DistributedDataParallel wraps it"
)

LEAST_UNDIVIDED = 0.02
"""Share of the steps from which waiting for data counts as unknown."""
NOT_DIVIDED = (
    "computing and waiting for data are not told apart in all of this run (several steps of one call, a loop "
    "without callbacks, or a graph without marks), so the wait for data is unknown (part of compute)"
)


@dataclass(frozen=True)
class RankFigures:
    """One rank's part of the summary. Times in seconds, shares of the step time."""

    rank: int
    host: str
    steps: int
    step_seconds: float
    """Median."""
    compute_seconds: float
    """Mean."""
    shares: dict[str, float]
    """By part; without those that are not known."""
    mean_step_seconds: float
    """What the shares are of."""
    counted_steps: int
    """Steps that the figures are of."""
    batch_samples: int | None
    """Its samples of a batch at the end, where the plan balances them."""


@dataclass(frozen=True)
class BaselineComparison:
    """Beside the one-process run of the same work."""

    baseline: str
    samples_per_second: float
    speedup: float
    efficiency: float


@dataclass
class Summary:
    """The closing figures. None: not known."""

    size: int
    ranks: list[RankFigures] = field(default_factory=list)
    steps: int = 0
    warm_up_steps: int = 0
    training_seconds: float | None = None
    samples: int = 0
    rates: tuple[float | None, float | None] = (None, None)
    """Samples per second, and tokens."""
    step_seconds: float | None = None
    """Median."""
    shares: dict[str, float | None] | None = None
    """By part; None: not known."""
    sent_bytes_per_step: float | None = None
    critical_batch: CriticalBatch | None = None
    """Where `fd.noise_scale` measured it."""
    losses: tuple[float, float] | None = None
    """The first and the last."""
    comparison: BaselineComparison | None = None
    prediction: PredictionCheck | None = None
    """Beside what the plan predicts, if it does."""
    notes: list[str] = field(default_factory=list)
    """What is missing, in words."""

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all ranks, after the warm-up."""
        return self.rates[0]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that were given to `fd.log`, of all ranks."""
        return self.rates[1]

    @property
    def first_loss(self) -> float | None:
        """The first loss that was logged."""
        return None if self.losses is None else self.losses[0]

    @property
    def last_loss(self) -> float | None:
        """The last loss that was logged."""
        return None if self.losses is None else self.losses[1]

    @property
    def mean_step_seconds(self) -> float | None:
        """What the shares are of: the mean over ranks and steps."""
        return mean([rank.mean_step_seconds for rank in self.ranks]) if self.ranks else None

    @property
    def counted_steps(self) -> int:
        """Steps that the figures are of."""
        return min((rank.counted_steps for rank in self.ranks), default=0)

    @property
    def compute_deviation_seconds(self) -> float | None:
        """Standard deviation of the ranks' mean compute times a step; None without a rank."""
        return standard_deviation([rank.compute_seconds for rank in self.ranks]) if self.ranks else None

    @property
    def compute_deviation_share(self) -> float | None:
        """The same over their mean; None where no rank computed."""
        middle = mean([rank.compute_seconds for rank in self.ranks])
        return (self.compute_deviation_seconds or 0.0) / middle if middle else None

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values, as in ``summary.json``."""
        names = (
            "samples_per_second", "tokens_per_second", "first_loss", "last_loss", "mean_step_seconds",
            "counted_steps", "compute_deviation_seconds", "compute_deviation_share",
        )  # fmt: skip
        values = {"version": 1, **asdict(self), **{name: getattr(self, name) for name in names}}
        del values["losses"], values["rates"]
        return {**values, "prediction": None if self.prediction is None else self.prediction.to_mapping()}

    def to_text(self) -> str:
        """Return the closing table, at most 100 columns wide."""
        lines = [f"{name:<24} {text}" for name, text in _rows(self)]
        predicted = [] if self.prediction is None else ["", *self.prediction.to_lines()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes), *predicted])


def summarise(run_directory: Path, *, baseline: Path | None = None) -> Summary:
    """Compute the closing figures of a run.

    `baseline` is the run of one process to compare with; by default the newest run beside this one
    with one process and the same command. What is missing is said in `Summary.notes`.
    """
    records = read_run(run_directory)
    return summarise_records(records, notes=records.notes, baseline=baseline)


def summarise_records(records: RunRecords, *, notes: Sequence[str] = (), baseline: Path | None = None) -> Summary:
    """Compute the closing figures of a run that was read already; `notes` say what of it is missing."""
    size = records.size
    summary = Summary(size=size, notes=[*notes, *inexact_notes(records)])
    timelines = [timeline for timeline in records.timelines if timeline.step_count]
    if not timelines:
        summary.notes.append("no steps were recorded: the script did not train with farandole")
        return summary
    _fill(summary, timelines)
    summary.prediction = check_prediction(records)
    if size > 1:
        _compare(summary, records, baseline)
    return summary


def write_summary(run_directory: Path, summary: Summary) -> None:
    """Write ``summary.json`` and close ``metrics.jsonl`` with the summary."""
    mapping = summary.to_mapping()
    write_private(run_directory / SUMMARY, json.dumps(mapping, indent=1) + "\n")
    with (run_directory / METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "summary", **mapping}) + "\n")


def _fill(summary: Summary, timelines: Sequence[RankTimeline]) -> None:
    spans = [_Span.of(timeline) for timeline in timelines]
    summary.steps = max(timeline.step_count for timeline in timelines)
    summary.warm_up_steps = warm_up(min(timeline.step_count for timeline in timelines))
    first, last = max(span.first_step for span in spans), min(span.last_step for span in spans)
    first += summary.warm_up_steps
    summary.training_seconds = max(span.end_seconds - span.begin_seconds for span in spans)
    summary.samples = sum(row.samples for timeline in timelines for row in _all_rows(timeline))
    inside = [_within(timeline, first, last) for timeline in timelines]
    if not all(inside):
        summary.notes.append("no step was recorded by all ranks: there are no rates")
        return
    seconds = max(max(row.end_seconds for row in own) - min(row.begin_seconds for row in own) for own in inside)
    counted = [row for own in inside for row in own]
    if any(row.samples for row in counted):
        summary.rates = (throughput(sum(row.samples for row in counted), seconds), None)
    else:
        is_foreign = timelines[0].setup.get(SETUP_FRONT_END) is not None
        remedy = "take the loader from fd.shard, or call fd.log(samples=...)"
        why = "nothing told how large a batch is" if is_foreign else remedy
        summary.notes.append(f"samples are unknown: {why}")
    if any(row.tokens for row in counted):
        summary.rates = (summary.rates[0], throughput(sum(row.tokens or 0 for row in counted), seconds))
    steps = set(counted_steps(timelines))
    parts = [[part for part in own if part.step in steps] for own in step_parts(timelines)]
    summary.ranks = [_rank(timeline, own) for timeline, own in zip(timelines, parts, strict=True)]
    every = [part for own in parts for part in own]
    summary.shares = dict(shares_of(every))
    summary.step_seconds = median([part.seconds for part in every])
    sent = sum(row.sent_bytes for row in counted)
    if summary.size > 1 and not sees_exchanges(timelines):
        summary.shares |= dict.fromkeys(_OF_EXCHANGES)
        summary.ranks = [replace(rank, shares=_without(rank.shares, _OF_EXCHANGES)) for rank in summary.ranks]
        summary.notes.append(NOT_SEEN)
    elif sent or not exchanges_none(timelines):  # what activations send is not counted
        summary.sent_bytes_per_step = sent / max(1, sum(_steps_of(row) for row in counted))
    if undivided_share(every) >= LEAST_UNDIVIDED:
        summary.shares["data"] = None
        summary.ranks = [replace(rank, shares=_without(rank.shares, ("data",))) for rank in summary.ranks]
        summary.notes.append(NOT_DIVIDED)
    batch = summary.samples / summary.steps if summary.steps and summary.samples else None
    summary.critical_batch = critical_batch_of(timelines[0], batch)
    summary.losses = _losses(timelines)


_OF_EXCHANGES = ("communication", "waiting")


def _without(shares: Mapping[str, float], unknown: Sequence[str]) -> dict[str, float]:
    return {name: share for name, share in shares.items() if name not in unknown}


class _Span(NamedTuple):
    """From the first to the last step of a rank, those without a row of their own too."""

    first_step: int
    last_step: int
    begin_seconds: float
    end_seconds: float

    @classmethod
    def of(cls, timeline: RankTimeline) -> _Span:
        rows = _all_rows(timeline)
        return cls(
            min(_first_step(row) for row in rows),
            max(row.step if isinstance(row, StepRow) else row.last_step for row in rows),
            min(row.begin_seconds for row in rows),
            max(row.end_seconds for row in rows),
        )


def _all_rows(timeline: RankTimeline) -> list[StepRow | ThinnedRow]:
    return [*timeline.steps, *timeline.thinned]


def _first_step(row: StepRow | ThinnedRow) -> int:
    return row.step if isinstance(row, StepRow) else row.first_step


def _steps_of(row: StepRow | ThinnedRow) -> int:
    return 1 if isinstance(row, StepRow) else row.steps


def _within(timeline: RankTimeline, first: int, last: int) -> list[StepRow | ThinnedRow]:
    """Return the rows that begin with a step between `first` and `last`."""
    return [row for row in _all_rows(timeline) if first <= _first_step(row) <= last]


def _rank(timeline: RankTimeline, parts: Sequence[StepParts]) -> RankFigures:
    return RankFigures(
        rank=timeline.started.rank,
        host=timeline.started.host,
        steps=timeline.step_count,
        step_seconds=median([part.seconds for part in parts]),
        compute_seconds=mean([part.busy for part in parts]),
        shares=shares_of(parts),
        mean_step_seconds=mean([part.seconds for part in parts]),
        counted_steps=len(parts),
        batch_samples=_batch_samples(timeline),
    )


def _batch_samples(timeline: RankTimeline) -> int | None:
    shares = str(timeline.setup.get(SETUP_SHARES) or "").split()
    rank = timeline.started.rank
    return int(shares[rank]) if rank < len(shares) and shares[rank].isdecimal() else None


def _losses(timelines: Sequence[RankTimeline]) -> tuple[float, float] | None:
    """Return the first and the last logged loss, each the mean over the ranks weighted by samples."""
    by_step: dict[int, list[tuple[float, int]]] = {}
    for timeline in timelines:
        for row in timeline.steps:
            if row.loss is not None:
                by_step.setdefault(row.step, []).append((row.loss, row.samples))
        known = {row.step for row in timeline.steps}
        for end in timeline.loss_ends:
            if end.step not in known:
                by_step.setdefault(end.step, []).append((end.loss, end.samples))
    if not by_step:
        return None
    return weighted_loss(by_step[min(by_step)]), weighted_loss(by_step[max(by_step)])


def weighted_loss(values: Sequence[tuple[float, int]]) -> float:
    """Return the mean of (loss, samples) pairs by samples; the plain mean when samples are unknown."""
    count = sum(samples for _, samples in values)
    if not count:
        return sum(loss for loss, _ in values) / len(values)
    return sum(loss * samples for loss, samples in values if samples) / count


def _compare(summary: Summary, records: RunRecords, baseline: Path | None) -> None:
    if summary.samples_per_second is None:
        return
    chosen = baseline if baseline is not None else _sibling_of_one(records.directory, records.facts)
    if chosen is None:
        return
    alone = summarise(chosen)
    if alone.size != 1 or alone.samples_per_second is None:
        summary.notes.append(f"no speedup: {chosen} is not a run of one process with known samples")
        return
    gain = speedup(alone.samples_per_second, summary.samples_per_second)
    summary.comparison = BaselineComparison(
        str(chosen), alone.samples_per_second, gain, efficiency(gain, summary.size)
    )


def _sibling_of_one(run_directory: Path, facts: Mapping[str, Any]) -> Path | None:
    command = facts.get("command")
    if not command:
        return None
    candidates = []
    for path in run_directory.resolve().parent.glob(f"*/{RUN}"):
        other = read_facts(path.parent)
        if other.get("size") == 1 and other.get("command") == command and path.parent != run_directory.resolve():
            candidates.append((str(other.get("started", "")), path.parent))
    return max(candidates)[1] if candidates else None


def describe_efficiency(value: float) -> str:
    """Return an efficiency to be read; more than sharing the work out can give is explained."""
    if value <= MOST_EFFICIENCY:
        return f"efficiency {value:.2f}"
    return f"efficiency {value:.2f}: above 1, so the two runs differ in more than their ranks"


def _rows(summary: Summary) -> list[tuple[str, str]]:
    ranks = f"{summary.size} rank{'s' * (summary.size != 1)}"
    if summary.training_seconds is None:
        return [("ranks", ranks)]
    rows = [("training time", f"{format_seconds(summary.training_seconds)}  ({summary.steps} steps, {ranks})")]
    rates = [
        f"{format_rate(rate)} {unit}"
        for rate, unit in ((summary.samples_per_second, "samples/s"), (summary.tokens_per_second, "tokens/s"))
        if rate is not None
    ]
    if rates:
        rows.append(("throughput", "  ".join(rates)))
    if summary.comparison is not None:
        other = summary.comparison
        rows.append(("speedup", f"{other.speedup:.2f}x one process  ({describe_efficiency(other.efficiency)})"))
        rows.append(("", f"compared with {Path(other.baseline).name}"))
    if summary.step_seconds is not None and summary.mean_step_seconds is not None:
        few = few_steps(summary.counted_steps, summary.steps)
        text = f"{format_seconds(summary.mean_step_seconds)} mean, {format_seconds(summary.step_seconds)} median"
        rows.append(("step", f"{text}  ({few})" if few else text))
    if summary.shares is not None:
        shares = {name: "unknown" if s is None else format_share(s) for name, s in summary.shares.items()}
        text = f"compute {shares['compute']}  exposed communication {shares['communication']}"
        rows.append(("share of the step", text))
        rows.append(("", f"waiting for others {shares['waiting']}  data loading {shares['data']}"))
    if summary.size > 1 and summary.compute_deviation_seconds is not None:
        share = summary.compute_deviation_share or 0.0
        text = f"{format_seconds(summary.compute_deviation_seconds)} standard deviation of compute ({share:.1%})"
        rows.append(("load balance", text))
    samples = [str(rank.batch_samples) for rank in summary.ranks if rank.batch_samples is not None]
    if samples:
        rows.append(("batch, by rank", f"{' '.join(samples)} samples  (balance)"))
    if summary.size > 1 and summary.sent_bytes_per_step is not None:
        rows.append(("sent by a rank", f"{format_bytes(summary.sent_bytes_per_step)} a step"))
    if summary.critical_batch is not None:
        rows.append(("critical batch", summary.critical_batch.to_text()))
    if summary.last_loss is not None and summary.first_loss is not None:
        rows.append(("loss", f"{summary.first_loss:.4g} -> {summary.last_loss:.4g}"))
    return rows


# What ``farandole tune`` has tried in a run, from its file, and as lines for people.


def read_tuning(run_directory: Path) -> dict[str, Any] | None:
    """Return what is in the file of a tuned run; None where there is none that can be read."""
    try:
        found = json.loads((run_directory / TUNE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    try:
        verdict_of(found)
        trial_rows(found)
        texts = [*found["notes"], *found.get("loader", ())]
    except (TypeError, KeyError, ValueError, AttributeError, IndexError):
        return None  # not of ours
    return found if all(isinstance(text, str) for text in texts) else None


def describe_gain(gain: Mapping[str, Any] | None) -> str:
    """Return a gain with its interval: ``12.0 % shorter (10.1 to 13.2 %)``; empty for None."""
    if gain is None:
        return ""
    share, (low, high) = float(gain["share"]), gain["interval"]
    word, sign = ("shorter", 1) if share >= 0 else ("longer", -1)
    low, high = sorted((sign * 100 * low, sign * 100 * high))
    return f"{100 * abs(share):.1f} % {word} ({low:.1f} to {high:.1f} %)"


def describe_setting(setting: Mapping[str, Any]) -> str:
    """Return all keys of a setting with their values."""
    return ", ".join(
        f"{name} {format_bytes(value) if name.endswith('_bytes') else value}" for name, value in setting.items()
    )


def verdict_of(tuning: Mapping[str, Any]) -> str:
    """Return in one sentence what won, or why nothing was tried."""
    if "best" not in tuning:
        return f"Nothing of the exchange was tuned: {(tuning.get('notes') or ['no reason is known'])[0]}."
    gain = describe_gain(tuning.get("gain"))
    best, start = tuning["best"], tuning["start"]
    if not gain or best == start:
        return f"The settings stay as they were: {tuning['stopped']}."
    changed = {name: value for name, value in best.items() if value != start[name]}
    return f"{describe_setting(changed)}: steps are {gain}."


def trial_rows(tuning: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return step, setting, gain and verdict of each trial."""
    return [
        (
            str(trial["step"]),
            str(trial["changes"]),
            describe_gain(trial["gain"]) or "-",
            f"{trial['verdict']}: {trial['why']}" if trial["why"] else str(trial["verdict"]),
        )
        for trial in tuning.get("trials", ())
    ]


def tuning_page(
    tuning: Mapping[str, Any] | None, directory: str, command: str, typed: Sequence[str] = ()
) -> list[str]:
    """Return what the command prints at its end.

    `directory`: of the run; `command`: that was tuned; `typed`: the whole line, which may emulate hosts.
    """
    if tuning is None:
        return [f"nothing was tuned: the script did not call farandole.init (logs in {directory}/logs)"]
    lines = []
    rows = trial_rows(tuning)
    if rows:
        lines += [*in_columns([("after step", "tried", "gain", "verdict"), *rows], left=range(4)), ""]
    lines.append(verdict_of(tuning))
    lines += [f"loader: {said}" for said in tuning.get("loader", ())]
    if "best" not in tuning:
        return lines
    before, now = tuning["step_seconds_before"], tuning["step_seconds"]
    if before is not None and now is not None:
        lines.append(f"step at first {format_seconds(before)}, at last {format_seconds(now)}")
    lines.append(f"stopped: {tuning['stopped']}; {tuning['trial_steps']} steps ran by settings on trial")
    lines += [f"note: {note}" for note in tuning["notes"]]
    lines += [f"note: {note}" for note in codec_notes(str(tuning["best"].get("codec", NONE)))]
    end = next((at for at, word in enumerate(typed[2:], 2) if word in ("--", "farandole", "python")), 0)
    emulated = [*typed[:end], "--"] if end and typed[1] == "emulate" else []
    lines.append(f"next: {shlex.join([*emulated, 'farandole'])} run --plan {directory}/{TUNED_PLAN} -- {command}")
    return lines

"""Slow ranks: the extra time of each rank by phase, and how late its buckets are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from ...core.vocabulary.events import EXCHANGE, STEP_PHASES
from ..diagnose.finding import stands_out
from ..figures.figures import low_median, mean, median
from ..figures.step_parts import StepParts
from ..records.rows import StepRow
from .charts import WIDTH, Label, apart, frame, number, shape
from .content import Block, Chart, Run, Section, Table, Text, milliseconds, seconds

LEAST_SHARE = 0.02
"""Fraction of a step; less does not count as slow."""


def make(run: Run) -> Section | None:
    """Return who is late; None with fewer than two ranks."""
    if len(run.timelines) < 2:
        return None
    blocks: list[Block] = []
    extra = extra_seconds(run.counted_parts)
    step = _step_seconds(run)
    shown = worst_rows([[v or 0.0 for v in own.values()] for own in extra])
    names = list(extra[0]) if extra else []
    top = max((value for own in extra for value in own.values()), default=0.0)
    strongest = max(top, LEAST_SHARE * step)
    rows = [
        [str(run.ranks[i]), *(warm(milliseconds(value), value, strongest) for value in extra[i].values())]
        for i in shown
    ]
    note = f"The {len(shown)} slowest of {len(extra)} ranks." if len(shown) < len(extra) else ""
    title = "Milliseconds a step beyond the typical rank, by phase"
    blocks.append(Table(["rank", *names], rows, title=title, note=note))
    late = lateness(run) if run.one_clock else []
    if late and late[0]:
        most = max((value for own in late for value in own if value is not None), default=0.0)
        chosen = worst_rows([[v or 0.0 for v in own] for own in late])
        columns = [str(number) for number in range(min(len(late[0]), MOST_COLUMNS))]
        blocks.append(
            Chart(
                "Arrival of the gradients",
                heat_map(
                    [f"rank {run.ranks[i]}" for i in chosen], columns, [late[i][:MOST_COLUMNS] for i in chosen],
                    says="how late each rank is with each bucket", across_name="bucket", text=seconds,
                    top=max(most, LEAST_SHARE * step),
                ),
                note=_scale_note(most, "after the typical rank", len(chosen), len(late))
                + " A bucket cannot leave before the last rank has filled it.",
            )
        )  # fmt: skip
    elif not run.one_clock:
        blocks.append(
            Text("The clocks of the hosts cannot be compared, so arrivals of buckets cannot either.", quiet=True)
        )
    return Section("late", "Who is slow, and in which phase", blocks, _lead(run, extra, step))


def extra_seconds(parts: Sequence[Sequence[StepParts]]) -> list[dict[str, float]]:
    """Return by rank and phase how many seconds a step it takes beyond the typical rank, at least 0.

    The typical rank is the lower median: what at least half of the ranks have.
    """
    names = phase_names(parts)
    means = [{name: mean([part.phases.get(name, 0.0) for part in own]) for name in names} for own in parts]
    typical = {name: low_median([own[name] for own in means]) for name in names}
    return [{name: max(0.0, own[name] - typical[name]) for name in names} for own in means]


def phase_names(parts: Sequence[Sequence[StepParts]]) -> list[str]:
    """Return the names of all phases but the wait, in the order of a step; `other` last."""
    found = {name for own in parts for part in own for name in part.phases} - {EXCHANGE}
    known = [name for name in STEP_PHASES if name in found]
    return [*known, *sorted(found - set(known) - {"other"})][:11] + (["other"] if "other" in found else [])


def lateness(run: Run) -> list[list[float | None]]:
    """Return by rank and bucket how many seconds after the typical rank its last gradient is ready.

    The median over the steps: ranks that are late in different steps do not count as late.
    """
    totals: list[dict[int, list[float]]] = [{} for _ in run.timelines]
    by_step: list[dict[int, list[float]]] = [{row.step: _ready(row) for row in own} for own in run.counted]
    common = set.intersection(*(set(own) for own in by_step))
    for step in common:
        ready = [own[step] for own in by_step]
        for bucket in range(min(len(own) for own in ready)):
            middle = low_median([own[bucket] for own in ready])
            for rank, own in enumerate(ready):
                totals[rank].setdefault(bucket, []).append(max(0.0, own[bucket] - middle))
    count = max((len(own) for own in totals), default=0)
    return [[median(own[b]) if own.get(b) else None for b in range(count)] for own in totals]


def _ready(row: StepRow) -> list[float]:
    found = []
    for exchange in row.exchanges:
        if exchange.buckets:
            found += [
                b.launch_seconds if b.last_ready_seconds is None else b.last_ready_seconds
                for b in exchange.buckets
            ]
        else:
            found += exchange.launch_seconds
    return found


def worst_rows(values: Sequence[Sequence[float]]) -> list[int]:
    """Return which rows to show, in order: those with the largest values when there are too many."""
    worst = sorted(range(len(values)), key=lambda i: -max(values[i], default=0.0))
    return sorted(worst[:MOST_ROWS])


def _lead(run: Run, extra: Sequence[dict[str, float]], step: float) -> str:
    worst = max(
        ((value, i, name) for i, own in enumerate(extra) for name, value in own.items()), default=(0.0, 0, "")
    )
    value, i, name = worst
    if value < LEAST_SHARE * step:
        return "No rank stands out: all take about as long in every phase."
    started = run.timelines[i].started
    who = f"Rank {started.rank} on {started.host} takes {seconds(value)} more in {name} than the typical rank"
    if stands_out(differences(run.counted_parts, i, name)):
        return f"{who}, step after step."
    return f"No rank is slow in step after step. {who} on average: some steps are longer, others are not."


def differences(parts: Sequence[Sequence[StepParts]], rank: int, name: str) -> list[float]:
    """Return by step how many seconds a rank takes in a phase beyond the median of the others."""
    by_step: dict[int, list[float]] = {}
    for i, own in enumerate(parts):
        for part in own if i != rank else ():
            by_step.setdefault(part.step, []).append(part.phases.get(name, 0.0))
    return [p.phases.get(name, 0.0) - median(by_step[p.step]) for p in parts[rank] if p.step in by_step]


def _step_seconds(run: Run) -> float:
    lengths = [part.seconds for own in run.counted_parts for part in own]
    return sum(lengths) / max(1, len(lengths))


def _scale_note(top: float, what: str, shown: int, count: int) -> str:
    text = (
        f"Strongest: {seconds(top)} {what}."
        if top > 0
        else f"No rank is {what.replace('more than', 'slower than')}."
    )
    return text + (f" The {shown} slowest of {count} ranks." if shown < count else "")


# A heat map: one value a row and column, the darker the larger.


ROW = 22
MOST_ROWS = 32
MOST_COLUMNS = 64


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    says: str,
    across_name: str,
    text: Callable[[float], str],
    top: float,
) -> Markup:
    """Return a map of values from 0 (pale) to `top` (full); None is left blank. `text` writes a value."""
    width, body = WIDTH / max(1, len(columns)), []
    for r, own in enumerate(values):
        for c, value in enumerate(own):
            if value is None:
                continue
            strength = min(1.0, max(0.0, value / top)) if top > 0 else 0.0
            body.append(
                shape(
                    "rect", f"{rows[r]}, {across_name} {columns[c]}: {text(value)}", class_="heat",
                    x=number(c * width), y=r * ROW, width=number(width), height=ROW,
                    fill_opacity=f"{0.06 + 0.94 * strength:.2f}",
                )
            )  # fmt: skip
    up = [Label((r + 0.5) / len(rows), name) for r, name in enumerate(rows)]
    across = apart([Label((c + 0.5) / len(columns), name) for c, name in enumerate(columns)])
    return frame(
        "".join(body), ROW * len(rows), says=says, up=up, across=across, across_name=across_name, style="cells"
    )


def warm(text: str, value: float, top: float) -> Markup:
    """Return a number of a table on a ground the warmer the larger it is, up to `top`."""
    strength = min(1.0, max(0.0, value / top)) if top > 0 else 0.0
    if strength < 0.01:
        return Markup('<span class="warm none">{}</span>').format(text)
    return Markup('<span class="warm" style="--strength:{:.2f}">{}</span>').format(strength, text)

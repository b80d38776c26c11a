"""Where the time of a step went: of each rank, and over the steps."""

from __future__ import annotations

from markupsafe import Markup

from ...core.vocabulary.units import format_share
from ..figures.step_parts import StepParts
from .charts import Axes, limit, share_bar, shared, stacked_area
from .content import (
    NAMES,
    PARTS,
    STYLES,
    Block,
    Chart,
    Run,
    Section,
    Table,
    mean_parts,
    milliseconds,
    percent,
    plural,
    seconds,
)

MOST_RANKS = 32
NAMED = 4


def make(run: Run) -> Section | None:
    """Return the breakdown; None without a step."""
    if not run.timelines:
        return None
    means = [mean_parts(own) for own in run.counted_parts]
    shown = _shown(means)
    occurs = {name: any(mean[name] >= 0.0005 * (mean["seconds"] or 1.0) for mean in means) for name in PARTS}
    names = [name for name in PARTS if occurs[name] or name == "compute"]
    whole = max(mean["seconds"] for mean in means)
    rows = [_row(run, i, means[i], names, whole) for i in shown]
    hidden = any(mean["hidden"] > 0 for mean in means)
    head = ["rank", "host", "", "step", *(NAMES[name] for name in names)]
    note = "Means without the warm-up."
    if hidden:
        head.append(NAMES["hidden"])
        rows = [[*row, milliseconds(means[i]["hidden"])] for i, row in zip(shown, rows, strict=True)]
        note += (
            " Hidden communication is what was on the wire while a rank still computed: it adds nothing to the "
            "step, and is that of the exchange, not of a rank."
        )
    if len(shown) < len(means):
        note += f" The {len(shown)} ranks with the longest compute, of {len(means)}."
    legend = [(f"part-{name}", NAMES[name]) for name in names]
    blocks: list[Block] = [
        Table(head, rows, texts=3, note=note, title="By rank, milliseconds a step", legend=legend)
    ]
    over_time = _over_time(run, names)
    if over_time is not None:
        blocks.append(over_time)
    return Section("step", "Where the time of a step went", blocks, _lead(run, means))


def _lead(run: Run, means: list[dict[str, float]]) -> str:
    compute = sum(mean["compute"] for mean in means)
    # As in the run's closing lines: all but waits for others, for the network and for data.
    busy = (run.summary.shares or {}).get("compute")
    exposed = sum(mean["communication"] for mean in means)
    hidden = sum(mean["hidden"] for mean in means)
    text = f"{format_share(busy)} of the ranks' time is compute, with pauses and the rest." if busy else ""
    if not compute:
        text = "Computing and waiting for data are not told apart in this run."
    if hidden + exposed > 0 and hidden > 0:
        text += f" {percent(hidden / (hidden + exposed))} of the communication is hidden behind it."
    return text


def _shown(means: list[dict[str, float]]) -> list[int]:
    longest = sorted(range(len(means)), key=lambda i: -means[i]["compute"])[:MOST_RANKS]
    return sorted(longest)


def _row(run: Run, i: int, mean: dict[str, float], names: list[str], whole: float) -> list[str | Markup]:
    parts = [mean[name] for name in names]
    titles = [f"{NAMES[name]} {seconds(mean[name])}" for name in names]
    started = run.timelines[i].started
    bar = share_bar(parts, titles, [f"part-{name}" for name in names], whole=whole)
    return [
        str(started.rank), str(started.host), bar, milliseconds(mean["seconds"]), *map(milliseconds, parts)
    ]  # fmt: skip


def _over_time(run: Run, names: list[str]) -> Chart | None:
    """Stack the mean over the ranks that were there of each part, over all steps, warm-up too."""
    by_step: dict[int, list[StepParts]] = {}
    for own in run.parts:
        for part in own:
            by_step.setdefault(part.step, []).append(part)
    steps = sorted(by_step)
    series = [[1e3 * _mean(by_step[step], name) for step in steps] for name in names]
    lengths = {step: max(part.seconds for part in by_step[step]) for step in steps}
    peaks = [1e3 * lengths[step] for step in steps]
    top = limit(peaks)
    styles = [style for style in STYLES if style.removeprefix("part-") in names]
    axes = Axes("step", "ms a step", top=top)
    svg = stacked_area(steps, series, [NAMES[name] for name in names], styles, axes, peaks=peaks)
    if not svg:
        return None
    each = shared(len(steps))
    if each == 1:
        return Chart("Over the run", svg, note=_cut_off(lengths, top * 1e-3))
    legend = [("peak", f"the slowest of each {each} steps; the areas are their means")]
    return Chart("Over the run", svg, legend, _cut_off(lengths, top * 1e-3))


def _cut_off(lengths: dict[int, float], top: float) -> str:
    """Say which steps are taller than the chart."""
    taller = sorted(
        (step for step, seconds_ in lengths.items() if seconds_ > top * 1.001), key=lambda s: -lengths[s]
    )
    if not taller:
        return ""
    named = ", ".join(f"step {step} ({seconds(lengths[step])})" for step in taller[:NAMED])
    more = f" and {len(taller) - NAMED} more" if len(taller) > NAMED else ""
    return f"{plural(len(taller), 'step')} longer on a rank than the chart is tall: {named}{more}."


def _mean(parts: list[StepParts], name: str) -> float:
    return float(sum(getattr(part, name) for part in parts)) / len(parts)

"""How evenly the work is spread over the ranks."""

from __future__ import annotations

from ...figures.figures import standard_deviation
from ..content import Figures, Run, Section, mean_parts, number, percent, seconds


def make(run: Run) -> Section | None:
    """Return the figures; None with fewer than two ranks."""
    if len(run.timelines) < 2:
        return None
    computes = [mean_parts(own)["compute"] for own in run.counted_parts]
    mean = sum(computes) / len(computes)
    deviation = standard_deviation(computes)
    slowest = max(range(len(computes)), key=lambda i: computes[i])
    samples = [sum(row.samples for row in own) / max(1, len(own)) for own in run.counted]
    rows = [
        (
            "standard deviation of compute", seconds(deviation),
            f"{percent(deviation / mean)} of the mean" if mean > 0 else "",
        ),
        ("mean compute", seconds(mean), "a step, over the ranks"),
        (
            "slowest rank", seconds(computes[slowest]),
            f"rank {run.ranks[slowest]}" + (f", {computes[slowest] / mean:.2f}x the mean" if mean > 0 else ""),
        ),
    ]  # fmt: skip
    if any(samples):
        even = max(samples) - min(samples) <= 0.005 * max(samples)
        most = max(range(len(samples)), key=lambda i: samples[i])
        note = "all ranks alike" if even else f"rank {run.ranks[most]} has most, {number(max(samples))}"
        rows.append(("samples of a rank", number(sum(samples) / len(samples)), f"a step; {note}"))
    lead = ""
    if mean > 0:
        lead = f"With even work, the slowest rank would compute {seconds(max(computes) - mean)} less a step."
    return Section("balance", "Load balance", [Figures(rows)], lead)

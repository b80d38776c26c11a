"""The scaling benchmark's result for people: a table, and a page of HTML with the curve."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.run_files import write_private
from ...core.vocabulary.units import format_bytes, format_rate, format_seconds
from ..intervals import format_table
from ..machine import machine_line
from .scaling import to_words

HEAD = (
    "ranks", "scaling", "training", "step", "95 % interval", "samples/s", "speedup", "95 % interval", "efficiency",
    "communication", "waiting", "data", "load dev.", "cores", "memory",
)  # fmt: skip
_NAMES, _RATES = 2, 9
"""The columns that name a row, and where those of what was lost begin. A terminal has room for half."""


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row's texts, below `HEAD`."""
    low, high = row["step_interval"]
    least, most = row["speedup_interval"]
    busy = row["accelerator_share"]
    return [
        str(row["ranks"]),
        " ".join([row["mode"], *row["changes"]]),
        format_seconds(row["training_seconds"]),
        format_seconds(row["step_seconds"]),
        f"{format_seconds(low)} to {format_seconds(high)}",
        "" if row["samples_per_second"] is None else format_rate(row["samples_per_second"]),
        f"{row['speedup']:.2f}",
        f"{least:.2f} to {most:.2f}",
        f"{row['efficiency']:.2f}",
        f"{row['shares']['communication']:.1%}",
        f"{row['shares']['waiting']:.1%}",
        f"{row['shares']['data']:.1%}",
        "" if row["load_deviation"] is None else f"{row['load_deviation']:.1%}",
        f"{busy:.0%} GPU" if busy is not None else "" if row["busy_cores"] is None else f"{row['busy_cores']:.2f}",
        "" if row["resident_bytes"] is None else format_bytes(row["resident_bytes"]),
    ]


def format_scaling(result: dict[str, Any]) -> str:
    """Return the two halves of the table, and below them what to know."""
    lines = [
        *(f"{format_table(head, rows)}\n" for head, rows in halves(result)),
        *before_and_after(result),
        warm_up(result),
    ]
    return "\n".join([*lines, *failures(result), *(f"note: {note}" for note in result["notes"])])


def warm_up(result: dict[str, Any]) -> str:
    """Return a line on the steps of warm-up, and how often each size ran."""
    steps, rounds = max(row["warm_up_steps"] for row in result["rows"]), result["rounds"]
    return (
        f"warm-up: up to {steps} step{'s' * (steps != 1)} left out by their times;"
        f" {rounds} round{'s' * (rounds != 1)}"
    )


def before_and_after(result: dict[str, Any]) -> list[str]:
    """Return a line for each size that ran with two plans: step time and communication's share with either."""
    rows = {(row["mode"], row["ranks"], bool(row["changes"])): row for row in result["rows"]}
    lines = []
    for (mode, ranks, changed), after in rows.items():
        before = rows.get((mode, ranks, False))
        if changed and before is not None:
            shares = [row["shares"]["communication"] for row in (before, after)]
            lines.append(
                f"{' '.join(after['changes'])} on {ranks} ranks ({mode}): a step "
                f"{format_seconds(before['step_seconds'])} before, {format_seconds(after['step_seconds'])} after "
                f"({before['step_seconds'] / after['step_seconds']:.2f}x); communication {shares[0]:.1%} of it "
                f"before, {shares[1]:.1%} after"
            )
    return lines


def halves(result: dict[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """Return what was reached, then what was lost to what and used: each a head and rows of texts."""
    rows = [[*HEAD], *(cells(row) for row in result["rows"])]
    reached = [row[:_RATES] for row in rows]
    lost = [[*row[:_NAMES], *row[_RATES:]] for row in rows]
    return [(half[0], half[1:]) for half in (reached, lost)]


def failures(result: dict[str, Any]) -> list[str]:
    """Return a line for each size that has no numbers."""
    return [
        f"no numbers for {gone['ranks']} rank{'s' * (gone['ranks'] > 1)} ({gone['mode']}): {gone['reason']}"
        for gone in result["failed"]
    ]


WIDTH, HEIGHT, MARGIN = 560, 320, 48
_ASIDE = 6
"""Pixels between the bars of two modes at one size."""


def chart(result: dict[str, Any]) -> dict[str, Any]:
    """Return the curve's places: lines and points by mode, the perfect line, ticks. Pixels from the top left."""
    most = max(row["ranks"] / row["beside_ranks"] for row in result["rows"])
    top = max([most, *(row["speedup_interval"][1] for row in result["rows"])])

    def place(ranks: float, speedup: float) -> tuple[float, float]:
        across = MARGIN + (WIDTH - 2 * MARGIN) * ranks / most
        return round(across, 1), round(HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * speedup / top, 1)

    series = []
    lines = list(dict.fromkeys((row["mode"], tuple(row["changes"])) for row in result["rows"]))
    for i, (mode, changes) in enumerate(lines):
        own = [row for row in result["rows"] if (row["mode"], tuple(row["changes"])) == (mode, changes)]
        aside = _ASIDE * (i - (len(lines) - 1) / 2)
        name = " ".join([mode, *changes])
        points = [
            {
                "at": _moved(place(row["ranks"] / row["beside_ranks"], row["speedup"]), aside),
                "low": place(0, row["speedup_interval"][0])[1],
                "high": place(0, row["speedup_interval"][1])[1],
                "text": f"{row['ranks']} ranks, {name}: {row['speedup']:.2f}x, efficiency {row['efficiency']:.2f}",
            }
            for row in own
        ]
        series.append({"mode": mode, "name": name, "changed": bool(changes), "points": points})
    ticks = sorted({(row["ranks"], place(row["ranks"] / row["beside_ranks"], 0)[0]) for row in result["rows"]})
    levels = [(level, place(0, level)[1]) for level in range(0, int(top) + 1, max(1, int(top) // 5))]
    return {"series": series, "ideal": (place(0, 0), place(most, most)), "ticks": ticks, "levels": levels}


def _moved(at: tuple[float, float], aside: float) -> tuple[float, float]:
    return round(at[0] + aside, 1), at[1]


def write_html(result: dict[str, Any], path: Path) -> None:
    """Write the page. Raises `ConfigError` when it cannot be written."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("farandole.bench.scaling", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    page = environment.get_template("scaling.html.j2").render(
        result=result, tables=halves(result), command=shlex.join(to_words(result)), warm_up=warm_up(result),
        machine=machine_line(result["machine"]), chart=chart(result),
        gains=before_and_after(result), failures=failures(result),
        width=WIDTH, height=HEIGHT, margin=MARGIN, notes=result["notes"],
    )  # fmt: skip
    write_result(path, page)


def write_result(path: Path, text: str) -> None:
    """Write a result. Raises `ConfigError` when it cannot be written."""
    try:
        write_private(path, text)
    except OSError as problem:
        raise ConfigError(f"cannot write {path}: {problem.strerror or problem}", remedy="choose another") from None

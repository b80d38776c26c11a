"""The top of the page: the run in one sentence, and its main figures."""

from __future__ import annotations

import math

from ...core.vocabulary.units import format_rate, format_share
from ..diagnose.verdict import SAVING
from ..figures.inexact import few_steps
from ..figures.summary import describe_efficiency
from .content import Run, number_of, plural, seconds


def headline(run: Run) -> tuple[str, str]:
    """Return the run in one sentence, as short as a heading, and what could be saved; empty: nothing is known."""
    text = sentence(run)
    what, mark, rest = text.partition(SAVING)
    return (f"{what}.", f"About {rest}") if mark else (text, "")


def sentence(run: Run) -> str:
    """Return the run in one sentence."""
    if not run.timelines:
        ranks = plural(run.summary.size, "rank") if run.summary.size else "A run of unknown size"
        return f"{ranks}: no step was recorded by farandole" + (
            "; the curves are rank 0's." if run.metrics else "."
        )
    return run.diagnosis.verdict


def scope(run: Run) -> str:
    """Return what the figures are of: ranks, steps and time."""
    summary = run.summary
    parts = [plural(summary.size, "rank")] if summary.size else []
    if run.timelines:
        parts.append(plural(summary.steps, "step"))
        parts.append(seconds(summary.training_seconds))
        hosts = len({timeline.started.host for timeline in run.timelines})
        parts.insert(1, plural(hosts, "host"))
    elif run.metrics:
        parts.append(plural(int(run.metrics[-1]["step"]), "step"))
    return ", ".join(parts)


def figures(run: Run) -> list[tuple[str, str, str]]:
    """Return name, value and a word on it. With ranks missing, sums are lower bounds and say so."""
    summary = run.summary
    if not run.timelines:
        return _from_metrics(run)
    missing = run.missing_ranks
    least = "at least " if missing else ""
    beside = f"{missing} of {summary.size} ranks not counted" if missing else ""
    few = few_steps(summary.counted_steps, summary.steps) or _after_warm_up(run)
    middle = f"median {seconds(summary.step_seconds)}" + (f"; {few}" if few else "")
    rows = [("step, mean", seconds(summary.mean_step_seconds), middle)]
    rate, token_rate = summary.samples_per_second, summary.tokens_per_second
    rows.append(("samples/s", "unknown" if rate is None else least + format_rate(rate), beside))
    if token_rate is not None:
        rows.append(("tokens/s", least + format_rate(token_rate), beside))
    whole, shares = summary.mean_step_seconds or math.nan, summary.shares or {}
    named = [
        ("communication", "exposed communication"),
        ("waiting", "waiting for others"),
        ("data", "data loading"),
    ]
    for name, title in named if summary.size > 1 else named[-1:]:
        share = shares.get(name)
        rows.append(
            (title, "unknown", "")
            if share is None
            else (title, format_share(share), f"{seconds(share * whole)} a step")
        )
    gain = summary.comparison
    if gain is not None:
        note = describe_efficiency(gain.efficiency) + (", at least" if missing else "")
        rows.append(("speedup", f"{least}{gain.speedup:.2f}x", note))
    if summary.last_loss is not None and summary.first_loss is not None:
        rows.append(("loss", f"{summary.last_loss:.4g}", f"from {summary.first_loss:.4g}"))
    return rows


def _after_warm_up(run: Run) -> str:
    count = run.summary.warm_up_steps
    return f"without {plural(count, 'warm-up step')}" if count else ""


def _from_metrics(run: Run) -> list[tuple[str, str, str]]:
    if not run.metrics:
        return []
    last = run.metrics[-1]
    rows = [("step", seconds(number_of(last, "seconds")), "the last recorded")]
    rate, loss = number_of(last, "samples_per_second"), number_of(last, "loss")
    if math.isfinite(rate):
        rows.append(("samples/s", format_rate(rate), "rank 0's, times the ranks"))
    if math.isfinite(loss):
        rows.append(("loss", f"{loss:.4g}", "rank 0's"))
    return rows

"""Exchanges inside of phases, of activations, stepped parameters and rows: what they cost beyond waiting.

[Note: fewer ranks of a degree] With half as many ranks a model has half the samples of a step, as there are twice
as many models, in smaller rings (`core.step_model.comm_cost`). What is summed of gradients grows, uncounted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...core.step_model.comm_cost import ring_bytes
from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.degrees import REST
from ...core.vocabulary.units import format_bytes, format_seconds
from ..figures.figures import mean
from .facts.evidence import LEAST_SHARE, confidence, format_cost
from .facts.finding import Finding, Fix, Gain
from .facts.proposals import command_with
from .facts.step_table import StepTable
from .finders.communication import INT8_SHARE

_WORDS: Mapping[str, str] = {
    "tensor": "ranks that share layers exchange activations for",
    "context": "ranks that share sequences exchange keys and values for",
    "expert": "tokens travel to experts and back for",
    "shard": "stepped parameters travel to all ranks for",
    "rows": "rows of tables travel to servers and back for",
}
_ALONE: Mapping[str, Mapping[str, Any]] = {
    "tensor": {"tensor_recipe": {}, "sequence_parallel": False},
    "context": {"context_kind": "auto"},
    "expert": {"expert_codec": NONE},
}
"""Keys that only a degree above 1 allows."""


def find_inner(table: StepTable) -> list[Finding]:
    """Return a finding for each kind of exchange inside of phases that takes long."""
    cells = [cell for own in table.cells for cell in own]
    found = []
    for degree, words in _WORDS.items():
        seconds = mean([cell.inner.get(degree, 0.0) for cell in cells])
        share = seconds / table.step_seconds
        if share < LEAST_SHARE:
            continue
        waited = mean([row.inner_seconds.get(degree, 0.0) for own in table.rows for row in own]) - seconds
        sent = mean([float(row.inner_bytes) for own in table.rows for row in own])
        evidence = (
            f"a rank sends {format_bytes(sent)} a step inside of its phases, and computes nothing meanwhile; it "
            f"waits {format_seconds(waited)} more for ranks that come later",
        )
        cost = format_cost(seconds, share)
        fixes = tuple(_FIXES.get(degree, _fewer)(table, degree, seconds))
        kind = f"{degree}-communication"
        found.append(
            Finding(kind, f"{words} {cost}", seconds, share, evidence=evidence, fixes=fixes,
                    confidence=confidence(len(table.steps)))
        )  # fmt: skip
    return found


def _fewer(table: StepTable, degree: str, seconds: float) -> list[Fix]:
    """Return half the ranks of a degree. See [Note: fewer ranks of a degree]."""
    plan = table.records.plan
    ranks = plan.get(degree)
    if not isinstance(ranks, int) or ranks < 2 or ranks % 2:
        return []
    half = ranks // 2
    changes: dict[str, Any] = {degree: half}
    if half == 1:
        changes |= {name: value for name, value in _ALONE[degree].items() if plan.get(name, value) != value}
    if isinstance(plan.get("data"), int) and plan["data"] > 1:
        changes["data"] = REST
    left = ring_bytes(0.5, half) / ring_bytes(1.0, ranks)
    gain = Gain(
        seconds * (1 - left),
        f"half the samples of a model and a ring of {half}: {left:.0%} of the bytes; the gradients' exchange "
        "grows, which is not counted",
    )
    what = f"{degree} = {half}, and twice as many models, if one still fits (farandole estimate; zero = 3 helps)"
    return [Fix(what, command_with(table.records, changes), gain, changes)]


def _of_experts(table: StepTable, degree: str, seconds: float) -> list[Fix]:
    fewer = _fewer(table, degree, seconds)
    if table.records.plan.get("expert_codec", NONE) != NONE:
        return fewer
    changes = {"expert_codec": "int8"}
    gain = Gain(seconds * (1 - INT8_SHARE), "exposed time in proportion to the bytes of float32 tokens")
    return [
        Fix("tokens that travel as 8-bit numbers", command_with(table.records, changes), gain, changes),
        *fewer,
    ]


def _of_shards(table: StepTable, degree: str, seconds: float) -> list[Fix]:
    changes = {"overlap_gather": True}
    gain = Gain(seconds, "all of it, if the next forward pass takes longer")
    what = "let stepped parameters arrive while the next forward pass runs"
    return [Fix(what, command_with(table.records, changes), gain, changes)]


def _of_rows(table: StepTable, degree: str, seconds: float) -> list[Fix]:
    what = "let servers apply rows when they come, if the training bears it: ranks do not wait for a common step"
    return [Fix(what, "RowTable(..., staleness=None)")]


_FIXES: Mapping[str, Callable[[StepTable, str, float], list[Fix]]] = {
    "expert": _of_experts,
    "shard": _of_shards,
    "rows": _of_rows,
}

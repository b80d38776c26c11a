"""Exchanges inside of steps that are none of gradients, of activations to losses: what they cost beyond waiting.

[Note: fewer ranks of a degree] With half as many ranks there are twice as many models in smaller rings
(`core.step_model.link`), and a step has twice the samples: a loader's batch is that of a rank. For the same
samples each model has half of them. But a rank then holds and exchanges the gradients of twice as many parameters:
once in so many samples, at the rate of the exchanges that were seen. Ranks of a context group have all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.step_model.link import ring_bytes
from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.degrees import ORDER, OTHER_SAMPLES, REST, degrees_of
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.events import FORWARD, SETUP_ELEMENTS, SETUP_ROWS_IN_STEP
from ...core.vocabulary.rank_lists import name_ranks
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.units import format_bytes, format_seconds
from ..figures.figures import mean
from .facts.finding import LEAST_SHARE, SHOWN_RANKS, Finding, Fix, Gain, confidence, format_cost
from .facts.proposals import command_with
from .facts.step_table import StepTable, is_pipeline
from .finders.communication import INT8_SHARE

_WORDS: Mapping[str, str] = {
    "tensor": "ranks that share layers exchange activations for",
    "context": "ranks that share sequences exchange keys and values for",
    "expert": "tokens travel to experts and back for",
    "shard": "stepped parameters travel to all ranks for",
    "rows": "rows of tables travel to servers and back for",
    "loss": "fd.step waits for the mean loss of all ranks for",
}
_ALONE: Mapping[str, Mapping[str, Any]] = {
    "tensor": {"tensor_recipe": {}, "sequence_parallel": False},
    "context": {"context_kind": "auto"},
    "expert": {"expert_codec": NONE},
}
"""Keys that only a degree above 1 allows."""


def find_inner(table: StepTable) -> list[Finding]:
    """Return a finding for each kind of exchange inside of phases that takes long: where it takes longest."""
    found = []
    for degree, words in _WORDS.items():
        by_rank = [mean([cell.inner.get(degree, 0.0) for cell in own]) for own in table.cells]
        seconds = max(by_rank)
        share = seconds / table.step_seconds
        if share < LEAST_SHARE:
            continue
        waited = mean([row.inner_seconds.get(degree, 0.0) for own in table.rows for row in own]) - mean(by_rank)
        sent = mean([float(row.inner_bytes) for own in table.rows for row in own])
        evidence = [
            f"a rank sends {format_bytes(sent)} a step inside of its phases, and computes nothing meanwhile; it "
            f"waits {format_seconds(waited)} more for ranks that come later"
        ]
        slow = tuple(rank for rank, own in zip(table.ranks, by_rank, strict=True) if own > seconds / 2)
        if len(slow) < len(by_rank):
            who = name_ranks(slow, most=SHOWN_RANKS)
            evidence.append(f"so it is for {who}; of others it takes from {format_seconds(min(by_rank))}")
        found.append(
            Finding(f"{degree}-communication", f"{words} {format_cost(seconds, share)}", seconds, share,
                    slow if len(slow) < len(by_rank) else (), evidence=tuple(evidence),
                    fixes=tuple(_FIXES.get(degree, _fewer)(table, degree, seconds)),
                    confidence=confidence(len(table.steps)))
        )  # fmt: skip
    return found


def _fewer(table: StepTable, degree: str, seconds: float) -> list[Fix]:
    """Return half the ranks of a degree, if that saves time. See [Note: fewer ranks of a degree]."""
    plan = table.records.plan
    try:
        degrees = degrees_of(Plan.from_mapping(plan, where="run.json"), table.records.size)
    except ConfigError:  # of another version
        return []
    ranks = getattr(degrees, degree)
    half = ranks // 2
    kept = 1.0 if degree in OTHER_SAMPLES else 0.5  # those keep their samples, and so their tokens
    left = ring_bytes(kept, max(1, half)) / ring_bytes(1.0, max(2, ranks))
    more = 0.0 if degree == "context" else _more_gradients(table, 2 * degrees.size_over(OTHER_SAMPLES))
    saved = seconds * (1 - left) - more / 2
    if ranks % 2 or saved < LEAST_SHARE * table.step_seconds:
        what = f"a faster way between the ranks of a {degree} group: one host for all of them, or a faster link"
        return [Fix(what, "", Gain(seconds, "all of it, if what is sent takes no time"))]
    changes: dict[str, Any] = {degree: half}
    if half == 1:
        changes |= {name: value for name, value in _ALONE[degree].items() if plan.get(name, value) != value}
    if not any(plan.get(name) == REST for name in ORDER if name not in ("data", degree)):
        changes |= {"data": REST} if plan.get("data", REST) != REST else {}
    gain = Gain(
        saved,
        f"for the same samples: {kept:.0%} of the bytes of a step in groups of {half}: {left:.0%} are left; less "
        f"{format_seconds(more)} for more gradients every second time",
    )
    what = f"{degree} = {half}, and twice as many models, if one still fits (farandole estimate; zero = 3 helps)"
    return [Fix(what, command_with(table.records, changes), gain, changes)]


def _more_gradients(table: StepTable, replicas: int) -> float:
    """Return the seconds that an exchange takes longer if each rank holds twice as many parameters."""
    elements = table.records.timelines[0].setup.get(SETUP_ELEMENTS)
    rows = [row for own in table.rows for row in own]
    inner = sum(sum(cell.inner.values()) - cell.inner.get("loss", 0.0) for own in table.cells for cell in own)
    if not isinstance(elements, int) or inner <= 0:
        return 0.0
    sent = mean([float(sum(exchange.sent_bytes for exchange in row.exchanges)) for row in rows])
    more = max(0.0, ring_bytes(4 * 2 * elements, replicas) - sent)
    return more * inner / max(1, sum(row.inner_bytes for row in rows))


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
    plan = table.records.plan
    fixes: list[tuple[str, Gain, dict[str, Any]]] = []
    has_network = len({each.host for each in table.records.timelines}) > 1  # in one host they travel exactly
    if has_network and plan.get("weight_codec", NONE) == NONE and not plan.get("bf16_parameters"):
        gain = Gain(seconds * (1 - INT8_SHARE), "exposed time in proportion to the bytes of float32")
        fixes.append(("parameters whose changes travel as 8-bit numbers", gain, {"weight_codec": "int8"}))
    if not plan.get("overlap_gather"):
        forward = mean([cell.phases.get(FORWARD, 0.0) for own in table.cells for cell in own])
        gain = Gain(min(seconds, forward), f"what fits behind forward, {format_seconds(forward)}")
        what = "let stepped parameters arrive while the next forward pass runs"
        fixes.append((what, gain, {"overlap_gather": True}))
    fixes.sort(key=lambda fix: -fix[1].seconds)
    return [Fix(what, command_with(table.records, changes), gain, changes) for what, gain, changes in fixes]


def _of_rows(table: StepTable, degree: str, seconds: float) -> list[Fix]:
    shorter = Fix("shorter rows (dim) or fewer ids a batch, or a faster link to the servers")
    if not any(each.setup.get(SETUP_ROWS_IN_STEP) for each in table.records.timelines):
        return [shorter]
    what = "let servers apply rows when they come, if the training bears it: ranks do not wait for a common step"
    return [Fix(what, "staleness=None  # argument of fd.RowTable"), shorter]


def _of_losses(table: StepTable, degree: str, seconds: float) -> list[Fix]:
    larger = Fix("larger batches: one mean a step, however many samples it has")
    if is_pipeline(table) or (table.records.plan.get("micro_batches") or 1) != 1:
        return [larger]
    paste = "loss_function(model(inputs), targets).backward()  # instead of fd.step"
    what = "a pass of your own, if all targets count and there is no balance or z: its loss is this rank's alone"
    return [Fix(what, paste, Gain(seconds, "all of it: only gradients are exchanged then")), larger]


_FIXES = {"expert": _of_experts, "shard": _of_shards, "rows": _of_rows, "loss": _of_losses}

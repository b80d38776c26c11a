"""Exchanges inside of steps that are none of gradients, of activations to losses: what they cost beyond waiting.

[Note: fewer ranks of a degree] With half as many ranks there are twice as many models in smaller rings
(`core.link`), and a step has twice the samples: a loader's batch is that of a rank. For the same
samples each model has half of them. But a rank then holds and exchanges the gradients of twice as many parameters:
once in so many samples, at the rate of the exchanges that were seen. Ranks of a context group have all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.link import ring_bytes
from ...core.vocabulary import events
from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.degrees import ORDER, OTHER_SAMPLES, REST, degrees_of
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.events import (
    FORWARD,
    OPTIMIZER,
    SETUP_BATCH,
    SETUP_ELEMENTS,
    SETUP_OPTIMIZER,
    SETUP_PIPELINE_RANK,
    SETUP_ROWS_IN_STEP,
    SetupValue,
)
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import name_ranks
from ...core.vocabulary.units import format_bytes, format_seconds, format_share
from ..figures.figures import mean
from ..figures.prediction_check import PipelineSeconds, measure_pipeline
from ..records.run_reader import RunRecords
from .communication import INT8_SHARE
from .finding import LEAST_SHARE, SHOWN_RANKS, Finding, Fix, Gain, command_with, confidence, format_cost
from .step_table import StepTable, is_pipeline

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


# Pipelines: what the schedule's bubble, a slow stage and the transfers between stages cost.
#
# See [Note: three reasons to wait] in `figures.prediction_check`.
#
# [Note: what a micro-batch costs] However small it is, its passes go through the parameters six times: weights are
# read twice, a gradient is written, and added to what is there. SGD goes through them three times, Adam seven:
# what the optimizer takes tells what one micro-batch more takes, of which half of the bubble's share is waited for
# again. Its transfers are half as large and twice as many: what nothing hides of them is taken to double.


def find_pipeline(table: StepTable) -> list[Finding]:
    """Find what pipelines wait for."""
    measured = measure_pipeline(table.records.timelines, table.rows)
    if measured is None:
        return []
    computing = measured.computing
    costs = {
        "bubble": measured.bubble,
        "slow-stage": measured.slow_stage,
        "pipeline-communication": measured.transfer,
    }
    found = []
    places = [(each.rank, int(each.setup[SETUP_PIPELINE_RANK] or 0)) for each in table.records.timelines]
    for kind, seconds in costs.items():
        share = seconds / table.step_seconds
        if share < LEAST_SHARE:
            continue
        cost = format_cost(seconds, share)
        evidence = (f"computing of a step by rank of the pipeline: {', '.join(map(format_seconds, computing))}",)
        title, fixes, late = _words(kind, cost, seconds, measured, table, ranks=places)
        found.append(
            Finding(kind, title, seconds, share, late, evidence=evidence, fixes=fixes,
                    confidence=confidence(len(table.steps)))
        )  # fmt: skip
    return found


def _words(
    kind: str,
    cost: str,
    seconds: float,
    measured: PipelineSeconds,
    table: StepTable,
    *,
    ranks: list[tuple[int, int]],
) -> tuple[str, tuple[Fix, ...], tuple[int, ...]]:
    """`ranks`: each rank with its place in the pipeline."""
    computing, schedule, records = measured.computing, measured.schedule, table.records
    if kind == "bubble":
        fix = _more_micro_batches(table, measured, seconds)
        return (
            f"the bubble of schedule {schedule.name} with {schedule.micro_batches} micro-batches takes {cost}",
            (fix,),
            (),
        )
    if kind == "slow-stage":
        slow = computing.index(max(computing))
        more = max(computing) / measured.usual_seconds - 1
        stages = schedule.stages_of(slow)
        name = " and ".join(f"stage {stage} ({_begin_of(stage, measured.cuts)})" for stage in stages)
        verb = "take" if len(stages) > 1 else "takes"
        gain = Gain(seconds, "all of it, if the layers can be divided evenly")
        fix = Fix("move a cut (pipeline_cuts), or cut the model into smaller layers", "", gain)
        if records.plan.get("pipeline_cuts"):
            cuts: dict[str, list[str]] = {"pipeline_cuts": []}
            fix = Fix("let the layers be measured and divided", command_with(records, cuts), gain, cuts)
        late = tuple(rank for rank, place in ranks if place == slow)
        if measured.slow_ranks[slow]:
            late = measured.slow_ranks[slow]
            name = f"{name_ranks(late, most=SHOWN_RANKS)} of {name}"
            verb = "takes" if len(late) == 1 else "take"
            fix = Fix(
                "look for what is slower there than on ranks with the same stage: clocks, temperature, hooks",
                "", Gain(seconds, "all of it, if it is as fast as they are"),
            )  # fmt: skip
        return f"{name} {verb} {more:.0%} longer than the mean, which costs {cost}", (fix,), late
    fix = Fix("cut where less travels, or use fewer and larger micro-batches")
    return f"transfers between stages take {cost} that nothing hides", (fix,), ()


def _more_micro_batches(table: StepTable, measured: PipelineSeconds, seconds: float) -> Fix:
    """Return twice as many micro-batches, if that saves time. See [Note: what a micro-batch costs]."""
    count, setup = measured.schedule.micro_batches, table.records.timelines[0].setup
    stepping = max(mean([cell.phases.get(OPTIMIZER, 0.0) for cell in own]) for own in table.cells)
    more = count * stepping * (2 if setup.get(SETUP_OPTIMIZER) == "SGD" else 1)
    more = more * (1 + seconds / 2 / measured.usual_seconds) + measured.transfer
    batch, saved = setup.get(SETUP_BATCH), seconds / 2 - more
    if saved < LEAST_SHARE * table.step_seconds or (isinstance(batch, int) and batch % (2 * count)):
        return Fix(f"a larger batch, a multiple of {2 * count}, in so many micro-batches")
    changes = {"micro_batches": 2 * count}
    gain = Gain(saved, f"half of it, less {format_seconds(more)} that {count} micro-batches more cost")
    return Fix("more and smaller micro-batches", command_with(table.records, changes), gain, changes)


def _begin_of(stage: int, cuts: list[str]) -> str:
    return f"from {cuts[stage - 1]!r}" if 0 < stage <= len(cuts) else "from the input"


# Mixtures of experts whose experts get unequal numbers of tokens: its cost, or a note if it costs no time.


LEAST_IMBALANCE = 1.5
"""Times the mean; below, the busiest expert is as busy as chance makes it with few tokens."""


def find_experts(table: StepTable) -> list[Finding]:
    """Find ranks whose experts get more tokens than others': all ranks wait for them in each layer."""
    setups = [timeline.setup for timeline in table.records.timelines]
    seconds_by_rank = [_number(setup.get(events.SETUP_EXPERT_SECONDS)) for setup in setups]
    if len(setups) < 2 or _imbalance(setups[0]) < LEAST_IMBALANCE:
        return []
    slowest = max(seconds_by_rank)
    seconds = slowest - mean(seconds_by_rank)
    share = seconds / table.step_seconds
    if share < LEAST_SHARE:
        return []
    rank = table.ranks[seconds_by_rank.index(slowest)]
    gain = Gain(seconds, "the time of the busiest rank's experts less the mean of all ranks")
    fixes = (
        Fix(
            "give the load-balancing loss more weight, so that the router spreads the tokens",
            "loss = loss + farandole.router_loss(model, balance=0.05)",
            gain,
        ),
        Fix(
            "or bound what an expert takes; what is over it is dropped",
            "capacity_factor=1.25  # argument of farandole.MixtureOfExperts",
        ),
    )
    evidence = (
        _of_setup(setups[0]),
        f"experts of a rank take {format_seconds(min(seconds_by_rank))} to {format_seconds(slowest)} a step, "
        "forward and backward",
    )
    title = f"experts get unequal numbers of tokens, and ranks wait for rank {rank}: {format_cost(seconds, share)}"
    return [
        Finding("experts", title, seconds, share, (rank,), evidence=evidence, fixes=fixes,
                confidence=confidence(len(table.steps)))
    ]  # fmt: skip


def unequal_experts(records: RunRecords) -> list[str]:
    """Say which layer's experts get unequal numbers of tokens, whatever it costs: the others learn little."""
    setup = records.timelines[0].setup if records.timelines else {}
    return [_of_setup(setup)] if _imbalance(setup) >= LEAST_IMBALANCE else []


def _of_setup(setup: dict[str, SetupValue]) -> str:
    dropped = _number(setup.get(events.SETUP_EXPERT_DROPPED))
    return (
        f"expert {setup.get(events.SETUP_EXPERT_BUSIEST)} of {setup.get(events.SETUP_EXPERT_LAYER)} gets "
        f"{_imbalance(setup):.2g} times the mean of its {setup.get(events.SETUP_EXPERTS)} experts"
    ) + (f"; {format_share(dropped)} of the choices were dropped" if dropped else "")


def _imbalance(setup: dict[str, SetupValue]) -> float:
    return _number(setup.get(events.SETUP_EXPERT_IMBALANCE))


def _number(value: SetupValue) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0

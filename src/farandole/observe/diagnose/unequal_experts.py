"""Mixtures of experts whose experts get unequal numbers of tokens: its cost, or a note if it costs no time."""

from __future__ import annotations

from ...core.vocabulary import events
from ...core.vocabulary.events import SetupValue
from ...core.vocabulary.units import format_seconds, format_share
from ..figures.figures import mean
from ..read.run_reader import RunRecords
from .facts.finding import LEAST_SHARE, Finding, Fix, Gain, confidence, format_cost
from .facts.step_table import StepTable

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

"""How a tuner begins: what was measured of the job, what the step model says, and what earlier runs found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.environ.tune_settings import TuneSettings
from ...core.step_model.bucket_plan import ExchangeKeys
from ...core.vocabulary.codec_spec import CodecSpec
from ...core.vocabulary.errors import PlanError
from .decision import TuneDecision, TuneLimits
from .history import TuneHistory, facts_of
from .outcome import TuningRecord
from .predicted import layout_of, rank_by_prediction
from .search import PatternSearch, bucket_grid
from .switching import ExchangeSwitch


def begin_decision(
    here: World, switch: ExchangeSwitch, settings: TuneSettings, limits: TuneLimits
) -> TuningRecord:
    """Measure what predictions need; return what rank 0 decides with. Called by all ranks between two steps."""
    outcome = TuningRecord(switch.plan)
    is_lossy = settings.allow_lossy or not CodecSpec.parse(switch.keys.codec).is_exact
    look = switch.main.look(lossy=is_lossy)
    outcome.facts = facts_of(here, switch)
    batches = switch.micro_batches
    divisions = all_gather_json(
        here, "tuning/micro-batches", [switch.problem, 1 if batches is None else batches.least_samples]
    )
    if here.rank:
        return outcome
    names = _open_names(switch, settings)
    problems = [f"{problem} (rank {rank})" for rank, (problem, _) in enumerate(divisions) if problem]
    if problems and "micro_batches" in names:
        names.remove("micro_batches")
        outcome.notes.append(f"micro_batches stay as they are: {problems[0]}")
    sizes = bucket_grid(sum(switch.main.bucket_bytes))
    ranked: list[ExchangeKeys] = []
    if look is None:
        outcome.notes.append("the link was not measured: sizes are tried without a prediction")
    else:
        ranked, refused = rank_by_prediction(
            look, switch.keys, switch.plan, names, sizes, lossy=settings.allow_lossy
        )
        outcome.notes += refused
    search = outcome.search = PatternSearch(ranked, sizes, names, partial(layout_of, look))
    search.most_micro_batches = min(samples for _, samples in divisions)
    if look is not None and switch.keys.route in look.links:
        rate = look.links[switch.keys.route].bytes_per_second
        outcome.link_bytes_per_second = rate if math.isfinite(rate) else None
    if settings.cache:
        outcome.history = TuneHistory(outcome.facts["fingerprint"])
        earlier = outcome.history.find(outcome.link_bytes_per_second)
        if earlier is not None and _may_be(earlier[0], switch, names):
            search.predicted, search.is_settled = [earlier[0], *ranked], earlier[1]
            outcome.notes.append(
                f"an earlier run found {earlier[0].to_text()}: tried first (--no-cache: search anew)"
            )
    outcome.decision = TuneDecision(switch.keys, search, limits)
    return outcome


def _open_names(switch: ExchangeSwitch, settings: TuneSettings) -> list[str]:
    """Return the keys that may change: a route and a number of connections that the plan asks for stay."""
    asked = {"route": switch.plan.route != "auto", "connections": switch.plan.connections != 1}
    return [name for name in settings.names if not asked.get(name, False)]


def _may_be(keys: ExchangeKeys, switch: ExchangeSwitch, names: Sequence[str]) -> bool:
    """Return whether what an earlier run found may be tried in this one."""
    now = switch.keys.to_mapping()
    if any(value != now[name] and name not in names for name, value in keys.to_mapping().items()):
        return False
    try:
        keys.on(switch.plan)
    except PlanError:
        return False
    return keys.route in switch.main.parts.routes

"""The online tuner of one job: measures steps, meets the other ranks, and switches with them.

[Note: one step for all] Ranks meet after a step whose number all know from the last order. Each says how long its
steps took; rank 0 decides, and its answer names the setting of the next steps and the step of the next meeting. So
all switch between the same two steps, and no message of the exchange itself is changed for it.

[Note: when to switch] At the end of the leading optimizer's step: gradients were exchanged and used, what codecs
keep is final, and nothing is on its way. A model whose passes are held (`fd.accumulate`) over that moment keeps
its gradients where they are; new buckets take them from there.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...comm.autotune.autotuner import FASTEST_SLACK, assign_codecs
from ...comm.autotune.profile import Look
from ...comm.device.accelerator import memory_of
from ...comm.world.store_sync import all_gather_json, decide_on_first
from ...comm.world.world import World
from ...core.bucket_plan import BucketPlan, ExchangeKeys
from ...core.env import TuneSettings
from ...core.job_plan import resolve_plan
from ...core.step_model import CANDIDATES, StepProfile, buckets_of, predict_step
from ...core.vocabulary.codec_spec import NONE, CodecSpec
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.events import SETUP_TUNING, Event, Logged, Setup
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import write_notice
from ...core.vocabulary.units import format_bytes, format_seconds
from ...launch.doctor.facts import read_memory
from ...parallel.data.tuned_micro_batches import TunedMicroBatches
from ..data.worker_cores import TunedLoaders
from .decision import BlockOrder, PatternSearch, TuneDecision, TuneLimits, bucket_grid, slowest
from .outcome import ExchangeSwitch, TuneHistory, TuningRecord, facts_of, total_gain, why_not

# Whether memory is about to run out on this rank, so that nothing that takes more may stay.
LEAST_SHARE = 0.03
"""Share of the memory, the host's or the accelerator's, that must stay available."""


def memory_alarm(device: torch.device) -> str:
    """Return what is wrong; empty where nothing is, or nothing is known."""
    memory = memory_of(device)
    if memory is not None:
        unused = memory.reserved - memory.allocated
        return _judge(memory.free + unused, memory.total, f"the memory of {device}")
    found = read_memory()
    available, total_bytes = found["memory_available_bytes"], found["memory_bytes"]
    if available is None or total_bytes is None:
        return ""
    return _judge(available, total_bytes, "the memory of the host")


def has_room(device: torch.device, sharers: int) -> bool:
    """Return whether this process could hold twice what it holds. `sharers`: ranks with the same host memory."""
    memory = memory_of(device)
    if memory is not None:
        return memory.free >= memory.reserved
    available = read_memory()["memory_available_bytes"]
    return available is not None and available >= sharers * _held_bytes()


def _held_bytes() -> int:
    """Return the memory of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _judge(available_bytes: int, total_bytes: int, what: str) -> str:
    if available_bytes >= LEAST_SHARE * total_bytes:
        return ""
    return f"{what} is nearly used up ({format_bytes(available_bytes)} of {format_bytes(total_bytes)} left)"


_WARM_STEPS = 3
"""The first steps of a run make buckets, optimizer states and caches."""


class OnlineTuner:
    """Tunes one job. A recorder, too: of what the script says about itself. See [Note: one step for all]."""

    def __init__(self, here: World, settings: TuneSettings, directory: Path | None) -> None:
        self._here, self._settings, self._directory = here, settings, directory
        self._limits = TuneLimits(settings.trials, settings.budget)
        self._switch: ExchangeSwitch | None = None
        self._outcome: TuningRecord | None = None
        self._last_end = 0.0
        self._seconds: list[float] = []
        """Duration of the steps since the last meeting."""
        self._meeting = self._skip_until = 0
        """Steps after which the ranks meet, and up to which none is counted."""
        self._problem = ""
        """Why the last switch did not happen."""
        self._total_steps = settings.steps
        self.is_over = False

    def start(self) -> None:
        """Begin with the next step."""
        self._here.session.is_tuned = True
        if "loader_workers" in self._settings.names:
            self._here.session.keep(TunedLoaders, TunedLoaders)
        if "micro_batches" in self._settings.names:
            self._here.session.keep(TunedMicroBatches, partial(TunedMicroBatches, self._here))
        self._here.session.steps.after_step(self.after_step)
        self._here.session.call_in_forked_child(self.forget)

    def record(self, event: Event) -> None:
        """Take note of how long the run is, if the script says so."""
        if isinstance(event, Logged) and event.total_steps is not None and self._settings.steps is None:
            self._total_steps = event.total_steps

    def close(self) -> None:
        """Write down what is known, when the run ends."""
        has_ended, self.is_over = not self.is_over, True
        if self._here.rank:
            return
        if has_ended:
            self._conclude("the run has ended")
        loaders = self._here.session.kept(TunedLoaders)
        if self._outcome is not None and loaders is not None:
            self._outcome.loader = [said for trials in loaders.trials.values() for said in trials.said]
            self._outcome.write(self._directory)

    def forget(self) -> None:
        """In a forked child: tune nothing."""
        self.is_over = True

    # -- steps -----------------------------------------------------------------------------------

    def after_step(self, step: int) -> None:
        """Count a step; meet the other ranks after that which the last order named."""
        now = time.monotonic()
        if self.is_over:
            return
        if self._switch is None:
            self._begin(step)
        elif step > self._skip_until:
            self._seconds.append(now - self._last_end)
        if step == self._meeting and not self.is_over:
            self._meet(step)
        self._last_end = time.monotonic()  # what a meeting takes is no part of a step

    def _begin(self, step: int) -> None:
        reason = why_not(self._here)
        if reason:
            self.is_over = True
            self._here.session.drop(TunedMicroBatches)
            if self._here.rank == 0:
                write_notice(f"tune: nothing of the exchange is tuned: {reason}")
                self._write_reason(reason)
            return
        self._switch = ExchangeSwitch(self._here)
        self._skip_until = step + _WARM_STEPS
        self._meeting = self._skip_until + self._limits.block_steps
        self._say("warming up")

    def _meet(self, step: int) -> None:
        switch = self._switch
        assert switch is not None, "it was made at the first step"
        if self._outcome is None:
            self._outcome = begin_decision(self._here, switch, self._settings, self._limits)
        report = {
            "step": step,
            "seconds": [round(each, 7) for each in self._seconds],
            "wait": round(switch.wait_seconds, 7),
            "alarm": self._problem or memory_alarm(self._here.device),
            "models": switch.is_changed,
            "total": self._total_steps,
            "micro_batches": switch.problem,
            "room": has_room(self._here.device, self._here.local_size),
        }
        order = decide_on_first(self._here, "tuning", report, partial(self._decide, self._outcome))
        keys = ExchangeKeys.from_mapping(order["keys"])
        self._problem = switch.to(keys)
        self._skip_until = step + int(order["skip"])
        self._meeting = self._skip_until + max(1, int(order["count"]))
        self._seconds = []
        self._say("" if order["last"] else str(order["text"]))
        if order["last"]:
            self.is_over = True
            if keys.micro_batches == switch.start.micro_batches:
                self._here.session.drop(TunedMicroBatches)
            if self._here.rank == 0:
                self._conclude("")
        elif self._here.rank == 0:
            self._outcome.write(self._directory)

    def _decide(self, outcome: TuningRecord, reports: list[dict[str, Any]]) -> dict[str, Any]:
        """On rank 0: say what comes next. See [Note: one step for all]."""
        decision = outcome.decision
        assert decision is not None, "rank 0 decides"
        order: BlockOrder[ExchangeKeys]
        search = outcome.search
        assert search is not None, "rank 0 searches"
        search.has_room = all(each["room"] for each in reports)
        refusals = [f"{each['micro_batches']} (rank {rank})" for rank, each in enumerate(reports)
                    if each["micro_batches"] and "micro_batches" in search.names]  # fmt: skip
        if len({each["step"] for each in reports}) > 1:
            order = decision.abandon("the ranks count different steps")
        elif any(each["models"] for each in reports):
            order = decision.abandon("models were distributed, or dropped, while settings were tried")
        elif refusals and all(
            each.setting.micro_batches == decision.start.micro_batches for each in decision.trials
        ):
            search.names = [name for name in search.names if name != "micro_batches"]
            outcome.notes.append(f"micro_batches stay as they are: {refusals[0]}")
            return self._decide(outcome, reports)
        elif refusals:
            order = decision.withdraw(f"micro_batches cannot change: {refusals[0]}")
        else:
            alarms = [f"rank {rank}: {each['alarm']}" for rank, each in enumerate(reports) if each["alarm"]]
            block = slowest(
                [each["seconds"] for each in reports], [each["wait"] for each in reports], "; ".join(alarms[:1])
            )
            order = decision.take(block, reports[0]["step"], reports[0]["total"])
        return {
            "keys": order.setting.to_mapping(), "skip": order.skip, "count": order.count, "text": order.text,
            "last": order.is_last,
        }  # fmt: skip

    # -- what is said ------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._here.session.recorder.record(Setup({SETUP_TUNING: text}))

    def _write_reason(self, reason: str) -> None:
        self._outcome = TuningRecord(resolve_plan(None), notes=[reason])
        self._outcome.write(self._directory)

    def _conclude(self, ended: str) -> None:
        outcome = self._outcome
        if outcome is None or outcome.decision is None:
            write_notice("tune: the run ended before anything was measured")
            self._write_reason("the run ended before anything was measured")
            return
        decision = outcome.decision
        if ended:
            decision.abandon(ended)
        outcome.keep()
        outcome.write(self._directory)
        gain = total_gain(decision)
        what = f"{len(decision.trials)} trial{'s' * (len(decision.trials) != 1)}; {decision.stopped}"
        if gain is None or decision.block is None:
            write_notice(f"tune: the settings stay as they are ({what})")
            return
        low, high = gain.interval
        write_notice(
            f"tune: {decision.incumbent.to_text(decision.start)}: {gain.share:.1%} shorter steps ({low:.1%} to "
            f"{high:.1%}), {format_seconds(decision.block.median_seconds)} a step ({what})"
        )


def open_tuner(here: World, settings: TuneSettings, directory: Path | None) -> OnlineTuner:
    """Return the tuner of this job, started."""
    tuner = here.session.keep(OnlineTuner, partial(OnlineTuner, here, settings, directory))
    tuner.start()
    return tuner


# How a tuner begins: what was measured of the job, what the step model says, and what earlier runs found.


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


# The settings that the step model holds for best, from what was measured of the job. Pure.


_MIB = 2**20
_WORTH_A_TRIAL = 1.1
"""A route or codec is not tried if its best step is predicted this many times as long as the present one."""
_APART = 4
"""Factor between the bucket sizes of one route and codec that are both tried: nearer ones are searched later."""


def predicted_seconds(look: Look, keys: ExchangeKeys) -> float:
    """Return what a step takes by `keys`, as the step model says."""
    profile = look.profiles[keys.route]
    return predict_step(profile, look.links[keys.route], _bucket_plan(profile, keys)).seconds


def layout_of(look: Look | None, keys: ExchangeKeys) -> Hashable:
    """Return what is the same for settings that exchange the same buckets in the same way."""
    if look is None:
        return keys
    profile = look.profiles[keys.route]
    buckets = buckets_of(profile, _bucket_plan(profile, keys))
    return keys.route, keys.codec, keys.connections, keys.micro_batches, tuple(len(bucket) for bucket in buckets)


def rank_by_prediction(
    look: Look, now: ExchangeKeys, plan: Plan, names: Sequence[str], sizes: Sequence[int], *, lossy: bool
) -> tuple[list[ExchangeKeys], list[str]]:
    """Return the settings to try, the best first, and why some are none.

    Args:
        look: what was measured.
        now: the setting in force.
        plan: the plan of the job.
        names: keys that may change.
        sizes: bucket sizes to choose from, in bytes.
        lossy: whether codecs that lose precision may be tried.
    """
    groups: list[list[tuple[float, ExchangeKeys]]] = []
    refused: list[str] = []
    for route in look.profiles if "route" in names else [now.route]:
        codecs = CANDIDATES if lossy and "codec" in names else (now.codec,)
        fastest = float("inf")  # of the gentler codecs on this route
        for codec in codecs:
            like = replace(now, route=route, codec=codec)  # type: ignore[arg-type]
            try:
                like.on(plan)
            except PlanError as problem:
                refused.append(problem.message)
                continue
            group = _group(look, like, names, sizes)
            if group and group[0][0] * FASTEST_SLACK < fastest:
                fastest = group[0][0]
                groups.append(group)
    is_known = now.codec in look.profiles[now.route].speeds
    limit = _WORTH_A_TRIAL * predicted_seconds(look, now) if is_known else float("inf")
    groups = sorted((each for each in groups if each[0][0] <= limit), key=lambda group: group[0][0])
    ranked = [group[0][1] for group in groups]
    for _, keys in groups[0] if groups else []:
        if all(not _is_near(keys, other) for other in ranked if other.codec == keys.codec):
            ranked.append(keys)
    return ranked, refused


def _group(
    look: Look, like: ExchangeKeys, names: Sequence[str], sizes: Sequence[int]
) -> list[tuple[float, ExchangeKeys]]:
    """Return the settings of one route and codec with what is predicted for them, the best first."""
    profile = look.profiles[like.route]
    if like.codec not in profile.speeds:
        return []
    if like.codec != NONE and set(assign_codecs(profile, like.codec).values()) == {NONE}:
        return []
    found = []
    for size in sizes if "bucket_bytes" in names else [like.bucket_bytes]:
        firsts = {min(_MIB, size), size} if "first_bucket_bytes" in names else {like.first_bucket_bytes}
        for first in sorted(firsts):
            keys = replace(like, bucket_bytes=size, first_bucket_bytes=first)
            found.append((predicted_seconds(look, keys), keys))
    return sorted(found, key=lambda each: each[0])


def _is_near(one: ExchangeKeys, other: ExchangeKeys) -> bool:
    return 1 / _APART < one.bucket_bytes / other.bucket_bytes < _APART


def _bucket_plan(profile: StepProfile, keys: ExchangeKeys) -> BucketPlan:
    codecs = {} if keys.codec == NONE else assign_codecs(profile, keys.codec)
    return BucketPlan(codecs, keys.bucket_bytes, keys.first_bucket_bytes)

"""The online tuner of one job: measures steps, meets the other ranks, and switches with them.

[Note: one step for all] Ranks meet after a step whose number all know from the last order. Each says how long its
steps took; rank 0 decides, and its answer names the setting of the next steps and the step of the next meeting. So
all switch between the same two steps, and no message of the exchange itself is changed for it.

[Note: when to switch] At the end of the leading optimizer's step: gradients were exchanged and used, what codecs
keep is final, and nothing is on its way. A model whose passes are held (`fd.accumulate`) over that moment keeps
its gradients where they are; new buckets take them from there.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..comm.device.accelerator import memory_of
from ..comm.engine.reducer import GradientReducer
from ..comm.world.store_sync import all_gather_json, decide_on_first
from ..comm.world.world import World
from ..core.bucket_plan import ExchangeKeys
from ..core.env import SETTINGS, TuneSettings, read_cache_directory, read_elastic_settings
from ..core.host.process_status import resident_bytes
from ..core.job_plan import resolve_plan
from ..core.vocabulary.codec_spec import AUTO, CodecSpec
from ..core.vocabulary.errors import CommError, ConfigError, PlanError
from ..core.vocabulary.events import SETUP_TUNING, Event, Logged, Setup
from ..core.vocabulary.run_files import TUNE, TUNED_PLAN, write_private
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.sync_spec import EVERY_STEP
from ..core.vocabulary.text import write_notice
from ..core.vocabulary.units import format_bytes, format_seconds
from ..launch.doctor.facts import read_memory
from ..parallel.data.tuned_micro_batches import TunedMicroBatches
from ..parallel.model import DistributedModel
from ..parallel.optim.one_bit_adam import OneBitAdam
from .data.worker_cores import TunedLoaders
from .tune_decision import (
    ADOPTED,
    NOT_FINISHED,
    PatternSearch,
    StepGain,
    TuneDecision,
    TuneLimits,
    bucket_grid,
    layout_of,
    rank_by_prediction,
    slowest,
)

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
    return available is not None and available >= sharers * (resident_bytes() or 0)


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
        search = decision.search
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
    search = PatternSearch(ranked, sizes, names, partial(layout_of, look))
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
    return keys.route in switch.main.tuning.routes


# What a tuned run has tried: the file in the run directory, the plan that won, and the text at the end.


VERSION = 1


@dataclass
class TuningRecord:
    """What is known so far; written after every decision, so that it survives the run."""

    plan: Plan
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What tells jobs apart whose best settings may differ."""
    notes: list[str] = field(default_factory=list)
    decision: TuneDecision | None = None
    history: TuneHistory | None = None
    """Where what won is kept for later runs; None: nowhere."""
    link_bytes_per_second: float | None = None
    """As it was measured; None where no link is crossed, or it was not."""
    loader: list[str] = field(default_factory=list)
    """What was tried of the data loader's workers."""

    def to_mapping(self) -> dict[str, Any]:
        """Return the JSON of the file."""
        found: dict[str, Any] = {"version": VERSION, "facts": dict(self.facts), "notes": self.notes}
        decision = self.decision
        if decision is not None:
            found |= {
                "start": decision.start.to_mapping(),
                "best": decision.incumbent.to_mapping(),
                "stopped": decision.stopped,
                "trial_steps": decision.spent_steps,
                "step_seconds_before": None
                if decision.first_block is None
                else decision.first_block.median_seconds,
                "step_seconds": None if decision.block is None else decision.block.median_seconds,
                "gain": _gain(total_gain(decision)),
                "trials": [
                    {
                        "step": trial.step,
                        "setting": trial.setting.to_mapping(),
                        "changes": trial.setting.to_text(trial.instead_of),
                        "verdict": trial.verdict or NOT_FINISHED,
                        "why": trial.why,
                        "rounds": len(trial.tried),
                        "gain": _gain(trial.gain),
                    }
                    for trial in decision.trials
                ],
            }
        if self.loader:
            found["loader"] = self.loader
        return found

    def write(self, directory: Path | None) -> None:
        """Write both files; a disk that is full or gone ends no training."""
        if directory is None:
            return
        with suppress(OSError):
            write_private(directory / TUNE, json.dumps(self.to_mapping(), indent=1) + "\n")
            if self.decision is not None:
                write_private(directory / TUNED_PLAN, self.tuned_plan().to_toml())

    def keep(self) -> None:
        """Keep what won for the next run of this job."""
        if self.history is not None and self.decision is not None and self.decision.first_block is not None:
            settled = not self.decision.is_cut_short
            self.history.keep(self.decision.incumbent, self.link_bytes_per_second, settled=settled)

    def tuned_plan(self) -> Plan:
        """Return the plan of the job with the settings that won.

        A route that the plan leaves open stays so. What was predicted for other settings is left out.
        """
        assert self.decision is not None, "something was measured"
        keys, start = self.decision.incumbent, self.decision.start
        if keys == start:
            return self.plan
        tuned = replace(keys.on(self.plan), predicted={})
        return replace(tuned, route=self.plan.route) if keys.route == start.route else tuned


def total_gain(decision: TuneDecision) -> StepGain | None:
    """Return what all adopted settings gained together: as measured, else one after the other; None: none was."""
    adopted = [trial.gain for trial in decision.trials if trial.verdict == ADOPTED and trial.gain is not None]
    if adopted and decision.overall is not None:
        return decision.overall
    left, low, high = 1.0, 1.0, 1.0
    for gain in adopted:
        left *= 1 - gain.share
        low *= 1 - gain.interval[1]
        high *= 1 - gain.interval[0]
    return StepGain(1 - left, (1 - high, 1 - low)) if adopted else None


def _gain(gain: StepGain | None) -> dict[str, Any] | None:
    if gain is None:
        return None
    return {"share": round(gain.share, 5), "interval": [round(each, 5) for each in gain.interval]}


# What won in earlier runs of the same job: one small file a job in the cache directory of the user.
#
# [Note: the same job] Jobs are the same where the shapes and types of the parameters, what trains, the ranks by
# host and the plan's other keys are. Links change: an entry holds the rate that was measured, and is used for
# links within a factor of two of it. What is read is only what is tried first: a file that says nonsense costs one
# trial.


_VERSION = 1
_SAME_LINK = 2.0
_MOST_ENTRIES = 8
_LARGEST_FILE_BYTES = 2**20
_NOT_OF_THE_JOB = (*SETTINGS, "predicted")
"""Keys of the plan that jobs of one kind may differ in."""


def facts_of(here: World, switch: ExchangeSwitch) -> dict[str, Any]:
    """Return what tells jobs apart, and a fingerprint of it; called by all ranks, complete on each of them."""
    places = all_gather_json(here, "tuning/places", [here.host, here.device.type])
    parameters = [
        [name, list(parameter.shape), str(parameter.dtype), parameter.requires_grad]
        for reducer in switch.reducers
        for name, parameter in reducer.buckets.table.named
    ]
    others = {key: value for key, value in switch.plan.to_mapping().items() if key not in _NOT_OF_THE_JOB}
    told = json.dumps([parameters, places, others], sort_keys=True)
    return {
        "fingerprint": hashlib.sha256(told.encode()).hexdigest()[:16],
        "ranks": here.size,
        "hosts": sorted({host for host, _ in places}),
        "parameter_bytes": sum(parameter.nbytes for reducer in switch.reducers
                               for _, parameter in reducer.buckets.table.named),
    }  # fmt: skip


class TuneHistory:
    """The file of one job. Reading and writing never raise: without a cache, runs start from nothing."""

    def __init__(self, fingerprint: str) -> None:
        cache = read_cache_directory()
        self._path = None if cache is None else Path(cache) / "farandole" / "tune" / f"{fingerprint}.json"

    def find(self, link_bytes_per_second: float | None) -> tuple[ExchangeKeys, bool] | None:
        """Return what won last over such a link, and whether that run had tried all it would; None: nothing."""
        for entry in reversed(self._entries()):
            with suppress(TypeError, KeyError, ValueError):
                if _is_same(entry["link"], link_bytes_per_second):
                    return ExchangeKeys.from_mapping(entry["keys"]), bool(entry["settled"])
        return None

    def keep(self, keys: ExchangeKeys, link_bytes_per_second: float | None, *, settled: bool) -> None:
        """Keep what won, instead of what won over such a link before; a search that is complete stays so."""
        if self._path is None:
            return
        settled = settled or self.find(link_bytes_per_second) == (keys, True)
        entries = [each for each in self._entries() if not _is_same(each.get("link"), link_bytes_per_second)]
        entries.append({"link": link_bytes_per_second, "keys": keys.to_mapping(), "settled": settled})
        with suppress(OSError):
            _make_private(self._path.parent)
            write_private(self._path, json.dumps({"version": _VERSION, "entries": entries[-_MOST_ENTRIES:]}))

    def _entries(self) -> list[Mapping[str, Any]]:
        if self._path is None:
            return []
        with suppress(OSError, ValueError, RecursionError, AttributeError, TypeError):
            if self._path.stat().st_size <= _LARGEST_FILE_BYTES:
                found = json.loads(self._path.read_text(encoding="utf-8"))
                entries = found.get("entries") if found.get("version") == _VERSION else None
                return [each for each in entries or [] if isinstance(each, dict)]
        return []


def _make_private(directory: Path) -> None:
    for missing in [place for place in (directory, *directory.parents) if not place.exists()][::-1]:
        missing.mkdir(mode=0o700, exist_ok=True)


def _is_same(one: Any, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return isinstance(one, (int, float)) and one > 0 and 1 / _SAME_LINK < other / one < _SAME_LINK


# The reducers of a job, whose exchange is switched on all ranks between the same two steps.


def why_not(here: World) -> str:
    """Return why nothing of the exchange can be tuned in this job; empty where it can. The same on all ranks."""
    if here.size == 1:
        return "one rank exchanges no gradients"
    if read_elastic_settings() is not None:
        return "ranks of an elastic job come and go, and what was measured with others says little"
    if any(isinstance(each, OneBitAdam) for each in here.session.steps.optimizers()):
        return "OneBitAdam chooses the codec of its momentum itself"
    models = DistributedModel.all_of(here)
    if not models:
        return "no model was given to farandole.distribute"
    return next((reason for model in models if (reason := _why_not_this(model))), "")


def _why_not_this(model: nn.Module) -> str:
    distributed, name = DistributedModel.of(model), type(model).__name__
    plan, mesh = distributed.plan_and_mesh
    if not mesh.degrees.is_data_alone:
        return f"{name} is divided over ranks ({mesh.degrees}): only plain data parallelism is tuned"
    if plan.zero:
        return f"{name} has zero = {plan.zero}, whose shards lie as the buckets do: only zero = 0 is tuned"
    if plan.sync != EVERY_STEP:
        return f'{name} has sync = "{plan.sync}": only exchanges of each step are tuned'
    if plan.codec == AUTO:
        return 'codec = "auto" chooses codec, buckets, route and connections itself: use one of the two'
    return "" if distributed.reducer is not None else f"{name} exchanges no gradients"


class ExchangeSwitch:
    """Switches all reducers of a job. All ranks make it after the same step, and call it with the same."""

    def __init__(self, here: World) -> None:
        self._here = here
        self.models = DistributedModel.all_of(here)
        found = [DistributedModel.of(model).reducer for model in self.models]
        self.reducers: list[GradientReducer] = [each for each in found if each is not None]
        self.logs = [reducer.keep_timings() for reducer in self.reducers]
        plan = DistributedModel.of(self.models[0]).plan
        assert plan is not None, "it is distributed"
        self.plan: Plan = plan
        """The plan of the job."""
        self.keys = ExchangeKeys.of_plan(plan, self.main.open_route.require().route)
        """In force."""
        self.start = self.keys
        self.micro_batches = here.session.kept(TunedMicroBatches)
        """What divides batches; None: it is not asked to."""

    @property
    def problem(self) -> str:
        """Why this rank's batches are to be divided as the plan says; empty: nothing is known against it."""
        if self.micro_batches is None:
            return "--settings leaves it out"
        if len(self.models) > 1:
            return "several models are trained"
        if not self.micro_batches.steps:
            return "the loop does not call farandole.step"
        return self.micro_batches.problem

    @property
    def main(self) -> GradientReducer:
        """The reducer that has most to exchange: the step model looks at this one."""
        return max(self.reducers, key=lambda reducer: sum(reducer.bucket_bytes))

    @property
    def is_changed(self) -> bool:
        """Whether models were distributed, or dropped, since this was made."""
        now = DistributedModel.all_of(self._here)
        return len(now) != len(self.models) or any(a is not b for a, b in zip(now, self.models, strict=True))

    @property
    def wait_seconds(self) -> float:
        """How long this rank waits for the exchange at the end of backward: the median step, all models."""
        return sum(log.wait_seconds for log in self.logs)

    def to(self, keys: ExchangeKeys) -> str:
        """Exchange by `keys` from now on, on all ranks; return why some rank cannot, where all are as before."""
        if keys == self.keys:
            return ""
        problems = self._try(keys)
        if not problems:
            self.keys = keys
            return ""
        worse = self._try(self.keys)
        if worse:
            raise CommError(
                f"switching to {keys.to_text()} failed ({problems[0]}), and so did the way back ({worse[0]})",
                rank=self._here.rank,
                operation="tuning",
                remedy="leave this setting out of farandole tune --settings",
            )
        return problems[0]

    def _try(self, keys: ExchangeKeys) -> Sequence[str]:
        problem = ""
        if self.micro_batches is not None:
            self.micro_batches.switch(keys.micro_batches)
        try:
            for reducer in self.reducers:
                if reducer.is_open:
                    reducer.switch_keys(keys)
        except ConfigError as error:
            problem = error.message
        except CommError as error:
            if type(error) is not CommError:
                raise  # a rank is lost, or the ranks disagree
            problem = error.message
        return [each for each in all_gather_json(self._here, "tuning/switched", problem) if each]

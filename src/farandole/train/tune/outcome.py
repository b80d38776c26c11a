"""What a tuned run has tried: the file in the run directory, the plan that won, and the text at the end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from ...comm.engine.reducer import GradientReducer
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.bucket_plan import ExchangeKeys
from ...core.env import SETTINGS, read_cache_directory, read_elastic_settings
from ...core.vocabulary.codec_spec import AUTO
from ...core.vocabulary.errors import CommError, ConfigError
from ...core.vocabulary.run_files import TUNE, TUNED_PLAN, write_private
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.sync_spec import EVERY_STEP
from ...parallel.data.tuned_micro_batches import TunedMicroBatches
from ...parallel.model import DistributedModel
from ...parallel.optim.one_bit_adam import OneBitAdam
from .decision import ADOPTED, NOT_FINISHED, PatternSearch, StepGain, TuneDecision

VERSION = 1


@dataclass
class TuningRecord:
    """What is known so far; written after every decision, so that it survives the run."""

    plan: Plan
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What tells jobs apart whose best settings may differ."""
    notes: list[str] = field(default_factory=list)
    decision: TuneDecision[ExchangeKeys] | None = None
    history: TuneHistory | None = None
    """Where what won is kept for later runs; None: nowhere."""
    search: PatternSearch | None = None
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


def total_gain(decision: TuneDecision[ExchangeKeys]) -> StepGain | None:
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
        for name, parameter in reducer.parts.buckets.table.named
    ]
    others = {key: value for key, value in switch.plan.to_mapping().items() if key not in _NOT_OF_THE_JOB}
    told = json.dumps([parameters, places, others], sort_keys=True)
    return {
        "fingerprint": hashlib.sha256(told.encode()).hexdigest()[:16],
        "ranks": here.size,
        "hosts": sorted({host for host, _ in places}),
        "parameter_bytes": sum(parameter.nbytes for reducer in switch.reducers
                               for _, parameter in reducer.parts.buckets.table.named),
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
        self.keys = ExchangeKeys.of_plan(plan, self.main.parts.open_route.require().route)
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

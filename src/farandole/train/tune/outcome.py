"""What a tuned run has tried: the file in the run directory, the plan that won, and the text at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...core.step_model.bucket_plan import ExchangeKeys
from ...core.vocabulary.run_files import TUNE, TUNED_PLAN, write_private
from ...core.vocabulary.spec import Plan
from .block import StepGain
from .decision import ADOPTED, NOT_FINISHED, TuneDecision
from .history import TuneHistory
from .search import PatternSearch

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
    if decision.overall is not None:
        return decision.overall
    left, low, high = 1.0, 1.0, 1.0
    adopted = [trial.gain for trial in decision.trials if trial.verdict == ADOPTED and trial.gain is not None]
    for gain in adopted:
        left *= 1 - gain.share
        low *= 1 - gain.interval[1]
        high *= 1 - gain.interval[0]
    return StepGain(1 - left, (1 - high, 1 - low)) if adopted else None


def _gain(gain: StepGain | None) -> dict[str, Any] | None:
    if gain is None:
        return None
    return {"share": round(gain.share, 5), "interval": [round(each, 5) for each in gain.interval]}

"""What to say of a job that ended well and of which no rank recorded anything: it may not be what was meant."""

from __future__ import annotations

import json
from pathlib import Path

from ...core.vocabulary.run_files import RUN
from ...core.vocabulary.spec import Plan
from ..supervise.job_loop import Outcome

_OWN_GROUP = (
    "the script used torch.distributed by itself, and nothing was recorded: no model trained in "
    "DistributedDataParallel or fully_shard over all ranks that can be recorded unasked; farandole.record(model, "
    "optimizer, loader), after the model is wrapped or sharded, shows where the time goes"
)


def notes_of_unrecorded(directory: Path, outcome: Outcome, *, was_wanted: bool = True) -> list[str]:
    """Return what ran, in a line, and the keys of the plan that nothing used; nothing where a rank has records.

    `was_wanted`: whether a training was to be recorded unasked.
    """
    if any(directory.glob("events-rank*.jsonl")):
        return []
    try:
        facts = json.loads((directory / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    size, notes = facts.get("size"), []
    if size is not None and size > 1 and (was_wanted or not outcome.has_met):
        notes.append(f"note: {_OWN_GROUP if outcome.has_met else _copies(size, outcome.has_met)}")
    return [*notes, *vain_plan(Plan.from_mapping(facts["plan"], where=RUN))] if facts["plan_given"] else notes


def vain_plan(plan: Plan) -> list[str]:
    """Return which keys of `plan` change nothing, in a line, where nothing is given to `farandole.distribute`."""
    changed = plan.differences(Plan())
    keys = ", ".join(f"{key} = {value!r}" for key, (value, _) in changed.items())
    return [
        f"plan: {keys} has no effect: the script gives no model to farandole.distribute, and what it exchanges "
        "goes as it is"
    ][: len(changed)]


def _copies(size: int, has_met: bool | None) -> str:
    """Return what ran where no group was seen: none was made (False), or this launcher cannot know (None)."""
    group = "no torch.distributed group was made at MASTER_ADDR"
    if has_met is None:
        group = "whether they made a torch.distributed group is not known here"
    return (
        f"{size} independent copies ran, as far as Farandole can see: no rank called farandole.init, and {group}. "
        "To train one model on all ranks, call farandole.init() and farandole.distribute(model, optimizer)"
    )

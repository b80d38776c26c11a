"""What to say of a job that ended well and of which no rank recorded anything: it may not be what was meant."""

from __future__ import annotations

import json
from pathlib import Path

from ...core.vocabulary.run_files import RUN
from ...core.vocabulary.spec import Plan
from ..supervise.job_loop import Outcome

_OWN_GROUP = (
    "the script used torch.distributed by itself, and nothing was recorded: farandole.record(model, optimizer, "
    "loader), after the model is wrapped, shows where its time goes"
)


def notes_of_unrecorded(directory: Path, outcome: Outcome) -> list[str]:
    """Return what ran, in a line, and the keys of the plan that nothing used; nothing where a rank has records."""
    if any(directory.glob("events-rank*.jsonl")):
        return []
    try:
        facts = json.loads((directory / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    size, notes = facts.get("size"), []
    if size is not None and size > 1:
        notes.append(f"note: {_OWN_GROUP if outcome.has_met else _copies(size, outcome.has_met)}")
    changed = Plan.from_mapping(facts["plan"], where=RUN).differences(Plan()) if facts["plan_given"] else {}
    if changed:
        keys = ", ".join(f"{key} = {value!r}" for key, (value, _) in changed.items())
        notes.append(
            f"plan: {keys} had no effect: the script gives no model to farandole.distribute, and what it "
            "exchanges goes as it is"
        )
    return notes


def _copies(size: int, has_met: bool | None) -> str:
    """Return what ran where no group was seen: none was made (False), or this launcher cannot know (None)."""
    group = "no torch.distributed group was made at MASTER_ADDR"
    if has_met is None:
        group = "whether they made a torch.distributed group is not known here"
    return (
        f"{size} independent copies ran, as far as Farandole can see: no rank called farandole.init, and {group}. "
        "To train one model on all ranks, call farandole.init() and farandole.distribute(model, optimizer)"
    )

"""What ``farandole tune`` tried while the run went on, and what came of it."""

from __future__ import annotations

from ...figures.summary import describe_setting, read_tuning, trial_rows, verdict_of
from ..content import Pairs, Run, Section, Table, Text

_HEAD = ("after step", "tried", "gain, 95 % interval", "verdict")


def make(run: Run) -> Section | None:
    """Return the trials; None of a run that was not tuned."""
    tuning = read_tuning(run.directory)
    if tuning is None:
        return None
    blocks: list[Table | Pairs | Text] = []
    rows = trial_rows(tuning)
    if rows:
        blocks.append(Table(_HEAD, rows, texts=len(_HEAD), note="A trial is compared with the steps around it."))
    if "best" in tuning:
        named = [("at first", describe_setting(tuning["start"])), ("at last", describe_setting(tuning["best"]))]
        blocks.append(Pairs([*named, ("stopped", str(tuning["stopped"]))]))
    blocks += [Text(str(text), quiet=True) for text in (*tuning["notes"], *tuning.get("loader", ()))]
    return Section("tuning", "Tuning", blocks, verdict_of(tuning))

"""What ``farandole tune`` has tried in a run, from its file, and as lines for people."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.run_files import TUNE, TUNED_PLAN
from ...core.vocabulary.units import format_bytes, format_seconds
from .inexact import codec_notes


def read_tuning(run_directory: Path) -> dict[str, Any] | None:
    """Return what is in the file of a tuned run; None where there is none that can be read."""
    try:
        found = json.loads((run_directory / TUNE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    try:
        verdict_of(found)
        trial_rows(found)
        texts = [*found["notes"], *found.get("loader", ())]
    except (TypeError, KeyError, ValueError, AttributeError, IndexError):
        return None  # not of ours
    return found if all(isinstance(text, str) for text in texts) else None


def describe_gain(gain: Mapping[str, Any] | None) -> str:
    """Return a gain with its interval: ``12.0 % shorter (10.1 to 13.2 %)``; empty for None."""
    if gain is None:
        return ""
    share, (low, high) = float(gain["share"]), gain["interval"]
    word, sign = ("shorter", 1) if share >= 0 else ("longer", -1)
    low, high = sorted((sign * 100 * low, sign * 100 * high))
    return f"{100 * abs(share):.1f} % {word} ({low:.1f} to {high:.1f} %)"


def describe_setting(setting: Mapping[str, Any]) -> str:
    """Return all keys of a setting with their values."""
    return ", ".join(
        f"{name} {format_bytes(value) if name.endswith('_bytes') else value}" for name, value in setting.items()
    )


def verdict_of(tuning: Mapping[str, Any]) -> str:
    """Return in one sentence what won, or why nothing was tried."""
    if "best" not in tuning:
        return f"Nothing of the exchange was tuned: {(tuning.get('notes') or ['no reason is known'])[0]}."
    gain = describe_gain(tuning.get("gain"))
    best, start = tuning["best"], tuning["start"]
    if not gain or best == start:
        return f"The settings stay as they were: {tuning['stopped']}."
    changed = {name: value for name, value in best.items() if value != start[name]}
    return f"{describe_setting(changed)}: steps are {gain}."


def trial_rows(tuning: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return step, setting, gain and verdict of each trial."""
    return [
        (
            str(trial["step"]),
            str(trial["changes"]),
            describe_gain(trial["gain"]) or "-",
            f"{trial['verdict']}: {trial['why']}" if trial["why"] else str(trial["verdict"]),
        )
        for trial in tuning.get("trials", ())
    ]


def tuning_page(
    tuning: Mapping[str, Any] | None, directory: str, command: str, typed: Sequence[str] = ()
) -> list[str]:
    """Return what the command prints at its end.

    `directory`: of the run; `command`: that was tuned; `typed`: the whole line, which may emulate hosts.
    """
    if tuning is None:
        return [f"nothing was tuned: the script did not call farandole.init (logs in {directory}/logs)"]
    lines = []
    rows = trial_rows(tuning)
    if rows:
        table = [("after step", "tried", "gain", "verdict"), *rows]
        widths = [max(len(row[i]) for row in table) for i in range(3)]
        lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip()
                  for row in table]  # fmt: skip
        lines.append("")
    lines.append(verdict_of(tuning))
    lines += [f"loader: {said}" for said in tuning.get("loader", ())]
    if "best" not in tuning:
        return lines
    before, now = tuning["step_seconds_before"], tuning["step_seconds"]
    if before is not None and now is not None:
        lines.append(f"step at first {format_seconds(before)}, at last {format_seconds(now)}")
    lines.append(f"stopped: {tuning['stopped']}; {tuning['trial_steps']} steps ran by settings on trial")
    lines += [f"note: {note}" for note in tuning["notes"]]
    lines += [f"note: {note}" for note in codec_notes(str(tuning["best"].get("codec", NONE)))]
    end = next((at for at, word in enumerate(typed[2:], 2) if word in ("--", "farandole", "python")), 0)
    emulated = [*typed[:end], "--"] if end and typed[1] == "emulate" else []
    lines.append(f"next: {shlex.join([*emulated, 'farandole'])} run --plan {directory}/{TUNED_PLAN} -- {command}")
    return lines

"""A simulated run as a run directory, with the writer of recorded runs: all commands that read runs read it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ...core.vocabulary import run_files
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.events import Event
from ...core.vocabulary.spec import Plan
from .event_writer import EventWriter


def write_simulated_run(
    out: Path, events: Iterable[tuple[int, Event]], *, plan: Plan, size: int, simulated: Mapping[str, Any]
) -> None:
    """Write the events of `size` ranks, given as (rank, event), into the directory `out`.

    `simulated`: what was assumed, by name. It stands in ``run.json``, and marks the run as one that never ran.

    Raises:
        ConfigError: `out` holds something already, or cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already", remedy="choose another directory with --run-dir, or remove it")
    facts = {
        "version": 1,
        "size": size,
        "started": datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "plan_given": True,
        "plan": plan.to_mapping(),
        run_files.SIMULATED: dict(simulated),
    }
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("logs", "crashes"):
            (out / name).mkdir(mode=0o700, exist_ok=True)
        run_files.write_private(out / run_files.PLAN, plan.to_toml())
        with contextlib.ExitStack() as stack:
            writers = [EventWriter(out, rank) for rank in range(size)]
            for writer in writers:
                stack.callback(writer.close)
            for rank, event in events:
                writers[rank].record(event)
        run_files.write_private(out / run_files.RUN, json.dumps(facts, indent=1) + "\n")
    except OSError as problem:
        raise ConfigError(
            f"cannot write {out}: {problem.strerror or problem}", remedy="choose another place with --run-dir"
        ) from None

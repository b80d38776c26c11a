"""What launcher and agent say to each other, and how long either waits for a sign of life.

::

    launcher                              agent of each host
    hello(run directory, token)      ->
                                     <-   ready(versions, address, shared)
    peers(addresses, first)          ->
                                     <-   route(interface, address, port)
    start(command, places, job, ..)  ->
                                     <-   output..., exit..., crash...
    stacks, signal(number)           ->
                                     <-   positions, files..., done

An elastic job's agent is told of one worker after the other, and its frames pass through the pipe::

    start(command, job, ..)          ->
    worker(number, host, variables).. ->
    tell(worker, frame)...           ->
                                     <-   output..., heard(worker, frame)..., exit(with its crash)...
    signal(worker, number)           ->
    leave                            ->
                                     <-   files..., done

Both send a beat all the time. A launcher that hears nothing from an agent gives the host up; an agent that
hears nothing from its launcher ends its ranks; the agent's reaper does the same for a frozen agent.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ....core.vocabulary.run_files import Crash
from ...job.contract import JobSpec, RankSpec
from .frames import SILENCE_SECONDS

BEAT_SECONDS = 0.25
REAPER_SECONDS = SILENCE_SECONDS + 0.25
"""Silence of a supervisor before its reaper ends it: the launcher shall detect the silence first."""
SUSPECT_SECONDS = 0.75
"""Silence after which this host may be the cause of a rank's failure that only reports another rank."""
START_SECONDS = 30.0
"""For all hosts to answer, beside what a prelude takes."""
LEAVE_SECONDS = 1.0
"""After SIGKILL, for a host to say that its ranks are gone."""

TOKEN_FILE = ".token"
"""In the run directory, while the job starts: a host that sees it shares the directory."""

_PLACE_FIELDS = tuple(
    field.name for field in fields(RankSpec) if field.name not in ("host", "cores", "spare_cores")
)
_JOB_FIELDS = tuple(field.name for field in fields(JobSpec) if field.name not in ("run_directory", "plan_file"))


def pack_places(places: Sequence[RankSpec]) -> list[dict[str, Any]]:
    """Return places as JSON; cores and interfaces are each host's own business."""
    return [{name: getattr(place, name) for name in _PLACE_FIELDS} for place in places]


def unpack_place(values: Mapping[str, Any], *, interface: str) -> RankSpec:
    """Return the place of a rank on this host."""
    known = {name: values[name] for name in _PLACE_FIELDS}
    known |= {"visible_devices": tuple(known["visible_devices"]), "interface": interface}
    return RankSpec(**known)


def pack_job(job: JobSpec) -> dict[str, Any]:
    """Return what all ranks are told alike, as JSON; files are each host's own business."""
    values = asdict(job)
    return {name: values[name] for name in _JOB_FIELDS}


def unpack_job(values: Mapping[str, Any], run_directory: Path, plan_file: Path | None) -> JobSpec:
    """Return the job as the ranks of this host see it."""
    return JobSpec(
        **{name: values[name] for name in _JOB_FIELDS}, run_directory=run_directory, plan_file=plan_file
    )


def pack_crash(crash: Crash) -> dict[str, Any]:
    """Return the account of a crash as JSON, with its age: clocks of hosts differ."""
    age = max(0.0, time.monotonic() - crash.when_seconds)
    return {**vars(crash), "when_seconds": age, "traceback": crash.traceback[-100_000:]}


def unpack_crash(values: Mapping[str, Any]) -> Crash:
    """Return the account of a crash, its time by our clock."""
    known = {each.name: values[each.name] for each in fields(Crash)}
    return Crash(**{**known, "when_seconds": time.monotonic() - float(known["when_seconds"])})

"""What launcher and agent say to each other, and how long either waits for a sign of life.

::

    launcher                              agent of each host
    hello(run directory, token)      ->
                                     <-   ready(versions, address, shared)
    peers(addresses, first)          ->
                                     <-   route(interface, address, port)
    start(command, job, places, ..)  ->
                                     <-   output..., crash..., exit...
    stacks, signal(number)           ->
                                     <-   positions
    leave                            ->
                                     <-   files..., done

Without places it is the agent of an elastic job. It is told of one worker after the other, and their frames pass
through the pipe::

    worker(number, host, variables).. ->
    tell(worker, frame)...           ->
                                     <-   heard(worker, frame)...
    kill(worker)                     ->

Both send a beat all the time. A launcher that hears nothing from an agent gives the host up; an agent that
hears nothing from its launcher ends its ranks; the agent's reaper does the same for a frozen agent.
"""

from __future__ import annotations

import platform
import site
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ...core.host.installed import head_commit
from ...core.vocabulary.run_files import Crash
from ...version import VERSION
from ..job.contract import JobSpec, RankSpec
from ..supervise.stopped_process import OwnPauses
from .frames import BEAT, SILENCE_SECONDS
from .host_link import HostLink

# What has to be alike on all hosts: farandole, torch, and the commit of the working directory.


def own_versions(python_path: str = "") -> dict[str, str]:
    """Return this host's versions, without importing torch; "" for what is not known."""
    return {
        "farandole": VERSION,
        "python": platform.python_version(),
        "torch": _torch_version(python_path),
        "commit": head_commit() or "",
    }


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Return what is not alike, a sentence's part each; what one side does not know is no difference."""
    found = []
    for name in ("torch", "python", "commit"):
        mine, theirs = here.get(name, ""), there.get(name, "")
        if name == "python":
            mine, theirs = (text.rpartition(".")[0] for text in (mine, theirs))
        if mine and theirs and mine != theirs:
            what = "the commit of the working directory" if name == "commit" else name
            found.append(f"{what} is {theirs[:12]} there and {mine[:12]} here")
    return found


def _torch_version(python_path: str) -> str:
    """Return the version of torch's files where a rank would look for it: importing it takes a second."""
    try:
        places = [*python_path.split(":"), *sys.path, *site.getsitepackages()]
        if site.ENABLE_USER_SITE is not False:
            places.append(site.getusersitepackages())
    except (AttributeError, OSError):
        places = list(sys.path)
    for place in filter(None, places):
        for found in sorted(Path(place).glob("torch-*.dist-info")):
            return found.name.removeprefix("torch-").removesuffix(".dist-info")
    return ""


BEAT_SECONDS = 0.25
REAPER_SECONDS = SILENCE_SECONDS + 0.25
"""Silence of a supervisor before its reaper ends it: the launcher shall detect the silence first."""
SUSPECT_SECONDS = 0.75
"""Silence after which this host may be the cause of a rank's failure that only reports another rank."""
START_SECONDS = 30.0
"""For all hosts to answer, beside what a prelude takes."""

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


# The launcher's signs of life to all hosts, from a thread of its own.


class Heartbeat:
    """Sends a beat over each of `links` that is open.

    The main thread may be blocked by a console that is not read. This thread holds nothing that a forked
    process would need: hosts may be connected to while it runs.
    """

    def __init__(self) -> None:
        self.links: list[HostLink] = []
        """May grow and shrink at any time."""
        self.pauses = OwnPauses(time.monotonic())
        """When this process stood still as a whole."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="farandole-beats", daemon=True)

    def start(self) -> None:
        """Begin."""
        self.pauses.look(time.monotonic())
        self._thread.start()

    def stop(self) -> None:
        """End, if it has begun."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self.pauses.look(time.monotonic())
            for link in tuple(self.links):
                if link.is_open and link.channel.waiting_bytes == 0:
                    link.channel.send(BEAT)

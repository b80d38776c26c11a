"""Starting a job anew when it has failed (``--restarts``): whether, with which ranks, and what is kept of before.

[Note: a restart] All ranks of a generation are gone before the next one begins, which has a new port and a new
secret: a process of an earlier one that wakes up, on a host that was cut off, is refused by all that it calls.
The next one goes on from the last checkpoint, if its script loads it (`Checkpointer.load`). What the earlier one
has left is moved into a run directory of its own, ``generations/0``; checkpoints stay where they are.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ...core.failures import is_peer_lost, is_timeout
from ...core.job_plan import refuse_plan
from ...core.vocabulary import run_files
from ...core.vocabulary.errors import ConfigError, FarandoleError
from ...core.vocabulary.run_files import SavesAccount
from ...core.vocabulary.text import write_notice
from ..job.hosts import Host, HostSlots
from ..supervise.failure import Failure
from ..supervise.job_loop import ENDING, Outcome, handling
from .placing import PlacedJob, place_job

PAUSE_SECONDS = (1.0, 30.0)
"""Least and longest wait before a restart that follows another one without a checkpoint in between."""
SERVERS_SECONDS = 10.0
"""For servers of parameters to see that their job has ended: they are in sessions of their own."""
_MOVED = (
    run_files.METRICS, run_files.VERIFY, run_files.STALL, run_files.STACKS, run_files.POSITIONS,
    run_files.DISPENSABLE, run_files.SAVES, "logs", "crashes", "hosts", "events-rank*.jsonl",
)  # fmt: skip
_PERIOD_SECONDS = 0.05
_LEAST_SIGNALLED = 128
"""Exit codes above are those of ranks that a signal has ended."""


def run_generations(
    placed: PlacedJob, directory: Path, start: Callable[[PlacedJob, int], Outcome],
    report: Callable[[Outcome, Path, PlacedJob], None],
) -> Outcome:  # fmt: skip
    """Run a job by `start`, again as often as is asked for; return how it ended in the end.

    Args:
        directory: its run directory.
        start: starts the generation of a number, and returns how that has ended.
        report: says of each why it has ended, and leaves it in a run directory.
    """
    restarts, between, begin = Restarts(placed, directory), Interval(), time.monotonic()
    with handling(ENDING, between.note), handling((signal.SIGUSR1,), lambda *_: None):
        outcome = between.start(partial(start, placed, 0))
        while restarts.follow(outcome):
            aside = restarts.keep()
            report(outcome, aside, placed)
            placed = restarts.placed
            write_notice(restarts.to_text(aside))
            between.wait(restarts.pause_seconds, directory)
            if between.signal is not None:
                outcome = Outcome(128 + between.signal, 0.0, signal=between.signal)
                break
            outcome = between.start(partial(start, placed, restarts.generation))
    report(outcome, directory, placed)
    if restarts.why_not:
        write_notice(restarts.why_not)
    return replace(outcome, seconds=time.monotonic() - begin)


@dataclass
class Restarts:
    """Decides after each generation of a job whether another one follows."""

    placed: PlacedJob
    """The last one, or the next one after `follow` has returned True."""
    directory: Path
    generation: int = 0
    pause_seconds: float = 0.0
    """How long to wait before the next one."""
    saves: SavesAccount | None = None
    """The last that is known of checkpoints."""
    why_not: str = ""
    """Why no other one follows although that was asked for."""
    failures: list[dict[str, object]] = field(default_factory=list)
    """How the earlier ones have failed."""
    _first_step: int = 0
    """Step of the checkpoint from which the last one went on, as far as is known."""

    def follow(self, outcome: Outcome) -> bool:
        """Return whether another generation follows one that has ended so; else `why_not` says more."""
        failure, limit = outcome.failure, self.placed.request.ending.restarts
        if failure is None or outcome.signal is not None or not limit:
            return False
        self.saves = SavesAccount.read(self.directory) or self.saves
        saved = 0 if self.saves is None or self.saves.whole is None else self.saves.whole
        has_saved = saved > self._first_step
        account: dict[str, object] = {
            "generation": self.generation, "rank": failure.rank, "host": failure.host, "cause": failure.cause,
            # A rank counts the steps from where it has resumed.
            "step": None if failure.step is None else self._first_step + failure.step,
            "exit_code": failure.exit_code, "seconds": round(outcome.seconds, 3),
        }  # fmt: skip
        try:
            self._refuse(failure, account)
            size, hosts = self._ranks_of_next(failure, has_saved=has_saved)
            self.placed = place_job(replace(self.placed.request, hosts=hosts, size=size))
        except FarandoleError as problem:
            self.why_not = f"not started again: {problem}"
            return False
        least, longest = PAUSE_SECONDS
        is_first = has_saved or not self.generation
        self.pause_seconds = 0.0 if is_first else min(longest, max(least, 2 * self.pause_seconds))
        self._first_step = saved
        self.failures.append(account)
        self.generation += 1
        return True

    def _refuse(self, failure: Failure, account: Mapping[str, object]) -> None:
        """Raise `ConfigError` where the next generation would fail alike, or there may be none."""
        limit = self.placed.request.ending.restarts
        # A host that was never reached is a name that was misspelled, as a rule; later it is one that is gone.
        is_final = failure.rank is not None or not self.generation
        if failure.exit_code == ConfigError.exit_code and is_final:
            raise ConfigError("it would end with the same error")
        is_again = any(
            all(before[key] == account[key] for key in ("cause", "step")) for before in self.failures[-1:]
        )
        if is_again and _is_of_the_program(failure):
            raise ConfigError("the same exception came at the same step as before the last restart")
        if self.generation >= limit:
            raise ConfigError(f"--restarts {limit}: there was no other left")

    def _ranks_of_next(self, failure: Failure, *, has_saved: bool) -> tuple[int, Sequence[HostSlots]]:
        """Return how many ranks the next generation has, and its hosts: fewer if ``--min-np`` allows it.

        A host that was lost is left out, and the slot of a rank that a signal has ended twice, with no checkpoint
        in between, if the others have slots enough.
        """
        request, size = self.placed.request, len(self.placed.places)
        least = size if request.ending.least_ranks is None else request.ending.least_ranks
        hosts = left = request.hosts
        if failure.rank is None:
            left = [host for host in _listed(self.placed.hosts) if host.name != failure.host]
        elif not has_saved and self._was_killed_before(failure):
            left = _without_slot(self.placed, failure.rank)
        slots = sum(host.slots for host in left) if left is not hosts else size
        if slots < least == size:
            left, slots = hosts, size  # all hosts are tried again
        for number in range(min(size, slots), max(1, least) - 1, -1):
            with suppress(ConfigError):
                refuse_plan(request.plan, number)
                return number, left
        raise ConfigError(
            f"{slots} slots are left, and the plan has no division for {least} (--min-np) to {slots} ranks"
        )

    def _was_killed_before(self, failure: Failure) -> bool:
        before = self.failures[-1:]
        is_signal = failure.exit_code > _LEAST_SIGNALLED
        return is_signal and any(one["rank"] == failure.rank and one["cause"] == failure.cause for one in before)

    # -- what is kept ----------------------------------------------------------------------------

    def keep(self) -> Path:
        """Move what the generation before has left into a run directory of its own, and return that."""
        aside = self.directory / run_files.GENERATIONS / str(self.generation - 1)
        with suppress(OSError):  # a full disk: the next one goes on in the same files
            aside.mkdir(mode=0o700, parents=True)
            for name in (run_files.RUN, run_files.PLAN):
                shutil.copy2(self.directory / name, aside / name)
            for pattern in _MOVED:
                for path in self.directory.glob(pattern):
                    path.rename(aside / path.name)
        for name in ("crashes", run_files.POSITIONS, run_files.DISPENSABLE):  # of no generation but their own
            shutil.rmtree(self.directory / name, ignore_errors=True)
        with suppress(OSError, ValueError):
            for name in ("logs", "crashes"):
                (self.directory / name).mkdir(mode=0o700, exist_ok=True)
            facts = json.loads((self.directory / run_files.RUN).read_text(encoding="utf-8"))
            facts |= {"size": len(self.placed.places), "restarts": self.failures}
            run_files.write_private(self.directory / run_files.RUN, json.dumps(facts, indent=1) + "\n")
        return aside

    def to_text(self, aside: Path) -> str:
        """Return what is said before the next generation; `aside`: where the last one's files are."""
        saves, ranks = self.saves, len(self.placed.places)
        if saves is not None and saves.whole is not None:
            whence = f"the last whole checkpoint is that of step {saves.whole} in {saves.directory}"
        else:
            whence = "fd.Checkpointer has saved none: without a checkpoint of the script's own, it begins anew"
        count = f"restart {self.generation} of {self.placed.request.ending.restarts}"
        when = f" in {self.pause_seconds:g} s" if self.pause_seconds else ""
        return f"{count}{when}, {ranks} rank{'s' * (ranks != 1)}: {whence}; the files of before are in {aside}"


def _listed(hosts: Sequence[Host]) -> list[HostSlots]:
    """Return hosts as a list names them."""
    return [HostSlots(host.name or "localhost", host.slots, host.port, host.chosen) for host in hosts]


def _without_slot(placed: PlacedJob, rank: int) -> list[HostSlots]:
    """Return the hosts without the slot of one rank, and the device that goes with it."""
    place, hosts = placed.places[rank], []
    for host, listed in zip(placed.hosts, _listed(placed.hosts), strict=True):
        chosen = listed.chosen or tuple(range(listed.slots))
        if host.name == place.host_name:
            chosen = (*chosen[: place.local_rank], *chosen[place.local_rank + 1 :])
            listed = replace(listed, slots=len(chosen), chosen=chosen)  # noqa: PLW2901 - the same host
        hosts += [listed] * bool(chosen)
    return hosts


def _is_of_the_program(failure: Failure) -> bool:
    """Return whether a rank has failed by an exception that does more than tell of another rank."""
    trace = failure.traceback
    tells_of_another = is_peer_lost(trace, any_origin=True) or is_timeout(trace, any_origin=True)
    return bool(trace) and failure.exit_code <= _LEAST_SIGNALLED and not tells_of_another


class Interval:
    """The time in which no ranks run that the launcher could pass a signal on to."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._is_starting = False

    def note(self, number: int, _: object) -> None:
        """Take a signal that ends the job; give it to a generation that is being started when that listens."""
        self.signal = self.signal or signal.Signals(number)
        if self._is_starting:
            again = threading.Timer(_PERIOD_SECONDS, os.kill, [os.getpid(), number])
            again.daemon = True
            again.start()

    def start(self, begin: Callable[[], Outcome]) -> Outcome:
        """Run a generation."""
        self._is_starting = True
        try:
            return begin()
        finally:
            self._is_starting = False

    def wait(self, seconds: float, run_directory: Path) -> None:
        """Wait so long, and until servers of the generation before are gone; a signal ends it."""
        begin = time.monotonic()
        while self.signal is None and time.monotonic() < begin + seconds:
            time.sleep(min(_PERIOD_SECONDS, seconds))  # no lock that a handler could wait for
        end = time.monotonic() + SERVERS_SECONDS
        while self.signal is None and time.monotonic() < end and any(run_directory.glob("farandole-server-*")):
            time.sleep(_PERIOD_SECONDS)

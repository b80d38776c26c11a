"""Decides for an elastic job: hosts that come and go, their workers, discovery, and the membership's orders."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from ...core import env
from ...core.rank_variables import RANK_NAMES
from ...core.vocabulary.errors import ConfigError, FarandoleError, LaunchError
from ..job.contract import JobSpec, RankSpec, rank_environment
from ..output import Output
from ..supervise.failure import Exit, Failure, HostFailure, find_failure
from ..supervise.job_loop import JobLoop, Outcome
from ..supervise.process import end_group, has_ended, stopping_with_us
from .control import Frame
from .membership import Blacklist, Kill, Membership, Order, Say, Start, Stop, Tell
from .options import ElasticOptions
from .workers import HostPool, WorkerHost


class ElasticJob(JobLoop):
    """Tells the membership what hosts report, and does what it says.

    `run` raises `ConfigError` when the discovery script does not work, `LaunchError` when it stops working.
    """

    def __init__(
        self, options: ElasticOptions, job: JobSpec, fleet: HostPool, output: Output, *,
        environment: Mapping[str, str], hosts: Mapping[str, int], status: Callable[[], str | None],
    ) -> None:  # fmt: skip
        """`fleet` says how hosts are reached, and what is started there; the ranks' meeting points are their own.

        Args:
            environment: What the workers inherit, as far as it is known here.
            hosts: Hosts and slots when no discovery script is given.
        """
        super().__init__(output, job, status)
        self._fleet, self._environment = fleet, environment
        self._discovery = Discovery(
            options.discovery_script,
            default_slots=options.slots_per_host or 1,
            timeout_seconds=options.elastic_timeout_seconds,
            fixed=hosts,
        )
        self._membership = Membership(options, Blacklist(options.cooldown_range_seconds), time.monotonic())
        self._failures: list[Failure] = []
        self._stop: Stop | None = None

    def _begin(self, at_last: ExitStack) -> None:
        at_last.callback(self._fleet.close)
        at_last.callback(self._discovery.close)

    @property
    def _is_ending(self) -> bool:
        return bool(self._signals) or self._stop is not None

    def _needs(self, names: set[str]) -> bool:
        return bool(names & set(self._membership.hosts or ()))

    def _decide(self, now: float) -> None:
        if self._is_ending:
            return
        if self._discovery.poll():
            self._fleet.hosts_are(self._discovery.hosts)
            self._membership.hosts_are(self._discovery.hosts, now)
        orders = self._membership.tick(now)
        while orders:
            for order in orders:
                self._obey(order, now)
            # What was done may have changed what is to be done: a worker that cannot be started has ended.
            orders = [] if self._stop is not None else self._membership.tick(now)

    def _outcome(self, seconds: float) -> Outcome:
        assert self._stop is not None, "the loop ends with a signal or a stop"
        if self._stop.succeeded:
            return Outcome(0, seconds)
        if self._stop.text:
            self.say(self._stop.text)
        failure = self._failures[0] if self._failures else None
        return Outcome(failure.exit_code if failure else 1, seconds, failure=failure)

    # -- orders ----------------------------------------------------------------------------------

    def _obey(self, order: Order, now: float) -> None:
        if isinstance(order, Say):
            self.say(order.text)
        elif isinstance(order, Start):
            self._start_worker(order, now)
        elif isinstance(order, Tell):
            self._tell(order)
        elif isinstance(order, Kill):
            self._kill(order.number)
        else:
            self._stop = order
            self._stopping = True
            self._stop_after(now)

    def _start_worker(self, order: Start, now: float) -> None:
        self.output.open_logs(order.number + 1)
        try:
            host = self._fleet.reach(order.host, (self._membership.hosts or {}).get(order.host, 1), self)
        except FarandoleError as problem:
            self._failures.append(_failure_of_host(order.host, str(problem), "", problem.exit_code))
            self._membership.host_is_lost(order.host, str(problem), now)
            return
        self.hosts.add(host, order.host, [order.number])
        host.start(order.number, order.host, self._variables_before_meeting(order))

    def _host_of(self, worker: int) -> WorkerHost | None:
        return cast("WorkerHost | None", self.hosts.where.get(worker))

    def _kill(self, worker: int) -> None:
        if host := self._host_of(worker):
            host.kill(worker)

    def _tell(self, order: Tell) -> None:
        frame = order.frame
        if order.place is not None:
            self._failures.clear()  # those of generations that were outlived are not why a job stops
            frame = {**frame, "environment": self._rank_variables(order.place, frame)}
        if host := self._host_of(order.number):
            host.tell(order.number, frame)

    def _rank_variables(self, place: RankSpec, frame: Frame) -> dict[str, str]:
        job = replace(self._job, address=frame["address"], port=frame["port"], generation=frame["generation"])
        values = rank_environment(place, job, self._environment)
        return {**{name: values[name] for name in RANK_NAMES if name in values}, env.NONCE: frame["nonce"]}

    def _variables_before_meeting(self, order: Start) -> dict[str, str]:
        """Return what a script may read before it meets the others, as Horovod has it: to choose its GPU, say."""
        values = rank_environment(order.place, self._job, self._environment)
        return {name: values[name] for name in RANK_NAMES if name.startswith("HOROVOD_")}

    # -- reports of hosts ------------------------------------------------------------------------

    def heard(self, number: int, frame: Frame) -> None:
        """A worker has sent a frame; one that makes no sense ends it."""
        worker, now = number, time.monotonic()
        try:
            if frame["type"] == "ready":
                self._membership.is_ready(
                    worker,
                    progress=int(frame["progress"]),
                    address=str(frame["address"]),
                    port=int(frame["port"]),
                    now=now,
                    is_in_step=bool(frame.get("in_step")),
                    lets_in=bool(frame.get("lets_in")),
                    can_prepare=bool(frame.get("can_prepare")),
                )
            elif frame["type"] == "failed":
                self._membership.has_failed(worker, int(frame["generation"]), str(frame["why"]), now)
            elif frame["type"] == "missed":
                self._membership.has_missed(worker, int(frame["generation"]), list(frame["addresses"]), now)
            elif frame["type"] == "progress":
                self._membership.has_progressed(worker, int(frame["progress"]))
        except (KeyError, TypeError, ValueError) as problem:
            self.say(f"worker {worker} is stopped: it sent {str(frame)[:80]}, which makes no sense: {problem!r}")
            self._kill(worker)

    def _has_ended(self, exited: Exit) -> None:
        worker, now = exited.rank, time.monotonic()
        exited = replace(exited, stopped_by_us=self._stopping and exited.code != 0)
        why = f"exit code {exited.code}"
        known = self._membership.workers[worker]
        if exited.failed and known.is_alive:
            crashes = [self._crashes[worker]] if worker in self._crashes else []
            failure = find_failure([exited], crashes, host=known.host, stop_seconds=0.0)
            if known.has_trained or not self._membership.current.number:
                self._failures.append(failure)  # that of a spare is not why a job fails
            why = failure.cause
            trace = failure.traceback.rstrip()
            if trace and trace != why:
                self.output.say("\n".join(f"  {line}" for line in trace.splitlines()))
        self._membership.has_ended(worker, well=exited.code == 0, why=why, now=now)

    def _has_lost(self, names: set[str], running: list[int], failure: HostFailure) -> None:
        why = f"{failure.cause}; {failure.remedy}" if failure.remedy else failure.cause
        for name in sorted(names):
            self._failures.append(_failure_of_host(name, failure.cause, failure.remedy, failure.exit_code))
            self._membership.host_is_lost(name, why, time.monotonic())


def _failure_of_host(name: str, cause: str, remedy: str, exit_code: int) -> Failure:
    return Failure(None, name, cause, exit_code, remedy=remedy)


# The hosts of an elastic job: fixed ones, or the output of a user's script, run once a second.
#
# The script runs beside the driver's loop, never in it: it is started, read when it has something to say and
# killed when it takes too long. Its first failure is an error of the person who wrote it; a later one may be a
# passing trouble of the cluster's, and the hosts stay as they were until the time-out.


PERIOD_SECONDS = 1.0
SCRIPT_SECONDS = 30.0
"""The script's time limit for one answer."""
_LONGEST_ANSWER_BYTES = 1 << 20
_HOST = re.compile(r"[A-Za-z0-9_.\-\[\]:]*[A-Za-z0-9_.\-\]]")


def parse_hosts(text: str, default_slots: int) -> dict[str, int]:
    """Return hosts and slots of a script's answer; empty lines and lines that begin with # do not count.

    Raises `ValueError` naming the first line that is neither ``host:slots`` nor ``host``.
    """
    found: dict[str, int] = {}
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, colon, number = line.rpartition(":")
        if not colon:
            name, number = line, str(default_slots)
        if not _HOST.fullmatch(name) or not number.isascii() or not number.isdigit():
            raise ValueError(f"line {raw!r} is neither host:slots nor host")
        if int(number) > 4096:
            raise ValueError(f"line {raw!r}: {number} slots are more than a host can have (4096)")
        if int(number):
            found[name] = found.get(name, 0) + int(number)
    return found


@dataclass(eq=False)
class Discovery:
    """The hosts, oldest first. `poll` is called often and returns at once."""

    script: Path | None
    default_slots: int = 1
    timeout_seconds: float = 600.0
    """How long the script may keep failing after it has worked once."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """The hosts when there is no script."""
    period_seconds: float = PERIOD_SECONDS
    limit_seconds: float = SCRIPT_SECONDS
    hosts: dict[str, int] = field(default_factory=dict)
    answered: bool = False
    """Whether `hosts` is known."""
    _running: subprocess.Popen[bytes] | None = None
    _text: bytes = b""
    _started_at: float = 0.0
    _next_at: float = float("-inf")
    _failing_since: float | None = None

    def poll(self) -> bool:
        """Go on; return whether hosts or slots have changed.

        Raises `ConfigError` without a first answer, `LaunchError` when none comes for too long.
        """
        if self.script is None:
            changed = not self.answered
            self.hosts, self.answered = dict(self.fixed), True
            return changed
        now = time.monotonic()
        if self._running is None:
            if now < self._next_at:
                return False
            self._start(now)
        try:
            answer = self._read(now)
            if answer is None:
                return False
            found = parse_hosts(answer, self.default_slots)
        except (OSError, ValueError) as problem:
            self._failed(str(problem), now)
            return False
        self._failing_since = None
        return self._take(found)

    def close(self) -> None:
        """Stop a script that runs."""
        if self._running is not None:
            self._end()

    def _start(self, now: float) -> None:
        assert self.script is not None, "there is a script to start"
        command = read_script(self.script)
        self._started_at, self._next_at, self._text = now, now + self.period_seconds, b""
        try:
            self._running = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=stopping_with_us(),  # noqa: PLW1509 - forked from a process with one thread
            )
        except (OSError, subprocess.SubprocessError) as problem:
            raise ConfigError(f"host discovery script {str(self.script)!r} cannot be started: {problem}") from None
        assert self._running.stdout is not None, "it is a pipe"
        os.set_blocking(self._running.stdout.fileno(), False)

    def _read(self, now: float) -> str | None:
        """Return the whole answer; None while there is more to come. Raises `OSError` or `ValueError`."""
        running = self._running
        assert running is not None, "a script runs"
        assert running.stdout is not None, "it is a pipe"
        while data := running.stdout.read(1 << 16):
            self._text += data
            if len(self._text) > _LONGEST_ANSWER_BYTES:
                raise ValueError(f"it printed more than {_LONGEST_ANSWER_BYTES} bytes")
        if not has_ended(running):
            if now - self._started_at > self.limit_seconds:
                raise ValueError(f"it did not end within {self.limit_seconds:g} s")
            return None
        # What was written between the last look and the end.
        self._text += running.stdout.read() or b""
        code = self._end()
        if code:
            raise ValueError(f"exit code {code}" if code > 0 else f"killed by signal {-code}")
        return self._text.decode()

    def _end(self) -> int:
        running, self._running = self._running, None
        assert running is not None, "a script runs"
        code = end_group(running)
        assert running.stdout is not None, "it is a pipe"
        running.stdout.close()
        return code

    def _failed(self, why: str, now: float) -> None:
        if self._running is not None:
            self._end()
        if not self.answered:
            raise ConfigError(
                f"host discovery script {str(self.script)!r} failed: {why}",
                remedy="it must print a line a host, host:slots or host, and end with exit code 0",
            )
        self._failing_since = now if self._failing_since is None else self._failing_since
        if now - self._failing_since > self.timeout_seconds:
            seconds = f"{self.timeout_seconds:g} s"
            raise LaunchError(f"host discovery script {str(self.script)!r} has failed for {seconds}, last: {why}")

    def _take(self, found: Mapping[str, int]) -> bool:
        """Take a new answer; hosts that were there before keep their place before newer ones."""
        stay = {name: found[name] for name in self.hosts if name in found}
        hosts = {**stay, **{name: slots for name, slots in found.items() if name not in stay}}
        changed = hosts != self.hosts or not self.answered
        self.hosts, self.answered = hosts, True
        return changed


def read_script(script: Path) -> Sequence[str]:
    """Return the words of a discovery script: a file, or a command with arguments.

    Raises `ConfigError` when there is no such thing, or it may not be executed.
    """
    words = [str(script.absolute())] if script.exists() else shlex.split(str(script))
    path = shutil.which(words[0]) if words else None
    if path is None:
        remedy = f"chmod +x {script}" if script.is_file() else "name an executable file"
        raise ConfigError(f"host discovery script {str(script)!r} cannot be executed", remedy=remedy)
    return [path, *words[1:]]

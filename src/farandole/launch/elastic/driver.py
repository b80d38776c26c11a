"""Runs an elastic job on this machine: processes, control channels, discovery, and the roster's orders.

One thread, one selector: nothing here may wait.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...core import env
from ...core.errors import FarandoleError
from ...core.run_files import read_crashes
from ..contract import Job, Place, rank_environment
from ..failure import Exit, Failure, find_failure, out_of_memory_kills
from ..hosts import Host
from ..local import STATUS_SECONDS, TERMINATE_SECONDS, Outcome, Supervisor
from ..output import Output
from ..process import RankProcess, start_rank
from ..reaper import Reaper
from .blacklist import Blacklist
from .channel import Channel, Switchboard
from .control import Frame, make_secret, worker_key
from .discovery import Discovery
from .options import ElasticOptions
from .roster import Kill, Order, Roster, Say, Start, Stop, Tell

ALIVE_SECONDS = 5.0
"""How often a worker that waits hears from us."""
HUNG_UP_SECONDS = 30.0
"""For a worker whose channel is closed to end: nobody can tell it to leave a generation."""
_TICK_SECONDS = 0.1

StartProcess = Callable[[int, Sequence[str], Mapping[str, str], Sequence[int], Host | None], RankProcess]


@dataclass(frozen=True)
class ElasticJob:
    """What `run_elastic` is asked to run."""

    command: Sequence[str]
    options: ElasticOptions
    job: Job
    """Its address is where workers reach this launcher; the meeting points of the ranks are their own."""
    environment: Mapping[str, str]
    hosts: Mapping[str, int] = field(default_factory=dict)
    """Hosts and slots when no discovery script is given."""
    locate: Callable[[str], Host | None] = lambda name: None
    """Finds the namespaces of a host; None: this machine. Raises `FarandoleError` for a host it cannot reach."""
    start: StartProcess = start_rank


def run_elastic(asked: ElasticJob, output: Output, *, status: Callable[[], str | None] = lambda: None) -> Outcome:
    """Run the job to its end and return how it ended; everything it started is gone then.

    Raises `ConfigError` when the discovery script does not work, `LaunchError` when it stops working.
    """
    return _Driver(asked, output, status).run()


class _Driver(Supervisor):
    """The supervisor of workers that come and go. What was a rank there is a worker's number here."""

    def __init__(self, asked: ElasticJob, output: Output, status: Callable[[], str | None]) -> None:
        super().__init__(asked.command, (), asked.job, output, asked.environment, status)
        options = asked.options
        self.asked = asked
        self._discovery = Discovery(
            options.discovery_script,
            default_slots=options.slots_per_host or 1,
            timeout_seconds=options.elastic_timeout_seconds,
            fixed=asked.hosts,
        )
        self._roster = Roster(options, Blacklist(options.cooldown_range_seconds), time.monotonic())
        self._secret = make_secret()
        self._failures: list[Failure] = []
        self._stop: Stop | None = None
        self._next_alive = 0.0
        self._hung_up: dict[int, float] = {}
        """When the channel of a worker was lost; it ends by itself, as a rule."""

    def run(self) -> Outcome:
        """Do all that is to be done; return when all workers are gone."""
        begin = time.monotonic()
        self._kills_before = out_of_memory_kills()
        self._reaper = Reaper()
        previous = self._catch_signals()
        next_status = begin + STATUS_SECONDS
        self._switchboard = Switchboard(self.job.address, self._secret, self._selector)
        try:
            while True:
                self._poll()
                now = time.monotonic()
                if not self._signals and self._stop is None:
                    self._think(now)
                self._send_due(now)
                if (self._signals or self._stop is not None) and not self._running:
                    break
                if now >= next_status:
                    next_status = now + self._show_status()
        finally:
            self._discovery.close()
            self._switchboard.close()
            self._end_all()
            self._reaper.dismiss()
            self._release_signals(previous)
            self.output.status(None)
        seconds = time.monotonic() - begin
        if self._signals:
            return Outcome(128 + self._signals[0], seconds, signal=self._signals[0])
        assert self._stop is not None, "the loop ends with a signal or a stop"
        if self._stop.succeeded:
            return Outcome(0, seconds)
        if self._stop.text:
            self.output.say(f"farandole: {self._stop.text}")
        failure = self._failures[0] if self._failures else None
        return Outcome(failure.exit_code if failure else 1, seconds, failure=failure)

    def _think(self, now: float) -> None:
        if self._discovery.poll():
            self._roster.hosts_are(self._discovery.hosts, now)
        orders = self._roster.tick(now)
        while orders:
            for order in orders:
                self._obey(order, now)
            # What was done may have changed what is to be done: a worker that cannot be started has ended.
            orders = [] if self._stop is not None else self._roster.tick(now)
        self._switchboard.tick(now)
        self._look_for_frozen(now)
        for number, since in list(self._hung_up.items()):
            if now - since > HUNG_UP_SECONDS and number in self._running:
                del self._hung_up[number]
                self.output.say(f"farandole: worker {number} cannot be reached any more and is stopped")
                self._running[number].signal(signal.SIGKILL)
        if now >= self._next_alive:
            self._next_alive = now + ALIVE_SECONDS
            for number in self._switchboard.channels:
                self._switchboard.send(number, {"type": "alive"})

    def _is_frozen(self, rank: int) -> None:
        self._running[rank].signal(signal.SIGKILL)  # the others go on without it

    # -- orders ----------------------------------------------------------------------------------

    def _obey(self, order: Order, now: float) -> None:
        if isinstance(order, Say):
            self.output.say(f"farandole: {order.text}")
        elif isinstance(order, Start):
            self._start_worker(order, now)
        elif isinstance(order, Tell):
            self._tell(order)
        elif isinstance(order, Kill):
            if order.number in self._running:
                self._running[order.number].signal(signal.SIGKILL)
        else:
            self._stop = order
            self._stopping = True
            self._deadlines = [(now, signal.SIGTERM), (now + TERMINATE_SECONDS, signal.SIGKILL)]

    def _start_worker(self, order: Start, now: float) -> None:
        number = order.number
        environment = {
            **{name: value for name, value in self.environment.items() if name not in env.RANK_NAMES},
            env.RUN_DIRECTORY: str(self.job.run_directory),
            env.ELASTIC: f"{self._switchboard.address}:{self._switchboard.port}",
            env.ELASTIC_WORKER: str(number),
            env.ELASTIC_KEY: worker_key(self._secret, number).hex(),
        }
        self.output.open_logs(number + 1)
        try:
            host = self.asked.locate(order.host)
            place = Place(0, 1, 0, 1, host=host)
            told = rank_environment(place, self.job, self.environment)
            told = {name: value for name, value in told.items() if name not in env.RANK_NAMES}
            process = self.asked.start(number, self.command, {**environment, **told}, (), host)
        except FarandoleError as problem:
            self._roster.has_ended(number, well=False, why=str(problem), now=now)
            return
        self._follow(process, self._reaper)

    def _tell(self, order: Tell) -> None:
        frame = order.frame
        if frame["type"] == "assignment":
            self._failures.clear()  # those of generations that were outlived are not why a job stops
            frame = {**frame, "environment": self._rank_variables(frame)}
        self._switchboard.send(order.number, frame)

    def _rank_variables(self, frame: Frame) -> dict[str, str]:
        names = ("rank", "size", "local_rank", "local_size", "node_rank", "node_count", "cross_rank", "cross_size")
        host = self.asked.locate(frame["host"])
        place = Place(**{name: frame[name] for name in names}, host=host, host_name=frame["host"])
        job = replace(self.job, address=frame["address"], port=frame["port"], generation=frame["generation"])
        told = rank_environment(place, job, self.environment)
        return {**{name: told[name] for name in env.RANK_NAMES if name in told}, env.NONCE: frame["nonce"]}

    # -- events ----------------------------------------------------------------------------------

    def _poll(self) -> None:
        for key, _ in self._selector.select(timeout=_TICK_SECONDS):
            data: Any = key.data
            if data is None:
                self._woken()
            elif isinstance(data, Switchboard):
                data.accept(time.monotonic())
            elif isinstance(data, Channel):
                known = self._running.__contains__
                for frame in self._switchboard.read(data, known):
                    self._heard(data, frame)
                if data.worker is not None and data.worker not in self._switchboard.channels:
                    self._hung_up.setdefault(data.worker, time.monotonic())
            else:
                self._rank_event(key)
        self.output.tick()

    def _heard(self, channel: Channel, frame: Frame) -> None:
        number = channel.worker
        assert number is not None, "frames come after the hello"
        now = time.monotonic()
        try:
            if frame["type"] == "ready":
                self._roster.is_ready(
                    number,
                    progress=int(frame["progress"]),
                    address=str(frame["address"]),
                    port=int(frame["port"]),
                    now=now,
                )
            elif frame["type"] == "failed":
                self._roster.has_failed(number, int(frame["generation"]), str(frame["why"]), now)
            elif frame["type"] == "progress":
                self._roster.has_progressed(number, int(frame["progress"]))
        except (KeyError, TypeError, ValueError) as problem:
            self.output.say(
                f"farandole: worker {number} sent a {frame['type']!r} that makes no sense: {problem!r}"
            )
            self._switchboard.hang_up(channel)

    def _ended(self, process: RankProcess) -> None:
        super()._ended(process)
        number, now = process.rank, time.monotonic()
        self._hung_up.pop(number, None)
        if number in self._switchboard.channels:
            self._switchboard.hang_up(self._switchboard.channels[number])
        ended = self._exits[-1]
        why = ""
        if ended.failed and self._roster.workers[number].is_alive:
            failure = self._account_for(ended)
            self._failures.append(failure)
            why = failure.cause
            if failure.traceback:
                self.output.say(
                    "".join(f"  {line}\n" for line in failure.traceback.rstrip().splitlines()).rstrip()
                )
        self._roster.has_ended(number, well=ended.code == 0, why=why or f"exit code {ended.code}", now=now)

    def _account_for(self, ended: Exit) -> Failure:
        crashes = [crash for crash in read_crashes(self.job.run_directory) if crash.rank == ended.rank]
        return find_failure(
            [ended],
            crashes,
            host=self._roster.workers[ended.rank].host,
            stop_seconds=0.0,
            out_of_memory=out_of_memory_kills() > self._kills_before,
        )

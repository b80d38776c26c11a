"""The supervisor of one host of a job: started over ssh by the launcher, without torch, ending with the pipe.

It starts the ranks of its host, all at once, passes on what they print and how they end, and sends them
the signals it is told to.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

from ....core.environ.env import inherited_environment
from ....core.vocabulary.run_files import read_crashes
from ...job.cores import available_cores, divide_cores
from ...supervise.failure import Exit
from ...supervise.local import CRASH_POLL_SECONDS
from ...supervise.process import RankProcess
from ...supervise.ranks import HostRanks
from ..link.frames import Channel, Message
from ..link.protocol import pack_crash, unpack_job, unpack_place
from .agent_base import Agent, serve


def main() -> None:
    """Serve one launcher, and leave."""
    serve(RankAgent)


class PipeSink:
    """Sends what ranks print to the launcher, whose own output finishes it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def feed(self, rank: int, is_error: bool, data: bytes) -> None:
        """Pass it on."""
        self._channel.send_output(rank, is_error, data)

    def finish(self, rank: int, *, failed: bool) -> str:
        """Nothing is held here."""
        return ""

    def tick(self) -> None:
        """Nothing waits here."""


class _Ranks(HostRanks):
    """The ranks of this host, whose ends are told to `tell`."""

    tell: Callable[[Exit], None]

    @property
    def are_running(self) -> bool:
        return bool(self._running)

    def start_all(self, agent: Agent) -> None:
        self._reaper = agent.reaper
        for place in self.places:
            self._start(place)
            agent.show_life(time.monotonic())  # starting many takes a while on a busy host

    def poll(self) -> None:
        for key, _ in self._selector.select(0):
            self._rank_event(key)

    def stop(self, number: int) -> None:
        self._stopping = True
        self._signal_ranks(number)

    def look_for_frozen(self) -> None:
        self._look_for_frozen(time.monotonic())

    def take_stacks(self) -> None:
        self._stack_taker.take(self.rank_processes())

    def end(self) -> None:
        self._end_all()

    def fileno(self) -> int:
        return self._selector.fileno()  # type: ignore[attr-defined,no-any-return]

    def _ended(self, process: RankProcess) -> None:
        super()._ended(process)
        self.tell(self._exits[-1])


class RankAgent(Agent):
    """The ranks of this host, under a launcher's orders."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._ranks: _Ranks | None = None
        self._next_look = 0.0
        self._told: set[int] = set()
        """Ranks whose crash was told."""

    def work(self, start: Message) -> None:
        """Start all ranks, and pass on what they do until all have ended."""
        assert self.directory is not None, "it was made"
        environment = inherited_environment(start["environment"])
        job = unpack_job(start["job"], self.directory, self.plan_file)
        cores = available_cores()
        count = len(start["places"])
        shares = divide_cores(cores, count) if start["bind"] else [()] * count
        places = [
            unpack_place(values, cores=share, interface=self.interface)
            for values, share in zip(start["places"], shares, strict=True)
        ]
        job = replace(job, threads=max(1, len(cores) // max(1, count)))
        ranks = self._ranks = _Ranks(start["command"], places, job, PipeSink(self.channel), environment)
        ranks.tell = self._tell_exit
        self.attend(ranks, ranks.poll)
        ranks.start_all(self)
        self.channel.send_message({"type": "started"})
        self.catch_up()
        while ranks.are_running:
            self.turn(0.1)
            ranks.look_for_frozen()
            self._tell_crashes(time.monotonic())
        self._tell_crashes(self._next_look)

    def obey(self, message: Message) -> bool:
        """Pass a signal on, or take stacks, once there are ranks."""
        if message["type"] not in ("signal", "stacks") or self._ranks is None:
            return False
        if message["type"] == "stacks":
            self._ranks.take_stacks()
        else:
            self._ranks.stop(int(message["number"]))
        return True

    def end(self) -> None:
        """Kill what runs."""
        if self._ranks is not None:
            self._ranks.end()

    def _tell_exit(self, ended: Exit) -> None:
        self._tell_crashes(self._next_look)  # its account goes first: it may explain the end
        self.channel.send_message(
            {"type": "exit", "rank": ended.rank, "code": ended.code, "stopped": ended.stopped_by_us}
        )

    def _tell_crashes(self, now: float) -> None:
        """Pass on new accounts of crashes."""
        if now < self._next_look or self._ranks is None:
            return
        self._next_look = time.monotonic() + CRASH_POLL_SECONDS
        mine = {place.rank for place in self._ranks.places} - self._told
        for crash in read_crashes(self._ranks.job.run_directory):
            if crash.rank in mine:
                self._told.add(crash.rank)
                self.channel.send_message({"type": "crash", "crash": pack_crash(crash)})


if __name__ == "__main__":
    sys.exit("this is started by farandole run over ssh")

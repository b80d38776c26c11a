"""The supervisor of one host of a job: started over ssh by the launcher, without torch, ending with the pipe.

It starts the ranks of its host, all at once, passes on what they print and how they end, and sends them
the signals it is told to.
"""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import replace

from ...core.env import inherited_environment
from ...core.vocabulary.run_files import read_crashes
from ..job.placement import available_cores, bind_ranks, crowding_warnings, threads_per_rank
from ..supervise.failure import Exit
from ..supervise.ranks import CRASH_POLL_SECONDS, HostRanks, PassOn
from .agent_base import Agent, serve
from .link.frames import Channel, Message
from .link.protocol import pack_crash, unpack_job, unpack_place


def main() -> None:
    """Serve one launcher, and leave."""
    serve(RankAgent)


class RankAgent(Agent):
    """The ranks of this host, under a launcher's orders."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._next_look = 0.0
        self._is_stopped = False
        """Whether the launcher has sent a signal."""
        self._reported: set[int] = set()
        """Ranks whose crash the launcher has."""

    def work(self, start: Message) -> None:
        """Start all ranks, and pass on what they do until all have ended."""
        assert self.directory is not None, "it was made"
        environment = inherited_environment(start["environment"])
        job = unpack_job(start["job"], self.directory, self.plan_file)
        cores = available_cores()
        places = [unpack_place(values, interface=self.interface) for values in start["places"]]
        places = bind_ranks(places, cores, bind=start["bind"])
        fewer = "give this host at most {} slots"
        for warning in crowding_warnings(
            len(places), len(cores), bind=start["bind"], remedy=fewer, environment=environment
        ):
            self.say(f"warning: {warning}")
        job = replace(job, threads=threads_per_rank(cores, len(places)))
        printed = PassOn(self.channel.send_output)
        ranks = HostRanks(start["command"], places, job, printed, environment, self.reaper, self._tell_exit)
        self.ranks = ranks
        for place in places:
            ranks.start_rank(place)
            self.show_life(time.monotonic())  # starting many takes a while on a busy host
        self.catch_up()
        while ranks.processes():
            self.turn(0.1)
            self._tell_crashes(time.monotonic())
        self._tell_crashes(self._next_look)

    def obey(self, message: Message) -> bool:
        """Pass a signal on, or take stacks."""
        assert self.ranks is not None, "they are attended to"
        if message["type"] not in ("signal", "stacks"):
            return False
        if message["type"] == "stacks":
            self.ranks.take_stacks()
        else:
            if not self._is_stopped and int(message["number"]) != signal.SIGUSR1:
                self._is_stopped = True
                found = [position.to_json() for position in self.ranks.note_positions()]
                self.channel.send_message({"type": "positions", "positions": found})
            self.ranks.stop(int(message["number"]))
        return True

    def _tell_exit(self, ended: Exit) -> None:
        self._tell_crashes(self._next_look)  # its account goes first: it may explain the end
        said = {"code": ended.code, "stopped": ended.stopped_by_us, "is_missed": ended.is_missed}
        self.channel.send_message({"type": "exit", "rank": ended.rank, **said})

    def _tell_crashes(self, now: float) -> None:
        """Pass on new accounts of crashes."""
        if now < self._next_look or self.ranks is None:
            return
        self._next_look = time.monotonic() + CRASH_POLL_SECONDS
        mine = {place.rank for place in self.ranks.places} - self._reported
        for crash in read_crashes(self.ranks.job.run_directory):
            if crash.rank in mine:
                self._reported.add(crash.rank)
                self.channel.send_message({"type": "crash", "crash": pack_crash(crash)})


if __name__ == "__main__":
    sys.exit("this is started by farandole run over ssh")

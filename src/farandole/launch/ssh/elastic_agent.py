"""The supervisor of one host of an elastic job: starts workers one by one, and forwards messages.

Workers have their control channel to this process, on the loopback interface; from here their frames go
through the pipe, so that no port of the network is open for control.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from ...core.env import inherited_environment
from ...core.vocabulary.run_files import Crash
from ..elastic.control import Frame
from ..elastic.workers import Workers
from ..job.contract import RankSpec
from ..job.hosts import LOOPBACK
from ..job.placement import available_cores, threads_per_rank
from ..supervise.failure import Exit
from .agent_base import Agent, serve
from .link.frames import Channel, Message
from .link.protocol import pack_crash, unpack_job


def main() -> None:
    """Serve one launcher, and leave."""
    serve(ElasticAgent)


class ElasticAgent(Agent):
    """The workers of this host, under a driver's orders."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._is_leaving = False

    def work(self, start: Message) -> None:
        """Do as the driver says until it says that this is all."""
        assert self.directory is not None, "it was made"
        job = unpack_job(start["job"], self.directory, self.plan_file)
        threads = threads_per_rank(available_cores(), int(start["slots"]))
        workers = self.ranks = Workers(
            start["command"],
            replace(job, address=LOOPBACK, threads=threads),
            inherited_environment(start["environment"]),
            self.reaper,
            reports=self,
            place=self._place,
        )
        self.catch_up()
        while not self._is_leaving or workers.processes():
            self.turn(0.1)

    def obey(self, message: Message) -> bool:
        """Do what is said of a worker."""
        assert isinstance(self.ranks, Workers), "they are attended to"
        kind = message["type"]
        if kind == "worker":
            self.ranks.start(int(message["worker"]), str(message["host"]), message["variables"])
        elif kind == "tell":
            self.ranks.tell(int(message["worker"]), message["frame"])
        elif kind == "signal":
            self.ranks.signal(int(message["worker"]), int(message["number"]))
        elif kind == "leave":
            self._is_leaving = True
        else:
            return False
        return True

    def _place(self, host_name: str) -> RankSpec:
        return RankSpec(0, 1, 0, 1, node_count=2, interface=self.interface, host_name=host_name)

    # -- reports of the workers ------------------------------------------------------------------

    def printed(self, worker: int, is_error: bool, data: bytes) -> None:
        """A worker has printed something."""
        self.channel.send_output(worker, is_error, data)

    def heard(self, worker: int, frame: Frame) -> None:
        """A worker has sent a frame."""
        self.channel.send_message({"type": "heard", "worker": worker, "frame": frame})

    def ended(self, exited: Exit, crashes: Sequence[Crash], *, out_of_memory: bool) -> None:
        """A worker's process is gone."""
        self.channel.send_message(
            {
                "type": "exit",
                "rank": exited.rank,
                "code": exited.code,
                "held": exited.held,
                "crashes": [pack_crash(crash) for crash in crashes],
                "out_of_memory": out_of_memory,
            }
        )


if __name__ == "__main__":
    sys.exit("this is started by farandole run over ssh")

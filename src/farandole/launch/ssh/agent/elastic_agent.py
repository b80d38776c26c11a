"""The supervisor of one host of an elastic job: starts workers one by one, and forwards messages.

Workers have their control channel to this process, on the loopback interface; from here their frames go
through the pipe, so that no port of the network is open for control.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from ....core.environ.env import inherited_environment
from ....core.vocabulary.errors import FarandoleError
from ....core.vocabulary.run_files import Crash
from ...elastic.control import Frame
from ...elastic.workers import Workers
from ...job.contract import RankSpec
from ...job.cores import available_cores
from ...job.hosts import LOOPBACK
from ...supervise.failure import Exit
from ..link.frames import Channel, Message
from ..link.protocol import pack_crash, unpack_job
from .agent_base import Agent, serve


def main() -> None:
    """Serve one launcher, and leave."""
    serve(ElasticAgent)


class ElasticAgent(Agent):
    """The workers of this host, under a driver's orders."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._workers: Workers | None = None
        self._is_leaving = False

    def work(self, start: Message) -> None:
        """Do as the driver says until it says that this is all."""
        assert self.directory is not None, "it was made"
        job = unpack_job(start["job"], self.directory, self.plan_file)
        threads = max(1, len(available_cores()) // max(1, int(start["slots"])))
        self._workers = Workers(
            start["command"],
            replace(job, address=LOOPBACK, threads=threads),
            inherited_environment(start["environment"]),
            self.reaper,
            self,
        )
        self.attend(self._workers, self._workers.poll)
        self.channel.send_message({"type": "started"})
        self.catch_up()
        while not self._is_leaving or self._workers.running:
            self.turn(0.1)
            self._workers.tick(time.monotonic())

    def obey(self, message: Message) -> bool:
        """Do what is said of a worker."""
        if self._workers is None:
            return False
        kind = message["type"]
        if kind == "worker":
            self._start(int(message["worker"]), str(message["host"]), message["variables"])
        elif kind == "tell":
            self._workers.tell(int(message["worker"]), message["frame"])
        elif kind == "signal":
            self._workers.signal(int(message["worker"]), int(message["number"]))
        elif kind == "leave":
            self._is_leaving = True
        else:
            return False
        return True

    def end(self) -> None:
        """Kill what runs."""
        if self._workers is not None:
            self._workers.close()

    def _start(self, worker: int, host_name: str, variables: dict[str, str]) -> None:
        assert self._workers is not None, "orders come after the start"
        place = RankSpec(0, 1, 0, 1, node_count=2, interface=self.interface, host_name=host_name)
        try:
            self._workers.start(worker, place, variables)
        except FarandoleError as problem:
            failed = Exit(worker, problem.exit_code, time.monotonic(), held=str(problem))
            self.ended(failed, (), out_of_memory=False)

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

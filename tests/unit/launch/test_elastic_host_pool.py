"""Hosts of an elastic job over connections, with a few lines of python in the place of ssh and of the agent."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from farandole.core.failures import Position
from farandole.core.framing import pack_frame
from farandole.core.vocabulary.errors import ConfigError
from farandole.core.vocabulary.run_files import PLAN, Crash
from farandole.launch.elastic.control import Frame
from farandole.launch.elastic.workers import WorkerHost
from farandole.launch.job.contract import JobSpec
from farandole.launch.job.hosts import Host, HostFinder, HostSlots
from farandole.launch.ssh.frames import MAGIC, MOST_BYTES
from farandole.launch.ssh.host import RemoteJobSpec
from farandole.launch.ssh.protocol import own_versions, pack_crash
from farandole.launch.ssh.remote_shell import HostSetup
from farandole.launch.start.elastic import ElasticHosts, ThisMachine
from farandole.launch.supervise.failure import Exit, HostFailure
from farandole.launch.supervise.job_loop import JobHost

# Plays an agent: says what it is given, a frame after the other, and stays.
ACTOR = """
import sys, time
sys.stdout.buffer.write(bytes.fromhex(sys.argv[1]))
sys.stdout.buffer.flush()
time.sleep(60)
"""


class Heard:
    """What was reported."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, Frame]] = []
        self.exits: list[Exit] = []
        self.crashes: list[Crash] = []
        self.losses: list[tuple[str, int]] = []

    def heard(self, worker: int, frame: Frame) -> None:
        self.frames.append((worker, frame))

    def printed(self, worker: int, is_error: bool, data: bytes) -> None:
        pass

    def crashed(self, crash: Crash) -> None:
        self.crashes.append(crash)

    def ended(self, exited: Exit) -> None:
        self.exits.append(exited)

    def stood(self, positions: Iterable[Position]) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def lost(self, host: JobHost, failure: HostFailure) -> None:
        self.losses.append((failure.cause, failure.exit_code))
        host.close()


def message(**values: object) -> bytes:
    text = json.dumps(values).encode()
    return pack_frame(ord("m"), text, MOST_BYTES)


READY = message(type="ready", versions=own_versions(), address="10.1.2.3", name="b", shared=True)
ROUTE = message(type="route", interface="eth7", address="10.1.2.3", port=0)


class Stage:
    """A fleet whose hosts say what they are given."""

    def __init__(self, directory: Path) -> None:
        (directory / PLAN).write_text("")
        self.says: dict[str, bytes] = {}
        self.reports = Heard()
        self.work = RemoteJobSpec(
            ("true",), JobSpec("127.0.0.1", 0, directory), HostSetup("/", sys.executable), {}
        )

        def find(name: str) -> Host:
            return HostFinder().find(HostSlots(name, 1))

        self.fleet = ElasticHosts(self.work, find, self.command_for, ThisMachine(("true",), self.work.job, {}))
        self.hosts: list[WorkerHost] = []

    def command_for(self, host: Host) -> list[str]:
        return [sys.executable, "-S", "-c", ACTOR, (MAGIC + self.says[host.name]).hex()]

    def reach(self, name: str, says: bytes) -> WorkerHost:
        self.says[name] = says
        self.hosts.append(self.fleet.reach(name, 1, self.reports))
        return self.hosts[-1]

    def turn_until(self, what: str) -> None:
        deadline = time.monotonic() + 20
        while not getattr(self.reports, what):
            assert time.monotonic() < deadline, f"no {what}"
            for host in self.hosts:
                host.poll()
                host.tick(time.monotonic())
            time.sleep(0.01)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    made.fleet.hosts_are(["b"])
    yield made
    for host in made.hosts:
        host.close()
    made.fleet.close()
    assert not (tmp_path / ".token").exists()


def test_what_workers_say_is_passed_on(stage: Stage) -> None:
    heard = message(type="heard", worker=3, frame={"type": "ready"})
    crash = message(type="crash", crash=pack_crash(Crash(3, "elsewhere", 5, "ValueError", "x", "", False, 1, 0.0)))
    end = {"code": 7, "held": "", "stopped": False, "is_missed": True, "out_of_memory": False}
    ended = message(type="exit", rank=3, **end)
    stage.reach("b", READY + ROUTE + heard + crash + ended).start(3, "b", {"HOROVOD_RANK": "1"})
    stage.turn_until("exits")
    assert stage.reports.frames == [(3, {"type": "ready"})]
    assert [(crash.rank, crash.host, crash.step) for crash in stage.reports.crashes] == [(3, "b", 5)]
    assert [(exited.rank, exited.code, exited.host) for exited in stage.reports.exits] == [(3, 7, "b")]
    assert not stage.reports.losses


@pytest.mark.parametrize(
    ("says", "cause"),
    [
        (READY + ROUTE + message(type="heard", worker=4, frame={}), "a frame of 4, which does not run there"),
        (READY + ROUTE + message(type="exit", rank=3), "'code'"),
        (READY + ROUTE + message(type="done"), "it is done before it was let go"),
        (b"x" * 100, "a frame of"),
        (message(type="ready", versions={"farandole": "0.0.1"}, address=""), "it has farandole 0.0.1, this"),
        (message(type="failed", why="no interface leads to it", remedy=""), "no interface leads to it"),
    ],
)  # fmt: skip
def test_a_host_that_makes_no_sense_is_lost(stage: Stage, says: bytes, cause: str) -> None:
    stage.reach("b", says).start(3, "b", {"HOROVOD_RANK": "1"})
    stage.turn_until("losses")
    ((found, code),) = stage.reports.losses
    assert cause in found
    assert code == (2 if "0.0.1" in cause else 1)


def test_a_worker_that_waits_for_its_host_can_be_stopped(stage: Stage) -> None:
    host = stage.reach("b", b"")
    host.start(3, "b", {"HOROVOD_RANK": "1"})
    host.stop(15)
    assert [exited.rank for exited in stage.reports.exits] == [3]
    assert host.leave(), "nothing was ever started there"


def test_a_lost_host_is_connected_to_anew(stage: Stage) -> None:
    first = stage.reach("b", b"x" * 100)
    assert stage.fleet.reach("b", 1, stage.reports) is first
    stage.turn_until("losses")
    assert stage.reach("b", READY) is not first


def test_a_job_that_began_on_this_machine_alone_refuses_others(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.fleet.hosts_are(["localhost"])
    stage.fleet.hosts_are(["localhost", "b"])
    with pytest.raises(ConfigError, match="this job began on this machine alone"):
        stage.reach("b", READY)
    stage.fleet.close()

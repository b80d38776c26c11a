"""The supervisor of one host of a job: started over ssh by the launcher, without torch, ending with the pipe.

stdin and stdout are the pipe; what this process or its ranks' starts print by accident goes to stderr. It
decides nothing: it starts ranks, passes on what they print and how they end, and sends the signals it is
told to. When the pipe ends or falls silent, all ranks are killed at once.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core.env import inherited_environment, read_ssh_connection
from ...core.errors import FarandoleError, LaunchError
from ...core.interfaces import Address, towards
from ...core.run_files import PLAN, read_crashes, write_private
from ..cores import available_cores, divide_cores
from ..failure import out_of_memory_kills
from ..local import CRASH_POLL_SECONDS
from ..ports import ReservedPort
from ..process import RankProcess
from ..ranks import HostRanks
from ..reaper import Reaper
from .files import file_frames
from .frames import BEAT, FILE, MAGIC, MESSAGE, Channel, Message, read_message
from .protocol import BEAT_SECONDS, REAPER_SECONDS, SILENCE_SECONDS, TOKEN_FILE, unpack_job, unpack_place
from .versions import own_versions

MOST_WAITING_BYTES = 4 << 20
"""Output that the pipe has not taken yet; above it the ranks' pipes are left alone, and the ranks wait."""
_LOOPBACK = Address("lo", "127.0.0.1", "127.0.0.0/8")


class _Gone(Exception):
    """The launcher is not there any more."""


def main() -> None:
    """Serve one launcher, and leave."""
    read_end, write_end = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    for descriptor in (read_end, write_end):
        os.set_inheritable(descriptor, False)
    channel = Channel(read_end, write_end)
    channel.send_raw(MAGIC)
    try:
        code = _Agent(channel).serve()
    except FarandoleError as problem:
        channel.send_message({"type": "failed", "why": problem.message, "remedy": problem.remedy})
        code = problem.exit_code
    except OSError as problem:
        channel.send_message({"type": "failed", "why": str(problem), "remedy": ""})
        code = 1
    _deliver(channel)
    # Not through the interpreter's own end: nothing is left to do, and it takes its time.
    os._exit(code)


def _deliver(channel: Channel) -> None:
    """Wait until all is written, but not for ever."""
    end = time.monotonic() + SILENCE_SECONDS
    while channel.waiting_bytes and not channel.broken and time.monotonic() < end:
        channel.flush()
        time.sleep(0.002)


class _PipeSink:
    """Sends what ranks print to the launcher, whose own output finishes it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def feed(self, rank: int, is_error: bool, data: bytes) -> None:
        self._channel.send_output(rank, is_error, data)

    def finish(self, rank: int, *, failed: bool) -> str:
        return ""

    def tick(self) -> None:
        pass


class _Agent(HostRanks):
    """The ranks of this host, under a launcher's orders."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._looked = time.monotonic()
        self._next_beat = 0.0
        self._next_look = 0.0
        self._told: set[int] = set()
        """Ranks whose crash was told."""
        self._port: ReservedPort | None = None
        self._interface = ""
        self._has_ranks = False
        self._inbox: list[Message] = []
        self._control = selectors.DefaultSelector()
        self._control.register(channel.read_end, selectors.EVENT_READ)

    def serve(self) -> int:
        """Do what the launcher says, to the end; return the exit code."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the pipe says it too
        self._reaper = Reaper(silence_seconds=REAPER_SECONDS)
        self._kills_before = out_of_memory_kills()
        self._directory: Path | None = None
        self._is_shared = False
        try:
            hello = self._wait_for("hello")
            directory = Path(hello["run_directory"])
            self._is_shared = _reads(directory / TOKEN_FILE) == hello["token"]
            self._send_ready(hello)
            self._send_route(self._wait_for("peers"))
            self._start_all(self._wait_for("start"), directory)
            while self._running:
                self._turn(0.1)
                self._tell_crashes(time.monotonic())
            self._tell_crashes(self._next_look)
            self._send_files()
            self._channel.send_message(
                {"type": "done", "out_of_memory": out_of_memory_kills() > self._kills_before}
            )
            while self._channel.waiting_bytes:
                self._turn(0.1)
        except _Gone:
            return 1
        finally:
            self._clean_up()
        return 0

    def _clean_up(self) -> None:
        if self._has_ranks:
            self._end_all()
        if self._port is not None:
            self._port.close()
        if self._directory is not None and not self._is_shared:
            import shutil

            shutil.rmtree(self._directory, ignore_errors=True)
        self._reaper.dismiss()

    # -- the launcher ----------------------------------------------------------------------------

    def _wait_for(self, kind: str) -> Message:
        """Return the next message, which has to be of this kind."""
        while not self._inbox:
            self._turn(0.1)
        message = self._inbox.pop(0)
        if message["type"] == "signal":
            raise _Gone  # stopped before anything was started
        if message["type"] != kind:
            raise LaunchError(f"the launcher said {message['type']!r}, expected {kind!r}")
        return message

    def _turn(self, seconds: float) -> None:
        """Wait for something, and deal with it; raise `_Gone` when the launcher is."""
        self._watch(self._channel.write_end, selectors.EVENT_WRITE, self._channel.waiting_bytes > 0)
        if self._has_ranks:
            self._watch(self._selector, selectors.EVENT_READ, self._channel.waiting_bytes < MOST_WAITING_BYTES)
        for key, _ in self._control.select(seconds):
            if key.fd == self._channel.write_end:
                self._channel.flush()
            elif key.fd == self._channel.read_end:
                self._listen()
            else:
                for event, _ in self._selector.select(0):
                    self._rank_event(event)
        self._show_life(time.monotonic())

    def _watch(self, what: Any, events: int, wanted: bool) -> None:
        is_watched = what in self._control.get_map()
        if wanted and not is_watched:
            self._control.register(what, events)
        elif is_watched and not wanted:
            self._control.unregister(what)

    def _listen(self) -> None:
        for kind, payload in self._channel.receive():
            if kind != MESSAGE:
                continue
            message = read_message(payload)
            if message["type"] == "signal" and self._has_ranks:
                self._stopping = True
                self._signal_ranks(int(message["number"]))
            else:
                self._inbox.append(message)
        if self._channel.ended:
            raise _Gone

    def _show_life(self, now: float) -> None:
        if now - self._looked > 1.0:
            self._channel.last_heard = now  # it was us who slept; what came meanwhile is still unread
        self._looked = now
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self._reaper.beat()
            if not self._channel.waiting_bytes:
                self._channel.send(BEAT)
        if self._channel.broken or now - self._channel.last_heard > SILENCE_SECONDS:
            raise _Gone

    # -- before the start ------------------------------------------------------------------------

    def _send_ready(self, hello: Message) -> None:
        connection = (read_ssh_connection() or "").split()
        self._client, self._server = (connection[0], connection[2]) if len(connection) == 4 else ("", "")
        self._channel.send_message(
            {
                "type": "ready",
                "versions": own_versions(hello["python_path"]),
                "address": self._server,
                "name": socket.gethostname(),
                "shared": self._is_shared,
            }
        )

    def _send_route(self, peers: Message) -> None:
        """Choose the interface; the host of rank 0 also holds the port where all meet."""
        addresses = [address or self._client for address in peers["addresses"]]
        addresses = [address for address in addresses if address]
        chosen = towards(addresses) if addresses else _LOOPBACK
        self._interface = chosen.interface
        if peers["first"]:
            self._port = ReservedPort(chosen.address)
        self._channel.send_message(
            {
                "type": "route",
                "interface": chosen.interface,
                "address": chosen.address,
                "port": self._port.port if self._port is not None else 0,
            }
        )

    def _start_all(self, start: Message, shared_directory: Path) -> None:
        if self._is_shared:
            self._directory = shared_directory
        else:
            self._directory = Path(tempfile.mkdtemp(prefix="farandole-run-"))
            self._reaper.remove(str(self._directory))
            for name in ("logs", "crashes"):
                (self._directory / name).mkdir(mode=0o700)
            write_private(self._directory / PLAN, start["plan"])
        plan_file = self._directory / PLAN if start["plan_given"] else None
        environment = inherited_environment(start["environment"])
        job = unpack_job(start["job"], self._directory, plan_file)
        cores = available_cores()
        count = len(start["places"])
        shares = divide_cores(cores, count) if start["bind"] else [()] * count
        places = [
            unpack_place(values, cores=share, interface=self._interface)
            for values, share in zip(start["places"], shares, strict=True)
        ]
        job = replace(job, threads=max(1, len(cores) // max(1, count)))
        super().__init__(start["command"], places, job, _PipeSink(self._channel), environment)
        self._has_ranks = True
        for place in places:
            self._start(place, self._reaper)
            self._show_life(time.monotonic())  # starting many takes a while on a busy host
        self._channel.send_message({"type": "started"})

    # -- while it runs ---------------------------------------------------------------------------

    def _ended(self, process: RankProcess) -> None:
        super()._ended(process)
        ended = self._exits[-1]
        self._tell_crashes(self._next_look)  # its account goes first: it may explain the end
        self._channel.send_message(
            {"type": "exit", "rank": ended.rank, "code": ended.code, "stopped": ended.stopped_by_us}
        )

    def _tell_crashes(self, now: float) -> None:
        """Pass on new accounts of crashes, with their age: clocks of hosts differ."""
        if now < self._next_look:
            return
        self._next_look = time.monotonic() + CRASH_POLL_SECONDS
        mine = {place.rank for place in self.places} - self._told
        for crash in read_crashes(self.job.run_directory):
            if crash.rank in mine:
                self._told.add(crash.rank)
                age = max(0.0, time.monotonic() - crash.when_seconds)
                values = {**vars(crash), "when_seconds": age, "traceback": crash.traceback[-100_000:]}
                self._channel.send_message({"type": "crash", "crash": values})

    def _send_files(self) -> None:
        if self._is_shared or self._directory is None:
            return
        for payload in file_frames(self._directory):
            self._channel.send(FILE, payload)
            while self._channel.waiting_bytes > MOST_WAITING_BYTES:
                self._turn(0.1)
            self._show_life(time.monotonic())
            self._listen()


def _reads(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


if __name__ == "__main__":
    sys.exit("this is started by farandole run over ssh")

"""The supervisor of one host: started over ssh by the launcher, without torch, ending with the pipe.

It starts the ranks of its host, all at once, or workers of an elastic job, one by one; passes on what they
print and how they end, and does what it is told. It decides nothing. When the pipe ends or falls silent, all
that it started is killed at once. stdin and stdout are the pipe; what this process or its ranks' starts print by
accident goes to stderr.

Workers have their control channel to this process, on the loopback interface; from here their frames go
through the pipe, so that no port of the network is open for control.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core.env import inherited_environment, read_ssh_connection
from ...core.framing import FrameError, read_json
from ...core.host.interfaces import Address, towards
from ...core.vocabulary import run_files
from ...core.vocabulary.errors import FarandoleError, LaunchError
from ...core.vocabulary.run_files import PLAN, Crash, write_private
from ..elastic.workers import Workers
from ..job.contract import RankSpec
from ..job.hosts import LOOPBACK
from ..job.placement import ReservedPort, available_cores, bind_ranks, crowding_warnings, threads_per_rank
from ..supervise.failure import Exit
from ..supervise.process import Reaper
from ..supervise.ranks import HostRanks
from ..supervise.stopped_process import OwnPauses
from .frames import BEAT, FILE, MESSAGE, SILENCE_SECONDS, Channel, Message, pipe_of_this_process
from .protocol import (
    BEAT_SECONDS,
    REAPER_SECONDS,
    TOKEN_FILE,
    own_versions,
    pack_crash,
    unpack_job,
    unpack_place,
)

MOST_WAITING_BYTES = 4 << 20
"""Output that the pipe has not taken yet; above it the ranks' pipes are left alone, and the ranks wait."""
_LOOPBACK = Address("lo", "127.0.0.1", "127.0.0.0/8")
_ANYWHERE = "192.0.2.1"
"""An address for documents, which no host has: the way to it is the default route."""


class Gone(Exception):
    """The launcher is not there any more."""


def main() -> None:
    """Serve one launcher, and leave."""
    channel = pipe_of_this_process()
    try:
        code = Agent(channel).serve()
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


class Agent:
    """A host under a launcher's orders, which takes what its ranks or workers do."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.ranks: HostRanks | None = None
        """What was started, or will be."""
        self.directory: Path | None = None
        """The run directory as this host has it."""
        self.plan_file: Path | None = None
        """The plan's file there; None: no plan was given."""
        self.interface = ""
        self._is_shared = False
        self._pauses = OwnPauses(time.monotonic())
        self._next_beat = 0.0
        self._is_leaving = False
        self._is_stopped = False
        """Whether the launcher has sent a signal."""
        self._port: ReservedPort | None = None
        self._inbox: list[Message] = []
        self._control = selectors.DefaultSelector()
        self._control.register(channel.read_end, selectors.EVENT_READ)

    def serve(self) -> int:
        """Do what the launcher says, to the end; return the exit code."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the pipe says it too
        self.reaper = Reaper(silence_seconds=REAPER_SECONDS, say=self.say)
        try:
            hello = self.wait_for("hello")
            directory = Path(hello["run_directory"])
            self._is_shared = _reads(directory / TOKEN_FILE) == hello["token"]
            self._send_ready(hello)
            self._send_route(self.wait_for("peers"))
            start = self.wait_for("start")
            self._make_directory(directory, start.pop("plan"))
            self._work(start)
            self._send_files()
            self.channel.send_message({"type": "done"})
            while self.channel.waiting_bytes:
                self.turn(0.1)
        except Gone:
            return 1
        finally:
            self._clean_up()
        return 0

    # -- ranks or workers ------------------------------------------------------------------------

    def _work(self, start: Message) -> None:
        """Start what the launcher says, and pass on what it does, until all has ended and the launcher lets go."""
        assert self.directory is not None, "it was made"
        environment = inherited_environment(start["environment"])
        cores = available_cores()
        job = unpack_job(start["job"], self.directory, self.plan_file)
        job = replace(job, threads=threads_per_rank(cores, int(start["slots"])))
        places = [unpack_place(values, interface=self.interface) for values in start["places"]]
        if places:
            self.ranks = ranks = HostRanks(start["command"], job, environment, self, self.reaper)
            places = bind_ranks(places, cores, bind=start["bind"])
            self._warn(len(places), len(cores), bind=start["bind"], environment=environment)
            for place in places:
                ranks.start_rank(place)
                self.show_life(time.monotonic())  # starting many takes a while on a busy host
        else:
            here = replace(job, address=LOOPBACK)
            self.ranks = Workers(start["command"], here, environment, self.reaper, reports=self, place=self._place)
        self._inbox = [message for message in self._inbox if not self._obey(message)]
        while not self._is_leaving or self.ranks.processes():
            self.turn(0.1)

    def _warn(self, ranks: int, cores: int, *, bind: bool, environment: Mapping[str, str]) -> None:
        fewer = "give this host at most {} slots"
        for warning in crowding_warnings(ranks, cores, bind=bind, remedy=fewer, environment=environment):
            self.say(f"warning: {warning}")

    def _place(self, host_name: str) -> RankSpec:
        return RankSpec(0, 1, 0, 1, node_count=2, interface=self.interface, host_name=host_name)

    def _obey(self, message: Message) -> bool:
        """Do what a message says of what was started; return False for others."""
        kind, ranks = message["type"], self.ranks
        assert ranks is not None, "they are attended to"
        if kind == "leave":
            self._is_leaving = True
        elif kind == "stacks":
            ranks.take_stacks()
        elif kind == "signal":
            self._signal(ranks, int(message["number"]))
        elif not isinstance(ranks, Workers):
            return False
        elif kind == "worker":
            ranks.start(int(message["worker"]), str(message["host"]), message["variables"])
        elif kind == "tell":
            ranks.tell(int(message["worker"]), message["frame"])
        elif kind == "kill":
            ranks.kill(int(message["worker"]))
        else:
            return False
        return True

    def _signal(self, ranks: HostRanks, number: int) -> None:
        """Pass a signal on; tell before the first that ends ranks where these stood."""
        if not self._is_stopped and number != signal.SIGUSR1 and not isinstance(ranks, Workers):
            self._is_stopped = True
            found = [position.to_json() for position in ranks.note_positions()]
            self.channel.send_message({"type": "positions", "positions": found})
        ranks.stop(number)

    # -- reports of ranks ------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Tell the person who watches the job."""
        self.channel.send_message({"type": "say", "text": text})

    def printed(self, number: int, is_error: bool, data: bytes) -> None:
        """Pass on what one has printed: the launcher holds tracebacks back."""
        self.channel.send_output(number, is_error, data)

    def crashed(self, crash: Crash) -> None:
        """Pass on an account."""
        self.channel.send_message({"type": "crash", "crash": pack_crash(crash)})

    def heard(self, number: int, frame: Message) -> None:
        """Pass on a frame of a worker."""
        self.channel.send_message({"type": "heard", "worker": number, "frame": frame})

    def ended(self, exited: Exit) -> None:
        """Pass on an end."""
        self.channel.send_message(
            {
                "type": "exit", "rank": exited.rank, "code": exited.code, "held": exited.held,
                "stopped": exited.stopped_by_us, "is_missed": exited.is_missed,
                "out_of_memory": exited.is_out_of_memory,
            }
        )  # fmt: skip

    # -- the launcher ----------------------------------------------------------------------------

    def wait_for(self, kind: str) -> Message:
        """Return the next message, which has to be of this kind."""
        while not self._inbox:
            self.turn(0.1)
        message = self._inbox.pop(0)
        if message["type"] == "signal":
            raise Gone  # stopped before anything was started
        if message["type"] != kind:
            raise LaunchError(f"the launcher said {message['type']!r}, expected {kind!r}")
        return message

    def turn(self, seconds: float) -> None:
        """Wait for something, and deal with it; raise `Gone` when the launcher is."""
        self._watch(self.channel.write_end, selectors.EVENT_WRITE, self.channel.waiting_bytes > 0)
        if self.ranks is not None:
            wanted = self.channel.waiting_bytes < MOST_WAITING_BYTES
            self._watch(self.ranks, selectors.EVENT_READ, wanted)
        for key, _ in self._control.select(seconds):
            if key.fd == self.channel.write_end:
                self.channel.flush()
            elif key.fd == self.channel.read_end:
                self._listen()
            elif self.ranks is not None:
                self.ranks.poll()
        self.show_life(time.monotonic())
        if self.ranks is not None:
            self.ranks.tick(time.monotonic())

    def show_life(self, now: float) -> None:
        """Send a beat when it is time; raise `Gone` when the launcher has been silent for too long."""
        if self._pauses.look(now):
            self.channel.patience.reset(now)
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self.reaper.beat()
            if not self.channel.waiting_bytes:
                self.channel.send(BEAT)
        if self.channel.broken or self.channel.patience.is_over(now):
            raise Gone

    def _watch(self, what: Any, events: int, wanted: bool) -> None:
        is_watched = what in self._control.get_map()
        if wanted and not is_watched:
            self._control.register(what, events)
        elif is_watched and not wanted:
            self._control.unregister(what)

    def _listen(self) -> None:
        for kind, payload in self.channel.receive():
            if kind == MESSAGE:
                message = read_json(payload)
                if self.ranks is None or not self._obey(message):
                    self._inbox.append(message)
        if self.channel.ended:
            raise Gone

    def _send_ready(self, hello: Message) -> None:
        self._client, server = read_ssh_connection()
        self.channel.send_message(
            {
                "type": "ready",
                "versions": own_versions(hello["python_path"]),
                "address": server,
                "name": socket.gethostname(),
                "shared": self._is_shared,
            }
        )

    def _send_route(self, peers: Message) -> None:
        """Choose the interface; the host of rank 0 also holds the port where all meet."""
        addresses = [address or self._client for address in peers["addresses"]]
        chosen = _choose([address for address in addresses if address], anywhere=bool(peers.get("more_may_come")))
        self.interface = chosen.interface
        if peers["first"]:
            self._port = ReservedPort(chosen.address)
        self.channel.send_message(
            {
                "type": "route",
                "interface": chosen.interface,
                "address": chosen.address,
                "port": self._port.port if self._port is not None else 0,
            }
        )

    # -- files -----------------------------------------------------------------------------------

    def _make_directory(self, shared: Path, plan: str | None) -> None:
        if self._is_shared:
            self.directory = shared
            self.plan_file = shared / PLAN if plan is not None else None
            return
        self.directory = Path(tempfile.mkdtemp(prefix="farandole-run-"))
        self.reaper.remove(str(self.directory))
        for name in ("logs", "crashes"):
            (self.directory / name).mkdir(mode=0o700)
        if plan is not None:
            self.plan_file = self.directory / PLAN
            write_private(self.plan_file, plan)

    def _send_files(self) -> None:
        if self._is_shared or self.directory is None:
            return
        for payload in file_frames(self.directory):
            self.channel.send(FILE, payload)
            while self.channel.waiting_bytes > MOST_WAITING_BYTES:
                self.turn(0.1)
            self.show_life(time.monotonic())
            self._listen()

    def _clean_up(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
        if self._port is not None:
            self._port.close()
        if self.directory is not None and not self._is_shared:
            import shutil

            shutil.rmtree(self.directory, ignore_errors=True)
        self.reaper.dismiss()


def _choose(peers: list[str], *, anywhere: bool) -> Address:
    """Return the way to the peers; without any to those that may come, or else the loopback interface."""
    if not peers and anywhere:
        try:
            return towards([_ANYWHERE])
        except LaunchError:
            return _LOOPBACK
    return towards(peers) if peers else _LOOPBACK


def _reads(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


# A host's part of the run directory on its way to the launcher, when the hosts share no file system.
#
# A frame is the length of a name, the name, and the next bytes of the file. Names are not trusted.


MOST_FILE_BYTES = 1 << 28
MOST_FILES = 10_000
_PIECE_BYTES = 1 << 18
_LENGTH = struct.Struct("!H")
_NAME = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,128}(?:/(?!\.)[A-Za-z0-9_.-]{1,128}){0,4}")
_LAUNCHERS_OWN = (
    run_files.RUN, run_files.PLAN, run_files.SUMMARY, run_files.REPORT, run_files.FAILURE, run_files.INTERRUPTED,
)  # fmt: skip


def file_frames(directory: Path) -> Iterator[bytes]:
    """Return the payloads that carry the plain files below `directory`, but not those the launcher writes."""
    for count, path in enumerate(sorted(directory.rglob("*"))):
        name = path.relative_to(directory).as_posix()
        if count >= MOST_FILES:
            return
        if path.is_symlink() or not path.is_file() or not _NAME.fullmatch(name) or name in _LAUNCHERS_OWN:
            continue
        head = _LENGTH.pack(len(name)) + name.encode()
        try:
            with path.open("rb") as file:
                yield head
                sent = 0
                while sent < MOST_FILE_BYTES and (piece := file.read(_PIECE_BYTES)):
                    sent += len(piece)
                    yield head + piece
        except OSError:
            continue  # gone or unreadable: the others are worth having


class FileTaker:
    """Writes what one host sends below the run directory; never over a file that another wrote."""

    def __init__(self, directory: Path, host: str, say: Callable[[str], None]) -> None:
        """`say` is told once when the disk does not take it: the rest is then thrown away."""
        self._directory, self._host, self._say = directory, host, say
        self._is_full = False
        self._aside = directory / "hosts" / re.sub(r"[^A-Za-z0-9_.-]", "_", host)
        self._places: dict[str, Path] = {}
        self._bytes: dict[str, int] = {}

    def take(self, payload: bytes) -> None:
        """Take a frame; raise `FrameError` for a name that is none, or a file without end."""
        if len(payload) < _LENGTH.size:
            raise FrameError("a file without a name")
        (length,) = _LENGTH.unpack_from(payload)
        name = payload[_LENGTH.size : _LENGTH.size + length].decode("ascii", errors="replace")
        data = payload[_LENGTH.size + length :]
        if not _NAME.fullmatch(name) or name in _LAUNCHERS_OWN:
            raise FrameError(f"file {name!r}: expected a relative name inside the run directory")
        self._bytes[name] = self._bytes.get(name, 0) + len(data)
        if self._bytes[name] > MOST_FILE_BYTES + _PIECE_BYTES or len(self._bytes) > MOST_FILES:
            raise FrameError(f"file {name!r} and those before it are more than a run directory has")
        if self._is_full:
            return
        try:
            if name not in self._places:
                self._places[name] = self._make(name)
            if data:
                with self._places[name].open("ab") as file:
                    file.write(data)
        except OSError as problem:
            self._is_full = True
            self._say(f"no more of host {self._host}'s files are kept: {problem}")

    def _make(self, name: str) -> Path:
        for place in (self._directory / name, self._aside / name):
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
            except FileExistsError:
                continue
            return place
        raise FrameError(f"file {name!r} was sent before")


if __name__ == "__main__":
    sys.exit("this is started by farandole run over ssh")

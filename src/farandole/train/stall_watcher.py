"""Notices that no step is done any more, and says once which rank is where, and which ranks wait.

[Note: a stall] Each rank has a thread that looks at its count of steps once a second; a step costs nothing. After
the limit of `pace`, rank 0 asks the others where they stand (rank 1 does when rank 0 does not answer), and `judge`
decides: ranks that can never go on are reported at once, ranks that wait for one at work later and as a note; an
announced pause, a debugger, compiling, or a network that is only slow, never. Two looks in a row have to agree.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..comm.world.rendezvous import own_address
from ..comm.world.world import World
from ..core.failures import Judgement, Kind, Position, describe, judge, remedy
from ..core.host.process_status import machine_name
from ..core.host.stacks import StackWriter
from ..core.vocabulary.run_files import STACKS, STALL, position_path, write_private
from ..core.vocabulary.text import write_notice
from ..launch.supervise.stopped_process import state_of
from .stall_sampler import Sampler

# Phases that the user has announced with `fd.phase` and that are open: no step is expected meanwhile.


class _OpenPhases(list[str]):
    """Names, the innermost last."""


def open_phases(here: World) -> list[str]:
    """Return the names of the phases that are open, as they change."""
    return here.session.keep(_OpenPhases, _OpenPhases)


# How long a training may do no step before that is strange: `MEDIANS` median steps, or the plan's seconds.
MEDIANS = 20
FIRST_STEPS = 3
"""So many steps are warm-up: compiling, filling caches, starting the loader's workers."""
FIRST_TIMES = 6
"""In warm-up the limit is so many times longer."""
PAUSE_TIMES = 3
"""Ranks that wait for one at work are spoken of after so many limits."""
_KEPT = 101


class Pace:
    """The recent durations of steps, from a count that is looked at now and then."""

    def __init__(self, now: float, done: int = 0) -> None:
        self.done = done
        self.quiet_seconds = 0.0
        """Time since the last step that was noticed."""
        self._looked = now
        self._step_seconds: deque[float] = deque(maxlen=_KEPT)

    def look(self, now: float, done: int, *, most_seconds: float) -> bool:
        """Take the count of finished steps; return whether there are new ones.

        A process that was suspended has missed time, not lost it: no look adds more than `most_seconds`.
        """
        passed, self._looked = min(now - self._looked, most_seconds), now
        self.quiet_seconds += passed
        if done == self.done:
            return False
        if self.done:  # the first step says little of the others
            self._step_seconds.append(self.quiet_seconds / max(1, done - self.done))
        self.done, self.quiet_seconds = done, 0.0
        return True

    def limit_seconds(self, stall_seconds: float) -> float:
        """Return after how long a stall is one."""
        if self.done < FIRST_STEPS:
            return FIRST_TIMES * stall_seconds
        middle = statistics.median(self._step_seconds) if self._step_seconds else 0.0
        return max(stall_seconds, MEDIANS * middle)


PERIOD_SECONDS = 1.0
_LONGEST_LOOK = 3.0
"""In periods: more between two looks is time in which this process was suspended."""
_ANSWER_SECONDS = 0.5
_BACKUP_TIMES = 1.5
"""Rank 1 speaks after so many limits, when rank 0 does not answer."""


class StallWatcher:
    """The thread of one rank. Training never fails because of it."""

    def __init__(self, here: World, directory: Path | None, stacks: StackWriter | None) -> None:
        """Call it in the thread that trains. `stacks` writes this rank's stacks into the run directory."""
        self._here, self._directory, self._stacks = here, directory, stacks
        self._pace = Pace(time.monotonic(), here.session.steps.done)
        self._training_thread = threading.get_ident()
        self._sampler = Sampler(self._training_thread, open_phases(here), on_gpu=here.device.type == "cuda")
        here.session.steps.on_begin = self._sampler.begin_step
        self._neighbours: Neighbours | None = None
        self._published: Position | None = None
        self._last: tuple[Judgement, str] = ("nothing", "")
        """What the look before this one came to."""
        self._spoken: set[tuple[Judgement, str]] = set()
        self._hangs = False
        """Whether a hang was reported and has not ended."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="farandole-stall", daemon=True)

    def open(self) -> None:
        """Begin to watch."""
        if self._here.size > 1:
            with contextlib.suppress(OSError, RuntimeError):  # without it, a rank only speaks for itself
                self._neighbours = Neighbours(self._here, self._position)
        self._thread.start()

    def close(self, *, keep_positions: bool) -> None:
        """End. With `keep_positions`, the files in the run directory say where an interrupted run stood."""
        self._closing.set()
        if self._neighbours is not None:
            self._neighbours.wake()
        self._thread.join(2 * PERIOD_SECONDS)
        if self._neighbours is not None and not self._thread.is_alive():
            self._neighbours.close()
        if not keep_positions:
            self._retract()

    def forget(self) -> None:
        """In a forked child: the thread is the parent's, and so is what it left."""
        if self._neighbours is not None:
            self._neighbours.close()

    @property
    def _stall_seconds(self) -> float:
        return self._here.session.stall_seconds

    @property
    def _period(self) -> float:
        return min(PERIOD_SECONDS, self._stall_seconds / 8) if self._stall_seconds else PERIOD_SECONDS

    def _run(self) -> None:
        is_told = False
        while not self._closing.is_set():
            try:
                if self._neighbours is None:
                    self._closing.wait(self._period)
                else:
                    self._neighbours.serve(self._period, until=self._closing.is_set)
                if not self._closing.is_set() and self._stall_seconds:
                    self._look(time.monotonic())
            except Exception as problem:  # no error ends the watch
                if not is_told:
                    write_notice(f"rank {self._here.rank}: looking for hangs: {type(problem).__name__}: {problem}")
                is_told = True
                self._closing.wait(self._period)

    def _look(self, now: float) -> None:
        most = _LONGEST_LOOK * self._period
        if self._pace.look(now, self._here.session.steps.done, most_seconds=most):
            self._goes_on()
            return
        self._sampler.sample()
        if self._sampler.left:
            return  # what was published last is where it was interrupted
        quiet, limit = self._pace.quiet_seconds, self._limit
        if quiet >= self._notice_seconds:
            self._publish()
        if quiet >= limit and self._here.rank <= 1:
            self._report(quiet, limit)

    @property
    def _limit(self) -> float:
        return self._pace.limit_seconds(self._stall_seconds)

    @property
    def _notice_seconds(self) -> float:
        """After how long this rank stands somewhere: before that it is on its way to the next step."""
        return self._limit / 2 if self._pace.done >= FIRST_STEPS else self._stall_seconds / 2

    def _goes_on(self) -> None:
        """A step was done."""
        self._sampler.reset()
        self._retract()
        self._last = ("nothing", "")
        if self._neighbours is not None and self._here.rank <= 1:
            self._neighbours.learn()
        if self._hangs:
            self._hangs = False
            write_notice("the training goes on: a step was done")

    def _position(self) -> Position:
        """Return where this rank stands, for others."""
        steps = self._here.session.steps.done
        if steps != self._pace.done or self._pace.quiet_seconds < self._notice_seconds:
            return Position(self._here.rank, steps, "moving")
        return self._sampler.position(self._here.rank, steps)

    # -- in the run directory --------------------------------------------------------------------

    def _publish(self) -> None:
        position = self._position()
        if self._directory is None or position == self._published:
            return
        with contextlib.suppress(OSError):
            write_private(position_path(self._directory, self._here.rank), position.to_json())
            if self._stacks is not None:
                self._stacks.dump(self._training_thread)
            self._published = position

    def _retract(self) -> None:
        if self._directory is None or self._published is None:
            return
        self._published = None
        with contextlib.suppress(OSError):
            position_path(self._directory, self._here.rank).unlink(missing_ok=True)
            if self._stacks is not None:
                self._stacks.take_back()
            if self._hangs:
                (self._directory / STALL).unlink(missing_ok=True)
            position_path(self._directory, self._here.rank).parent.rmdir()  # for the last of this host

    # -- speaking --------------------------------------------------------------------------------

    def _report(self, quiet: float, limit: float) -> None:
        positions = self._gather(quiet, limit)
        judgement = judge(positions)
        found = (judgement, describe(positions))
        agreed, self._last = found == self._last, found
        if not agreed or judgement == "nothing" or found in self._spoken:
            return
        if judgement == "pause" and quiet < PAUSE_TIMES * limit:
            return
        self._spoken.add(found)
        if judgement == "hang":
            self._spoken = {found}
            self._hangs = True
            self._leave(positions, quiet)
        write_notice(self._text(judgement, positions, quiet))

    def _gather(self, quiet: float, limit: float) -> list[Position]:
        """Return where all ranks stand; nothing when that is another's to ask."""
        own = self._position()
        if self._here.size == 1:
            return [own]
        if self._here.rank == 1 and quiet < _BACKUP_TIMES * limit:
            return []
        if self._neighbours is None:
            others = [Position(rank, 0, "unknown") for rank in range(self._here.size) if rank != own.rank]
        else:
            others = self._neighbours.ask_all(_ANSWER_SECONDS)
        if self._here.rank == 1 and others[0].kind not in ("silent", "stopped", "ended"):
            return []
        return sorted([own, *others], key=lambda position: position.rank)

    def _text(self, judgement: Judgement, positions: list[Position], quiet: float) -> str:
        since = f"no step for {quiet:.0f} s" if self._pace.done else f"no step yet after {quiet:.0f} s"
        text = f"{since}: {describe(positions)}"
        todo = remedy(positions)
        if judgement == "pause":
            return f"note: {text}" + (f"; {todo}" if todo else "")
        where = f"; stacks in {self._directory / STACKS}" if self._directory is not None else ""
        return text + (f"; {todo}" if todo else "") + where

    def _leave(self, positions: list[Position], quiet: float) -> None:
        """Note the hang in the run directory, for who looks after its end."""
        if self._directory is None:
            return
        values = {
            "step": self._pace.done, "seconds": round(quiet, 3), "positions": [asdict(each) for each in positions],
        }  # fmt: skip
        with contextlib.suppress(OSError):
            write_private(self._directory / STALL, json.dumps(values) + "\n")


# Asking other ranks where they stand, by datagrams: nothing is kept open, and a rank that is gone is no error.
#
# [Note: not by the store] The store lives with one rank. When that one is stopped or gone, its clients wait, or
# fill the terminal with torch's warnings. So the store is only used once, early, to learn where the others listen.
# A datagram carries a random word of the rank that it asks: others get no answer.


_READ_SECONDS = 5.0
_MOST_BYTES = 4096
_MISSES = 3
"""Questions without an answer, before a rank is looked at from outside."""


@dataclass(frozen=True)
class _Address:
    """Where a rank listens."""

    host: str
    port: int
    word: str
    machine: str
    """To tell whether its process is on this host."""
    process: int


class Neighbours:
    """One rank's socket: answers the others, and asks them. Used by one thread."""

    def __init__(self, here: World, answer: Callable[[], Position]) -> None:
        """Open the socket and say in the store where it is. Raises OSError or RuntimeError when it cannot be."""
        self._here, self._answer = here, answer
        self._topic = here.topic("stall")
        host = own_address(here.address) if here.node_count > 1 else "127.0.0.1"
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        self._own: _Address | None = None
        self._others: dict[int, _Address] | None = None
        self._heard: dict[int, Position] = {}
        self._round = 0
        self._missed: dict[int, int] = {}
        self._known: set[int] = set()
        """Ranks that have ever answered."""
        try:
            self._socket.bind((host, 0))
            self._socket.setblocking(False)
            port, token = self._socket.getsockname()[1], secrets.token_hex(8)
            machine = machine_name("pid") or socket.gethostname()  # where processes see each other's numbers
            self._own = _Address(host, port, token, machine, os.getpid())
            assert here.store is not None, "a world of several has a store"
            here.store.set(f"{self._topic}/{here.rank}", json.dumps(asdict(self._own)))
        except BaseException:
            self._socket.close()
            raise

    def serve(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Answer for a while, or `until` something is so."""
        end, poll = time.monotonic() + seconds, select.poll()  # select() takes no file above 1,023
        poll.register(self._socket, select.POLLIN)
        while not until() and (left := end - time.monotonic()) > 0:
            if poll.poll(1e3 * left):
                self._take()

    def wake(self) -> None:
        """End a `serve` of another thread soon, when it has something to stop for."""
        if self._own is not None:
            with contextlib.suppress(OSError), socket.socket(self._socket.family, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"{}", (self._own.host, self._own.port))

    def learn(self) -> None:
        """Read from the store where the others listen, and ask each once."""
        if self._others is None:
            self._others = self._read_addresses()
            self._ask()

    def ask_all(self, seconds: float) -> list[Position]:
        """Return the position of every other rank; one that did not answer yet counts as moving."""
        self.learn()
        self._ask()
        others = [rank for rank in range(self._here.size) if rank != self._here.rank]
        self.serve(seconds, until=lambda: len(self._heard) == len(others))
        found = []
        for rank in others:
            if rank in self._heard:
                self._missed[rank] = 0
                found.append(self._heard[rank])
            else:
                self._missed[rank] = self._missed.get(rank, 0) + 1
                kind: Kind = "moving" if self._missed[rank] < _MISSES else self._look_at(rank)
                found.append(Position(rank, 0, kind))
        return found

    def close(self) -> None:
        """Answer no more."""
        self._socket.close()

    def _ask(self) -> None:
        self._round += 1
        self._heard = {}
        for address in (self._others or {}).values():
            question = {"ask": address.word, "round": self._round}
            with contextlib.suppress(OSError):
                self._socket.sendto(json.dumps(question).encode(), (address.host, address.port))

    def _take(self) -> None:
        try:
            data, sender = self._socket.recvfrom(_MOST_BYTES)
            message = json.loads(data)
        except (OSError, ValueError):
            return
        if not isinstance(message, dict):
            return
        if self._own is not None and message.get("ask") == self._own.word:
            answer = {"round": message.get("round"), "word": self._own.word, "position": self._answer().to_json()}
            with contextlib.suppress(OSError):
                self._socket.sendto(json.dumps(answer).encode()[:_MOST_BYTES], sender)
        elif message.get("round") == self._round:
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        position = Position.from_json(str(message.get("position")))
        if position is None:
            return
        address = (self._others or {}).get(position.rank)
        if address is not None and address.word == message.get("word"):
            self._heard[position.rank] = position
            self._known.add(position.rank)

    def _look_at(self, rank: int) -> Kind:
        """Return what can be known of a rank that does not answer."""
        address = (self._others or {}).get(rank)
        if address is None:
            return "unknown"
        if _is_closed(address):
            return "ended"
        if self._own is not None and address.machine == self._own.machine:
            state = state_of(address.process)
            known: dict[str, Kind] = {"": "ended", "Z": "ended", "X": "ended", "T": "stopped", "t": "pause"}
            if state in known:
                return known[state]
        return "silent" if rank in self._known else "unknown"

    def _read_addresses(self) -> dict[int, _Address]:
        here = self._here
        others = [rank for rank in range(here.size) if rank != here.rank]
        try:
            # A client of its own: the thread that trains may hold the other while it waits.
            store: Any = here.store
            store = store.clone()
            store.set_timeout(timedelta(seconds=_READ_SECONDS))
            texts = store.multi_get([f"{self._topic}/{rank}" for rank in others])
            return {rank: _Address(**json.loads(text)) for rank, text in zip(others, texts, strict=True)}
        except (RuntimeError, ValueError, TypeError, AttributeError):
            return {}


def _is_closed(address: _Address) -> bool:
    """Return whether the host says that the socket there is closed."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.settimeout(0.3)
        try:
            probe.connect((address.host, address.port))
            probe.send(b"{}")
            probe.recv(1)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False

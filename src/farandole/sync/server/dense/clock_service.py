"""The clocks of all ranks as a service of the first server: see `clocks`. It decides, and the others follow.

[Note: journal] A decision is in a file before a rank hears of it, one line each: a server that was killed finds
there what came after its snapshot, and never decides twice about the same step. Where the disk takes no line, the
ranks go on and know that the server cannot be restored (`is_behind`), until it does or a snapshot is written.

[Note: one order of pushes] All servers apply the same pushes in the same order: that of the entries that
`Clocks` makes. A rank sends its gradients to all servers first, and says then that its step is done: only now is
there an entry, so a push that a rank did not finish before it died is in none. The ranks carry the entries to
the servers. With ``staleness=0`` an entry has the pushes of all ranks of one step, and is made when the last of
them is done; else it has one push, in the order in which they came.

[Note: bounded staleness] With ``staleness=s`` a rank begins its step number c when all others have done c - s
steps (stale synchronous parallel, Ho 2013). Ranks that have left, or that wait in `fd.drain` for the others, do
not count.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....core.vocabulary.errors import ConfigError, FarandoleError, Mismatch
from ....core.vocabulary.text import name_ranks
from ..channel import ServerMessage

# Who is at which step, which pushes are applied in which order, and who may go on. Pure: no tensor, no socket.

Entry = Mapping[str, Any]
"""JSON: ``of``, a list of [rank, step, weight in the sum of gradients], and ``rate``, by which learning rates are
multiplied."""


@dataclass(eq=False)
class Clocks:
    """The steps of the ranks that train."""

    staleness: int | None
    """How many steps ranks may be apart; None: any number."""
    done: dict[int, int]
    """Steps done, by rank that trains."""
    draining: set[int] = field(default_factory=set)
    """Ranks that wait for the others to make no more steps."""
    first: int = 0
    """Entries that are not kept any more: all ranks have them."""
    entries: list[Entry] = field(default_factory=list)
    """The later ones."""
    staleness_counts: Counter[int] = field(default_factory=Counter)
    """Pushes by how many entries were made between what their rank had read and their own."""
    shares: dict[int, float] = field(default_factory=dict)
    """By rank: the share of the samples in a step that is done and has no entry yet."""

    @property
    def version(self) -> int:
        """Entries so far."""
        return self.first + len(self.entries)

    def finish(self, rank: int, step: int, share: float, seen: int) -> list[Entry]:
        """A rank has sent its gradients of a step to all servers; return the entries that are made by that.

        Args:
            rank: one that trains.
            step: its number on this rank, from 0.
            share: how many samples they are of, over the mean of the ranks.
            seen: the version of the parameters that the gradients are of.
        """
        if step < self.done[rank] or rank in self.shares:
            return []  # it was said before
        if step > self.done[rank]:
            raise ConfigError(f"rank {rank} says that step {step} is done after {self.done[rank]} steps")
        if self.staleness == 0:
            self.shares[rank] = share
            return self._whole_step()
        self.staleness_counts[self.version - seen] += 1
        self.done[rank] += 1
        rate = share / len(self.done)
        return self._add({"of": [[rank, step, 1.0 if rate else 0.0]], "rate": rate})

    def leave(self, rank: int) -> list[Entry]:
        """A rank makes no more steps; return the entries that are made because no rank waits for it any more."""
        self.draining.discard(rank)
        if self.done.pop(rank, None) is None:
            return []
        # A step that it has finished counts: all servers have its gradients.
        return self._whole_step(gone=rank) if self.staleness == 0 else []

    def may_begin(self, rank: int) -> bool:
        """Return whether a rank may make its next step. See [Note: bounded staleness]."""
        if self.staleness is None:
            return True
        if self.staleness == 0:
            return rank not in self.shares
        others = [steps for other, steps in self.done.items() if other not in self.draining]
        return self.done[rank] <= min(others, default=self.done[rank]) + self.staleness

    def since(self, seen: int) -> list[Entry]:
        """Return the entries after the first `seen`."""
        assert seen >= self.first, f"entries before {self.first} are gone, and {seen} is asked for"
        return self.entries[seen - self.first :]

    def forget(self, seen: int) -> None:
        """Keep no entries before `seen`: all ranks have them."""
        count = max(0, seen - self.first)
        del self.entries[:count]
        self.first += count

    def adopt(self, version: int, entry: Entry) -> None:
        """Take an entry that was made before a restoration, as number `version`."""
        if version != self.version:
            return
        for rank, step, _ in entry["of"]:
            if rank in self.done:
                self.done[rank] = max(self.done[rank], step + 1)
            self.shares.pop(rank, None)
        self.entries.append(entry)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "done": sorted(self.done.items()), "draining": sorted(self.draining), "first": self.first,
            "entries": list(self.entries), "counts": sorted(self.staleness_counts.items()),
            "shares": sorted(self.shares.items()),
        }  # fmt: skip

    @classmethod
    def from_json(cls, staleness: int | None, values: Mapping[str, Any]) -> Clocks:
        """Return the clocks whose state `to_json` returned."""
        return cls(
            staleness, dict(_pairs(values["done"])), set(values["draining"]), values["first"],
            list(values["entries"]), Counter(dict(_pairs(values["counts"]))), dict(_pairs(values["shares"])),
        )  # fmt: skip

    def _whole_step(self, gone: int | None = None) -> list[Entry]:
        """Return the entry of a step that all ranks have done."""
        if not self.shares or not set(self.done) <= set(self.shares) or (gone is not None and not self.done):
            return []
        total = sum(self.shares[rank] for rank in sorted(self.shares))
        steps = {rank: self.done[rank] for rank in self.done}
        step = next(iter(steps.values()))
        of = [[rank, step, share / total if total else 0.0] for rank, share in sorted(self.shares.items())]
        self.staleness_counts[0] += len(of)
        for rank in self.done:
            self.done[rank] += 1
        self.shares.clear()
        return self._add({"of": of, "rate": 1.0 if total else 0.0})

    def _add(self, entry: Entry) -> list[Entry]:
        self.entries.append(entry)
        return [entry]


def _pairs(values: Sequence[Sequence[Any]]) -> Iterable[tuple[int, Any]]:
    return ((int(key), value) for key, value in values)


_RETRY_SECONDS = 1.0

SERVICE = "clocks"
DRAIN, INSTALL, INSTALLED = "fd.drain", "loads other parameters", "has loaded other parameters"
"""What ranks do together."""


class ClockService:
    """See `Clocks`. Config: ``ranks``, ``staleness`` and the ``directory`` of the journal."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._staleness: int | None = config["staleness"]
        self._directory = Path(config["directory"])
        self._clocks = Clocks(self._staleness, dict.fromkeys(config["ranks"], 0))
        self._seen = dict.fromkeys(config["ranks"], 0)
        """Entries that each rank has."""
        self._waits: dict[int, int] = {}
        """Ranks that wait to go on, with the entries that they have."""
        self._gathers: dict[int, tuple[str, int]] = {}
        """Ranks that wait for all others: what they do, and which time."""
        self._gathered = 0
        """Times that all ranks came together."""
        self._journal_number = 0
        self._unwritten = bytearray()
        """Lines that the disk has not taken."""
        self._next_write = 0.0
        self._read_journals()

    @property
    def is_behind(self) -> bool:
        """Whether ranks were told what the journal has not."""
        return bool(self._unwritten)

    def handle(self, client: int, request: ServerMessage) -> ServerMessage | None:
        """``finish``, ``wait`` and ``gather``; see `policy` for when a rank asks for which."""
        values, clocks = request.values, self._clocks
        self._see(client, values["seen"])
        if values["do"] == "finish":
            clocks.draining.discard(client)
            self._write(clocks.finish(client, values["step"], values["share"], values["read"]))
            return ServerMessage({})
        if values["do"] == "look":
            return self._reply(values["seen"])
        if values["do"] == "wait":
            clocks.draining.discard(client)
            self._gathers.pop(client, None)
            self._waits[client] = values["seen"]
        elif values["do"] == "gather":
            self._waits.pop(client, None)
            self._gathers[client] = values["what"], values["number"]
            if values["what"] == DRAIN and self._staleness != 0:
                clocks.draining.add(client)
        else:
            raise ConfigError(f"the clocks cannot {values['do']!r}")
        return None

    def due(self) -> Sequence[tuple[int, ServerMessage | FarandoleError]]:
        """Return replies to ranks that may go on."""
        replies: list[tuple[int, ServerMessage | FarandoleError]] = []
        ready = [rank for rank in self._waits if self._clocks.may_begin(rank)]
        replies += [(rank, self._reply(self._waits.pop(rank))) for rank in ready]
        self._meet()
        for rank, (_, number) in list(self._gathers.items()):
            if number <= self._gathered:
                del self._gathers[rank]
                replies.append((rank, self._reply(self._seen[rank])))
        return replies or self._disagreement()

    def client_left(self, client: int) -> None:
        """Let no rank wait for this one."""
        self._write(self._clocks.leave(client))
        for table in (self._waits, self._gathers, self._seen):
            table.pop(client, None)

    def state(self) -> ServerMessage:
        """Return the clocks, and begin another journal; that before is kept until this snapshot is on the disk."""
        if self._unwritten:
            self._write_out()
        for number in range(self._journal_number):
            with suppress(FileNotFoundError):
                self._journal(number).unlink()
        self._journal_number += 1
        gathers = [[rank, *each] for rank, each in self._gathers.items()]
        return ServerMessage({
            "clocks": self._clocks.to_json(), "seen": sorted(self._seen.items()), "gathered": self._gathered,
            "gathers": gathers, "waits": sorted(self._waits.items()), "journal": self._journal_number,
        })  # fmt: skip

    def load(self, state: ServerMessage) -> None:
        """Go on from `state`, and from what the journals have of later."""
        values = state.values
        self._clocks = Clocks.from_json(self._staleness, values["clocks"])
        self._seen, self._waits = dict(values["seen"]), dict(values["waits"])
        self._gathers = {rank: (what, number) for rank, what, number in values["gathers"]}
        self._gathered, self._journal_number = values["gathered"], values["journal"]
        self._read_journals()

    # -- deciding ------------------------------------------------------------------------------

    def _see(self, rank: int, seen: int) -> None:
        self._seen[rank] = max(seen, self._seen.get(rank, 0))
        self._clocks.forget(min(self._seen.values()))

    def _reply(self, seen: int) -> ServerMessage:
        clocks = self._clocks
        ranks = sorted(clocks.done)
        counts = sorted(clocks.staleness_counts.items())
        return ServerMessage({"entries": clocks.since(seen), "ranks": ranks, "staleness": counts})

    def _meet(self) -> None:
        """Let ranks go on that wait for each other, when all are there and do the same."""
        live = set(self._clocks.done)
        if live and live <= set(self._gathers):
            kinds = {self._gathers[rank] for rank in live}
            if len(kinds) == 1 and (number := next(iter(kinds))[1]) > self._gathered:
                self._gathered = number
                self._clocks.draining.clear()
                self._append({"gathered": number})

    def _disagreement(self) -> list[tuple[int, ServerMessage | FarandoleError]]:
        """Return an error for all ranks where each waits for what another will not do."""
        live, waiting = set(self._clocks.done), self._waits.keys() | self._gathers.keys()
        kinds = {rank: self._gathers[rank][0] if rank in self._gathers else "makes a step" for rank in waiting}
        if not live or not live <= waiting or len(set(kinds.values())) < 2:
            return []
        said = ", ".join(
            f"{kind!r} on {name_ranks([rank for rank in sorted(kinds) if kinds[rank] == kind])}"
            for kind in sorted(set(kinds.values()))
        )
        self._waits.clear()
        self._gathers.clear()
        remedy = "make as many steps on all ranks, and load and drain on all of them alike"
        return [(rank, Mismatch(f"ranks do not do the same: {said}", rank=rank, operation="clocks", remedy=remedy))
                for rank in sorted(waiting)]  # fmt: skip

    # -- see [Note: journal] -------------------------------------------------------------------

    def _journal(self, number: int) -> Path:
        return self._directory / f"journal-{number}"

    def _write(self, entries: Sequence[Mapping[str, Any]]) -> None:
        for offset, entry in enumerate(entries):
            self._append({"version": self._clocks.version - len(entries) + offset, "entry": entry})

    def _append(self, line: Mapping[str, Any]) -> None:
        self._unwritten += json.dumps(line).encode() + b"\n"
        now = time.monotonic()
        if now >= self._next_write:  # a disk that is full is not asked for each line
            self._write_out()
            self._next_write = now + _RETRY_SECONDS if self._unwritten else 0.0

    def _write_out(self) -> None:
        with suppress(OSError), self._journal(self._journal_number).open("ab", buffering=0) as file:
            before = file.tell()
            if file.write(self._unwritten) == len(self._unwritten):
                self._unwritten.clear()
            else:
                file.truncate(before)

    def _read_journals(self) -> None:
        number = self._journal_number
        while (journal := self._journal(number)).exists():
            text = journal.read_bytes()
            whole = text[: text.rfind(b"\n") + 1]
            os.truncate(journal, len(whole))  # it was killed while it wrote: no rank has heard of the rest
            for line in whole.splitlines():
                found = json.loads(line)
                if "gathered" in found:
                    self._gathered = max(self._gathered, found["gathered"])
                else:
                    self._clocks.adopt(found["version"], found["entry"])
            self._journal_number = number
            number += 1

"""A shard of rows as a service of a server: pulls, pushes, and the order of pushes.

[Note: rounds of pushes] With ``staleness=0`` each rank pushes once a step. A step is applied when all ranks that
train have pushed it, as one, in the order of ranks; a rank's next pull waits for that. A rank that leaves is
waited for no more; a step that it has pushed whole counts. Without it each push is applied when it comes.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from ...core.vocabulary.errors import ConfigError, FarandoleError, Mismatch
from ..server.channel import ServerMessage, read_problem, write_problem
from .shard import Push, RowRules, RowShard
from .store import unpack_ids


class RowService:
    """See `RowShard`. Config: ``rules``, ``ranks`` and ``staleness`` (0 or null)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.shard = RowShard(RowRules(**config["rules"]))
        self._life = secrets.randbits(62)
        """Not in `state`: see `links.Mark`."""
        self._in_rounds = config["staleness"] == 0
        self._live = set(config["ranks"])
        self._pushes: dict[int, deque[tuple[Push, float]]] = {rank: deque() for rank in sorted(self._live)}
        """By rank what it has pushed of rounds that are not complete, with its learning rate."""
        self._parts: dict[int, list[Push]] = {}
        """By rank parts of a push that is not complete."""
        self._rounds = 0
        self._waits: dict[int, ServerMessage] = {}
        """Pulls of ranks that are ahead of the rounds."""
        self._broken: FarandoleError | None = None
        self._staleness: Counter[int] = Counter()

    def handle(self, client: int, request: ServerMessage) -> ServerMessage | None:
        """Carry out what ``do`` says; see the methods below."""
        if self._broken is not None:
            raise self._broken
        values = request.values
        if values["do"] == "pull":
            if self._in_rounds and values["round"] > self._rounds:
                self._waits[client] = request
                return None
            return self._pull(request)
        actions = {
            "push": self._push, "look": self._look, "page": self._page, "changes": self._changes,
            "clear": self._clear, "put": self._put, "put_waiting": self._put_waiting,
        }  # fmt: skip
        if values["do"] not in actions:
            raise ConfigError(f"rows cannot {values['do']!r}")
        return actions[values["do"]](client, request)

    def due(self) -> Sequence[tuple[int, ServerMessage | FarandoleError]]:
        """Return the pulls whose round is complete."""
        replies: list[tuple[int, ServerMessage | FarandoleError]] = []
        for client, request in list(self._waits.items()):
            if self._broken is not None or request.values["round"] <= self._rounds:
                del self._waits[client]
                replies.append((client, self._broken or self._pull(request)))
        return replies

    def client_left(self, client: int) -> None:
        """Wait no more for this rank."""
        self._live.discard(client)
        self._parts.pop(client, None)
        self._waits.pop(client, None)
        self._apply_rounds()

    def state(self) -> ServerMessage:
        """Return everything, in tensors of their own."""
        shard, queued = self.shard, [(rank, *each) for rank, many in self._pushes.items() for each in many]
        parts = [(rank, each, 0.0) for rank, many in self._parts.items() for each in many]
        rows, waiting = shard.rows, shard.waiting
        tensors = [
            torch.from_numpy(rows.ids), rows.values, rows.states, torch.from_numpy(rows.used),
            torch.from_numpy(rows.touched), torch.from_numpy(waiting.ids), waiting.values[:, 0],
            torch.from_numpy(waiting.used), *(torch.from_numpy(each) for each in shard.removed),
        ]  # fmt: skip
        for _, push, _ in (*queued, *parts):
            counts = np.empty(0, np.int64) if push.counts is None else push.counts
            tensors += [torch.from_numpy(push.ids), push.grads, torch.from_numpy(counts)]
        said = [[rank, push.weight, push.counts is not None, lr] for rank, push, lr in (*queued, *parts)]
        values = {
            "shard": shard.to_values(), "live": sorted(self._live), "rounds": self._rounds, "pushes": said,
            "whole": len(queued), "staleness": sorted(self._staleness.items()),
            "broken": None if self._broken is None else write_problem(self._broken),
        }  # fmt: skip
        return ServerMessage(values, [each.clone() for each in tensors])

    def load(self, state: ServerMessage) -> None:
        """Go on from `state`."""
        values, tensors = state.values, list(state.tensors)
        shard = self.shard
        shard.from_values(values["shard"])
        ids, rows, states, used, touched, waiting_ids, counts, waiting_used, removed, versions = tensors[:10]
        shard.put_rows(ids.numpy(), rows, states, used.numpy())
        shard.rows.touched[:] = touched.numpy()
        shard.put_waiting(waiting_ids.numpy(), counts.numpy(), waiting_used.numpy())
        shard.removed = removed.numpy().copy(), versions.numpy().copy()
        self._live, self._rounds = set(values["live"]), values["rounds"]
        self._staleness = Counter({int(lag): count for lag, count in values["staleness"]})
        if values["broken"] is not None:
            self._broken = read_problem(values["broken"], rank=0, operation="rows")
        for number, (rank, weight, has_counts, lr) in enumerate(values["pushes"]):
            ids, grads, counts = tensors[10 + 3 * number : 13 + 3 * number]
            push = Push(ids.numpy(), grads, counts.numpy() if has_counts else None, weight)
            if number < values["whole"]:
                self._pushes[rank].append((push, lr))
            else:
                self._parts.setdefault(rank, []).append(push)

    # -- requests --------------------------------------------------------------------------------

    def _pull(self, request: ServerMessage) -> ServerMessage:
        ids = unpack_ids(request.values["first"], request.tensors[0])
        return ServerMessage({"version": self.shard.version}, [self.shard.read(ids, time.time())])

    def _push(self, client: int, request: ServerMessage) -> ServerMessage:
        values, tensors = request.values, request.tensors
        counts = tensors[2].numpy().astype(np.int64) if len(tensors) > 2 else None
        push = Push(unpack_ids(values["first"], tensors[0]), tensors[1], counts, values["weight"])
        self._parts.setdefault(client, []).append(push)
        if values["more"]:
            return ServerMessage({})
        push = _join(self._parts.pop(client))
        if values["not_finite"] is not None:  # here or on another shard
            problem = FarandoleError(
                f"the gradient of row {values['not_finite']}, pushed by rank {client}, is not finite, and is not "
                "applied",
                remedy="find where the loss overflows; with a GradScaler step only where it did",
            )
            self._broken = problem if self._in_rounds else None
            raise problem
        if not self._in_rounds:
            push = replace(push, weight=push.weight / max(1, len(self._live)))
            self._staleness[self.shard.version - values["read"]] += 1
            self.shard.apply([push], values["lr"], time.time())
            return ServerMessage({})
        self._pushes[client].append((push, values["lr"]))
        self._apply_rounds()
        return ServerMessage({})

    def _look(self, client: int, request: ServerMessage) -> ServerMessage:
        self.shard.expire(time.time())
        return ServerMessage({
            "rows": len(self.shard.rows), "waiting": self.shard.waiting_count, "version": self.shard.version,
            "counts": len(self.shard.waiting), "staleness": sorted(self._staleness.items()),
            "layout": self._layout(),
        })  # fmt: skip

    def _page(self, client: int, request: ServerMessage) -> ServerMessage:
        """Return rows, or counts of ids that wait, by place. ``layout``: that they have not moved since."""
        values = request.values
        store = self.shard.waiting if values["waiting"] else self.shard.rows
        part = slice(values["begin"], values["begin"] + values["rows"])
        tensors = [torch.from_numpy(store.ids[part]), store.values[part], store.states[part],
                   torch.from_numpy(store.used[part])]  # fmt: skip
        return ServerMessage({"layout": self._layout()}, [each.clone() for each in tensors])

    def _changes(self, client: int, request: ServerMessage) -> ServerMessage:
        """Return rows that changed after a version, and ids that were removed; all rows if that is not known."""
        shard, since = self.shard, request.values["since"]
        shard.expire(time.time())
        is_whole = request.values["life"] != self._life or not shard.removed_from <= since <= shard.version
        at = np.flatnonzero(shard.rows.touched > (-1 if is_whole else since))
        ids, versions = shard.removed
        removed = np.empty(0, np.int64) if is_whole else ids[versions >= since]
        values = {"version": shard.version, "life": self._life, "whole": is_whole}
        rows = shard.rows.values.index_select(0, torch.from_numpy(at))
        return ServerMessage(
            values, [torch.from_numpy(shard.rows.ids[at]), rows, torch.from_numpy(removed.copy())]
        )

    def _clear(self, client: int, request: ServerMessage) -> ServerMessage:
        self.shard.clear()
        return ServerMessage({})

    def _put(self, client: int, request: ServerMessage) -> ServerMessage:
        ids, rows, states, used = request.tensors
        self.shard.put_rows(ids.numpy(), rows, states, used.numpy())
        return ServerMessage({})

    def _put_waiting(self, client: int, request: ServerMessage) -> ServerMessage:
        ids, counts, used = request.tensors
        self.shard.put_waiting(ids.numpy(), counts.numpy(), used.numpy())
        return ServerMessage({})

    def _layout(self) -> list[int]:
        return [self.shard.rows.layout, self.shard.waiting.layout]

    # -- see [Note: rounds of pushes] --------------------------------------------------------------

    def _apply_rounds(self) -> None:
        while self._in_rounds and any(self._pushes.values()):
            if not all(self._pushes[rank] for rank in self._live):
                return
            having = {rank: many.popleft() for rank, many in sorted(self._pushes.items()) if many}
            rates = {rank: lr for rank, (_, lr) in having.items()}
            if len(set(rates.values())) > 1:
                self._broken = Mismatch(
                    f"ranks push rows with different learning rates: {rates}",
                    rank=next(iter(rates)),
                    operation="rows",
                    remedy="set table.lr alike on all ranks",
                )
                return
            total = sum(push.weight for push, _ in having.values())
            pushes = [
                Push(push.ids, push.grads, push.counts, push.weight / total if total else 0.0)
                for push, _ in having.values()
            ]
            self.shard.apply(pushes, next(iter(rates.values())), time.time())
            self._rounds += 1
            self._staleness[0] += len(pushes)


def _join(parts: list[Push]) -> Push:
    if len(parts) == 1:
        return parts[0]
    counts = [each.counts for each in parts if each.counts is not None]
    return Push(
        np.concatenate([each.ids for each in parts]), torch.cat([each.grads for each in parts]),
        np.concatenate(counts) if counts else None, parts[0].weight,
    )  # fmt: skip


# All tables of a job as one service of each server: a table is opened by its name, alike on all ranks.


SERVICE: Final = "tables"


class TablesService:
    """See `RowService`, one for each name. Config: ``ranks``."""

    is_behind = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._ranks = set(config["ranks"])
        self._tables: dict[str, RowService] = {}
        self._configs: dict[str, dict[str, Any]] = {}

    def handle(self, client: int, request: ServerMessage) -> ServerMessage | None:
        """Open a ``table``, or let it carry out the request."""
        name = request.values["table"]
        if request.values["do"] == "open":
            self._open(client, name, request.values["config"])
            return ServerMessage({})
        return self._tables[name].handle(client, request)

    def due(self) -> Sequence[tuple[int, ServerMessage | FarandoleError]]:
        """Return the pulls whose round is complete."""
        return [each for table in self._tables.values() for each in table.due()]

    def client_left(self, client: int) -> None:
        """Wait no more for this rank, in any table."""
        self._ranks.discard(client)
        for table in self._tables.values():
            table.client_left(client)

    def state(self) -> ServerMessage:
        """Return all tables, in tensors of their own."""
        states = {name: table.state() for name, table in self._tables.items()}
        said = [[name, self._configs[name], each.values, len(each.tensors)] for name, each in states.items()]
        return ServerMessage(
            {"tables": said, "ranks": sorted(self._ranks)}, [t for s in states.values() for t in s.tensors]
        )

    def load(self, state: ServerMessage) -> None:
        """Go on from `state`."""
        begin = 0
        for name, config, values, count in state.values["tables"]:
            self._tables[name], self._configs[name] = RowService(config), config
            self._tables[name].load(ServerMessage(values, state.tensors[begin : begin + count]))
            begin += count
        self._ranks = set(state.values["ranks"])

    def _open(self, client: int, name: str, config: Mapping[str, Any]) -> None:
        if name not in self._tables:
            self._configs[name] = dict(config)
            self._tables[name] = RowService(config)
            for gone in set(config["ranks"]) - self._ranks:
                self._tables[name].client_left(gone)
        elif self._configs[name] != config:
            raise Mismatch(
                f"table {name!r} is made in two ways: {config} and {self._configs[name]}",
                rank=client,
                operation="rows",
                remedy="make it with the same arguments on all ranks, and give two tables two names",
            )

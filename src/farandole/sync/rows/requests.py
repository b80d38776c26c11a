"""Pulls and pushes of one rank: ids to their shards, in messages of a bounded size, and their bytes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..server.channel import ServerMessage
from .links import MOST_MESSAGE_BYTES, RowLinks
from .store import owners, pack_ids, pack_numbers


class RowMessages:
    """One table as a rank sees it."""

    def __init__(
        self, links: RowLinks, owner_key: int, dim: int, dtype: torch.dtype, *, in_rounds: bool,
        counts_occurrences: bool,
    ) -> None:  # fmt: skip
        self.links, self.owner_key, self.dim, self.dtype = links, owner_key, dim, dtype
        self._in_rounds, self._counts_occurrences = in_rounds, counts_occurrences
        self._round = 0
        """Steps that were pushed."""
        self._read: dict[int, int] = {}
        """By shard the version that was first pulled since the last step."""
        self._versions = dict.fromkeys(range(links.count), 0)
        self.pushed_rows = self.pushed_bytes = self.pulled_rows = self.pulled_bytes = self.sent_bytes = 0

    def pull(self, ids: NDArray[np.int64]) -> torch.Tensor:
        """Return the rows, (u, dim), of ascending `ids`, from all shards."""
        self.pulled_rows += len(ids)
        made = torch.empty(len(ids), self.dim, dtype=self.dtype)
        owner = owners(ids, self.owner_key, self.links.count)
        at_once = max(1, MOST_MESSAGE_BYTES // (self.dim * self.dtype.itemsize + 8))
        for begin in range(0, len(ids), at_once):
            part = slice(begin, begin + at_once)
            places = {server: begin + np.flatnonzero(owner[part] == server) for server in range(self.links.count)}
            requests = {}
            for server, at in places.items():
                if len(at):
                    first, steps = pack_ids(ids[at])
                    requests[server] = ServerMessage({"do": "pull", "first": first, "round": self._round}, [steps])
            for server, reply in self.links.call(requests, keeps=False).items():
                self.sent_bytes += requests[server].nbytes
                self.pulled_bytes += requests[server].nbytes + reply.nbytes
                self._versions[server] = reply.values["version"]
                self._read.setdefault(server, reply.values["version"])
                if len(places[server]) == len(ids):
                    return reply.tensors[0]
                made[torch.from_numpy(places[server])] = reply.tensors[0]
        return made

    def push(
        self, ids: NDArray[np.int64], grads: torch.Tensor, counts: NDArray[np.int64], *, lr: float, weight: float
    ) -> None:  # fmt: skip
        """Send the gradients, (u, dim), of ascending `ids`, with their occurrences, as one step.

        Args:
            ids: (u,).
            grads: on the CPU, never changed again.
            counts: (u,).
            lr: the learning rate of the step.
            weight: of this rank in the sum, over the mean of ranks.
        """
        if self._in_rounds:
            self._wait_for_rounds()
        elif not len(ids):
            return
        finite = torch.isfinite(grads).all(1)
        not_finite = None if bool(finite.all()) else int(ids[int((~finite).nonzero()[0])])
        """The first such row: no shard applies its part."""
        owner = owners(ids, self.owner_key, self.links.count)
        at_once = max(1, MOST_MESSAGE_BYTES // (self.dim * self.dtype.itemsize + 16))
        places = {server: np.flatnonzero(owner == server) for server in range(self.links.count)}
        places = {server: at for server, at in places.items() if len(at) or self._in_rounds}
        self.pushed_rows += len(ids)
        begin = 0
        while places:
            requests = {}
            for server, at in places.items():
                part, more = at[begin : begin + at_once], len(at) > begin + at_once
                first, steps = pack_ids(ids[part])
                values = {"do": "push", "first": first, "more": more, "lr": lr, "weight": weight,
                          "not_finite": not_finite,
                          "read": self._read.get(server, self._versions[server])}  # fmt: skip
                tensors = [steps, grads if len(part) == len(ids) else grads[torch.from_numpy(part)]]
                requests[server] = ServerMessage(
                    values, [*tensors, *([pack_numbers(counts[part])] * (self._counts_occurrences))]
                )
                self.pushed_bytes += requests[server].nbytes
                self.sent_bytes += requests[server].nbytes
            self.links.call(requests, keeps=True)
            begin += at_once
            places = {server: at for server, at in places.items() if len(at) > begin}
        self._round += 1
        self._read.clear()

    def _wait_for_rounds(self) -> None:
        """Wait until all that was pushed is applied, at shards that were not read since: they would queue it."""
        first, steps = pack_ids(np.empty(0, np.int64))
        pull = ServerMessage({"do": "pull", "first": first, "round": self._round}, [steps])
        unread = [server for server in range(self.links.count) if server not in self._read]
        if self._round and unread:
            self.links.call(dict.fromkeys(unread, pull), keeps=False)

"""`RowTable`: an embedding whose rows lie on servers, by id, and exist once they were trained.

::

    clicks = fd.RowTable("clicks.user", dim=32, optimizer="adagrad:lr=0.05")
    vectors = clicks(user_ids)          # int64 of any shape -> shape + (32,)
    loss(vectors).backward()
    optimizer.step()                    # everything else
    clicks.step()                       # or once: clicks.attach(optimizer)

[Note: a step of a table] A forward pass pulls each id of the batch once. Backward sums the gradients of equal
ids, and they are kept until `step`, which sends one row an id to its server; forward passes between two steps are
summed. The server's optimizer makes the step (`optimizers`).
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final, NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from ...checkpoint.manifest import decode
from ...comm.world.store_sync import all_gather_json, require_equal
from ...comm.world.world import World, has_world, world
from ...core.vocabulary.errors import CheckpointError, ConfigError, FarandoleError
from ...core.vocabulary.events import SETUP_ROWS_IN_STEP, InnerExchange, Setup
from ...core.vocabulary.text import write_notice
from ..server.channel import ServerMessage
from .links import (
    MOST_MESSAGE_BYTES,
    LocalShards,
    Mark,
    RowChanges,
    RowLinks,
    RowServers,
    ServerShards,
    read_changes,
)
from .shard import RowOptimizer, RowRules
from .store import key_of, owners, pack_ids, pack_numbers, read_ids


@dataclass(frozen=True)
class RowStatistics:
    """What is known of a table. Bytes are of this rank: ids, counts, gradients and rows, without headers."""

    rows: int
    waiting: int
    """Ids that have occurred, but not often enough for a row."""
    pushed_rows: int
    pushed_bytes: int
    pulled_rows: int
    pulled_bytes: int
    staleness: dict[int, int]
    """How many pushes, of all ranks, were applied so many pushes after what their gradients were computed from."""


@dataclass(eq=False)
class JobTables:
    """The tables that this rank has made, and that live. Kept by the world's session."""

    tables: weakref.WeakSet[RowTable] = field(default_factory=weakref.WeakSet)


@dataclass(frozen=True)
class _Gradient:
    ids: NDArray[np.int64]
    grads: torch.Tensor
    counts: NDArray[np.int64]


class RowTable(nn.Module):
    """An embedding of any int64 ids from 0 on, whose rows lie on server processes. Made by all ranks alike.

    It has no parameters: `model.parameters()` and `state_dict()` are without it (see `snapshot`), and
    gradient clipping does not reach it. `fd.save` has the tables of a model, and those it is given. Servers
    start with the first table of a job.

    Args:
        name: of the table; first values and owners follow from it.
        dim: numbers of a row.
        optimizer: ``sgd``, ``adagrad`` (row-wise) or ``adam`` (lazy), with its numbers: see `RowOptimizer`.
        admit: an id gets a row with the push that has its `admit`-th occurrence.
        expire_seconds: rows that were not trained for so long are dropped; None: never.
        init_std: standard deviation of first values, which are uniform and follow from seed, name and id.
        seed: of the first values.
        staleness: 0: ranks push in step, and a step is applied as one, so they train as one process on the
            joined batch. None: each push is applied when it comes.
        servers: processes that have the rows; 0: one on each host. One rank alone has them in its own process.
        dtype: of rows and states, float32 or float64.

    Raises:
        ConfigError: an argument that is out of range.
        LaunchError: a server did not start, on all ranks.
        Mismatch: ranks make the table in different ways.
    """

    def __init__(  # noqa: PLR0913 - what a table is, by keyword
        self, name: str, dim: int, *, optimizer: str = "adagrad:lr=0.01", admit: int = 1,
        expire_seconds: float | None = None, init_std: float = 0.01, seed: int = 0, staleness: int | None = None,
        servers: int = 0, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        if staleness not in (0, None) or servers < 0 or not name:
            raise ConfigError(
                f"RowTable: name = {name!r}, staleness = {staleness}, servers = {servers}, expected a text; "
                "0, or None for pushes that are applied when they come; and 0 or more"
            )
        rule = RowOptimizer.parse(optimizer)
        self.name, self.dim, self.lr = name, dim, rule.lr
        self._state_width = rule.state_width(dim)
        self._world = world() if has_world() and world().size > 1 else None
        rules = RowRules(
            dim, optimizer, admit, expire_seconds, init_std, key_of(name, seed), str(dtype).removeprefix("torch.")
        )
        ranks = range(1 if self._world is None else self._world.size)
        config = {"rules": asdict(rules), "ranks": list(ranks), "staleness": staleness}
        if self._world is not None:
            said = all_gather_json(self._world, f"table {name}", {**config, "servers": servers, "name": name})
            require_equal(
                self._world, "RowTable", "what the table is", said,
                remedy="make tables in the same order, with the same arguments, on all ranks",
            )  # fmt: skip
        links: RowLinks = (
            LocalShards(config, servers or 1)
            if self._world is None
            else ServerShards(RowServers.of(self._world, servers), name, config)
        )
        self._exchange = RowMessages(
            links, key_of(name, 0), dim, dtype, in_rounds=staleness == 0, counts_occurrences=admit > 1
        )
        self._gradients: list[_Gradient] = []
        if self._world is not None and staleness == 0:
            self._world.session.recorder.record(Setup({SETUP_ROWS_IN_STEP: True}))
        if has_world():
            world().session.keep(JobTables, JobTables).tables.add(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `ids`, integers of any shape, as shape + (dim,), on the device of `ids`.

        An id without a row has its first values. Raises `ConfigError` for ids below 0 or that are no integers.
        """
        flat = read_ids(ids, f"table {self.name!r}")
        unique, inverse, counts = np.unique(flat, return_inverse=True, return_counts=True)
        with self._recorded():
            rows = self._exchange.pull(unique).to(ids.device)
        if torch.is_grad_enabled():
            anchor = torch.zeros(0, device=rows.device, requires_grad=True)
            apply: Any = _TrainedRows.apply
            rows = apply(anchor, rows, _Collector(self._gradients, unique, counts))
        at = torch.from_numpy(inverse.reshape(ids.shape)).to(ids.device)
        return nn.functional.embedding(at, rows)

    def step(self, *, grad_scale: float = 1.0) -> None:
        """Send the gradients since the last step to the servers, whose optimizer makes a step with `lr`.

        With ``staleness=0`` all ranks must call it as often; one without gradients too.

        Args:
            grad_scale: by which the loss was multiplied, such as ``scaler.get_scale()`` of a `GradScaler`.

        Raises:
            FarandoleError: a gradient is not finite, so nothing is applied.
            ConfigError: `lr` is not a finite number from 0.
        """
        lr = float(self.lr)
        if not 0 <= lr < math.inf:
            raise ConfigError(f"table {self.name!r}: lr = {lr}, expected a finite number from 0")
        ids, grads, counts = self._take_gradients(grad_scale)
        weight = 1.0 if self._world is None else self._world.session.batch_weight.factor
        with self._recorded():
            self._exchange.push(ids, grads, counts, lr=lr, weight=weight)

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record the time inside as an exchange of rows."""
        begin, before = time.monotonic(), self._exchange.sent_bytes
        yield
        if self._world is not None:
            sent = self._exchange.sent_bytes - before
            self._world.session.recorder.record(InnerExchange("rows", begin, time.monotonic(), sent))

    def attach(self, optimizer: Optimizer) -> None:
        """Make a `step` after each ``optimizer.step()``. Not for a `GradScaler`, which leaves steps out."""

        def step_too(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self.step()

        optimizer.register_step_post_hook(step_too)

    def changes_since(self, mark: Mark | None = None) -> RowChanges:
        """Return the rows that were trained since `mark`, the one of the last call's result, and removed ids.

        None: all rows. See `RowCopy`, which takes them.
        """
        return read_changes(self._exchange.links, mark)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return all rows, states and counts as tensors by name, to save; call it while no rank trains."""
        return take_rows(self._exchange.links)

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Replace all rows by what `snapshot` returned, of any number of servers; to be called by all ranks.

        Rank 0's `saved` counts. Raises `ConfigError`, on all ranks, for rows of another size or that do not fit.
        """
        self._gradients.clear()
        if self._world is not None:  # what another rank pushed before must not come after
            all_gather_json(self._world, f"rows of {self.name} to restore", "")
        problem, failure = "", cast("Exception | None", None)
        if self._world is None or self._world.rank == 0:
            try:
                problem = put_rows(self._exchange, saved, self._state_width)
            except Exception as error:  # of any kind: the other ranks wait to hear of it
                failure = error
        if self._world is not None:
            said = ["" if failure is None else f"{type(failure).__name__}: {failure}", problem]
            lost, problem = all_gather_json(self._world, f"rows of {self.name} restored", said)[0]
            if lost and failure is None:
                failure = FarandoleError(f"table {self.name!r}: rank 0 could not give back its rows: {lost}")
        if failure is not None:
            raise failure
        if problem:
            raise ConfigError(
                f"table {self.name!r}: {problem}", remedy="make the table as it was when it was saved"
            )

    def statistics(self) -> RowStatistics:
        """Ask the servers for their numbers, and return them with this rank's."""
        links = self._exchange.links
        looked = links.call(dict.fromkeys(range(links.count), ServerMessage({"do": "look"})), keeps=False)
        replies = list(looked.values())
        staleness: dict[int, int] = {}
        for reply in replies:
            for lag, count in reply.values["staleness"]:
                staleness[lag] = staleness.get(lag, 0) + count
        return RowStatistics(
            sum(each.values["rows"] for each in replies), sum(each.values["waiting"] for each in replies),
            self._exchange.pushed_rows, self._exchange.pushed_bytes, self._exchange.pulled_rows,
            self._exchange.pulled_bytes, staleness,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Name, dim and servers."""
        return f"{self.name!r}, dim={self.dim}, servers={self._exchange.links.count}"

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: rows are at servers."""
        raise ConfigError(f"table {self.name!r} cannot be copied: its rows are at servers", remedy="use RowCopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: rows are at servers."""
        raise ConfigError(f"table {self.name!r} cannot be pickled", remedy="save table.snapshot()")

    # -- see [Note: a step of a table] -----------------------------------------------------------

    def _take_gradients(self, scale: float) -> tuple[NDArray[np.int64], torch.Tensor, NDArray[np.int64]]:
        """Return ascending ids with the sums of their gradients and occurrences."""
        found = list(self._gradients)
        self._gradients.clear()
        if not found:
            return (
                np.empty(0, np.int64),
                torch.empty(0, self.dim, dtype=self._exchange.dtype),
                np.empty(0, np.int64),
            )
        ids, grads, counts = found[0].ids, found[0].grads, found[0].counts
        if len(found) > 1:
            ids, inverse = np.unique(np.concatenate([each.ids for each in found]), return_inverse=True)
            all_grads, grads = torch.cat([each.grads for each in found]), torch.zeros(len(ids), self.dim)
            grads = grads.to(all_grads).index_add_(0, torch.from_numpy(inverse).to(all_grads.device), all_grads)
            counts = np.bincount(
                inverse, weights=np.concatenate([each.counts for each in found]), minlength=len(ids)
            ).astype(np.int64)
        grads = grads.to("cpu", self._exchange.dtype)
        return ids, grads if scale == 1 else grads / scale, counts


class _TrainedRows(torch.autograd.Function):
    """The rows of one forward pass, whose gradient is kept for the step and goes no further."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, rows: torch.Tensor, collector: _Collector) -> torch.Tensor:
        """`anchor`: a tensor that requires a gradient, which it does not get."""
        ctx.collector = collector
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        """Give the gradient to the collector."""
        ctx.collector.take(grads[0])
        return None, None, None


@dataclass(eq=False)
class _Collector:
    """Takes the gradient of one forward pass when backward has it."""

    into: list[_Gradient]
    ids: NDArray[np.int64]
    counts: NDArray[np.int64]

    def take(self, grad: torch.Tensor) -> None:
        """Take that of one backward pass; occurrences count once."""
        self.into.append(_Gradient(self.ids, grad.detach(), self.counts))
        self.counts = np.zeros_like(self.counts)


# Whole tables as tensors: taken from the shards page by page, and given to any other number of shards.


_ROWS: Final = ("ids", "rows", "states", "used")
_WAITING: Final = ("waiting_ids", "waiting_counts", "waiting_used")
_SAVED: Final = "saved_seconds"


def take_rows(links: RowLinks) -> dict[str, torch.Tensor]:
    """Return ``ids`` (n,), ``rows`` (n, dim), ``states`` (n, k), ``used`` (n,) in seconds, counts and the time."""
    pages: list[list[torch.Tensor]] = []
    waiting: list[list[torch.Tensor]] = []
    for server in range(links.count):
        of_rows, of_waiting = _take_shard(links, server)
        pages += of_rows
        waiting += [[ids, counts[:, 0], used] for ids, counts, _, used in of_waiting]
    saved = {name: torch.cat([page[at] for page in pages]) for at, name in enumerate(_ROWS)}
    saved |= {name: torch.cat([page[at] for page in waiting]) for at, name in enumerate(_WAITING)}
    return {**saved, _SAVED: torch.tensor([time.time()], dtype=torch.float64)}


def put_rows(exchange: RowMessages, saved: Mapping[str, torch.Tensor], state_width: int) -> str:
    """Replace all rows by what `take_rows` returned; return why that cannot be, and change nothing then."""
    links, dim, dtype = exchange.links, exchange.dim, exchange.dtype
    missing = [name for name in (*_ROWS, *_WAITING, _SAVED) if name not in saved]
    if missing:
        return f"the saved rows have no {missing[0]!r}"
    shapes = tuple(saved["rows"].shape[1:]), tuple(saved["states"].shape[1:])
    if shapes != ((dim,), (state_width,)) or saved["rows"].dtype != dtype:
        return (
            f"saved are rows of {shapes[0]} {saved['rows'].dtype} with states of {shapes[1]}, "
            f"expected ({dim},) {dtype} with ({state_width},)"
        )
    for names in (_ROWS, _WAITING):
        keys, lengths = saved[names[0]], [len(saved[name]) for name in names]
        if (
            len(set(lengths)) > 1
            or keys.dtype != torch.int64
            or bool((keys < 0).any())
            or len(keys.unique()) < len(keys)
        ):
            return f"{names} of {lengths} rows, with ids of {keys.dtype}: expected as many of each, and ids once"
    # Rows are as long from their expiry as when they were saved.
    later = max(0.0, time.time() - float(saved[_SAVED]))
    saved = {**saved, **{name: saved[name] + later for name in (_ROWS[-1], _WAITING[-1])}}
    links.call(dict.fromkeys(range(links.count), ServerMessage({"do": "clear"})), keeps=True)
    at_once = max(1, MOST_MESSAGE_BYTES // ((dim + state_width) * dtype.itemsize + 16))
    for what, names in (("put", _ROWS), ("put_waiting", _WAITING)):
        ids = saved[names[0]].numpy()
        owner = owners(ids, exchange.owner_key, links.count)
        for begin in range(0, len(ids), at_once):
            part = owner[begin : begin + at_once]
            places = {server: begin + np.flatnonzero(part == server) for server in range(links.count)}
            requests = {
                server: ServerMessage({"do": what}, [saved[name][torch.from_numpy(at)] for name in names])
                for server, at in places.items()
                if len(at)
            }
            links.call(requests, keeps=True)
    return ""


def _take_shard(links: RowLinks, server: int) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """Return the pages of a shard, from the beginning again where rows have moved meanwhile."""
    while True:
        said = links.call({server: ServerMessage({"do": "look"})}, keeps=False)[server].values
        found: list[list[list[torch.Tensor]]] = []
        is_same = True
        for is_waiting, rows in ((False, said["rows"]), (True, said["counts"])):
            pages = []
            for begin in range(0, max(1, rows), at_once := 1 << 14):
                values = {"do": "page", "waiting": is_waiting, "begin": begin, "rows": min(at_once, rows - begin)}
                reply = links.call({server: ServerMessage(values)}, keeps=False)[server]
                is_same = is_same and reply.values["layout"] == said["layout"]
                pages.append(list(reply.tensors))
            found.append(pages)
        if is_same:
            return found[0], found[1]


# Pulls and pushes of one rank: ids to their shards, in messages of a bounded size, and their bytes.


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


# Tables in a checkpoint: which ones, what `fd.save` and `fd.load` ask them for, and which are left out.


@dataclass(frozen=True)
class TableState:
    """The rows of one table: rank 0 has all of them while it saves or loads."""

    table: RowTable
    here: World

    def meet(self) -> None:
        """Wait until all ranks are here: what they pushed before is in the rows."""
        if self.here.size > 1:
            all_gather_json(self.here, f"rows of {self.table.name} to save", "")

    def read(self) -> dict[str, torch.Tensor]:
        """Return all rows on rank 0, and nothing elsewhere; right after `meet`."""
        return self.table.snapshot() if self.here.rank == 0 else {}

    def write(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Replace all rows by rank 0's `saved`; to be called by all ranks. Raises on all of them or on none."""
        self.table.restore(saved)


def tables_in(modules: Iterable[nn.Module], here: World) -> dict[str, TableState]:
    """Return the tables that `modules` are or have, by their own names.

    Raises `CheckpointError` for two of one name.
    """
    found: dict[str, TableState] = {}
    for module in modules:
        for each in module.modules():
            if isinstance(each, RowTable):
                if each.name in found and found[each.name].table is not each:
                    raise CheckpointError(
                        f"two tables are named {each.name!r}, and a checkpoint has tables by name",
                        is_input=True,
                        remedy="give them names of their own",
                    )
                found[each.name] = TableState(each, here)
    return found


@dataclass(frozen=True)
class SavedTables:
    """What of a checkpoint goes into tables: its first rank's rows, by the first rank here."""

    tables: Mapping[str, TableState]
    """Those that are to be loaded."""
    saved: Mapping[str, Any]
    """The encoded rows that the checkpoint has, by table."""
    here: World

    def missing(self) -> list[str]:
        """Return the tables that the checkpoint has not."""
        return [name for name in self.tables if name not in self.saved]

    def wanted(self) -> list[Any]:
        """Return what this rank needs of the checkpoint, encoded."""
        return [self.saved[name] for name in self.tables if self.here.rank == 0]

    def writes(self, restore: Callable[..., Any]) -> dict[str, Callable[[], None]]:
        """Return, by table, what all ranks are to call. Raises for what cannot be decoded."""
        tell_left_out(self.here, self.tables.keys(), saved=self.saved.keys())
        rows = {name: decode(self.saved[name], restore) if self.here.rank == 0 else {} for name in self.tables}
        return {name: partial(each.write, rows[name]) for name, each in self.tables.items()}


@dataclass(eq=False)
class _Told:
    texts: set[str] = field(default_factory=set)


def tell_left_out(here: World, given: Collection[str], *, saved: Collection[str] | None = None) -> None:
    """Say once, on rank 0, which tables a save leaves out; with `saved` of a checkpoint, which a load does."""
    job = here.session.kept(JobTables)
    left = set() if job is None else {each.name for each in job.tables} - set(given)
    left |= set(saved or ()) - set(given)
    names = ", ".join(sorted(left))
    text = (
        f"the checkpoint is without the rows of {names}: give fd.save the table, too, such as users=users"
        if saved is None
        else f"the rows of {names} are as they were: give fd.load the table, too, such as users=users"
    )
    told = here.session.keep(_Told, _Told).texts
    if left and text not in told and here.rank == 0:
        write_notice(text)
    told.add(text)

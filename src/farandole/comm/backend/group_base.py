"""What every operation of a group rests on: who the group is to torch, and how a call is queued and agreed on.

[Note: every call] Every collective begins with an agreement: all ranks compare what they are about to do
(operation, sizes, types, root, and the how-manieth call it is), before any data moves. A difference is a
`Mismatch` on all ranks.

[Note: a group ends with its first error] After `Mismatch`, `PeerLost` or `Stalled` ranks no longer agree on what
comes next, so each later call raises the same error. Who wants to go on makes a new group. An argument that is
refused before anything was said to other ranks (`ValueError`, `NotImplementedError`) leaves the group as it was.

Collectives are carried out one after the other, in the order of calls: see `calls`. Sends and receives have a
thread of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ...core.vocabulary.errors import CommError
from .calls import CallQueue, GroupWork, QueuedCall, WorkEnd
from .collectives import GroupExchange, shortened
from .mailbox import MOST_TAG, Mailbox

Body = Callable[[GroupExchange, Sequence[Sequence[int]]], object]
_TorchGroup: Any = dist.ProcessGroup
"""Without its annotations: they have forms of each method that torch offers in C++ only."""


class GroupBase(_TorchGroup):  # type: ignore[misc]
    """A process group of torch without its operations."""

    def __init__(
        self,
        exchange: GroupExchange,
        names: Sequence[int],
        *,
        calls: CallQueue,
        mailbox: Mailbox | None,
        close: Callable[[], None],
        timeout_seconds: float,
        split: Callable[..., Any],
    ) -> None:
        """`names`: the group's global ranks. `mailbox`: None in a group of one. `close` leaves the exchange.

        `split` makes a group of some ranks of this one: see `create._split`.
        """
        super().__init__(exchange.rank, exchange.size)
        self._exchange = exchange
        self._names = tuple(names)
        self._queue = calls
        self._mailbox = mailbox
        self._leave = close
        self._timeout_seconds = timeout_seconds
        self._process = os.getpid()
        self._calls = self._splits = 0
        self.purpose = ""
        """What the next calls are for, which ranks compare as well: see `calls_for`."""
        self._split = split
        self._said = {"name": "", "description": "undefined"}
        self._is_closed = False

    # -- who it is ------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - c10d's names
        """Return "farandole"."""
        return "farandole"

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that torch gave the group."""
        return self._said["name"]

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name that torch gives the group."""
        self._said["name"] = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what the group is for, as its maker said."""
        return self._said["description"]

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Take what the group is for."""
        self._said["description"] = description

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The ranks of the group as the job numbers them, by their rank in the group."""
        return self._names

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> GroupBase:
        if torch.device(device).type != "cpu":
            raise NotImplementedError(f"farandole: a tensor on {device}: this backend has CPU tensors only")
        return self

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Let each wait of the operations begun from now on last `timeout` at most."""
        self._timeout_seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # -- its end --------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the group. Others that wait for this rank raise `PeerLost`. May be called twice."""
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        self._leave()

    def abort(self) -> None:
        """Leave the group at once; what this rank waits for fails."""
        self.shutdown()

    def _not_there(self, name: str, *_: object, **__: object) -> Any:
        raise NotImplementedError(f"farandole: this backend has no {name}")

    def split_group(  # noqa: PLR0917 - the order is c10d's
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> Any:
        """Return a group of `ranks` of this one; None on the others. To be called by all ranks of this group.

        `opts` and `device_types` are for other devices than the CPU; there is nothing to choose here.
        """
        members = sorted(ranks)
        if len(set(members)) != len(members) or not members:
            raise ValueError(f"farandole: split_group of ranks {list(ranks)}: expected different ones")
        for member in members:
            self._at(member)
        self._require_open("split_group")
        self._splits += 1
        if self.rank() not in members:
            return None
        seconds = self._timeout_seconds if timeout is None else timeout.total_seconds()
        made = self._split(self, members, self._splits, seconds)
        made._set_group_name(group_name or f"{self.getGroupName()}/split {self._splits}")
        made._set_group_desc(group_desc or self.getGroupDesc())
        return made

    def merge_remote_group(self, *arguments: object, **named: object) -> Any:
        """Refuse."""
        return self._not_there("merge_remote_group", *arguments, **named)

    splitGroup, mergeRemoteGroup = split_group, merge_remote_group  # noqa: N815

    # -- one call -------------------------------------------------------------------------------------

    def _begin(
        self, call: str, body: Body, outputs: Sequence[Any], opts: Any, *,
        row: Callable[[], Sequence[int]] = tuple, seconds: float | None = None,
    ) -> GroupWork:  # fmt: skip
        """Queue a call; `body` is carried out when all ranks agree. See [Note: every call].

        `row`: asked in the call's turn, for numbers that the other ranks need for `body`.
        """
        self._require_open(call)
        self._calls += 1
        said = shortened(f"{call}{self.purpose} (call {self._calls})")
        wait = self._wait_seconds(opts) if seconds is None else seconds

        def perform() -> None:
            with _without_modes():
                body(self._exchange, self._exchange.agree(said, row(), wait))
                self._exchange.conclude()

        work = GroupWork(said, self._names[self.rank()], outputs)
        call_ = QueuedCall(perform, partial(self._end, work.end))
        work.finish = partial(self._queue.finish, call_)
        self._queue.submit(call_, is_async=getattr(opts, "asyncOp", True))
        return work

    def _end(self, end: WorkEnd, problem: BaseException | None) -> Callable[[], object] | None:
        """See [Note: a group ends with its first error]."""
        if problem is not None and not isinstance(problem, CommError) and self._is_closed:
            problem = CommError("the group was destroyed", rank=self._names[self.rank()], operation="collective")
        return end.tell(problem)

    def _mail(self, tag: int) -> Mailbox:
        if not 0 <= tag <= MOST_TAG:
            raise ValueError(f"farandole: tag {tag}: expected 0 to {MOST_TAG}")
        self._require_open("send or receive")
        if self._mailbox is None:
            raise ValueError("farandole: a group of one rank has no other rank to send to or receive from")
        return self._mailbox

    def _require_open(self, call: str) -> None:
        if os.getpid() != self._process:
            what = "this process was forked from that rank, and is no rank itself"
        elif self._is_closed:
            what = "the group was destroyed"
        else:
            return
        raise CommError(what, rank=self._names[self.rank()], operation=call)

    def _wait_seconds(self, opts: Any) -> float:
        timeout = getattr(opts, "timeout", None)
        given = timeout.total_seconds() if isinstance(timeout, timedelta) else 0.0
        return given if given > 0 else self._timeout_seconds

    def _at(self, rank: int) -> str:
        if not 0 <= rank < self.size():
            raise ValueError(f"farandole: rank {rank} of a group of {self.size()}")
        return f"rank {self._names[rank]}"


@contextmanager
def calls_for(group: dist.ProcessGroup, purpose: str) -> Iterator[None]:
    """Let all ranks compare what the calls begun in this context are for; of a group of ours only.

    Calls of different purposes may be alike in operation, type and length: a block of a model and the next one.
    """
    if not isinstance(group, GroupBase):
        yield
        return
    before, group.purpose = group.purpose, f" {purpose}"
    try:
        yield
    finally:
        group.purpose = before


def _without_modes() -> AbstractContextManager[object]:
    """Return a context in which the user's modes, such as fake tensors or counters, see nothing of an exchange."""
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    return _disable_current_modes()

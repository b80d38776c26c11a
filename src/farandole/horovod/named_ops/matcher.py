"""Which operations are complete: every member has said that it is ready. Pure; no sockets, no clock.

[Note: all members are told] A rank announces an operation to all members of its set, itself included.
What a member announces reaches each other member in the same order. So every member finds the same partners
for each operation, and comes to the same verdict without a coordinator. The n-th announcement of a
name by one member meets the n-th by every other.

[Note: epochs of join] A rank that joins says so in the same stream. What it announces afterwards belongs to
its next epoch. An operation of epoch e is complete when each member has announced it in e or has left e by
joining: then that member is absent. All members see the same members absent. What others announce in an epoch that
this rank has left, and in which it has nothing more to offer, is dropped here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...comm.codecs.registry import make_codec
from ...core.vocabulary.codec_spec import AUTO, NONE, CodecSpec
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import name_ranks
from .operations import DTYPE_NAMES, Request, Signature
from .reductions import refuse_reduction

# Whether members ask for the same thing, and if not, in which words they are told.
#
# The words before the colon and after "One rank" are those that scripts written for Horovod look for. Behind
# them stands who asked for what.

_WITHOUT_SCALARS = ("allgather", "alltoall", "reducescatter")
Told = Mapping[int, Signature]
"""What each member told, by rank."""


class _Fact(NamedTuple):
    """Something in which members may differ, and how they are told: two values, and the ``kind`` of operation."""

    read: Callable[[Signature], Any]
    text: str
    show: Callable[[Any], str] = str


def _group_text(names: tuple[str, ...]) -> str:
    return (
        f"in a group of {len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        if names
        else "alone"
    )


_WHAT = (
    _Fact(lambda s: s.kind.upper(), "Mismatched operations: One rank did an {}, but another rank did an {}."),
    _Fact(lambda s: s.group, "Mismatched groups: One rank submitted it {}, but another rank {}.", _group_text),
)
_DTYPE = _Fact(lambda s: s.dtype, "Mismatched data types: One rank had type {}, but another rank had type {}.")
_DIMENSIONS = _Fact(
    lambda s: len(s.shape),
    "Mismatched {kind} tensor shapes: One rank sent a tensor of rank {}, "
    "but another rank sent a tensor of rank {}.",
)
_SHAPE = _Fact(
    lambda s: s.shape,
    "Mismatched {kind} tensor shapes: One rank sent a tensor of shape {}, "
    "but another rank sent a tensor of shape {}.",
    lambda shape: str(list(shape)),
)
_HOW = (
    _Fact(
        lambda s: s.reduction,
        "Mismatched reduction operation: One rank specified {}, but another rank specified {}.",
    ),
    _Fact(
        lambda s: (s.prescale, s.postscale),
        "Mismatched prescale and/or postscale factors: One rank specified {}, but another rank specified {}.",
        lambda pair: f"prescale {pair[0]!r} and postscale {pair[1]!r}",
    ),
    _Fact(
        lambda s: s.root,
        "Mismatched {kind} root ranks: One rank specified root rank {}, but another rank specified root rank {}.",
    ),
    _Fact(lambda s: s.codec, "Mismatched codecs: One rank specified {}, but another rank specified {}."),
    _Fact(
        lambda s: s.chosen_with,
        "Mismatched exchanges: One rank has its codec chosen with {!r}, but another rank with {!r}.",
    ),
    _Fact(
        lambda s: s.device,
        "Mismatched {kind} CPU/GPU device selection: One rank specified device {}, "
        "but another rank specified device {}.",
        lambda device: {"cpu": "CPU", "cuda": "GPU"}.get(device, device),
    ),
)
_SETS = _Fact(
    lambda s: s.splits,
    "Mismatched process sets: One rank specified {}, but another rank specified {}.",
    lambda ranks: str(list(ranks)),
)


def disagreement(told: Told, absent: Sequence[int], hosts: Sequence[str]) -> str:
    """Return what is wrong with an operation, the same text on all members; empty when they agree.

    `absent`: members that have joined. `hosts`: by rank.
    """
    ordered = {rank: told[rank] for rank in sorted(told)}
    first = next(iter(ordered.values()))
    found = _difference(_WHAT, ordered, hosts)
    if found:
        return found
    if absent and first.kind != "allreduce":
        return (
            f"{first.kind.capitalize()} is not supported with Join at this time. "
            f"({name_ranks(sorted(absent))} joined, and {name_ranks(list(ordered))} went on)"
        )
    found = _difference([_DTYPE, *_shapes_of(first)], ordered, hosts)
    if not found and first.kind in _WITHOUT_SCALARS and not first.shape:
        found = f"Process-set rank zero tried to {first.kind.upper()} a rank-zero tensor."
    sets = [_SETS] if first.kind.endswith("process_set") else []
    return found or _difference([*_HOW, *sets], ordered, hosts)


def _difference(facts: Iterable[_Fact], ordered: Told, hosts: Sequence[str]) -> str:
    """Return the first of `facts` in which members differ, with who has what; empty when there is none."""
    for fact in facts:
        parties: dict[Any, list[int]] = {}
        for rank, signature in ordered.items():
            parties.setdefault(fact.read(signature), []).append(rank)
        if len(parties) > 1:
            kind = next(iter(ordered.values())).kind.upper()
            one, other, *_ = map(fact.show, parties)
            who = [
                f"{fact.show(value)} on {name_ranks(ranks)} ({', '.join(dict.fromkeys(hosts[r] for r in ranks))})"
                for value, ranks in list(parties.items())[:4]
            ]
            return f"{fact.text.format(one, other, kind=kind)} ({'; '.join(who)})"
    return ""


def _shapes_of(first: Signature) -> list[_Fact]:
    """Return what shapes have to agree in; given one whose dimensions are as many as the others'."""
    if first.kind not in ("allgather", "alltoall"):
        return [_SHAPE]
    text = (
        "Mismatched {{kind}} tensor shapes: One rank sent a tensor with dimension {0} equal to {{}}, "
        "but another rank sent a tensor with dimension {0} equal to {{}}."
    )
    rows = [_Fact(lambda s, d=d: s.shape[d], text.format(d)) for d in range(1, len(first.shape))]  # type: ignore[misc]
    return [_DIMENSIONS, *rows]


# What one rank alone can see is wrong with a request, in the words that scripts written for Horovod look for.

_REDUCTIONS = ("sum", "average", "min", "max", "product", "adasum")
_KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier")
_LONGEST_NAME = 4096

DUPLICATE = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is "
    "currently being processed. If you want to request another tensor, use a different tensor name."
)


def not_a_member(kind: str, rank: int) -> ConfigError:
    """Return the error for an operation of a set without this rank."""
    return ConfigError(f"{kind.capitalize()}: Rank {rank} is not a member of the provided process set.")


def unknown_set(kind: str, number: int) -> ConfigError:
    """Return the error for an unknown set."""
    return ConfigError(
        f"{kind.capitalize()}: Process set provided does not exist, or has not been registered.",
        remedy=f"set {number} was not added, or was removed",
    )


def check(request: Request, members: tuple[int, ...]) -> None:
    """Raise `ConfigError` for a request that cannot be carried out whatever the other ranks say."""
    kind, tensor, name = request.kind, request.tensor, request.name
    if kind not in _KINDS:
        raise ConfigError(f"{name}: unknown kind {kind!r}", remedy=f"one of {', '.join(_KINDS)}")
    if not name or len(name) > _LONGEST_NAME:
        raise ConfigError(f"a name of {len(name)} characters: expected 1 to {_LONGEST_NAME}")
    if kind == "barrier":
        return
    if tensor is None:
        raise ConfigError(f"{kind} {name}: there is no tensor")
    if tensor.dtype not in DTYPE_NAMES:
        raise ConfigError(f"{kind} {name}: Tensor type {tensor.dtype} is not supported.")
    if tensor.is_sparse or tensor.device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{kind} {name}: a {tensor.layout} tensor on {tensor.device} cannot travel")
    if kind in ("allreduce", "reducescatter"):
        _check_reduction(request, kind)
    if kind == "broadcast" and request.root not in members:
        raise ConfigError(f"broadcast received invalid root rank {request.root} for provided process set")
    if kind == "alltoall":
        _check_splits(request, len(members))


def _check_reduction(request: Request, kind: str) -> None:
    assert request.tensor is not None, "checked before"
    dtype = request.tensor.dtype
    if request.reduction not in _REDUCTIONS:
        raise ConfigError(
            f"{kind} {request.name}: unknown reduction {request.reduction!r}",
            remedy=f"one of {', '.join(_REDUCTIONS)}",
        )
    if kind == "reducescatter" and request.reduction not in ("sum", "average"):
        raise ConfigError("Reducescatter currently only supports AVERAGE and SUM.")
    reason = refuse_reduction(dtype, request.reduction)
    if reason:
        raise ConfigError(f"{kind} {request.name}: the {request.reduction} of {dtype} is not supported: {reason}")
    if request.codec == NONE:
        return
    if kind != "allreduce" or request.reduction not in ("sum", "average") or not dtype.is_floating_point:
        raise ConfigError(
            f"{kind} {request.name}: codec {request.codec} with the {request.reduction} of {dtype}",
            remedy="codecs carry the sum or average of floating-point numbers in an allreduce",
        )
    if request.codec != AUTO:
        make_codec(CodecSpec.parse(request.codec))
    elif not request.chosen_with:
        raise ConfigError(
            f"{kind} {request.name}: codec {AUTO} is chosen for the gradients of an optimizer or a tape",
            remedy="name a codec",
        )


def _check_splits(request: Request, size: int) -> None:
    assert request.tensor is not None, "checked before"
    rows = request.tensor.shape[0] if request.tensor.dim() else 0
    splits = request.splits
    if splits is None:
        if request.tensor.dim() and rows % size:
            raise ConfigError(
                "splits not provided, but first dimension of tensor is not an even multiple "
                "of the number of workers.",
                remedy=f"{rows} rows for {size} ranks",
            )
        return
    if len(splits) != size:
        raise ConfigError(
            "Number of entries in splits does not equal number of workers.",
            remedy=f"{len(splits)} entries for {size} ranks",
        )
    if min(splits) < 0:
        raise ConfigError(f"splits {list(splits)}: expected no negative number of rows")
    if sum(splits) > rows:
        raise ConfigError(
            "Sum of splits entries is greater than the first dimension of tensor.",
            remedy=f"{sum(splits)} rows to be sent, {rows} are there",
        )


def sign(request: Request, serial: int, size: int, group: tuple[str, ...]) -> Signature:
    """Return the signature of a request that was checked. What does not matter for its kind is left out."""
    kind, tensor = request.kind, request.tensor
    if tensor is None:
        return Signature(request.name, serial, kind, group=group)
    splits: tuple[int, ...] = ()
    if kind == "alltoall":
        rows = tensor.shape[0] if tensor.dim() else 0
        splits = tuple(request.splits) if request.splits is not None else (rows // size,) * size
    reduces = kind in ("allreduce", "reducescatter")
    return Signature(
        request.name,
        serial,
        kind,
        DTYPE_NAMES[tensor.dtype],
        tuple(tensor.shape),
        request.reduction if reduces else "sum",
        request.prescale if reduces else 1.0,
        request.postscale if reduces else 1.0,
        request.root if kind == "broadcast" else 0,
        splits,
        request.codec if kind == "allreduce" else NONE,
        tensor.device.type,
        group,
        request.chosen_with if request.codec == AUTO else "",
    )


Key = tuple[int, str]


@dataclass(eq=False, slots=True)
class Announcement:
    """One member is ready."""

    signature: Signature
    epoch: int
    payload: bytearray | None = None
    """Its data, when it came along; None: it did not."""
    own: Any = None
    """This rank's operation; None for other ranks."""


@dataclass(eq=False, slots=True)
class MatchSlot:
    """Announcements of one name that wait for their partners, by rank, oldest first."""

    key: Key
    queues: dict[int, deque[Announcement]] = field(default_factory=dict)
    filled: int = 0
    """Members with at least one."""
    users: int = 0
    """Numbers of other ranks that stand for a signature of this name; see `numbers`."""

    @property
    def ready(self) -> list[int]:
        """Members with at least one."""
        return [rank for rank, queue in self.queues.items() if queue]


@dataclass(eq=False, slots=True)
class Match:
    """An operation whose members are all ready."""

    own: Any
    told: dict[int, Announcement]
    """By rank, ascending; without absent members."""
    absent: tuple[int, ...]


class Matcher:
    """The announcements of all ranks, seen from one of them."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.slots: dict[Key, MatchSlot] = {}
        self.epochs = [0] * size
        """Joins so far, by rank."""
        self._has_joins = False

    def slot(self, key: Key) -> MatchSlot:
        """Return the slot of a name."""
        found = self.slots.get(key)
        if found is None:
            found = self.slots[key] = MatchSlot(key)
        return found

    def release(self, slot: MatchSlot) -> None:
        """Forget a slot that is unused and in which no operation waits."""
        if not slot.users and not slot.filled:
            self.slots.pop(slot.key, None)

    def add(self, slot: MatchSlot, rank: int, announcement: Announcement) -> None:
        """Take an announcement of `rank`; `take` then returns what it completes."""
        if announcement.epoch < self.epochs[self.rank] and not slot.queues.get(self.rank):
            return  # this rank is absent
        queue = slot.queues.get(rank)
        if queue is None:
            queue = slot.queues[rank] = deque()
        if not queue:
            slot.filled += 1
        queue.append(announcement)

    def take(self, slot: MatchSlot) -> Match | None:
        """Return the next complete operation of the slot, or None."""
        mine = slot.queues.get(self.rank)
        if not mine:
            return None
        first = mine[0]
        members = first.own.members
        if not self._has_joins:
            return self._take_from_all(slot, first.own, members)
        epoch, epochs = first.epoch, self.epochs
        if slot.filled < len(members) and max(epochs) <= epoch:
            return None
        told: dict[int, Announcement] = {}
        absent = []
        for member in members:
            queue = slot.queues.get(member)
            while queue and queue[0].epoch < epoch:
                self._pop(slot, queue)  # this rank was absent
            if queue and queue[0].epoch == epoch:
                told[member] = queue[0]
            elif epochs[member] > epoch:
                absent.append(member)
            else:
                return None
        for member in told:
            self._pop(slot, slot.queues[member])
        if self.epochs[self.rank] and not mine:
            self._drop_left_epochs(slot)
        return Match(first.own, told, tuple(absent))

    def _take_from_all(self, slot: MatchSlot, own: Any, members: tuple[int, ...]) -> Match | None:
        """Return what is complete if no rank has ever joined: the usual case."""
        if slot.filled < len(members):
            return None
        told = {}
        for member in members:
            queue = slot.queues[member]
            told[member] = queue.popleft()
            if not queue:
                slot.filled -= 1
        return Match(own, told, ())

    def _pop(self, slot: MatchSlot, queue: deque[Announcement]) -> None:
        queue.popleft()
        if not queue:
            slot.filled -= 1

    def missing(self, own: Any, slot: MatchSlot) -> list[int]:
        """Return the members that an operation of this rank, the oldest of its slot, waits for."""
        mine = slot.queues.get(self.rank)
        if not mine or mine[0].own is not own:
            return []
        epoch = mine[0].epoch
        return [
            member
            for member in own.members
            if self.epochs[member] <= epoch
            and not ((queue := slot.queues.get(member)) and queue[0].epoch == epoch)
        ]

    def joined(self, rank: int) -> Iterator[MatchSlot]:
        """Note that `rank` joined; yield the slots that may be complete now."""
        self.epochs[rank] += 1
        self._has_joins = True
        for slot in list(self.slots.values()):
            if slot.queues.get(self.rank):
                yield slot
            elif rank == self.rank:
                self._drop_left_epochs(slot)
                self.release(slot)

    def _drop_left_epochs(self, slot: MatchSlot) -> None:
        for queue in slot.queues.values():
            while queue and queue[0].epoch < self.epochs[self.rank]:
                self._pop(slot, queue)

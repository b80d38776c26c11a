"""What must not pass silently in an exchange of gradients, and is asked on all ranks alike.

- `SingleGradientGuard`: a second gradient of a parameter, where a front end counts on one
- `NonFiniteGuard`: gradients that hold NaN or infinity
- `CountCalls`: ranks that call `fd.weight` in a step, and ranks that do not
- `refuse_messages`: gradients on an accelerator that would travel by messages

[Note: who weighs] The call `fd.weight` adds up the counts of all ranks, so a rank that leaves it out would go on
to the exchange of gradients while the others wait for its count, and all would wait for ever. While counts are in
use, each exchange of gradients therefore begins with the same small sum, in which the rank says that it exchanges:
who meets it in `fd.weight` knows, and so does the rank itself, when its backward pass ends. At the first call of
either in a world, ranks compare through the store which of the two it is: a job without counts pays for that
alone. Not found is a job that begins with counts later, and on some ranks only: the stall watcher names it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist

from ...core.step_model import CANDIDATES
from ...core.vocabulary.codec_spec import AUTO, CodecSpec
from ...core.vocabulary.errors import CommError, ConfigError, Mismatch, PlanError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import name_ranks
from ..codecs.registry import runs_on_devices
from ..collectives import start_all_reduce
from ..device.streams import streams_of
from ..world.comm_errors import translated
from ..world.session import Agreed
from ..world.store_sync import all_gather_json
from ..world.world import World
from .bucket import Bucket
from .buckets import BucketSet
from .grad_ownership import drop_grads
from .parameters import ReducerOptions, device_of


# What a second gradient of a parameter between two steps is: an error, where a front end counts on one.
class SingleGradientGuard:
    """Which parameters' mean has been taken since the last step. Counts only with `on_second_gradient`."""

    def __init__(self, options: ReducerOptions) -> None:
        self._options = options
        self.spent: bytearray | None = None
        """By parameter: 1 where another gradient is an error; None where it is for no parameter."""

    def begin_step(self) -> None:
        """Allow every parameter its next gradient."""
        self.spent = None

    def refuse_second(self, index: int, name: str) -> None:
        """Raise the front end's error where parameter `index` has had its gradient and now gets another one."""
        if self.spent is None or not self.spent[index]:
            return
        assert self._options.on_second_gradient is not None, "without it nothing is counted"
        problem = self._options.on_second_gradient(name)
        if problem is not None:
            raise problem
        self.spent = None

    def note_exchange(self, seen: bytearray, accumulate: int) -> None:
        """Note an exchange after a pass in which the parameters of `seen` became ready."""
        if self._options.reduce_op == "sum" or accumulate > 1:  # a second exchange would count the first one again
            self.spent = bytearray(b"\1" * len(seen))
        elif self.spent is None:
            self.spent = seen
        else:
            self.spent = bytearray(map(max, self.spent, seen))


# Exchanges with gradients that are not finite: the step is dropped, and residuals are rolled back.
#
# [Note: steps that are dropped] When a coded bucket had a gradient that is not finite, its own state goes back at
# once: every rank has NaN as the mean. With ``nonfinite="skip"`` and ``"raise"`` nothing of the exchange is used,
# and all buckets' states go back. With ``"propagate"`` the loop decides, on all ranks alike because their
# gradients are: a `GradScaler` leaves the step out, a plain loop makes it. So the other buckets wait. If an
# optimizer steps, they were used; if the next exchange begins first and their gradients are gone, they were not.
#
# [Note: asked later] With gradients on a device the state of a coded bucket goes back there. With "propagate" the
# host asks whether it did when the next exchange begins, and never if an optimizer has stepped by then.


class NonFiniteGuard:
    """What one reducer does about exchanges that brought NaN or infinity. Asked by all ranks alike."""

    def __init__(self, world: World, buckets: BucketSet, nonfinite: str) -> None:
        """`nonfinite`: the plan's key."""
        self._world, self._set, self._nonfinite = world, buckets, nonfinite
        self.undecided: list[Bucket] = []
        """Buckets of which it is not known yet whether a step uses them."""
        self.is_skipped = False
        """Whether the gradients of the last exchange were dropped, so that the step has none."""
        self._is_unread = False
        """Whether it is not known here yet if the last exchange brought NaN or infinity."""

    def commit(self) -> None:
        """Note that an optimizer steps, or that what codecs keep is replaced: nothing is rolled back any more."""
        self.undecided, self._is_unread = [], False

    def after_exchange(self) -> None:
        """Do what the plan says about NaN and infinity. See [Note: asked later]."""
        buckets = self._set.buckets
        is_late = self._nonfinite == "propagate" and not all(bucket.is_settled for bucket in buckets)
        if is_late and not self._set.carry_over.is_active:
            self.undecided, self._is_unread = list(buckets), True
            return
        for bucket in buckets:
            if not bucket.is_settled:
                bucket.settle()
        bad = [bucket for bucket in buckets if bucket.had_nonfinite]
        if bad or self.is_skipped:
            self.handle_nonfinite(bad)

    def rollback_if_dropped(self) -> None:
        """Roll back what no step used, before the next exchange: no `commit` since `handle_nonfinite`."""
        if self._is_unread:
            for bucket in self.undecided:
                bucket.settle()
            good = [bucket for bucket in self.undecided if not bucket.had_nonfinite]
            self.undecided = good if len(good) < len(self.undecided) else []
            self._is_unread = False
        dropped = [
            bucket for bucket in self.undecided if bucket in self._set.buckets and not bucket.gradients.is_held
        ]
        self._set.roll_back(dropped)
        self.undecided = []

    def handle_nonfinite(self, bad: Sequence[Bucket]) -> None:
        """Do what the plan says about the buckets with NaN or infinity, of which all ranks know."""
        self.is_skipped = bool(bad) and self._nonfinite == "skip"
        if not bad:
            return
        if self._nonfinite == "propagate":
            self._set.roll_back(bad)
            self.undecided = [bucket for bucket in self._set.buckets if bucket not in bad]
            return
        self._set.roll_back(self._set.buckets)
        text, speaker = self._explain(bad)
        if self._nonfinite == "raise":
            raise CommError(
                text,
                rank=self._world.job_rank,
                operation="backward",
                remedy="lower the learning rate, or clip gradients",
            )
        if self._world.rank == speaker:
            warnings.warn(f"farandole: step skipped: {text}", RuntimeWarning, stacklevel=2)
        drop_grads(self._set.table.parameters)

    def _explain(self, bad: Sequence[Bucket]) -> tuple[str, int]:
        """Return what is wrong with the gradients of `bad`, and the rank that is to report it."""
        overflowed = [self._set.table.names[index] for bucket in bad for index in bucket.overflowed_members]
        mine = [self._set.table.names[index] for bucket in bad for index in bucket.nonfinite_members]
        gathered = all_gather_json(self._world, "naming gradients that are not finite", mine)
        ranks = [rank for rank, names in zip(self._world.job_ranks, gathered, strict=True) if names]
        texts = []
        if ranks:
            names = sorted({name for names in gathered for name in names})
            texts.append(f"gradients of {_list(names)} hold NaN or infinity on {name_ranks(ranks)}")
        if overflowed:
            texts.append(
                f"gradients of {_list(sorted(overflowed))} are finite on every rank, "
                "and their sum over the ranks is not"
            )
        return "; ".join(texts), ranks[0] if ranks else 0


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class OldCountGuard:
    """Counts of `fd.weight` that were given for an earlier step and are still in use."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last = (0, 0)
        """The count that the last pass went by, and the steps made before its first pass."""

    def refuse(self, number: int, steps: int) -> None:
        """Raise `ConfigError` where a pass goes by count `number`, of another step; `steps`: made before it."""
        if number != self._last[0]:
            self._last = number, steps
        elif number and self._last[1] != steps:
            CountCalls.of(self._world).refuse_if_others_count()
            raise ConfigError(
                "fd.weight was called for an earlier step and not for this one",
                remedy="call fd.weight(count) for every batch, or fd.weight(None) to weigh by samples again",
            )


class ExchangeRedo(Protocol):
    """What makes an exchange again when a rank is lost. See `redo`."""

    @property
    def is_broken(self) -> bool:
        """Whether nothing can be sent any more in this exchange."""

    def note(self, problem: CommError) -> None:
        """An exchange has failed during a backward pass, which goes on."""

    def finish(self, reducers: Sequence[Any]) -> None:
        """End the exchange of the `BackwardPasses` that are given."""


class ReducerGuards:
    """Those of one reducer."""

    def __init__(self, world: World, options: ReducerOptions, buckets: BucketSet, nonfinite: str) -> None:
        """`nonfinite`: the plan's key."""
        self.second_gradient = SingleGradientGuard(options)
        self.nonfinite = NonFiniteGuard(world, buckets, nonfinite)
        self.old_count = OldCountGuard(world)
        self.redo: ExchangeRedo | None = None
        """What makes an exchange again when a rank is lost; None: nothing does."""


# Ranks that call `fd.weight` in a step and ranks that do not. See [Note: who weighs].

_OPERATION = "fd.weight"


class Counts(NamedTuple):
    """Sums over the ranks."""

    total: float
    without: float
    """Ranks that gave None."""
    invalid: float
    """Ranks whose count is no number of at least 0."""


class CountCalls(Agreed):
    """The calls of `fd.weight` and the exchanges of one world, which keeps it."""

    def __init__(self, here: World) -> None:
        self._here = here
        self._has_met = here.size == 1
        self._pending: list[tuple[torch.Tensor, dist.Work]] = []
        """Of exchanges that have begun: one for each reducer."""

    @classmethod
    def of(cls, here: World) -> CountCalls:
        """Return that of a world."""
        return here.session.keep(cls, lambda: cls(here))

    def add_up(self, own: float, *, is_none: bool, is_invalid: bool) -> Counts:
        """Return the sums for `fd.weight`; raise `Mismatch`, on every rank, when one is at its gradients."""
        if self._here.size == 1:
            return Counts(own, float(is_none), float(is_invalid))
        self._meet(exchanges=False)
        return Counts(*self._finish(*self._start([own, float(is_none), float(is_invalid), 0.0]), exchanges=False))

    def refuse_if_others_count(self) -> None:
        """Raise `Mismatch`, on every rank, if ranks are in `fd.weight` where this one has left it out."""
        if self._here.size > 1:
            self._finish(*self._start([0.0, 0.0, 0.0, 1.0]), exchanges=True)

    def exchange_begins(self) -> None:
        """Say, while counts are in use, that this rank exchanges gradients; `hear_others` is to follow."""
        if self._here.size > 1:
            self._pending.append(self._start([0.0, 0.0, 0.0, 1.0]))

    def first_exchange(self) -> None:
        """Compare with ranks that may be in their first `fd.weight`; where all ranks are in a first exchange."""
        self._meet(exchanges=True)

    def hear_others(self) -> None:
        """Raise `Mismatch`, on every rank, if one was in `fd.weight` when the others began their exchange."""
        pending, self._pending = self._pending, []
        for sums, work in pending:
            self._finish(sums, work, exchanges=True)

    def _meet(self, *, exchanges: bool) -> None:
        if self._has_met:
            return
        self._has_met = True
        gathered = all_gather_json(self._here, f"{_OPERATION}/first", exchanges, may_be_refused=True)
        if len(set(gathered)) > 1:
            self._refuse(gathered)

    def _start(self, values: list[float]) -> tuple[torch.Tensor, dist.Work]:
        sums = torch.tensor(values, dtype=torch.float64, device=self._here.device)
        group = self._here.group
        assert group is not None, "several ranks have a group"
        with translated(self._here, _OPERATION):
            return sums, start_all_reduce(sums, group)

    def _finish(self, sums: torch.Tensor, work: dist.Work, *, exchanges: bool) -> list[float]:
        with translated(self._here, _OPERATION):
            work.wait()
        *counts, at_gradients = [float(each) for each in sums.tolist()]
        if 0 < at_gradients < self._here.size:
            self._refuse(all_gather_json(self._here, f"{_OPERATION}/calls", exchanges))
        return counts

    def _refuse(self, exchanging: list[bool]) -> NoReturn:
        """`exchanging`: by rank, whether it is at its gradients."""
        ranks = dict(zip(self._here.job_ranks, exchanging, strict=True))
        there = name_ranks([rank for rank, exchanges in ranks.items() if exchanges])
        others = name_ranks([rank for rank, exchanges in ranks.items() if not exchanges])
        raise Mismatch(
            f"{there} left out fd.weight in a step in which {others} called it",
            rank=self._here.job_rank,
            operation=_OPERATION,
            remedy="call fd.weight(count) on all ranks, the same number of times in each step",
        )


# What gradients on an accelerator can have, and what is refused there by name, on all ranks.
#
# Codecs whose messages have a size that the host knows, and the exact mean, travel by collectives of the backend,
# by route ``flat``. What travels by messages between processes is read from CPU memory and written into it: other
# codecs, sessions, and shards of stages 1 and 2.


REMEDY = 'on an accelerator use another codec than threshold and your own, and route "auto" or "flat"'
_REMEDY_OF_SHARDS = "on an accelerator use zero = 3, or 0"
_REMEDY_OF_SESSIONS = 'on an accelerator use codec "none" and route "auto" or "flat"'


def refuse_messages(
    world: World,
    parameters: Sequence[tuple[str, torch.Tensor]],
    plan: Plan,
    *,
    codecs: Sequence[str],
    shards: bool = False,
    sessions: bool = False,
) -> None:
    """Raise `PlanError`, on every rank, when gradients would travel by messages from an accelerator's memory.

    `codecs`: those that are asked for; none when gradients are exact. `shards`: whether each rank gets a part of
    the sums alone. `sessions`: whether codecs exchange whole tensors outside of backward passes. To be called by
    all ranks.
    """
    is_staged = plan.staging == "always" and not sessions and any(not each.is_cpu for _, each in parameters)
    codecs_there = [codec for codec in codecs if not sessions and _can_be_there(CodecSpec.parse(codec))]
    requested = [f"zero = {plan.zero}"] if shards else []
    requested += [f"codec {codec!r}" for codec in codecs if codec not in codecs_there]
    if not (requested or codecs_there or is_staged) or world.size == 1:
        return
    places = [_Devices(*each) for each in all_gather_json(world, "devices of parameters", _place_of(parameters))]
    for rank, place in enumerate(places):
        if not place.name:
            continue
        where = f"parameter {place.name!r} of rank {rank} is on {place.device}"
        if requested or not place.model:
            what = [*requested, *(f"codec {codec!r}" for codec in codecs_there), f"staging = {plan.staging!r}"][0]
            remedy = _REMEDY_OF_SHARDS if shards else _REMEDY_OF_SESSIONS if sessions else REMEDY
            raise PlanError(
                f"{what}: {where}, and what travels by messages is read from CPU memory", remedy=remedy
            )
        if place.others:
            what = f"codec {codecs_there[0]!r}" if codecs_there else f"staging = {plan.staging!r}"
            raise PlanError(
                f"{what}: {where}, others are on {', '.join(place.others)}",
                remedy='move the whole model to one device, or use codec "none" and no staging',
            )
    for codec in codecs_there:
        if codec != AUTO and CodecSpec.parse(codec).granularity == "matrix":
            _refuse_unlike_products(codec, places)


def refused_candidates(world: World, parameters: Sequence[tuple[str, torch.Tensor]], plan: Plan) -> list[str]:
    """Return what codec "auto" must not choose on these devices, the same on all ranks; to be called by all."""
    found = []
    for codec in CANDIDATES if plan.lossy else ():
        if CodecSpec.parse(codec).granularity == "matrix":
            try:
                refuse_messages(world, parameters, plan, codecs=[codec])
            except PlanError:
                found.append(codec)
    return found


def _can_be_there(spec: CodecSpec) -> bool:
    """Return whether a codec can be asked for on a device; "auto" chooses among those that can."""
    return spec.is_auto or runs_on_devices(spec)


class _Devices(NamedTuple):
    """Where the parameters of one rank are."""

    name: str
    """The first that is not on the CPU; empty: there is none."""
    device: str
    others: list[str]
    """Further devices."""
    model: str
    """What the device calls itself; empty where it has no streams."""
    has_exact_products: bool


def _place_of(parameters: Sequence[tuple[str, torch.Tensor]]) -> _Devices:
    device = device_of([parameter for _, parameter in parameters])
    name = next((name for name, parameter in parameters if not parameter.is_cpu), "")
    others = sorted({str(parameter.device) for _, parameter in parameters} - {str(device)})
    streams = streams_of(device)
    if streams is None:
        return _Devices(name, str(device), others, "", True)
    return _Devices(name, str(device), others, streams.model, _has_exact_products())


def _has_exact_products() -> bool:
    """Return whether products of float32 matrices keep float32."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # torch refuses to say, where the script has set it by `torch.backends`
        return bool(torch.backends.cuda.matmul.fp32_precision == "ieee")


def _refuse_unlike_products(codec: str, places: Sequence[_Devices]) -> None:
    """Raise `PlanError` where ranks would not compute the same bits of the same matrices, or lose some of them."""
    for rank, place in enumerate(places):
        if place.model != places[0].model:
            raise PlanError(
                f"codec {codec!r}: rank 0 has a {places[0].model or 'CPU'}, rank {rank} a {place.model or 'CPU'}, "
                "and their products of matrices differ in the last bits",
                remedy="use a codec that makes no products, such as int4, or equal devices",
            )
        if place.name and not place.has_exact_products:
            raise PlanError(
                f"codec {codec!r}: on rank {rank} products of float32 matrices are rounded to TF32 or less",
                remedy='torch.set_float32_matmul_precision("highest"), or a codec that makes no products',
            )

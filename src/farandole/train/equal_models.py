"""Says when ranks do not train one model: undistributed, changed by a script on some ranks, or by broken memory.

[Note: when models are compared] Every `check_every` steps each rank adds up the bits of all elements of its
parameters, when they have been through forward and backward and the next step of the optimizer begins: what is to
be overwritten then, as at ZeRO stages 1 and 2, is still there. It leaves the sums and its learning rates in the
store. A step later every rank has been through another exchange, so all sums are there, and rank 0 compares them
without waiting. It writes into the store whether they differ, where all ranks look after one more exchange: so all
act after the same step. With a device, behind which the host does not wait for the exchange of the step before, it
is two steps each time. Where forward passes of the first step have changed parameters in place, this begins after
step 1. Before a checkpoint is written all ranks compare at once: none holds a model in which ranks differ.

[Note: what it costs] Reading the parameters once, and a fraction of a millisecond for the store. Where that comes
to more than 0.5 % of all time, and to more than 0.1 s, rank 0 says to all ranks that it is time again later.

[Note: who holds the same] Ranks whose parameters have the same names, types and boxes of the whole tensors. So
parts of layers are compared among replicas, and whole parameters among all ranks that have them; on accelerators
not among those that divide layers, where each computes the gradient by itself and kernels may add up in any order.
Not compared: parameters of servers (`sync`). Ranks that train alone between meetings compare the averaged
parameters in each meeting (`sync.meetings`).
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..comm.device.streams import outside_graphs, streams_of
from ..comm.engine.row_gather import LateParameter
from ..comm.messages import bit_sums
from ..comm.world.session import NEVER, RankChange
from ..comm.world.store_sync import all_gather_json
from ..comm.world.world import World
from ..core.vocabulary.errors import Mismatch
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.sync_spec import SyncSpec
from ..core.vocabulary.text import name_ranks, write_notice
from ..parallel.frozen_model import stored_tensors
from ..parallel.instrument.phase_hooks import observe_passes
from ..parallel.model import DistributedModel, Handle
from ..parallel.split import boxes_here, split_of

FIRST_STEP = 8
_LEAST_EVERY = 8
"""Steps that one comparison takes, at most."""
MOST_SHARE, FREE_SECONDS = 0.005, 0.1
"""What comparisons may take of all time since the first one; and beside it."""
_MOST_USES = 16
"""How often parameters are compared until they are looked up anew."""
_OPERATION = "comparison of models"


class LeftValues:
    """What each rank leaves in the store after a step, for rank 0, which does not wait for it."""

    def __init__(self, here: World, topic: str) -> None:
        self._here = here
        self._keys = [f"{here.topic(topic)}/{rank}" for rank in range(here.size)]
        self.step = 0
        """Whose values are there; 0: none are."""

    def leave(self, step: int, value: Any) -> None:
        """Leave a JSON value after `step`."""
        self.step = 0
        if self._here.store is not None:
            with suppress(RuntimeError):  # a store that fails is found by who needs it
                self._here.store.set(self._keys[self._here.rank], json.dumps([step, value]))
                self.step = step

    def collect(self) -> list[Any]:
        """Return what all ranks left after the same step, once; nothing where one left none."""
        step, self.step = self.step, 0
        store = self._here.store
        if not step or store is None:
            return []
        with suppress(RuntimeError):
            if store.check(self._keys):
                found = [json.loads(each) for each in store.multi_get(self._keys)]
                return [value for _, value in found] if all(each[0] == step for each in found) else []
        return []


class ModelDigests:
    """Hashes of the ranks' models and their learning rates, after steps 8, 16, 32 and so on; rank 0 warns once.

    `remedy`: what to do where they differ because of a loss.
    """

    def __init__(self, here: World, topic: str, remedy: str) -> None:
        self._here, self._remedy = here, remedy
        self._left = LeftValues(here, topic)
        self._next = FIRST_STEP
        self._is_over = False

    def after_step(self, step: int, find: Callable[[], tuple[str, list[float]]]) -> None:
        """Compare the hashes of an earlier step, and leave those of this one when it is time.

        Args:
            step: how many are done, the same on all ranks; it may grow by more than one.
            find: returns a hash of the model and the learning rates.
        """
        if self._is_over:
            return
        after = self._left.step
        if after and self._here.rank == 0 and (found := self._left.collect()):
            what = _rates_that_differ([rates for _, rates in found])
            hashes = [digest for digest, _ in found]
            if not what and len(set(hashes)) > 1:
                odd = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
                what = f"parameters of {name_ranks(odd)} differ from those of rank 0"
            if what:
                self._is_over = True
                write_notice(f"warning: {_sentence(after, what)}; {_alike(self._remedy)}")
        if step >= self._next:
            while self._next <= step:
                self._next *= 2
            self._left.leave(step, find())


class EqualModels:
    """Watches the distributed models of a world of several ranks. See [Note: when models are compared]."""

    def __init__(self, here: World, *, is_new: bool = True) -> None:
        """`is_new`: whether the ranks of `here` have made no step."""
        self._here = here
        self._meet()
        self._parts = _KnownParts()
        self._clock = _CheckClock()
        self._sums = _BitSums([], 0, [])
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        self._changed: list[str] = []
        """Names of parameters that forward passes of the first step have changed."""
        self._look_no_more: Callable[[], None] | None = observe_passes(here, self) if is_new else None
        self._do: Callable[[int], int] = self._begin if is_new else partial(self._sum, is_asked=True)
        """What is to be done after the next step that this is told of."""
        self._before_step: Handle | None = None
        self._has_told = self._is_over = False
        here.session.steps.after_step(self._after_step)
        here.session.call_on_close(self.close)
        here.session.call_in_forked_child(self.close)
        here.session.follow_change(self.follow)

    def _meet(self) -> None:
        """Have places in the store of the ranks that there are."""
        here = self._here
        self._left = LeftValues(here, "equal models")
        self._verdict = here.topic("unequal models")
        """Where rank 0 says after which step it has compared, whether models differ, and when it is time again."""
        self._next = 0
        """The step after which it is time again."""
        if here.rank == 0 and here.store is not None:
            with suppress(RuntimeError):  # a store that fails is found by who needs it
                here.store.set(self._verdict, json.dumps([0, False, 0]))

    def follow(self, change: RankChange) -> None:
        """Ranks were lost or came in: begin anew with those that there are, after the next step."""
        self.close()
        self._meet()
        self._do = self._begin if self._look_no_more is not None else partial(self._sum, is_asked=True)
        self._here.session.steps.ask_again(self._after_step)

    def close(self) -> None:
        """Look at no step any more."""
        before, self._before_step = self._before_step, None
        if before is not None:
            before.remove()

    def forward_begins(self, model: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Note which values the parameters have, by torch's count of changes."""
        reducer = DistributedModel.of(model).reducer
        if reducer is not None and reducer.world is self._here:
            whole = [each for each in model.named_parameters() if split_of(each[1]) is None]
            self._versions = [(name, each, each._version) for name, each in whole if not each.is_inference()]

    def forward_ends(self, model: nn.Module, output: Any) -> None:
        """Find what has changed since."""
        self._changed += [name for name, each, version in self._versions if each._version != version]
        self._versions = []

    def require_equal(self, models: Iterable[nn.Module]) -> None:
        """Compare those of `models` that are distributed; to be called by all ranks, when they have just met.

        Raises `Mismatch` on all ranks, or warns once, if the plan says so.
        """
        found = [(model, plan) for model in models if (plan := DistributedModel.of(model).plan) is not None]
        found = [each for each in found if each[1].check_every and not SyncSpec.parse(each[1].sync).is_server]
        if self._is_over or not found:
            return
        sums = _BitSums(self._parts.of(model for model, _ in found), self._here.session.steps.done, self._rates())
        if _differ(all_gather_json(self._here, f"{_OPERATION}/now", sums.digests())):
            self._act(found[-1][1], sums)

    # -- after steps ---------------------------------------------------------------------------

    def _after_step(self, step: int) -> int:
        if self._is_over:
            return NEVER
        with self._clock.running():
            return self._do(step)

    def _begin(self, step: int) -> int:
        """Look at forward passes no more."""
        if self._look_no_more is not None:
            self._look_no_more()
            self._look_no_more = None
        self._do = self._sum
        return self._sum(step, is_asked=bool(self._changed))

    def _sum(self, step: int, *, is_asked: bool = False) -> int:
        """Have the bits added up when the next step begins, if it is time."""
        plan = self._plan()
        if plan is None or not plan.check_every:
            return step + 1
        if not is_asked:
            every = max(plan.check_every, _LEAST_EVERY)
            due = self._next if step <= self._next else step + -step % every
            if step < due:
                return due
        self._clock.begin(step)
        self._before_step = register_optimizer_step_pre_hook(outside_graphs(self._step_begins))
        self._do = self._end_sum
        return step + 1

    def _step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        steps = self._here.session.steps
        if self._before_step is not None and steps.leads(optimizer):
            # Not at once: torch is going through all hooks of steps, and other ones may follow.
            self._here.session.let_go_later(self._before_step.remove)
            self._before_step = None
            with self._clock.running():
                self._sums = self._sums_now(steps.done)

    def _sums_now(self, step: int) -> _BitSums:
        return _BitSums(self._parts.of(self._models_in_step()), step, self._rates())

    def _end_sum(self, step: int) -> int:
        if self._before_step is not None:  # the step called no hooks
            self.close()
            self._sums = self._sums_now(step)
        self._do = self._leave
        return step + 1 if self._sums.are_on_device else self._leave(step)

    @property
    def _lag(self) -> int:
        """Steps after which what all ranks wrote into the store before the first is there."""
        return 2 if self._sums.are_on_device else 1

    def _leave(self, step: int) -> int:
        self._left.leave(self._sums.step, [self._sums.digests(), self._sums.rates])
        self._do = self._compare
        return step + self._lag

    def _compare(self, step: int) -> int:
        self._do = self._look
        plan, found = self._plan(), self._left.collect() if self._here.rank == 0 else []
        if found and plan is not None and self._here.store is not None:
            rates = _rates_that_differ([each for _, each in found])
            differ = bool(rates) or _differ([digests for digests, _ in found])
            is_in_step = bool(self._models_in_step())
            if rates and not is_in_step:
                self._tell(self._sums, rates)  # the others come to no point that is the same for all
            every = max(plan.check_every, _LEAST_EVERY)
            following = self._sums.step + self._clock.steps_between(step, every)
            following += -following % every
            with suppress(RuntimeError):  # a store that fails is found by who needs it
                said = [self._sums.step, differ and is_in_step, following]
                self._here.store.set(self._verdict, json.dumps(said))
        return step + self._lag

    def _look(self, step: int) -> int:
        self._do = self._sum
        plan, store, said = self._plan(), self._here.store, [0, False, 0]
        if plan is not None and store is not None:
            with suppress(RuntimeError):
                said = json.loads(store.get(self._verdict))
            after, differ, following = said
            if after == self._sums.step:
                self._next = following
                if differ:
                    self._act(plan, self._sums)
        return step + 1

    # -- what differs --------------------------------------------------------------------------

    def _act(self, plan: Plan, sums: _BitSums) -> None:
        """Find what differs, with all ranks, and raise or warn."""
        here = self._here
        said = all_gather_json(here, _OPERATION, [sums.rates, sums.by_part(), self._changed])
        what = _rates_that_differ([each[0] for each in said])
        if not what:
            mine = self._find_odd(sums.names, [each[1] for each in said])
            what = next(filter(None, all_gather_json(here, f"{_OPERATION}/names", mine)), "")
            changed = list(dict.fromkeys(name for each in said for name in each[2]))[:3]
            if what and changed:
                names = ", ".join(map(repr, changed))
                what += f"; the forward pass changes {names}, on each rank by its own batch"
        if what and plan.on_difference == "stop":
            raise Mismatch(_sentence(sums.step, what), rank=here.job_rank, operation=_OPERATION, remedy=_REMEDY)
        if what:
            self._is_over = True
            self._tell(sums, what)

    def _find_odd(self, parts: Mapping[str, list[str]], sums: Sequence[Mapping[str, Sequence[int]]]) -> str:
        """Return which parameters of this rank's `parts` differ on which ranks; empty: none do."""
        for key, names in parts.items():
            holders = [rank for rank, each in enumerate(sums) if key in each]
            odd = [i for i in range(len(names)) if len({sums[rank][key][i] for rank in holders}) > 1]
            if odd:
                named = repr(names[odd[0]]) + (f" and {len(odd) - 1} more" if len(odd) > 1 else "")
                return f"{self._name_odd({r: tuple(sums[r][key][i] for i in odd) for r in holders})}: {named}"
        return ""

    def _name_odd(self, values: Mapping[int, object]) -> str:
        (usual, count), *_ = Counter(values.values()).most_common()
        if 2 * count <= len(values):
            return f"parameters of {self._name_places(list(values))} differ, and which are right cannot be told"
        odd = [rank for rank, value in values.items() if value != usual]
        rest = [rank for rank, value in values.items() if value == usual]
        return f"parameters of {self._name_places(odd)} differ from those of {name_ranks(rest)}"

    def _name_places(self, ranks: Sequence[int]) -> str:
        hosts = self._here.groups.hosts
        where = sorted({hosts[rank] for rank in ranks if rank < len(hosts)})
        return name_ranks(ranks) + (f" (on {', '.join(where)})" if where else "")

    def _tell(self, sums: _BitSums, what: str) -> None:
        if self._here.rank == 0 and not self._has_told:
            write_notice(f"warning: {_sentence(sums.step, what)}; {_REMEDY}")
        self._has_told = True

    # -- what there is -------------------------------------------------------------------------

    def _models_in_step(self) -> list[nn.Module]:
        """Return those whose ranks meet in every step: what one wrote into the store before it, all find there."""
        found = []
        for model in DistributedModel.all_of(self._here):  # those of a world that is over may live on some ranks
            policy = DistributedModel.of(model).policy
            if policy is None or not policy.is_local:
                found.append(model)
        return found

    def _plan(self) -> Plan | None:
        models = DistributedModel.all_of(self._here)
        return DistributedModel.of(models[-1]).plan if models else None

    def _rates(self) -> list[float]:
        """Return the learning rates for distributed models; a rank may have a model of its own beside."""
        optimizers = [each for each in self._here.session.steps.optimizers() if isinstance(each, Optimizer)]
        groups = [group for each in optimizers for group in each.param_groups]
        if len(optimizers) > 1:
            models = DistributedModel.all_of(self._here)
            known = {id(parameter) for model in models for parameter in model.parameters()}
            groups = [group for group in groups if any(id(each) in known for each in group["params"])]
        rates = [group.get("lr") for group in groups]
        return [float(rate) for rate in rates if isinstance(rate, (int, float, torch.Tensor))]


class _AlikePart:
    """Parameters of one model that some ranks have alike. See [Note: who holds the same]."""

    def __init__(self, key: str, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.key = key
        """The number of the model, and a hash of names, types and boxes; equal on ranks that hold the same."""
        self.names = [name for name, _ in named]
        self._tensors = [weakref.ref(each) for _, each in named]
        self._shapes = [each.shape for _, each in named]

    def tensors(self) -> list[torch.Tensor] | None:
        """Return what this rank has of each, or a DTensor with it; None if they are not what they were."""
        found = [tensor for each in self._tensors if (tensor := each()) is not None]
        return found if [each.shape for each in found] == self._shapes else None


class _KnownParts:
    """The parts of models, looked up now and then: parameters are seldom replaced, and always on all ranks."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[DistributedModel, tuple[int, list[_AlikePart]]] = WeakKeyDictionary()

    def of(self, models: Iterable[nn.Module]) -> list[tuple[_AlikePart, list[torch.Tensor]]]:
        """Return those of these models, with their tensors."""
        found = []
        for model in models:
            own = DistributedModel.of(model)
            uses, parts = self._known.get(own, (_MOST_USES, []))
            tensors = [each.tensors() for each in parts]
            if uses >= _MOST_USES or None in tensors:
                uses, parts = 0, _find_parts(model, own)
                tensors = [each.tensors() for each in parts]
            self._known[own] = uses + 1, parts
            found += [(part, each) for part, each in zip(parts, tensors, strict=True) if each is not None]
        return found


def _find_parts(model: nn.Module, own: DistributedModel) -> list[_AlikePart]:
    _, mesh = own.plan_and_mesh
    kinds: dict[tuple[Any, ...], list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in own.parameters_here(model):
        for each in stored_tensors([parameter]):
            is_shard, split = isinstance(each, DTensor), split_of(each)
            is_known = is_shard or type(each) in (torch.Tensor, nn.Parameter, LateParameter)
            if is_known and not each.is_meta and each.layout is torch.strided:
                kind = (is_shard, each.device, None if split is None else split.degree)
                kinds.setdefault(kind, []).append((name, each))
    found = []
    for (_, device, _), named in kinds.items():
        place = mesh.rank("tensor") if device.type != "cpu" else 0
        boxes = [(name, each.dtype, boxes_here(each, split_of(each))) for name, each in named]
        text = repr((mesh.degrees, place, boxes))
        found.append(_AlikePart(f"{own.number} {hashlib.sha256(text.encode()).hexdigest()[:16]}", named))
    return found


class _CheckClock:
    """How long comparisons have taken on this rank, and all since the first."""

    def __init__(self) -> None:
        self._count, self._spent_seconds = 0, 0.0
        self._first = (0, 0.0)
        """The step after which the first one began, and when."""

    def begin(self, step: int) -> None:
        """A comparison begins."""
        self._count += 1
        if self._count == 1:
            self._first = step, time.monotonic()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Take what runs inside for a part of it."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._spent_seconds += time.perf_counter() - begin

    def steps_between(self, step: int, least: int) -> int:
        """Return how many steps to let pass between two, from `least` on. See [Note: what it costs]."""
        elapsed_seconds = time.monotonic() - self._first[1]
        with_next_seconds = self._spent_seconds * (1 + 1 / max(1, self._count))
        lacking_seconds = (with_next_seconds - FREE_SECONDS) / MOST_SHARE - elapsed_seconds
        steps_a_second = (step - self._first[0]) / max(elapsed_seconds, 1e-6)
        return max(least, math.ceil(lacking_seconds * steps_a_second))


class _BitSums:
    """Sums of the bits of each parameter after one step, on a device until they are read; and learning rates."""

    @torch.no_grad()
    def __init__(
        self, parts: Sequence[tuple[_AlikePart, list[torch.Tensor]]], step: int, rates: list[float]
    ) -> None:
        self.step, self.rates = step, rates
        self.names: dict[str, list[str]] = {}
        """By part."""
        self.are_on_device = False
        """Whether the host must wait to read them."""
        self._read: dict[str, Callable[[], torch.Tensor]] = {}
        for part, tensors in parts:
            with suppress(RuntimeError, NotImplementedError, TypeError):  # memory of another library's kind
                made = bit_sums([each.to_local() if isinstance(each, DTensor) else each for each in tensors])
                streams = streams_of(made.device)
                self._read[part.key] = made.detach if streams is None else streams.to_host(made).read
                self.are_on_device |= streams is not None
                self.names[part.key] = part.names

    def by_part(self) -> dict[str, list[int]]:
        """Return them by part, in the order of the names."""
        return {key: read().tolist() for key, read in self._read.items()}

    def digests(self) -> dict[str, str]:
        """Return a hash of the sums of each part."""
        return {
            key: hashlib.sha256(json.dumps(sums).encode()).hexdigest()[:16] for key, sums in self.by_part().items()
        }


def _differ(said: Sequence[Mapping[str, str]]) -> bool:
    """Return whether two ranks said other values of one thing."""
    values: dict[str, set[str]] = {}
    for each in said:
        for key, value in each.items():
            values.setdefault(key, set()).add(value)
    return any(len(each) > 1 for each in values.values())


def _rates_that_differ(rates: Sequence[Sequence[float]]) -> str:
    if len({len(each) for each in rates}) == 1:
        for row in zip(*rates, strict=True):
            if len(set(row)) > 1:
                return f"their learning rates differ: {_by_value([str(rate) for rate in row])}"
    return ""


def _by_value(values: list[str]) -> str:
    distinct = dict.fromkeys(values)
    ranks = {value: [rank for rank, other in enumerate(values) if other == value] for value in distinct}
    return ", ".join(f"{value} on {name_ranks(ranks[value])}" for value in distinct)


def _sentence(step: int, what: str) -> str:
    return f"after step {step} the ranks no longer train one model: {what}"


def _alike(remedy: str) -> str:
    return f"change models and learning rates on all ranks alike: where a loss decides, {remedy}"


_REMEDY = _alike("use farandole.mean(loss)") + (
    "; if no script changes them, suspect the memory of that host, and go on from the last checkpoint (farandole "
    'run --restarts 3); on_difference = "warn" only says it'
)


# Ranks that train while nothing that we know of exchanges their gradients: said at the first step and at the end.
#
# `fd.init` alone makes a world; a model trains in it only after `fd.distribute`, by Horovod's names, or wrapped by
# torch. Without that there are as many different models as ranks. What a loop adds up by itself cannot be seen
# from here, so this is a note and no error. A script that calls `fd.distribute` somewhere is told at the end
# alone.


_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
_HOROVOD = "farandole.horovod.common.basics"


class UndistributedWatch:
    """Looks at the first step of any optimizer of this process."""

    def __init__(self, here: World) -> None:
        self._here = here
        self._forgotten = self._has_looked = False
        self._hook = register_optimizer_step_pre_hook(self._look)

    def close(self) -> None:
        """Look no more; to be called when the world is left."""
        self._hook.remove()
        if self._forgotten and not self._here.session.steps.has_begun:
            self._say("at the end: ")

    def forget(self) -> None:
        """In a forked child: look no more, and say nothing."""
        self._hook.remove()

    def _look(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_looked, self._has_looked = self._has_looked, True
        if has_looked:
            return
        # Not at once: torch is going through all hooks of steps, and other ones may follow.
        self._here.session.let_go_later(self._hook.remove)
        if self._here.session.steps.has_begun or _has_horovod() or _is_wrapped():
            return
        self._forgotten = True
        if not _will_distribute():
            self._say("")

    def _say(self, when: str) -> None:
        if self._here.rank == 0:
            write_notice(
                f"{when}no model was distributed, so each of the {self._here.size} ranks trains one of "
                "its own, unless the script exchanges gradients by itself: call farandole.distribute(model, "
                "optimizer)"
            )
            sys.stderr.flush()


def _will_distribute() -> bool:
    """Return whether the script's file calls it: what trains before may be a model to compare with."""
    try:
        return "distribute(" in Path(sys.modules["__main__"].__file__ or "").read_text(encoding="utf-8")
    except (AttributeError, KeyError, OSError, ValueError):  # no file: a notebook, -c
        return False


def _has_horovod() -> bool:
    """Return whether the script calls Horovod's names, whose operations exchange what they are given."""
    module = sys.modules.get(_HOROVOD)
    return module is not None and bool(module.basics.is_initialized())


def _is_wrapped() -> bool:
    """Return whether torch's own wrappers exchange the gradients of some model."""
    kinds = {type(each) for each in gc.get_objects()}
    return any(base.__name__ in _WRAPPERS for kind in kinds for base in kind.__mro__)

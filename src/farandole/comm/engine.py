"""The gradient engine: gradients meet while backward still runs, and backward ends with their mean.

`GradientEngine` hooks each parameter after its gradient is accumulated. A bucket whose members are
all ready is launched, in one order that all ranks agreed on; when backward ends, the rest is launched
and all is waited for. Not here: models, optimizers, buffers, files.

[Note: one pass] After ``loss.backward()`` returns, ``parameter.grad`` is the mean over all samples of
all ranks, so clipping, logging and unscaling in the user's loop read the true gradient. A second
backward before the optimizer's step adds to it and is exchanged again, which is exact because the
mean of equal gradients is that gradient. With ``accumulate=k`` the first k-1 passes stay local.

[Note: the first pass builds the buckets] Nothing is launched in the first pass. At its end the ranks
agree on rank 0's order of readiness, and the buckets built from it serve this very pass and all later
ones: a resumed run sums in the same order as the run it continues, bit for bit, from its first step.

[Note: nested passes] Reentrant activation checkpointing runs backward inside backward. Passes are told
apart by the graph task's id, and the exchange ends with the outermost one.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from ..core.codec_spec import AUTO, CodecSpec
from ..core.errors import CommError, ConfigError
from ..core.events import Exchange
from ..core.spec import Plan
from . import coded_state
from .agree import gather, name_ranks, require_same
from .bucket import Bucket, DenseBucket, Slot, SparseBucket, Waitable, plan_buckets
from .codec_choice import carrier_of, choose_codec, refuse_impossible, refuse_useless
from .codecs.catalogue import make_codec
from .coded import CodedBucket
from .lines import Lines, make_lines, with_messages
from .owed import Owed
from .shared_memory import Unavailable
from .tuning.tuner import Pass, Tuner
from .wire import explain, start_all_reduce
from .world import World


class Rider(Protocol):
    """Something small that travels with every exchange, launched before the first bucket."""

    def settle(self) -> None:
        """Agree with all ranks on what will travel; called once, in the first pass."""

    def load(self, weight: float) -> torch.Tensor | None:
        """Return the tensor to sum over the ranks in place, or None when there is nothing to send.

        Its size must be the same on all ranks in every exchange.
        """

    def land(self) -> None:
        """Take the sum."""


class GradientEngine:
    """Keeps the gradients of `parameters` equal on all ranks. One engine a model.

    Raises `Mismatch` on every rank when the ranks' parameters differ in name, order, shape or type.
    """

    def __init__(
        self,
        world: World,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        plan: Plan,
    ) -> None:
        self.world = world
        self.plan = plan
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._index_of = {name: index for index, name in enumerate(self._names)}
        self._riders: list[Rider] = []
        require_same(world, "comparing parameters", [_describe(*named) for named in parameters])
        self._codecs = {name: choose_codec(name, parameter, plan) for name, parameter in parameters}
        refuse_useless(plan, self._codecs)
        self._made = {spec.to_text(): make_codec(spec) for spec in self._codecs.values() if spec.name != "none"}
        tunes = plan.codec == AUTO
        self._lines: Lines | None = make_lines(world, plan, needs_messages=tunes or bool(self._made))
        self.route, self.route_reason = self._lines.route, self._lines.reason
        tunes = tunes and self.route in ("flat", "hierarchical")  # memory that is shared needs no codec
        self.tuner = Tuner(world, plan, self._lines, parameters) if tunes else None
        carrier = make_codec(CodecSpec.parse("none")) if tunes else carrier_of(self.route)
        if carrier is not None:
            self._made["none"] = carrier
        world.call_on_close(self.remove)
        self._buckets: list[Bucket] = []
        self._bucket_of: list[Bucket | None] = [None] * len(parameters)
        self._hooks: list[torch.utils.hooks.RemovableHandle | None] = [None] * len(parameters)
        self._order: list[int] = []  # of those in buckets, as they become ready
        self._bucket_limit_bytes = plan.bucket_bytes
        self._unassigned = list(range(len(parameters)))  # in no bucket yet
        self._asleep: list[int] = []  # in a bucket, but frozen for now
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                self._hook(index)
        # Of the current pass:
        self._forward_begin_seconds = self._begin_seconds = 0.0
        self._ready_seconds = [0.0] * len(parameters)
        self._tasks: set[int] = set()
        self._arrivals: list[int] = []
        self._seen = bytearray(len(parameters))
        self._exchanging = False
        self._next_launch = 0
        self._works: list[Waitable] = []
        self._rider_works: list[tuple[Rider, dist.Work]] = []
        self._launch_seconds: list[float] = []
        # Across passes:
        self._held_passes = 0
        self._held_factor = 1.0
        self._set_aside: list[torch.Tensor | None] | None = None
        self._loaded: dict[str, coded_state.Entry] = {}  # of parameters that are in no bucket yet
        self._owed = Owed()
        world.share.subscribe(self._share_changes)

    # -- what others may ask ---------------------------------------------------------------

    @property
    def bucket_bytes(self) -> list[int]:
        """Bytes of each bucket in launch order; empty before the first pass."""
        return [bucket.nbytes for bucket in self._buckets]

    @property
    def names_by_bucket(self) -> list[list[str]]:
        """Names of the parameters in each bucket in launch order; empty before the first pass."""
        return [[self._names[index] for index in bucket.members] for bucket in self._buckets]

    @property
    def is_open(self) -> bool:
        """Whether gradients still meet."""
        return self._lines is not None

    def forward_begins(self) -> None:
        """Note when the first forward pass of a step begins; for the tuner's picture of a step."""
        self._forward_begin_seconds = self._forward_begin_seconds or time.monotonic()

    def add_rider(self, rider: Rider) -> None:
        """Take `rider` along from the first exchange on; to be called before it."""
        self._riders.append(rider)

    def exchange_state(self) -> dict[str, coded_state.Entry]:
        """Return what codecs keep on this rank, by parameter."""
        entries = dict(self._loaded)
        for bucket in self._coded_buckets():
            entries.update(coded_state.export(bucket, self._names))
        return entries

    def load_exchange_state(self, entries: dict[str, coded_state.Entry]) -> None:
        """Replace what codecs keep; entries of parameters without a bucket wait for it."""
        coded_state.check(entries, dict(zip(self._names, self._parameters, strict=True)), self._codecs)
        waiting = dict(entries)
        coded_state.restore(self._coded_buckets(), self._names, waiting)
        self._loaded = waiting

    def flush(self) -> None:
        """Exchange what is held back; to be called by all ranks before an optimizer's step.

        A no-op unless the loop stepped after fewer than ``accumulate`` backward passes, or a backward
        pass was abandoned by an exception.
        """
        abandoned = bool(self._tasks)
        self._tasks.clear()
        if not self._exchanging:
            if not (self._held_passes or abandoned):
                return
            self._begin_exchange()
        self._finish_exchange()

    def switch_codecs(self, codecs: Mapping[str, CodecSpec], *, bucket_bytes: int | None = None) -> None:
        """Let the named parameters travel by other codecs, from the next exchange on.

        To be called by all ranks, with the same arguments, between two steps. `bucket_bytes` changes the size
        of all buckets. What the old codecs have not sent
        is added to the next gradient; the rest of their state (velocities, factors) is dropped. Gradients that
        are sparse stay exact. Raises `ConfigError` for a name that is no parameter's, `PlanError` for a codec
        that a parameter cannot have, and `Mismatch`, on every rank, when the ranks ask for different ones.
        """
        facts = [(f"codec of {name!r}", spec.to_text()) for name, spec in sorted(codecs.items())]
        require_same(self.world, "switching codecs", [("parameters to switch", sorted(codecs)), *facts])
        self._refuse_codecs(codecs)
        changed = {name: spec for name, spec in codecs.items() if spec != self._codecs[name]}
        made = {spec.to_text(): make_codec(spec) for spec in changed.values() if spec.name != "none"}
        if made:
            self._lines = with_messages(self._connected(), self.world, self.plan)
        self._made.update(made)
        self._codecs.update(changed)
        self._bucket_limit_bytes = bucket_bytes or self._bucket_limit_bytes
        self._rebuild({self._index_of[name] for name in changed})

    def ask_more(self, wanted: Mapping[str, tuple[torch.Tensor, float] | None]) -> None:
        """Add to the named parameters' next gradient that travels a tensor times a number; None: nothing any more.

        Takes the place of what was asked for before. The tensor is read when the gradient is ready, and must
        be the same on all ranks to be in their mean as it is.
        """
        for name, more in wanted.items():
            index = self._index_of[name]
            if more is None:
                self._owed.asked.pop(index, None)
            else:
                self._owed.asked[index] = more

    def has_coming(self, name: str) -> bool:
        """Return whether what `ask_more` asked for has not been added to a gradient yet."""
        return self._index_of[name] in self._owed.asked

    def remove(self) -> None:
        """Take the hooks off and let go of the group; gradients stay local from now on."""
        for hook in self._hooks:
            if hook is not None:
                hook.remove()
        self._works, self._rider_works = [], []
        if self._lines is not None:
            self._lines.close()
        self._lines = None

    # -- one backward pass -----------------------------------------------------------------

    def _hook(self, index: int) -> None:
        parameter = self._parameters[index]
        self._hooks[index] = parameter.register_post_accumulate_grad_hook(partial(self._ready, index))

    def _ready(self, index: int, parameter: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._enter(task)
        if self._seen[index]:
            self._ready_again(index, task)
        self._seen[index] = 1
        if self.tuner is not None:
            self._ready_seconds[index] = time.monotonic()
        bucket = self._bucket_of[index]
        if bucket is None:
            self._arrivals.append(index)
        elif self._exchanging:
            bucket.missing -= 1
            if bucket.missing == 0 and self._set_aside is None:
                self._launch_complete()

    def _ready_again(self, index: int, task: int) -> None:
        """Two gradients in one pass are an error: the first may be on its way, and the second was added to it.

        With an older pass open that is no longer running, that one was abandoned, and this one is new.
        """
        if len(self._tasks) == 1 or _running_passes() > 1:
            raise CommError(
                f"the gradient of {self._names[index]!r} became ready twice in one backward pass",
                rank=self.world.rank,
                operation="backward",
                remedy="use activation checkpointing with use_reentrant=False",
            )
        self._tasks = {task}
        if self._exchanging:
            self._finish_exchange()  # the same buckets on all ranks, wherever each of them gave up
        self._open_pass()

    def _enter(self, task: int) -> None:
        outermost = not self._tasks
        self._tasks.add(task)
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._leave, task))
        if outermost:
            self._open_pass()

    def _open_pass(self) -> None:
        self._arrivals = []
        self._seen = bytearray(len(self._parameters))
        if self.tuner is not None:
            self._begin_seconds = time.monotonic()
            self._forward_begin_seconds = self._forward_begin_seconds or self._begin_seconds
            self._ready_seconds = [0.0] * len(self._parameters)
        if self._set_aside is None:
            self._held_factor = self.world.share.factor
        if self._held_passes + 1 >= self.plan.accumulate:
            self._begin_exchange()

    def _leave(self, task: int) -> None:
        if task not in self._tasks:
            return  # left already, or abandoned
        self._tasks.discard(task)
        if self._tasks:
            return  # a nested pass
        if self._set_aside is not None:
            self._restore_set_aside()
        if self._exchanging:
            self._finish_exchange()
        else:
            self._held_passes += 1

    def _begin_exchange(self) -> None:
        self._exchanging = True
        self._wake()
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)
        for index in self._asleep:
            bucket_of = self._bucket_of[index]
            assert bucket_of is not None, "only members of buckets are asleep"
            bucket_of.missing -= 1
        self._next_launch = 0
        self._works, self._launch_seconds = [], []
        if self._buckets:
            self._launch_riders()

    def _launch_complete(self) -> None:
        """Launch, in the agreed order, every bucket up to the first that is not complete."""
        while self._next_launch < len(self._buckets) and self._buckets[self._next_launch].missing <= 0:
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next_launch]
        try:
            bucket.load(self._held_factor / self.world.size)
        except RuntimeError as problem:
            raise self._explain_load(bucket, problem) from None
        self._owed.add_to(bucket)
        self._launch_seconds.append(time.monotonic())
        try:
            self._works.append(bucket.launch(self._connected()))
        except RuntimeError as problem:
            raise explain(problem, self.world, "all-reduce", bucket=self._next_launch) from None
        self._next_launch += 1

    def _launch_riders(self) -> None:
        self._rider_works = []
        for rider in self._riders:
            tensor = rider.load(self._held_factor / self.world.size)
            if tensor is not None:
                self._rider_works.append((rider, start_all_reduce(tensor, self._connected().group)))

    def _finish_exchange(self) -> None:
        self._exchanging = False
        self._put_to_sleep()
        first = not self._buckets
        self._admit_newcomers()
        if first:
            for rider in self._riders:
                rider.settle()
            self._launch_riders()
        while self._next_launch < len(self._buckets):
            self._launch_next()
        wait_begin = time.monotonic()
        for position, work in enumerate(self._works):
            self._wait(work, "all-reduce", position)
        for rider, work in self._rider_works:
            self._wait(work, "all-reduce of buffers", None)
            rider.land()
        for bucket in self._buckets:
            bucket.land()
            self._settle(bucket)
        wait_end = time.monotonic()
        self._works, self._rider_works = [], []
        self._held_passes = 0
        sent = sum(bucket.sent_bytes for bucket in self._buckets)
        self.world.recorder.record(Exchange(tuple(self._launch_seconds), wait_begin, wait_end, sent))
        self._answer_nonfinite()
        if self.tuner is not None:
            self._tune(self.tuner, wait_begin, wait_end)

    def _settle(self, bucket: Bucket) -> None:
        """Forget what is owed to members that have their mean now."""
        if isinstance(bucket, CodedBucket) and bucket.had_nonfinite:
            return
        for index in bucket.members:
            if self._parameters[index].grad is not None:
                self._owed.forget(index)

    def _tune(self, tuner: Tuner, wait_begin_seconds: float, wait_end_seconds: float) -> None:
        leader = self._buckets[0]
        assert isinstance(leader, CodedBucket), "with a tuner every dense bucket has a codec"
        seen = Pass(
            self._forward_begin_seconds,
            self._begin_seconds,
            wait_begin_seconds,
            wait_end_seconds,
            self._ready_seconds,
        )
        tuner.after_exchange(seen, self, somebody_wishes=leader.somebody_wishes)
        self._forward_begin_seconds = 0.0
        first = self._buckets[0]
        if isinstance(first, CodedBucket):
            first.wish = tuner.wishes_probe

    def _answer_nonfinite(self) -> None:
        """Do what the plan says about gradients with NaN or infinity in coded buckets; all ranks know of them."""
        bad = [bucket for bucket in self._coded_buckets() if bucket.had_nonfinite]
        if not bad or self.plan.nonfinite == "propagate":
            return
        mine = [self._names[index] for bucket in bad for index in bucket.nonfinite_members]
        said = gather(self.world, "naming gradients that are not finite", mine)
        ranks = [rank for rank, names in enumerate(said) if names]
        names = sorted({name for names in said for name in names})
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        text = f"gradients of {listed} hold NaN or infinity on {name_ranks(ranks)}"
        if self.plan.nonfinite == "raise":
            raise CommError(
                text,
                rank=self.world.rank,
                operation="backward",
                remedy="lower the learning rate, or clip gradients",
            )
        if self.world.rank == ranks[0]:
            warnings.warn(f"farandole: step skipped: {text}", RuntimeWarning, stacklevel=2)
        for parameter in self._parameters:
            parameter.grad = None

    def _coded_buckets(self) -> list[CodedBucket]:
        return [bucket for bucket in self._buckets if isinstance(bucket, CodedBucket)]

    def _connected(self) -> Lines:
        if self._lines is None:
            raise CommError(
                "the world was left before the exchange was over",
                rank=self.world.rank,
                operation="all-reduce",
                remedy="call farandole.shutdown() after the last step",
            )
        return self._lines

    def _wait(self, work: Waitable, operation: str, bucket: int | None) -> None:
        try:
            work.wait()
        except CommError:
            raise
        except RuntimeError as problem:
            raise explain(problem, self.world, operation, bucket=bucket) from None

    def _explain_load(self, bucket: Bucket, problem: RuntimeError) -> CommError:
        """Say which gradient could not be put into its bucket."""
        for index in bucket.members:
            grad = self._parameters[index].grad
            if grad is not None and grad.is_sparse != isinstance(bucket, SparseBucket):
                now, before = ("sparse", "dense") if grad.is_sparse else ("dense", "sparse")
                text = f"the gradient of {self._names[index]!r} is {now}, in the first step it was {before}"
                break
        else:
            text = str(problem).splitlines()[0]
        return CommError(text, rank=self.world.rank, operation="loading", bucket=self._next_launch)

    # -- which parameters take part -----------------------------------------------------------

    def _admit_newcomers(self) -> None:
        """Give a bucket to every parameter that has none yet and requires a gradient now."""
        newcomers = [index for index in self._unassigned if self._parameters[index].requires_grad]
        if not newcomers:
            return
        names = [self._names[index] for index in newcomers]
        mine = {
            "order": self._arrivals,
            "sparse": [index for index in newcomers if self._has_sparse_gradient(index)],
        }
        require_same(
            self.world,
            "agreeing on buckets",
            [(f"trainable parameter {i}", name) for i, name in enumerate(names)],
            remedy="freeze and unfreeze the same parameters on all ranks in the same step",
        )
        said = gather(self.world, "agreeing on buckets", mine)
        sparse = {index for other in said for index in other["sparse"]}
        order = [index for index in said[0]["order"] if index in set(newcomers)]
        order += [index for index in reversed(newcomers) if index not in set(order)]
        slots = [self._slot(index, index in sparse) for index in order]
        limit = self._bucket_limit_bytes
        first = limit if self._buckets else self.plan.first_bucket_bytes
        for members in plan_buckets(slots, first_bytes=first, limit_bytes=limit):
            self._add_bucket([slot.index for slot in members], members[0].sparse, members[0].codec)
        self._order += order
        self._unassigned = [index for index in self._unassigned if self._bucket_of[index] is None]
        for index in newcomers:
            if self._hooks[index] is None:
                self._hook(index)

    def _add_bucket(self, members: list[int], sparse: bool, codec: str) -> None:
        parameters = [self._parameters[index] for index in members]
        bucket: Bucket
        try:
            if sparse:
                bucket = SparseBucket(members, parameters[0], self.world.size)
            elif codec in self._made:
                bucket = CodedBucket(members, parameters, self._made[codec], self._connected())
                coded_state.restore([bucket], self._names, self._loaded)
            else:
                bucket = DenseBucket(members, parameters, self.world.size, self._connected().memory)
        except Unavailable as problem:
            raise CommError(str(problem), rank=self.world.rank, operation="making buckets") from None
        self._buckets.append(bucket)
        for index in members:
            self._bucket_of[index] = bucket

    def _refuse_codecs(self, codecs: Mapping[str, CodecSpec]) -> None:
        if self._exchanging:
            raise ConfigError("codecs are switched between two steps, not during a backward pass")
        for name, spec in codecs.items():
            if name not in self._codecs:
                raise ConfigError(f"switching codecs: the model has no parameter {name!r}")
            refuse_impossible(name, self._parameters[self._index_of[name]], spec)

    def _rebuild(self, changed: set[int]) -> None:
        """Plan the buckets anew, and build those that are not as they were."""
        kept = {tuple(bucket.members): bucket for bucket in self._buckets if changed.isdisjoint(bucket.members)}
        slots = [self._slot(index, isinstance(self._bucket_of[index], SparseBucket)) for index in self._order]
        before, self._buckets = self._buckets, []
        first, limit = self.plan.first_bucket_bytes, self._bucket_limit_bytes
        for members in plan_buckets(slots, first_bytes=first, limit_bytes=limit):
            indices = [slot.index for slot in members]
            if tuple(indices) in kept:
                self._buckets.append(kept[tuple(indices)])
            else:
                self._add_bucket(indices, members[0].sparse, members[0].codec)
        for bucket in before:
            if isinstance(bucket, CodedBucket) and bucket not in self._buckets:
                for index, unsent in zip(bucket.members, bucket.unsent(), strict=False):
                    self._owed.keep(index, unsent)

    def _slot(self, index: int, sparse: bool) -> Slot:
        parameter = self._parameters[index]
        nbytes = parameter.numel() * parameter.element_size()
        codec = "none" if sparse else self._codecs[self._names[index]].to_text()
        return Slot(index, nbytes, parameter.dtype, parameter.device, sparse, codec)

    def _has_sparse_gradient(self, index: int) -> bool:
        grad = self._parameters[index].grad
        return grad is not None and grad.is_sparse

    def _put_to_sleep(self) -> None:
        """Stop expecting members that were frozen, so that their buckets need not wait for the end."""
        for bucket in self._buckets[self._next_launch :]:
            if bucket.missing > 0:
                self._asleep += [
                    index
                    for index in bucket.members
                    if not self._parameters[index].requires_grad and index not in self._asleep
                ]

    def _wake(self) -> None:
        if self._asleep:
            self._asleep = [index for index in self._asleep if not self._parameters[index].requires_grad]

    # -- unequal batches while gradients are held back ------------------------------------------

    def _share_changes(self, previous: float, factor: float) -> None:
        """Rescale held gradients so that one factor fits them all. See [Note: the true mean].

        Called before the batch of the new factor is used.
        """
        if self._set_aside is not None:
            self._restore_set_aside()
        if not self._held_passes:
            return
        if factor == 0.0:
            # The coming pass is a placeholder: keep its gradient away from what is held.
            self._set_aside = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None
            return
        scale, self._held_factor = self._held_factor / factor, factor
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    if scale == 0.0:
                        parameter.grad = None
                    else:
                        parameter.grad.mul_(scale)

    def _restore_set_aside(self) -> None:
        assert self._set_aside is not None, "something was set aside"
        for parameter, grad in zip(self._parameters, self._set_aside, strict=True):
            parameter.grad = grad
        self._set_aside = None


def _running_passes() -> int:
    """Return how many backward passes this thread is inside of."""
    count, frame = 0, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        count += frame.f_code.co_name == "_engine_run_backward"
    return count


def _describe(name: str, parameter: torch.nn.Parameter) -> tuple[str, list[object]]:
    return f"parameter {name!r}", [list(parameter.shape), str(parameter.dtype).removeprefix("torch.")]


def require_dense_parameters(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Raise `ConfigError` for a parameter that has no memory yet."""
    for name, parameter in parameters:
        if torch.nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"parameter {name!r} has no shape yet", remedy="run one batch through the model first"
            )
        if parameter.is_meta:
            raise ConfigError(
                f"parameter {name!r} is on the meta device", remedy="move the model to a real device first"
            )

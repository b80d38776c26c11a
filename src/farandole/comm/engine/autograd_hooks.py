"""Hooks on the parameters, and the backward passes that they see: when buckets are launched and waited for.

[Note: one pass] After ``loss.backward()`` returns, ``parameter.grad`` is the mean over all samples of
all ranks, so clipping, logging and unscaling in the user's loop read the true gradient. A second
backward before the optimizer's step adds to it and is exchanged again, which is exact because the
mean of equal gradients is that gradient. With ``accumulate=k`` the first k-1 passes stay local; so do those inside
`fd.accumulate`, until a pass outside of it or the optimizer's step.

[Note: the first pass builds the buckets] Nothing is launched in the first pass. At its end the ranks
agree on rank 0's order of readiness, and the buckets built from it serve this very pass and all later
ones: a resumed run sums in the same order as the run it continues, bit for bit, from its first step.

[Note: nested passes] Reentrant activation checkpointing runs backward inside backward. Passes are told apart by
their numbers (see [Note: joined passes]), and the exchange ends with the outermost one.

[Note: one order] Graphs of two models may run in another order on another rank. A reducer that waited as soon as
autograd ended would wait for a rank that waits, in another reducer, for this one. So at the end of a pass all
reducers in it launch their remaining buckets, in the order in which they were made, and wait only then.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from itertools import count

import torch

from ...core.vocabulary.errors import CommError, ConfigError
from ...core.vocabulary.events import BACKWARD, Exchange, Phase, Recorder
from ..autotune.profile import PassTimings
from ..device.streams import outside_graphs
from .count_calls import CountCalls
from .in_flight import at_end_of_pass, number_of_pass
from .parts import ReducerParts
from .sharded_bucket import is_accumulating

_KEPT = "_farandole_reducer"
Ready = Callable[[int, torch.Tensor], None]
_made = count()
_waiting: dict[int, list[BackwardPasses]] = {}
"""Reducers that have come to the end of a pass, by autograd's number of it. See [Note: one order]."""


class BackwardPasses:
    """The backward passes over one reducer's parameters."""

    def __init__(self, parts: ReducerParts, owner: object) -> None:
        """`owner`: kept alive by the parameters that are hooked; see [Note: what keeps a reducer alive]."""
        parameters = len(parts.buckets.table)
        self._parts = parts
        self._owner = weakref.ref(owner)
        self._handles: list[list[torch.utils.hooks.RemovableHandle]] = [[] for _ in range(parameters)]
        self.order = next(_made)
        """When it was made, among those of this process."""
        self.accumulate = 1 if parts.plan.zero >= 2 else parts.plan.accumulate
        """Passes whose gradients are added up before an exchange: the same on all ranks."""
        self.divisor = 1.0 if parts.options.reduce_op == "sum" else float(parts.world.size)
        # - Of the current pass
        self._tasks: set[int] = set()
        self._arrivals: list[int] = []
        """Parameters that became ready and have no bucket yet, in order."""
        self._seen = bytearray(parameters)
        self.times = PassTimes([0.0] * parameters)
        # - Across passes
        self.exchanges_done = 0
        self.steps_begun = 0
        self._counted = (0, 0)
        """The count that the last pass went by, and the steps made before its first pass."""
        self.watcher: Recorder | None = None
        self.after_exchange: Callable[[], None] | None = None
        """Called on all ranks when the gradients are the means."""

    # -- hooks ---------------------------------------------------------------------------------

    def hook(self, index: int) -> None:
        """Call `mark_ready` when a gradient of parameter `index` is accumulated, now or when it is not frozen."""
        handles, parameter = self._handles[index], self._parts.buckets.table.parameters[index]
        if handles or not ((trains := parameter.requires_grad) or type(parameter) is torch.nn.Parameter):
            return
        vars(parameter)[_KEPT] = _Kept(self._owner())
        parameter.requires_grad_(True)  # torch wants it so for a hook, which stays whatever is set afterwards
        call = outside_graphs(partial(_call, weakref.WeakMethod(self.mark_ready), index))
        handles.append(parameter.register_post_accumulate_grad_hook(call))
        if self._parts.options.mesh is not None:
            aside = outside_graphs(partial(_call, weakref.WeakMethod(self._set_aside_shard), index))
            handles.append(parameter.register_hook(aside))
        parameter.requires_grad_(trains)

    def unhook(self) -> None:
        """Undo `hook` for all parameters."""
        for handles, parameter in zip(self._handles, self._parts.buckets.table.parameters, strict=True):
            for handle in handles:
                handle.remove()
            if handles:
                vars(parameter).pop(_KEPT, None)

    def _set_aside_shard(self, index: int, _: torch.Tensor) -> None:
        buckets = self._parts.buckets
        # Asking autograd takes longer than all else here, and after `zero_grad` there is nothing to set aside.
        if buckets.has_earlier_shard(index) and is_accumulating(buckets.table.parameters[index]):
            buckets.set_aside_shard(index)

    # -- one pass ------------------------------------------------------------------------------

    def mark_ready(self, index: int, parameter: torch.Tensor) -> None:
        """Note that the gradient of a parameter is accumulated; launch buckets that are complete."""
        parts = self._parts
        if parts.single.spent is not None:
            parts.single.refuse_second(index, parts.buckets.table.names[index])
        task = number_of_pass()
        if task not in self._tasks:
            self._enter(task)
        if self._seen[index]:
            self._mark_ready_again(index, task)
        self._seen[index] = 1
        self.times.ready_seconds[index] = time.monotonic()
        if parts.marks is not None:
            parts.marks.is_ready(index)
        if parts.in_flight.on_device is not None:
            parts.in_flight.on_device.note_stream()
        bucket = parts.buckets.bucket_of[index]
        if bucket is None:
            self._arrivals.append(index)
        elif parts.in_flight.is_exchanging:
            bucket.pending -= 1
            if bucket.pending == 0 and parts.local.aside is None:
                try:
                    parts.in_flight.launch_complete(self._weight)
                except CommError as problem:
                    raise parts.options.map_error(problem) from None

    def _mark_ready_again(self, index: int, task: int) -> None:
        """Two gradients in one pass are an error: the first may be on its way, and the second was added to it.

        With an older pass open that is no longer running, that one was abandoned, and this one is new.
        """
        if len(self._tasks) == 1 or _running_passes() > 1:
            name = self._parts.buckets.table.names[index]
            raise CommError(
                f"the gradient of {name!r} became ready twice in one backward pass",
                rank=self._parts.world.job_rank,
                operation="backward",
                remedy="use activation checkpointing with use_reentrant=False",
            )
        self._tasks = {task}
        if self._parts.in_flight.is_exchanging:
            self._finish_exchange()  # the same buckets on all ranks, wherever each of them gave up
        self._open()

    def _enter(self, task: int) -> None:
        is_outermost = not self._tasks
        self._tasks.add(task)
        at_end_of_pass(partial(_outside(), self._leave, task))
        if is_outermost:
            self._open()

    def _open(self) -> None:
        local, share = self._parts.local, self._parts.world.session.batch_weight
        self._arrivals = []
        self._seen = bytearray(len(self._seen))
        self.times.open(len(self._seen), is_tuned=(self._parts.tuner or self._parts.log) is not None)
        if (marks := self._parts.marks) is not None:
            marks.backward_begins()
        if share.watches or share.count_number:
            factor = share.pass_opens(torch._C._current_graph_task_id())
            self._refuse_old_count(share.count_number)
        else:
            factor = share.factor
        if local.aside is None:
            local.factor = factor
        if self._parts.in_flight.noise is not None:
            self._parts.in_flight.noise.pass_opens(local, self.steps_begun)
        holds = self._parts.world.session.holds_passes and self._parts.plan.zero < 2  # from 2 on, shards are kept
        if local.passes + 1 >= self.accumulate and not holds:
            self._begin_exchange(local.passes + 1)

    def _refuse_old_count(self, number: int) -> None:
        """Raise `ConfigError` when a count that was given for an earlier step is still in use."""
        if number != self._counted[0]:
            self._counted = number, self.steps_begun
        elif number and self._counted[1] != self.steps_begun:
            CountCalls.of(self._parts.world).refuse_if_others_count()
            raise ConfigError(
                "fd.weight was called for an earlier step and not for this one",
                remedy="call fd.weight(count) for every batch, or fd.weight(None) to weigh by samples again",
            )

    def _leave(self, task: int) -> None:
        if task not in self._tasks:
            return  # left already, or abandoned
        self._tasks.discard(task)
        if self._tasks:
            return  # a nested pass
        if self._parts.local.aside is not None:
            self._parts.local.restore()
        if not self._parts.in_flight.is_exchanging:
            self._parts.local.passes += 1
            self._record_backward(time.monotonic())
            return
        if not (waiting := _waiting.setdefault(task, [])):
            at_end_of_pass(partial(_outside(), _finish, task))
        waiting.append(self)

    # -- one exchange --------------------------------------------------------------------------

    def finish_abandoned(self) -> None:
        """Exchange what was not: after fewer than `accumulate` passes, or a pass that raised an exception."""
        is_abandoned = bool(self._tasks)
        self._tasks.clear()
        if self._parts.local.aside is not None:
            self._parts.local.restore()
        if self._parts.in_flight.is_exchanging or self._parts.local.passes or is_abandoned:
            if not self._parts.in_flight.is_exchanging:
                self._begin_exchange(self._parts.local.passes)
            self._finish_exchange()

    def exchange(self, *, contribute: bool, share: float | None = None) -> None:
        """See `GradientReducer.exchange`."""
        local = self._parts.local
        self._tasks.clear()
        if not self._parts.in_flight.is_exchanging:
            if not local.passes:
                local.factor = self._parts.world.session.batch_weight.factor if share is None else share
                self.times.forget_ready()
            self._begin_exchange(local.passes)
        factor = local.factor
        local.factor = factor if contribute else 0.0
        if not contribute:
            self._parts.in_flight.ignore_steps()
        try:
            self._finish_exchange()
        finally:
            local.factor = factor

    @property
    def _weight(self) -> float:
        """The weight of this rank's gradients in the result."""
        return self._parts.local.factor / self.divisor

    def _begin_exchange(self, passes: int) -> None:
        """`passes`: those whose gradients are exchanged. See [Note: one step off]."""
        parts = self._parts
        if parts.nonfinite.undecided:
            parts.nonfinite.rollback_if_dropped()
        if parts.loss_scale.is_followed:
            parts.buckets.rescale_kept(parts.loss_scale.change())
        share = parts.world.session.batch_weight
        parts.in_flight.begin(
            self.steps_begun, passes - parts.local.uncounted if self.accumulate == 1 else 1, share.epoch.number
        )
        if share.count_number:
            CountCalls.of(parts.world).exchange_begins()
        if parts.buckets.buckets:
            parts.in_flight.launch_extra_tensors(parts.local.factor)
        if parts.in_flight.noise is not None:
            parts.in_flight.noise.begin(self.steps_begun)

    def _finish_exchange(self) -> None:
        self.launch_rest()
        self.finalize_backward()

    def launch_rest(self) -> None:
        """Launch buckets that are not complete; in the first pass, agree on buckets."""
        parts = self._parts
        parts.in_flight.is_exchanging = False
        is_first = not parts.buckets.buckets
        if is_first and not parts.options.lazy_init:
            CountCalls.of(parts.world).first_exchange()
        if parts.world.session.batch_weight.count_number:
            CountCalls.of(parts.world).hear_others()  # before any other meeting of the ranks
        if parts.open_route.route is None and not parts.open_route.is_closed:
            parts.connect()
        if parts.in_flight.launched < len(parts.buckets.buckets):
            parts.buckets.exclude_frozen(parts.in_flight.launched)
        if parts.buckets.unassigned:
            for index in parts.buckets.assign_new_parameters(self._arrivals, parts.route_of_new_buckets()):
                self.hook(index)
        if is_first:
            parts.in_flight.prepare_extra_tensors()
            parts.in_flight.launch_extra_tensors(parts.local.factor)
        parts.in_flight.launch_rest(self._weight)

    def finalize_backward(self) -> None:
        """Wait for all buckets, and let their means be the gradients."""
        parts = self._parts
        wait_begin = time.monotonic()
        self._record_backward(wait_begin)
        parts.in_flight.wait(self.steps_begun, self.exchanges_done, parts.marks)
        if parts.buckets.carry_over.is_active:
            parts.buckets.settle_carry_over()
        wait_end = time.monotonic()
        parts.local.passes = parts.local.uncounted = 0
        self.exchanges_done += 1
        if parts.options.on_second_gradient is not None:
            parts.single.note_exchange(self._seen, self.accumulate)
        self._record(wait_begin, wait_end)
        is_bad = any(bucket.had_nonfinite or not bucket.is_settled for bucket in parts.buckets.buckets)
        if is_bad or parts.nonfinite.is_skipped:
            parts.nonfinite.after_exchange()
        if self.after_exchange is not None:
            self.after_exchange()
        if parts.tuner is not None or parts.log is not None:
            parts.take_times(self.times.close(wait_begin, wait_end))

    # -- records -------------------------------------------------------------------------------

    def _record_backward(self, end_seconds: float) -> None:
        begin, self.times.backward_seconds = self.times.backward_seconds, 0.0
        if begin:
            self._parts.world.session.recorder.record(Phase(BACKWARD, begin, end_seconds))

    def _record(self, wait_begin_seconds: float, wait_end_seconds: float) -> None:
        in_flight, recorder = self._parts.in_flight, self._parts.world.session.recorder
        layout = in_flight.changed_layout()
        if layout is not None:
            recorder.record(layout)
        times = in_flight.close_times(self.times.ready_seconds, wait_end_seconds)
        launches = tuple(bucket.launch_seconds for bucket in times)
        sent = sum(bucket.sent_bytes for bucket in times)
        number = self._parts.open_route.number or 0
        exchange = Exchange(launches, wait_begin_seconds, wait_end_seconds, sent, times, number)
        recorder.record(exchange)
        if self.watcher is not None:
            self.watcher.record(exchange)


class PassTimes:
    """When the current pass did what. Times of `time.monotonic`; 0.0: it did not."""

    def __init__(self, ready_seconds: list[float]) -> None:
        self.ready_seconds = ready_seconds
        """When each gradient was ready, by parameter."""
        self.forward_begin_seconds = 0.0
        """Start of the first forward pass of the step."""
        self.backward_seconds = 0.0
        """When the model's backward pass began, which is before its first gradient is ready."""
        self._begin_seconds = 0.0

    def open(self, parameters: int, *, is_tuned: bool) -> None:
        """The first gradient of a pass is ready."""
        now = self._begin_seconds = time.monotonic()
        self.backward_seconds = self.backward_seconds or now
        self.ready_seconds = [0.0] * parameters
        if is_tuned:
            self.forward_begin_seconds = self.forward_begin_seconds or now

    def forget_ready(self) -> None:
        """No gradient of this exchange became ready."""
        self.ready_seconds = [0.0] * len(self.ready_seconds)

    def close(self, wait_begin_seconds: float, wait_end_seconds: float) -> PassTimings:
        """Return the times of a step for the tuner, and begin the next one."""
        begin, self.forward_begin_seconds = self.forward_begin_seconds, 0.0
        return PassTimings(begin, self._begin_seconds, wait_begin_seconds, wait_end_seconds, self.ready_seconds)


class _Kept:
    """What keeps a reducer alive with a parameter. Pickled as nothing: a copy of a model has no reducer."""

    def __init__(self, reducer: object) -> None:
        self.reducer = reducer

    def __reduce__(self) -> tuple[type[OrderedDict[str, str]], tuple[()]]:
        return OrderedDict, ()  # what torch reads with weights_only, too


def _call(method: weakref.WeakMethod[Ready], index: int, tensor: torch.Tensor) -> None:
    if (hook := method()) is not None:
        hook(index, tensor)


@cache
def _outside() -> Callable[[Callable[[int], None], int], None]:
    """Return what calls a function with a task, outside of graphs."""
    return outside_graphs(lambda call, task: call(task))


def _finish(task: int) -> None:
    """End the exchanges of all reducers in pass `task`. See [Note: one order]."""
    reducers = sorted(_waiting.pop(task), key=lambda passes: passes.order)
    for end in (BackwardPasses.launch_rest, BackwardPasses.finalize_backward):
        for passes in reducers:
            try:
                end(passes)
            except CommError as problem:
                raise passes._parts.options.map_error(problem) from None


def _running_passes() -> int:
    """Return how many backward passes this thread is inside of."""
    passes, frame = 0, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        passes += frame.f_code.co_name == "_engine_run_backward"
    return passes

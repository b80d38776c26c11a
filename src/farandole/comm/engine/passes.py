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
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import count

import torch

from ...core.vocabulary.errors import CommError
from ...core.vocabulary.events import BACKWARD, Phase
from ..autotune.profile import PassTimings
from ..device.streams import outside_graphs
from ..world.comm_errors import LOST
from ..world.world import World
from .grad_ownership import LocalAccumulation
from .guards import CountCalls, ReducerGuards
from .in_flight import InFlightBuckets, at_end_of_pass, number_of_pass
from .sharded_bucket import is_accumulating
from .tuning import ExchangeTuning

_KEPT = "_farandole_reducer"
Ready = Callable[[int, torch.Tensor], None]
_made = count()
_waiting: dict[int, list[BackwardPasses]] = {}
"""Reducers that have come to the end of a pass, by autograd's number of it. See [Note: one order]."""


class BackwardPasses:
    """The backward passes over one reducer's parameters."""

    def __init__(self, world: World, in_flight: InFlightBuckets, tuning: ExchangeTuning, owner: object) -> None:
        """`owner`: kept alive by the parameters that are hooked; see [Note: what keeps a reducer alive]."""
        plan, options, buckets = tuning.plan, tuning.options, in_flight.buckets
        self._world, self._options = world, options
        self._buckets, self._in_flight, self._tuning = buckets, in_flight, tuning
        self._hooks = _Hooks(owner, buckets.table.parameters)
        self.order = next(_made)
        """When it was made, among those of this process."""
        self.divisor = 1.0 if options.reduce_op == "sum" else float(world.size)
        self.accumulate = 1 if plan.zero >= 2 else plan.accumulate
        """Passes whose gradients are added up before an exchange: the same on all ranks."""
        self.local = LocalAccumulation(buckets.table.parameters, may_hold=plan.zero < 2)
        self.guards = ReducerGuards(world, options, buckets, plan.nonfinite)
        self.current = OpenPass(len(buckets.table))
        # - Across passes
        self.exchanges_done = 0
        self.steps_begun = 0
        self.after_exchange: Callable[[], None] | None = None
        """Called on all ranks when the gradients are the means."""

    # -- hooks ---------------------------------------------------------------------------------

    def hook(self, index: int) -> None:
        """Call `mark_ready` when a gradient of parameter `index` is accumulated, now or when it is not frozen."""
        aside = None if self._options.mesh is None else self._set_aside_shard
        self._hooks.add(index, self.mark_ready, aside)

    def unhook(self) -> None:
        """Undo `hook` for all parameters."""
        self._hooks.remove()

    def _set_aside_shard(self, index: int, _: torch.Tensor) -> None:
        buckets = self._buckets
        # Asking autograd takes longer than all else here, and after `zero_grad` there is nothing to set aside.
        if buckets.has_earlier_shard(index) and is_accumulating(buckets.table.parameters[index]):
            buckets.set_aside_shard(index)

    # -- one pass ------------------------------------------------------------------------------

    def mark_ready(self, index: int, parameter: torch.Tensor) -> None:
        """Note that the gradient of a parameter is accumulated; launch buckets that are complete."""
        if self.guards.second_gradient.spent is not None:
            self.guards.second_gradient.refuse_second(index, self._buckets.table.names[index])
        task = number_of_pass()
        if task not in self.current.tasks:
            self._enter(task)
        if self.current.seen[index]:
            self._mark_ready_again(index, task)
        self.current.seen[index] = 1
        self.current.ready_seconds[index] = time.monotonic()
        if self._tuning.marks is not None:
            self._tuning.marks.is_ready(index)
        if self._in_flight.on_device is not None:
            self._in_flight.on_device.note_stream()
        bucket = self._buckets.bucket_of[index]
        if bucket is None:
            self.current.arrivals.append(index)
        elif self._in_flight.is_exchanging:
            bucket.pending -= 1
            if bucket.pending == 0 and self.local.aside is None and not self._is_broken:
                try:
                    self._in_flight.launch_complete(self._weight)
                except LOST as problem:
                    if self.guards.redo is None:
                        raise self._options.map_error(problem) from None
                    self.guards.redo.note(problem)
                except CommError as problem:
                    raise self._options.map_error(problem) from None

    def _mark_ready_again(self, index: int, task: int) -> None:
        """Two gradients in one pass are an error: the first may be on its way, and the second was added to it.

        With an older pass open that is no longer running, that one was abandoned, and this one is new.
        """
        if len(self.current.tasks) == 1 or _running_passes() > 1:
            name = self._buckets.table.names[index]
            raise CommError(
                f"the gradient of {name!r} became ready twice in one backward pass",
                rank=self._world.job_rank,
                operation="backward",
                remedy="use activation checkpointing with use_reentrant=False",
            )
        self.current.tasks = {task}
        if self._in_flight.is_exchanging:
            self._finish_exchange()  # the same buckets on all ranks, wherever each of them gave up
        self._open()

    def _enter(self, task: int) -> None:
        is_outermost = not self.current.tasks
        self.current.tasks.add(task)
        at_end_of_pass(partial(_outside(), self._leave, task))
        if is_outermost:
            self._open()

    def _open(self) -> None:
        local, share = self.local, self._world.session.batch_weight
        self.current.open(is_tuned=(self._tuning.tuner or self._tuning.log) is not None)
        if (marks := self._tuning.marks) is not None:
            marks.backward_begins()
        if share.watches or share.count_number:
            factor = share.pass_opens(torch._C._current_graph_task_id())
            self.guards.old_count.refuse(share.count_number, self.steps_begun)
        else:
            factor = share.factor
        if local.aside is None:
            local.factor = factor
        if self._in_flight.noise is not None:
            self._in_flight.noise.pass_opens(local, self.steps_begun)
        holds = self._world.session.holds_passes and self.local.may_hold
        if local.passes + 1 >= self.accumulate and not holds:
            self._begin_exchange(local.passes + 1)

    def _leave(self, task: int) -> None:
        if task not in self.current.tasks:
            return  # left already, or abandoned
        self.current.tasks.discard(task)
        if self.current.tasks:
            return  # a nested pass
        if self.local.aside is not None:
            self.local.restore()
        if not self._in_flight.is_exchanging:
            self.local.passes += 1
            self._record_backward(time.monotonic())
            return
        if not (waiting := _waiting.setdefault(task, [])):
            at_end_of_pass(partial(_outside(), _finish, task))
        waiting.append(self)

    # -- one exchange --------------------------------------------------------------------------

    def finish_abandoned(self) -> None:
        """Exchange what was not: after fewer than `accumulate` passes, or a pass that raised an exception."""
        is_abandoned = bool(self.current.tasks)
        self.current.tasks.clear()
        if self.local.aside is not None:
            self.local.restore()
        if self._in_flight.is_exchanging or self.local.passes or is_abandoned:
            if not self._in_flight.is_exchanging:
                self._begin_exchange(self.local.passes)
            self._finish_exchange()

    def exchange(self, *, contribute: bool, share: float | None = None) -> None:
        """See `GradientReducer.exchange`."""
        local = self.local
        self.current.tasks.clear()
        if not self._in_flight.is_exchanging:
            if not local.passes:
                local.factor = self._world.session.batch_weight.factor if share is None else share
                self.current.forget_ready()
            self._begin_exchange(local.passes)
        factor = local.factor
        local.factor = factor if contribute else 0.0
        if not contribute:
            self._in_flight.ignore_steps()
        try:
            self._finish_exchange()
        finally:
            local.factor = factor

    @property
    def _weight(self) -> float:
        """The weight of this rank's gradients in the result."""
        return self.local.factor / self.divisor

    def _begin_exchange(self, passes: int) -> None:
        """`passes`: those whose gradients are exchanged. See [Note: one step off]."""
        if self.guards.nonfinite.undecided:
            self.guards.nonfinite.rollback_if_dropped()
        if self.local.loss_scale.is_followed:
            self._buckets.rescale_kept(self.local.loss_scale.change())
        share = self._world.session.batch_weight
        self._in_flight.begin(
            self.steps_begun, passes - self.local.uncounted if self.accumulate == 1 else 1, share.epoch.number
        )
        if share.count_number:
            CountCalls.of(self._world).exchange_begins()
        if self._buckets.buckets:
            self._launch_extra_tensors()
        if self._in_flight.noise is not None:
            self._in_flight.noise.begin(self.steps_begun)

    def _launch_extra_tensors(self) -> None:
        try:
            self._in_flight.launch_extra_tensors(self.local.factor)
        except LOST as problem:
            if self.guards.redo is None:
                raise
            self.guards.redo.note(problem)

    @property
    def _is_broken(self) -> bool:
        return self.guards.redo is not None and self.guards.redo.is_broken

    def _finish_exchange(self) -> None:
        if self.guards.redo is not None:
            self.guards.redo.finish([self])
            return
        self.launch_rest()
        self.finalize_backward()

    def end_alone(self) -> None:
        """All other ranks were lost: the gradients are as they are."""
        self.local.passes = self.local.uncounted = 0
        self.exchanges_done += 1

    def take_back(self) -> None:
        """Let parameters have this rank's own gradients again."""
        self._in_flight.give_back()
        if not self.exchanges_done:
            self._buckets.dissolve()

    def begin_again(self, scale: float) -> None:
        """Begin the exchange once more, for other ranks: `scale` times this rank's share of the batch."""
        self.local.factor *= scale
        self._in_flight.begin_again()
        if self._buckets.buckets:
            self._launch_extra_tensors()

    def launch_rest(self) -> None:
        """Launch buckets that are not complete; in the first pass, agree on buckets."""
        self._in_flight.is_exchanging = False
        is_first = not self._buckets.buckets
        if is_first and not self._options.lazy_init:
            CountCalls.of(self._world).first_exchange()
        if self._world.session.batch_weight.count_number:
            CountCalls.of(self._world).hear_others()  # before any other meeting of the ranks
        if self._in_flight.open_route.is_missing:
            self._tuning.connect()
        if self._in_flight.launched < len(self._buckets.buckets):
            self._buckets.exclude_frozen(self._in_flight.launched)
        if self._buckets.unassigned:
            route = self._tuning.route_of_new_buckets()
            for index in self._buckets.assign_new_parameters(self.current.arrivals, route):
                self.hook(index)
        if is_first:
            self._in_flight.prepare_extra_tensors()
            self._in_flight.launch_extra_tensors(self.local.factor)
        self._in_flight.launch_rest(self._weight)

    def finalize_backward(self) -> None:
        """Wait for all buckets, and let their means be the gradients."""
        self.arrive()
        self.settle()

    def arrive(self) -> None:
        """Wait for all buckets."""
        self.current.wait_begin_seconds = time.monotonic()
        self._record_backward(self.current.wait_begin_seconds)
        self._in_flight.arrive(self._tuning.marks)

    def settle(self) -> None:
        """Let the means that have arrived be the gradients."""
        wait_begin = self.current.wait_begin_seconds
        self._in_flight.settle(self.steps_begun, self.exchanges_done, self._tuning.marks)
        if self._buckets.carry_over.is_active:
            self._buckets.settle_carry_over()
        wait_end = time.monotonic()
        self.local.passes = self.local.uncounted = 0
        self.exchanges_done += 1
        if self._options.on_second_gradient is not None:
            self.guards.second_gradient.note_exchange(self.current.seen, self.accumulate)
        self._in_flight.record(self.current.ready_seconds, wait_begin, wait_end)
        is_bad = any(bucket.had_nonfinite or not bucket.is_settled for bucket in self._buckets.buckets)
        if is_bad or self.guards.nonfinite.is_skipped:
            self.guards.nonfinite.after_exchange()
        if self.after_exchange is not None:
            self.after_exchange()
        if (self._tuning.tuner or self._tuning.log) is not None:
            self._tuning.take_times(self.current.close(wait_begin, wait_end))

    # -- records -------------------------------------------------------------------------------

    def _record_backward(self, end_seconds: float) -> None:
        begin, self.current.backward_seconds = self.current.backward_seconds, 0.0
        if begin:
            self._world.session.recorder.record(Phase(BACKWARD, begin, end_seconds))


class OpenPass:
    """What the current backward pass has brought, and when. Times of `time.monotonic`; 0.0: it did not."""

    def __init__(self, parameters: int) -> None:
        self.tasks: set[int] = set()
        """Autograd's numbers of it and of passes nested in it."""
        self.arrivals: list[int] = []
        """Parameters that became ready and have no bucket yet, in order."""
        self.seen = bytearray(parameters)
        """By parameter: 1 where its gradient became ready."""
        self.ready_seconds = [0.0] * parameters
        """When each gradient was ready, by parameter."""
        self.forward_begin_seconds = 0.0
        """Start of the first forward pass of the step."""
        self.backward_seconds = 0.0
        """When the model's backward pass began, which is before its first gradient is ready."""
        self.wait_begin_seconds = 0.0
        """When it had ended, and all buckets were waited for."""
        self._begin_seconds = 0.0

    def open(self, *, is_tuned: bool) -> None:
        """The first gradient of a pass is ready."""
        self.arrivals, self.seen = [], bytearray(len(self.seen))
        now = self._begin_seconds = time.monotonic()
        self.backward_seconds = self.backward_seconds or now
        self.forget_ready()
        if is_tuned:
            self.forward_begin_seconds = self.forward_begin_seconds or now

    def forget_ready(self) -> None:
        """No gradient of this exchange became ready."""
        self.ready_seconds = [0.0] * len(self.ready_seconds)

    def close(self, wait_begin_seconds: float, wait_end_seconds: float) -> PassTimings:
        """Return the times of a step for the tuner, and begin the next one."""
        begin, self.forward_begin_seconds = self.forward_begin_seconds, 0.0
        return PassTimings(begin, self._begin_seconds, wait_begin_seconds, wait_end_seconds, self.ready_seconds)


class _Hooks:
    """On the parameters of one reducer, which they keep alive; see [Note: what keeps a reducer alive]."""

    def __init__(self, owner: object, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._owner, self._parameters = weakref.ref(owner), parameters
        self._handles: list[list[torch.utils.hooks.RemovableHandle]] = [[] for _ in parameters]

    def add(self, index: int, ready: Ready, before: Ready | None) -> None:
        """Call `ready` when a gradient of a parameter is accumulated, and `before` before it is.

        Nothing where it has its hooks, or is frozen and of a kind that can take none then.
        """
        handles, parameter = self._handles[index], self._parameters[index]
        if handles or not ((trains := parameter.requires_grad) or type(parameter) is torch.nn.Parameter):
            return
        vars(parameter)[_KEPT] = _Kept(self._owner())
        parameter.requires_grad_(True)  # torch wants it so for a hook, which stays whatever is set afterwards
        call = outside_graphs(partial(_call, weakref.WeakMethod(ready), index))
        handles.append(parameter.register_post_accumulate_grad_hook(call))
        if before is not None:
            aside = outside_graphs(partial(_call, weakref.WeakMethod(before), index))
            handles.append(parameter.register_hook(aside))
        parameter.requires_grad_(trains)

    def remove(self) -> None:
        """Undo `add` for all parameters."""
        for handles, parameter in zip(self._handles, self._parameters, strict=True):
            for handle in handles:
                handle.remove()
            if handles:
                vars(parameter).pop(_KEPT, None)


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
    redo = next((passes.guards.redo for passes in reducers if passes.guards.redo is not None), None)
    if redo is not None:
        redo.finish(reducers)
        return
    for end in (BackwardPasses.launch_rest, BackwardPasses.finalize_backward):
        for passes in reducers:
            try:
                end(passes)
            except CommError as problem:
                raise passes._options.map_error(problem) from None


def _running_passes() -> int:
    """Return how many backward passes this thread is inside of."""
    passes, frame = 0, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        passes += frame.f_code.co_name == "_engine_run_backward"
    return passes

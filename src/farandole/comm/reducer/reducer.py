"""The gradient engine: gradients meet while backward still runs, and backward ends with their mean.

`GradientReducer` hooks each parameter after its gradient is accumulated. A bucket whose members are
all ready is launched, in one order that all ranks agreed on; when backward ends, the rest is launched
and all is waited for. Not here: models, optimizers, buffers, files.

[Note: one pass] After ``loss.backward()`` returns, ``parameter.grad`` is the mean over all samples of
all ranks, so clipping, logging and unscaling in the user's loop read the true gradient. A second
backward before the optimizer's step adds to it and is exchanged again, which is exact because the
mean of equal gradients is that gradient. With ``accumulate=k`` the first k-1 passes stay local.

[Note: the first pass builds the buckets] Nothing is launched in the first pass. At its end the ranks
agree on rank 0's order of readiness, and the buckets built from it serve this very pass and all later
ones: a resumed run sums in the same order as the run it continues, bit for bit, from its first step.

[Note: once a step] A front end may promise that gradients are exchanged exactly once between two steps
(`ReducerOptions`): then a rank whose backward pass touched nothing exchanges at the step, with `exchange`, and
a second gradient for a parameter whose mean has been taken is refused. Its ranks may also be in other phases when
the engine is made, one still loading and another training, so nothing is said to them before the first exchange.

[Note: nested passes] Reentrant activation checkpointing runs backward inside backward. Passes are told
apart by the graph task's id, and the exchange ends with the outermost one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count

import torch

from ...core.vocabulary.codec_spec import AUTO, CodecSpec
from ...core.vocabulary.errors import CommError, ConfigError
from ...core.vocabulary.events import BACKWARD, Exchange, NullRecorder, Phase, Recorder
from ...core.vocabulary.spec import Plan
from ..autotune.autotuner import Autotuner, PassTimings
from ..buckets import codec_state
from ..buckets.bucket import Bucket
from ..buckets.bucket_set import BucketSet
from ..buckets.step_marks import refuse_difference_of_steps
from ..buckets.timing import LayoutTracker
from ..gradients.local_accumulation import LocalAccumulation
from ..gradients.loss_scale import LossScale
from ..gradients.parameters import relink_hooks
from ..routes.route import Route, connect_route, with_messages
from ..world.store_sync import require_same
from ..world.world import World
from .accelerators import place_of, refuse_messages
from .end_of_pass import finish_with_others
from .in_flight import InFlightBuckets
from .lifetime import Holds, hook_parameter, unhook_parameter
from .nonfinite import NonFiniteGuard
from .options import DEFAULT_OPTIONS, ExtraTensors, ReducerOptions
from .single_gradient import SingleGradientGuard

_made = count()


class GradientReducer:
    """Keeps the gradients of `parameters` equal on all ranks. One engine a model.

    Raises `Mismatch` on every rank when the ranks' parameters differ in name, order, shape or type.
    """

    def __init__(
        self,
        world: World,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        plan: Plan,
        manner: ReducerOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.world = world
        self.plan = plan
        self.accumulate = plan.accumulate
        """Backward passes to add up before an exchange; may be changed between two steps, on all ranks."""
        self.exchanges_done = 0
        """Exchanges since the engine was made: the same on all ranks between two of them."""
        self.steps_begun = 0
        """Steps of the optimizers that use these gradients, counted by who hooks them; the same on all ranks."""
        self.loss_scale = LossScale()
        self.before_forward: Callable[[], None] | None = None
        """Called when a forward pass with gradients begins; raises what is wrong with the model."""
        self.watcher: Recorder = NullRecorder()
        """Takes the exchanges of this engine alone; the world's recorder takes those of all."""
        self.number: int | None = None
        """Which engine of its world this is, in the order of connecting; None before."""
        self.order = next(_made)
        """Which engine of this process this is."""
        self._manner = manner
        self._divisor = 1.0 if manner.add_up else float(world.size)
        self._set = BucketSet(world, parameters, plan, keep_members=manner.keep_members)
        self._under_way = InFlightBuckets(world, self._set, self._connected)
        self._holds = Holds(world)
        self._when_dropped = self._holds.close_with(self)
        self._removed = False
        self.route, self.route_reason = "none", "the ranks are not connected yet"
        self.tuner: Autotuner | None = None
        if not manner.connect_late:
            self._connect()
        world.call_on_close(self.remove)
        world.call_in_forked_child(self.forget)
        self._hooks: list[torch.utils.hooks.RemovableHandle | None] = [None] * len(parameters)
        for index, (_, parameter) in enumerate(parameters):
            if parameter.requires_grad:
                self._hook(index)
        # Of the current pass:
        self._forward_begin_seconds = self._begin_seconds = 0.0
        self._ready_seconds = [0.0] * len(parameters)
        self._tasks: set[int] = set()
        self._arrivals: list[int] = []
        self._seen = bytearray(len(parameters))
        self._exchanging = False
        self._backward_seconds = 0.0
        # Across passes:
        self._described = LayoutTracker()
        self._held = LocalAccumulation(self._set.parameters)
        self._once = SingleGradientGuard(manner)
        self._dropped = NonFiniteGuard(world, self._set, plan.nonfinite)
        world.share.subscribe(self._held.share_changes)

    @property
    def _lines(self) -> Route | None:
        return self._holds.lines

    @_lines.setter
    def _lines(self, lines: Route | None) -> None:
        self._holds.lines = lines

    def _connect(self) -> None:
        """Compare the parameters and open the lines; all ranks are here."""
        self._manner.before_connecting()
        named = list(zip(self._set.names, self._set.parameters, strict=True))
        require_same(self.world, "comparing parameters", self._set.describe())
        self.number = int(self.world.topic("gradient engine").rpartition("/")[2])
        refuse_messages(self.world, named, self.plan, codecs=self._set.wanted_codecs)
        lines = connect_route(
            self.world,
            self.plan,
            place=place_of(self._set.parameters),
            needs_messages=self._set.needs_messages,
            parameter_bytes=sum(parameter.nbytes for parameter in self._set.parameters),
        )
        self._lines = lines
        self.route, self.route_reason = lines.route, lines.reason
        # Where memory is shared there is nothing to choose.
        tunes = self.plan.codec == AUTO and self.route in ("flat", "hierarchical")
        self.tuner = Autotuner(self.world, self.plan, lines, named) if tunes else None
        self._set.carry(lines, always=tunes)

    # -- what others may ask ---------------------------------------------------------------

    @property
    def _buckets(self) -> list[Bucket]:
        return self._set.buckets

    @property
    def bucket_bytes(self) -> list[int]:
        """Bytes of each bucket in launch order; empty before the first pass."""
        return [bucket.nbytes for bucket in self._buckets]

    @property
    def names_by_bucket(self) -> list[list[str]]:
        """Names of the parameters in each bucket in launch order; empty before the first pass."""
        return [[self._set.names[index] for index in bucket.members] for bucket in self._buckets]

    @property
    def has_codecs(self) -> bool:
        """Whether some gradients travel by codecs, which may keep what they did not send."""
        return bool(self._set.coded)

    @property
    def is_open(self) -> bool:
        """Whether gradients still meet."""
        return not self._removed

    @property
    def share_of_batch(self) -> float:
        """This rank's share of the samples in the last backward pass, over the mean share."""
        return self._held.factor

    def forward_begins(self) -> None:
        """Note when the first forward pass of a step begins; for the tuner's picture of a step."""
        if torch.is_grad_enabled():
            self._held.forget_cleared()
            if self.before_forward is not None:
                self.before_forward()
        self._forward_begin_seconds = self._forward_begin_seconds or time.monotonic()

    def backward_begins(self) -> None:
        """Note when the model's backward pass begins, which is before its first gradient is ready."""
        self._backward_seconds = time.monotonic()

    def add_rider(self, rider: ExtraTensors) -> None:
        """Take `rider` along from the first exchange on; to be called before it."""
        self._under_way.add_rider(rider)

    def exchange_state(self) -> dict[str, codec_state.Entry]:
        """Return what codecs keep on this rank, by parameter."""
        return self._set.state()

    def load_exchange_state(self, entries: dict[str, codec_state.Entry]) -> None:
        """Replace what codecs keep; entries of parameters without a bucket wait for it."""
        self._dropped.were_used()
        self._set.load_state(entries)

    def flush(self) -> None:
        """Exchange what is held back; to be called by all ranks before an optimizer's step.

        Nothing is held back unless the loop stepped after fewer than ``accumulate`` backward passes, or a backward
        pass was abandoned by an exception.
        """
        abandoned = bool(self._tasks)
        self._tasks.clear()
        if self._held.is_set_aside:
            self._held.restore()
        if self._exchanging or self._held.passes or abandoned:
            if not self._exchanging:
                self._begin_exchange()
            self._finish_exchange()
        self._dropped.were_used()

    def exchange(self, *, contribute: bool = True) -> None:
        """Exchange now, whatever this rank has; to be called where other ranks' backward passes exchange.

        Without `contribute` this rank adds nothing to the others' gradients, and its own are lost.
        """
        self._tasks.clear()
        if not self._exchanging:
            if not self._held.passes:
                self._held.factor = self.world.share.factor
                self._ready_seconds = [0.0] * len(self._set.parameters)
            self._begin_exchange()
        factor = self._held.factor
        self._held.factor = factor if contribute else 0.0
        if not contribute:
            self._under_way.count_no_steps()
        try:
            self._finish_exchange()
        finally:
            self._held.factor = factor

    def exchange_written(self, parameters: Sequence[torch.Tensor]) -> None:
        """Exchange gradients of `parameters` that no backward pass of this engine's brought, if there are any.

        To be called by all ranks, where an optimizer is about to step and nothing was exchanged since its last
        step: gradients written by hand, or of parameters whose hooks went away (`swap_tensors`), are local.
        """
        indices = [index for index in map(self._set.index_by_id.get, map(id, parameters)) if index is not None]
        if any(self._set.was_written(index) for index in indices):
            for index in indices:
                relink_hooks(self._set.parameters[index])
            self.exchange()

    def note_used(self) -> None:
        """An optimizer steps with the gradients as they are."""
        self._set.note_used()

    @property
    def holds_gradients(self) -> bool:
        """Whether a backward pass left gradients that are to be exchanged with a later one's."""
        return self._held.passes > 0

    @property
    def passes_held(self) -> int:
        """How many backward passes did."""
        return self._held.passes

    def begin_step(self) -> None:
        """Allow every parameter its next gradient, and count passes from zero. See [Note: once a step]."""
        self._once.begin_step()
        self._held.passes = 0

    @torch.no_grad()
    def fill_absent(self) -> None:
        """Give zeros to members of dense buckets without a gradient."""
        for bucket in self._buckets:
            bucket.fill_absent()

    @property
    def step_is_skipped(self) -> bool:
        """Whether the plan skips the step that comes: gradients held NaN or infinity, and are gone."""
        return self._dropped.is_skipped

    @property
    def mean_is_finite(self) -> bool:
        """Whether the last exchange gave gradients without NaN and infinity; reads all of them."""
        return all(bucket.is_finite for bucket in self._buckets)

    def switch_codecs(self, codecs: Mapping[str, CodecSpec], *, bucket_bytes: int | None = None) -> None:
        """Let the named parameters travel by other codecs, from the next exchange on.

        To be called by all ranks, with the same arguments, between two steps. `bucket_bytes` changes the size
        of all buckets. What the old codecs have not sent is added to the next gradient; the rest of their state
        (velocities, factors) is dropped. Gradients that are sparse stay exact. Raises `ConfigError` for a name
        that is no parameter's, `PlanError` for a codec that a parameter cannot have, and `Mismatch`, on every
        rank, when the ranks ask for different ones.
        """
        changed = self._set.changes(codecs)
        if self._exchanging:
            raise ConfigError("codecs are switched between two steps, not during a backward pass")
        wanted = [spec.to_text() for spec in changed.values() if spec.name != "none"]
        if wanted:
            named = [(name, self._set.parameters[self._set.index_of[name]]) for name in changed]
            refuse_messages(self.world, named, self.plan, codecs=wanted)
            self._lines = with_messages(self._connected(), self.world, self.plan)
        self._set.rebuild(changed, bucket_bytes, self._taken())

    def ask_more(self, wanted: Mapping[str, tuple[torch.Tensor, float] | None]) -> None:
        """Add to the named parameters' next gradient that travels a tensor times a number; None: nothing any more.

        Takes the place of what was asked for before. The tensor is read when the gradient is ready, and must
        be the same on all ranks to be in their mean as it is.
        """
        for name, more in wanted.items():
            index = self._set.index_of[name]
            if more is None:
                self._set.owed.asked.pop(index, None)
            else:
                self._set.owed.asked[index] = more

    def has_coming(self, name: str) -> bool:
        """Return whether what `ask_more` asked for has not been added to a gradient yet."""
        return self._set.index_of[name] in self._set.owed.asked

    def remove(self) -> None:
        """Take the hooks off and let go of the group; gradients stay local from now on."""
        self._unhook()
        self._under_way.forget()
        if self.tuner is not None:
            self.tuner.close()
        self._when_dropped.detach()
        self._holds.close()
        self._removed = True

    def _unhook(self) -> None:
        for hook, parameter in zip(self._hooks, self._set.parameters, strict=True):
            if hook is not None:
                unhook_parameter(parameter, hook)

    def forget(self) -> None:
        """In a forked child: gradients are this process's own, and no connection is used."""
        self._unhook()
        self._under_way.forget()
        self._when_dropped.detach()
        self._lines = self.tuner = None
        self._removed = True

    # -- one backward pass -----------------------------------------------------------------

    def _hook(self, index: int) -> None:
        self._hooks[index] = hook_parameter(self._set.parameters[index], self, self._ready, index)

    def _ready(self, index: int, parameter: torch.Tensor) -> None:
        self._once.refuse_second(index, self._set.names[index])
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._enter(task)
        if self._seen[index]:
            self._ready_again(index, task)
        self._seen[index] = 1
        self._ready_seconds[index] = time.monotonic()
        bucket = self._set.bucket_of[index]
        if bucket is None:
            self._arrivals.append(index)
        elif self._exchanging:
            bucket.missing -= 1
            if bucket.missing == 0 and not self._held.is_set_aside:
                try:
                    self._under_way.launch_complete(self._weight)
                except CommError as problem:
                    raise self._manner.translate(problem) from None

    def _ready_again(self, index: int, task: int) -> None:
        """Two gradients in one pass are an error: the first may be on its way, and the second was added to it.

        With an older pass open that is no longer running, that one was abandoned, and this one is new.
        """
        if len(self._tasks) == 1 or _running_passes() > 1:
            raise CommError(
                f"the gradient of {self._set.names[index]!r} became ready twice in one backward pass",
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
        self._seen = bytearray(len(self._set.parameters))
        self._begin_seconds = time.monotonic()
        self._backward_seconds = self._backward_seconds or self._begin_seconds
        self._ready_seconds = [0.0] * len(self._set.parameters)
        if self.tuner is not None:
            self._forward_begin_seconds = self._forward_begin_seconds or self._begin_seconds
        factor = self.world.share.pass_opens(torch._C._current_graph_task_id())
        if not self._held.is_set_aside:
            self._held.factor = factor
        if self._held.passes + 1 >= self.accumulate:
            self._begin_exchange()

    def _leave(self, task: int) -> None:
        if task not in self._tasks:
            return  # left already, or abandoned
        self._tasks.discard(task)
        if self._tasks:
            return  # a nested pass
        if self._held.is_set_aside:
            self._held.restore()
        if not self._exchanging:
            self._held.passes += 1
            self._note_backward(time.monotonic())
            return
        finish_with_others(task, self)

    def _begin_exchange(self) -> None:
        self._exchanging = True
        self._dropped.decide()
        self._set.rescale_kept(self.loss_scale.change())
        self._set.expect_all()
        self._under_way.begin(self.steps_begun)
        if self._buckets:
            self._under_way.launch_riders(self._held.factor)

    @property
    def _weight(self) -> float:
        """Of this rank's gradients in the result."""
        return self._held.factor / self._divisor

    def launch_what_is_left(self) -> None:
        """See `end_of_pass`."""
        try:
            self._launch_what_is_left()
        except CommError as problem:
            raise self._manner.translate(problem) from None

    def land(self) -> None:
        """See `end_of_pass`."""
        try:
            self._land()
        except CommError as problem:
            raise self._manner.translate(problem) from None

    def _finish_exchange(self) -> None:
        self._launch_what_is_left()
        self._land()

    def _launch_what_is_left(self) -> None:
        self._exchanging = False
        if self._lines is None and not self._removed:
            self._connect()
        self._set.put_to_sleep(self._under_way.launched)
        first = not self._buckets
        for index in self._set.admit(self._arrivals, self._taken()):
            if self._hooks[index] is None:
                self._hook(index)
        if first:
            self._under_way.settle_riders()
            self._under_way.launch_riders(self._held.factor)
        self._under_way.launch_rest(self._weight)

    def _land(self) -> None:
        wait_begin = time.monotonic()
        self._note_backward(wait_begin)
        if not self._under_way.land():
            refuse_difference_of_steps(self.world, self.steps_begun, self.exchanges_done)
        self._set.settle()
        wait_end = time.monotonic()
        self._held.passes = 0
        self.exchanges_done += 1
        self._once.were_exchanged(self._seen, self.accumulate)
        self._record(wait_begin, wait_end)
        self._dropped.answer()
        if self.tuner is not None:
            self._tune(self.tuner, wait_begin, wait_end)

    def _note_backward(self, end_seconds: float) -> None:
        begin, self._backward_seconds = self._backward_seconds, 0.0
        if begin:
            self.world.recorder.record(Phase(BACKWARD, begin, end_seconds))

    def _record(self, wait_begin_seconds: float, wait_end_seconds: float) -> None:
        buckets, number = self._buckets, self.number or 0
        layout = self._described.changed(buckets, self._set.names, self.route, number)
        if layout is not None:
            self.world.recorder.record(layout)
        times = self._under_way.close_times(self._ready_seconds, wait_end_seconds)
        launches = tuple(bucket.launch_seconds for bucket in times)
        sent = sum(bucket.sent_bytes for bucket in times)
        exchange = Exchange(launches, wait_begin_seconds, wait_end_seconds, sent, times, number)
        self.world.recorder.record(exchange)
        self.watcher.record(exchange)

    def _tune(self, tuner: Autotuner, wait_begin_seconds: float, wait_end_seconds: float) -> None:
        seen = PassTimings(
            self._forward_begin_seconds,
            self._begin_seconds,
            wait_begin_seconds,
            wait_end_seconds,
            self._ready_seconds,
        )
        wished = any(bucket.somebody_wishes for bucket in self._set.coded)
        choice = tuner.after_exchange(seen, somebody_wishes=wished)
        if choice is not None:
            codecs = {name: CodecSpec.parse(codec) for name, codec in choice.codecs.items()}
            self.route, self.route_reason = tuner.lines.route, tuner.lines.reason
            self.switch_codecs(codecs, bucket_bytes=choice.bucket_bytes)
        self._forward_begin_seconds = 0.0
        for bucket in self._set.coded:
            bucket.wish = tuner.wishes_probe

    def _connected(self) -> Route:
        if self._lines is None:
            raise CommError(
                "the world was left before the exchange was over",
                rank=self.world.rank,
                operation="all-reduce",
                remedy="call farandole.shutdown() after the last step",
            )
        return self._lines

    def _taken(self) -> Route:
        """Return what new buckets travel by: the route that codec "auto" chose, where it chooses."""
        lines = self._connected()
        return lines if self.tuner is None else self.tuner.lines


def _running_passes() -> int:
    """Return how many backward passes this thread is inside of."""
    count, frame = 0, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        count += frame.f_code.co_name == "_engine_run_backward"
    return count

"""The buckets of one exchange that are launched and not waited for, and the times of each for the records.

The times cost one reading of the clock a gradient and a few a bucket. Work of the communication thread knows when
its turn came, its waits and its rounds; work of the backend only when it was done.

[Note: joined passes] A zero-bubble schedule computes the gradients of weights apart from those of inputs, in as
many calls of autograd as the graph has places that feed parameters. How many these are may differ from rank to
rank: a micro-batch of one sample has another graph. Reducers compare the number of passes with other ranks, and
from ZeRO stage 2 on exchange after each one, so all calls for one micro-batch are one pass.

See [Note: no wait for a device] in `device.streams`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...core.vocabulary.errors import CommError, Mismatch
from ...core.vocabulary.events import BucketFacts, BucketLayout, BucketTimes, Exchange, Recorder
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import name_ranks
from ..autotune.on_device import DeviceMeasures
from ..collectives import start_all_reduce
from ..device.streams import Streams
from ..routes import Route, connect_route
from ..transport.comm_thread import BucketWork
from ..transport.staged_conductor import StagedWork
from ..world.comm_errors import refuse_if_ended, translate_error, translated
from ..world.store_sync import all_gather_json, require_same
from ..world.world import World, wait_while_open
from .bucket import Bucket, LateSteps, Waitable
from .buckets import BucketSet
from .grad_ownership import replace_grad
from .guards import refuse_messages
from .noise_sums import NoiseSums
from .parameters import ExtraTensors, ParameterTable, device_of


# What exchanges of gradients on a device need beside their buckets: streams of a pass, and steps compared
# late.
class DeviceExchanges:
    """One reducer's."""

    def __init__(self) -> None:
        self._streams: Streams | None = None
        self._seen: list[Any] = []
        """Streams that hooks of this pass have run on."""
        self._late: tuple[LateSteps, list[int], int] | None = None
        """What the ranks said in the last exchange; this rank's steps, passes and epoch in it; its number."""

    def begin(self, streams: Streams) -> None:
        """Begin an exchange whose codecs run on `streams`."""
        self._streams, self._seen = streams, []

    def note_stream(self) -> None:
        """Note the stream that a hook runs on: gradients that are ready there are waited for."""
        if self._streams is not None and (current := self._streams.current) not in self._seen:
            self._seen.append(current)

    def join_streams(self) -> None:
        """Let this stream wait for the others that gradients were made on."""
        if self._streams is None:
            return
        current = self._streams.current
        for stream in self._seen:
            if stream != current:
                with self._streams.on(stream):
                    ready = self._streams.record()
                self._streams.wait(ready)

    def keep(self, late: LateSteps, own: list[int], exchange: int) -> None:
        """Keep what says whether an exchange was of different steps until it is asked for."""
        self._late = (late, own, exchange)

    def different_steps(self) -> tuple[list[int], int] | None:
        """Return this rank's figures and the number of the exchange that is kept, if it was of different steps."""
        late, self._late = self._late, None
        return None if late is None or not late[0].differ else late[1:]

    def is_known_to_differ(self) -> bool:
        """Return whether the last exchange was of different steps; False where that is not known yet."""
        return self._late is not None and self._late[0].has_arrived and self._late[0].differ


_PASS, _EPOCH = 5, 7
"""What one more pass, and one more epoch, add to the step number that is compared: another number than any number
of steps nearby does."""


class _Begun(NamedTuple):
    """What all ranks must have in common in one exchange."""

    steps: int | None
    """How many this rank's optimizers have made; None: agree with any."""
    passes: int = 1
    epoch: int = 0


class InFlightBuckets:
    """A reducer's buckets that have been launched and not been waited for, exchange by exchange."""

    def __init__(self, world: World, buckets: BucketSet) -> None:
        self._world, self.buckets = world, buckets
        self.open_route = OpenRoute(world)
        # - Of the current exchange
        self.is_exchanging = False
        """Whether buckets are launched as soon as they are complete."""
        self.launched = 0
        """How many buckets are launched, from the first on."""
        self._timers: list[BucketTimer] = []
        """Of what is launched, with the work."""
        self._begun = _Begun(None)
        self._marked: Bucket | None = None
        """The bucket that says how many steps were made."""
        self.on_device: DeviceExchanges | None = None
        """What exchanges of gradients on a device need besides; None: they are on the CPU, or none was yet."""
        # - What travels along
        self._extra: dict[ExtraTensors, bool] = {}
        """Whether each has something to send; not known before the first exchange."""
        self._extra_works: list[tuple[ExtraTensors, dist.Work]] = []
        # - For the records
        self._described: list[Bucket] = []
        self.watcher: Recorder | None = None
        """Hears of the exchanges of this reducer alone."""
        self.noise: NoiseSums | None = None
        """What measures the gradients on their way, if anything does."""
        self.own: list[OwnGradients] | None = None
        """By bucket, where an exchange may be made again: this rank's own gradients, until it is sure."""

    def add_extra_tensors(self, extra: ExtraTensors) -> None:
        """Take `extra` along from the first exchange on."""
        self._extra[extra] = False

    def measure(self, noise: NoiseSums) -> None:
        """Measure gradients on their way from the next exchange on, by `noise` instead of an earlier one."""
        self._extra = {extra: sends for extra, sends in self._extra.items() if extra is not self.noise}
        self.noise = noise
        self._extra[noise] = True

    def prepare_extra_tensors(self) -> None:
        """Agree with all ranks on what travels along; in the first pass, and where that is made again."""
        self._extra = {extra: extra.prepare() for extra in self._extra}

    def begin(self, steps: int, passes: int, epoch: int) -> None:
        """Begin an exchange: nothing is launched. See [Note: one step off].

        `steps`: of this rank's optimizers. `passes`: backward passes that the loop has accumulated, with this one.
        `epoch`: that the samples are of, where their order goes by it.
        """
        self.is_exchanging = True
        self.launched, self._begun, self._marked = 0, _Begun(steps, max(1, passes), epoch), None
        route = self.open_route.route
        if route is not None and route.on_device is not None:
            self.on_device = self.on_device or DeviceExchanges()
            self.on_device.begin(route.on_device.streams)
        self.drop()
        for own in self.own or ():
            own.is_taken = False
        for bucket in self.buckets.buckets:
            bucket.pending = len(bucket.members)
        if self.buckets.frozen:
            self.buckets.expect_unfrozen()

    def ignore_steps(self) -> None:
        """Agree with the other ranks' numbers of steps in this exchange, whatever they are."""
        self._begun = self._begun._replace(steps=None)

    def drop(self) -> None:
        """Drop all pending work."""
        self._timers, self._extra_works = [], []

    # -- launching -----------------------------------------------------------------------------

    def launch_extra_tensors(self, factor: float) -> None:
        """Launch what travels along, weighted by this rank's `factor`; before the first bucket."""
        for extra in [each for each, sends in self._extra.items() if sends]:
            tensor = extra.pack(factor / self._world.size)
            with translated(self._world, "all-reduce of buffers"):
                work = start_all_reduce(tensor, self.open_route.require().group)
            self._extra_works.append((extra, work))

    def launch_complete(self, weight: float) -> None:
        """Launch, in the agreed order, every bucket up to the first that is not complete."""
        buckets = self.buckets.buckets
        while self.launched < len(buckets) and buckets[self.launched].pending <= 0:
            self._launch_next(weight)

    def launch_rest(self, weight: float) -> None:
        """Launch all buckets that are not launched, complete or not."""
        while self.launched < len(self.buckets.buckets):
            self._launch_next(weight)

    def _launch_next(self, weight: float) -> None:
        bucket = self.buckets.buckets[self.launched]
        if self.on_device is not None:
            self.on_device.join_streams()
        if self.own is not None:
            self._keep_own(self.own, bucket)
        try:
            bucket.load(weight)
        except RuntimeError as problem:
            raise self.buckets.explain_load(bucket, problem) from None
        if self.noise is not None and self.noise.is_measuring:
            self.noise.add_own(bucket)
        if self._marked is None and bucket.mark_steps(self._mark):
            self._marked = bucket
        if self.buckets.carry_over.is_active:
            self.buckets.carry_over.add_to(bucket)
        if self._world.groups.sockets.shut_down or self._world.in_forked_child:
            refuse_if_ended(self._world, "all-reduce", bucket=self.launched)
        launch = time.monotonic()
        try:
            work = bucket.launch(self.open_route.route or self.open_route.require())
        except RuntimeError as problem:
            raise translate_error(problem, self._world, "all-reduce", bucket=self.launched) from None
        on_host = self.buckets.table.parameters[bucket.members[0]].is_cpu
        self._timers.append(BucketTimer(launch, work, on_host=on_host))
        self.launched += 1

    @property
    def _mark(self) -> int | None:
        """What all ranks must have in common in this exchange, as one number; None: agree with any."""
        steps, passes, epoch = self._begun
        return None if steps is None else steps + _PASS * (passes - 1) + _EPOCH * epoch

    # -- again; see `redo` -----------------------------------------------------------------------

    def _keep_own(self, own: list[OwnGradients], bucket: Bucket) -> None:
        parameters = [self.buckets.table.parameters[index] for index in bucket.members]
        if self.launched == len(own):
            own.append(OwnGradients())
        own[self.launched].take(parameters, bucket)

    def give_back(self) -> None:
        """Let parameters have this rank's own gradients again, and codecs what they kept before the exchange."""
        assert self.own is not None, "they are kept"
        for own, bucket in zip(self.own, self.buckets.buckets, strict=False):
            if own.is_taken:  # also of a bucket that was loaded and could not be launched
                own.give_back([self.buckets.table.parameters[index] for index in bucket.members], bucket)
        self.own.clear()
        self.drop()

    def begin_again(self) -> None:
        """Begin the same exchange once more, after `give_back`."""
        steps, passes, epoch = self._begun
        self.begin(0, passes, epoch)
        self._begun = self._begun._replace(steps=steps)

    # -- waiting -------------------------------------------------------------------------------

    def arrive(self, marks: DeviceMeasures | None = None) -> None:
        """Wait for everything. `marks`: where steps on a device are profiled."""
        if marks is not None:
            marks.wait_begins()
        for position, timer in enumerate(self._timers):
            try:
                self._wait_for(timer.work)
            except RuntimeError as problem:
                raise translate_error(problem, self._world, "all-reduce", bucket=position) from None
        for _, work in self._extra_works:
            with translated(self._world, "all-reduce of buffers"):
                self._wait_for(work)

    def _wait_for(self, work: Waitable) -> None:
        if self.own is not None and isinstance(work, dist.Work):
            wait_while_open(self._world, work)
        else:
            work.wait()

    def settle(self, steps_begun: int, exchanges_done: int, marks: DeviceMeasures | None = None) -> None:
        """Put what has arrived where it belongs. The numbers are for the error's text.

        Raises `Mismatch`, on all ranks, and leaves the sums where they are, when these are of different steps.
        """
        for extra, _ in self._extra_works:
            extra.unpack()
        self._agree_on_overflow()
        self._compare_steps([steps_begun, self._begun.passes, self._begun.epoch], exchanges_done)
        if self.noise is not None:
            self.noise.finish(self.buckets.buckets, carries_over=self.buckets.carry_over.is_active)
        for bucket in self.buckets.buckets:
            bucket.finalize()
        self._extra_works = []
        if marks is not None:
            marks.wait_ends()

    def _compare_steps(self, own: list[int], exchanges_done: int) -> None:
        """Raise `Mismatch`, on all ranks, if this exchange was of different steps; on a device the one before."""
        self.compare_late_steps()
        late = None if self._marked is None else self._marked.late_steps
        if late is not None:
            self.on_device = self.on_device or DeviceExchanges()
            self.on_device.keep(late, own, exchanges_done)
        elif self._marked is not None and self._marked.steps_differ:
            _refuse_difference(self._world, own, exchanges_done)

    def compare_late_steps(self) -> None:
        """Raise `Mismatch`, on all ranks, if the exchange that was not compared yet was of different steps."""
        found = None if self.on_device is None else self.on_device.different_steps()
        if found is not None:
            _refuse_difference(self._world, *found)

    def _agree_on_overflow(self) -> None:
        """Tell all ranks of rows whose sum is not finite, which their owners alone have."""
        buckets = [bucket for bucket in self.buckets.buckets if bucket.owns_rows]
        if not buckets:
            return
        own = [flag for bucket in buckets for flag in bucket.find_overflow()]
        flags = torch.tensor(own, dtype=torch.int32, device=self._world.device)
        with translated(self._world, "agreeing on sums of packed gradients"):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._world.group)
        found = flags.bool().tolist()
        for bucket in buckets:
            bucket.note_overflow(found[: len(bucket.members)])
            del found[: len(bucket.members)]

    # -- for the records -----------------------------------------------------------------------

    def record(self, ready_seconds: Sequence[float], wait_begin_seconds: float, wait_end_seconds: float) -> None:
        """Record the exchange that was waited for. `ready_seconds`: by parameter, 0.0 is not ready."""
        recorder = self._world.session.recorder
        layout = self.changed_layout()
        if layout is not None:
            recorder.record(layout)
        times = self.close_times(ready_seconds, wait_end_seconds)
        launches = tuple(bucket.launch_seconds for bucket in times)
        sent = sum(bucket.sent_bytes for bucket in times)
        number = self.open_route.number or 0
        exchange = Exchange(launches, wait_begin_seconds, wait_end_seconds, sent, times, number)
        recorder.record(exchange)
        if self.watcher is not None:
            self.watcher.record(exchange)

    def close_times(self, ready_seconds: Sequence[float], now: float) -> tuple[BucketTimes, ...]:
        """Return the times of buckets that were done by `now`. `ready_seconds`: by parameter, 0.0 is not ready."""
        timers, self._timers = self._timers, []
        return tuple(
            timer.close(bucket, ready_seconds, now)
            for timer, bucket in zip(timers, self.buckets.buckets, strict=True)
        )

    def changed_layout(self) -> BucketLayout | None:
        """Return what is in the buckets, when it is not what was returned last."""
        if self.buckets.buckets == self._described:
            return None
        self._described = self.buckets.buckets
        facts = tuple(_facts(bucket, self.buckets.table.names) for bucket in self._described)
        return BucketLayout(self.open_route.name, facts, self.open_route.number or 0)


class OwnGradients:
    """A copy of this rank's gradients of one bucket, and what its codec kept, of before an exchange."""

    def __init__(self) -> None:
        self.is_taken = False
        """Whether the bucket has taken them, in the exchange under way."""
        self._gradients: list[torch.Tensor | None] = []
        self._states: dict[int, Any] = {}

    def take(self, parameters: Sequence[torch.Tensor], bucket: Bucket) -> None:
        """Copy what the bucket is about to take."""
        self.is_taken = True
        now, before = [each.grad for each in parameters], self._gradients
        pairs = list(zip(now, before, strict=False))
        if len(pairs) == len(now) and all(_is_alike(*pair) for pair in pairs):
            torch._foreach_copy_(
                [each for each in before if each is not None], [each for each in now if each is not None]
            )
        else:
            self._gradients = [None if each is None else each.detach().clone() for each in now]
        self._states = {} if bucket.coded is None else dict(bucket.coded.states.current)

    def give_back(self, parameters: Sequence[torch.Tensor], bucket: Bucket) -> None:
        """Let the parameters have them; called once."""
        for parameter, own in zip(parameters, self._gradients, strict=True):
            replace_grad(parameter, own)
        if bucket.coded is not None:
            bucket.coded.states.current.clear()
            bucket.coded.states.current.update(self._states)


def _there(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [each for each in tensors if each is not None]


def _is_alike(now: torch.Tensor | None, before: torch.Tensor | None) -> bool:
    if now is None or before is None:
        return now is before
    return not now.is_sparse and (now.shape, now.dtype, now.device) == (before.shape, before.dtype, before.device)


class BucketTimer:
    """The times of one launched bucket."""

    def __init__(self, launch_seconds: float, work: Waitable, *, on_host: bool) -> None:
        """`on_host`: an accelerator's future is done when its work is queued, which says nothing."""
        self.launch_seconds = launch_seconds
        self.work = work
        self._done_seconds = 0.0
        if on_host and isinstance(work, dist.Work):
            work.get_future().add_done_callback(self._done)

    def _done(self, _: Any) -> None:
        self._done_seconds = time.monotonic()

    def close(self, bucket: Bucket, ready_seconds: Sequence[float], now: float) -> BucketTimes:
        """Return the times of a bucket that has been waited for by `now`. `ready_seconds`: 0.0 is not ready."""
        ready = [at for index in bucket.members if (at := ready_seconds[index])]
        first, last = (min(ready), max(ready)) if ready else (None, None)
        work, launch = self.work, self.launch_seconds
        job = work.job if isinstance(work, StagedWork) else work
        if isinstance(job, BucketWork):
            begin, end = job.begin_seconds or launch, job.end_seconds or now
            # Staged, the thread waits for the device in between: how long the codec took is not known.
            details = (job.wait_seconds, job.codec_seconds if job is work else 0.0, max(1, job.rounds))
        else:
            begin, end, details = launch, self._done_seconds or now, (0.0, 0.0, 1)
        return BucketTimes(bucket.gradients.nbytes, bucket.sent_bytes, first, last, launch, begin, end, *details)


def _facts(bucket: Bucket, names: Sequence[str]) -> BucketFacts:
    nbytes, codec = bucket.gradients.nbytes, bucket.spec.to_text()
    return BucketFacts(nbytes, codec, tuple(names[index] for index in bucket.members))


def _refuse_difference(world: World, own: list[int], exchanges: int) -> None:
    """Raise `Mismatch` that names the ranks; to be called by all of them. `own`: steps, passes, epoch."""
    gathered = all_gather_json(world, "comparing optimizer steps", own)
    made, held, epochs = zip(*gathered, strict=True)
    if len(set(made)) > 1:
        text = f"different steps met in exchange {exchanges + 1}: optimizer steps made before it are "
        text += _by_value(world, made)
        remedy = (
            "in every step, the backward pass of every rank must reach the model (add 0 * model(x).sum() to a "
            "loss that does not), or no rank makes the step"
        )
    elif len(set(held)) > 1:
        text = f"different numbers of backward passes met in exchange {exchanges + 1}: {_by_value(world, held)}"
        remedy = "all ranks must be inside fd.accumulate for the same micro-batches"
    else:
        text = f"samples of different epochs met in exchange {exchanges + 1}: {_by_value(world, epochs)}"
        remedy = "iterate over the loader on all ranks alike, and give set_epoch the same number on all"
    raise Mismatch(f"gradients of {text}", rank=world.job_rank, operation="all-reduce", remedy=remedy)


def _by_value(world: World, values: Sequence[int]) -> str:
    by_rank = list(zip(world.job_ranks, values, strict=True))
    return ", ".join(
        f"{value} on {name_ranks([rank for rank, other in by_rank if other == value])}"
        for value in sorted(set(values))
    )


_numbers = count(-2, -1)  # those of autograd are not negative, and -1 is none
_joined: list[tuple[int, list[Callable[[], None]]]] = []
"""Numbers of those that run, and what is called at their ends."""


@contextmanager
def joined_passes() -> Iterator[None]:
    """Let the backward passes inside be one, which ends here; on an error it stays open, as an interrupted one."""
    ends: list[Callable[[], None]] = []
    _joined.append((next(_numbers), ends))
    try:
        yield
        for end in ends:  # an end may add another one
            end()
    finally:
        _joined.pop()


def number_of_pass() -> int:
    """Return the number of the backward pass that runs."""
    return _joined[-1][0] if _joined else torch._C._current_graph_task_id()


def at_end_of_pass(end: Callable[[], None]) -> None:
    """Call `end` when the backward pass that runs has ended."""
    if _joined:
        _joined[-1][1].append(end)
    else:
        torch.autograd.Variable._execution_engine.queue_callback(end)


# The route of one reducer, from the connection of its ranks to its end.
#
# [Note: what keeps a reducer alive] Its parameters do, in a model, a part of it or an optimizer. When the last of
# them is dropped, so is the reducer, and the thread that trains closes its connections (`Session.let_go`). torch
# keeps hooks where Python's collector cannot see them: a hook that knew the reducer would keep both for ever. So
# hooks know it weakly, and it hangs on the parameter as an attribute, which the collector sees.


class OpenRoute:
    """What a reducer has open between the ranks. It does not know the reducer, nor its parameters."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.route: Route | None = None
        self.name, self.reason = "none", "the ranks are not connected yet"
        """The route in use, and why it was chosen."""
        self.number: int | None = None
        """Which reducer of its world this is, in the order of connecting; None before."""
        self.is_closed = False
        """Whether gradients stay local from now on."""

    @property
    def is_missing(self) -> bool:
        """Whether the ranks are not connected yet."""
        return self.route is None and not self.is_closed

    def connect(
        self,
        table: ParameterTable,
        plan: Plan,
        *,
        codecs: list[str],
        needs_messages: bool,
        shards: bool = False,
        is_compared: bool = False,
    ) -> Route:
        """Compare the parameters, if they are not, and connect; called by all ranks.

        `codecs`: those that are asked for. `shards`: whether each rank gets a part of the sums alone.
        """
        facts = table.describe()
        if not is_compared:
            require_same(self._world, "comparing parameters", facts)
        self.number = int(self._world.topic("gradient reducer").rpartition("/")[2])
        refuse_messages(self._world, table.named, plan, codecs=codecs, shards=shards)
        self.route = connect_route(
            self._world,
            plan,
            device=device_of(table.parameters),
            needs_messages=needs_messages,
            parameter_bytes=sum(parameter.nbytes for parameter in table.parameters),
        )
        self.name, self.reason = self.route.route, self.route.reason
        return self.route

    def connect_messages(self, table: ParameterTable, plan: Plan) -> None:
        """Connect what codecs need, where it is not connected yet; called by all ranks."""
        before = self.require()
        self.route = before.with_messages(self._world, plan, device_of(table.parameters))
        if self.route is not before:
            self.reason = self.route.reason

    def require(self) -> Route:
        """Return the route; raise `CommError` when there is none any more."""
        if self.route is None:
            raise CommError(
                "the world was left before the exchange was over",
                rank=self._world.job_rank,
                operation="all-reduce",
                remedy="call farandole.shutdown() after the last step",
            )
        return self.route

    def close_with(self, reducer: object) -> weakref.finalize[..., object]:
        """Close soon after `reducer` is dropped, unless the answer is detached before."""
        when_dropped = weakref.finalize(reducer, self._world.session.let_go_later, self.close)
        when_dropped.atexit = False
        return when_dropped

    def leave(self) -> None:
        """Close the connections to ranks of which some are lost; `connect` may follow."""
        self.close()
        self.is_closed = False

    def close(self) -> None:
        """Close the connections."""
        route = self.route
        self.forget()
        if route is not None:
            route.close(self._world)

    def forget(self) -> None:
        """In a forked child: use no connection, and close none."""
        self.route, self.is_closed = None, True

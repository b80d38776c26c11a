"""The public face of the gradient reducer: what `parallel` and `horovod` ask.

`GradientReducer` hooks each parameter after its gradient is accumulated. A bucket whose members are all ready is
launched while backward still runs, in one order that all ranks agreed on; when backward ends, the rest is launched
and all is waited for. Not here: models, optimizers, buffers, files. Where to find what:

- `passes`: hooks, and what happens in a backward pass
- `in_flight`: buckets that are launched and not waited for
- `buckets`: which parameters travel together
- `guards`: what must not pass silently
- `tuning`: by which route, codecs and sizes gradients travel

[Note: one exchange a step] A front end may promise that gradients are exchanged exactly once between two steps
(`ReducerOptions`): then a rank whose backward pass touched nothing exchanges at the step, with `exchange`, and
a second gradient for a parameter whose mean has been taken is refused. Its ranks may also be in other phases when
the reducer is made, one still loading and another training, so nothing is sent to them before the first exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...core.bucket_plan import ExchangeKeys
from ...core.vocabulary.codec_spec import NONE, CodecSpec
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.events import Recorder
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import write_notice
from ..autotune.autotuner import Autotuner
from ..autotune.profile import Look, PassLog
from ..codecs import saved_state
from ..codecs.registry import require_packer
from ..device.streams import has_streams
from ..world.world import World
from .buckets import BucketSet
from .in_flight import InFlightBuckets
from .noise_sums import NoiseReading, NoiseSums
from .parameters import DEFAULT_OPTIONS, ExtraTensors, ReducerOptions, device_of, relink_hooks
from .passes import BackwardPasses
from .row_gather import LateRows, RowGather
from .tuning import ExchangeTuning


class GradientReducer:
    """Keeps the gradients of `parameters` equal on all ranks. One a model.

    Raises `Mismatch` on every rank when the ranks' parameters differ in name, order, shape or type.
    """

    def __init__(
        self,
        world: World,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        plan: Plan,
        options: ReducerOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.world = world
        device = device_of([parameter for _, parameter in parameters])
        plan = plan.with_bucket_bytes(on_device=has_streams(device))
        self.before_forward: Callable[[], None] | None = None
        """Called when a forward pass with gradients begins; raises what is wrong with the model."""
        buckets = self.buckets = BucketSet(
            world, parameters, plan, include_frozen=options.include_frozen, mesh=options.mesh
        )
        if buckets.codecs.why_useless and world.rank == 0:
            write_notice(f"{options.model}: {buckets.codecs.why_useless}")
        self.in_flight = InFlightBuckets(world, buckets)
        self.open_route = self.in_flight.open_route
        self.tuning = ExchangeTuning(world, plan, options, self.in_flight)
        self.passes = BackwardPasses(world, self.in_flight, self.tuning, self)
        self._when_dropped = self.open_route.close_with(self)
        if not options.lazy_init:
            self.tuning.connect()
        world.session.call_on_close(self.remove)
        world.session.call_in_forked_child(self.forget)
        for index, (_, parameter) in enumerate(parameters):
            if parameter.is_floating_point() or parameter.is_complex():
                self.passes.hook(index)
        world.session.batch_weight.subscribe(self.passes.local.share_changes)

    # -- queries -----------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan by which it was made."""
        return self.tuning.plan

    @property
    def route(self) -> str:
        """The route that gradients travel by; "none" before the ranks are connected."""
        return self.open_route.name

    @property
    def mesh(self) -> DeviceMesh | None:
        """All ranks, to which rows are divided; None where every rank has whole gradients."""
        return self.tuning.options.mesh

    @property
    def route_reason(self) -> str:
        """Why it was chosen."""
        return self.open_route.reason

    @property
    def tuner(self) -> Autotuner | None:
        """What chooses codecs, with codec "auto" where there is something to choose."""
        return self.tuning.tuner

    @property
    def bucket_bytes(self) -> list[int]:
        """Bytes of each bucket in launch order; empty before the first pass."""
        return [bucket.gradients.nbytes for bucket in self.buckets.buckets]

    @property
    def names_by_bucket(self) -> list[list[str]]:
        """Names of the parameters in each bucket in launch order; empty before the first pass."""
        names = self.buckets.table.names
        return [[names[index] for index in bucket.members] for bucket in self.buckets.buckets]

    @property
    def has_codecs(self) -> bool:
        """Whether some gradients are encoded by codecs, which may keep residuals."""
        return any(not bucket.spec.is_exact for bucket in self.buckets.buckets)

    @property
    def follows_loss_scale(self) -> bool:
        """Whether the scale of a `GradScaler` matters: to residuals of codecs, or to the noise scale."""
        return self.in_flight.noise is not None or self.has_codecs

    @property
    def is_open(self) -> bool:
        """Whether gradients are still exchanged."""
        return not self.open_route.is_closed

    @property
    def exchanges_done(self) -> int:
        """Exchanges since the reducer was made: the same on all ranks between two of them."""
        return self.passes.exchanges_done

    @property
    def accumulate(self) -> int:
        """Backward passes whose gradients are added up before an exchange."""
        return self.passes.accumulate

    @property
    def passes_held(self) -> int:
        """Backward passes whose gradients are to be exchanged with a later one's."""
        return self.passes.local.passes

    def divide_alone(self, more: int) -> None:
        """Leave `more` passes of the next exchange out of what is compared with the other ranks.

        For parts that this rank divides its batch into by itself; negative where it makes fewer than the others.
        """
        self.passes.local.forget_cleared()
        self.passes.local.uncounted = more

    @property
    def share_of_batch(self) -> float:
        """This rank's share of the samples in the last backward pass, over the mean share."""
        return self.passes.local.factor

    @property
    def step_is_skipped(self) -> bool:
        """Whether the plan skips the step that comes: gradients held NaN or infinity, and are gone."""
        return self.passes.guards.nonfinite.is_skipped

    @property
    def mean_is_finite(self) -> bool:
        """Whether the last exchange gave gradients without NaN and infinity; reads all of them."""
        return all(bucket.gradients.is_finite for bucket in self.buckets.buckets)

    # -- a step ------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Note when the first forward pass of a step begins; for the tuner's picture of a step."""
        if torch.is_grad_enabled():
            self.passes.local.forget_cleared()
            if self.before_forward is not None:
                self.before_forward()
        if self.tuning.marks is not None:
            self.tuning.marks.forward_begins()
        times = self.passes.current
        times.forward_begin_seconds = times.forward_begin_seconds or time.monotonic()

    def backward_begins(self) -> None:
        """Note when the model's backward pass begins, which is before its first gradient is ready."""
        self.passes.current.backward_seconds = time.monotonic()

    def call_after_exchange(self, call: Callable[[], None]) -> None:
        """Call `call` on all ranks after each exchange, when the gradients are the means."""
        self.passes.after_exchange = call

    def flush(self, is_dropped: Callable[[], bool] = lambda: False) -> None:
        """Exchange what was not exchanged yet; to be called by all ranks before an optimizer's step.

        There is nothing, unless the loop stepped after fewer than ``accumulate`` backward passes, or a backward
        pass was abandoned by an exception. `is_dropped`, asked then: whether the step will not use the gradients.
        """
        self.passes.finish_abandoned()
        if self.passes.guards.nonfinite.undecided and not is_dropped():
            self.passes.guards.nonfinite.commit()

    def exchange(self, *, contribute: bool = True, share: float | None = None) -> None:
        """Exchange now, whatever this rank has; to be called where other ranks' backward passes exchange.

        Without `contribute` this rank adds nothing to the others' gradients, and its own are lost. `share`: of the
        samples that the gradients are of, over the mean share; None: of the batch in use.
        """
        self.passes.exchange(contribute=contribute, share=share)

    def exchange_written(self, parameters: Sequence[torch.Tensor]) -> None:
        """Exchange gradients of `parameters` that no backward pass of this reducer's brought, if there are any.

        To be called by all ranks, where an optimizer is about to step and nothing was exchanged since its last
        step: gradients written by hand, or of parameters whose hooks went away (`swap_tensors`), are local.
        """
        buckets = self.buckets
        found = map(buckets.table.index_by_id.get, map(id, parameters))
        indices = [index for index in found if index is not None]
        if any(buckets.was_written(index) for index in indices):
            for index in indices:
                relink_hooks(buckets.table.parameters[index])
            self.exchange()

    def note_used(self) -> None:
        """An optimizer steps with the gradients as they are."""
        for bucket in self.buckets.buckets:
            bucket.gradients.note_used()

    @property
    def packs_rows(self) -> bool:
        """Whether the plan packs parameters on their way to other hosts, and there are some."""
        route = self.open_route.require()
        return self.plan.weight_codec != NONE and route.route != "shared"

    def row_gather(
        self, parameters: Sequence[torch.Tensor], exact: Sequence[torch.Tensor | None] | None = None
    ) -> RowGather:
        """Return what gives all ranks each rank's rows of `parameters`; to be called by all ranks alike.

        `exact`: this rank's exact rows of those whose changes travel packed; None: none do.
        """
        packed = None if exact is None else (require_packer(CodecSpec.parse(self.plan.weight_codec)), exact)
        return RowGather(self.world, self.open_route.require(), parameters, packed=packed)

    def late_rows(self) -> LateRows:
        """Return what makes readers wait for parameters that are still on their way."""
        return self.world.session.keep(LateRows, partial(LateRows, self.world))

    def note_step(self) -> None:
        """An optimizer that uses these gradients steps: counted, and compared between the ranks."""
        self.passes.steps_begun += 1

    def begin_step(self, *, accumulate: int | None = None) -> None:
        """Allow every parameter its next gradient, and count passes from zero; see [Note: one exchange a step].

        `accumulate`: another number of passes before an exchange, on all ranks.
        """
        self.passes.guards.second_gradient.begin_step()
        self.passes.local.passes = 0
        self.passes.accumulate = accumulate or self.passes.accumulate

    @torch.no_grad()
    def zero_missing_grads(self) -> None:
        """Give zeros to members of dense buckets without a gradient."""
        for bucket in self.buckets.buckets:
            bucket.gradients.zero_missing()

    # -- settings ----------------------------------------------------------------------------

    def add_extra_tensors(self, extra: ExtraTensors) -> None:
        """Take `extra` along from the first exchange on; to be called before it."""
        self.in_flight.add_extra_tensors(extra)

    def measure_noise(
        self, take: Callable[[NoiseReading], None], *, every: int = 1, samples: int | None = None
    ) -> NoiseSums:
        """Call `take` with the squares of gradients of one of `every` steps; to be called by all ranks alike.

        Replaces an earlier call. `samples`: of a backward pass of this rank; None: as the loader of `fd.shard`
        says. Raises `ConfigError` during a backward pass.
        """
        if self.in_flight.is_exchanging or self.passes.local.passes:
            raise ConfigError("noise_scale: gradients are on their way", remedy="call it between two steps")
        noise = NoiseSums(self.world, every=every, samples=samples, take=take)
        self.in_flight.measure(noise)
        return noise

    def watch(self, watcher: Recorder) -> None:
        """Tell `watcher` of the exchanges of this reducer alone; the world's recorder takes those of all."""
        self.in_flight.watcher = watcher

    def switch_codecs(self, codecs: Mapping[str, CodecSpec], *, bucket_bytes: int | None = None) -> None:
        """Let the named parameters travel by other codecs, from the next exchange on.

        To be called by all ranks, with the same arguments, between two steps. `bucket_bytes` changes the size
        of all buckets. What the old codecs have not sent is added to the next gradient; the rest of their state
        (velocities, factors) is dropped. Gradients that are sparse stay exact. Raises `ConfigError` for a name
        that is no parameter's, `PlanError` for a codec that a parameter cannot have, and `Mismatch`, on every
        rank, when the ranks ask for different ones.
        """
        self.tuning.switch_codecs(codecs, bucket_bytes)

    def keep_timings(self) -> PassLog:
        """Keep the times of the newest exchanges from now on; return where."""
        self.tuning.log = self.tuning.log or PassLog()
        return self.tuning.log

    def look(self, *, lossy: bool) -> Look | None:
        """Measure what steps by other keys of the exchange are predicted by; called by all ranks between steps.

        `lossy`: measure codecs, too. None where links cannot be measured: before the first exchange whose times
        were kept, and with a model on an accelerator.
        """
        return self.tuning.look(lossy=lossy)

    def switch_keys(self, keys: ExchangeKeys) -> None:
        """Exchange gradients by other keys from now on; called by all ranks, with the same, between two steps.

        What codecs have not sent is carried over as by `switch_codecs`. Raises `ConfigError` or `PlanError`, and
        leaves all as it is, for what this world or a parameter cannot have.
        """
        self.tuning.switch_keys(keys)

    def follow_loss_scale(self, read: Callable[[], float]) -> None:
        """Take the scale of gradients from `read`: that of a `GradScaler`; it returns 0.0 for unknown."""
        if self.has_codecs:
            self.passes.local.loss_scale.follow(read)
        if self.in_flight.noise is not None:
            self.in_flight.noise.loss_scale = read

    def add_extra_gradient(self, name: str, extra: tuple[torch.Tensor, float] | None) -> None:
        """Add a tensor times a number to the named parameter's next gradient that is exchanged; None: nothing.

        Replaces an earlier call. The tensor is read when the gradient is ready. Must be equal on all ranks, or it
        is averaged.
        """
        self.buckets.carry_over.add_extra_gradient(self.buckets.table.index_of[name], extra)

    def has_pending(self, name: str) -> bool:
        """Return whether an extra gradient has not been added to a gradient yet."""
        return self.buckets.carry_over.has_pending(self.buckets.table.index_of[name])

    def exchange_state(self) -> dict[str, saved_state.Entry]:
        """Return what codecs keep on this rank, by parameter; called by all ranks."""
        self.in_flight.compare_late_steps()
        return self.buckets.state()

    def load_exchange_state(self, entries: dict[str, saved_state.Entry]) -> None:
        """Replace what codecs keep; entries of parameters without a bucket wait for it."""
        self.passes.guards.nonfinite.commit()
        self.buckets.load_state(entries)

    def reconnect(self) -> None:
        """Exchange with the ranks that the world has now; called by all of them, after `OpenRoute.leave`."""
        self.passes.divisor = float(self.world.size)
        if self.world.size == 1:
            self.remove()
            return
        if self.tuning.tuner is not None:
            self.tuning.tuner.close()
        self.tuning.connect()
        self.buckets.remake(self.tuning.route_of_new_buckets())

    # -- the end -----------------------------------------------------------------------------

    def remove(self) -> None:
        """Remove the hooks and leave the group; gradients stay local from now on."""
        late = self.world.session.kept(LateRows)
        if late is not None:
            late.finish()
        self.passes.unhook()
        on_device = self.in_flight.on_device
        if on_device is not None and on_device.is_known_to_differ():
            write_notice(f"{self.tuning.options.model}: gradients of different steps met in the last exchange")
        self.in_flight.drop()
        if self.tuning.tuner is not None:
            self.tuning.tuner.close()
        self._when_dropped.detach()
        self.open_route.close()

    def forget(self) -> None:
        """In a forked child: gradients are this process's own, and no connection is used."""
        self.passes.unhook()
        self.in_flight.drop()
        self._when_dropped.detach()
        self.open_route.forget()
        self.tuning.tuner = None

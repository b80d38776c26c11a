"""The parts of one reducer, one question each, and what several of them do together: connect, switch codecs.

See [Note: one exchange a step] in `reducer`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...core.bucket_plan import ExchangeKeys
from ...core.vocabulary.codec_spec import AUTO, NONE, CodecSpec
from ...core.vocabulary.errors import CommError, ConfigError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import name_ranks, write_notice
from ..autotune.autotuner import Autotuner
from ..autotune.on_device import DeviceAutotuner, DeviceMeasures
from ..autotune.profile import Look, PassLog, PassTimings, look
from ..codecs.registry import choose_codec
from ..routes import TRIED_CONNECTIONS, Route
from ..world.store_sync import all_gather_json
from ..world.world import World
from .bucket import Bucket
from .bucket_set import BucketSet
from .grad_ownership import LocalAccumulation, LossScale, drop_grads
from .in_flight import InFlightBuckets, OpenRoute
from .options import ReducerOptions, device_of, refuse_messages, refused_candidates


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


@dataclass(eq=False)
class ReducerParts:
    """Shared by the public face (`GradientReducer`) and the backward passes (`BackwardPasses`)."""

    # - Configuration
    world: World
    plan: Plan
    options: ReducerOptions
    # - Between the ranks
    buckets: BucketSet
    open_route: OpenRoute = field(init=False)
    in_flight: InFlightBuckets = field(init=False)
    tuner: Autotuner | None = field(init=False, default=None)
    marks: DeviceMeasures | None = field(init=False, default=None)
    """Where steps on a device are profiled, while they are."""
    log: PassLog | None = field(init=False, default=None)
    """What a tuner of the whole job asks for."""
    keys: ExchangeKeys | None = field(init=False, default=None)
    """What such a tuner has switched to last."""
    # - This rank's gradients
    local: LocalAccumulation = field(init=False)
    loss_scale: LossScale = field(init=False)
    # - Guards
    single: SingleGradientGuard = field(init=False)
    nonfinite: NonFiniteGuard = field(init=False)

    def __post_init__(self) -> None:
        self.open_route = OpenRoute(self.world)
        self.in_flight = InFlightBuckets(self.world, self.buckets, self.open_route)
        self.local = LocalAccumulation(self.buckets.table.parameters)
        self.loss_scale = LossScale()
        self.single = SingleGradientGuard(self.options)
        self.nonfinite = NonFiniteGuard(self.world, self.buckets, self.plan.nonfinite)

    def connect(self) -> None:
        """Compare the parameters and connect to the other ranks; called by all of them."""
        self.options.before_connecting()
        codecs = self.buckets.codecs
        route = self.open_route.connect(
            self.buckets.table,
            self.plan,
            is_compared=self.options.is_compared,
            codecs=codecs.requested,
            shards=self.options.mesh is not None,
            needs_messages=codecs.needs_messages or self.options.mesh is not None,
        )
        self._say_what_is_exact(route, codecs.requested)
        # Where memory is shared there is nothing to choose.
        is_tuned = self.plan.codec == AUTO and route.route in ("flat", "hierarchical")
        if is_tuned:
            named, request = self.buckets.table.named, self.buckets.probe_request
            if route.on_device is None:
                self.tuner = Autotuner(self.world, self.plan, route, named, request, model=self.options.model)
            else:
                left_out = refused_candidates(self.world, named, self.plan)
                self.marks = DeviceMeasures(self.world, route, self.buckets.table.parameters, left_out=left_out)
                self.tuner = DeviceAutotuner(
                    self.world, self.plan, route, named, request, model=self.options.model, measures=self.marks
                )
        codecs.set_default_codec(route, always=is_tuned and route.on_device is None)

    def _say_what_is_exact(self, route: Route, requested: Sequence[str]) -> None:
        if self.options.mesh is None or route.route != "shared" or self.world.rank:
            return
        of_codec = "codec" if self.plan.codec != NONE else "codec_for"
        keys = {of_codec: requested, "weight_codec": self.plan.weight_codec != NONE}
        if named := ", ".join(
            f"{key} = {getattr(self.plan, key)!r}" for key, is_asked in keys.items() if is_asked
        ):
            write_notice(
                f"{self.options.model}: {named} changes nothing here: at zero = {self.plan.zero} ranks of one "
                "host exchange exactly, in shared memory"
            )

    def route_of_new_buckets(self) -> Route:
        """Return the route that codec "auto" chose, where it chooses; else the one there is."""
        route = self.open_route.require()
        if self.keys is not None:
            return self.routes[self.keys.route]
        return route if self.tuner is None else self.tuner.lines

    @property
    def routes(self) -> dict[str, Route]:
        """What gradients could travel by: the route of the world, and without its memory."""
        route = self.open_route.require()
        found: dict[str, Route] = {route.route: route}
        if route.memory is not None:
            found["flat"] = route.without_memory("farandole tune tries it")
        return found

    def switch_codecs(self, codecs: Mapping[str, CodecSpec], bucket_bytes: int | None = None) -> None:
        """See `GradientReducer.switch_codecs`."""
        changed = self.buckets.changes(codecs)
        if self.options.mesh is not None and changed:
            raise ConfigError(
                f"codecs are not switched while shards travel (zero = {self.plan.zero})",
                remedy="name them in the plan",
            )
        if self.in_flight.is_exchanging:
            raise ConfigError("codecs are switched between two steps, not during a backward pass")
        requested = [spec.to_text() for spec in changed.values() if not spec.is_exact]
        if requested:
            table = self.buckets.table
            named = [(name, table.parameters[table.index_of[name]]) for name in changed]
            refuse_messages(self.world, named, self.plan, codecs=requested)
            self.open_route.connect_messages(table, self.plan)
        self.buckets.rebuild_buckets(changed, bucket_bytes, self.route_of_new_buckets())

    def look(self, *, lossy: bool) -> Look | None:
        """See `GradientReducer.look`."""
        places = all_gather_json(self.world, "devices to tune", device_of(self.buckets.table.parameters).type)
        if self.log is None or not self.log.passes or set(places) != {"cpu"}:
            return None
        self.open_route.connect_messages(self.buckets.table, self.plan)
        return look(self.world, self.plan, self.routes, self.buckets.table.named, self.log, lossy=lossy)

    def switch_keys(self, keys: ExchangeKeys) -> None:
        """See `GradientReducer.switch_keys`."""
        if self.in_flight.is_exchanging:
            raise ConfigError("the exchange is switched between two steps, not during a backward pass")
        if keys.route not in self.routes:
            raise ConfigError(f"route {keys.route!r}: this job has {' and '.join(self.routes)}")
        most = max(self.plan.connections, *TRIED_CONNECTIONS)
        if not 1 <= keys.connections <= most:
            raise ConfigError(f"connections = {keys.connections}: this job has {most} between two ranks")
        table, plan = self.buckets.table, keys.on(self.plan)
        codecs = {name: choose_codec(name, parameter, plan) for name, parameter in table.named}
        requested = [spec.to_text() for spec in codecs.values() if not spec.is_exact]
        if requested:
            refuse_messages(self.world, table.named, plan, codecs=requested)
            self.open_route.connect_messages(table, plan)
        changed = self.buckets.changes(codecs)
        lines, conductor = self.routes[keys.route], self.open_route.require().conductor
        if conductor is not None and conductor.has_transport:
            conductor.run(lambda transport: setattr(transport, "used_lanes", keys.connections))
        self.keys, self.open_route.name, self.open_route.reason = keys, lines.route, lines.reason
        self.buckets.codecs.set_default_codec(lines, always=False)
        self.buckets.rebuild_buckets(changed, keys.bucket_bytes, lines, first_bucket_bytes=keys.first_bucket_bytes)

    def take_times(self, timings: PassTimings) -> None:
        """Tell who tunes of an exchange, and switch to what codec "auto" chooses."""
        if self.log is not None:
            self.log.take(timings)
        choice = None if self.tuner is None else self.tuner.after_exchange(timings)
        if self.marks is not None and self.marks.is_over:
            self.marks = None
        if self.tuner is not None and choice is not None:
            self.open_route.name, self.open_route.reason = self.tuner.lines.route, self.tuner.lines.reason
            codecs = {name: CodecSpec.parse(codec) for name, codec in choice.codecs.items()}
            self.switch_codecs(codecs, choice.bucket_bytes)


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

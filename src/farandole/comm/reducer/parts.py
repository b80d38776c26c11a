"""The parts of one reducer, one question each, and what several of them do together: connect, switch codecs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.vocabulary.codec_spec import AUTO, CodecSpec
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.spec import Plan
from ..autotune.autotuner import Autotuner, PassTimings
from ..buckets.bucket_set import BucketSet
from ..gradients.local_accumulation import LocalAccumulation
from ..gradients.loss_scale import LossScale
from ..routes.route import Route
from ..world.world import World
from .accelerators import refuse_messages
from .in_flight import InFlightBuckets
from .nonfinite import NonFiniteGuard
from .open_route import OpenRoute
from .options import ReducerOptions
from .single_gradient import SingleGradientGuard


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
            self.buckets.table, self.plan, codecs=codecs.requested, needs_messages=codecs.needs_messages
        )
        # Where memory is shared there is nothing to choose.
        is_tuned = self.plan.codec == AUTO and route.route in ("flat", "hierarchical")
        if is_tuned:
            named, request = self.buckets.table.named, self.buckets.probe_request
            self.tuner = Autotuner(self.world, self.plan, route, named, request, model=self.options.model)
        codecs.set_default_codec(route, always=is_tuned)

    def route_of_new_buckets(self) -> Route:
        """Return the route that codec "auto" chose, where it chooses; else the one there is."""
        route = self.open_route.require()
        return route if self.tuner is None else self.tuner.lines

    def switch_codecs(self, codecs: Mapping[str, CodecSpec], bucket_bytes: int | None = None) -> None:
        """See `GradientReducer.switch_codecs`."""
        changed = self.buckets.changes(codecs)
        if self.in_flight.is_exchanging:
            raise ConfigError("codecs are switched between two steps, not during a backward pass")
        requested = [spec.to_text() for spec in changed.values() if not spec.is_exact]
        if requested:
            table = self.buckets.table
            named = [(name, table.parameters[table.index_of[name]]) for name in changed]
            refuse_messages(self.world, named, self.plan, codecs=requested)
            self.open_route.connect_messages(self.plan)
        self.buckets.rebuild_buckets(changed, bucket_bytes, self.route_of_new_buckets())

    def tune(self, tuner: Autotuner, timings: PassTimings) -> None:
        """Tell the tuner of an exchange, and switch to what it chooses."""
        choice = tuner.after_exchange(timings)
        if choice is not None:
            self.open_route.name, self.open_route.reason = tuner.lines.route, tuner.lines.reason
            codecs = {name: CodecSpec.parse(codec) for name, codec in choice.codecs.items()}
            self.switch_codecs(codecs, choice.bucket_bytes)

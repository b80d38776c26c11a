"""By which route, codecs and sizes one reducer's gradients travel: connected, measured, switched between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core.bucket_plan import ExchangeKeys
from ...core.vocabulary.codec_spec import AUTO, NONE, CodecSpec
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import write_notice
from ..autotune.autotuner import Autotuner
from ..autotune.on_device import DeviceAutotuner, DeviceMeasures
from ..autotune.profile import Look, PassLog, PassTimings, look
from ..codecs.registry import choose_codec
from ..routes import TRIED_CONNECTIONS, Route
from ..world.store_sync import all_gather_json
from ..world.world import World
from .guards import refuse_messages, refused_candidates
from .in_flight import InFlightBuckets
from .parameters import ReducerOptions, device_of


class ExchangeTuning:
    """How one reducer's gradients travel, and who changes it: codec "auto", a tuner of the whole job, a call."""

    def __init__(self, world: World, plan: Plan, options: ReducerOptions, in_flight: InFlightBuckets) -> None:
        self._world, self.plan, self.options = world, plan, options
        self._in_flight, self._buckets, self._open_route = in_flight, in_flight.buckets, in_flight.open_route
        self.tuner: Autotuner | None = None
        self.marks: DeviceMeasures | None = None
        """Where steps on a device are profiled, while they are."""
        self.log: PassLog | None = None
        """What a tuner of the whole job asks for."""
        self.keys: ExchangeKeys | None = None
        """What such a tuner has switched to last."""

    def connect(self) -> None:
        """Compare the parameters and connect to the other ranks; called by all of them."""
        self.options.before_connecting()
        codecs = self._buckets.codecs
        route = self._open_route.connect(
            self._buckets.table,
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
            named, request = self._buckets.table.named, self._buckets.probe_request
            if route.on_device is None:
                self.tuner = Autotuner(self._world, self.plan, route, named, request, model=self.options.model)
            else:
                left_out = refused_candidates(self._world, named, self.plan)
                self.marks = DeviceMeasures(self._world, route, self._buckets.table.parameters, left_out=left_out)
                self.tuner = DeviceAutotuner(
                    self._world, self.plan, route, named, request, model=self.options.model, measures=self.marks
                )
        codecs.set_default_codec(route, always=is_tuned and route.on_device is None)

    def _say_what_is_exact(self, route: Route, requested: Sequence[str]) -> None:
        if self.options.mesh is None or route.route != "shared" or self._world.rank:
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
        route = self._open_route.require()
        if self.keys is not None:
            return self.routes[self.keys.route]
        return route if self.tuner is None else self.tuner.lines

    @property
    def routes(self) -> dict[str, Route]:
        """What gradients could travel by: the route of the world, and without its memory."""
        route = self._open_route.require()
        found: dict[str, Route] = {route.route: route}
        if route.memory is not None:
            found["flat"] = route.without_memory("farandole tune tries it")
        return found

    def switch_codecs(self, codecs: Mapping[str, CodecSpec], bucket_bytes: int | None = None) -> None:
        """See `GradientReducer.switch_codecs`."""
        changed = self._buckets.changes(codecs)
        if self.options.mesh is not None and changed:
            raise ConfigError(
                f"codecs are not switched while shards travel (zero = {self.plan.zero})",
                remedy="name them in the plan",
            )
        if self._in_flight.is_exchanging:
            raise ConfigError("codecs are switched between two steps, not during a backward pass")
        requested = [spec.to_text() for spec in changed.values() if not spec.is_exact]
        if requested:
            table = self._buckets.table
            named = [(name, table.parameters[table.index_of[name]]) for name in changed]
            refuse_messages(self._world, named, self.plan, codecs=requested)
            self._open_route.connect_messages(table, self.plan)
        self._buckets.rebuild_buckets(changed, bucket_bytes, self.route_of_new_buckets())

    def look(self, *, lossy: bool) -> Look | None:
        """See `GradientReducer.look`."""
        places = all_gather_json(self._world, "devices to tune", device_of(self._buckets.table.parameters).type)
        if self.log is None or not self.log.passes or set(places) != {"cpu"}:
            return None
        self._open_route.connect_messages(self._buckets.table, self.plan)
        return look(self._world, self.plan, self.routes, self._buckets.table.named, self.log, lossy=lossy)

    def switch_keys(self, keys: ExchangeKeys) -> None:
        """See `GradientReducer.switch_keys`."""
        if self._in_flight.is_exchanging:
            raise ConfigError("the exchange is switched between two steps, not during a backward pass")
        if keys.route not in self.routes:
            raise ConfigError(f"route {keys.route!r}: this job has {' and '.join(self.routes)}")
        most = max(self.plan.connections, *TRIED_CONNECTIONS)
        if not 1 <= keys.connections <= most:
            raise ConfigError(f"connections = {keys.connections}: this job has {most} between two ranks")
        table, plan = self._buckets.table, keys.on(self.plan)
        codecs = {name: choose_codec(name, parameter, plan) for name, parameter in table.named}
        requested = [spec.to_text() for spec in codecs.values() if not spec.is_exact]
        if requested:
            refuse_messages(self._world, table.named, plan, codecs=requested)
            self._open_route.connect_messages(table, plan)
        changed = self._buckets.changes(codecs)
        lines, conductor = self.routes[keys.route], self._open_route.require().conductor
        if conductor is not None and conductor.has_transport:
            conductor.run(lambda transport: setattr(transport, "used_lanes", keys.connections))
        self.keys, self._open_route.name, self._open_route.reason = keys, lines.route, lines.reason
        self._buckets.codecs.set_default_codec(lines, always=False)
        first_bytes = keys.first_bucket_bytes
        self._buckets.rebuild_buckets(changed, keys.bucket_bytes, lines, first_bucket_bytes=first_bytes)

    def take_times(self, timings: PassTimings) -> None:
        """Tell who tunes of an exchange, and switch to what codec "auto" chooses."""
        if self.log is not None:
            self.log.take(timings)
        choice = None if self.tuner is None else self.tuner.after_exchange(timings)
        if self.marks is not None and self.marks.is_over:
            self.marks = None
        if self.tuner is not None and choice is not None:
            self._open_route.name, self._open_route.reason = self.tuner.lines.route, self.tuner.lines.reason
            codecs = {name: CodecSpec.parse(codec) for name, codec in choice.codecs.items()}
            self.switch_codecs(codecs, choice.bucket_bytes)

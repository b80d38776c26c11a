"""The route of one reducer, from the connection of its ranks to its end.

[Note: what keeps a reducer alive] Its parameters do, in a model, a part of it or an optimizer. When
the last of them is dropped, so is the reducer, and the thread that trains closes its connections
(`Session.let_go`). torch keeps hooks where Python's collector cannot see them: a hook that knew the reducer would
keep both for ever. So hooks know it weakly, and it hangs on the parameter as an attribute, which the collector
sees.
"""

from __future__ import annotations

import weakref

from ...core.vocabulary.errors import CommError
from ...core.vocabulary.spec import Plan
from ..gradients.parameters import ParameterTable
from ..routes import Route, connect_route
from ..world.store_sync import require_same
from ..world.world import World
from .accelerators import device_of, refuse_messages


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

    def close(self) -> None:
        """Close the connections."""
        route = self.route
        self.forget()
        if route is not None:
            route.close(self._world)

    def forget(self) -> None:
        """In a forked child: use no connection, and close none."""
        self.route, self.is_closed = None, True

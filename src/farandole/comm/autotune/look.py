"""What the keys of the exchange are chosen by: the profile of a step, and the links of its routes.

Shared by `autotuner` and the online tuner of `train`, which asks for a `Look` between two steps.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...core.step_model.link import LinkModel
from ...core.step_model.prediction import StepProfile
from ...core.vocabulary.spec import Plan
from ..routes import Route
from ..transport.transport import Transport
from ..world.world import World
from .probe import probe_bytes, probe_intra_host, probe_link
from .profile import Parameters, PassTimings, gather_profiles, local_times

_KEPT_PASSES = 5
_NO_LINK = LinkModel(float("inf"), 0.0)
"""That of a route which crosses none."""


@dataclass(frozen=True)
class Look:
    """A step without its exchange and the links, by route: the same on all ranks."""

    profiles: Mapping[str, StepProfile]
    links: Mapping[str, LinkModel]


class PassLog:
    """The newest exchanges of one reducer."""

    def __init__(self) -> None:
        self.passes: deque[PassTimings] = deque(maxlen=_KEPT_PASSES)

    def take(self, seen: PassTimings) -> None:
        """Take the last exchange into account."""
        self.passes.append(seen)

    @property
    def wait_seconds(self) -> float:
        """How long this rank waited at the ends of these backward passes: the median, 0.0 without a pass."""
        waits = [each.wait_end_seconds - each.wait_begin_seconds for each in self.passes]
        return statistics.median(waits) if waits else 0.0


def measure_links(transport: Transport, routes: Mapping[str, Route], gradient_bytes: int) -> dict[str, LinkModel]:
    """Return the link as each route uses it, the same on all ranks; called by all of them at once."""
    found = {}
    for route, lines in routes.items():
        # A short one says how long a good one is: what the link carried before it became slow takes too long.
        short = probe_link(transport, lines.circle, lines.everyone, probe_bytes(None, gradient_bytes))
        found[route] = probe_link(transport, lines.circle, lines.everyone, probe_bytes(short, gradient_bytes))
    return found


def look(
    world: World, plan: Plan, routes: Mapping[str, Route], parameters: Parameters, log: PassLog, *, lossy: bool
) -> Look:
    """Measure what is needed to predict steps by any of `routes`, which have one conductor with a transport.

    Called by all ranks between two steps. `lossy`: measure codecs, too.
    """
    first = next(iter(routes.values()))
    conductor = first.conductor
    assert conductor is not None, "the caller has connected it"
    memory = first.memory
    intra_host = (0.0, 0.0) if memory is None else conductor.run(lambda _: probe_intra_host(memory))
    crossing = {name: lines for name, lines in routes.items() if name != "shared"}
    gradient_bytes = sum(parameter.nbytes for _, parameter in parameters if parameter.requires_grad)
    links = conductor.run(lambda transport: measure_links(transport, crossing, gradient_bytes))
    profiles = gather_profiles(
        world, replace(plan, lossy=lossy), routes, parameters, local_times(list(log.passes), intra_host)
    )
    return Look(profiles, {**dict.fromkeys(set(routes) - set(crossing), _NO_LINK), **links})

"""What codec "auto" measures where gradients are on a device: by marks on its streams, read when all is over.

In profiled steps the host puts a mark into the stream where it would have read the clock, and waits for nothing.
It waits once, between two steps, when all ranks choose: for the marks, and for what measures link and codecs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.link import LinkModel
from ...core.step_model import CodecSpeed, StepProfile
from ...core.vocabulary.spec import Plan
from ..messages import Message
from ..routes import Route
from ..transport.staged_conductor import StreamConductor
from ..world.store_sync import all_gather_json
from ..world.world import World
from .autotuner import PROFILED_STEPS, Autotuner, CodecChoice
from .probe import ProbeRequest, measure_codecs, probe_intra_host
from .profile import Parameters, PassTimings, gather_profiles, local_times

_LARGEST_BYTES = 64 * 2**20
"""A message that is long enough for any link of a device."""
_ROUNDS = 5
_ZERO_SECONDS = 1.0
"""The moment of a step's first mark; 0.0 stands for "not at all"."""


@dataclass
class _Marks:
    """The marks of one step."""

    forward: Any = None
    backward: Any = None
    wait_begin: Any = None
    wait_end: Any = None
    ready: dict[int, Any] = field(default_factory=dict)
    """By parameter."""


class DeviceMeasures:
    """One reducer's. What is marked goes to the current stream of the thread that trains, or of a hook."""

    def __init__(
        self, world: World, route: Route, parameters: Sequence[torch.Tensor], *, left_out: Sequence[str]
    ) -> None:
        """`left_out`: candidates that these devices cannot have."""
        assert route.on_device is not None, "its gradients are on a device"
        self._world, self._left_out = world, left_out
        self._circle, self._hosts = route.slices[0], route.on_hosts
        self._conductor: StreamConductor = route.on_device
        self._device, self._parameters = parameters[0].device, len(parameters)
        self._now = _Marks()
        self._marked: list[_Marks] = []
        self.is_over = False
        """Whether nothing is marked any more."""

    # -- marks of a step -----------------------------------------------------------------------

    def forward_begins(self) -> None:
        """The first forward pass of a step begins."""
        if self._now.forward is None:
            self._now.forward = self._mark()

    def backward_begins(self) -> None:
        """The first gradient of a pass is ready."""
        self.forward_begins()
        self._now.backward, self._now.ready = self._mark(), {}

    def is_ready(self, index: int) -> None:
        """The gradient of a parameter is ready."""
        self._now.ready[index] = self._mark()

    def wait_begins(self) -> None:
        """All gradients are ready, and the means are waited for."""
        self._now.wait_begin = self._mark()

    def wait_ends(self) -> None:
        """The means are there: the step's exchange is over."""
        self._now.wait_end = self._mark()
        step, self._now = self._now, _Marks()
        if step.backward is not None:
            self._marked.append(step)

    def passes(self) -> list[PassTimings]:
        """Return the steps that were marked; the host waits for the device. Nothing is marked from now on."""
        self.is_over = True
        marked, self._marked = self._marked, []
        return [self._timings(step) for step in marked]

    def _timings(self, step: _Marks) -> PassTimings:
        def at(mark: Any) -> float:
            return _ZERO_SECONDS + self._conductor.streams.seconds_between(step.forward, mark)

        ready = [at(step.ready[index]) if index in step.ready else 0.0 for index in range(self._parameters)]
        return PassTimings(_ZERO_SECONDS, at(step.backward), at(step.wait_begin), at(step.wait_end), ready)

    def _mark(self) -> Any:
        return self._conductor.streams.mark()

    # -- between two steps ---------------------------------------------------------------------

    def link(self, gradient_bytes: int) -> LinkModel:
        """Return what each rank gets while all exchange, the same on all; called by all at once."""
        size = self._circle.seat.size
        length = max(1, min(_LARGEST_BYTES, gradient_bytes) // size)
        small, large = (torch.zeros(size, each, dtype=torch.uint8, device=self._device) for each in (8, length))
        moved = length * (size - 1)
        waits, times = (
            [self._conductor.seconds_of(Message(rows, "all_to_all"), self._circle) for _ in range(_ROUNDS)][1:]
            for rows in (small, large)
        )
        # The best of some: what lengthens one is a rank that began late.
        mine = [min(waits), max(1e-9, min(times) - min(waits) / 2) / moved]
        everyone = all_gather_json(self._world, "measuring the link of devices", mine)
        wait_seconds, byte_seconds = (max(each) for each in zip(*everyone, strict=True))
        return LinkModel(1 / byte_seconds, wait_seconds, pair_seconds=wait_seconds)

    def inside(self) -> tuple[float, float]:
        """Return what adding up among the ranks of a host takes: see `probe_intra_host`; called by all at once."""
        return (0.0, 0.0) if self._hosts is None else probe_intra_host(self._hosts.inside, self._seconds_of)

    def _seconds_of(self, work: Callable[[], object]) -> float:
        begin = self._mark()
        work()
        return self._conductor.streams.seconds_between(begin, self._mark())

    def speeds(self, names: tuple[str, ...], size: int) -> dict[str, CodecSpeed]:
        """Return what codecs cost this device, without those that it cannot have."""
        named = tuple(name for name in names if name not in self._left_out)
        return measure_codecs(named, size, self._device)


class DeviceAutotuner(Autotuner):
    """Chooses once: the clock of a host that runs ahead of its device says nothing of the steps that follow."""

    def __init__(
        self,
        world: World,
        plan: Plan,
        lines: Route,
        parameters: Parameters,
        request: ProbeRequest,
        *,
        model: str,
        measures: DeviceMeasures,
    ) -> None:
        """See `Autotuner`."""
        super().__init__(world, plan, lines, parameters, request, model=model)
        self._measures = measures

    def after_exchange(self, seen: PassTimings) -> CodecChoice | None:
        """See `Autotuner`."""
        return None if self._profiles else self._after(seen, requested=False)

    def _find_links(self) -> dict[str, LinkModel]:
        return {self._first.route: self._measures.link(self._gradient_bytes)}

    def _sum_by_link(self, choice: CodecChoice) -> None:
        """Sums go as the backend has them."""

    def _connections(self) -> str:
        return ""

    def _gather_profiles(self) -> dict[str, StepProfile]:
        seen = self._measures.passes()[-PROFILED_STEPS:] or self._passes[1:]
        return gather_profiles(
            self._world, self._plan, self._routes, self._parameters, local_times(seen, self._measures.inside()),
            measure=self._measures.speeds, on_device=True,
        )  # fmt: skip

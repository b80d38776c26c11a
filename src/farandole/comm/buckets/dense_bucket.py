"""A dense bucket: several gradients side by side in one flat tensor, which is what travels.

[Note: used mask] A parameter unused on this rank contributes zeros. Whether the others used it decides if its
gradient is a number or stays None, which an optimizer with momentum or weight decay treats differently. Each
bucket therefore ends with one element a parameter, 1 where the rank had a gradient: after the sum, 0 means that
no rank had one. DDP calls it the local used map.

[Note: one step off] A rank whose loss once did not reach the model exchanges nothing in that step. Its next
exchange would meet the others' old one, and from then on step k of one rank be added to step k + 1 of another.
So the first bucket also says how many steps the rank's optimizers have made, as bits: for each one number that is
1 where the bit is set and one that is 1 where it is not. After the sum, of any type and however rounded, ranks
differ where both are more than 0. The number of passes that a loop accumulates (`fd.accumulate`) and
the epoch of the samples are part of the number, so that ranks that exchange after different passes, or shuffle by
different epochs, differ, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ...core.step_model.comm_cost import ring_sent_bytes
from ..collectives.backend import start_all_reduce
from ..device.streams import streams_of
from ..gradients.grad_ownership import FlatGradients
from ..gradients.parameters import Layout
from ..gradients.squares import square_sum
from ..host_memory.shared_tensor import SharedMemory, SharedTensor
from ..routes.route import Route
from .bucket import Bucket, Waitable
from .step_marks import MARKS, LateMarks, marks_differ, marks_of


class DenseBucket(Bucket):
    """Gradients of one dtype in one flat tensor, which is sent as it is."""

    gradients: FlatGradients
    kind: type[FlatGradients] = FlatGradients
    """What the gradients are made as."""

    def __init__(
        self,
        members: list[int],
        parameters: Sequence[torch.nn.Parameter],
        layouts: Sequence[Layout],
        size: int,
        *,
        memory: SharedMemory | None = None,
    ) -> None:
        """Lay out the gradients of `parameters`, whose indices are `members`, as all ranks agreed (`layouts`).

        `size`: ranks that take part. `memory`: where the bucket is to lie; None: in this process's own memory.
        """
        self.members, self.pending = members, 0
        self.gradients = self.kind(parameters, layouts, memory=memory, tail=len(members) + MARKS)
        self._size = size

    @property
    def sent_bytes(self) -> int:
        """See `Bucket`."""
        return ring_sent_bytes(self.gradients.nbytes, self._size)

    @property
    def used_mask(self) -> torch.Tensor:
        """1 for each member used; after the sum, how many ranks used it. Then the step's marks."""
        return self.gradients.flat[self.gradients.elements :]

    @torch.no_grad()
    def load(self, weight: float) -> None:
        """See `Bucket`."""
        self.gradients.load(weight)
        mask = self.used_mask.fill_(1)
        for i in self.gradients.unused:
            mask[i] = 0

    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """See `Bucket`."""
        self.gradients.add(position, tensor, factor / self._size)

    def launch(self, route: Route) -> Waitable:
        """See `Bucket`."""
        self.gradients.note_uses()
        shared = self.gradients.shared
        if route.on_device is not None:
            return route.on_device.all_reduce(self.gradients.flat)
        if shared is None:
            return start_all_reduce(self.gradients.flat, route.group)
        assert route.conductor is not None, "shared memory has a conductor"
        assert isinstance(shared, SharedTensor), "a device has its own thread"
        return route.conductor.submit([], prepare=partial(shared.all_reduce, self.gradients.divisor))

    def finalize(self) -> None:
        """See `Bucket`."""
        self.gradients.finalize(self.used_mask.tolist() if self.gradients.unused else ())

    def own_square(self) -> torch.Tensor:
        """See `Bucket`."""
        return square_sum(self.gradients.views) / self.gradients.divisor**2

    def mean_square(self, rank: int, size: int) -> torch.Tensor:
        """See `Bucket`. All ranks have the same mean: each takes some members."""
        return square_sum(self.gradients.views[rank::size])

    def fits(self, route: Route) -> bool:
        """See `Bucket`."""
        return (self.gradients.shared is None) == (route.memory is None)

    def mark_steps(self, steps: int | None) -> bool:
        """See `Bucket`."""
        marks = self.used_mask[-MARKS:]
        if steps is None:
            marks.zero_()
        else:
            marks.copy_(marks_of(steps, marks.device))
        return True

    @property
    def steps_differ(self) -> bool:
        """See `Bucket`."""
        return marks_differ(self.used_mask[-MARKS:])

    @property
    def late_steps(self) -> LateMarks | None:  # type: ignore[override]  # None elsewhere
        """See `Bucket`."""
        marks = self.used_mask[-MARKS:]
        streams = streams_of(marks.device)
        return None if streams is None else LateMarks(streams.to_host(marks))

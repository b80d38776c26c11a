"""A dense bucket: several gradients side by side in one flat tensor, which is what travels.

Once loaded, the parameters' gradients *are* views of it, so the sum arrives where the optimizer reads it and
nothing is copied back.

[Note: used mask] A parameter unused on this rank contributes zeros. Whether the others used it decides if its
gradient is a number or stays None, which an optimizer with momentum or weight decay treats differently. Each
bucket therefore ends with one element a parameter, 1 where the rank had a gradient: after the sum, 0 means that
no rank had one. DDP calls it the local used map.

[Note: one step off] A rank whose loss once did not reach the model exchanges nothing in that step. Its next
exchange would meet the others' old one, and from then on step k of one rank be added to step k + 1 of another.
So the first bucket also says how many steps the rank's optimizers have made, as bits: for each one number that is
1 where the bit is set and one that is 1 where it is not. After the sum, of any type and however rounded, ranks
differ where both are more than 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch

from ...core.step_model.comm_cost import ring_sent_bytes
from ..collectives.backend import start_all_reduce
from ..gradients.grad_ownership import GradientViews
from ..gradients.parameters import Layout
from ..host_memory.shared_tensor import SharedMemory, SharedTensor
from ..host_memory.switch_tensor import SwitchGroup, SwitchTensor
from ..messages.reduce_rules import accumulates_in_fp32
from ..routes.route import Route
from .bucket import Waitable

ALIGNMENT_BYTES = 64
"""Every gradient begins on a cache line: optimizers are slower on others."""
FEW_LARGE_ELEMENTS = 8192
"""From this mean size on, gradients are scaled while they are copied, one call each."""
_BITS = 4
MARKS = 2 * _BITS
"""Elements behind the used mask that say how many steps were made."""


class UsedMask:
    """Which members this rank has a gradient for, and how many steps it has made. See the notes above."""

    def __init__(self, flat: torch.Tensor, members: int, begin: int | None) -> None:
        """`begin`: where it lies in `flat`; None: in a tensor of its own."""
        self.unused: list[int] = []
        """Positions of members without a gradient on this rank, in the last exchange."""
        self._begin = begin
        if begin is None:
            self.counts = flat.new_zeros(members + MARKS, dtype=flat.dtype.to_real())
        else:
            self.lie_in(flat)

    def lie_in(self, flat: torch.Tensor) -> None:
        """Move to the memory of `flat`, where it travels in it."""
        if self._begin is not None:
            self.counts = flat[self._begin :]
            """1 for each member used; after the sum, how many ranks used it. Then the step's marks."""

    def write(self, unused: list[int]) -> None:
        """Note which members this rank has no gradient for."""
        self.unused = unused
        self.counts.fill_(1)
        for i in unused:
            self.counts[i] = 0

    def write_steps(self, steps: int | None) -> None:
        """Note how many steps this rank has made; None: a rank that makes none, and agrees with all."""
        marks = self.counts[-MARKS:]
        if steps is None:
            marks.zero_()
        else:
            marks.copy_(_pattern(steps % 2**_BITS))

    @property
    def steps_differ(self) -> bool:
        """After the sum: whether ranks have made different numbers of steps."""
        marks = self.counts[-MARKS:]
        sums = (marks.real if marks.is_complex() else marks).tolist()
        return any(sums[i] > 0 and sums[i + 1] > 0 for i in range(0, MARKS, 2))


@cache
def _pattern(steps: int) -> torch.Tensor:
    bits = [float(steps >> i & 1) for i in range(_BITS)]
    return torch.tensor([each for bit in bits for each in (bit, 1.0 - bit)], dtype=torch.float32)


class DenseBucket:
    """Gradients of one dtype in one flat tensor. A `Bucket`."""

    def __init__(
        self,
        members: list[int],
        parameters: Sequence[torch.nn.Parameter],
        layouts: Sequence[Layout],
        size: int,
        *,
        memory: SharedMemory | SwitchGroup | None = None,
        mask_travels_along: bool = True,
        multiple: int = 1,
    ) -> None:
        """Lay out the gradients of `parameters`, whose indices are `members`, as all ranks agreed (`layouts`).

        `size`: ranks that take part. `memory`: where the bucket is to lie; None: in this process's own memory.
        Without `mask_travels_along` the used mask is a tensor of its own, and the elements of `flat` are a
        multiple of `multiple`, the last ones zeros.
        """
        # - Members
        self.members = members
        self.parameters = list(parameters)
        self.size = size
        self.pending = 0
        # - Memory
        dtype = self.parameters[0].dtype
        offsets, elements = _offsets(self.parameters)
        length = elements + len(members) + MARKS if mask_travels_along else -(-elements // multiple) * multiple
        self.flat: torch.Tensor
        self.shared: SharedTensor | SwitchTensor | None = None
        """What `flat` is this rank's part of."""
        self.divisor = 1
        """What the sum in shared memory is divided by: of narrow floats not every rank's gradient is, which
        rounds."""
        if memory is None:
            self.flat = torch.zeros(length, dtype=dtype, device=self.parameters[0].device)
        else:
            self.shared = memory.allocate(length, dtype)
            self.flat = self.shared.mine
            if accumulates_in_fp32(dtype):
                self.divisor = memory.local_size
        self.gradients = GradientViews(self.flat, self.parameters, offsets, layouts)
        self.mask = UsedMask(self.flat, len(members), elements if mask_travels_along else None)
        # - Cost
        self.sent_bytes = ring_sent_bytes(self.nbytes, size)
        self._is_large = elements >= FEW_LARGE_ELEMENTS * len(members)
        # - Who uses the gradients
        self._version_used = -1
        """Version of `flat` when a step used the gradients."""
        self._copied_back: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Gradients of the user's own memory, with the views whose mean they take."""

    @property
    def nbytes(self) -> int:
        """See `Bucket`."""
        return self.flat.numel() * self.flat.element_size()

    @property
    def is_held(self) -> bool:
        """See `Bucket`."""
        return self.gradients.lie_here() or bool(self._copied_back)

    def note_used(self) -> None:
        """See `Bucket`."""
        self._version_used = self.flat._version

    def holds_used(self, index: int) -> bool:
        """See `Bucket`."""
        return self._version_used == self.flat._version and self.gradients.lies_here(self.members.index(index))

    @property
    def bucket_views(self) -> list[torch.Tensor]:
        """The gradients, by member."""
        return self.gradients.views

    @property
    def is_finite(self) -> bool:
        """See `Bucket`."""
        return bool(torch.isfinite(self.flat).all())

    @torch.no_grad()
    def load(self, weight: float) -> None:
        """See `Bucket`. A weight of 0 contributes nothing, whatever the gradients are (NaN too)."""
        weight *= self.divisor
        self._copied_back = []
        taken = self.gradients.take()
        if taken.memory_is_held:
            self._leave_memory()
            taken = self.gradients.take()
        views = self.gradients.views
        self._copied_back = [(self._gradient(i), views[i]) for i in taken.kept]
        targets = [views[i] for i in taken.elsewhere]
        for i in taken.absent:
            views[i].zero_()
        if weight == 0.0:
            self.flat.zero_()
        elif self._is_large:
            for grad, target in zip(taken.gradients, targets, strict=True):
                torch.mul(grad, weight, out=target)
            for i in taken.in_place:
                views[i].mul_(weight)
        else:
            if targets:
                torch._foreach_copy_(targets, taken.gradients)
            self.flat.mul_(weight)
        if taken.elsewhere:
            self.gradients.become_grads(taken.elsewhere, but=taken.kept)
        self.mask.write(taken.absent)

    def _gradient(self, position: int) -> torch.Tensor:
        gradient = self.parameters[position].grad
        assert gradient is not None, "it was taken"
        return gradient

    def _leave_memory(self) -> None:
        """Leave the memory to those who hold gradients in it, and go on in fresh one."""
        if self.shared is None:
            self.flat = torch.zeros_like(self.flat)
        else:
            self.shared.leave_memory()
            self.flat = self.shared.mine
        self.mask.lie_in(self.flat)
        self.gradients.lie_in(self.flat)

    @torch.no_grad()
    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """See `Bucket`."""
        self.bucket_views[position].add_(tensor, alpha=factor * self.divisor / self.size)

    def launch(self, route: Route) -> Waitable:
        """See `Bucket`."""
        self.gradients.note_uses()
        if self.shared is None:
            return start_all_reduce(self.flat, route.group)
        assert route.conductor is not None, "shared memory has a conductor"
        assert isinstance(self.shared, SharedTensor), "what goes across switches is a `CodedBucket`"
        return route.conductor.submit([], prepare=partial(self.shared.all_reduce, self.divisor))

    @torch.no_grad()
    def finalize(self) -> None:
        """See `Bucket`."""
        if self.mask.unused:
            ranks = self.mask.counts.tolist()
            self.gradients.become_grads([i for i in self.mask.unused if ranks[i]])
        if self._copied_back:
            gradients, means = zip(*self._copied_back, strict=True)
            torch._foreach_copy_(gradients, means)

    def zero_missing_grads(self) -> None:
        """See `Bucket`."""
        self.gradients.zero_missing()

    def mark_steps(self, steps: int | None) -> None:
        """See `Bucket`."""
        self.mask.write_steps(steps)

    @property
    def steps_differ(self) -> bool:
        """See `Bucket`."""
        return self.mask.steps_differ


def _offsets(parameters: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return where each gradient begins, and the elements of all, gaps included."""
    aligned = ALIGNMENT_BYTES // parameters[0].element_size()
    offsets, elements = [], 0
    for parameter in parameters:
        elements = -(-elements // aligned) * aligned
        offsets.append(elements)
        elements += parameter.numel()
    return offsets, elements

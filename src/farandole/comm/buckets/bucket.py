"""Buckets: several gradients side by side in one flat tensor, which is what travels.

`plan_buckets` decides which gradients share a bucket (pure, on sizes and types). A `DenseBucket`
is the memory: once loaded, the parameters' gradients *are* views of it, so the sum arrives where the
optimizer reads it and nothing is copied back. A `SparseBucket` holds the gradient of one embedding.

[Note: presence flags] A parameter unused on this rank contributes zeros. Whether the others used it
decides if its gradient is a number or stays None, which an optimizer with momentum or weight decay
treats differently. Each dense bucket therefore ends with one element a parameter, 1 where the rank
had a gradient: after the sum, 0 means that nobody had one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from ...core.step_model import bucket_plan as core_plan
from ...core.step_model.comm_cost import ring_sent_bytes
from ..gradients.grad_ownership import GradientViews
from ..gradients.parameters import Layout
from ..host_memory.shared_tensor import SharedMemory, SharedTensor
from ..host_memory.switch_tensor import SwitchGroup, SwitchTensor
from ..messages.reduce_rules import accumulates_in_fp32
from ..routes.route import Route
from ..world.comm_errors import start_all_reduce
from .step_marks import MARKS, differ, write_marks

ALIGNMENT_BYTES = 64
"""Every gradient begins on a cache line: optimizers are slower on others."""
FEW_LARGE_ELEMENTS = 8192
"""From this mean size on, gradients are scaled while they are copied, one call each."""


@dataclass(frozen=True)
class ParamInfo:
    """One parameter as the planner of buckets sees it."""

    index: int
    nbytes: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False
    codec: str = "none"
    """Text of the codec it travels by."""


def plan_buckets(slots: Sequence[ParamInfo], *, first_bytes: int, limit_bytes: int) -> list[list[ParamInfo]]:
    """Divide `slots`, given in the order in which gradients become ready, into buckets.

    By core's rule, which the step model asks too. A bucket holds one dtype on one device for one codec; sparse
    gradients are alone.
    """
    return core_plan.plan_buckets(
        slots,
        key=lambda slot: None if slot.sparse else (slot.dtype, slot.device, slot.codec),
        first_bytes=first_bytes,
        limit_bytes=limit_bytes,
    )


class Waitable(Protocol):
    """Something on its way."""

    def wait(self) -> object:
        """Return when it has arrived; raise what stopped it."""


class Bucket(Protocol):
    """What the engine does with a bucket, dense or sparse."""

    members: list[int]
    """Indices of the parameters."""
    missing: int
    """Members not yet ready in this backward pass."""

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients, uncompressed; 0 for a sparse one, which varies."""

    @property
    def sent_bytes(self) -> int:
        """Payload bytes this rank sends in one exchange."""

    @property
    def is_held(self) -> bool:
        """Whether some member's gradient still is what the last exchange brought."""

    def note_used(self) -> None:
        """A step uses the gradients as they are."""

    def holds_used(self, index: int) -> bool:
        """Return whether the gradient of a member, by its index, lies here, unchanged since `note_used`."""

    @property
    def is_finite(self) -> bool:
        """Whether what lies here holds no NaN and no infinity."""

    def load(self, weight: float) -> None:
        """Take the members' gradients, times `weight`; from now on they are the bucket's."""

    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """Add `tensor` times `factor` to this rank's gradient of a member, after `load`.

        A member that this rank has no gradient for takes it too.
        """

    def launch(self, lines: Route) -> Waitable:
        """Begin the sum over the ranks."""

    def land(self) -> None:
        """After the sum: every member that some rank had a gradient for has the mean as its gradient."""

    def fill_absent(self) -> None:
        """After `land`: give zeros to dense members without a gradient."""

    def mark(self, steps: int | None) -> None:
        """After `load`: let it travel along how many steps this rank has made. See `step_marks`."""

    @property
    def marks_differ(self) -> bool:
        """After the sum: whether the ranks have made different numbers of steps."""


@dataclass(eq=False)
class DenseBucket:
    """Gradients of one dtype in one flat tensor."""

    members: list[int]
    parameters: list[torch.nn.Parameter]
    layouts: Sequence[Layout]
    """Of the members' gradients: as all ranks agreed, whatever became of the parameter since."""
    size: int
    """Ranks that take part."""
    memory: SharedMemory | SwitchGroup | None = None
    """Where the bucket is to lie; None: in this process's own memory."""
    flags_travel_along: bool = True
    """False: the flags are a tensor of their own."""
    multiple: int = 1
    """Elements that `flat` is a multiple of, without flags in it; the rest is zeros."""
    flat: torch.Tensor = field(init=False)
    shared: SharedTensor | SwitchTensor | None = field(init=False, default=None)
    """What `flat` is this rank's part of."""
    gradients: GradientViews = field(init=False)
    missing: int = field(init=False, default=0)
    sent_bytes: int = field(init=False)
    flags: torch.Tensor = field(init=False)
    """1 for each member this rank has a gradient for; after the sum, how many ranks had one. Then the marks."""
    absent: list[int] = field(init=False, default_factory=list)
    """Positions of members without a gradient on this rank, in the last exchange."""
    divisor: int = field(init=False, default=1)
    """What the sum in shared memory is divided by: of narrow floats not every rank's gradient is, which rounds."""
    _large: bool = field(init=False)
    _marks: torch.Tensor = field(init=False)
    """The last of the flags; see `step_marks`."""
    _elements: int = field(init=False)
    """Of gradients, in `flat`."""
    _version_used: int = field(init=False, default=-1)
    """Of `flat`, when a step used the gradients."""
    _to_return: list[tuple[torch.Tensor, torch.Tensor]] = field(init=False, default_factory=list)
    """Gradients that take the mean from a view."""

    def __post_init__(self) -> None:
        first = self.parameters[0]
        aligned = ALIGNMENT_BYTES // first.element_size()
        offsets, elements = [], 0
        for parameter in self.parameters:
            elements = -(-elements // aligned) * aligned
            offsets.append(elements)
            elements += parameter.numel()
        members = len(self.members) + MARKS
        padded = elements + members if self.flags_travel_along else -(-elements // self.multiple) * self.multiple
        if self.memory is None:
            self.flat = torch.zeros(padded, dtype=first.dtype, device=first.device)
        else:
            self.shared = self.memory.allocate(padded, first.dtype)
            self.flat = self.shared.mine
            if accumulates_in_fp32(first.dtype):
                self.divisor = self.memory.local_size
        self._elements = elements
        self.flags = (
            self.flat[elements:]
            if self.flags_travel_along
            else self.flat.new_zeros(members, dtype=first.dtype.to_real())
        )
        self._marks = self.flags[-MARKS:]
        self.gradients = GradientViews(self.flat, self.parameters, offsets, self.layouts)
        self._large = elements >= FEW_LARGE_ELEMENTS * len(self.members)
        self.sent_bytes = ring_sent_bytes(self.flat.numel() * self.flat.element_size(), self.size)

    @property
    def nbytes(self) -> int:
        """See `Bucket`."""
        return self.flat.numel() * self.flat.element_size()

    @property
    def is_held(self) -> bool:
        """See `Bucket`."""
        return self.gradients.lie_here() or bool(self._to_return)

    def note_used(self) -> None:
        """See `Bucket`."""
        self._version_used = self.flat._version

    def holds_used(self, index: int) -> bool:
        """See `Bucket`."""
        return self._version_used == self.flat._version and self.gradients.lies_here(self.members.index(index))

    @property
    def views(self) -> list[torch.Tensor]:
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
        self._to_return = []
        taken = self.gradients.take()
        if taken.memory_is_held:
            self._leave_memory()
            taken = self.gradients.take()
        self.absent = taken.absent
        views = self.views
        self._to_return = [(self._gradient(i), views[i]) for i in taken.kept]
        targets = [views[i] for i in taken.elsewhere]
        for i in taken.absent:
            views[i].zero_()
        if weight == 0.0:
            self.flat.zero_()
        elif self._large:
            for grad, target in zip(taken.gradients, targets, strict=True):
                torch.mul(grad, weight, out=target)
            for i in taken.in_place:
                views[i].mul_(weight)
        else:
            if targets:
                torch._foreach_copy_(targets, taken.gradients)
            self.flat.mul_(weight)
        kept = set(taken.kept)
        for i in taken.elsewhere:
            if i not in kept:
                self.parameters[i].grad = views[i]
        self.flags.fill_(1)
        for i in self.absent:
            self.flags[i] = 0

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
        if self.flags_travel_along:
            self.flags = self.flat[self._elements :]
            self._marks = self.flags[-MARKS:]
        self.gradients.lie_in(self.flat)

    @torch.no_grad()
    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """See `Bucket`."""
        self.views[position].add_(tensor, alpha=factor * self.divisor / self.size)

    def launch(self, lines: Route) -> Waitable:
        """See `Bucket`."""
        self.gradients.note_uses()
        if self.shared is None:
            return start_all_reduce(self.flat, lines.group)
        assert lines.conductor is not None, "shared memory has a conductor"
        assert isinstance(self.shared, SharedTensor), "what goes across switches is a `CodedBucket`"
        return lines.conductor.submit([], prepare=partial(self.shared.all_reduce, self.divisor))

    @torch.no_grad()
    def land(self) -> None:
        """See `Bucket`."""
        if self.absent:
            present = self.flags.tolist()
            for i in self.absent:
                if present[i]:
                    self.parameters[i].grad = self.views[i]
        if self._to_return:
            gradients, means = zip(*self._to_return, strict=True)
            torch._foreach_copy_(gradients, means)

    def fill_absent(self) -> None:
        """See `Bucket`."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()

    def mark(self, steps: int | None) -> None:
        """See `Bucket`."""
        write_marks(self._marks, steps)

    @property
    def marks_differ(self) -> bool:
        """See `Bucket`."""
        return differ(self._marks)


@dataclass(eq=False)
class SparseBucket:
    """The sparse gradient of one embedding: indices and rows travel, never the whole table."""

    members: list[int]
    parameter: torch.nn.Parameter
    size: int
    missing: int = field(init=False, default=0)
    sent_bytes: int = field(init=False, default=0)
    nbytes: int = field(init=False, default=0)
    _sum: torch.Tensor = field(init=False)

    @property
    def is_held(self) -> bool:
        """See `Bucket`."""
        grad = self.parameter.grad
        if grad is None or not grad.is_sparse:
            return False
        return bool(grad._values().data_ptr() == self._sum._values().data_ptr())

    def note_used(self) -> None:
        """See `Bucket`."""

    def holds_used(self, index: int) -> bool:
        """See `Bucket`."""
        return self.is_held

    @property
    def is_finite(self) -> bool:
        """See `Bucket`."""
        return bool(torch.isfinite(self._sum._values()).all())

    @torch.no_grad()
    def load(self, weight: float) -> None:
        """See `Bucket`."""
        grad = self.parameter.grad
        if grad is None or weight == 0.0:
            parameter = self.parameter
            grad = torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
                torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device),
                parameter.shape,
                check_invariants=False,
            )
        self._sum = (grad * weight).coalesce() if weight != 0.0 else grad.coalesce()
        values = self._sum._values()
        row_bytes = values.element_size() * max(1, values[:1].numel()) + 8
        self.sent_bytes = (self.size - 1) * values.shape[0] * row_bytes

    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """See `Bucket`."""
        raise AssertionError("nothing is owed to a sparse gradient")

    def launch(self, lines: Route) -> Waitable:
        """See `Bucket`."""
        return start_all_reduce(self._sum, lines.group)

    def land(self) -> None:
        """See `Bucket`. Rows that no rank touched stay away; a gradient of no row at all is None."""
        self.parameter.grad = self._sum if self._sum._nnz() else None

    def fill_absent(self) -> None:
        """See `Bucket`."""

    def mark(self, steps: int | None) -> None:
        """See `Bucket`. Nothing but rows travels."""

    @property
    def marks_differ(self) -> bool:
        """See `Bucket`."""
        return False

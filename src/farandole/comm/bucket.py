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

from ..core.exchange_cost import ring_sent_bytes
from .fitting import is_narrow
from .lines import Lines
from .shared_memory import SharedMemory, SharedTensor
from .switch_group import SwitchGroup, SwitchTensor
from .wire import start_all_reduce

ALIGNMENT_BYTES = 64
"""Every gradient begins on a cache line: optimizers are slower on others."""
FEW_LARGE_ELEMENTS = 8192
"""From this mean size on, gradients are scaled while they are copied, one call each."""


@dataclass(frozen=True)
class Slot:
    """One parameter as the planner of buckets sees it."""

    index: int
    nbytes: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False
    codec: str = "none"
    """Text of the codec it travels by."""


def plan_buckets(slots: Sequence[Slot], *, first_bytes: int, limit_bytes: int) -> list[list[Slot]]:
    """Divide `slots`, given in the order in which gradients become ready, into buckets.

    A bucket holds one dtype on one device for one codec, and at most `limit_bytes` (the first
    `first_bytes`), except that a larger gradient is a bucket of its own. Sparse gradients are alone. Buckets
    come in the order in which their last member is ready, which is the order to launch them in.
    """
    done: list[tuple[int, list[Slot]]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device, str], list[Slot]] = {}
    positions = {slot.index: position for position, slot in enumerate(slots)}

    def close(members: list[Slot]) -> None:
        done.append((max(positions[slot.index] for slot in members), members))

    for slot in slots:
        if slot.sparse:
            close([slot])
            continue
        key = (slot.dtype, slot.device, slot.codec)
        members = open_buckets.setdefault(key, [])
        limit = limit_bytes if done else first_bytes
        if members and sum(member.nbytes for member in members) + slot.nbytes > limit:
            close(members)
            members = open_buckets[key] = []
        members.append(slot)
    for members in open_buckets.values():
        if members:
            close(members)
    return [members for _, members in sorted(done, key=lambda item: item[0])]


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

    @property
    def is_finite(self) -> bool:
        """Whether what lies here holds no NaN and no infinity."""

    def load(self, weight: float) -> None:
        """Take the members' gradients, times `weight`; from now on they are the bucket's."""

    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """Add `tensor` times `factor` to this rank's gradient of a member, after `load`.

        A member that this rank has no gradient for takes it too.
        """

    def launch(self, lines: Lines) -> Waitable:
        """Begin the sum over the ranks."""

    def land(self) -> None:
        """After the sum: every member that some rank had a gradient for has the mean as its gradient."""

    def fill_absent(self) -> None:
        """After `land`: give zeros to dense members without a gradient."""


@dataclass(eq=False)
class DenseBucket:
    """Gradients of one dtype in one flat tensor."""

    members: list[int]
    parameters: list[torch.nn.Parameter]
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
    views: list[torch.Tensor] = field(init=False)
    missing: int = field(init=False, default=0)
    sent_bytes: int = field(init=False)
    flags: torch.Tensor = field(init=False)
    """1 for each member this rank has a gradient for; after the sum, how many ranks had one."""
    absent: list[int] = field(init=False, default_factory=list)
    """Positions of members without a gradient on this rank, in the last exchange."""
    divisor: int = field(init=False, default=1)
    """What the sum in shared memory is divided by: of narrow floats not every rank's gradient is, which rounds."""
    _large: bool = field(init=False)

    def __post_init__(self) -> None:
        first = self.parameters[0]
        aligned = ALIGNMENT_BYTES // first.element_size()
        offsets, elements = [], 0
        for parameter in self.parameters:
            elements = -(-elements // aligned) * aligned
            offsets.append(elements)
            elements += parameter.numel()
        members = len(self.members)
        padded = elements + members if self.flags_travel_along else -(-elements // self.multiple) * self.multiple
        if self.memory is None:
            self.flat = torch.zeros(padded, dtype=first.dtype, device=first.device)
        else:
            self.shared = self.memory.allocate(padded, first.dtype)
            self.flat = self.shared.mine
            if is_narrow(first.dtype):
                self.divisor = self.memory.local_size
        self.flags = (
            self.flat[elements:]
            if self.flags_travel_along
            else self.flat.new_zeros(members, dtype=first.dtype.to_real())
        )
        self.views = [_view_like(self.flat, *pair) for pair in zip(offsets, self.parameters, strict=True)]
        self._large = elements >= FEW_LARGE_ELEMENTS * len(self.members)
        self.sent_bytes = ring_sent_bytes(self.flat.numel() * self.flat.element_size(), self.size)

    @property
    def nbytes(self) -> int:
        """See `Bucket`."""
        return self.flat.numel() * self.flat.element_size()

    @property
    def is_held(self) -> bool:
        """See `Bucket`."""
        return any(parameter.grad is view for parameter, view in zip(self.parameters, self.views, strict=True))

    @property
    def is_finite(self) -> bool:
        """See `Bucket`."""
        return bool(torch.isfinite(self.flat).all())

    @torch.no_grad()
    def load(self, weight: float) -> None:
        """See `Bucket`. A weight of 0 contributes nothing, whatever the gradients are (NaN too)."""
        weight *= self.divisor
        self.absent = []
        grads, targets, rescale = [], [], []
        for i, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            grad = parameter.grad
            if grad is None:
                view.zero_()
                self.absent.append(i)
            elif grad is view:
                rescale.append(view)
            else:
                grads.append(grad)
                targets.append(view)
                parameter.grad = view
        if weight == 0.0:
            self.flat.zero_()
        elif self._large:
            for grad, target in zip(grads, targets, strict=True):
                torch.mul(grad, weight, out=target)
            for view in rescale:
                view.mul_(weight)
        else:
            if grads:
                torch._foreach_copy_(targets, grads)
            self.flat.mul_(weight)
        self.flags.fill_(1)
        for i in self.absent:
            self.flags[i] = 0

    @torch.no_grad()
    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """See `Bucket`."""
        self.views[position].add_(tensor, alpha=factor * self.divisor / self.size)

    def launch(self, lines: Lines) -> Waitable:
        """See `Bucket`."""
        if self.shared is None:
            return start_all_reduce(self.flat, lines.group)
        assert lines.conductor is not None, "shared memory has a conductor"
        assert isinstance(self.shared, SharedTensor), "what goes across switches is a `CodedBucket`"
        return lines.conductor.submit([], prepare=partial(self.shared.all_reduce, self.divisor))

    def land(self) -> None:
        """See `Bucket`."""
        if self.absent:
            present = self.flags.tolist()
            for i in self.absent:
                if present[i]:
                    self.parameters[i].grad = self.views[i]

    def fill_absent(self) -> None:
        """See `Bucket`."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()


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
        return self.parameter.grad is self._sum

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

    def launch(self, lines: Lines) -> Waitable:
        """See `Bucket`."""
        return start_all_reduce(self._sum, lines.group)

    def land(self) -> None:
        """See `Bucket`. Rows that no rank touched stay away; a gradient of no row at all is None."""
        self.parameter.grad = self._sum if self._sum._nnz() else None

    def fill_absent(self) -> None:
        """See `Bucket`."""


def _view_like(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of `flat` with the parameter's shape, and its strides where memory is dense.

    Optimizers have fast paths only for gradients that lie in memory as their parameters do.
    """
    if _is_dense(parameter):
        return flat.as_strided(parameter.size(), parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True

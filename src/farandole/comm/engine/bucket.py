"""What the reducer asks of a bucket, and buckets without a codec: dense and sparse.

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

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache, partial
from typing import Protocol

import torch

from ...core.link import ring_sent_bytes
from ...core.vocabulary.codec_spec import EXACT, CodecSpec
from ..codecs.units import CodedFlat
from ..collectives import start_all_reduce
from ..device.streams import HostCopy, streams_of
from ..routes import Route
from ..transport.shared_tensor import SharedMemory, SharedTensor
from .grad_ownership import FlatGradients, replace_grad
from .parameters import Layout, square_sum

# How ranks notice in a sum that they have made different numbers of steps. See [Note: one step off].

_BITS = 4
MARKS = 2 * _BITS
"""Elements that say how many steps were made."""


@cache
def _patterns(device: torch.device) -> torch.Tensor:
    """Return the marks of all numbers of steps, made once on each device: (2**_BITS, MARKS)."""
    bits = [[float(steps >> i & 1) for i in range(_BITS)] for steps in range(2**_BITS)]
    rows = [[each for bit in row for each in (bit, 1.0 - bit)] for row in bits]
    return torch.tensor(rows, dtype=torch.float32, device=device)


def marks_of(steps: int, device: torch.device) -> torch.Tensor:
    """Return this rank's marks for a number of steps: (MARKS,), float32."""
    return _patterns(device)[steps % 2**_BITS]


def marks_differ(summed: torch.Tensor) -> bool:
    """Return whether the ranks whose marks were added up have made different numbers of steps."""
    sums = (summed.real if summed.is_complex() else summed).tolist()
    return any(sums[i] > 0 and sums[i + 1] > 0 for i in range(0, MARKS, 2))


class LateMarks:
    """Summed marks on their way from a device to the host."""

    def __init__(self, summed: HostCopy) -> None:
        self._summed = summed

    @property
    def has_arrived(self) -> bool:
        """See `LateSteps`."""
        return self._summed.has_arrived

    @property
    def differ(self) -> bool:
        """Whether the ranks have made different numbers of steps."""
        return marks_differ(self._summed.read())


class Waitable(Protocol):
    """Something on its way."""

    def wait(self) -> object:
        """Return when it has arrived; raise what stopped it."""


class LateSteps(Protocol):
    """What ranks said in an exchange of how many steps they have made, on its way from a device to the host."""

    @property
    def has_arrived(self) -> bool:
        """Whether the host knows it, so that `differ` does not wait."""

    @property
    def differ(self) -> bool:
        """Whether they have made different numbers."""


class Gradients(Protocol):
    """Where the gradients of a bucket lie. Positions are those of its members."""

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients, uncompressed; 0 for a sparse one, which varies."""

    @property
    def is_held(self) -> bool:
        """Whether some member's gradient still is what the last exchange brought."""

    @property
    def is_finite(self) -> bool:
        """Whether the gradients here hold no NaN and no infinity."""

    def note_used(self) -> None:
        """A step uses the gradients as they are."""

    def holds_used(self, position: int) -> bool:
        """Return whether the gradient of a member lies here, unchanged since `note_used`."""

    def zero_missing(self) -> None:
        """Give zeros to dense members without a gradient."""


class Bucket(ABC):
    """A bucket, dense, sparse or encoded. One exchange: load, launch, wait for the work, finalize."""

    members: list[int]
    """Indices of the parameters."""
    pending: int
    """Members not yet ready in this backward pass."""
    gradients: Gradients
    is_sparse = False
    had_nonfinite = False
    """Some rank's gradients of the last exchange held NaN or infinity, or their mean does: asked of codecs."""
    nonfinite_members: Sequence[int] = ()
    """Members whose gradients were not finite on this rank, in the last exchange."""
    overflowed_members: Sequence[int] = ()
    """Members whose gradients were finite on all ranks, and their mean is not: the same on all ranks."""

    owns_rows = False
    """Whether this rank alone has some rows of a packed sum: they may overflow where no other rank sees it."""

    coded: CodedFlat | None = None
    """What its codec keeps; None for a bucket without a codec."""

    @property
    @abstractmethod
    def sent_bytes(self) -> int:
        """Payload bytes this rank sends in one exchange, or sent in the last one."""

    @abstractmethod
    def load(self, weight: float) -> None:
        """Take the members' gradients, times `weight`; from now on they are the bucket's."""

    @abstractmethod
    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """Add `tensor` times `factor` to this rank's gradient of a member, after `load`.

        A member that this rank has no gradient for takes it too.
        """

    @abstractmethod
    def launch(self, route: Route) -> Waitable:
        """Begin the sum over the ranks."""

    @abstractmethod
    def finalize(self) -> None:
        """After the sum: every member that some rank had a gradient for has the mean as its gradient."""

    # -- squares; see `noise_sums` -----------------------------------------------------------------

    @abstractmethod
    def own_square(self) -> torch.Tensor:
        """After `load`: the sum of squares of this rank's gradients times the weight, a tensor () of float64."""

    @abstractmethod
    def mean_square(self, rank: int, size: int) -> torch.Tensor:
        """After the sum, before `finalize`: rank `rank`'s part of the squares of the mean.

        The sum of the parts over all `size` ranks is the whole. A tensor () of float64.
        """

    # -- sums that overflow; see [Note: sums that overflow] in `codecs.codec` ---------------------

    def find_overflow(self) -> list[bool]:
        """After the sum, of a bucket that `owns_rows`: whether this rank's part is not finite, by member.

        Nothing is found where some rank has said already that its gradients are not.
        """
        return [False] * len(self.members)

    def note_overflow(self, found: Sequence[bool]) -> None:
        """Take what some rank has found, by member: the same on all ranks."""
        self.overflowed_members = [index for index, bad in zip(self.members, found, strict=True) if bad]
        self.had_nonfinite = self.had_nonfinite or any(found)

    # -- steps ---------------------------------------------------------------------------------

    def mark_steps(self, steps: int | None) -> bool:
        """After `load`: send along how many steps this rank has made; return False if the bucket cannot.

        None: a rank that makes none, and agrees with all. See [Note: one step off].
        """
        return False

    @property
    def steps_differ(self) -> bool:
        """After the sum: whether the ranks have made different numbers of steps."""
        return False

    # -- on a device; see [Note: no wait for a device] in `device.streams` -------------------------

    is_settled = True
    """Whether the host knows what the last exchange brought: `had_nonfinite` and the like."""

    def settle(self) -> None:  # noqa: B027  # nothing to do where nothing is late
        """Know it, at the price of waiting until the device has done the exchange."""

    late_steps: LateSteps | None = None
    """After the sum: what says later whether `steps_differ`, of a bucket on a device; else None."""

    def roll_back(self) -> None:
        """Restore what its codec kept before the last exchange: the step was dropped."""
        if self.coded is not None:
            self.coded.states.restore()

    def rescale(self, change: float) -> None:
        """Multiply what its codec keeps by `change`: gradients have another loss scale from now on."""
        if self.coded is not None:
            self.coded.states.rescale(change)

    # -- codecs --------------------------------------------------------------------------------

    @property
    def spec(self) -> CodecSpec:
        """The codec."""
        return EXACT if self.coded is None else self.coded.codec.spec

    def fits(self, route: Route) -> bool:
        """Return whether it is laid out for `route`."""
        return True


# A dense bucket: several gradients side by side in one flat tensor, which is what travels.


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


# The sparse gradient of one embedding: indices and rows travel, never the whole table.


class SparseGradient:
    """The gradient of `parameter`, which is the sum that arrived or the user's own. A `Gradients`."""

    nbytes = 0

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.sum: torch.Tensor

    @property
    def is_held(self) -> bool:
        """See `Gradients`."""
        grad = self.parameter.grad
        if grad is None or not grad.is_sparse:
            return False
        return bool(grad._values().data_ptr() == self.sum._values().data_ptr())

    @property
    def is_finite(self) -> bool:
        """See `Gradients`."""
        return bool(torch.isfinite(self.sum._values()).all())

    def holds_used(self, position: int) -> bool:
        """See `Gradients`."""
        return self.is_held

    def note_used(self) -> None:
        """See `Gradients`."""

    def zero_missing(self) -> None:
        """See `Gradients`."""


class SparseBucket(Bucket):
    """A `Bucket` of one parameter whose gradient is sparse. Nothing but rows travels."""

    is_sparse = True

    def __init__(self, members: list[int], parameter: torch.nn.Parameter, size: int) -> None:
        """`size`: ranks that take part."""
        self.members, self.pending = members, 0
        self.gradients: SparseGradient = SparseGradient(parameter)
        self._size, self._sent_bytes = size, 0

    @property
    def sent_bytes(self) -> int:
        """See `Bucket`."""
        return self._sent_bytes

    @torch.no_grad()
    def load(self, weight: float) -> None:
        """See `Bucket`. A weight of 0 contributes no rows."""
        grad = self.gradients.parameter.grad
        if grad is None or weight == 0.0:
            parameter = self.gradients.parameter
            grad = torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
                torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device),
                parameter.shape,
                check_invariants=False,
            )
        self.gradients.sum = (grad * weight).coalesce() if weight != 0.0 else grad.coalesce()
        values = self.gradients.sum._values()
        row_bytes = values.element_size() * max(1, values[:1].numel()) + 8
        self._sent_bytes = (self._size - 1) * values.shape[0] * row_bytes

    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """See `Bucket`."""
        raise AssertionError("nothing is carried over to a sparse gradient")

    def launch(self, route: Route) -> Waitable:
        """See `Bucket`."""
        return start_all_reduce(self.gradients.sum, route.group)

    def own_square(self) -> torch.Tensor:
        """See `Bucket`."""
        return square_sum([self.gradients.sum._values()])

    def mean_square(self, rank: int, size: int) -> torch.Tensor:
        """See `Bucket`. All ranks have the same rows: the first takes them."""
        return square_sum([self.gradients.sum.coalesce()._values()] if rank == 0 else [])

    def finalize(self) -> None:
        """See `Bucket`. Rows that no rank touched stay away; a gradient of no row at all is None."""
        replace_grad(self.gradients.parameter, self.gradients.sum if self.gradients.sum._nnz() else None)

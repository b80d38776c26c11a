"""What the reducer asks of a bucket: the gradients of some parameters, which travel together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from ...core.vocabulary.codec_spec import EXACT, CodecSpec
from ..routes.route import Route
from ..sessions.units import CodedFlat


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

    # -- squares; see `reducer.noise_sums` ---------------------------------------------------------

    @abstractmethod
    def own_square(self) -> torch.Tensor:
        """After `load`: the sum of squares of this rank's gradients times the weight, a tensor () of float64."""

    @abstractmethod
    def mean_square(self, rank: int, size: int) -> torch.Tensor:
        """After the sum, before `finalize`: rank `rank`'s part of the squares of the mean.

        The sum of the parts over all `size` ranks is the whole. A tensor () of float64.
        """

    # -- sums that overflow; see [Note: sums that overflow] in `codecs.finite` ---------------------

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

        None: a rank that makes none, and agrees with all. See [Note: one step off] in `dense_bucket`.
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

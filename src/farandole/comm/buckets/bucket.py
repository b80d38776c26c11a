"""What the reducer asks of a bucket: the gradients of some parameters, which travel together."""

from __future__ import annotations

from typing import Protocol

import torch

from ..routes.route import Route


class Waitable(Protocol):
    """Something on its way."""

    def wait(self) -> object:
        """Return when it has arrived; raise what stopped it."""


class Bucket(Protocol):
    """A bucket, dense, sparse or encoded. One exchange: load, launch, wait for the work, finalize."""

    members: list[int]
    """Indices of the parameters."""
    pending: int
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
        """Whether the gradients here hold no NaN and no infinity."""

    def load(self, weight: float) -> None:
        """Take the members' gradients, times `weight`; from now on they are the bucket's."""

    def add(self, position: int, tensor: torch.Tensor, factor: float) -> None:
        """Add `tensor` times `factor` to this rank's gradient of a member, after `load`.

        A member that this rank has no gradient for takes it too.
        """

    def launch(self, route: Route) -> Waitable:
        """Begin the sum over the ranks."""

    def finalize(self) -> None:
        """After the sum: every member that some rank had a gradient for has the mean as its gradient."""

    def zero_missing_grads(self) -> None:
        """After `finalize`: give zeros to dense members without a gradient."""

    def mark_steps(self, steps: int | None) -> None:
        """After `load`: send along how many steps this rank has made. See [Note: one step off]."""

    @property
    def steps_differ(self) -> bool:
        """After the sum: whether the ranks have made different numbers of steps."""

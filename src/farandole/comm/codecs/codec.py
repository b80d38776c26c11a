"""The contract of a codec: pure, with a state that goes in and comes out.

[Note: conservation] A codec returns ``Encoded(mean, own, state)``. `own` is what this rank contributed, in units
of its own gradient: the mean of `own` over the ranks is `mean`, to float rounding, whatever was rounded before.
So ``asked - own`` is all that was lost, and `ErrorFeedback` can keep it for the next step, for every codec alike.
Where a rank rounds the *sum* of a piece (the second half of a reduce-scatter + all-gather), that error is `size`
times its own.

[Note: a state is a value] A codec never writes into the state it is given: it returns another one. To drop a step
is to keep the state from before it. A residual is not allocated anew in each step: the next one is written into
the memory of the last but one, which the state carries as `spare`. So a state stays valid until two further ones
have been computed from it, which is what dropping one step needs.

The smallest codec, which sends half of the bytes and keeps nothing::

    class Half:
        def init(self, grad, group):
            return None

        def encode(self, grad, state, group):
            packed = grad.to(torch.bfloat16)
            gathered = yield Message(packed, "all_gather")
            return Encoded(gathered.float().mean(0), packed.float(), state)

[Note: sums that overflow] Gradients that are finite on every rank may have a sum that is not, and then nothing
that a codec keeps is: asked - own is NaN from then on. The mean has the same bits on all ranks, so each of them
looks at it and all know the same: the exchange is taken back, as if it had not been. A codec that packs every
element shows every overflow in its mean. One that leaves elements out does not: the gradient and the residual of
one of these may add up to infinity while the mean is finite. Its rank sees that in its state before the next
exchange, forgets what is kept there, and says that its gradient is not finite. Where each rank has its rows of the
mean alone (ZeRO stages 1 and 2), the owner sees the overflow and tells the others, by one small all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from ..device.streams import streams_of
from ..messages import Encoded, Encoding, GroupRank

# Whether what codecs compute with is finite, asked at the price of one sum.


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` holds no NaN and no infinity."""
    # The sum of finite numbers may overflow; only then is a second look worth its time.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def finite_flag(tensor: torch.Tensor) -> bool | torch.Tensor:
    """Return `is_finite` of `tensor`; of one on a device a flag there, () of bool, without a wait of the host."""
    if streams_of(tensor.device) is None:
        return is_finite(tensor)
    return torch.isfinite(torch.linalg.vector_norm(tensor, torch.inf)) if tensor.numel() else True


def without_overflow(state: S, initial: Callable[[], S]) -> S:
    """Return `state` if its tensors are finite; else `initial()` with the numbers of `state`.

    Counters stay, because all ranks draw the same random numbers by them.
    """
    kept = leaves(state)
    tensors = [value for value in kept.values() if isinstance(value, torch.Tensor)]
    if all(is_finite(value) for value in tensors if value.is_floating_point()):
        return state
    return with_leaves(initial(), {key: leaf for key, leaf in kept.items() if not isinstance(leaf, torch.Tensor)})


S = TypeVar("S")
Leaf = torch.Tensor | bool | int | float


class Codec(Protocol[S]):
    """Encodes one unit of gradients: a 1-D segment of a bucket, or the 2-D gradient of one parameter.

    `S` is its state: a NamedTuple of tensors, numbers and further states, or None. Tensors and numbers of a state
    have field names that are unique in it, by which they are saved.
    """

    def init(self, grad: torch.Tensor, group: GroupRank) -> S:
        """Return the state of the first step. Only shape and device of `grad` (float32) matter."""

    def encode(self, grad: torch.Tensor, state: S, group: GroupRank) -> Encoding:
        """Return the generator that exchanges `grad`. It may overwrite `grad` only where its class says so."""


def leaves(state: Any) -> dict[str, Leaf]:
    """Return the tensors and numbers of a state by field name; `spare` memory is none of them.

    >>> leaves(None)
    {}
    """
    if state is None:
        return {}
    if not hasattr(state, "_fields"):
        return {"state": state}
    found: dict[str, Leaf] = {}
    for name, value in zip(state._fields, state, strict=True):
        if value is None or hasattr(value, "_fields"):
            found |= leaves(value)
        elif name != "spare":
            found[name] = value
    return found


def with_leaves(state: S, new: Mapping[str, Any]) -> S:
    """Return `state` with the leaves in `new` replacing those of the same names."""
    if not hasattr(state, "_fields"):
        return state if state is None else new.get("state", state)
    values = [
        with_leaves(value, new) if value is None or hasattr(value, "_fields") else new.get(name, value)
        for name, value in zip(state._fields, state, strict=True)  # type: ignore[call-overload]
    ]
    return type(state)(*values)


# Error feedback: what a codec lost is asked for again in the next step; and momentum correction on top of it.
#
# Sources: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019;
# Lin et al., "Deep Gradient Compression", ICLR 2018, sections 3.1-3.3 (momentum correction).


class FeedbackState(NamedTuple):
    """What error feedback keeps."""

    residual: torch.Tensor
    """What was not sent yet, in the gradient's shape."""
    spare: torch.Tensor
    """Memory for the next residual. See [Note: a state is a value] in `codecs.codec`."""
    codec: Any
    """State of the codec inside."""


@dataclass(frozen=True)
class ErrorFeedback(Generic[S]):
    """Adds the residual of the last step to the gradient, and keeps what `codec` did not send.

    Overwrites the gradient. An exchange that fails leaves the state as it was.
    """

    codec: Codec[S]

    def init(self, grad: torch.Tensor, group: GroupRank) -> FeedbackState:
        """See `Codec`."""
        return FeedbackState(torch.zeros_like(grad), torch.empty_like(grad), self.codec.init(grad, group))

    def encode(self, grad: torch.Tensor, state: FeedbackState, group: GroupRank) -> Encoding:
        """See `Codec`."""
        asked = grad.add_(state.residual)
        mean, own, inner = yield from self.codec.encode(asked, state.codec, group)
        residual = torch.sub(asked, own, out=state.spare)
        return Encoded(mean, own, FeedbackState(residual, state.residual, inner))


class MomentumState(NamedTuple):
    """What momentum correction keeps."""

    velocity: torch.Tensor
    feedback: FeedbackState


@dataclass(frozen=True)
class MomentumCorrection:
    """Gives velocities, not gradients, to a sparse codec with error feedback, and forgets what was sent.

    What is sent is cleared from the velocity too (momentum factor masking), so that old directions do not push a
    coordinate twice. The optimizer's own momentum must be 0. Overwrites the gradient.
    """

    codec: ErrorFeedback[object]
    momentum: float
    clip_norm: float | None = None
    """Each rank's gradient is clipped to ``clip_norm / sqrt(size)`` first."""

    def init(self, grad: torch.Tensor, group: GroupRank) -> MomentumState:
        """See `Codec`."""
        return MomentumState(torch.zeros_like(grad), self.codec.init(grad, group))

    def encode(self, grad: torch.Tensor, state: MomentumState, group: GroupRank) -> Encoding:
        """See `Codec`."""
        if self.clip_norm is not None:
            limit = self.clip_norm / group.size**0.5
            grad.mul_((limit / (grad.norm() + 1e-12)).clamp(max=1.0))
        velocity = torch.add(grad, state.velocity, alpha=self.momentum)
        mean, own, feedback = yield from self.codec.encode(grad.copy_(velocity), state.feedback, group)
        return Encoded(mean, own, MomentumState(velocity.masked_fill_(own != 0, 0.0), feedback))

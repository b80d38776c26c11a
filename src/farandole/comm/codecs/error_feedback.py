"""Error feedback: what a codec lost is asked for again in the next step; and momentum correction on top of it.

Sources: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019;
Lin et al., "Deep Gradient Compression", ICLR 2018, sections 3.1-3.3 (momentum correction).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import torch

from ..messages import Encoded, Encoding, GroupRank
from .codec import Codec, S


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

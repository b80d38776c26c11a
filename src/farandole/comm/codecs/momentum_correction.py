"""Momentum correction: sparse codecs accumulate velocities, not gradients.

Source: Lin et al., "Deep Gradient Compression", ICLR 2018, sections 3.1-3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..messages.message import Encoded, Encoding, GroupRank
from .error_feedback import ErrorFeedback, FeedbackState


class MomentumState(NamedTuple):
    """What momentum correction keeps."""

    velocity: torch.Tensor
    feedback: FeedbackState


@dataclass(frozen=True)
class MomentumCorrection:
    """Gives velocities to a codec with error feedback, and forgets what was sent.

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

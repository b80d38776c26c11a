"""Error feedback: what a codec lost is asked for again in the next step.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
"""

from __future__ import annotations

import torch

from ..messages.message import Codec, Encoding, GroupRank, State
from .rollback import put_residual


def error_feedback(codec: Codec) -> Codec:
    """Add the residual of the last step to the gradient, and keep what the codec did not send.

    The residual is ``state["residual"]``, of the gradient's shape. It is written only when the codec has
    finished: an exchange that fails leaves it as it was.
    """

    def with_feedback(grad: torch.Tensor, state: State, seat: GroupRank) -> Encoding:
        residual = state.get("residual")
        if residual is None:
            residual = state["residual"] = torch.zeros_like(grad)
        asked = grad.add_(residual)
        mean, own = yield from codec(asked, state, seat)
        put_residual(state, asked, own)
        return mean, own

    return with_feedback


def momentum_correction(codec: Codec, momentum: float, clip_norm: float | None = None) -> Codec:
    """Accumulate velocity, not gradients, and forget what was sent: for sparse codecs.

    What is sent is cleared from the velocity too (momentum factor masking), so that old directions do not
    push a coordinate twice. `clip_norm` clips each rank's gradient to ``clip_norm / sqrt(size)`` before.
    The optimizer's own momentum must be 0. Source: Lin et al., "Deep Gradient Compression", ICLR 2018,
    sections 3.1-3.3.
    """

    def corrected(grad: torch.Tensor, state: State, seat: GroupRank) -> Encoding:
        velocity = state.get("velocity")
        if velocity is None:
            velocity = torch.zeros_like(grad)
        residual = state.get("residual")
        if residual is None:
            residual = state["residual"] = torch.zeros_like(grad)
        if clip_norm is not None:
            limit = clip_norm / seat.size**0.5
            grad.mul_((limit / (grad.norm() + 1e-12)).clamp(max=1.0))
        new_velocity = torch.add(grad, velocity, alpha=momentum)
        asked = residual + new_velocity
        mean, own = yield from codec(asked.clone(), state, seat)
        put_residual(state, asked, own)
        state["velocity"] = new_velocity.masked_fill_(own != 0, 0.0)
        return mean, own

    return corrected

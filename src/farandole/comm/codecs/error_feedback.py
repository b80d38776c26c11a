"""Error feedback: what a codec lost is asked for again in the next step.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import torch

from ..messages.message import Encoded, Encoding, GroupRank
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

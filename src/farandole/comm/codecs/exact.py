"""The mean without loss: codec ``none``."""

from __future__ import annotations

import torch

from ..messages import Encoded, Encoding, GroupRank, Message, accumulates_in_fp32, reduce_scatter_all_gather


class Exact:
    """The codec ``none``. Takes any floating dtype."""

    def init(self, grad: torch.Tensor, group: GroupRank) -> None:
        """See `Codec`."""

    def encode(self, grad: torch.Tensor, state: None, group: GroupRank) -> Encoding:
        """See `Codec`."""
        if accumulates_in_fp32(grad.dtype):  # rounded once, after the division
            mean = yield from reduce_scatter_all_gather(grad, group, group.size)
            return Encoded(mean, grad)
        mean = (yield Message(grad, "all_reduce")).div_(group.size)  # what was received is this rank's own
        return Encoded(mean, grad)

"""A model with very many small parameters, where the cost of each gradient is all overhead."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 16


class ManySmall(nn.Module):
    """`parameters` tensors of 16 x 16 and 16 numbers; takes and returns (batch, 16).

    The last layer of an odd number has no bias.
    """

    def __init__(self, parameters: int = 2000) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=i + 1 < parameters) for i in range(0, parameters, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add up what each layer makes of the input: wide, so that no gradient vanishes on its way."""
        outputs = [layer(x) for layer in self.layers]
        return torch.stack(outputs).mean(0)

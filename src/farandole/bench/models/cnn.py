"""The small CNN of the demos: conv 3-16, pool, conv 16-32, pool, linear 128, linear 10."""

from __future__ import annotations

from torch import nn


class SmallCNN(nn.Sequential):
    """Takes (batch, in_channels, image_size, image_size), returns (batch, 10)."""

    def __init__(self, in_channels: int = 1, image_size: int = 28) -> None:
        features = 32 * (image_size // 4) ** 2
        super().__init__(
            nn.Conv2d(in_channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

"""VGG-16: Simonyan and Zisserman, "Very deep convolutional networks", 2014, configuration D."""

from __future__ import annotations

from torch import nn

BLOCKS = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
"""Convolutions and channels, each block followed by pooling."""


def vgg16(classes: int = 1000) -> nn.Sequential:
    """Return VGG-16 for images of 224 x 224: 138,357,544 parameters for 1,000 classes."""
    layers: list[nn.Module] = []
    channels = 3
    for depth, width in BLOCKS:
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(),
        nn.Linear(7 * 7 * channels, 4096), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, classes),
    )  # fmt: skip

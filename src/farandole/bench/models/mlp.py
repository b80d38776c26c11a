"""A multi-layer perceptron: nothing but matrices, so that compute is small beside what is exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(widths: Sequence[int] = (784, 1024, 1024, 10)) -> nn.Sequential:
    """Return linear layers of these widths with ReLU between: 1,863,690 parameters by default."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])

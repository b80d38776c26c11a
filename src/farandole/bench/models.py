"""Plain models to measure with, without Farandole in them: a small GPT over bytes, CNNs, ResNet, VGG, BERT."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

VOCABULARY = 256


class TransformerBlock(nn.Module):
    """Causal attention and a two-layer perceptron, each added to what comes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, length, width)."""
        batch, length, width = x.shape
        parts = self.attention_in(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.mlp(self.before_mlp(x))
        return out


class LanguageModel(nn.Module):
    """Predicts the next byte."""

    def __init__(
        self, width: int = 64, depth: int = 2, heads: int = 4, context: int = 64, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.last_norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.token.weight
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take bytes (batch, length), return logits (batch, length, vocabulary)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.output(self.last_norm(x))
        return logits


# A multi-layer perceptron: nothing but matrices, so that compute is small beside what is exchanged.


def mlp(widths: Sequence[int] = (784, 1024, 1024, 10)) -> nn.Sequential:
    """Return linear layers of these widths with ReLU between: 1,863,690 parameters by default."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# ResNet-50: He et al., "Deep residual learning for image recognition", 2015, with the stride in the 3x3.


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up by four, added to what came in."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return a feature map."""
        out: torch.Tensor = torch.relu(self.body(x) + self.shortcut(x))
        return out


def resnet50(classes: int = 1000) -> nn.Sequential:
    """Return ResNet-50: 25,557,032 parameters for 1,000 classes."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    channels = 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(depth):
            layers.append(Bottleneck(channels, width, stride if i == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


# VGG-16: Simonyan and Zisserman, "Very deep convolutional networks", 2014, configuration D.


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


# The small CNN of the demos: conv 3-16, pool, conv 16-32, pool, linear 128, linear 10.


class SmallCNN(nn.Sequential):
    """Takes (batch, in_channels, image_size, image_size), returns (batch, 10)."""

    def __init__(self, in_channels: int = 1, image_size: int = 28) -> None:
        features = 32 * (image_size // 4) ** 2
        super().__init__(
            nn.Conv2d(in_channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip


# BERT: Devlin et al., "BERT: pre-training of deep bidirectional transformers", 2018, with the heads it trains.


BERT_VOCABULARY = 30_522
BERT_CONTEXT = 512


class Bert(nn.Module):
    """Guesses masked tokens, and whether the second sentence follows the first.

    BERT-base, which is the default, has 110,106,428 parameters: 109,482,240 of the encoder and its pooler.
    """

    def __init__(
        self,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        context: int = BERT_CONTEXT,
        vocabulary: int = BERT_VOCABULARY,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.sentence = nn.Embedding(2, width)
        self.first_norm = nn.LayerNorm(width, eps=1e-12)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", 1e-12, batch_first=True)
            for _ in range(depth)
        )
        self.pooler = nn.Linear(width, width)
        self.follows = nn.Linear(width, 2)
        self.transform = nn.Linear(width, width)
        self.last_norm = nn.LayerNorm(width, eps=1e-12)
        self.output = nn.Linear(width, vocabulary)
        self.output.weight = self.token.weight
        for embedding in (self.token, self.position, self.sentence):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, sentences: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take tokens and the sentence each is of, both (batch, length).

        Return logits of tokens (batch, length, vocabulary) and of "follows" (batch, 2).
        """
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]] + self.sentence(sentences)
        x = self.first_norm(x)
        for block in self.blocks:
            x = block(x)
        follows: torch.Tensor = self.follows(torch.tanh(self.pooler(x[:, 0])))
        logits: torch.Tensor = self.output(self.last_norm(gelu(self.transform(x))))
        return logits, follows

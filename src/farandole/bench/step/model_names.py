"""The names of the models that are trained for measuring, without torch. `works` has what they stand for."""

from __future__ import annotations

MODELS = ("lm27", "small", "resnet50", "vgg16", "bert", "gpt", "cifar-cnn", "mlp")
PRECISIONS = ("fp32", "bf16", "fp16")

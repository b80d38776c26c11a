"""The estimate behind ``farandole estimate``: functions by name in, facts about the training out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...core.vocabulary.errors import ConfigError
from ...plan.memory_page import Estimate, EstimateRequest
from .probe import Question, probe
from .shapes import read_shape, zeros_of
from .user_code import load_function


def estimate(request: EstimateRequest) -> Estimate:
    """Return what is known about a training. Raises `ConfigError` for input that is not usable."""
    if request.device == "cuda" and not torch.backends.cuda.is_built():
        raise ConfigError("--device cuda: this torch is built without CUDA", remedy="leave --device out")
    answer = probe(
        Question(
            make_model=load_function(request.model, what="the model"),
            make_batch=_make_batch(request),
            loss=load_function(request.loss, what="--loss") if request.loss else None,
            optimizer=request.optimizer,
            device=request.device,
        )
    )
    return Estimate(request, answer.facts, answer.parameters, answer.blocks, answer.notes)


def _make_batch(request: EstimateRequest) -> Callable[[], Any] | None:
    if request.batch:
        return load_function(request.batch, what="--batch")
    if not request.inputs:
        return None
    for text in request.inputs:
        read_shape(text)
    return lambda: zeros_of(request.inputs)

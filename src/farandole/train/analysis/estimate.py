"""The estimate behind ``farandole estimate``: functions by name in, facts about the training out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...core.vocabulary.errors import ConfigError
from ...plan.answer.by_degrees import DividedModel
from ...plan.memory import memory_of
from ...plan.memory_page import Estimate, EstimateRequest
from ..memory.probe import Question, probe
from ..memory.shapes import read_shape, zeros_of
from ..memory.user_code import load_function
from .analyse import analyse


def estimate(request: EstimateRequest) -> Estimate:
    """Return what is known about a training. Raises `ConfigError` for input that is not usable."""
    if request.device == "cuda" and not torch.backends.cuda.is_built():
        raise ConfigError("--device cuda: this torch is built without CUDA", remedy="leave --device out")
    if request.degrees:
        return _divided(request)
    answer = probe(
        Question(
            make_model=load_function(request.model, what="the model"),
            make_batch=_make_batch(request),
            loss=load_function(request.loss, what="--loss") if request.loss else None,
            optimizer=request.optimizer,
            device=request.device,
        )
    )
    memory = partial(memory_of, answer.facts, ranks_per_host=request.choice.ranks_per_host)
    return Estimate(request, answer.facts, answer.parameters, answer.blocks, answer.notes, memory)


def _divided(request: EstimateRequest) -> Estimate:
    """Return the estimate of a model that degrees divide: by the planner's profile of it."""
    make_batch = _make_batch(request)
    if make_batch is None:
        first = next(iter(request.degrees))
        raise ConfigError(f"--{first} needs the batch of a rank", remedy="add --input 8,128:int64, or --batch")
    profile = analyse(
        load_function(request.model, what="the model"),
        make_batch,
        loss=load_function(request.loss, what="--loss") if request.loss else None,
        optimizer=request.optimizer,
        device=request.device,
    )
    divided = DividedModel(profile, request.degrees, request.choice.ranks_per_host)
    divided.refuse([request.np, *request.ranks])
    choice, notes = divided.possible(request.choice, request.np)
    parameters = profile.memory.weights["bf16-weights"].weight_bytes // torch.bfloat16.itemsize
    return Estimate(
        replace(request, choice=choice), profile.memory, parameters, profile.blocks, [*profile.notes, *notes],
        divided.memory,
    )  # fmt: skip


def _make_batch(request: EstimateRequest) -> Callable[[], Any] | None:
    if request.batch:
        return load_function(request.batch, what="--batch")
    if not request.inputs:
        return None
    for text in request.inputs:
        read_shape(text)
    return lambda: zeros_of(request.inputs)

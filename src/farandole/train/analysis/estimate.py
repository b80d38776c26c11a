"""The estimate behind ``farandole estimate``: functions by name in, facts about the training out."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...core.host.process_status import data_bytes, resident_bytes
from ...core.vocabulary.errors import ConfigError
from ...parallel.optim.disk_states import KINDS
from ...plan.answer.text import DividedModel
from ...plan.memory import ModelFacts, memory_of
from ...plan.memory_page import OFFLOAD, UNKNOWN_PROCESS, Estimate, EstimateRequest, ProcessMemory
from ..memory.batches import SAMPLES, Batches, read_shape, zeros_of
from ..memory.optimizers import OPTIMIZERS
from ..memory.probe import Question, probe
from ..memory.trial import be_like_a_rank
from ..memory.user_code import load_function
from .analyse import analyse


def estimate(request: EstimateRequest) -> Estimate:
    """Return what is known about a training. Raises `ConfigError` for input that is not usable."""
    question = Question(
        make_model=load_function(request.model, what="the model"),
        make_batch=_make_batch(request),
        loss=load_function(request.loss, what="--loss") if request.loss else None,
        optimizer=request.optimizer,
        device=request.device,
        lighter=[] if request.degrees else request.choice.lighter_ends(),
    )
    process = process_before_model() if request.device == "cpu" else UNKNOWN_PROCESS
    with _ids_are_whole(request.inputs):
        if request.degrees:
            return replace(_divided(request, question), process=process)
        answer = probe(question)
    request = _without_failed(request, answer.facts, answer.notes)
    if question.make_batch is not None and Batches(question.make_batch).takes_samples:
        answer.notes.append(f"--batch takes the number of samples: these are bytes for {SAMPLES} of them")
    memory = partial(memory_of, answer.facts, ranks_per_host=request.choice.ranks_per_host)
    has_states = all(each.state_bytes_per_element for each in answer.facts.optimizer.values())
    goes_to_disk = has_states and OPTIMIZERS[request.optimizer].kind in KINDS and request.device == "cpu"
    on_disk = {OFFLOAD: partial(memory, on_disk=True)} if goes_to_disk else {}
    lighter = on_disk | {
        name: partial(memory_of, facts, ranks_per_host=request.choice.ranks_per_host)
        for name, facts in answer.facts.lighter.items()
    }
    return Estimate(
        request, answer.facts, answer.parameters, answer.blocks, answer.notes, memory, process, lighter
    )


def _without_failed(request: EstimateRequest, facts: ModelFacts, notes: Sequence[str]) -> EstimateRequest:
    """Return the request without settings in which a pass fails. Raises `ConfigError` if none is left."""
    choice = request.choice.without(facts.failed)
    if not choice.precisions or not choice.recompute:
        raise ConfigError("; ".join(note for note in notes if "is left out, as" in note))
    return replace(request, choice=choice)


def process_before_model() -> ProcessMemory:
    """Return what this process has; its modules and the user's are loaded, and there is no model."""
    be_like_a_rank()
    return ProcessMemory(resident_bytes() or 0, data_bytes() or 0)


def _divided(request: EstimateRequest, question: Question) -> Estimate:
    """Return the estimate of a model that degrees divide: by the planner's profile of it."""
    if question.make_batch is None:
        first = next(iter(request.degrees))
        raise ConfigError(f"--{first} needs the batch of a rank", remedy="add --input 8,128:int64, or --batch")
    profile = analyse(
        question.make_model, question.make_batch, loss=question.loss, optimizer=request.optimizer,
        device=request.device,
    )  # fmt: skip
    divided = DividedModel(profile, request.degrees, request.choice.ranks_per_host)
    divided.refuse([request.np, *request.ranks])
    request = _without_failed(request, profile.memory, profile.notes)
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


@contextlib.contextmanager
def _ids_are_whole(texts: Sequence[str]) -> Iterator[None]:
    """Say how a batch of ids is written where a model looks up what was given as shapes without a type."""
    try:
        yield
    except ConfigError as problem:
        untyped = next((text for text in texts if ":" not in text), None)
        if untyped is None or not re.search(r"Long, Int|embedding|tensors used as indices", str(problem)):
            raise
        raise ConfigError(problem.message, remedy=f"give ids their type: --input {untyped}:int64") from None

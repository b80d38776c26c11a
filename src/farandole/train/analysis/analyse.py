"""`analyse`: any model, as the planner sees it. Nothing of it is allocated, unless it reads values of tensors.

[Note: passes that read values] Control flow that depends on values, such as routing tokens to experts, cannot be
run on fake tensors. Then the model is made with memory, and one small pass is run for real, if memory allows it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ...core.host.process_status import data_bytes, resident_bytes
from ...core.vocabulary.errors import ConfigError, PlanError
from ...core.vocabulary.units import format_bytes
from ...parallel.blocks import repeated_blocks
from ...parallel.data.model_changes import tied_names
from ...parallel.optim.disk_states import KINDS
from ...parallel.optim.elementwise import why_not_elementwise
from ...parallel.pipeline.layout import starts_of_layers
from ...parallel.pipeline.micro_batches import as_call
from ...parallel.pipeline.trace import trace, traced_through
from ...plan.answer import DividedModel
from ...plan.memory import (
    PRECISIONS,
    RECOMPUTE,
    ActivationFacts,
    ModelFacts,
    OptimizerFacts,
    WeightFacts,
    memory_of,
)
from ...plan.memory_page import OFFLOAD, UNKNOWN_PROCESS, Estimate, EstimateRequest, ProcessMemory
from ...plan.profile import ModelProfile, ModelUnit
from .fake_pass import (
    counted_on,
    fake_mode,
    grouped_products,
    make_fake,
    needs_values,
    operations_of,
    run_pass,
    silent_logger,
)
from .find_micro_batch import available_bytes
from .probe import (
    OPTIMIZERS,
    Question,
    make_on_meta,
    make_optimizer,
    optimizer_facts,
    probe,
    step_operations,
    weight_facts,
)
from .record import PassRecorder, record
from .repeated_blocks import NotAlikeError, foldable, skipped
from .spans import Marks, find_marks, marks_inside
from .trial import be_like_a_rank
from .units import UnitMaker, find_parts
from .user_code import (
    SAMPLES,
    Batches,
    Loss,
    batch_bytes,
    batch_in,
    describe,
    errors_of_user,
    inputs_and_targets,
    load_function,
    module_of,
    read_shape,
    recomputed,
    resized,
    weight_type,
    zeros_of,
)


# Whether a pipeline can cut a model: its code is recorded as a pipeline does it at the first step.
def why_not_cut(model: nn.Module, batch: Any, *, fold: bool) -> str:
    """Return why a pipeline cannot cut `model`; an empty text if it can. Buffers may change.

    With `fold` some of the blocks that are alike are not run: it is the code between blocks that is recorded.
    """
    kept, left_out = foldable(model) if fold else ([], [])
    if left_out:
        try:
            with skipped(kept[0][1], left_out, copies=True):
                return _why_not(model, batch)
        except NotAlikeError:
            pass
    return _why_not(model, batch)


def _why_not(model: nn.Module, batch: Any) -> str:
    arguments, named = as_call(batch)
    state = torch.get_rng_state()
    try:
        program, _ = trace(model, arguments, named, traced_through(model))
    except PlanError as error:
        return str(error)
    except Exception as error:
        if not needs_values(error):
            raise
        return f"forward of {type(model).__name__} does not run on tensors without values"
    finally:
        torch.set_rng_state(state)
    if not starts_of_layers(program, model):
        return f"forward of {type(model).__name__} calls one module with parameters alone"
    return ""


_LISTED = 8
_ELSEWHERE = (
    "run farandole plan with --out plan.toml where the model runs: it writes plan.profile.json, which "
    "plan --profile takes here"
)
_STATE_FACTOR = 3
"""Bytes that a real pass needs for each byte of parameters: weights, gradients, and as much for activations."""


def analyse(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[..., Any],
    *,
    loss: Loss | None = None,
    optimizer: str = "adamw",
    device: str = "cpu",
    tensor_recipe: Mapping[str, str] | None = None,
) -> ModelProfile:
    """Return the profile of a model: its units, what they compute, keep and send, per sample.

    Args:
        make_model: returns the model, any `nn.Module`; it is called on the meta device, so that nothing is
            allocated, and once more if it must be run for real.
        make_batch: returns a batch of the number of samples that it gets, or, without a parameter, an example: a
            tensor, a sequence of the model's positional arguments, or a mapping of its named ones; with `loss`, a
            pair of such inputs and targets too. The first dimension counts the samples.
        loss: from what the model returns, and the batch (of a pair the targets), to a scalar; by default the sum
            of what it returns.
        optimizer: a name as in ``farandole estimate``.
        device: "cpu" or "cuda": whose operations are counted. GPUs may be missing here; see `operations_of`.
        tensor_recipe: as the plan key, what tensor parallel does with layers that are not recognised.

    Returns:
        The profile, without seconds (`measure_units`). `notes` name what is not known: parts without a recipe,
        operations without a count.

    Raises:
        ConfigError: what the user's functions raise or return is no training; with their file and line.
        PlanError: a pattern of the recipe matches no layer.
    """
    tensor_recipe = tensor_recipe or {}
    batches = Batches(make_batch)
    notes: list[str] = []
    states = optimizer_facts(optimizer, torch.float32, device)
    model = make_on_meta(make_model, notes)
    marks = find_marks(model, tensor_recipe)
    runs_on = counted_on(device)
    try:
        with fake_mode(), operations_of(device):
            make_fake(model, runs_on, None)
            with torch.device(runs_on):
                batch, samples = batches.example()
            found = _TwoPasses(model, batch, samples, loss, runs_on).record_folded(marks)
        with grouped_products():  # outside of the mode: what forward makes itself has values
            reason = why_not_cut(model, inputs_and_targets(model, batch, loss)[0], fold=True)
        answer = probe(Question(lambda: model, make_batch, loss, optimizer, device))
        memory, why = answer.facts, answer.notes
    except Exception as error:
        if not needs_values(error):
            raise
        why_real = f"{module_of(error, model)} does not run on tensors without values: {describe(error)}"
        notes.append(f"run for real on a small batch: {why_real}")
        model, batch, samples = _make_real(make_model, batches, runs_on, why_real)
        with operations_of(device), _ways_on(why_real):
            found = _TwoPasses(model, batch, samples, loss, runs_on).record(find_marks(model, tensor_recipe), {})
        reason = why_not_cut(model, inputs_and_targets(model, batch, loss)[0], fold=False)
        memory, why = _real_memory(model, batch, loss, optimizer, device)
    notes += [note for note in (*why, *found.notes) if note not in notes]
    parameter = nn.Parameter(torch.zeros(8, 4, dtype=torch.float32, device="cpu"))
    return ModelProfile(
        name=type(model).__name__,
        units=tuple(found.units),
        samples=samples,
        batch_bytes=batch_bytes(batch) / samples,
        memory=memory,
        device=device,
        optimizer=optimizer,
        optimizer_state_bytes=states.state_bytes_per_element,
        optimizer_moved_bytes=12 + 2 * states.state_bytes_per_element,
        optimizer_operations=float(step_operations(optimizer, device)),
        elementwise_optimizer=not why_not_elementwise(make_optimizer(optimizer, [parameter])),
        blocks=len(repeated_blocks(model)),
        can_be_cut=reason,
        tied=tuple(tied_names(model)),
        notes=tuple(notes),
        tensor_recipe=tensor_recipe,
    )


class _Found(NamedTuple):
    """Units and notes of passes."""

    units: list[ModelUnit]
    notes: list[str]


@dataclass(frozen=True)
class _TwoPasses:
    """Passes of one model: with the example batch, and with one of twice as many samples."""

    model: nn.Module
    batch: Any
    samples: int
    loss: Loss | None
    device: str

    def record_folded(self, marks: Marks) -> _Found:
        """Record passes through some of the blocks that are alike, where that is possible."""
        kept, left_out = foldable(self.model)
        known = [marks_inside(marks, block) for block in (kept[-1][1], *left_out)] if left_out else []
        if left_out and all(each == known[0] for each in known):
            try:
                with skipped(kept[0][1], left_out):
                    return self.record(marks, {kept[-1][0]: len(left_out)})
            except NotAlikeError:
                pass
        return self.record(marks, {})

    def record(self, marks: Marks, left_out: dict[str, int]) -> _Found:
        """Record passes; `left_out`: how many blocks are skipped after which."""
        with silent_logger():
            one, two = (
                record(self.model, resized(self.batch, self.samples, size), self.loss, marks, device=self.device)
                for size in (self.samples, 2 * self.samples)
            )
        parts = find_parts(self.model, one.spans, one.first_use, left_out)
        maker = UnitMaker(self.model, marks, (one, two), self.samples)
        units = maker.fold(parts)
        return _Found(units, [*marks.notes, *maker.notes, *_unknown(units, one)])


def _unknown(units: list[ModelUnit], recorder: PassRecorder) -> list[str]:
    notes = []
    whole = [f"{unit.name} ({unit.kind})" for unit in units if _has_matrices(unit) and unit.tensor is None]
    if whole:
        more = f" and {len(whole) - _LISTED} more" if len(whole) > _LISTED else ""
        notes.append(f"tensor: not recognised, and whole on every rank: {', '.join(whole[:_LISTED])}{more}")
    if recorder.undivided:
        notes.append(f"context: sequences cannot be divided, with {recorder.undivided}")
    if recorder.uncounted:
        notes.append(f"operations without a count of FLOPs: {', '.join(sorted(recorder.uncounted))}")
    return notes


def _has_matrices(unit: ModelUnit) -> bool:
    return any(each.columns > 1 for each in unit.gradients)


@contextmanager
def _ways_on(why_real: str) -> Iterator[None]:
    """Say with what a real pass raises why there is one, and what else can be done."""
    try:
        yield
    except ConfigError as problem:
        remedy = problem.remedy or _ELSEWHERE
        raise ConfigError(f"{problem.message}; it ran for real, as {why_real}", remedy=remedy) from problem


def _make_real(
    make_model: Callable[[], nn.Module], batches: Batches, device: str, why_real: str
) -> tuple[nn.Module, Any, int]:
    """See [Note: passes that read values]."""
    notes: list[str] = []
    weights = sum(each.nbytes for each in make_on_meta(make_model, notes).parameters())
    have = available_bytes(1)
    if have is not None and _STATE_FACTOR * weights > have:
        raise ConfigError(
            f"{why_real}: so the model must be run for real, and its {format_bytes(weights)} of parameters need "
            f"about {format_bytes(_STATE_FACTOR * weights)}: there are {format_bytes(have)}",
            remedy=f"analyse a smaller model of the same form, or {_ELSEWHERE}",
        )
    with errors_of_user("making the model"):
        model = make_model().to(device)
    batch, samples = batches.example()
    if samples > 2:
        batch, samples = resized(batch, samples, 2), 2
    return model, batch_in(None, batch, device), samples


def _real_memory(
    model: nn.Module, batch: Any, loss: Loss | None, optimizer: str, device: str
) -> tuple[ModelFacts, list[str]]:
    """Return the memory of a model that is run for real, and notes. Its parameters end in another precision."""
    weights: dict[str, WeightFacts] = {}
    states: dict[str, OptimizerFacts] = {}
    activations: dict[tuple[str, str], ActivationFacts] = {}
    notes = []
    for precision in PRECISIONS:
        kind = weight_type(precision)
        model.to(dtype=kind)
        weights[precision] = weight_facts(model)
        states[precision] = optimizer_facts(optimizer, kind or torch.float32, device)
        for recompute in RECOMPUTE:
            try:
                with recomputed(model, recompute, draws_again=True), operations_of(device):
                    activations[precision, recompute] = run_pass(
                        model, batch_in(kind, batch), loss, device=counted_on(device), precision=precision
                    )
            except Exception as error:  # such as where there is no kernel for a type: the note says so
                notes.append(f"activations are unknown in {precision}, recompute {recompute}: {describe(error)}")
    return ModelFacts(weights, states, activations), notes


# The estimate behind ``farandole estimate``: functions by name in, facts about the training out.


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

"""What `farandole estimate` knows about a model: its weights, its optimizer, and its passes on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import did_you_mean
from ...parallel.blocks import repeated_blocks
from ...parallel.frozen_model import (
    adaptable,
    encode_weights,
    frozen_weights,
    low_rank_adapters,
    stored_tensors,
)
from ...parallel.frozen_weight import FORMS, FrozenWeight
from ...parallel.lower_precision import product_weights
from ...plan.memory import (
    ADAPTER_RANK,
    PRECISIONS,
    RECOMPUTE,
    ActivationFacts,
    ModelFacts,
    OptimizerFacts,
    WeightFacts,
)
from .fake_pass import LargerBatch, LiveStorages, counted_on, fake_mode, make_fake, needs_values, operations_of
from .repeated_blocks import activations_of
from .user_code import (
    Batches,
    Loss,
    batch_in,
    describe,
    errors_of_user,
    recomputed,
    resized,
    samples_of,
    weight_type,
)

LARGER = 32
"""So large that batches of a rank are between the two."""


@dataclass(frozen=True)
class Question:
    """The training that is asked about."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[..., Any] | None = None
    """Returns the batch of a rank, as `Batches` takes it; None: activations stay unknown."""
    loss: Loss | None = None
    optimizer: str = "adamw"
    device: str = "cpu"
    """Whose operations are counted."""
    precisions: Sequence[str] = PRECISIONS
    recompute: Sequence[str] = RECOMPUTE
    lighter: Sequence[tuple[str, str]] = ()
    """Precisions and recomputations for which the model is also run frozen: with adapters, and in few bits."""


@dataclass
class Answer:
    """Facts about a training, and notes for its user: what is unknown, and why."""

    facts: ModelFacts
    parameters: int = 0
    """Elements of all parameters."""
    blocks: int = 0
    notes: list[str] = field(default_factory=list)


def probe(question: Question) -> Answer:
    """Find out what there is to know. Nothing of the model is allocated, unless its constructor reads values.

    Raises `ConfigError` for what the user's functions raise or return, with their file and line.
    """
    weights: dict[str, WeightFacts] = {}
    activations: dict[tuple[str, str], ActivationFacts] = {}
    answer = Answer(ModelFacts(weights, {}, activations))
    optimizer = {
        precision: optimizer_facts(question.optimizer, weight_type(precision) or torch.float32, question.device)
        for precision in question.precisions
    }
    answer.facts = ModelFacts(weights, optimizer, activations)
    with operations_of(question.device):
        _probe_passes(question, answer, weights, activations)
    if question.make_batch is None:
        _note(answer, "activations are unknown: give the batch of a rank with --input or --batch")
    if not answer.blocks and "blocks" in question.recompute:
        _note(
            answer,
            "the model has no repeated blocks, so there is nothing to recompute, and stage 3 gathers it all: let "
            "an nn.ModuleList hold its layers, each a module of its own or an nn.Sequential",
        )
    return answer


def _probe_passes(
    question: Question, answer: Answer, weights: dict[str, WeightFacts],
    activations: dict[tuple[str, str], ActivationFacts],
) -> None:  # fmt: skip
    for precision in question.precisions:
        model = make_on_meta(question.make_model, answer.notes)
        with fake_mode():
            make_fake(model, counted_on(question.device), weight_type(precision))
            weights[precision] = weight_facts(model)
            answer.parameters = sum(parameter.numel() for parameter in model.parameters())
            answer.blocks = len(repeated_blocks(model))
            if question.make_batch is None:
                continue
            for recompute in question.recompute:
                try:
                    _run_passes(question, (precision, recompute), model, answer, activations)
                except ConfigError as problem:
                    if (precision, recompute) == (question.precisions[0], question.recompute[0]):
                        raise
                    _leave_out(answer, (precision, recompute), model, problem)
    lighter: dict[str, _Lighter] = {}
    for precision, recompute in question.lighter:
        _probe_lighter(question, (precision, recompute), answer, lighter)
    optimizer = answer.facts.optimizer
    found = {name: ModelFacts(each.weights, optimizer, each.activations) for name, each in lighter.items()}
    answer.facts = replace(answer.facts, lighter=found)


def weight_facts(model: nn.Module) -> WeightFacts:
    """Return the bytes of a model's parameters and buffers, each once however often it is used."""
    parameters = list(model.parameters())
    trainable = [each for each in parameters if each.requires_grad]
    blocks = [list(block.parameters()) for _, block in repeated_blocks(model)]
    inside = {id(each) for block in blocks for each in block}
    products = {id(each) for each in product_weights(model) if not isinstance(each, FrozenWeight)}
    cast = [sum(2 * each.numel() for each in block if id(each) in products) for block in blocks]
    return WeightFacts(
        weight_bytes=_bytes(stored_tensors(parameters)),
        buffer_bytes=_bytes(list(model.buffers())),
        trainable_bytes=_bytes(trainable),
        trainable_elements=sum(each.numel() for each in trainable),
        trainable_tensors=len(trainable),
        largest_tensor_bytes=max((each.nbytes for each in trainable), default=0),
        outside_blocks_bytes=_bytes(stored_tensors([each for each in parameters if id(each) not in inside])),
        largest_block_bytes=max((_bytes(stored_tensors(block)) for block in blocks), default=0),
        blocks_cast_bytes=sum(cast),
        largest_block_cast_bytes=max(cast, default=0),
    )


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def make_on_meta(make_model: Callable[[], nn.Module], notes: list[str]) -> nn.Module:
    """Return the model, on the meta device if its constructor does not read values; if it does, `notes` say it.

    Raises `ConfigError` if it is no model, if it has parameters without shapes, or for what its maker raises.
    """
    model: Any = None
    with errors_of_user("making the model"):
        try:
            with torch.device("meta"):
                model = make_model()
        except Exception as error:
            if not needs_values(error):
                raise
            text = f"the model was made with memory, as its constructor reads values: {describe(error)}"
            if text not in notes:
                notes.append(text)
            model = make_model()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the function for the model returned {type(model).__name__}, expected an nn.Module")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"parameter {name} gets its shape in the first forward pass",
                remedy="call the model once on a small batch in the function that makes it",
            )
    return model


def _run_passes(
    question: Question,
    setting: tuple[str, str],
    model: nn.Module,
    answer: Answer,
    activations: dict[tuple[str, str], ActivationFacts],
) -> None:
    assert question.make_batch is not None, "without a batch there is no pass"
    precision, recompute = setting
    device = counted_on(question.device)
    try:
        with torch.device(device):
            batch = batch_in(weight_type(precision), Batches(question.make_batch).made())
            larger = _larger(batch)
        with recomputed(model, recompute):
            activations[setting] = activations_of(
                model, batch, question.loss,
                device=device, precision=precision, larger=larger,
                keeps_casts=recompute != "blocks",
            )  # fmt: skip
        if larger is not None and larger.problems:
            what = f"what grows with the batch is not known, as a batch {LARGER} times as large fails"
            _note(answer, f"{what}: {larger.problems[0]}")
    except Exception as error:
        if not needs_values(error):
            raise
        _note(
            answer, f"activations are unknown: the model does not run on tensors without values: {describe(error)}"
        )


def _leave_out(answer: Answer, setting: tuple[str, str], model: nn.Module, problem: ConfigError) -> None:
    precision, recompute = setting
    answer.facts = replace(answer.facts, failed=(*answer.facts.failed, setting))
    cached = getattr(getattr(model, "config", None), "use_cache", False)
    hint = "; a cache grows where a block runs again: use_cache=False" if cached else ""
    what = precision if recompute == RECOMPUTE[0] else f"{precision} with recompute = {recompute!r}"
    _note(answer, f"{what} is left out, as {problem.message}{hint}")


def _larger(batch: Any) -> LargerBatch | None:
    """Return a larger batch; None where samples cannot be counted, or not be joined."""
    try:
        samples = samples_of(batch)
        return LargerBatch(resized(batch, samples, LARGER * samples), LARGER, [])
    except Exception:  # objects of other libraries, and tensors that are not dense
        return None


class _Lighter(NamedTuple):
    weights: dict[str, WeightFacts]
    activations: dict[tuple[str, str], ActivationFacts]


def _probe_lighter(
    question: Question, setting: tuple[str, str], answer: Answer, lighter: dict[str, _Lighter]
) -> None:
    """Add the facts of the model with its frozen weights in few bits; with adapters where nothing is frozen."""
    for codec in (NONE, *FORMS):
        model = make_on_meta(question.make_model, answer.notes)
        with fake_mode():
            make_fake(model, counted_on(question.device), weight_type(setting[0]))
            names = []
            if all(each.requires_grad for each in model.parameters()):
                layers = adaptable(model, ADAPTER_RANK)
                model.requires_grad_(False)
                if not layers:
                    return
                low_rank_adapters(model, layers, rank=ADAPTER_RANK)
                names.append("adapters")
            if codec != NONE:
                found = dict(frozen_weights(model))
                if not found:
                    return
                encode_weights(found, codec, ())
                names.append(codec)
            if not names:
                continue
            facts = lighter.setdefault(", ".join(names), _Lighter({}, {}))
            facts.weights[setting[0]] = weight_facts(model)
            if question.make_batch is None:
                continue
            try:
                _run_passes(question, setting, model, answer, facts.activations)
            except ConfigError as problem:
                del lighter[", ".join(names)]
                _note(answer, f"{', '.join(names)}: not known, as {problem.message}")


def _note(answer: Answer, text: str) -> None:
    if text not in answer.notes:
        answer.notes.append(text)


# What optimizers keep and need: found by a step of each on small tensors, and not by a table.


class _Named(NamedTuple):
    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any] = {}


OPTIMIZERS = {
    "adam": _Named(torch.optim.Adam),
    "adamw": _Named(torch.optim.AdamW),
    "adamax": _Named(torch.optim.Adamax),
    "adagrad": _Named(torch.optim.Adagrad),
    "nadam": _Named(torch.optim.NAdam),
    "radam": _Named(torch.optim.RAdam),
    "rmsprop": _Named(torch.optim.RMSprop),
    "sgd": _Named(torch.optim.SGD),
    "sgd-momentum": _Named(torch.optim.SGD, {"momentum": 0.9}),
}
"""Optimizers of torch by name, with the options that change what they keep."""
_FEW, _MANY = 1024, 4096
"""Elements of the tensors that are stepped: their states differ by what depends on the number of elements."""


def make_optimizer(name: str, parameters: Iterable[torch.Tensor], **options: Any) -> torch.optim.Optimizer:
    """Return optimizer `name` of these parameters. Raises `ConfigError` for an unknown name."""
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer {name!r} is not known", remedy=did_you_mean(name, OPTIMIZERS))
    make: Any = OPTIMIZERS[name].kind
    optimizer: torch.optim.Optimizer = make(parameters, lr=1e-3, **OPTIMIZERS[name].options, **options)
    return optimizer


def optimizer_facts(name: str, dtype: torch.dtype, device: str) -> OptimizerFacts:
    """Return what optimizer `name` keeps for parameters of `dtype`. Raises `ConfigError` for an unknown name.

    On a "cuda" device torch updates all parameters at once (foreach), which takes temporaries for all of them.
    """
    foreach = device == "cuda"
    few, many = (_step(name, elements, dtype, foreach) for elements in (_FEW, _MANY))
    per_element = (many.state_bytes - few.state_bytes) / (_MANY - _FEW)
    return OptimizerFacts(
        state_bytes_per_element=per_element,
        state_bytes_per_tensor=few.state_bytes - per_element * _FEW,
        temporary_bytes_per_element=(many.temporary_bytes - few.temporary_bytes) / (_MANY - _FEW),
        updates_at_once=foreach,
    )


def step_operations(name: str, device: str) -> int:
    """Return how many operations a step of optimizer `name` starts: on "cpu" for each tensor, else for all."""
    if device == "cuda":
        return _operations(name, 1, foreach=True)
    return _operations(name, 2, foreach=False) - _operations(name, 1, foreach=False)


def _operations(name: str, tensors: int, *, foreach: bool) -> int:
    parameters = [torch.nn.Parameter(torch.zeros(_FEW, dtype=torch.float32, device="cpu")) for _ in range(tensors)]
    for each in parameters:
        each.sum().backward()
    optimizer = make_optimizer(name, parameters, foreach=foreach)
    optimizer.step()  # makes the states
    counted = _CountedOperations()
    with counted:
        optimizer.step()
    return counted.count


class _CountedOperations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one, and count it."""
        self.count += 1
        return operation(*args, **(kwargs or {}))


class _StepMemory(NamedTuple):
    state_bytes: int
    temporary_bytes: int


def _step(name: str, elements: int, dtype: torch.dtype, foreach: bool) -> _StepMemory:
    """Step twice and return the bytes of the states, and of temporaries of the second step."""
    parameter = torch.nn.Parameter(torch.zeros(elements, dtype=dtype, device="cpu"))
    parameter.sum().backward()
    assert parameter.grad is not None, "backward made it"
    optimizer = make_optimizer(name, [parameter], foreach=foreach)
    optimizer.step()
    states = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    live = LiveStorages([parameter, parameter.grad, *states])
    with live:
        optimizer.step()
    return _StepMemory(sum(state.untyped_storage().nbytes() for state in states), live.peak_bytes)

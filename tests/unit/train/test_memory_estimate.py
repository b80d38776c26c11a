"""The estimate of memory against real tensors: what is really allocated by a step, counted by category."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from farandole.bench.models import Bottleneck, LanguageModel
from farandole.parallel.blocks import repeated_blocks
from farandole.plan.memory import PRECISIONS, RECOMPUTE, Setting, memory_of
from farandole.train.analysis.probe import OPTIMIZERS, Question, optimizer_facts, probe

ALLOWED = 0.02


def transformer() -> nn.Module:
    return LanguageModel(width=128, depth=3, heads=4, context=64, vocabulary=500)


def tokens() -> torch.Tensor:
    return torch.zeros(4, 64, dtype=torch.int64)


def cnn() -> nn.Module:
    stem = [nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    blocks = [Bottleneck(64, 16, 1), Bottleneck(64, 32, 2), Bottleneck(128, 32, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def images() -> torch.Tensor:
    return torch.zeros(4, 3, 32, 32, dtype=torch.float32)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "transformer": (transformer, tokens),
    "cnn": (cnn, images),
}


class Measured:
    """Bytes of a real step on the CPU, by category: each storage once."""

    def __init__(self, model: nn.Module, batch: torch.Tensor, precision: str, recompute: str) -> None:
        if precision == "bf16-weights":
            model.to(torch.bfloat16)
            batch = batch.to(torch.bfloat16) if batch.is_floating_point() else batch
        states = [*model.parameters(), *model.buffers()]
        saved = Storages(without=states)
        saved.add(batch)
        if recompute == "blocks":
            for _, block in repeated_blocks(model):
                block.register_forward_pre_hook(lambda _, inputs: saved.add(inputs[0]))
                vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)
        autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
        with autocast, saved_tensors_hooks(saved.keep, lambda tensor: tensor):
            loss = model(batch).sum()
        self.activations_bytes = saved.nbytes
        loss.backward()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        self.weights_bytes = Storages(states).nbytes
        self.gradients_bytes = Storages(each.grad for each in model.parameters() if each.grad is not None).nbytes
        kept = [value for state in optimizer.state.values() for value in state.values()]
        self.optimizer_bytes = Storages(kept).nbytes


class Storages:
    """Storages of tensors, kept alive, each once."""

    def __init__(self, tensors: Iterable[torch.Tensor] = (), without: Iterable[torch.Tensor] = ()) -> None:
        self._without = {tensor.untyped_storage().data_ptr() for tensor in without}
        self._kept: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._without:
            self._kept[storage.data_ptr()] = storage

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.add(tensor)
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._kept.values())


@pytest.mark.gate_cases(
    "cnn-bf16-blocks",
    "cnn-fp32-none",
    "transformer-bf16-blocks",
    "transformer-fp32-none",
    "transformer-bf16-weights-none",
    "cnn-bf16-weights-blocks",
)
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_what_a_step_allocates(name: str, precision: str, recompute: str) -> None:
    make_model, make_batch = MODELS[name]
    question = Question(make_model, make_batch, precisions=[precision], recompute=[recompute])
    estimated = memory_of(probe(question).facts, Setting("0", precision, recompute, 1))
    measured = Measured(make_model(), make_batch(), precision, recompute)
    for category in ("weights", "gradients", "optimizer", "activations"):
        real, said = getattr(measured, f"{category}_bytes"), getattr(estimated, f"{category}_bytes")
        assert real > 0, f"{category}: something is measured"
        assert said == pytest.approx(real, rel=ALLOWED), f"{category}: estimated {said}, real {real}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_optimizers_are_those_of_a_real_step(name: str, dtype: torch.dtype) -> None:
    shapes = [(100, 30), (30,), (7, 7, 7)]
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    make: Any = OPTIMIZERS[name].kind
    optimizer = make(parameters, lr=0.1, **OPTIMIZERS[name].options)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    real = sum(each.untyped_storage().nbytes() for each in kept if isinstance(each, torch.Tensor))
    facts = optimizer_facts(name, dtype, "cpu")
    elements = sum(parameter.numel() for parameter in parameters)
    said = facts.state_bytes_per_element * elements + facts.state_bytes_per_tensor * len(shapes)
    assert said == real, f"{name}, {dtype}: estimated {said}, real {real}"


def test_tied_and_frozen_parameters_and_buffers() -> None:
    def make() -> nn.Module:
        first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        tied = nn.Linear(64, 64, bias=False)
        tied.weight = first.weight
        second.weight.requires_grad_(False)
        return nn.Sequential(first, second, tied, nn.BatchNorm1d(64))

    answer = probe(Question(make, lambda: torch.zeros(8, 64), precisions=["fp32"], recompute=["none"]))
    weights = answer.facts.weights["fp32"]
    matrix, norm = 4 * 64 * 64, 4 * 2 * 64
    assert answer.parameters == 2 * 64 * 64 + 2 * 64, "the tied matrix counts once"
    assert weights.weight_bytes == 2 * matrix + norm, "the frozen matrix is a weight"
    assert weights.trainable_bytes == matrix + norm, "and has no gradient"
    assert weights.buffer_bytes == norm + 8, "two running statistics, and a count in int64"


def test_what_autocast_casts_of_blocks_is_their_matrices_that_are_not_stored_in_few_bits() -> None:
    answer = probe(Question(transformer, precisions=["bf16"], recompute=["none"], lighter=[("bf16", "none")]))
    matrices = sum(
        each.weight.numel()
        for _, block in repeated_blocks(transformer())
        for each in block.modules()
        if isinstance(each, nn.Linear)
    )
    weights, lighter = answer.facts.weights["bf16"], answer.facts.lighter
    assert weights.blocks_cast_bytes == 2 * matrices
    assert weights.largest_block_cast_bytes == 2 * matrices / 3
    assert lighter["adapters"].weights["bf16"].blocks_cast_bytes >= 2 * matrices
    assert lighter["adapters, int8"].weights["bf16"].blocks_cast_bytes < 0.5 * matrices


def test_a_model_that_reads_values_gets_an_estimate_without_activations() -> None:
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum().item() > 0 else -x)

    answer = probe(Question(lambda: Reads(4, 4), lambda: torch.ones(2, 4), precisions=["fp32"]))
    assert answer.facts.activations == {}
    assert answer.facts.weights["fp32"].weight_bytes == 80
    (note,) = [note for note in answer.notes if "without values" in note]
    assert "test_memory_estimate.py:" in note, note


def test_a_constructor_that_reads_values() -> None:
    def make() -> nn.Module:
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 2)]
        return nn.Sequential(nn.Linear(4, 4), nn.Dropout(rates[1]))

    answer = probe(Question(make, lambda: torch.ones(2, 4), precisions=["fp32"], recompute=["none"]))
    assert answer.facts.activations["fp32", "none"].saved_bytes > 0
    assert any("made with memory" in note for note in answer.notes), answer.notes


def test_tensors_that_are_neither_parameters_nor_buffers() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.tables = [torch.arange(4.0)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x) * self.tables[0]
            return out

    answer = probe(Question(Tables, lambda: torch.ones(2, 4), precisions=["fp32"], recompute=["none"]))
    assert answer.notes == []
    assert answer.facts.activations["fp32", "none"].saved_bytes > 0

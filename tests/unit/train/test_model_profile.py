"""Profiles of models: parameters exactly, FLOPs and saved bytes against formulas, and what is not known named."""

from __future__ import annotations

import importlib.util
import resource
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from farandole.bench.models import Bottleneck
from farandole.core.vocabulary.errors import ConfigError
from farandole.plan.profile import ModelProfile, profile_to_mapping, read_profile, write_profile
from farandole.train.analysis.analyse import analyse
from farandole.train.analysis.fake_pass import fake_mode, make_fake, run_pass
from farandole.train.analysis.measure import Timing, fit, measure_units
from farandole.train.analysis.record import record
from farandole.train.analysis.repeated_blocks import activations_of, longest_run
from farandole.train.analysis.spans import find_marks, may_divide_tokens
from farandole.train.analysis.user_code import Batches, inputs_and_targets, recomputed

from .analysed_models import (
    HEADS,
    TOKENS,
    WIDTH,
    WORDS,
    Experts,
    Language,
    Patches,
    ReadsValues,
    mlp,
    next_word,
    words,
)

BLOCK = 12 * WIDTH * WIDTH + 4 * WIDTH
"""Parameters of a block."""


@pytest.fixture(scope="module")
def language() -> ModelProfile:
    """The profile of a tied language model of ten blocks."""
    return analyse(lambda: Language(tied=True), words, loss=next_word)


def trained(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters() if each.requires_grad)


def test_a_language_model_is_folded_and_tied_weights_count_once(language: ModelProfile) -> None:
    assert [(unit.name, unit.count) for unit in language.units] == [
        ("embed", 1), ("layers.0", 10), ("norm", 1), ("head", 1),
    ], "ten equal blocks are one unit"  # fmt: skip
    embed, block, _, head = language.units
    assert language.parameters == trained(Language(tied=True)), "each parameter once"
    assert (embed.parameters, head.parameters) == (WORDS * WIDTH, 0), "the tied weight is where it is first used"
    assert block.parameters == BLOCK, "parameters of one block"
    assert (language.blocks, language.can_be_cut, language.samples) == (10, "", 2), "a pipeline can cut it"
    assert language.batch_bytes == TOKENS * 8, "int64 words of a sample"


def test_flops_of_a_block_are_those_of_its_products(language: ModelProfile) -> None:
    _, block, _, head = language.units
    attention = 4 * TOKENS * (TOKENS + 1) / 2 * WIDTH  # causal: a token sees itself and those before it
    assert block.forward_flops == 2 * TOKENS * 12 * WIDTH**2 + attention, "products and attention, two each"
    assert block.backward_flops == 4 * TOKENS * 12 * WIDTH**2 + 2.5 * attention, "scores are computed again"
    assert (block.fused_flops, block.fused_backward_flops) == (attention, 2.5 * attention)
    assert block.products == 4, "attention is none"
    assert head.forward_flops == 2 * TOKENS * WIDTH * WORDS, "logits"
    assert head.saved_bytes > TOKENS * WORDS * 4, "what the loss keeps belongs to the last unit"


def test_a_block_saves_sixteen_widths_a_token(language: ModelProfile) -> None:
    block = language.units[1]
    # Norms save their mean and deviation, attention the sums of its scores: 4 + HEADS numbers a token.
    assert block.saved_bytes == 4 * TOKENS * (16 * WIDTH + 4 + HEADS), "16 s b h elements of a layer, measured"
    assert block.output_bytes == 4 * TOKENS * WIDTH, "one tensor goes on"
    assert block.attention is not None, "attention was seen"
    seen = block.attention
    assert (seen.heads, seen.key_value_heads, seen.sequence) == (HEADS, HEADS, TOKENS), f"of its calls: {seen}"
    assert (seen.key_value_bytes, seen.query_bytes) == (8 * TOKENS * WIDTH, 4 * TOKENS * WIDTH), "fp32"
    assert seen.saved_bytes == block.saved_bytes, "all of it grows with the sequence"


class Perceptron(nn.Module):
    """A block of two layers that nothing recognises together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = self.down(self.up(x).sort(-1).values)
        return doubled


def test_blocks_that_the_users_recipe_tells_apart_are_no_equals() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(Perceptron() for _ in range(6)))

    def batch() -> torch.Tensor:
        return torch.zeros(2, 16, dtype=torch.float32)

    for more, expected in (({}, [(6, True)]), ({"[45].*": "whole"}, [(4, True), (2, False)])):
        recipe = {"*.up": "columns", "*.down": "rows", **more}
        units = analyse(make, batch, tensor_recipe=recipe).units
        assert [(each.count, each.tensor is not None) for each in units if each.is_block] == expected


def test_gradients_come_in_the_order_of_backward(language: ModelProfile) -> None:
    names = [each.name.removeprefix("layers.0.") for each in language.units[1].gradients]
    products = [name for name in names if "norm" not in name]
    assert products == ["down.weight", "up.weight", "out.weight", "qkv.weight"], "from the end to the beginning"
    shapes = {each.name: (each.rows, each.columns) for each in language.units[1].gradients}
    assert shapes["layers.0.up.weight"] == (4 * WIDTH, WIDTH), "rows are output features"
    assert shapes["layers.0.norm1.bias"] == (WIDTH, 1), "a vector has one column"


@pytest.mark.full("further")
def test_tensor_facts_are_those_of_the_recipe() -> None:
    profile = analyse(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True), 5),
        lambda: torch.zeros(2, TOKENS, 64, dtype=torch.float32),
    )
    block = profile.units[0]
    assert (block.count, block.kind) == (5, "TransformerEncoderLayer"), "torch's layers are blocks"
    facts = block.tensor
    assert facts is not None, "torch's layers have a recipe"
    assert facts.divides == 4, "heads"
    whole = 4 * 64 + 64 + 64  # norms, and the biases after sums
    assert facts.parameters == block.parameters - whole, "norms and biases of the sums are whole"
    by_tensor = [each for each in block.gradients if each.divided_by == "tensor"]
    assert sum(each.rows * each.columns for each in by_tensor) == facts.parameters, "the same, by gradient"
    assert block.is_block, "it is one of the repeated blocks"
    assert facts.flops == block.forward_flops, "all products are in divided layers"
    assert 0 < facts.saved_bytes < block.saved_bytes, "inputs of divided layers are whole"
    assert (facts.forward_sums, facts.backward_sums) == (2, 2), "attention, and the two linear layers"
    assert facts.sum_bytes == 4 * TOKENS * 64, "one activation"
    assert facts.tokens == TOKENS, "all that mixes tokens is divided"
    attention = block.attention
    assert attention is not None, "attention inside of nn.MultiheadAttention is seen"
    assert (attention.heads, attention.key_value_heads, attention.sequence) == (4, 4, TOKENS), "of the layer"
    one = 4 * TOKENS * 64
    assert (attention.query_bytes, attention.key_value_bytes) == (one, 2 * one), "of a sample"
    assert attention.saved_bytes > 0, "what grows with the sequence"
    assert not attention.has_dropout, "its dropout is 0"


class _OfSamples(nn.Module):
    """Neither parameters nor children: it may leave whole samples out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Constant(nn.Module):
    """Mixes tokens by what does not train."""

    matrix: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.eye(TOKENS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix


class _OwnNorm(nn.BatchNorm1d):
    pass


class _Wrapped(nn.Module):
    """torch's layer, and what a block of others may have beside it."""

    def __init__(self, more: nn.Module | None = None, *, batch_first: bool = True) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=batch_first)
        self.more = more


def test_tokens_may_be_divided_where_nothing_whole_mixes_them() -> None:
    """What a whole layer does with tokens is not known, and statistics need all of them."""
    right = [None, nn.Identity(), nn.GELU(), nn.Dropout(0.5), nn.LayerNorm(64)]
    wrong = [
        nn.Conv1d(64, 64, 3), nn.Linear(TOKENS, TOKENS), nn.BatchNorm1d(64), nn.InstanceNorm1d(64, affine=True),
        _OwnNorm(64, affine=False), nn.Softmax(-1), nn.GLU(), nn.Dropout1d(0.5), _OfSamples(), _Constant(),
        nn.LayerNorm((64, TOKENS), elementwise_affine=False),
    ]  # fmt: skip
    cases = [(_Wrapped(more), more in right) for more in [*right, *wrong]]
    cases.append((_Wrapped(batch_first=False), False))
    for block, expected in cases:
        assert may_divide_tokens(find_marks(nn.Sequential(block), {}), block) == expected, f"{block.more}"


@pytest.mark.full("further")
def test_tokens_of_a_block_with_a_second_sequence_stay_whole() -> None:
    """The keys of a decoder are not those tokens that a block takes its part of."""
    layer = nn.TransformerDecoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    profile = analyse(
        lambda: nn.TransformerDecoder(layer, 2), lambda: (torch.zeros(2, TOKENS, 64),) * 2, loss=_sum
    )  # fmt: skip
    facts = profile.units[0].tensor
    assert facts is not None, "torch's layer has a recipe"
    assert facts.tokens == 0, f"{facts}"


def _sum(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output.sum()


class _Dropped(nn.Module):
    """Attention with dropout, as torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.inputs(tokens).unflatten(-1, (4, 16)).transpose(1, 2)
        output: torch.Tensor = nn.functional.scaled_dot_product_attention(x, x, x, None, 0.1, is_causal=True)
        return output


@pytest.mark.parametrize("make", [lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), _Dropped])
def test_dropout_of_attention_is_seen(make: Any) -> None:
    profile = analyse(make, lambda: torch.zeros(2, TOKENS, 64, dtype=torch.float32))
    facts = [unit.attention for unit in profile.units if unit.attention is not None]
    assert [each.has_dropout for each in facts] == [True], f"{facts}"


class _WeightsToo(nn.Module):
    """Attention whose weights are returned: context parallel refuses it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.attention(tokens, tokens, tokens)[0]
        return output


class _ToAnother(_WeightsToo):
    """Attention of half of the tokens to all."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        queries = tokens[:, ::2]
        output: torch.Tensor = self.attention(queries, tokens, tokens, need_weights=False)[0]
        return output


@pytest.mark.parametrize(("kind", "why"), [(_WeightsToo, "need_weights = True"), (_ToAnother, "another sequence")])
def test_attention_that_context_parallel_refuses_is_a_note(kind: type[nn.Module], why: str) -> None:
    profile = analyse(kind, lambda: torch.zeros(2, TOKENS, 64, dtype=torch.float32))
    assert all(unit.attention is None for unit in profile.units), "no sequences are divided"
    assert any(note.startswith("context: ") and why in note for note in profile.notes), profile.notes


def test_linear_layers_without_blocks_are_units_with_what_follows_them() -> None:
    profile = analyse(mlp, lambda n: torch.zeros(n, 64, dtype=torch.float32), optimizer="sgd")
    assert [unit.name for unit in profile.units] == ["0", "2", "4", "6"], "an activation belongs to its layer"
    assert profile.parameters == trained(mlp()), "each parameter once"
    assert [unit.forward_flops for unit in profile.units] == [2 * 64 * 80, 2 * 80 * 80, 2 * 80 * 80, 2 * 80 * 10]
    assert profile.units[0].backward_flops == 2 * 64 * 80, "the input needs no gradient"
    assert [unit.tensor.divides for unit in profile.units if unit.tensor] == [80] * 4, "traced pairs"
    assert (profile.optimizer_state_bytes, profile.optimizer_moved_bytes) == (0, 12), "plain SGD keeps nothing"
    assert profile.optimizer_operations == 1, "it adds the gradient, for each tensor"


def small_resnet() -> nn.Sequential:
    """Return a ResNet of two rows of bottlenecks."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        Bottleneck(16, 8, 1), Bottleneck(32, 8, 1), Bottleneck(32, 16, 2), Bottleneck(64, 16, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


@pytest.mark.full("further")
def test_a_resnet_has_bottlenecks_as_units_and_says_what_is_whole() -> None:
    profile = analyse(small_resnet, lambda n: torch.zeros(n, 3, 16, 16, dtype=torch.float32))
    assert profile.parameters == trained(small_resnet()), "each parameter once"
    assert sum(unit.count for unit in profile.units if unit.kind == "Bottleneck") == 4, "blocks are units"
    assert any("not recognised, and whole on every rank" in note for note in profile.notes), profile.notes
    forward = sum(unit.count * unit.forward_flops for unit in profile.units)
    assert forward == _counted(small_resnet(), torch.zeros(1, 3, 16, 16, dtype=torch.float32)), "torch's own count"
    assert all(unit.tensor is None for unit in profile.units), "nothing is divided by guess"
    assert profile.can_be_cut == "", "a pipeline can cut it, although activations are in place"


def _counted(model: nn.Module, batch: torch.Tensor) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        model.to("meta").eval()(batch.to("meta"))
    return int(counter.get_total_flops())


@pytest.mark.full("further")
def test_experts_are_run_for_real_and_their_facts_are_known() -> None:
    profile = analyse(Experts, lambda n: torch.randn(n, 8, 32, dtype=torch.float32))
    assert any("(MixtureOfExperts) does not run on tensors without values" in n for n in profile.notes), (
        profile.notes
    )
    found = [unit.expert for unit in profile.units if unit.expert is not None]
    assert found, f"experts are known: {[unit.name for unit in profile.units]}"
    assert {each.experts for each in found} == {4}, "experts of a layer"
    assert found[0].parameters == 4 * 3 * 32 * 48, "up, gate and down of all of them"
    by_expert = {each.name for unit in profile.units for each in unit.gradients if each.divided_by == "expert"}
    assert {name.partition("experts.experts.")[2] for name in by_expert} == {"up", "down"}, f"{by_expert}"
    assert found[0].flops == 2 * (8 * 2) * 3 * 32 * 48, "every token goes to two"
    assert found[0].token_bytes == 8 * 2 * 32 * 4, "tokens twice, in fp32"
    assert profile.parameters == trained(Experts()), "each parameter once"
    assert profile.memory.activations["fp32", "none"].saved_bytes > 0, "memory of the real pass"


@pytest.mark.full("further")
def test_code_between_parts_frozen_and_unused_parameters() -> None:
    profile = analyse(Patches, lambda n: torch.zeros(n, 3, 16, 16, dtype=torch.float32))
    names = [unit.name for unit in profile.units]
    assert names == ["patch", "layers.0", "frozen", "head"], "parts in the order of use"
    by_name = {unit.name: unit for unit in profile.units}
    assert by_name["layers.0"].count == 3, "code before the blocks does not part them"
    assert by_name["frozen"].frozen_bytes == 4 * (WIDTH * WIDTH + WIDTH), "frozen parameters have no gradients"
    assert by_name["frozen"].parameters == 0, "frozen parameters have no gradients"
    assert any(each.name == "token" for each in by_name["patch"].gradients), "where its first operation is"
    assert profile.parameters == trained(Patches()), "unused ones are counted"


@pytest.mark.full("further")
def test_folding_changes_no_figure() -> None:
    model = Language(tied=False)
    assert len(longest_run(model)) == 10, "all blocks are alike"
    facts = []
    for way in (activations_of, run_pass):
        with fake_mode():
            model = Language(tied=False)
            make_fake(model, "cpu", None)
            facts += [way(model, words(2), None, device="cpu", precision=each) for each in ("fp32", "bf16")]
    assert facts[:2] == facts[2:], "bytes of some blocks, carried on to all, are those of all"
    with fake_mode(), recomputed(model, "blocks"):
        facts = [way(model, words(2), None, device="cpu", precision="bf16") for way in (activations_of, run_pass)]
    assert facts[0] == facts[1], "what grows fastest is not yet the largest in a pass through three blocks"
    odd = Language(tied=False)
    odd.layers[4].norm1.eps = 0.5  # type: ignore[union-attr]
    assert len(longest_run(odd)) == 5, "a block with another attribute is not alike"
    counted = Language(tied=False)
    for number, layer in enumerate(counted.layers):
        vars(layer).update(number=number, groups=8)
    assert len(longest_run(counted)) == 10, "8 groups of each block are no number of block 8"
    for number, layer in enumerate(counted.layers):
        vars(layer).update(number=min(number, 6))
    assert len(longest_run(counted)) == 7, "an attribute that counts some blocks makes the others another row"
    odd = Language(tied=False, blocks=4)
    odd.layers[1].norm1.eps = odd.layers[3].norm1.eps = 0.5  # type: ignore[union-attr]
    whole = analyse(lambda: odd, words)
    folded = analyse(lambda: Language(tied=False, blocks=4), words)
    saved = [unit.saved_bytes for unit in folded.units]
    assert [unit.saved_bytes for unit in whole.units] == pytest.approx(saved, rel=1e-12), "folded"
    assert [unit.backward_flops for unit in whole.units] == [unit.backward_flops for unit in folded.units], (
        "folded"
    )


def test_what_reads_values_is_run_for_real_and_refused_where_memory_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = analyse(ReadsValues, lambda: torch.zeros(6, 16, dtype=torch.float32))
    assert [(unit.forward_flops, unit.count) for unit in profile.units] == [(512, 2)], "per sample, folded"
    assert profile.samples == 2, "a small batch is enough"
    assert "decides by what is in a tensor" in profile.can_be_cut, "and a pipeline could not cut it"
    detached = r"depends on no trainable parameter.*it ran for real, as ReadsValues .*; name a function .*--loss"
    with pytest.raises(ConfigError, match=detached):
        analyse(ReadsValues, lambda: torch.zeros(6, 16, dtype=torch.float32), loss=lambda x, _: x.sum().detach())
    monkeypatch.setattr("farandole.train.analysis.analyse.available_bytes", lambda ranks: 1000)
    said = (
        r"ReadsValues does not run .*analysed_models.py:\d+\): so the model must be run for real.*need about .*"
        r"there are 1 kB; .* or run farandole plan .*plan --profile takes"
    )
    with pytest.raises(ConfigError, match=said):
        analyse(ReadsValues, lambda: torch.zeros(6, 16, dtype=torch.float32))


class OwnOperation(nn.Module):
    """Calls an operation of its user's, which says nothing of shapes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = _twice(self.layers[1](self.layers[0](x)))
        return doubled


@torch.library.custom_op("farandole_test::twice", mutates_args=())
def _twice(x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] > 8:
        raise RuntimeError("wider than it takes")
    return x * 2


_twice.register_autograd(lambda ctx, gradient: gradient * 2)


def test_operations_of_the_users_own_are_run_for_real() -> None:
    profile = analyse(OwnOperation, lambda: torch.zeros(6, 8, dtype=torch.float32))
    (note,) = [note for note in profile.notes if note.startswith("run for real")]
    assert "OwnOperation does not run on tensors without values: RuntimeError: There was no fake impl" in note
    assert profile.memory.activations["fp32", "none"].saved_bytes > 0
    with pytest.raises(
        ConfigError, match=r"wider than it takes .*; it ran for real, as OwnOperation .*plan --profile takes"
    ):
        analyse(lambda: OwnOperation(16), lambda: torch.zeros(6, 16, dtype=torch.float32))


class Grows(nn.Module):
    """Has a table of positions that does not grow with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Linear(4096, 8)
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take (samples, 8)."""
        table = torch.ones(64, 4096, dtype=torch.float32, device=x.device)
        out: torch.Tensor = self.head(x + self.positions(table).mean(0))
        return out


def test_a_figure_that_does_not_grow_with_the_batch_is_named() -> None:
    profile = analyse(Grows, lambda n: torch.zeros(n, 8, dtype=torch.float32))
    assert any(
        note.startswith("positions: forward_flops is not proportional to the batch") for note in profile.notes
    )
    assert profile.units[0].forward_flops == 2 * 64 * 4096 * 8 / 2, "of the example batch, per sample"


@pytest.mark.parametrize(
    ("make_model", "make_batch", "said"),
    [
        (lambda: 3, words, r"returned int, expected an nn.Module"),
        (lambda: nn.LazyLinear(3), words, r"gets its shape in the first forward pass"),
        (mlp, lambda: {"x": 3}, r"without a tensor that has samples"),
        (mlp, lambda n: torch.zeros(n, 63, dtype=torch.float32), r"the forward pass raised RuntimeError"),
        (mlp, lambda: torch.zeros(0, 64, dtype=torch.float32), r"an empty batch"),
        (mlp, lambda: 1 / 0, r"making the batch raised ZeroDivisionError"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), lambda: torch.zeros(2, 2), r"no trainable parameter"),
    ],
)
def test_what_is_no_training_is_one_clear_error(make_model: Any, make_batch: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        analyse(make_model, make_batch)


def classes(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, labels)


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_pair_is_inputs_and_targets_where_the_model_takes_one(kind: Any) -> None:
    """As a loader gives them: the labels go to the loss, not to the model."""

    def inputs(n: int) -> torch.Tensor:
        return torch.zeros(n, 64, dtype=torch.float32)

    def labels(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        return classes(outputs, torch.zeros(len(outputs), dtype=torch.int64, device=outputs.device))

    pair = analyse(mlp, lambda n: kind((inputs(n), torch.zeros(n, dtype=torch.int64))), loss=classes)
    made = analyse(mlp, inputs, loss=labels)
    assert [each.forward_flops for each in pair.units] == [each.forward_flops for each in made.units]
    assert (pair.can_be_cut, pair.blocks) == (made.can_be_cut, made.blocks)
    with pytest.raises(ConfigError, match=r"the forward pass, or the loss, raised \w+"):
        analyse(mlp, inputs, loss=lambda outputs, batch: classes(outputs, batch[:1].long()))
    two = inputs_and_targets(nn.Bilinear(2, 2, 2), (1, 2), classes)
    assert two == ((1, 2), (1, 2)), "a model that takes both gets both, and so does its loss"
    assert inputs_and_targets(nn.Bilinear(2, 2, 2), ({"input1": 1}, 2), classes) == ({"input1": 1}, 2)
    assert inputs_and_targets(mlp(), (1, 2), None) == ((1, 2), (1, 2))


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"optimizer 'adamm' is not known; did you mean 'adam'"):
        analyse(mlp, words, optimizer="adamm")


@pytest.mark.full("further")
def test_seconds_are_measured_for_each_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.train.analysis.measure.LEAST_SECONDS", 0.0)
    timing = Timing(lambda: Language(tied=False, blocks=5), Batches(words), next_word, "cpu", threads=1)
    profile = measure_units(analyse(timing.make_model, words, loss=next_word), timing)
    assert profile.measured["threads"] == "1", "as a rank has"
    for unit in profile.units:
        times = unit.times
        assert times is not None, f"{unit.name} was measured"
        figures = (
            times.forward_fixed_seconds, times.forward_sample_seconds, times.backward_fixed_seconds,
            times.backward_sample_seconds, times.spread, times.jitter,
        )  # fmt: skip
        assert min(figures) >= 0, f"no figure is negative: {times}"
        assert times.forward_fixed_seconds + times.forward_sample_seconds > 0, f"forward took time: {times}"
        assert times.backward_fixed_seconds + times.backward_sample_seconds > 0, f"backward took time: {times}"
        assert (times.samples, times.threads) == ((2, 4, 8), 1), "three sizes around the example's"
    assert any(unit.times and unit.times.jitter > 0 for unit in profile.units), "no two passes take as long"
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile, "a file holds all of it"
    assert not list(tmp_path.glob("*.new")), "and nothing else is left"


def test_a_model_that_does_not_fit_is_measured_by_its_alike_blocks(
    language: ModelProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farandole.train.analysis.measure.LEAST_SECONDS", 0.0)
    timing = Timing(lambda: Language(tied=True), Batches(words), next_word, "cpu", 1)
    weights = 4 * trained(Language(tied=True))
    monkeypatch.setattr("farandole.train.analysis.measure.available_bytes", lambda ranks: 3 * weights)
    times = measure_units(language, timing).units[1].times
    assert times is not None, "its blocks were measured"
    assert times.forward_fixed_seconds + times.forward_sample_seconds > 0, f"{times}"
    assert fit([2, 4, 8], [1.0, 1.0, 0.9]) == pytest.approx((0.9618, 0.0), abs=1e-3), "no negative slope"
    assert fit([2, 4, 8], [0.1, 0.3, 0.9])[0] == 0.0, "nothing fixed is negative"
    monkeypatch.setattr("farandole.train.analysis.measure.available_bytes", lambda ranks: 1000)
    with pytest.raises(ConfigError, match=r"the parts of the model that are run need .*: there are 1 kB"):
        measure_units(language, timing)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="threads = 0, expected at least 1"):
        measure_units(language, replace(timing, threads=0))


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_positions_of_a_training_are_read_while_others_are_analysed() -> None:
    from transformers import masking_utils

    usual, packed = masking_utils.find_packed_sequence_indices, torch.cat([torch.arange(4)] * 2).unsqueeze(0)
    inside, leave = threading.Event(), threading.Event()

    def analyse_elsewhere() -> None:
        with fake_mode():
            inside.set()
            leave.wait(10)

    other = threading.Thread(target=analyse_elsewhere)
    other.start()
    try:
        assert inside.wait(10)
        found = masking_utils.find_packed_sequence_indices(packed)
    finally:
        leave.set()
        other.join(10)
    assert found is not None
    assert found.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]], "two sequences"
    assert masking_utils.find_packed_sequence_indices is usual


@pytest.mark.full("further")
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_positions_of_packed_sequences_are_those_of_the_batch() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128, vocab_size=64,
        use_cache=False,
    )  # fmt: skip
    usual, fused = masking_utils.find_packed_sequence_indices, []
    for positions in ({}, {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2)}):
        model, tokens = LlamaForCausalLM(config), torch.zeros(2, 8, dtype=torch.int64)
        with fake_mode():
            make_fake(model, "cpu", None)
            batch = tree_map(torch.empty_like, {"input_ids": tokens, "labels": tokens, **positions})
            marks = find_marks(model, {})
            seen = record(model, batch, lambda outputs, _: outputs.loss, marks, device="cpu")
        fused.append(sum(span.attention.flops for span in seen.spans.all))
    assert fused == [4 * 2 * 8 * 9 / 2 * 64, 4 * 2 * 8 * 8 * 64], "the batch's positions make a mask"
    assert masking_utils.find_packed_sequence_indices is usual


@pytest.mark.full("slow")
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_llama_of_seven_billion_is_analysed_without_memory() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    def make_batch() -> dict[str, torch.Tensor]:
        tokens = torch.zeros(1, 128, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profile = analyse(lambda: LlamaForCausalLM(LlamaConfig(use_cache=False)), make_batch)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "its 27 GB are not allocated"
    assert profile.parameters == 6_738_415_616, "Llama 2, 7 B"
    block = profile.units[1]
    assert (block.kind, block.count, block.parameters) == ("LlamaDecoderLayer", 32, 202_383_360), f"{block.name}"
    assert block.tensor is not None, "transformers says how it is divided"
    assert (block.tensor.divides, block.tensor.forward_sums, block.tensor.backward_sums) == (32, 2, 2), "heads"
    assert block.tensor.tokens == 128, "norms and residuals may have some of the tokens"
    assert block.fused_flops == 2 * 128 * 129 * 4096, "causal, without a mask"
    assert block.forward_flops == 2 * 128 * (202_383_360 - 2 * 4096) + block.fused_flops, "products and attention"
    assert profile.can_be_cut == "", "a pipeline cuts it"
    mapping = profile_to_mapping(profile)
    assert mapping["memory"]["activations"]["fp32/none"]["saved_bytes"] > 32 * 128 * block.saved_bytes / 128, "all"


def test_attention_of_a_plain_formula_has_no_facts() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.q(x)
            out: torch.Tensor = self.o(functional.softmax(q @ q.transpose(1, 2), -1) @ q)
            return out

    profile = analyse(Plain, lambda n: torch.zeros(n, 4, 8, dtype=torch.float32))
    assert all(unit.attention is None for unit in profile.units), "context parallel could not divide it"
    assert (
        sum(unit.count * unit.forward_flops for unit in profile.units) == 2 * 4 * 8 * 8 * 2 + 2 * 2 * 4 * 4 * 8
    ), "products"

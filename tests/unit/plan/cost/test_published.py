"""Published tables, reproduced from formulas and from the product's preset, without fitting.

The figures are those of the papers' own tables, written here as text.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from farandole.core.cluster_presets import preset_cluster
from farandole.core.vocabulary.spec import Plan
from farandole.plan.candidate import Candidate
from farandole.plan.cost.predict import fits, predict
from farandole.plan.memory import ModelFacts, OptimizerFacts, Setting, WeightFacts, memory_of
from farandole.plan.profile import AttentionFacts, ModelProfile, ModelUnit, TensorFacts, UnitGradient
from tests.programs.told_tables import what_others_do
from tests.unit.plan.cost.cases import cluster_of, memory_facts

SEQUENCE, VOCABULARY = 2048, 51200

ZERO_TABLE = {
    1: (120, 120, 120, 2048, 2048, 2048, 16000, 16000, 16000),
    4: (52.5, 41.3, 30, 896, 704, 512, 7000, 5500, 4000),
    16: (35.6, 21.6, 7.5, 608, 368, 128, 4750, 2875, 1000),
    64: (31.4, 16.6, 1.88, 536, 284, 32, 4187, 2218, 250),
    256: (30.4, 15.4, 0.47, 518, 263, 8, 4046, 2054, 62.5),
    1024: (30.1, 15.1, 0.12, 513, 257, 2, 4011, 2013, 15.6),
}
"""Rajbhandari et al. 2020 (arXiv 1910.02054), table 1: GB of model states a rank, mixed-precision Adam, by ranks.

Columns: 7.5, 128 and 1,000 billion parameters, each at stages 1, 2 and 3.
"""


@pytest.mark.parametrize("ranks", ZERO_TABLE)
def test_zero_s_table_of_model_states(ranks: int) -> None:
    for number, expected in enumerate(ZERO_TABLE[ranks]):
        count, stage = (7_500_000_000, 128_000_000_000, 1_000_000_000_000)[number // 3], number % 3 + 1
        weights = WeightFacts(2 * count, 0, 2 * count, count, 1, 0, 0, 0)
        # Parameters and gradients in 2 bytes; states: the parameter, momentum and variance in 4 each.
        facts = ModelFacts({"fp32": weights}, {"fp32": OptimizerFacts(12.0, 0.0, 0.0, updates_at_once=False)}, {})
        memory = memory_of(facts, Setting(str(stage), "fp32", "none", ranks), bucket_bytes=1)
        # The table rounds: 0.117 GB is 0.12 there, and 35.625 is 35.6.
        assert memory.state_bytes / 1e9 == pytest.approx(expected, rel=0.01, abs=0.005), (
            f"{count / 1e9:g} billion parameters at stage {stage} on {ranks} ranks"
        )


FIGURE_1 = (
    # layers, hidden, heads, tensor, pipeline, chunks, micro-batch; GiB of activations: all, by tokens + selective
    (48, 6144, 64, 8, 1, 1, 4, 59.25, 9.5625),
    (96, 12288, 96, 8, 8, 3, 1, 66.84375, 12.3515625),
    (105, 20480, 128, 8, 35, 3, 1, 114.0234375, 23.076171875),
    (128, 25600, 160, 8, 64, 1, 1, 131.25, 26.5625),
)
"""Korthikanti et al. 2022 (arXiv 2205.05198), figures 1 and 7, as calculon's validation.py has them read off."""


@pytest.mark.parametrize("row", FIGURE_1, ids=["22B", "175B", "530B", "1T"])
def test_korthikanti_s_activations(row: tuple[float, ...]) -> None:
    layers, hidden, heads, tensor, pipeline, chunks, micro_batch = (int(each) for each in row[:7])
    plan = Plan(
        precision="bf16", tensor=tensor, pipeline=pipeline, schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks if chunks > 1 else 0, micro_batches=2 * pipeline if pipeline > 1 else 1,
    )  # fmt: skip
    ranks, batch = tensor * pipeline, micro_batch * plan.micro_batches
    for selective, expected in ((False, row[7]), (True, row[8])):
        profile = layers_alone(layers, hidden, heads, selective=selective)
        used = replace(plan, sequence_parallel=True) if selective else plan
        memory = predict(profile, cluster_of(tensor, ranks), Candidate(used, ranks, batch), interval=False).memory
        got = max(each.activations_bytes or 0 for each in memory) / 2**30
        assert got == pytest.approx(expected, rel=1e-3), f"selective: {selective}"


def layers_alone(layers: int, hidden: int, heads: int, *, selective: bool) -> ModelProfile:
    """Layers with the activations of Korthikanti et al., equations 1, 2 and 6; fp32, which is twice as much."""
    token = float(SEQUENCE * hidden)
    attention = 0.0 if selective else 5.0 * heads * SEQUENCE / hidden
    saved, whole = 2 * token * (34 + attention), 2 * token * 10
    weights = 12 * hidden * hidden
    layer = ModelUnit(
        "layers.0", "Layer", layers,
        (UnitGradient("layers.0.weight", 12 * hidden, hidden, divided_by="tensor"),), 0,
        24 * token * hidden, 48 * token * hidden, 20, 40 * token, saved, 4 * token,
        tensor=TensorFacts(heads, weights, 24 * token * hidden, saved - whole, 4 * token), is_block=True,
    )  # fmt: skip
    return ModelProfile("layers", (layer,), 1, 1.0, memory_facts((layer,), 1), "adamw", 8.0, 28.0, blocks=layers)


MEGATRON = (
    # billions, heads, hidden, layers, tensor, pipeline, GPUs, batch, teraflop/s a GPU; micro-batch
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 8),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 8),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 8),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 8),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 4),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 2),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 2),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 1),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 1),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 1),
)
"""Narayanan et al. 2021 (arXiv 2104.04473), table 1. Micro-batches are not in it: the fastest as predicted."""


@pytest.mark.full("slow")
def test_megatron_s_table_from_the_preset() -> None:
    errors = {}
    for billions, heads, hidden, layers, tensor, pipeline, ranks, batch, teraflops, micro_batch in MEGATRON:
        cluster = preset_cluster("dgx-a100", ranks)
        with what_others_do():
            plan = Plan(
                precision="bf16", bf16_parameters=True, recompute="blocks", tensor=tensor, pipeline=pipeline,
                micro_batches=batch * tensor * pipeline // (ranks * micro_batch),
                pipeline_cuts=tuple(str(layers // pipeline * stage) for stage in range(1, pipeline)),
            )  # fmt: skip
            made = Candidate(plan, ranks, batch)
            prediction = predict(gpt(layers, hidden, heads), cluster, made, interval=False)
        # The paper's own count, equation 3, with recomputation.
        flops = 96.0 * batch * SEQUENCE * layers * hidden**2
        flops *= 1 + SEQUENCE / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
        errors[billions] = prediction.seconds * ranks * teraflops * 1e12 / flops - 1
        assert fits(prediction, cluster), f"{billions} billion: {prediction.peak_bytes} bytes"
    assert max(map(abs, errors.values())) <= 0.15, errors
    assert sum(map(abs, errors.values())) / len(errors) <= 0.08, errors


def gpt(layers: int, hidden: int, heads: int) -> ModelProfile:
    """The paper's models by what their operations compute, read and write, counted by hand; fp32.

    A layer reads and writes, in elements of a token's width: norms 4, projections and perceptron 4 + 2 + 5 + 5,
    its activation 8, bias with dropout and residual 7, transposes and products of attention 6; and, in scores:
    products, softmax and dropout 6.5.
    """
    token = float(SEQUENCE * hidden)
    scores = heads * SEQUENCE / hidden
    saved = 2 * token * (34 + 5 * scores)
    moved, divided = 4 * token * (41 + 6.5 * scores), (26 + 6.5 * scores) / (41 + 6.5 * scores)
    flops = 24 * token * hidden + 4 * SEQUENCE * token
    shapes = {"down": (hidden, 4 * hidden), "up": (4 * hidden, hidden), "out": (hidden, hidden),
              "qkv": (3 * hidden, hidden)}  # fmt: skip
    gradients = tuple(
        UnitGradient(f"layers.0.{name}", rows, columns, divided_by="tensor")
        for name, (rows, columns) in shapes.items()
    )
    layer = ModelUnit(
        "layers.0", "Layer", layers, (*gradients, UnitGradient("layers.0.norms", 4 * hidden, 1)), 0,
        flops, 2 * flops, 24, moved, saved, 4 * token,
        # Megatron computes the last sum of a layer again, which ours does not: it counts as one more in backward.
        tensor=TensorFacts(heads, 12 * hidden**2, flops, divided * saved, 4 * token, 2, 3),
        attention=AttentionFacts(heads, 8 * token, SEQUENCE, 0.0), is_block=True, products=6,
    )  # fmt: skip
    words = UnitGradient("words", VOCABULARY, hidden, divided_by="tensor")
    embedding = ModelUnit(
        "embedding", "Embedding", 1, (words,), 0, 0.0, 0.0, 3, 12 * token, token, 4 * token, is_block=False,
        tensor=TensorFacts(VOCABULARY, VOCABULARY * hidden, 0.0, 0.0, 4 * token, 1, 0),
    )  # fmt: skip
    logits = 4.0 * SEQUENCE * VOCABULARY
    products = 2 * token * VOCABULARY
    head = ModelUnit(
        "head", "Head", 1, (), 0, products, 2 * products, 6, 5 * logits, 1.5 * logits, 4.0, is_block=False,
        products=1,
        tensor=TensorFacts(VOCABULARY, 0, products, 1.5 * logits, 4 * token, 0, 1),
    )  # fmt: skip
    units = (embedding, layer, head)
    facts = memory_facts(units, 1)
    weights = facts.weights["bf16-weights"]
    facts = replace(
        facts, weights={"bf16-weights": weights},
        optimizer={"bf16-weights": OptimizerFacts(12.0, 0.0, 0.0, updates_at_once=False)},
    )  # fmt: skip
    return ModelProfile("gpt", units, 1, 8.0 * SEQUENCE, facts, "adamw", 12.0, 34.0, blocks=layers)

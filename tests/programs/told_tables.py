"""Published step times of GPUs beside what the planner predicts for a library's models, by presets.

    python -m tests.programs.told_tables [TABLE ...]

Each row is the plan of the publication, with its micro-batch where it is told. Nothing is fitted to these rows;
presets have the sources that docs/plan/internals.md names. The tables:

- megatron: Narayanan et al. 2021 (arXiv 2104.04473), table 1. Micro-batches are not in it
- megatron-degrees, megatron-zero: the same, table 2: with tensor and pipeline, and DeepSpeed's ZeRO-3 of that year
- recomputation, selective: Korthikanti et al. 2022 (arXiv 2205.05198), table 5: all recomputed; attention alone
- resnet: NVIDIA/DeepLearningExamples, ResNet-50 v1.5 of 21.03
- torchtitan: pytorch/torchtitan, docs/performance.md, FSDP2 on 64 A100
- fms: foundation-model-stack/fms-fsdp, README, FSDP on 128 A100 and 96 H100
- foundry-a100, foundry-a100-40, foundry-h100: mosaicml/llm-foundry, scripts/train/benchmarking

Megatron's attention of those years was not in one kernel, and its activations were; transformers' GPT-2 is the
other way round. Models of llm-foundry are GPT-2 with the activation in one kernel and without dropout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from farandole.core.cluster_presets import preset_cluster
from farandole.core.vocabulary import rules
from farandole.core.vocabulary.degrees import ORDER
from farandole.core.vocabulary.spec import Plan
from farandole.plan.candidate import Candidate
from farandole.plan.cost.predict import predict
from farandole.plan.profile import ModelProfile
from farandole.train.analysis.analyse import analyse

GPT2_VOCABULARY, FOUNDRY_VOCABULARY = 51200, 50368
LLAMA = {
    "2-7b": (4096, 32, 32, 32, 11008, 32000), "2-70b": (8192, 80, 64, 8, 28672, 32000),
    "2-13b": (5120, 40, 40, 40, 13824, 32000), "3-70b": (8192, 80, 64, 8, 28672, 128256),
}  # fmt: skip
"""Hidden, layers, heads, heads of keys, inner, vocabulary."""
MPT = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16),
    "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}  # fmt: skip
MEGATRON = (
    # heads, hidden, layers, tensor, pipeline, GPUs, batch, teraflop/s a GPU; micro-batch
    (24, 2304, 24, 1, 1, 32, 512, 137, 8), (32, 3072, 30, 2, 1, 64, 512, 138, 8),
    (32, 4096, 36, 4, 1, 128, 512, 142, 8), (48, 6144, 40, 8, 1, 256, 1024, 135, 8),
    (64, 8192, 48, 8, 2, 512, 1536, 138, 4), (80, 10240, 60, 8, 4, 1024, 1792, 140, 2),
    (96, 12288, 80, 8, 8, 1536, 2304, 148, 2), (128, 16384, 96, 8, 16, 1920, 2160, 155, 1),
    (128, 20480, 105, 8, 35, 2520, 2520, 163, 1), (160, 25600, 128, 8, 64, 3072, 3072, 163, 1),
)  # fmt: skip
DEGREES = (
    (96, 12288, 96, 8, 12, 384, 1536, 153, 1), (96, 12288, 96, 8, 12, 768, 1536, 149, 1),
    (96, 12288, 96, 8, 12, 1536, 1536, 141, 1), (128, 20480, 105, 8, 35, 560, 2240, 171, 1),
    (128, 20480, 105, 8, 35, 1120, 2240, 167, 1), (128, 20480, 105, 8, 35, 2240, 2240, 159, 1),
)  # fmt: skip
ZERO = (
    (96, 12288, 96, 1, 1, 384, 1536, 144, 4), (96, 12288, 96, 1, 1, 768, 1536, 88, 2),
    (96, 12288, 96, 1, 1, 1536, 1536, 44, 1), (128, 20480, 105, 1, 1, 640, 2560, 138, 4),
    (128, 20480, 105, 1, 1, 1120, 2240, 98, 2), (128, 20480, 105, 1, 1, 2240, 2240, 48, 1),
)  # fmt: skip
KORTHIKANTI = (
    # heads, hidden, layers, pipeline, chunks, GPUs, batch, micro-batch, seconds: recomputed, and attention alone
    (64, 6144, 48, 1, 0, 8, 4, 4, 1.42, 1.10), (96, 12288, 96, 8, 3, 64, 64, 1, 18.13, 13.75),
    (128, 20480, 105, 35, 3, 280, 280, 1, 49.05, 37.83), (160, 25600, 128, 64, 0, 512, 512, 1, 94.42, 71.49),
)  # fmt: skip
RESNET = (
    # preset, GPUs, precision, images a second; 256 a GPU
    ("a100", 1, "bf16", 2470), ("a100", 8, "bf16", 16621), ("v100", 1, "fp32", 356), ("v100", 8, "fp32", 2766),
    ("v100", 1, "fp16", 1156), ("v100", 8, "fp16", 8056),
)  # fmt: skip
TORCHTITAN = (
    # model, preset, GPUs, micro-batch, tokens of a sample, tokens a second and GPU, whether blocks are recomputed
    ("3-70b", "dgx-a100", 64, 1, 8192, 331, True), ("2-13b", "dgx-a100", 64, 2, 4096, 2162, False),
    ("2-70b", "dgx-a100", 64, 2, 4096, 353, True),
)  # fmt: skip
FMS = (
    ("2-7b", "dgx-a100", 128, 2, 4096, 3700, False), ("2-7b", "dgx-h100", 96, 2, 4096, 7500, False),
)  # fmt: skip
FOUNDRY = {
    # model, GPUs, micro-batch, passes, tokens a second and GPU, whether blocks are recomputed; 2,048 tokens
    "h100": (
        ("70b", 64, 8, 4, 1039, True), ("30b", 32, 14, 3, 2308, True), ("13b", 64, 2, 1, 4800, False),
        ("13b", 8, 2, 1, 4792, False), ("7b", 8, 6, 1, 10643, False), ("3b", 64, 6, 3, 22525, False),
        ("3b", 16, 10, 3, 24142, False), ("1b", 64, 20, 1, 44402, False), ("1b", 8, 14, 1, 45455, False),
        ("760m", 32, 24, 1, 67971, False), ("760m", 8, 24, 2, 63147, False),
    ),
    "a100": (
        ("70b", 64, 8, 4, 410, True), ("30b", 8, 3, 21, 916, True), ("13b", 8, 2, 3, 2262, False),
        ("7b", 8, 6, 2, 4641, False), ("3b", 8, 10, 2, 10811, False), ("1b", 8, 14, 4, 20513, False),
        ("760m", 8, 24, 2, 32434, False), ("350m", 8, 32, 2, 58782, False), ("125m", 8, 32, 2, 141737, False),
    ),
    "a100-40": (
        ("13b", 128, 16, 1, 1972, True), ("13b", 8, 4, 16, 1668, True), ("7b", 64, 18, 1, 3665, True),
        ("3b", 128, 6, 1, 9538, False), ("1b", 64, 10, 1, 19001, False), ("760m", 64, 12, 1, 29344, False),
        ("350m", 64, 18, 1, 52689, False), ("125m", 64, 26, 1, 125234, False), ("125m", 8, 26, 3, 136334, False),
    ),
}  # fmt: skip


class Row(NamedTuple):
    """One measured step, and its plan."""

    name: str
    model: Callable[[], ModelProfile]
    preset: str
    ranks: int
    micro_batch: int
    passes: int
    seconds: float
    plan: dict[str, Any]

    @property
    def batch(self) -> int:
        """Samples of a step."""
        copies: int = self.ranks // (self.plan.get("tensor", 1) * self.plan.get("pipeline", 1))
        return copies * self.passes * self.micro_batch


class Told(NamedTuple):
    """A row beside its prediction."""

    row: Row
    seconds: float
    low_seconds: float
    high_seconds: float

    @property
    def error(self) -> float:
        """Return what is predicted over what was measured, less 1."""
        return self.seconds / self.row.seconds - 1

    @property
    def is_inside(self) -> bool:
        """Whether the printed interval holds what was measured."""
        return self.low_seconds <= self.row.seconds <= self.high_seconds


@cache
def gpt2(
    hidden: int, layers: int, heads: int, vocabulary: int = GPT2_VOCABULARY, dropout: float = 0.1
) -> ModelProfile:
    """Return transformers' GPT-2; without dropout with an activation of one kernel."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=vocabulary, n_positions=2048, use_cache=False,
        bos_token_id=0, eos_token_id=0, attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout,
        activation_function="gelu_new" if dropout else "gelu",
    )  # fmt: skip
    return _of_tokens(lambda: transformers.GPT2LMHeadModel(config), 2048)


@cache
def llama(name: str, tokens: int) -> ModelProfile:
    """Return transformers' Llama."""
    import transformers

    hidden, layers, heads, kept, inner, vocabulary = LLAMA[name]
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kept, max_position_embeddings=tokens, use_cache=False,
    )  # fmt: skip
    return _of_tokens(lambda: transformers.LlamaForCausalLM(config), tokens)


def _of_tokens(make_model: Callable[[], Any], tokens: int) -> ModelProfile:
    def batch(samples: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(samples, tokens, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids}

    return analyse(make_model, batch, loss=lambda outputs, _: outputs.loss, device="cuda")


@cache
def resnet() -> ModelProfile:
    """Return transformers' ResNet-50."""
    import transformers

    def batch(samples: int) -> dict[str, torch.Tensor]:
        images = torch.zeros(samples, 3, 224, 224)
        return {"pixel_values": images, "labels": torch.zeros(samples, dtype=torch.int64)}

    config = transformers.ResNetConfig(num_labels=1000)
    return analyse(
        lambda: transformers.ResNetForImageClassification(config), batch, loss=lambda outputs, _: outputs.loss,
        device="cuda", optimizer="sgd-momentum",
    )  # fmt: skip


def _megatron(rows: Any, **more: Any) -> Iterator[Row]:
    for heads, hidden, layers, tensor, pipeline, ranks, batch, teraflops, micro_batch in rows:
        # The paper's own count, equation 3, with recomputation.
        flops = 96.0 * batch * 2048 * layers * hidden**2
        flops *= 1 + 2048 / (6 * hidden) + GPT2_VOCABULARY / (16 * layers * hidden)
        plan = {"precision": "bf16", "recompute": "blocks", "tensor": tensor, "pipeline": pipeline, **more}
        yield Row(
            f"{layers} x {hidden} on {ranks}", partial(gpt2, hidden, layers, heads), "dgx-a100", ranks,
            micro_batch, batch * tensor * pipeline // (ranks * micro_batch),
            flops / (teraflops * 1e12 * ranks), plan,
        )  # fmt: skip


def _korthikanti(place: int, **more: Any) -> Iterator[Row]:
    for row in KORTHIKANTI:
        heads, hidden, layers, pipeline, chunks, ranks, batch, micro_batch = row[:8]
        plan = {"precision": "bf16", "bf16_parameters": True, "tensor": 8, "pipeline": pipeline, **more}
        if chunks:
            plan |= {"schedule": "interleaved", "chunks": chunks}
        yield Row(
            f"{layers} x {hidden}", partial(gpt2, hidden, layers, heads), "dgx-a100", ranks, micro_batch,
            batch // micro_batch, row[place], plan,
        )  # fmt: skip


def _sharded(rows: Any, **more: Any) -> Iterator[Row]:
    for name, preset, ranks, micro_batch, tokens, rate, recomputes in rows:
        plan = {"precision": "bf16", "zero": 3, **({"recompute": "blocks"} if recomputes else {}), **more}
        yield Row(
            f"{name}, {preset} x {ranks}", partial(llama, name, tokens), preset, ranks, micro_batch, 1,
            micro_batch * tokens / rate, plan,
        )  # fmt: skip


def _foundry(device: str) -> Iterator[Row]:
    network = "8xndr-ib" if device == "h100" else "8xhdr-ib"
    for name, ranks, micro_batch, passes, rate, recomputes in FOUNDRY[device]:
        plan = {"precision": "bf16", "zero": 3, **({"recompute": "blocks"} if recomputes else {})}
        yield Row(
            f"{name} on {ranks}", partial(gpt2, *MPT[name], FOUNDRY_VOCABULARY, 0.0),
            f"8x{device}+{network}", ranks, micro_batch, passes, micro_batch * passes * 2048 / rate, plan,
        )  # fmt: skip


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "megatron": lambda: _megatron(MEGATRON, bf16_parameters=True),
    "megatron-degrees": lambda: _megatron(DEGREES, bf16_parameters=True),
    "megatron-zero": lambda: _megatron(ZERO, zero=3),
    "recomputation": lambda: _korthikanti(8, recompute="blocks"),
    "selective": lambda: _korthikanti(9, sequence_parallel=True),
    "resnet": lambda: (
        Row(f"{preset} x {ranks}, {precision}", resnet, preset, ranks, 256, 1, 256 * ranks / rate,
            {"precision": precision})
        for preset, ranks, precision, rate in RESNET
    ),
    "torchtitan": lambda: _sharded(TORCHTITAN),
    "fms": lambda: _sharded(FMS, shard_within="host"),
    "foundry-a100": lambda: _foundry("a100"),
    "foundry-a100-40": lambda: _foundry("a100-40"),
    "foundry-h100": lambda: _foundry("h100"),
}  # fmt: skip


def told(table: str) -> list[Told]:
    """Return the rows of a table beside their predictions."""
    found = []
    for row in TABLES[table]():
        passes = "micro_batches" if row.plan.get("pipeline", 1) > 1 else "accumulate"
        cluster = preset_cluster(row.preset, row.ranks)
        with what_others_do():
            plan = Plan(**(row.plan | {passes: row.passes}))
            made = predict(row.model(), cluster, Candidate(plan, row.ranks, row.batch))
        found.append(Told(row, made.seconds, made.low_seconds, made.high_seconds))
    return found


@contextmanager
def what_others_do() -> Iterator[None]:
    """Let plans be made of what other systems do and ours refuse yet: parts of models in 16-bit parameters."""
    before = rules.RULES
    degrees = set(ORDER)
    fitting = tuple(
        each for each in before if not ("bf16_parameters" in each.values and degrees & each.values.keys())
    )
    vars(rules)["RULES"] = fitting
    try:
        yield
    finally:
        vars(rules)["RULES"] = before


def mean_error(rows: list[Told]) -> float:
    """Return the mean of the errors without their signs."""
    return sum(abs(each.error) for each in rows) / len(rows)


def main() -> None:
    """Print tables, all without arguments."""
    for table in sys.argv[1:] or TABLES:
        rows = told(table)
        for each in rows:
            inside = "" if each.is_inside else "  outside"
            print(
                f"{table:18} {each.row.name:24} {each.row.seconds:9.3f} s, predicted {each.seconds:9.3f} "
                f"({each.low_seconds:.3f} to {each.high_seconds:.3f}) {each.error:+7.1%}{inside}",
                flush=True,
            )
        print(
            f"{table:18} mean error {mean_error(rows):.1%}; {sum(each.is_inside for each in rows)} of {len(rows)} "
            "inside of the interval\n",
            flush=True,
        )


if __name__ == "__main__":
    main()

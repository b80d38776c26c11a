"""``farandole estimate`` and ``farandole plan`` say the same: one analysis, and one account of bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from farandole.bench.models import LanguageModel, SmallCNN, resnet50
from farandole.plan.answer import DividedModel
from farandole.plan.memory import PRECISIONS, RECOMPUTE, STAGES, Setting, memory_of
from farandole.train.analysis.analyse import analyse
from farandole.train.analysis.probe import Question, probe

from .analysed_models import Language, Patches, mlp, next_word, words

BLOCKS, WIDTH = 8, 64
SIZES = {
    "num_hidden_layers": BLOCKS, "hidden_size": WIDTH, "intermediate_size": 128, "num_attention_heads": 4,
    "vocab_size": 256, "use_cache": False,
}  # fmt: skip


def of_transformers(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
        return made

    return make


def labelled() -> dict[str, torch.Tensor]:
    ids = torch.zeros(2, 32, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def pictures(size: int, channels: int = 3) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(2, channels, size, size)


def loss_of(outputs: Any, _: Any) -> torch.Tensor:
    loss: torch.Tensor = outputs.loss
    return loss


Model = tuple[Callable[[], nn.Module], Callable[[], Any], Any]
SHORT: dict[str, Model] = {
    "perceptron": (mlp, lambda: torch.zeros(2, 64), None),
    "convolutions": (SmallCNN, pictures(28, 1), None),
}
LONG: dict[str, Model] = {
    "language": (lambda: Language(tied=False), lambda: words(2), next_word),
    "tied": (lambda: Language(tied=True), lambda: words(2), next_word),
    "patches": (Patches, pictures(16), None),
    "resnet": (resnet50, pictures(32), None),
    "causal": (
        lambda: LanguageModel(depth=BLOCKS, context=32), lambda: torch.zeros(2, 32, dtype=torch.int64), None
    ),
    "llama": (of_transformers("LlamaForCausalLM", "LlamaConfig", **SIZES), labelled, loss_of),
    "qwen3": (
        of_transformers("Qwen3ForCausalLM", "Qwen3Config", head_dim=16, num_key_value_heads=2, **SIZES), labelled,
        loss_of,
    ),
    "bert": (of_transformers("BertForMaskedLM", "BertConfig", **SIZES), labelled, loss_of),
    "gpt2": (
        of_transformers("GPT2LMHeadModel", "GPT2Config", n_layer=BLOCKS, n_embd=WIDTH, n_head=4, vocab_size=256,
            use_cache=False),
        labelled, loss_of,
    ),
    "t5": (
        of_transformers(
            "T5ForConditionalGeneration", "T5Config", d_model=WIDTH, d_ff=128, num_layers=4, num_heads=4, d_kv=16,
            vocab_size=256, decoder_start_token_id=0, use_cache=False,
        ),
        labelled, loss_of,
    ),
}  # fmt: skip
NEAR = {"0": 0.001, "1": 0.001, "2": 0.001, "3": 0.03, "hybrid": 0.03}
"""Stage 3 gathers the largest block, and blocks are units of the plan: with what follows the last of them."""


@pytest.mark.gate_cases("convolutions-cpu", "perceptron-cuda")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "name",
    [
        *SHORT,
        *(pytest.param(name, marks=[pytest.mark.full("further"), pytest.mark.timeout(300)]) for name in LONG),
    ],
)
def test_they_agree_about_every_setting(name: str, device: str) -> None:
    make_model, make_batch, loss = {**SHORT, **LONG}[name]
    profile = analyse(make_model, make_batch, loss=loss, device=device)
    answer = probe(Question(make_model, make_batch, loss, device=device))
    assert profile.memory == answer.facts, "the same analysis"
    planned = DividedModel(profile, {}, ranks_per_host=8)
    settings = [
        Setting(stage, precision, recompute, ranks)
        for stage in STAGES
        for precision in PRECISIONS
        for recompute in (RECOMPUTE if answer.blocks else RECOMPUTE[:1])
        for ranks in (1, 2, 8)
    ]
    for setting in settings:
        estimated = memory_of(answer.facts, setting, ranks_per_host=8)
        assert planned.memory(setting).total_bytes == pytest.approx(
            estimated.total_bytes, rel=NEAR[setting.stage]
        ), setting

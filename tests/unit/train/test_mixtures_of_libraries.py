"""Mixtures of experts of transformers: analysed without memory, with their experts as torch computes them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from farandole.plan.memory import PRECISIONS, RECOMPUTE
from farandole.plan.profile import ModelProfile
from farandole.train.analysis.analyse import analyse
from farandole.train.analysis.fake_pass import fake_mode
from farandole.train.analysis.probe import Question, probe
from farandole.train.analysis.record import record
from farandole.train.analysis.spans import find_marks
from farandole.train.analysis.user_code import resized

TOKENS, WIDTH, INNER, HEADS, EXPERTS, CHOSEN = 32, 64, 128, 4, 4, 2
ENDS = torch.tensor([3, 5, 6, 8], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "matrices", "flops"),
    [((8, 16), (4, 16, 32), 2 * 8 * 16 * 32), ((16, 8), (8, 32), 2 * 16 * 8 * 32),
     ((4, 16, 16), (16, 8), 2 * 16 * 16 * 8), ((4, 8, 16), (4, 16, 32), 2 * 4 * 8 * 16 * 32)],
    ids=["groups of rows", "inside", "groups of columns", "batches"],
)  # fmt: skip
def test_products_of_groups_have_their_shapes_and_flops_in_any_type(
    rows: tuple[int, ...], matrices: tuple[int, ...], flops: int, dtype: torch.dtype
) -> None:
    ends = None if len(rows) == len(matrices) == 3 else ENDS

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrices = nn.Parameter(torch.ones(matrices, dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = torch._grouped_mm(x, self.matrices, offs=ends)
            return made

    real = Product()(torch.ones(rows, dtype=dtype))
    with fake_mode():
        model = Product()
        x = torch.ones(rows, dtype=dtype)
        faked = model(x)
        found = record(model, x, lambda made, _: made.float().sum(), find_marks(model, {}), device="cpu")
    assert (faked.shape, faked.dtype) == (real.shape, real.dtype)
    assert sum(each.forward_flops for each in found.spans.all) == flops
    assert sum(each.uncast_flops for each in found.spans.all) == flops * (dtype == torch.float32)


class Remembers(nn.Module):
    """A block that keeps what it saw, as a cache of keys does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(8, 8), list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.layer(x))
        return x * torch.cat(self.seen)


def test_what_fails_where_blocks_run_again_is_left_out() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Remembers() for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                assert isinstance(layer, Remembers)
                layer.seen.clear()
                x = layer(x)
            return x

    answer = probe(Question(Model, lambda: torch.ones(2, 8)))
    assert set(answer.facts.failed) == {(each, "blocks") for each in ("fp32", "bf16", "bf16-weights")}
    assert ("fp32", "none") in answer.facts.activations
    assert ("fp32", "blocks") not in answer.facts.activations
    said = "bf16 with recompute = 'blocks' is left out, as the backward pass raised"
    assert any(each.startswith(said) for each in answer.notes), answer.notes


def test_products_that_cast_themselves_are_no_work_in_float32() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrices = nn.Parameter(torch.ones(4, 16, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = torch._grouped_mm(x.bfloat16(), self.matrices.bfloat16(), offs=ENDS)
            return made

    with fake_mode():
        model = Product()
        found = record(model, torch.ones(8, 16), None, find_marks(model, {}), device="cpu")
    assert sum(each.forward_flops for each in found.spans.all) > 0
    assert sum(each.uncast_flops for each in found.spans.all) == 0


class Box(UserDict[str, torch.Tensor]):
    """Inputs by name that torch does not look into, as tokenizers return them."""


@pytest.mark.parametrize(
    "batch", [Box(x=torch.ones(2, 8)), {"x": torch.ones(8)[0]}, {"x": torch.ones(0, 8)}],
    ids=["box", "scalar", "none"],
)  # fmt: skip
def test_what_counts_no_samples_is_estimated_as_it_is(batch: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer.weight.sum() * x

    answer = probe(Question(Scaled, lambda: batch, loss=lambda made, _: made.sum()))
    assert len(answer.facts.activations) == len(PRECISIONS) * len(RECOMPUTE)


def test_casts_are_known_where_memory_grows_faster_than_the_batch() -> None:
    """Products of all samples with each other: thirty-two times as many samples need a thousand times as much."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.layer(self.first(x))
            out: torch.Tensor = (made @ made.mT).exp()
            return out

    answer = probe(Question(Pairs, lambda: torch.ones(512, 32)))
    assert answer.facts.activations["bf16", "none"].weight_copy_bytes == 2 * 32 * 32


def test_a_batch_with_another_dimension_of_samples_is_not_told_apart() -> None:
    """A larger batch fails, as one matrix has samples both ways: then all is taken to grow with the batch."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = edges @ self.layer(x)
            return made

    answer = probe(Question(Graph, lambda: (torch.ones(3, 8), torch.ones(3, 3))))
    found = answer.facts.activations["fp32", "none"]
    assert found.saved_bytes > 0
    assert {each.fixed_bytes for each in found.moments} == {0}
    assert any("as a batch 32 times as large fails: " in each for each in answer.notes), answer.notes


def test_what_a_batch_has_twice_is_one_tensor_in_a_larger_one() -> None:
    ids, other = torch.zeros(2, 3), torch.ones(2, 3)
    larger = resized({"ids": ids, "labels": ids, "other": other, "scale": torch.ones(5)}, 2, 6)
    assert larger["ids"] is larger["labels"]
    assert larger["other"] is not larger["ids"]
    assert [tuple(each.shape) for each in larger.values()] == [(6, 3), (6, 3), (6, 3), (5,)]


SIZES = {
    "num_hidden_layers": 4, "hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "vocab_size": 256, "use_cache": False,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("MixtralForCausalLM", {"num_key_value_heads": 2, "num_local_experts": EXPERTS}),
    "Qwen 3": (
        "Qwen3MoeForCausalLM",
        {"num_key_value_heads": 2, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "head_dim": 16,
         "moe_intermediate_size": INNER},
    ),
    "GPT-OSS": (
        "GptOssForCausalLM",
        {"num_key_value_heads": 2, "num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "head_dim": 16},
    ),
    "DeepSeek": (
        "DeepseekV3ForCausalLM",
        {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "num_experts_per_tok": CHOSEN,
         "moe_intermediate_size": INNER, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
         "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1},
    ),
}  # fmt: skip


def maker(name: str) -> Callable[[], nn.Module]:
    import transformers

    kind, options = MODELS[name]
    config = getattr(transformers, kind).config_class(**SIZES, **options)
    made: Callable[[], nn.Module] = lambda: getattr(transformers, kind)(config)  # noqa: E731
    return made


def labelled(samples: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(samples, TOKENS, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def analysed(name: str, device: str) -> ModelProfile:
    return analyse(maker(name), labelled, loss=lambda outputs, _: outputs.loss, device=device)


@pytest.mark.full("slow")
def test_a_model_of_transformers_can_be_cut_for_a_pipeline() -> None:
    """Its forward reads values of tensors that it makes itself, such as positions; these are there."""
    import transformers

    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 2}, num_key_value_heads=2)
    profile = analyse(
        lambda: transformers.LlamaForCausalLM(config),
        labelled,
        loss=lambda outputs, _: outputs.loss,
        device="cuda",
    )
    assert profile.can_be_cut == ""


@pytest.mark.full("slow")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", MODELS)
def test_a_mixture_of_transformers_is_analysed_without_memory(name: str, device: str) -> None:
    profile = analysed(name, device)
    assert not any("run for real" in each for each in profile.notes), profile.notes
    assert (profile.blocks, profile.memory.failed, profile.device) == (4, (), device)
    assert profile.can_be_cut == ""
    assert profile.parameters == sum(each.numel() for each in maker(name)().parameters())
    block = profile.units[-3]
    assert block.expert is not None
    assert block.expert.experts == EXPERTS
    products = 2 * TOKENS * CHOSEN * 3 * WIDTH * INNER
    assert block.expert.flops == block.uncast_flops == products, "each token at two experts of three matrices"
    assert block.expert.token_bytes == 4 * CHOSEN * TOKENS * WIDTH


@pytest.mark.full("slow")
def test_autocast_leaves_experts_of_transformers_in_float32() -> None:
    """What `uncast_flops` stands on, seen in a real pass."""
    seen: list[torch.dtype] = []
    plain = torch._grouped_mm

    def noted(*arguments: Any, **named: Any) -> torch.Tensor:
        made: torch.Tensor = plain(*arguments, **named)
        seen.append(made.dtype)
        return made

    model = maker("Mixtral")()
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(torch, "_grouped_mm", noted)
        assert functional.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype == torch.bfloat16
        model(**labelled(1))
    assert set(seen) == {torch.float32}

"""Mixtral and Qwen-MoE of transformers with divided experts, beside one process on the joined batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.spec import Plan
from farandole.parallel.expert.transformers_experts import is_experts_module, prove_experts
from farandole.parallel.split import split_of
from tests.ranks.pool import ranks, takes

SMALL: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 24, "moe_intermediate_size": 12, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 20, "max_position_embeddings": 32,
}  # fmt: skip


def make(kind: str) -> nn.Module:
    """Return a small model with random weights, the same on all ranks."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    count = {"num_local_experts": 4} if kind == "Mixtral" else {"num_experts": 4}
    config = getattr(transformers, f"{kind}Config")(**SMALL, **count, head_dim=8)
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model.train()


@pytest.mark.full("slow")
@ranks(2)
@takes(60)
def test_models_of_transformers_train_as_one_process() -> None:
    here = fd.init()
    for kind in ("Mixtral", "Qwen2Moe", "Qwen3Moe"):
        whole = make(kind)
        mine = copy.deepcopy(whole)
        plain, optimizer = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (whole, mine))
        fd.distribute(mine, optimizer, Plan(expert=2))
        split = [name for name, each in mine.named_parameters() if split_of(each) is not None]
        assert len(split) == 4, f"two parameters of each layer's experts: {split}"
        assert all(".experts." in name for name in split), f"{split}"
        assert [type(each).__name__ for each in mine.modules()] == [
            type(each).__name__ for each in whole.modules()
        ], "the classes keep their names"
        generator = torch.Generator().manual_seed(6)
        for _ in range(3):
            tokens = torch.randint(50, (4, 10), generator=generator)
            plain.zero_grad(), whole(input_ids=tokens, labels=tokens).loss.backward(), plain.step()
            own = tokens.chunk(2)[here.rank]
            optimizer.zero_grad(), mine(input_ids=own, labels=own).loss.backward(), optimizer.step()
        expected = dict(whole.named_parameters())
        for name, parameter in mine.named_parameters():
            part = split_of(parameter)
            value = expected[name].detach() if part is None else part.take(expected[name].detach())
            torch.testing.assert_close(parameter.detach(), value, rtol=1e-4, atol=2e-5, msg=f"{kind} {name}")


@pytest.mark.full("further")
def test_experts_that_depend_on_each_other_are_refused() -> None:
    model = make("Mixtral")
    name, experts = next((name, each) for name, each in model.named_modules() if is_experts_module(each))
    prove_experts(name, experts)
    kind = type(experts)

    class NormalisedExperts(kind):  # type: ignore[misc,valid-type]
        def forward(
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            out: torch.Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
            normalised: torch.Tensor = out / out.norm(dim=-1, keepdim=True)
            return normalised

    experts.__class__ = NormalisedExperts
    assert is_experts_module(experts), "it has the form"
    with pytest.raises(PlanError, match=r"NormalisedExperts\) is not the weighted sum"):
        prove_experts(name, experts)

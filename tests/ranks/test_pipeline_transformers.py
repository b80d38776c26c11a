"""Llama and Mixtral of transformers, cut into stages, beside one process in double precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.core.vocabulary.spec import Plan
from tests.ranks.pool import ranks, takes

WORDS = 50
SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": 32, "head_dim": 8,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def make(kind: str, **changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **MORE[kind], **changes)
    config._experts_implementation = "eager"  # grouped_mm has no double precision
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model.double().train()


def next_word(output: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = output.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


@pytest.mark.full("slow")
@ranks(2)
@takes(120)
def test_llama_and_mixtral_train_as_one_process() -> None:
    here = fd.init()
    cases = [("Llama", {}), ("Mixtral", {}), ("Llama", {"tie_word_embeddings": True})]
    for kind, changes in cases:
        whole = make(kind, **changes)
        mine = copy.deepcopy(whole)
        plain, optimizer = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (whole, mine))
        fd.distribute(mine, optimizer, Plan(pipeline=2, micro_batches=4))
        generator = torch.Generator().manual_seed(6)
        for step in range(4):
            tokens = torch.randint(WORDS, (8, 10), generator=generator)
            mask = torch.ones_like(tokens)
            inputs = {"input_ids": tokens, "attention_mask": mask} if step != 2 else {"input_ids": tokens}
            plain.zero_grad(), optimizer.zero_grad()
            expected = next_word(whole(**inputs), tokens)
            expected.backward()
            loss = fd.step(mine, next_word, inputs, tokens)
            torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
            plain.step(), optimizer.step()
        theirs, kept = dict(whole.named_parameters()), []
        for name, parameter in mine.named_parameters():
            if parameter.shape != theirs[name].shape:
                continue
            kept.append(name)
            what = f"{kind} {changes} {name}"
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=0, atol=1e-10, msg=what)
            torch.testing.assert_close(parameter, theirs[name], rtol=0, atol=1e-10, msg=what)
        everywhere = all_gather_json(here, "names", kept)
        assert 0 < len(kept) < len(theirs), kept
        assert {name for names in everywhere for name in names} == set(theirs), "each is on some rank"

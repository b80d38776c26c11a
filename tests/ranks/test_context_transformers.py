"""Context parallel with transformers' models from a configuration, whose code is not changed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.core.vocabulary.errors import ConfigError
from farandole.core.vocabulary.spec import Plan
from tests.ranks.pool import ranks, takes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is missing")


def llama(**settings: object) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **settings,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(1)
    model: nn.Module = BertModel(BertConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ), add_pooling_layer=False)  # fmt: skip
    return model


def divide(model: nn.Module) -> nn.Module:
    return fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan(context=2))[0]


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, own), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-6, msg=f"gradient of {name}")


@pytest.mark.full("further")
@ranks(2)
@takes(60)
def test_llama_and_bert_train_as_in_one_process() -> None:
    """Groups of heads, rotary and learned positions, padding, a loss inside of the model, a cache or none."""
    fd.init()
    tokens = torch.randint(0, 31, (2, 24), generator=torch.Generator().manual_seed(2))
    padding = (torch.arange(24) < torch.tensor([[24], [17]])).long()
    labels = tokens.masked_fill(padding == 0, -100)
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    for uses_cache in (True, False):
        reference, model = llama(use_cache=uses_cache), divide(llama(use_cache=uses_cache))
        expected = reference(input_ids=tokens, attention_mask=padding, labels=labels).loss
        expected.backward()
        part, pad, mine = fd.context_shard(tokens, padding, shifted)
        count = (mine != -100).sum()
        total = fd.weight(count)
        loss = model(input_ids=part, attention_mask=pad, labels=mine, shift_labels=mine).loss
        loss.backward()
        assert total == (shifted != -100).sum(), f"{total}"
        assert_same_gradients(model, reference)
        with pytest.raises(ConfigError, match="shifts labels by one token"):
            model(input_ids=part, labels=mine)
        with pytest.raises(ConfigError, match="several sequences packed into one"):
            model(input_ids=part, position_ids=torch.arange(12)[None] // 2)
        fd.weight(None)
    masked, model = bert(), divide(bert())
    masked(tokens, attention_mask=padding).last_hidden_state[padding.bool()].square().sum().backward()
    part, pad = fd.context_shard(tokens, padding)
    out = model(part, attention_mask=pad).last_hidden_state
    (2 * out[pad.bool()].square().sum()).backward()
    assert_same_gradients(model, masked)


@pytest.mark.full("slow")
@ranks(2)
@takes(60)
def test_other_attention_and_windows_are_refused() -> None:
    fd.init()
    with pytest.raises(ConfigError, match='attn_implementation="eager"'):
        divide(llama(attn_implementation="eager"))
    model = divide(llama())
    config: Any = model.config
    config.sliding_window = 16  # as Mistral's
    part = fd.context_shard(torch.arange(24).expand(1, -1))
    with pytest.raises(ConfigError, match="attends within sliding_window = 16 tokens, and sequences have 24"):
        model(input_ids=part)

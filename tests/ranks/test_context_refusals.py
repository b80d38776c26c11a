"""Context parallel: what cannot be divided is refused on every rank, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import farandole as fd
from farandole.core.vocabulary.errors import ConfigError, Mismatch, PlanError
from farandole.core.vocabulary.spec import Plan
from tests.ranks.context_models import WIDTH, WORDS, Attention, Text, loss_of, texts
from tests.ranks.pool import ranks
from tests.ranks.reference import assert_close


class OwnPositions(Text):
    """Counts positions by itself, from a table that begins as zeros."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.places.weight)

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor | None = None) -> Any:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.blocks[0](x))


class Convolved(Text):
    """Mixes neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor | None = None) -> Any:
        return self.head(self.mix(self.words(tokens).transpose(1, 2)).transpose(1, 2))


class Pooled(Text):
    """Returns one output a sample."""

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor | None = None) -> Any:
        return self.head(self.words(tokens).mean(1))


class ByHand(Text):
    """Computes attention without torch's function, as MultiheadAttention with weights does."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor | None = None) -> Any:
        x = self.words(tokens)
        return self.head(self.attention(x, x, x)[0])


class OnlyLoss(Text):
    """Returns a loss that is no mean over tokens."""

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor | None = None) -> Any:
        return super().forward(tokens).logsumexp((0, 1)).sum()


@pytest.mark.full("further")
@ranks(2)
def test_models_that_mix_tokens_elsewhere_are_found_at_the_first_pass() -> None:
    fd.init()
    tokens, _ = texts(2, 24)
    culprits = {
        OwnPositions: "module 'places'", Convolved: "module 'mix'", Pooled: "its output|module 'head'",
        ByHand: "module 'attention", OnlyLoss: "its output",
    }  # fmt: skip
    for kind, where in culprits.items():
        model = kind()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan(context=2))
        with pytest.raises(ConfigError, match=f"gives another output with divided.*first in ({where})"):
            model(fd.context_shard(tokens))
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()), "no trace"
        assert model.training, "no trace"


@ranks(2)
def test_inputs_that_cannot_be_cut_are_refused_on_every_rank() -> None:
    world = fd.init()
    model = Text()
    fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan(context=2))
    tokens, targets = texts(2, 24)
    with pytest.raises(ConfigError, match="no input of this Text is a part"):
        model(tokens + world.rank)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tensors": (tokens[:, :22],)}, "22 tokens do not divide by 2 x context = 4.*pad to 24"),
        ({"tensors": (tokens,), "dim": 2}, "has no dimension 2"),
        ({"tensors": (tokens, tokens[:, :8])}, "sequences of 24, 8 tokens in one call"),
        ({"tensors": (tokens, tokens), "dim": (1,)}, "1 dimensions for 2 tensors"),
        ({"tensors": ([1, 2],)}, "expected tensors, got a list"),
        ({"tensors": ()}, "nothing to cut"),
    ]
    for wrong, text in cases:
        with pytest.raises(ConfigError, match=text):
            fd.context_shard(*wrong["tensors"], dim=wrong.get("dim", 1))
    with pytest.raises(Mismatch, match=r"of shape \(2, 24\) on rank 0, of shape \(2, 20\) on rank 1"):
        fd.context_shard(tokens[:, : 24 - 4 * world.rank])
    with pytest.raises(Mismatch, match="not the same sample on all ranks"):
        fd.context_shard((tokens + world.rank) % WORDS)
    part = fd.context_shard(tokens)
    with pytest.raises(ConfigError, match=r"the same input of shape .2, 24., so sequences were not cut"):
        model(tokens)
    with pytest.raises(Mismatch, match="the input of the model is of shape"):
        model(part[:, : 12 - 2 * world.rank])
    with pytest.raises(ConfigError, match="outside of the forward pass of the distributed model"):
        model.blocks[0](model.words(part))
    model(part)
    with pytest.raises(ConfigError, match=r"attention over 10 tokens of this rank.*cut have 12"):
        model(part[:, :10])
    with pytest.raises(ConfigError, match="an even number"):
        model(part[:, :11])
    targets[0, 3:] = -100
    tokens, targets = fd.context_shard(tokens, targets)
    with pytest.raises(ConfigError, match=r"unequal numbers of targets.*fd.weight"):
        loss_of(model(tokens), targets).backward()
    whole = fd.context_gather(targets)
    assert torch.equal(fd.context_shard(whole), targets), "gathered in order"
    assert torch.equal(fd.context_gather(fd.context_positions(12), 0), torch.arange(24)), "positions"


@ranks(2)
def test_models_and_plans_that_cannot_be_divided_are_refused() -> None:
    fd.init()
    for module, text in [(nn.BatchNorm1d(4), "is a BatchNorm1d"), (nn.LSTM(4, 4), "is a LSTM")]:
        layers = nn.Sequential(nn.Linear(4, 4), module)
        with pytest.raises(ConfigError, match=text):
            fd.distribute(layers, torch.optim.SGD(layers.parameters(), lr=0.1), Plan(context=2))
    with pytest.raises(PlanError, match="context = 1, which divides no sequences"):
        Plan(context_kind="ring")
    model = Text()
    tokens, _ = texts(1, 8)
    assert fd.context_shard(tokens) is tokens, "nothing is divided yet"
    fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan(context=2))
    plain = functional.scaled_dot_product_attention
    assert plain.__module__.startswith("farandole"), "caught"
    fd.shutdown()
    assert functional.scaled_dot_product_attention.__module__ == "torch._C._nn", "torch's own again"


class Layers(nn.Module):
    """Torch's own layers, recomputed or not; a mask of padding."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.recompute = recompute
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.attention = Attention(2, 1, True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor) -> Any:
        x = self.layer(self.words(tokens), src_key_padding_mask=~padding)
        if self.recompute:  # a method that is called without hooks of the module
            x = torch.utils.checkpoint.checkpoint(self.attention.forward, x, use_reentrant=False)
        else:
            x = self.attention.forward(x)
        return {"logits": self.head(x)}


@ranks(2)
def test_torchs_layers_recomputed_methods_and_evaluation() -> None:
    """A padded batch: training with recomputation, and evaluation, where torch would take its fused layers."""
    fd.init()
    reference, model = Layers(False), Layers(True)
    fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan(context=2))
    tokens, targets = texts(2, 16)
    padding = torch.arange(16) < torch.tensor([[16], [11]])
    part, mine, pad = fd.context_shard(tokens, targets, padding)
    loss_of(model(part, pad)["logits"], mine).backward()
    loss_of(reference(tokens, padding)["logits"], targets).backward()
    for (name, own), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-6, msg=name)
    for each in (reference, model):
        each.eval()
    with torch.no_grad():
        found = fd.context_gather(model(part, pad)["logits"])
        expected = reference(tokens, padding)["logits"]
    torch.testing.assert_close(found[padding], expected[padding], rtol=1e-5, atol=1e-5)
    assert_close(model, reference)

"""Models for tests of tensor parallelism, and trainings on ranks beside one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import farandole as fd
from farandole.parallel.split import split_of

WORDS, WIDTH, TOKENS = 101, 32, 16
NAMED = {"*.[qkv]_proj": "columns", "*.o_proj": "rows"}


class Attention(nn.Module):
    """Attention that a recipe must name; its count of heads is an attribute."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        # A bias of keys has no gradient but rounding, which Adam makes large.
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = Attention(heads)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        x = x + self.attention(self.norms[0](x))
        out: torch.Tensor = x + self.dropout(self.mlp(self.norms[1](x)))
        return out


class Language(nn.Module):
    """A language model whose embedding and output are one weight; the vocabulary divides by nothing."""

    def __init__(self, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH, padding_idx=3), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block(heads, dropout) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take (batch, tokens); return logits (batch, tokens, words)."""
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Encoder(nn.Module):
    """torch's own layers: batch first, norm last; and one that takes tokens first, with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True, activation="gelu"), 2
        )  # fmt: skip
        self.second = nn.TransformerDecoderLayer(WIDTH, 4, 64, dropout=0.0)
        self.out = nn.Linear(WIDTH, WORDS)
        for name, parameter in self.named_parameters():
            if name.endswith("in_proj_bias"):  # its part for keys has no gradient but rounding
                parameter.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take (batch, tokens); return logits (batch, tokens, words)."""
        x = self.words(tokens)
        x = self.first(x, src_key_padding_mask=tokens == 0)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.second(x.transpose(0, 1), x.transpose(0, 1), tgt_mask=mask)
        logits: torch.Tensor = self.out(y.transpose(0, 1))
        return logits


def llama(**changes: Any) -> nn.Module:
    """Return a small Llama of transformers, as it comes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=WORDS, **{**sizes, "num_key_value_heads": 4, **changes})
    model: nn.Module = LlamaForCausalLM(config)
    return model


def qwen() -> nn.Module:
    """Return a small Qwen 3, whose queries and keys are normalised in each head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8,
    )  # fmt: skip
    model: nn.Module = Qwen3ForCausalLM(config)
    return model


def gpt2() -> nn.Module:
    """Return a small GPT-2, whose linear layers are transposed, and hold queries, keys and values in one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=4, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def neox() -> nn.Module:
    """Return a small GPT-NeoX: one layer holds queries, keys and values, and attention reads its input's shape."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: nn.Module = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=WORDS, **sizes))
    return model


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-3, eps=1e-5),
}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets (4, 16)."""
    tokens = torch.randint(0, WORDS, (4, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss of a step, as a user's loop takes it."""
    tokens, targets = batch(step)
    if hasattr(model, "config"):
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[float]:
    """Train by a plain loop; return the losses."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_parts_close(mine: nn.Module, alone: nn.Module, *, rtol: float = 1e-5, what: str = "") -> None:
    """Assert that the parameters and gradients are this rank's parts of those of one process."""
    count = 0
    for (name, parameter), whole in zip(mine.named_parameters(), alone.parameters(), strict=True):
        split = split_of(parameter)
        count += split is not None
        for kind, right, found in (("value", whole, parameter), ("gradient", whole.grad, parameter.grad)):
            if right is None or found is None:
                assert right is found, f"{what} {name}: {kind} {found}, expected {right}"
                continue
            part = right if split is None else split.take(right)
            scale = float(part.detach().abs().max())
            off = float((part - found).detach().abs().max())
            assert off <= rtol * scale + 2e-6, f"{what} {name}: {kind} off by {off}, of {scale}"
    assert count, f"{what}: nothing is split"


def compare(make: Callable[[], nn.Module], kind: str, plan: fd.Plan, what: str = "") -> nn.Module:
    """Train on the ranks and in one process, and compare; return the ranks' model."""
    torch.manual_seed(1)
    mine = make()
    torch.manual_seed(1)
    alone = make()
    optimizer, reference = OPTIMIZERS[kind](mine.parameters()), OPTIMIZERS[kind](alone.parameters())
    fd.distribute(mine, optimizer, plan)
    found, expected = train(mine, optimizer), train(alone, reference)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, msg=lambda m: f"{what}: {m}")
    assert_parts_close(mine, alone, rtol=3e-5, what=what)
    return mine

"""BERT: Devlin et al., "BERT: pre-training of deep bidirectional transformers", 2018, with the heads it trains."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import gelu

VOCABULARY = 30_522
CONTEXT = 512


class Bert(nn.Module):
    """Guesses masked tokens, and whether the second sentence follows the first.

    BERT-base, which is the default, has 110,106,428 parameters: 109,482,240 of the encoder and its pooler.
    """

    def __init__(
        self,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        context: int = CONTEXT,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.sentence = nn.Embedding(2, width)
        self.first_norm = nn.LayerNorm(width, eps=1e-12)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", 1e-12, batch_first=True)
            for _ in range(depth)
        )
        self.pooler = nn.Linear(width, width)
        self.follows = nn.Linear(width, 2)
        self.transform = nn.Linear(width, width)
        self.last_norm = nn.LayerNorm(width, eps=1e-12)
        self.output = nn.Linear(width, vocabulary)
        self.output.weight = self.token.weight
        for embedding in (self.token, self.position, self.sentence):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, sentences: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take tokens and the sentence each is of, both (batch, length).

        Return logits of tokens (batch, length, vocabulary) and of "follows" (batch, 2).
        """
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]] + self.sentence(sentences)
        x = self.first_norm(x)
        for block in self.blocks:
            x = block(x)
        follows: torch.Tensor = self.follows(torch.tanh(self.pooler(x[:, 0])))
        logits: torch.Tensor = self.output(self.last_norm(gelu(self.transform(x))))
        return logits, follows

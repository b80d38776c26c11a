"""A long document by context parallel: the standard library's sources, byte by byte.

    python examples/long_document.py
    farandole run -np 2 --set context=2 -- python examples/long_document.py

Each sample is one long run of text. With ``context=2`` two ranks share it: each holds half of its bytes and of the
activations, attention sees all of them, and the losses are those of one process. New in the loop is
``fd.context_shard``, and in the model ``fd.context_positions`` instead of ``torch.arange``.
"""

import argparse
import pathlib
import statistics

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd


class Layer(nn.Module):
    """Causal attention, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.before, self.after = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        query, key, value = self.before(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.after(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Reader(nn.Module):
    """Predicts the next byte."""

    def __init__(self, length: int, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(Layer(width, heads), Layer(width, heads))
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Take (batch, tokens), return (batch, tokens, 256)."""
        positions = fd.context_positions(text.shape[1])
        return self.head(self.layers(self.bytes(text) + self.places(positions)))


def documents(count: int, length: int) -> TensorDataset:
    """Return runs of `length` + 1 bytes: text, and the same one byte later."""
    folder = pathlib.Path(statistics.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[: count * 2])
    runs = torch.frombuffer(bytearray(text[: count * (length + 1)]), dtype=torch.uint8).long().view(count, -1)
    return TensorDataset(runs[:, :-1], runs[:, 1:])  # targets are shifted before anything is cut


def main() -> None:
    """Train, and print losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=2048, help="tokens of a document")
    parser.add_argument("--documents", type=int, default=12)
    arguments = parser.parse_args()

    fd.init()
    torch.manual_seed(1)
    model = Reader(arguments.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fd.distribute(model, optimizer)
    loader = fd.shard(DataLoader(documents(arguments.documents, arguments.length), batch_size=1))
    for epoch in range(2):
        losses = []
        for document, targets in loader:
            text, following = fd.context_shard(document, targets)
            loss = cross_entropy(model(text).flatten(0, 1), following.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(fd.mean(loss.detach()))
        fd.print(f"epoch {epoch}: {len(losses)} documents of {arguments.length} bytes, last loss {losses[-1]:.4f}")


if __name__ == "__main__":
    main()

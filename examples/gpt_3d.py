"""A GPT over data x tensor x pipeline, from one plan file: the standard library's sources, byte by byte.

    farandole run -np 8 --plan examples/gpt_3d.toml -- python examples/gpt_3d.py
    farandole run -np 1 --set micro_batches=4 --set clip_norm=1.0 -- python examples/gpt_3d.py

Both print the same losses. `fd.step` takes the place of the forward and the backward pass: it is the one call that
works with a pipeline and without. The plan is the only place that knows how the ranks divide the model.
"""

import argparse
import pathlib
import statistics

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd

WIDTH, HEADS, LENGTH = 64, 4, 64


class Block(nn.Module):
    """Causal attention, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, WIDTH)."""
        normed = self.norms[0](x)
        query, key, value = (  # each rank of a tensor group has some of the heads: -1 of them
            project(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Take (batch, tokens), return (batch, tokens, 256)."""
        positions = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.bytes(text) + self.places(positions))))


def runs(count: int) -> TensorDataset:
    """Return runs of bytes, and the same one byte later."""
    folder = pathlib.Path(statistics.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("s*.py")))
    rows = torch.frombuffer(bytearray(text[: count * (LENGTH + 1)]), dtype=torch.uint8).long().view(count, -1)
    return TensorDataset(rows[:, :-1], rows[:, 1:])


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over all bytes."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()

    world = fd.init()
    fd.seed(0)
    model = GPT(arguments.layers)
    whole = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, eps=1e-4)
    model, optimizer = fd.distribute(model, optimizer)
    loader = fd.shard(DataLoader(runs(16 * arguments.steps), batch_size=16), split=True)

    for step, (text, following) in enumerate(loader):
        optimizer.zero_grad()
        loss = fd.step(model, loss_of, text, following)
        optimizer.step()
        if step % 10 == 9:
            fd.print(f"step {step + 1}: loss {float(loss):.4f}")
    here = sum(parameter.numel() for parameter in model.parameters())
    fd.print(f"{world.degrees}: {here} of {whole} parameters on this rank")


if __name__ == "__main__":
    main()

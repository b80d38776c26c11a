"""A model whose full training state is ten times what a rank may use: frozen in 8 bits, trained in shards.

    farandole run -np 4 -- python examples/small_laboratory.py
    farandole run -np 4 -- python examples/small_laboratory.py --trained 0.4 --offload disk
    farandole run -np 4 -- python examples/small_laboratory.py --limit-mb 600 --times 2

Every rank may use so much memory of its own and no more: the kernel enforces it (RLIMIT_DATA, ``ulimit -d``). The
layers are made one by one and frozen at once, because they do not fit whole; low-rank adapters train beside them,
at ZeRO stage 3, and activations are computed again in backward. With ``--trained`` a share of the layers trains
whole: their first weights come in a mapped file, and each rank keeps its shards. With ``--offload disk`` the
states of the optimizer are in mapped files, whose pages the kernel may take back, so they are not the rank's own.
"""

import argparse
import resource
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import farandole as fd
from farandole.bench.data import load_text

FULL_STATE_BYTES = 16
"""A parameter, its gradient, and Adam's two states, in float32."""


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, tokens, width) to the same."""
        batch, tokens, width = x.shape
        parts = self.attention(self.first(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        result: torch.Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
        return result


def in_file(layer: Layer) -> Layer:
    """Move weights to a file that has no name, and that the kernel reads and writes as it needs memory."""
    for parameter in layer.parameters():
        with tempfile.TemporaryFile(dir="/var/tmp") as file:
            name, count = f"/proc/self/fd/{file.fileno()}", parameter.numel()
            memory = torch.from_file(name, shared=True, size=count, dtype=parameter.dtype)
        parameter.data = memory.view_as(parameter).copy_(parameter.detach())
    return layer


class Model(nn.Module):
    """Layers in a row, between bytes and logits of bytes; the first ones are frozen."""

    def __init__(self, width: int, depth: int, frozen: int, codec: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList()
        for index in range(depth):
            layer = Layer(width)
            self.layers.append(fd.freeze(layer, codec) if index < frozen else in_file(layer))  # type: ignore[arg-type]
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """From (batch, tokens) to (batch, tokens, 256)."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mb", type=int, default=1500, help="memory of each rank")
    parser.add_argument("--times", type=float, default=10.0, help="full training state over that limit")
    parser.add_argument("--codec", choices=["none", "int8", "int4"], default="int8")
    parser.add_argument("--trained", type=float, default=0.0, help="share of the layers that train whole")
    parser.add_argument("--offload", choices=["none", "disk"], default="none", help="where Adam's states are")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    limit = arguments.limit_mb * 10**6
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    world = fd.init()
    fd.seed(0)
    depth = round(arguments.times * limit / FULL_STATE_BYTES / (12 * arguments.width**2))
    frozen = depth - round(depth * arguments.trained)
    model = Model(arguments.width, depth, frozen, arguments.codec)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if frozen:
        fd.low_rank_adapters(model, [f"layers.{index}.*" for index in range(frozen)], rank=8)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    rate = 1e-4 if arguments.trained else 1e-3
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], rate)
    model, optimizer = fd.distribute(
        model, optimizer, fd.Plan(zero=3, recompute="blocks", offload=arguments.offload)
    )
    full = parameters * FULL_STATE_BYTES
    fd.print(
        f"{parameters / 1e6:.0f} million parameters: full training state {full / 1e9:.2f} GB, {full / limit:.1f} "
        f"times the {limit / 1e9:.2f} GB that each of {world.size} ranks may use"
    )
    fd.print(f"{trained / 1e6:.0f} million parameters train, {frozen} of {depth} layers are frozen")

    training, _ = load_text(context=64)
    loader = fd.shard(DataLoader(training, batch_size=1, shuffle=True))
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        fd.print(f"step {step}: loss {fd.mean(loss.item()):.3f}")
        if step + 1 >= arguments.steps:
            break
    used = fd.gather(torch.tensor([[own_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0]]))
    own, resident = (float(each) / 1e9 for each in used.amax(0))
    fd.print(f"memory of its own: {own:.2f} GB at the end, on the rank that used most")
    fd.print(f"peak memory: {resident:.2f} GB with pages of files, on the rank that used most")


def own_bytes() -> float:
    """Return what the kernel counts against the limit."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024.0 for line in status.splitlines() if line.startswith("VmData"))


if __name__ == "__main__":
    main()

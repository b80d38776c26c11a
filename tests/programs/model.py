"""The models of random programs: blocks in a row, each from one width to the same width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .program import Program


@dataclass
class Place:
    """Where a forward pass is run: what a branch looks at."""

    rank: int = 0
    step: int = 0


class Net(nn.Module):
    """The blocks of a program in a row, and a head."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.place = Place()
        self.checkpointing = program.checkpointing
        self.blocks = nn.ModuleList(
            _make(name, program.width, program.ranks, self.place) for name in program.blocks
        )
        self.head = nn.Linear(program.width, 2)
        self.to(getattr(torch, program.dtype))
        for block in self.blocks:
            if isinstance(block, Mixed):
                block.narrow()
            if isinstance(block, Transposed):
                block.transpose()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, width) to (batch, 2)."""
        for block in self.blocks:
            reentrant = self.checkpointing == "reentrant"
            if self.checkpointing == "none" or (reentrant and not x.requires_grad):
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=reentrant)
        out: torch.Tensor = self.head(x)
        return out


def _make(name: str, width: int, ranks: int, place: Place) -> nn.Module:
    simple = {
        "linear": Linear, "tied": Tied, "layer_norm": nn.LayerNorm, "conv": Conv, "batch_norm": nn.BatchNorm1d,
        "frozen": Frozen, "thawed": Thawed, "unused": Unused, "transposed": Transposed, "scalar": Scalar,
        "empty": Empty, "mixed": Mixed, "complex": Complex, "weight_norm": WeightNorm,
    }  # fmt: skip
    if name == "branch":
        return Branch(width, ranks, place)
    if name in ("embedding", "sparse_embedding"):
        return Words(width, sparse=name == "sparse_embedding")
    made: nn.Module = simple[name](width)
    return made


class Linear(nn.Module):
    """A layer and a bend."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


class Frozen(Linear):
    """Not trained."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.requires_grad_(False)


class Thawed(Frozen):
    """Not trained until the loop says so, in its third step."""


class Unused(Linear):
    """Trained, but in no loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Branch(Linear):
    """Used by other ranks in every step."""

    def __init__(self, width: int, ranks: int, place: Place) -> None:
        super().__init__(width)
        self.ranks, self.place = ranks, place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (self.place.rank + self.place.step) % (self.ranks + 1) == 0:
            return x
        return x + super().forward(x)


class Tied(nn.Module):
    """Two layers that share their matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


class Transposed(nn.Module):
    """A matrix that lies in memory by columns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def transpose(self) -> None:
        """Lay the matrix out by columns."""
        self.weight = nn.Parameter(self.weight.detach().t().contiguous().t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Conv(nn.Module):
    """A small picture of the row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.side = 2 if width == 8 else 3 if width == 27 else 4
        self.planes = width // self.side**2
        self.layer = nn.Conv2d(self.planes, self.planes, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.view(-1, self.planes, self.side, self.side)
        return torch.tanh(self.layer(image)).reshape(x.shape)


class Words(nn.Module):
    """Rows of a table, chosen by the sign and size of the first feature."""

    def __init__(self, width: int, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width, sparse=sparse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = (x.detach()[:, 0].abs() * 7).long() % 11
        rows: torch.Tensor = self.table(index)
        return x + rows.to(x.dtype)


class Scalar(nn.Module):
    """A number without a dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Empty(nn.Module):
    """A parameter without an element."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.nothing.sum()


class Mixed(Linear):
    """A layer in another dtype than the rest."""

    def narrow(self) -> None:
        """Change the layer's dtype."""
        self.layer.to(torch.float64 if self.layer.weight.dtype == torch.float32 else torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.layer.weight.dtype)).to(x.dtype)


class Complex(nn.Module):
    """A diagonal of complex numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=torch.complex64))

    def _apply(self, fn: object, recurse: bool = True) -> Complex:
        """Stay complex: a model's ``.double()`` is not meant for it."""
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh((x.to(torch.complex64) * self.weight).real.to(x.dtype) + x)


class WeightNorm(Linear):
    """A layer whose weight is made of two parameters in every forward pass."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        nn.utils.parametrizations.weight_norm(self.layer)


def loss_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor, *, penalty: bool) -> torch.Tensor:
    """Return the mean over the batch of the squared error, and of the input's gradient if asked."""
    if not penalty:
        return functional.mse_loss(net(x), y)
    x = x.clone().requires_grad_()
    out = net(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return functional.mse_loss(out, y) + slope.square().sum(1).mean()

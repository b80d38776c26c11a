"""Plan key ``recompute``: the same bits as without it, on one rank and on several, and less memory."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.core.vocabulary.errors import ConfigError, PlanError
from farandole.parallel.distribute import undistribute
from tests.ranks.pool import ranks
from tests.ranks.reference import own

WIDTH = 8


class Attention(nn.Module):
    """A block of a transformer with keyword arguments, a tuple in and a tuple out."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, WIDTH))

    def forward(self, pair: tuple[torch.Tensor, int], *, scale: torch.Tensor) -> tuple[torch.Tensor, int]:
        x, count = pair
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.feed(self.norm(x)) * scale, count + 1


class Convolution(nn.Module):
    """A block with running statistics and a buffer of the user's that decides what is computed."""

    calls: torch.Tensor

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, pair: tuple[torch.Tensor, int], *, scale: torch.Tensor) -> tuple[torch.Tensor, int]:
        x, count = pair
        self.calls += 1
        y = self.norm(self.convolution(x.transpose(1, 2))).transpose(1, 2)
        return x + nn.functional.relu(y) * scale / self.calls, count + 1


class Model(nn.Module):
    def __init__(self, kinds: str, dropout: float) -> None:
        super().__init__()
        made = {"a": lambda: Attention(dropout), "c": lambda: Convolution(0.1), "m": lambda: Convolution(None)}
        self.inlet = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList([made[kind]() for kind in kinds])
        self.scale = nn.Parameter(torch.ones(()))
        self.outlet = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = (self.inlet(x), 0)
        for layer in self.layers:
            pair = layer(pair, scale=self.scale)
        out: torch.Tensor = self.outlet(pair[0])
        return out


def distributed(model: nn.Module, recompute: Any) -> None:
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(recompute=recompute))


def trained(kinds: str, seed: int, recompute: Any, **keys: Any) -> tuple[nn.Module, list[torch.Tensor]]:
    """Return the model after 5 steps, and the losses."""
    torch.manual_seed(seed)
    model = Model(kinds, dropout=0.3)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    fd.distribute(model, optimizer, fd.Plan(recompute=recompute, **keys))
    generator = torch.Generator().manual_seed(seed)
    losses = []
    torch.manual_seed(seed + fd.world().rank)
    for _ in range(5):
        x, y = torch.randn(8, 5, 3, generator=generator), torch.randn(8, 5, 2, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(own(x)), own(y))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, losses


def assert_same(kinds: str, seed: int, recompute: Any, **keys: Any) -> None:
    plain, expected = trained(kinds, seed, "none", **keys)
    again, losses = trained(kinds, seed, recompute, **keys)
    assert all(map(torch.equal, losses, expected)), f"{kinds}: losses {losses}, expected {expected}"
    assert list(again.state_dict()) == list(plain.state_dict()), "the keys of the state have changed"
    for name, value in plain.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), f"{kinds}: {name} differs"


@pytest.mark.gate_cases("1-aa-recompute2")
@pytest.mark.parametrize("recompute", ["blocks", ("layers.?",), ("*.feed", "*.norm", "layers.1")])
@pytest.mark.parametrize("kinds", ["aa", "acm"])
@ranks(1, 2)
def test_the_same_bits_as_without(kinds: str, recompute: Any) -> None:
    fd.init()
    for seed in range(3):
        assert_same(kinds, seed, recompute)


@pytest.mark.full("further")
@ranks(2)
def test_statistics_of_all_ranks_are_summed_once() -> None:
    fd.init()
    assert_same("ccm", 0, "blocks", sync_batch_norm=True)
    assert_same("ccm", 1, ("*.norm",), sync_batch_norm=True)


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Return the bytes that autograd keeps between the forward and the backward pass, without parameters."""
    kept: dict[int, int] = {}
    known = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in known:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x).sum().backward()
    return sum(kept.values())


@ranks(1)
def test_less_is_kept() -> None:
    fd.init()
    found = {}
    for recompute in ("none", "blocks"):
        model = Model("aaaa", dropout=0.0)
        distributed(model, recompute)
        found[recompute] = saved_bytes(model, torch.randn(16, 32, 3))
    assert found["blocks"] * 4 < found["none"], f"bytes kept: {found}"


@ranks(1)
def test_copies_are_plain_and_undistribute_removes_it() -> None:
    fd.init()
    model = Model("ac", dropout=0.0)
    plain = [type(layer) for layer in model.layers]
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(recompute="blocks"))
    assert [type(layer) for layer in model.layers] != plain, "nothing is recomputed"
    assert all(map(isinstance, model.layers, plain)), "isinstance has changed"
    names = list(inspect.signature(model.layers[0].forward).parameters)
    assert names == ["pair", "scale"], f"the signature of forward has changed: {names}"
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for copied in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(stream, weights_only=False),
    ):
        assert [type(layer) for layer in copied.layers] == plain, "a copy recomputes"
        x = torch.randn(2, 5, 3)
        copied(x).sum().backward()
        assert model.inlet.weight.grad is None, "a copy computes with the model's own parameters"
    undistribute(model)
    assert [type(layer) for layer in model.layers] == plain, "undistribute has left something"


@ranks(1)
def test_evaluation_and_passes_without_gradients_are_plain() -> None:
    fd.init()
    model: Any = Model("a", dropout=0.0)
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(recompute=("layers.0",)))
    seen = []
    model.layers[0].feed.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        model(torch.randn(2, 5, 3))
    model.eval()
    model(torch.randn(2, 5, 3)).sum().backward()
    assert len(seen) == 2, "recomputed outside of training"
    model.train()
    model(torch.randn(2, 5, 3)).sum().backward()
    assert len(seen) == 4, "not recomputed in training"


@ranks(1)
def test_two_backward_passes_through_one_graph() -> None:
    fd.init()
    gradients = []
    for recompute in ("none", "blocks"):
        torch.manual_seed(3)
        model = Model("ac", dropout=0.5)
        distributed(model, recompute)
        loss = model(torch.ones(2, 5, 3)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients)), "gradients of two passes differ"


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU())])
        self.head = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("recompute", "text"),
    [
        ("blocks", "no list of repeated blocks; name modules by patterns"),
        (("layer.0",), "'layer.0' matches no module with a forward pass; did you mean 'layers.0'"),
        (("layers",), "'layers' matches no module with a forward pass; did you mean 'layers.*'"),
        (("head", "zzzzzz"), "'zzzzzz' matches no module with a forward pass; modules: layers.0"),
    ],
)
@ranks(1, 2)
def test_what_matches_nothing(recompute: Any, text: str) -> None:
    fd.init()
    model = Lists()
    with pytest.raises(PlanError) as caught:
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(recompute=recompute))
    assert text in str(caught.value), str(caught.value)


@ranks(1)
def test_what_cannot_be_recomputed() -> None:
    fd.init()
    model: Any = Lists()
    model.head.forward = lambda x: x
    with pytest.raises(ConfigError, match="module 'head': the forward of this Linear was replaced"):
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(recompute=("head",)))
    scripted: Any = Lists()
    with warnings.catch_warnings(action="ignore"):
        scripted.head = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"module 'head': .* is scripted"):
        fd.distribute(scripted, torch.optim.SGD(scripted.parameters(), 0.1), fd.Plan(recompute=("head",)))


@pytest.mark.full("further")
@ranks(1)
def test_a_compiled_model_recomputes() -> None:
    fd.init()
    gradients = []
    for recompute in ("none", "blocks"):
        torch.manual_seed(3)
        model = Model("aa", dropout=0.0)
        distributed(model, recompute)
        compiled: Any = torch.compile(model, backend="aot_eager")
        with warnings.catch_warnings(action="ignore"):
            compiled(torch.ones(2, 5, 3)).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for mine, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, expected, msg="a compiled model has other gradients")


class LargeBuffer(nn.Module):
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(1 << 19))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table += 1
        out: torch.Tensor = self.linear(x) * self.table[0]
        return out


@ranks(1)
def test_a_second_pass_that_would_see_something_else_is_an_error() -> None:
    fd.init()
    model = nn.Sequential(LargeBuffer(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(recompute=("0", "1")))
    with pytest.raises(ConfigError, match="buffer 'table' of a LargeBuffer changes in the forward pass"):
        model(torch.ones(2, 2))
    undistribute(model)
    model[0] = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, fd.Plan(recompute=("0", "1")))
    first, second = model(torch.ones(2, 2)).sum(), model(torch.ones(2, 2)).sum()
    first.backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="changed in place between its forward and backward pass"):
        second.backward()

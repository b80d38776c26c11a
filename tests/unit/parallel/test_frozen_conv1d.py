"""transformers' Conv1D, the linear layer of GPT-2: frozen in few bits and with adapters; and what else stays."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.core.vocabulary.errors import ConfigError
from farandole.parallel.frozen_weight import FrozenWeight

WIDTH = 64
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is missing"
)


class Perceptron(nn.Module):
    """That of GPT-2: two layers whose weights are [in, out], or the same ones of torch."""

    def __init__(self, *, is_torch: bool = False) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Conv1D(2 * WIDTH, WIDTH), Conv1D(WIDTH, 2 * WIDTH)
        with torch.no_grad():
            for each in self.parameters():
                each.normal_(std=0.2)
        if is_torch:
            self.first, self.second = as_linear(self.first), as_linear(self.second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x).tanh())
        return result


def as_linear(layer: Any) -> nn.Linear:
    made = nn.Linear(layer.nx, layer.nf)
    with torch.no_grad():
        made.weight.copy_(layer.weight.t())
        made.bias.copy_(layer.bias)
    return made


@pytest.fixture(autouse=True)
def _world() -> Any:
    fd.init(progress=False)
    yield
    fd.shutdown()


@needs_transformers
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_stored_weights_compute_what_the_decoded_ones_do(codec: Any) -> None:
    model = Perceptron()
    for each in model.parameters():
        each.requires_grad_(each.dim() == 1)  # biases train
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], 0.01)
    fd.distribute(model, optimizer, fd.Plan(frozen_codec=codec))
    weights: list[Any] = [model.first.weight, model.second.weight]
    assert all(isinstance(each, FrozenWeight) for each in weights), "both are stored in few bits"
    plain = copy.deepcopy(model)
    for layer, weight in zip((plain.first, plain.second), weights, strict=True):
        layer.weight = nn.Parameter(weight.decode(), requires_grad=False)
    kept: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(3, 5, WIDTH)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda each: each):
        output = model(mine)
    assert torch.equal(output, plain(other)), "outputs, bit for bit"
    dense = [each for each in kept if each.numel() >= 2 * WIDTH * WIDTH and not isinstance(each, FrozenWeight)]
    assert not dense, "what backward keeps is packed"
    output.square().sum().backward()
    plain(other).square().sum().backward()
    for one, two in ((mine, other), (model.first.bias, plain.first.bias)):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad), "gradients, bit for bit"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x), plain(x)), "under autocast too"


@needs_transformers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adapters_are_those_of_a_linear_layer(dtype: torch.dtype, tmp_path: Path) -> None:
    models = [Perceptron().to(dtype), Perceptron(is_torch=True).to(dtype)]
    x, tolerance = torch.randn(6, WIDTH, dtype=dtype), 1e-5 if dtype == torch.float32 else 1e-12
    new, optimizers = [], []
    for model in models:
        model.requires_grad_(False)
        before = model(x)
        torch.manual_seed(1)
        new.append(fd.low_rank_adapters(model, "*", rank=4, alpha=8))
        assert torch.equal(model(x), before), "nothing changes at first"
        optimizers.append(torch.optim.SGD(new[-1], 0.01))
        fd.distribute(model, optimizers[-1])
        for _ in range(4):
            optimizers[-1].zero_grad()
            model(x).square().mean().backward()
            optimizers[-1].step()
        assert not torch.equal(model(x), before), "it trains"
    for one, two in zip(*new, strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(models[0](x), models[1](x), rtol=tolerance, atol=tolerance)
    fd.save(tmp_path, models[0], optimizers[0], step=4)
    other = Perceptron().to(dtype).requires_grad_(False)
    optimizer = torch.optim.SGD(fd.low_rank_adapters(other, "*", rank=4, alpha=8), 0.01)
    fd.distribute(other, optimizer)
    assert fd.load(tmp_path, other, optimizer) == 4
    assert torch.equal(other(x), models[0](x)), "what was saved, bit for bit"
    merged: Any = Perceptron().to(dtype)
    with torch.no_grad():
        for name in ("first", "second"):
            layer: Any = other.get_submodule(name)
            change = 2.0 * layer.adapter_up @ layer.adapter_down
            merged.get_submodule(name).weight.copy_(layer.weight + change.t())
    torch.testing.assert_close(merged(x), other(x), rtol=tolerance, atol=tolerance)


# -- what stays as it is -------------------------------------------------------------------------


class Seeing(nn.Module):
    """Convolutions beside linear layers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels))
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 2)


@pytest.mark.parametrize(
    ("channels", "is_freeze", "line"),
    [
        (64, False, "farandole: frozen_codec: 33 % of the frozen bytes stay as they are: Conv2d"),
        (64, True, "farandole: freeze: 33 % of the frozen bytes stay as they are: Conv2d"),
        (2, False, ""),
    ],
)
def test_what_stays_is_said_once_where_it_is_much(
    channels: int, is_freeze: bool, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Seeing(channels)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    if is_freeze:
        fd.freeze(model.body, "int4")
    plan = fd.Plan() if is_freeze else fd.Plan(frozen_codec="int4")
    fd.distribute(model, torch.optim.SGD(model.head.parameters(), 0.1), plan)
    said = [each for each in capsys.readouterr().err.splitlines() if "frozen bytes" in each]
    assert said == [line] * bool(line), said


def test_a_weight_that_stays_for_its_dtype_or_norm_is_told_from_one_that_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.ModuleList(
        [nn.Linear(64, 64), nn.Linear(64, 64).double(), nn.Embedding(64, 64, max_norm=1.0), nn.Linear(2, 2)]
    )
    model[:3].requires_grad_(False)
    fd.distribute(model, torch.optim.SGD(model[3].parameters(), 0.1), fd.Plan(frozen_codec="int8"))
    assert "stay as they are: Linear in torch.float64, Embedding with max_norm\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("see.*", "none of 2 linear layers .*it matches 1 Conv2d, 1 BatchNorm2d; there are: body, head"),
        ("nothing.*", "it matches no module at all; there are: body, head"),
        ("bodi", "it matches no module at all; did you mean 'body'?"),
    ],
)
def test_a_pattern_without_a_linear_layer_says_what_it_matches(pattern: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fd.low_rank_adapters(Seeing(8), pattern)
    with pytest.raises(ConfigError, match=r"it matches 1 Seeing; did you mean 'net.\*'?"):
        fd.low_rank_adapters(nn.ModuleDict({"net": Seeing(8)}), "net")

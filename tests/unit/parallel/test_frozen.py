"""Frozen weights in few bits: their size, their gradients, their form in a checkpoint; adapters beside them."""

from __future__ import annotations

import copy
import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import farandole as fd
from farandole.checkpoint.export import export_weights
from farandole.core.vocabulary.errors import CheckpointError, ConfigError, PlanError
from farandole.parallel.distribute import undistribute
from farandole.parallel.frozen_weight import FrozenWeight, decode_blocks, encode_blocks
from farandole.train.checkpoint.formats import convert_checkpoint

SHARE = {"int8": 0.27, "int4": 0.15}
CODECS = sorted(SHARE)


class Small(nn.Module):
    """A body that is frozen and a head that trains; the table is the first layer of the tied head too."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.body = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
        self.tied = nn.Linear(width, 50, bias=False)
        self.tied.weight = self.table.weight
        self.head = nn.Linear(50, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.tied(self.body(self.table(tokens))))
        return result


def frozen(codec: str, *, width: int = 128, seed: int = 0) -> tuple[Small, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Small(width)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    for each in model.body.parameters():
        each.requires_grad_(each.dim() == 1)  # biases train
    return fd.distribute(model, torch.optim.Adam(model.parameters(), 0.01), fd.Plan(frozen_codec=codec))  # type: ignore[arg-type]


def stored(model: Small) -> FrozenWeight:
    weight: Any = model.table.weight
    assert isinstance(weight, FrozenWeight)
    return weight


@pytest.fixture(autouse=True)
def _world() -> Any:
    fd.init(progress=False)
    yield
    fd.shutdown()


@pytest.mark.parametrize("codec", CODECS)
def test_stored_bytes_are_a_small_part_of_the_fp32_weights(codec: str) -> None:
    model, _ = frozen(codec, width=256)
    weights = [each for each in model.parameters() if isinstance(each, FrozenWeight)]
    assert len(weights) == 3, "a table that is tied, and two layers"
    stored = sum(part.untyped_storage().nbytes() for each in weights for part in each.parts.values())
    dense = sum(4 * each.numel() for each in weights)
    assert stored <= SHARE[codec] * dense, f"{stored / dense:.4f} of the fp32 bytes"
    assert not any(
        each.untyped_storage().nbytes() >= 4 * 256 * 256 for each in model.parameters()
        if not isinstance(each, FrozenWeight)
    ), "no dense weight is left"  # fmt: skip


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_the_error_of_an_element_is_half_a_step_of_its_block(codec: str, scale: float) -> None:
    torch.manual_seed(1)
    weight = torch.randn(37, 41) * scale
    packed, scales = encode_blocks(weight, codec)
    found = decode_blocks(packed, scales, codec).view(-1)[: weight.numel()].view(37, 41)
    most = {"int8": 127, "int4": 7}[codec]
    assert float((found - weight).abs().max()) <= 0.51 * float(weight.abs().max()) / most, "half a step"
    zeros = decode_blocks(*encode_blocks(torch.zeros(70), codec), codec)
    assert not zeros.any(), "a block of zeros"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("width", [128, 100])
def test_outputs_and_gradients_are_those_of_the_decoded_weights(codec: str, width: int) -> None:
    model, _ = frozen(codec, width=width)
    plain = copy.deepcopy(model)
    for module in plain.modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(weight, FrozenWeight):
            module.weight = nn.Parameter(weight.decode(), requires_grad=False)
    tokens = torch.arange(24).view(4, 6)
    outputs = [each(tokens) for each in (model, plain)]
    assert torch.equal(outputs[0], outputs[1]), "the outputs, bit for bit"
    for each in outputs:
        each.square().sum().backward()
    for name, one in model.named_parameters():
        other = plain.get_parameter(name)
        if one.requires_grad:
            assert one.grad is not None, name
            assert other.grad is not None, name
            assert torch.equal(one.grad, other.grad), f"the gradient of {name}, bit for bit"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(tokens), plain(tokens)), "under autocast too"


def test_what_backward_keeps_is_packed() -> None:
    model, _ = frozen("int4", width=512)
    seen: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda each: each):
        model(torch.arange(4))
    assert max(seen) < 4 * 512 * 1024, "no decoded weight of a layer of the body"


@pytest.mark.parametrize("codec", CODECS)
def test_training_moves_what_trains_and_leaves_the_packed_numbers(codec: str) -> None:
    model, optimizer = frozen(codec)
    before = [part.clone() for each in model.parameters() if isinstance(each, FrozenWeight)
              for part in each.parts.values()]  # fmt: skip
    losses = []
    for _ in range(5):
        loss = functional.cross_entropy(model(torch.arange(30)), torch.arange(30) % 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0], "it trains"
    after = [part for each in model.parameters() if isinstance(each, FrozenWeight) for part in each.parts.values()]
    assert all(map(torch.equal, before, after)), "frozen is frozen"


@pytest.mark.parametrize("codec", CODECS)
def test_a_checkpoint_has_the_packed_numbers_and_an_export_float32(codec: str, tmp_path: Path) -> None:
    model, optimizer = frozen(codec)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    fd.save(tmp_path / "c", model, optimizer, step=1)
    size = sum(file.stat().st_size for file in (tmp_path / "c").rglob("*.safetensors"))
    other, other_optimizer = frozen(codec, seed=5)
    assert fd.load(tmp_path / "c", other, other_optimizer) == 1
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        if isinstance(one, FrozenWeight):
            assert isinstance(two, FrozenWeight), name
            assert all(torch.equal(one.parts[key], two.parts[key]) for key in one.parts), f"{name}, bit for bit"
        else:
            assert torch.equal(one, two), name
    assert other.tied.weight is other.table.weight, "tied as before"
    assert size < 4 * sum(each.numel() for each in model.parameters()), "and the file is smaller than fp32"
    export_weights(tmp_path / "c", 1, tmp_path / "out.safetensors")
    content = (tmp_path / "out.safetensors").read_bytes()
    at = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:at])
    for name, value in model.state_dict().items():
        begin, end = header[name]["data_offsets"]
        found = np.frombuffer(content[at + begin : at + end], np.float32).reshape(header[name]["shape"])
        wanted = value.decode() if isinstance(value, FrozenWeight) else value
        assert np.array_equal(found, wanted.numpy()), f"{name} as float32, bit for bit"
    convert_checkpoint(tmp_path / "c", 1, tmp_path / "c.pt", to="torch")
    whole = torch.load(tmp_path / "c.pt", weights_only=True)
    assert torch.equal(whole["model"]["table.weight"], stored(model).decode())


def test_a_checkpoint_of_another_form_is_refused(tmp_path: Path) -> None:
    model, _ = frozen("int8")
    fd.save(tmp_path, model, step=1)
    for plan in (fd.Plan(), fd.Plan(frozen_codec="int4")):
        other = Small()
        other.requires_grad_(False)
        other.head.requires_grad_(True)
        fd.distribute(other, torch.optim.SGD(other.head.parameters(), 0.1), plan)
        with pytest.raises(CheckpointError, match=r"table.weight is int8 .* in the checkpoint and .*frozen_codec"):
            fd.load(tmp_path, other)


def test_copies_pickles_and_state_dicts() -> None:
    model, _ = frozen("int4")
    twin = copy.deepcopy(model)
    assert isinstance(twin.table.weight, FrozenWeight)
    assert isinstance(twin.table.weight, nn.Parameter)
    assert twin.tied.weight is twin.table.weight, "a copy is tied as the model is"
    assert stored(twin).packed.data_ptr() != stored(model).packed.data_ptr()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded["table.weight"].packed, stored(model).packed)
    twin.load_state_dict(model.state_dict())
    dense = Small().state_dict()
    twin.load_state_dict(dense)
    assert isinstance(twin.table.weight, FrozenWeight), "plain weights are encoded"
    assert float((stored(twin).decode() - dense["table.weight"]).abs().max()) < 0.5
    assert torch.equal(model.table.weight + 0.0, stored(model).decode()), "other operations get the elements"
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    assert narrow.table.weight.dtype == torch.bfloat16
    assert narrow.table(torch.arange(3)).dtype == torch.bfloat16


def test_a_frozen_weight_does_not_train_and_does_not_change() -> None:
    model, _ = frozen("int8")
    with pytest.raises(ConfigError, match="cannot train"):
        model.table.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="cannot train"):
        model.table.weight.requires_grad = True
    with pytest.raises(RuntimeError, match="would change a frozen weight"), torch.no_grad():
        model.table.weight.add_(1.0)
    undistribute(model)
    fd.distribute(model, torch.optim.SGD(model.head.parameters(), 0.1), fd.Plan(frozen_codec="int8"))
    assert isinstance(model.table.weight, FrozenWeight), "distributed again as it is"


def test_what_cannot_be_stored_is_refused_by_name() -> None:
    plan = fd.Plan(frozen_codec="int8")
    model = nn.Linear(4, 4)
    with pytest.raises(PlanError, match='frozen_codec = "int8", but no weight'):
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan)
    both = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    both[0].requires_grad_(False)
    both[0].get_parameter("weight").data[0, 0] = float("nan")
    with pytest.raises(PlanError, match=r"'0.weight' holds NaN"):
        fd.distribute(both, torch.optim.SGD(both[1].parameters(), 0.1), plan)
    wide = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)).double()
    with pytest.raises(PlanError, match=r"is frozen in torch.float32, .*: they are torch.float64"):
        fd.distribute(wide, torch.optim.SGD(wide[1].parameters(), 0.1), plan)
    with pytest.raises(PlanError, match="frozen_codec"):
        fd.Plan.from_mapping({"frozen_codec": "int2"}, where="test")


# -- adapters ------------------------------------------------------------------------------------


def test_adapters_compute_what_lora_does_and_only_they_train() -> None:
    torch.manual_seed(0)
    model = Small()
    model.requires_grad_(False)
    tokens = torch.arange(6)
    before = model(tokens)
    new = fd.low_rank_adapters(model, "body.*", rank=4, alpha=8)
    assert [tuple(each.shape) for each in new] == [(4, 128), (256, 4), (4, 256), (128, 4)]
    assert torch.equal(model(tokens), before), "nothing changes at first"
    assert {"body.0.adapter_down", "body.2.adapter_up"} <= set(model.state_dict())
    with torch.no_grad():
        for each in new:
            each.normal_(std=0.1)
    layer: Any = model.body[0]
    x = torch.randn(3, 128)
    merged = layer.weight + 2.0 * layer.adapter_up @ layer.adapter_down
    assert torch.allclose(layer(x), functional.linear(x, merged, layer.bias), atol=1e-5), "W + alpha / r * B A"
    fd.distribute(model, torch.optim.AdamW(new, 0.01), fd.Plan(frozen_codec="int4"))
    twin = copy.deepcopy(model)
    model(tokens).square().sum().backward()
    assert all(each.grad is not None for each in new)
    assert [name for name, each in model.named_parameters() if each.grad is not None] == [
        f"body.{i}.adapter_{part}" for i, part in itertools.product((0, 2), ("down", "up"))
    ]
    assert torch.equal(twin(tokens), model(tokens)), "a copy has its own adapters"


@pytest.mark.parametrize(
    ("patterns", "named", "words"),
    [
        ("nothing.*", {}, "matches none of 4 linear layers"),
        ([], {}, "no pattern"),
        ("body.*", {"rank": 0}, "rank = 0"),
        ("body.*", {"alpha": float("nan")}, "alpha = nan"),
        ("head", {"rank": 4}, "above the features of 'head'"),
    ],
)
def test_adapters_refuse(patterns: Any, named: dict[str, Any], words: str) -> None:
    model = Small()
    with pytest.raises(ConfigError, match=words):
        fd.low_rank_adapters(model, patterns, **named)
    assert not any("adapter" in name for name in model.state_dict()), "nothing was added"


def test_adapters_are_refused_twice_and_where_forward_is_not_called() -> None:
    model = Small()
    fd.low_rank_adapters(model, "body.0")
    with pytest.raises(ConfigError, match="has adapters already"):
        fd.low_rank_adapters(model, "body.*")
    with pytest.raises(ConfigError, match="never called"):
        fd.low_rank_adapters(nn.ModuleList([nn.MultiheadAttention(16, 2)]), "*out_proj")


@pytest.mark.parametrize("codec", CODECS)
def test_freeze_stores_what_the_plan_would_store(codec: str) -> None:
    by_plan, _ = frozen(codec)
    torch.manual_seed(0)
    model = Small()
    assert fd.freeze(model.body, codec) is model.body, "the same module"  # type: ignore[arg-type]
    assert not any(parameter.requires_grad for parameter in model.body.parameters()), "the body is frozen"
    assert all(parameter.requires_grad for parameter in model.head.parameters()), "the rest trains"
    for own, other in (
        (model.body[0].weight, by_plan.body[0].weight),
        (model.body[2].weight, by_plan.body[2].weight),
    ):
        assert isinstance(own, FrozenWeight), f"{type(own)}"
        assert isinstance(other, FrozenWeight), f"{type(other)}"
        assert torch.equal(own.packed, other.packed), "other numbers than by the plan"
        assert torch.equal(own.scales, other.scales), "other scales than by the plan"
    undistribute(by_plan)


def test_freeze_refuses_what_it_cannot_store_and_changes_nothing() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="codec = 'int7', expected none, int8 or int4"):
        fd.freeze(layer, "int7")  # type: ignore[arg-type]
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan
    with pytest.raises(ConfigError, match="'weight' holds NaN"):
        fd.freeze(layer, "int8")
    assert layer.weight.requires_grad, "nothing is changed"
    fd.freeze(layer)
    assert type(layer.weight) is nn.Parameter, "without a codec weights stay as they are"
    assert not layer.weight.requires_grad, "frozen"

"""The mixture-of-experts layer in one process: against each token by itself, and what it refuses."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from farandole.core.vocabulary.errors import ConfigError, PlanError
from farandole.core.vocabulary.spec import Plan
from farandole.parallel.expert.dispatch import taken_choices
from farandole.parallel.expert.expert_ranks import ROW_CODECS
from farandole.parallel.expert.layer import MixtureOfExperts, router_loss


def layer(**keys: Any) -> MixtureOfExperts:
    torch.manual_seed(1)
    return MixtureOfExperts(8, 12, **{"num_experts": 4, "top_k": 2, **keys})


def expert(tokens: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *, is_gated: bool) -> torch.Tensor:
    if is_gated:
        gate, linear = (tokens @ up.t()).chunk(2, -1)
        return (functional.silu(gate) * linear) @ down.t()
    return functional.gelu(tokens @ up.t()) @ down.t()


def token_by_token(mixture: MixtureOfExperts, tokens: torch.Tensor) -> torch.Tensor:
    """Return the layer's output for (n, hidden), one token and expert after the other."""
    routing, is_gated = mixture.routing, mixture.experts.activation == "swiglu"
    probabilities = mixture.router(tokens).softmax(-1)
    weights, chosen = probabilities.topk(routing.top_k)
    if routing.top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    room = [math.inf] * routing.num_experts
    if routing.capacity_factor is not None:
        most = math.ceil(routing.capacity_factor * routing.top_k * len(tokens) / routing.num_experts)
        room = [most] * routing.num_experts
    outs = [torch.zeros(8) for _ in tokens]
    for choice in range(routing.top_k):
        for number, token in enumerate(tokens):
            to = int(chosen[number, choice])
            if room[to] > 0:
                room[to] -= 1
                up, down = mixture.experts.up[to], mixture.experts.down[to]
                outs[number] = outs[number] + weights[number, choice] * expert(token, up, down, is_gated=is_gated)
    if mixture.shared is not None:
        shared = expert(tokens, mixture.shared.up[0], mixture.shared.down[0], is_gated=is_gated)
        return torch.stack(outs) + shared
    return torch.stack(outs)


@pytest.mark.parametrize(
    "keys",
    [{}, {"top_k": 1}, {"top_k": 4}, {"activation": "gelu", "shared_size": 5}, {"capacity_factor": 0.6}],
)
def test_the_output_is_that_of_each_token_by_itself(keys: dict[str, Any]) -> None:
    mixture, tokens = layer(**keys), torch.randn(3, 7, 8)
    expected = token_by_token(mixture, tokens.view(21, 8))
    torch.testing.assert_close(mixture(tokens).view(21, 8), expected)
    load = mixture.last.load
    assert load is not None, "a forward pass was made"
    assert int(load.chosen.sum()) == 21 * mixture.routing.top_k, f"{load}"
    assert bool((load.taken < load.chosen).any()) == ("capacity_factor" in keys), f"{load}"
    assert mixture(torch.randn(0, 8)).shape == (0, 8), "no token is fine"


def test_the_losses_of_a_router() -> None:
    mixture, tokens = layer(), torch.randn(30, 8)
    model = nn.Sequential(mixture)
    with pytest.raises(ConfigError, match="0 has seen no forward pass"):
        router_loss(model)
    model(tokens)
    logits = mixture.router(tokens)
    shares = torch.bincount(logits.topk(2).indices.reshape(-1), minlength=4) / 60
    balance = 4 * (shares * logits.softmax(-1).mean(0)).sum()
    z = logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(router_loss(model, balance=0.3, z=0.2), 0.3 * balance + 0.2 * z)
    with pytest.raises(ConfigError, match="no MixtureOfExperts layer"):
        router_loss(nn.Linear(2, 2))
    even = layer()
    nn.init.zeros_(even.router.weight)
    even(tokens)
    assert float(router_loss(even, balance=1.0).detach()) == pytest.approx(1.0), "equal probabilities"


def test_under_autocast_the_router_stays_in_float32() -> None:
    mixture, tokens = layer(), torch.randn(40, 8)
    plain = mixture(tokens)
    choices = None if mixture.last.load is None else mixture.last.load.chosen
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mixture(tokens)
    assert mixture.last.load is not None, "a forward pass was made"
    assert torch.equal(mixture.last.load.chosen, torch.as_tensor(choices)), "the same experts"
    torch.testing.assert_close(out, plain, rtol=0.05, atol=0.02)


def test_copies_and_saved_layers() -> None:
    mixture, tokens = layer(), torch.randn(5, 8)
    expected = mixture(tokens)
    assert torch.equal(copy.deepcopy(mixture)(tokens), expected), "after a pass, whose losses have gradients"
    file = io.BytesIO()
    torch.save(mixture, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(tokens), expected), "a layer from a file"
    other = layer()
    other.load_state_dict(mixture.state_dict())
    assert torch.equal(other(tokens), expected), "and from its state"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"top_k": 5}, "top_k = 5 of 4 experts; choose top_k from 1 to 4"),
        ({"top_k": 0}, "top_k = 0"),
        ({"num_experts": 0}, "num_experts = 0"),
        ({"capacity_factor": 0.0}, "capacity_factor = 0.0, expected a positive number"),
        ({"capacity_factor": math.nan}, "capacity_factor = nan"),
        ({"capacity_factor": -1.0}, "capacity_factor = -1.0"),
        ({"activation": "relu"}, 'activation = \'relu\', expected "swiglu" or "gelu"'),
        ({"shared_size": -1}, "shared_size = -1"),
    ],
)
def test_what_a_layer_refuses(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        layer(**keys)


def test_a_router_that_gives_nan_is_named() -> None:
    tokens = torch.randn(5, 8)
    tokens[2] = torch.inf
    with pytest.raises(ConfigError, match="router of MixtureOfExperts gave NaN or infinity for 1 tokens"):
        layer()(tokens)


def test_a_codec_without_experts_elsewhere_is_refused() -> None:
    with pytest.raises(PlanError, match='expert_codec = "int8" with expert = 1: no token travels'):
        Plan(expert_codec="int8")


def test_choices_are_taken_in_the_order_of_the_joined_batch() -> None:
    counts = torch.tensor([[[3, 1], [0, 2]], [[2, 0], [1, 3]]])  # two ranks, two choices, two experts
    assert taken_choices(counts, 4).tolist() == [[[3, 1], [0, 2]], [[1, 0], [0, 1]]]
    assert torch.equal(taken_choices(counts, None), counts), "without a capacity all are"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_as_they_travel(dtype: torch.dtype) -> None:
    rows = torch.randn(6, 33).to(dtype)
    rows[1] = 0.0
    rows[4, 5], rows[5, 6] = torch.nan, torch.inf
    for codec, bound in (("none", 0.0), ("bf16", 2**-8), ("int8", 1 / 253)):
        packed = ROW_CODECS[codec].pack(rows)
        room = ROW_CODECS[codec].room(rows)
        assert (packed.shape, packed.dtype) == (room.shape, room.dtype), codec
        assert packed.nbytes == 6 * {"none": 33 * dtype.itemsize, "bf16": 33 * 2, "int8": 33 + 4}[codec], codec
        back = ROW_CODECS[codec].unpack(packed, dtype)
        error = (back[:4].float() - rows[:4].float()).abs().amax(1)
        rounding = 2**-8 if dtype == torch.bfloat16 and codec != "none" else 0.0
        assert bool((error <= (bound + rounding) * rows[:4].float().abs().amax(1)).all()), f"{codec}: {error}"
        assert not back[4].isfinite().all(), f"{codec}: NaN stays"
        assert not back[5].isfinite().all(), f"{codec}: so does infinity"
        assert ROW_CODECS[codec].unpack(ROW_CODECS[codec].pack(rows[:0]), dtype).shape == (0, 33), "no rows"

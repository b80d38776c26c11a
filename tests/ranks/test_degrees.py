"""Degrees together: every pair on four ranks, and triples on eight, train as one process does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import farandole as fd
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.spec import Plan
from farandole.parallel.model import DistributedModel
from farandole.parallel.split import split_of
from tests.ranks.pool import ranks, takes

WORDS, WIDTH, LENGTH, BATCH, STEPS = 13, 16, 8, 8, 5
RECIPE = {"*.query": "columns", "*.key": "columns", "*.value": "columns", "*.out": "rows", "*.heads": "divide"}


class Block(nn.Module):
    """A layer of a transformer: attention, and a perceptron or a mixture of them."""

    def __init__(self, *, experts: bool) -> None:
        super().__init__()
        self.heads = 4
        self.norm = nn.LayerNorm(WIDTH)
        # Attention does not depend on a bias of keys: Adam would divide rounding by rounding.
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=i != 1) for i in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide: nn.Module
        if experts:
            self.wide = fd.MixtureOfExperts(WIDTH, WIDTH, num_experts=4, top_k=2)
        else:
            self.wide = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        query, key, value = (each(normed).unflatten(-1, (self.heads, 4)).transpose(1, 2) for each in self.three())
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        found: torch.Tensor = x + self.wide(x)
        return found

    def three(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.query, self.key, self.value


class Text(nn.Module):
    """A transformer whose second block may have experts."""

    def __init__(self, *, experts: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(experts=experts and i == 1) for i in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, their places, and targets: int64 of (BATCH, LENGTH)."""
    drawn = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], torch.arange(LENGTH).expand(BATCH, LENGTH), drawn[:, 1:]


def plan_of(degrees: tuple[str, ...], **keys: Any) -> Plan:
    sizes: dict[str, Any] = dict.fromkeys(degrees, 2)
    if "shard" in sizes:
        sizes["zero"] = 3
    if "tensor" in sizes:
        sizes["tensor_recipe"] = RECIPE
    return Plan(**sizes, **keys)


def train(plan: Plan) -> None:
    """Train one model on all ranks, and another in this process; compare losses and parameters."""
    here = fd.init()
    experts = plan.expert != 1
    reference, model = Text(experts=experts), Text(experts=experts)
    # With the usual eps Adam would divide rounding by rounding, where gradients are almost zero.
    plain, optimizer = (torch.optim.Adam(each.parameters(), 0.01, eps=1e-3) for each in (reference, model))
    fd.distribute(model, optimizer, plan)
    for number in range(STEPS):
        tokens, places, targets = batch(number)
        plain.zero_grad()
        expected = loss_of(reference(tokens, places), targets)
        expected.backward()
        if plan.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), plan.clip_norm)
        plain.step()
        own = [each.chunk(here.sample_size)[here.sample_rank].contiguous() for each in (tokens, places, targets)]
        if plan.context != 1:
            own = list(fd.context_shard(*own))
        optimizer.zero_grad()
        loss = fd.step(model, loss_of, (own[0], own[1]), own[2])
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6, msg=lambda m: f"{plan}: {m}")
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            continue  # another stage's
        found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        split = split_of(parameter)
        whole = wanted[name].detach()
        torch.testing.assert_close(
            found.detach(), whole if split is None else split.take(whole), rtol=1e-5, atol=2e-6,
            msg=lambda m: f"{name} by {here.degrees}: {m}",  # noqa: B023
        )  # fmt: skip


PAIRS = list(itertools.combinations(("data", "shard", "tensor", "pipeline", "expert", "context"), 2))


OTHERS: list[tuple[tuple[str, str], dict[str, Any]]] = [
    (("data", "tensor"), {"zero": 1}),
    (("data", "pipeline"), {"zero": 2}),
    (("shard", "pipeline"), {"schedule": "interleaved"}),
]
"""Pairs with other keys."""


@pytest.mark.gate_cases("shard-tensor")
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@ranks(4)
@takes(60)
def test_a_pair_of_degrees_trains_as_one_process(pair: tuple[str, str]) -> None:
    train(plan_of(pair, clip_norm=0.5))


@pytest.mark.gate_cases("data-tensor-1")
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: "-".join(map(str, (*case[0], *case[1].values()))))
@ranks(4)
@takes(60)
def test_keys_that_a_pair_combines_with(case: tuple[tuple[str, str], dict[str, Any]]) -> None:
    train(plan_of(case[0], clip_norm=0.5, **case[1]))


@ranks(4)
def test_what_does_not_combine_is_refused_by_name_on_every_rank() -> None:
    for pair, keys, words in (
        (("data", "pipeline"), {"precision": "fp16"}, 'precision = "fp16" with pipeline = 2'),
        (("data", "expert"), {"precision": "fp16"}, 'precision = "fp16" with expert = 2'),
        (("data", "expert"), {"zero": 1}, "zero = 1 with expert = 2"),
        (("shard", "pipeline"), {"schedule": "zb-h1"}, 'schedule = "zb-h1" with zero = 3'),
        (("data", "tensor"), {"bf16_parameters": True, "precision": "bf16"}, "bf16_parameters = true"),
    ):
        fd.init()
        model = Text(experts="expert" in pair)
        before = {name: each.clone() for name, each in model.state_dict().items()}
        with pytest.raises(PlanError, match=words):
            fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan_of(pair, **keys))
        assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items()), (
            f"{words}: changed"
        )


@pytest.mark.full("further")
@pytest.mark.parametrize("pair", [("data", "tensor"), ("tensor", "pipeline")], ids="-".join)
@ranks(4)
@takes(60)
def test_dropout_leaves_equal_parameters_on_ranks_that_have_the_same(pair: tuple[str, str]) -> None:
    here = fd.init()
    torch.manual_seed(here.rank)
    model = Text(experts=False)
    for block in model.blocks:
        assert isinstance(block, Block), "as it was made"
        block.wide = nn.Sequential(block.wide, nn.Dropout(0.3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fd.distribute(model, optimizer, plan_of(pair))
    for number in range(2):
        own = [each.chunk(here.sample_size)[here.sample_rank].contiguous() for each in batch(number)]
        optimizer.zero_grad()
        fd.step(model, loss_of, (own[0], own[1]), own[2])
        optimizer.step()
    whole = {n: p.double().sum().item() for n, p in model.named_parameters() if p.numel() and split_of(p) is None}
    everyones: list[Any] = [None] * here.size
    torch.distributed.all_gather_object(everyones, whole, group=here.group)
    mesh = DistributedModel.of(model).mesh
    assert mesh is not None, "it is distributed"
    for rank in mesh.ranks("tensor"):
        assert everyones[rank] == whole, f"whole parameters of rank {rank} and {here.rank} differ"


@pytest.mark.full("busy")
@pytest.mark.parametrize(
    "triple",
    [
        ("data", "tensor", "pipeline"),
        ("shard", "tensor", "pipeline"),
        ("expert", "data", "pipeline"),
        ("context", "tensor", "data"),
    ],
    ids="-".join,
)
@pytest.mark.alone
@ranks(8)
@takes(120)
def test_three_degrees_train_as_one_process(triple: tuple[str, str, str]) -> None:
    train(plan_of(triple, clip_norm=0.5, micro_batches=2))

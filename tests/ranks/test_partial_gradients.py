"""Whole parameters inside of divided regions: their gradients are those of one process, whatever their values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.parallel.model import DistributedModel
from farandole.parallel.split import split_of
from farandole.train.verify.verify import fingerprint
from tests.ranks.pool import ranks, takes
from tests.ranks.tensor_models import NAMED, TOKENS, WIDTH, WORDS

PAIR = {"*.up": "columns", "*.down": "rows"}


class Attention(nn.Module):
    """Attention whose queries and keys are normalised in each head."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        q, k, v = (each(x).unflatten(-1, (-1, 8)) for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (each.transpose(1, 2) for each in (self.q_norm(q), self.k_norm(k), v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        x = x + self.gate * self.attention(self.one(x))
        out: torch.Tensor = x + self.mlp(self.two(x))
        return out


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take (batch, tokens); return logits (batch, tokens, words)."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def zero_branches(model: nn.Module) -> None:
    """Let both branches of each block begin at zero, a usual start; and the first embedding too."""
    for name, each in model.named_parameters():
        if "o_proj" in name or "mlp.2" in name or name == "words.weight":
            nn.init.zeros_(each)


def tie_norms(model: nn.Module) -> None:
    """Let queries and keys share the weight of their norms, and both norms of a block theirs."""
    for block in model.get_submodule("blocks").children():
        one, two = block.get_submodule("one"), block.get_submodule("two")
        one.weight, one.bias = two.weight, two.bias
        block.get_submodule("attention.k_norm").weight = block.get_submodule("attention.q_norm").weight


def freeze_norms(model: nn.Module) -> None:
    for name, each in model.named_parameters():
        each.requires_grad_("norm" not in name and "gate" not in name and "o_proj.bias" not in name)


def batch(step: int, start: int = 0, end: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, WORDS, (4, TOKENS + 1), generator=torch.Generator().manual_seed(step))[start:end]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def penalty(model: nn.Module) -> torch.Tensor:
    """Return an L2 penalty; each rank adds that of its parts."""
    total = torch.zeros((), dtype=torch.float64)
    for each in model.parameters():
        total = total + 0.05 * each.square().sum()
    return total


def assert_same_training(mine: nn.Module, alone: nn.Module, what: str) -> None:
    """Parameters here are those of one process, and those that are whole have the same bits on all ranks."""
    others = dict(alone.named_parameters())
    for name, each in mine.named_parameters():
        split = split_of(each)
        right = others[name].detach() if split is None else split.take(others[name].detach())
        off = float((right - each.detach()).abs().max()) if each.numel() else 0.0
        assert off <= 1e-10, f"{what}: {name} is off by {off}"
    whole = [(name, each) for name, each in mine.named_parameters() if split_of(each) is None and each.numel()]
    bits = {name: fingerprint(each) for name, each in whole}  # of this stage, if there are several
    said = all_gather_json(fd.world(), "test/bits", bits)
    for other in said:
        assert all(other[name] == bits[name] for name in other.keys() & bits.keys()), f"{what}: ranks differ"


CASES: list[tuple[str, Callable[[nn.Module], None] | None, bool, bool]] = [
    ("branches that begin at zero", zero_branches, False, False),
    ("norms that train later", freeze_norms, True, False),
    ("a penalty on all parameters", None, False, True),
    ("norms that share their parameters", tie_norms, False, False),
]


@ranks(2)
@takes(60)
def test_gradients_do_not_depend_on_values_on_what_trains_or_on_the_loss() -> None:
    fd.init()
    for what, prepare, later, with_penalty in CASES:
        for by_tokens in (False, True):
            torch.manual_seed(3)
            mine = Text().double()
            if prepare is not None:
                prepare(mine)
            alone = copy.deepcopy(mine)
            optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (mine, alone)]
            fd.distribute(mine, optimizers[0], fd.Plan(tensor=2, tensor_recipe=NAMED, sequence_parallel=by_tokens))
            for step in range(4):
                for model, optimizer in zip((mine, alone), optimizers, strict=True):
                    if later and step == 2:
                        model.requires_grad_(True)
                    tokens, targets = batch(step)
                    optimizer.zero_grad()
                    loss = loss_of(model(tokens), targets)
                    (loss + penalty(model) if with_penalty else loss).backward()
                    optimizer.step()
            assert_same_training(mine, alone, f"{what}, by tokens {by_tokens}")


@pytest.mark.full_cases("zb-h1", "zb-v", "1f1b")
@ranks(4)
@takes(60)
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "1f1b"])
def test_a_backward_pass_in_two_parts_sums_the_same(schedule: str) -> None:
    fd.init()
    for by_tokens in (False, True):
        torch.manual_seed(3)
        mine = Text().double()
        mine.blocks.extend([Block().double() for _ in range(2)])
        zero_branches(mine)
        alone = copy.deepcopy(mine)
        optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (mine, alone)]
        plan = {"pipeline": 2, "micro_batches": 4, "schedule": schedule, "sequence_parallel": by_tokens}
        fd.distribute(mine, optimizers[0], fd.Plan(tensor=2, tensor_recipe=NAMED, **plan))  # type: ignore[arg-type]
        for step in range(4):
            tokens, targets = batch(step)
            optimizers[1].zero_grad()
            loss_of(alone(tokens), targets).backward()
            optimizers[0].zero_grad()
            fd.step(mine, loss_of, tokens, targets)
            for each in optimizers:
                each.step()
        mine_only = {name for name, each in mine.named_parameters() if each.numel()}
        assert mine_only, "this stage has no parameters"
        assert_same_training(mine, alone, f"{schedule}, by tokens {by_tokens}")


@pytest.mark.full("further")
@ranks(4)
@takes(60)
@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_shards_beside_divided_tokens(recompute: str) -> None:
    """Replicas have one sample and three; no more is sent between tensor ranks than without shards."""
    here = fd.init()
    calls = []
    for keys in ({"data": 2}, {"shard": 2, "zero": 3}, {"data": 2, "zero": 3}):
        torch.manual_seed(3)
        mine = Text().double()
        zero_branches(mine)
        alone = copy.deepcopy(mine)
        optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (mine, alone)]
        plan = fd.Plan(tensor=2, tensor_recipe=NAMED, sequence_parallel=True, recompute=recompute, **keys)  # type: ignore[arg-type]
        fd.distribute(mine, optimizers[0], plan)
        proofs = DistributedModel.of(mine).proofs
        assert proofs is not None
        for step in range(3):
            optimizers[1].zero_grad()
            tokens, targets = batch(step)
            loss_of(alone(tokens), targets).backward()
            optimizers[0].zero_grad()
            tokens, targets = batch(step, *((0, 1), (1, 4))[here.sample_rank])
            proofs.ranks.calls.clear()
            fd.weight(targets.numel())
            loss_of(mine(tokens), targets).backward()
            for each in optimizers:
                each.step()
        calls.append(dict(proofs.ranks.calls))
        for (name, parameter), whole in zip(mine.named_parameters(), alone.parameters(), strict=True):
            split, found = split_of(parameter), parameter.detach()
            right = whole.detach() if split is None else split.take(whole.detach())
            off = float(((found.full_tensor() if isinstance(found, DTensor) else found) - right).abs().max())
            assert off <= 1e-10, f"{keys}: {name} is off by {off}"
    assert calls[1] == calls[0], calls
    assert calls[2] == calls[0], calls


@ranks(2)
def test_one_norm_of_several_divided_models_and_of_one_that_is_whole() -> None:
    """As one process clips them: an encoder, a decoder and a head."""
    fd.init()

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()

    mine, alone = [make(seed) for seed in range(3)], [make(seed) for seed in range(3)]
    for each in mine[:2]:
        fd.distribute(each, torch.optim.SGD(each.parameters(), 0.1), fd.Plan(tensor=2))
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for order in (2.0, 1.0, float("inf")):
        norms = []
        for models in (mine, alone):
            for each in models:
                each.zero_grad()
            models[2](models[1](models[0](x))).square().mean().backward()
            parameters = [each for model in models for each in model.parameters()]
            norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=order)))
        assert abs(norms[0] - norms[1]) <= 1e-12 * norms[1], f"order {order}: {norms}"
        for own, other in zip(mine, alone, strict=True):
            for (name, parameter), whole in zip(own.named_parameters(), other.parameters(), strict=True):
                split, right = split_of(parameter), whole.grad
                assert right is not None, name
                assert parameter.grad is not None, name
                torch.testing.assert_close(
                    parameter.grad, right if split is None else split.take(right), rtol=1e-10, atol=0
                )
    for parameter in mine[1].parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_([p for m in mine for p in m.parameters()], 0.01, error_if_nonfinite=True)


class Pair(nn.Module):
    """A divided region with a scale of its own; `how` says what else it does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.on = how, True
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.strength = 0.0 if how == "off" else 1.0
        self.elsewhere: list[nn.Parameter] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, width)."""
        hidden = torch.relu(self.up(x)) * self.strength
        if self.how == "keeps":
            self.penalty = self.scale.square().sum()  # for the loss
        if self.how == "elsewhere":
            hidden = hidden * self.elsewhere[0]
        elif self.how != "later" or not self.on:
            hidden = hidden * self.scale
        out: torch.Tensor = self.down(hidden)
        return out * self.scale if self.how == "twice" else x + out


class Around(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.free = Pair(how), nn.Parameter(torch.ones(1))
        self.inner.elsewhere = [self.free]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, width)."""
        out: torch.Tensor = self.inner(x)
        return out


REFUSED = [
    ("twice", r"the split 'inner', a Pair, uses 'scale' both inside and outside of its divided part"),
    ("elsewhere", r"'inner', a Pair, uses the parameter 'free', no attribute of its modules, in its divided part"),
    ("keeps", r"'inner', a Pair, uses 'scale' both inside and outside of its divided part"),
    ("off", r"'inner', a Pair, gives its divided layers no gradient, whatever their values"),
]


def distributed(how: str) -> nn.Module:
    torch.manual_seed(1)
    model = Around(how)
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(tensor=2, tensor_recipe=PAIR))
    return model


@ranks(2)
def test_what_cannot_be_told_is_refused_on_all_ranks() -> None:
    fd.init()
    x = torch.ones(3, WIDTH)
    for how, words in REFUSED:
        with pytest.raises(fd.PlanError, match=words):
            distributed(how)(x)
    model: Any = distributed("later")
    model(x).sum().backward()
    model.inner.on = False
    with pytest.raises(
        fd.PlanError, match=r"'inner.scale' has a gradient, but was not used when its unit was proven"
    ):
        model(x).sum().backward()
    assert model.inner.scale is dict(model.named_parameters())["inner.scale"], "what entered is left behind"
    model = distributed("")
    with pytest.raises(fd.ConfigError, match="create_graph=True: gradients of gradients would miss"):
        torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True, allow_unused=True)


@ranks(2)
def test_ranks_that_use_different_modules_are_told_so() -> None:
    """Which norm of heads runs depends on the rank: the sums of two parameters would be added up."""
    here = fd.init()

    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.which: int | None = None
            self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
            self.norms = nn.ModuleList([nn.RMSNorm(8) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Take and return (batch, width)."""
            hidden = self.up(x).unflatten(-1, (-1, 8))
            for at, norm in enumerate(self.norms):
                hidden = norm(hidden) if self.which in (None, at) else hidden
            out: torch.Tensor = self.down(hidden.flatten(-2))
            return out

    model = nn.Sequential(Choice(), nn.Identity())
    fd.distribute(
        model, torch.optim.SGD(model.parameters(), 0.1),
        fd.Plan(tensor=2, tensor_recipe={"*.up": "columns", "*.down": "rows"}),
    )  # fmt: skip
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    model(x).sum().backward()
    vars(model[0])["which"] = here.rank
    with pytest.raises(fd.Mismatch, match=r"sum gradients of different parameters, here of 0.norms.\d: weight"):
        model(x).sum().backward()


@ranks(2)
def test_an_attention_that_is_whole_is_named_where_tokens_are_divided() -> None:
    fd.init()
    model = Text()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(tensor=2, sequence_parallel=True))
    words = (
        r"'blocks.0', a Block, returns other values.*layers that are whole may not mix "
        r"\(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj\): divide those of an attention"
    )
    with pytest.raises(fd.PlanError, match=words):
        model(batch(0)[0])


class Auxiliary(Block):
    """Keeps a term of the loss, over its tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        self.auxiliary = self.two(x).square().mean()
        return super().forward(x)


@ranks(2)
def test_what_a_block_keeps_for_the_loss_is_proven_too() -> None:
    """With whole tokens it is that of one process; with divided ones each rank has that of its own: refused."""
    fd.init()
    for by_tokens in (False, True):
        torch.manual_seed(3)
        mine = Text()
        mine.blocks = nn.ModuleList([Auxiliary() for _ in range(2)])
        mine.double()
        alone: Any = copy.deepcopy(mine)
        optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (mine, alone)]
        fd.distribute(mine, optimizers[0], fd.Plan(tensor=2, tensor_recipe=NAMED, sequence_parallel=by_tokens))
        if by_tokens:
            with pytest.raises(fd.PlanError, match="keeps 'auxiliary', with other values than in the plain one"):
                mine(batch(0)[0])
            return
        for model, optimizer in zip((mine, alone), optimizers, strict=True):
            tokens, targets = batch(0)
            loss = loss_of(model(tokens), targets)
            (loss + sum(block.auxiliary for block in model.blocks)).backward()
            optimizer.step()
        assert_same_training(mine, alone, "whole tokens")


@ranks(2)
def test_statistics_over_tokens_are_refused_where_tokens_are_divided() -> None:
    fd.init()
    for norm in (nn.BatchNorm1d(WIDTH), nn.InstanceNorm1d(WIDTH, track_running_stats=True)):
        model = Text()
        vars(model.blocks[1])["_modules"]["statistics"] = norm
        with pytest.raises(fd.PlanError, match=r"blocks.1.statistics takes statistics over all tokens"):
            fd.distribute(
                model, torch.optim.SGD(model.parameters(), 0.1),
                fd.Plan(tensor=2, tensor_recipe=NAMED, sequence_parallel=True),
            )  # fmt: skip


class Experts(nn.Module):
    """Blocks with experts whose tokens may be divided."""

    def __init__(self, capacity: float | None = None) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        for each in self.blocks:
            layer = fd.MixtureOfExperts(WIDTH, 16, num_experts=4, top_k=2, capacity_factor=capacity)
            each.register_module("mlp", layer)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take (batch, tokens); return logits (batch, tokens, words)."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


@ranks(2)
def test_losses_of_routers_are_of_all_tokens() -> None:
    fd.init()
    for by_tokens in (False, True):
        torch.manual_seed(3)
        mine = Experts().double()
        alone = copy.deepcopy(mine)
        optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (mine, alone)]
        fd.distribute(mine, optimizers[0], fd.Plan(tensor=2, tensor_recipe=NAMED, sequence_parallel=by_tokens))
        for step in range(3):
            losses = []
            for model, optimizer in zip((mine, alone), optimizers, strict=True):
                tokens, targets = batch(step)
                optimizer.zero_grad()
                loss = loss_of(model(tokens), targets) + fd.router_loss(model, balance=0.5, z=0.1)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            assert abs(losses[0] - losses[1]) <= 1e-10, f"by tokens {by_tokens}: {losses}"
        assert_same_training(mine, alone, f"by tokens {by_tokens}")
    logits: Any = Experts()
    logits.config = SimpleNamespace(output_router_logits=True)
    for model, words in (
        (Experts(capacity=1.0), "blocks.0.mlp has a capacity, which takes all tokens of a sample"),
        (logits, r"loss has one of its routers \(output_router_logits = True\)"),
    ):
        with pytest.raises(fd.PlanError, match=words):
            fd.distribute(
                model, torch.optim.SGD(model.parameters(), 0.1),
                fd.Plan(tensor=2, tensor_recipe=NAMED, sequence_parallel=True),
            )  # fmt: skip

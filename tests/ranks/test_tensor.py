"""Tensor parallelism: ranks that have parts of each layer do what one process does."""

from __future__ import annotations

import copy
import gc
import pickle
import time
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from farandole.parallel.model import DistributedModel
from farandole.parallel.split import split_of
from farandole.parallel.tensor.cut import check_cuts
from farandole.parallel.tensor.lazy import LazyWhole
from farandole.parallel.tensor.proof import Proofs
from farandole.parallel.tensor.recipe import LayerPart, TensorRecipe
from farandole.parallel.tensor.regions import begin_region_of_tokens, linear_of
from farandole.train.verify.verify import fingerprint
from tests.ranks.pool import ranks, takes
from tests.ranks.tensor_models import (
    NAMED,
    WIDTH,
    WORDS,
    Attention,
    Block,
    Encoder,
    Language,
    assert_parts_close,
    batch,
    compare,
    gpt2,
    llama,
    loss_of,
    neox,
    qwen,
    train,
)

MODELS: dict[str, Any] = {"encoder": Encoder, "gpt2": gpt2, "llama": llama, "qwen": qwen}


def assert_equal_replicas(model: nn.Module) -> None:
    """Parameters that are whole have the same bits on all ranks."""
    mine = {name: fingerprint(each) for name, each in model.named_parameters() if split_of(each) is None}
    said = all_gather_json(fd.world(), "test/bits", mine)
    assert all(other == said[0] for other in said), f"ranks differ: {said}"


def summed_in(proofs: Proofs) -> list[str]:
    """Return the parameters, by their names in their units, whose gradients are summed over the ranks."""
    return [path for each in proofs.proven.values() for path in each.summed]


@pytest.mark.full("further")
@ranks(2, 4)
@takes(60)
def test_five_steps_are_those_of_one_process() -> None:
    size = fd.init().size
    for kind in ("sgd", "adam"):
        for by_tokens in (False, True):
            plan = fd.Plan(tensor=size, tensor_recipe=NAMED, sequence_parallel=by_tokens)
            model = compare(Language, kind, plan, f"named, {kind}, by tokens {by_tokens}")
            assert_equal_replicas(model)
            weight = dict(model.named_parameters())["words.weight"]
            assert model.get_parameter("head.weight") is weight, "the tied weight is two"
            assert weight.shape[0] <= WORDS // size + 1, f"{weight.shape} of {WORDS} words"


@pytest.mark.full("slow")
@ranks(2, 4)
@takes(60)
def test_models_that_are_recognised_need_no_recipe() -> None:
    size = fd.init().size
    for name, make in MODELS.items():
        model = compare(make, "sgd", fd.Plan(tensor=size), name)
        assert_equal_replicas(model)
        proofs = DistributedModel.of(model).proofs
        assert proofs is not None, f"{name}: no proofs"
        assert len(proofs.proven) >= 3, f"{name}: {proofs.names}"
        if name == "encoder":  # torch's fused paths of evaluation would read the weights
            with torch.no_grad():
                tokens = batch(0)[0].index_fill(1, torch.tensor([15]), 0)
                evaluated = model.eval()(tokens)
            torch.testing.assert_close(evaluated + 0, model.train()(tokens).detach() + 0)
        if name == "qwen":
            assert any("q_norm" in each for each in summed_in(proofs)), f"{proofs.proven}"


@pytest.mark.full("further")
@ranks(2)
@takes(60)
def test_models_of_transformers_with_divided_tokens() -> None:
    size = fd.init().size
    for name, make in (("llama", llama), ("gpt2", gpt2), ("neox", neox)):
        model = compare(make, "sgd", fd.Plan(tensor=size, sequence_parallel=True), name)
        proofs = DistributedModel.of(model).proofs
        assert proofs is not None, f"{name}: no proofs"
        assert any("norm" in each or "ln" in each for each in summed_in(proofs)), f"{name}: {proofs.proven}"


@pytest.mark.full("further")
@ranks(2)
def test_activations_are_freed_after_their_step() -> None:
    """A layer keeps what it made of its input for the next one with the same input, and not the input."""
    fd.init()
    for by_tokens in (False, True):
        model = apply(Language(), tensor_recipe=NAMED, sequence_parallel=by_tokens)
        seen: list[weakref.ref[torch.Tensor]] = []

        def note(module: nn.Module, inputs: Any, seen: list[Any] = seen) -> None:
            seen.extend(weakref.ref(each) for each in inputs if isinstance(each, torch.Tensor) and each.grad_fn)

        handles = [module.register_forward_pre_hook(note) for module in model.modules()]
        loss_of(model, 0).backward()
        for handle in handles:
            handle.remove()
        gc.collect()
        kept = [tuple(tensor.shape) for ref in seen if (tensor := ref()) is not None]
        assert len(seen) > 5, "no activations were seen"
        assert not kept, f"by tokens {by_tokens}: {len(kept)} of {len(seen)} activations are kept: {kept}"


@ranks(2)
@takes(60)
def test_all_tokens_are_gathered_again_and_not_kept() -> None:
    """Korthikanti et al. 2022, section 4.2.2: between the passes a rank keeps its tokens alone."""
    fd.init()
    ways: list[dict[str, Any]] = [{}, {"precision": "bf16"}, {"recompute": "blocks"}]
    for keys in ways:
        torch.manual_seed(1)
        model = Language()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fd.distribute(model, optimizer, fd.Plan(tensor=2, tensor_recipe=NAMED, sequence_parallel=True, **keys))
        loss_of(model, 0).backward()  # the proof
        seen: list[StorageWeakRef] = []

        def note(_: Any, inputs: Any, seen: list[StorageWeakRef] = seen) -> None:
            seen.append(StorageWeakRef(inputs[0].untyped_storage()))

        for block in model.blocks:
            assert isinstance(block, Block), f"{type(block)}"
            for module in (block.attention.q_proj, block.attention.k_proj):
                module.register_forward_pre_hook(note)
        loss = loss_of(model, 0)
        assert len(seen) == 4, f"{len(seen)} inputs"
        kept = [not each.expired() for each in seen]
        assert not any(kept), f"{keys}: all tokens are kept: {kept}"
        proofs = DistributedModel.of(model).proofs
        assert proofs is not None, "no proofs"
        proofs.ranks.calls.clear()
        loss.backward()
        # In each of two blocks the gradients of two sums, and two gatherings again; and the gradient of the input.
        assert proofs.ranks.calls["all_gather"] == 2 * 4 + 1, f"{keys}: {proofs.ranks.calls}"


@ranks(2)
def test_gathered_tokens_that_change_are_right_or_refused() -> None:
    """What autograd sees of tensors that it keeps itself."""
    fd.init()
    proofs = DistributedModel.of(apply(Language(), tensor_recipe=NAMED)).proofs
    assert proofs is not None, "no proofs"
    ranks = proofs.ranks
    torch.manual_seed(3)
    whole = torch.randn(2, 4, 3, dtype=torch.float64)
    weights = [torch.randn(5, 3, dtype=torch.float64) for _ in range(2)]

    def run(change: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x = whole.chunk(2, 1)[ranks.rank].clone().requires_grad_(True)
        local = x * 1.0
        copies = [each.clone().requires_grad_(True) for each in weights]
        given = begin_region_of_tokens(local, ranks, "layer")
        if change == "before":
            given.mul_(2)
        if change == "own before":
            local.mul_(2)
        loss = sum((linear_of(given, each, None).square().sum() for each in copies), torch.zeros(()))
        if change == "own":
            local.mul_(2)
        if change == "weight":
            with torch.no_grad():
                copies[0].add_(1)
        return loss, copies

    reference = [each.clone().requires_grad_(True) for each in weights]
    for change, factor in (("", 1.0), ("before", 2.0)):
        loss, copies = run(change)
        loss.backward(retain_graph=True)
        expected = sum(functional.linear(factor * whole, each).square().sum() for each in reference)
        assert isinstance(expected, torch.Tensor), "a sum of tensors"
        gradients = torch.autograd.grad(expected, reference)
        for passes in (1, 2):
            for one, other in zip(copies, gradients, strict=True):
                assert one.grad is not None, f"{change!r}: no gradient"
                assert torch.allclose(one.grad, passes * other, rtol=1e-10), (
                    f"{change!r}: {passes} backward passes"
                )
            if passes == 1:
                loss.backward()
    for change in ("own", "own before", "weight"):
        loss, _ = run(change)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            loss.backward()


@ranks(2)
def test_what_watches_the_graph_on_one_rank_changes_no_collective() -> None:
    """Hooks of a profile on one rank; and autocast leaves float64 alone, as for layers that are whole."""
    here = fd.init()
    torch.manual_seed(1)
    mine = Language().double()
    alone = copy.deepcopy(mine)
    apply(mine, tensor_recipe=NAMED, sequence_parallel=True)
    watch = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor) if here.rank else nullcontext()
    with watch, torch.autocast("cpu", dtype=torch.bfloat16):
        loss_of(mine, 0).backward()
        loss_of(alone, 0).backward()
    assert_parts_close(mine, alone)


class _Reentrant(Language):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


@ranks(2)
def test_reentrant_checkpoints_are_refused_where_tokens_are_divided() -> None:
    """A graph that is made in backward does not hand on what the ranks have in part."""
    fd.init()
    for by_tokens in (False, True):
        torch.manual_seed(1)
        mine = _Reentrant().double()
        alone = copy.deepcopy(mine)
        apply(mine, tensor_recipe=NAMED, sequence_parallel=by_tokens)
        if by_tokens:
            with pytest.raises(fd.ConfigError, match=r"'blocks.0' runs in an autograd function's forward pass"):
                loss_of(mine, 0)
            with torch.no_grad():
                Language.forward(mine, batch(0)[0])
            continue
        loss_of(mine, 0).backward()
        loss_of(alone, 0).backward()
        assert_parts_close(mine, alone)


@pytest.mark.full("further")
@ranks(4)
@takes(60)
def test_replicas_of_divided_layers_average_their_gradients() -> None:
    here = fd.init()
    torch.manual_seed(1)
    mine = Language()
    alone = copy.deepcopy(mine)
    optimizer, reference = (torch.optim.SGD(each.parameters(), 0.1) for each in (mine, alone))
    fd.distribute(mine, optimizer, fd.Plan(tensor=2, data=2, tensor_recipe=NAMED))
    replica = here.rank // 2
    for step in range(3):
        tokens, targets = batch(step)
        for model, each, part in (
            (mine, optimizer, slice(2 * replica, 2 * replica + 2)),
            (alone, reference, slice(4)),
        ):
            each.zero_grad()
            functional.cross_entropy(model(tokens[part]).flatten(0, 1), targets[part].flatten()).backward()
            each.step()
    assert_parts_close(mine, alone, rtol=3e-5)


@ranks(2)
def test_collectives_are_those_of_the_formula() -> None:
    size = fd.init().size

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    for by_tokens in (False, True):
        model = Stack()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fd.distribute(model, optimizer, fd.Plan(tensor=size, tensor_recipe=NAMED, sequence_parallel=by_tokens))
        x = torch.randn(2, 8, WIDTH, requires_grad=True)
        model(x).sum().backward()
        proofs = DistributedModel.of(model).proofs
        assert proofs is not None, "no proofs"
        calls, nbytes = proofs.ranks.calls, proofs.ranks.bytes
        calls.clear()
        nbytes.clear()
        model(x).sum().backward()
        whole = x.nbytes
        if (
            not by_tokens
        ):  # two sums forward and two backward in each of three layers (Shoeybi et al. 2019, section 3)
            assert dict(calls) == {"all_reduce": 12}, f"{calls}"
            assert dict(nbytes) == {"all_reduce": 12 * whole}, f"{nbytes} of activations of {whole}"
            continue
        # Each sum becomes a gathering and a scattered sum, and what was gathered forward is gathered again for the
        # weights' gradients; and the output is gathered, as is the input's gradient.
        assert calls["all_gather"] == 12 + 6 + 2, f"{calls}"
        assert calls["reduce_scatter"] == 12, f"{calls}"
        assert nbytes["all_gather"] == 20 * whole, f"{nbytes}"
        assert nbytes["reduce_scatter"] == 12 * whole, f"{nbytes}"
        # Two norms, and biases of two layers by rows, whose tokens are divided: a sum for each, with a mark.
        assert calls["all_reduce"] == 3 * 4, f"{calls}"
        assert nbytes["all_reduce"] == 3 * 4 * (6 * WIDTH + 4), f"{nbytes}"


class Doubled(torch.autograd.Function):
    """A user's: the identity, whose backward pass doubles."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * grads[0]


@ranks(3)
def test_logits_of_a_divided_vocabulary_are_gathered_where_they_must_be() -> None:
    here = fd.init()
    torch.manual_seed(1)
    mine = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))
    alone = copy.deepcopy(mine)
    fd.distribute(mine, torch.optim.SGD(mine.parameters(), 0.1), fd.Plan(tensor=here.size))
    tokens = torch.tensor([[0, 1, 6], [5, 4, 2]])
    targets = torch.tensor([[3, 6, -100], [0, 1, 5]])
    uses: dict[str, Any] = {
        "flat": lambda z: functional.cross_entropy(z.flatten(0, 1), targets.flatten()),
        "view": lambda z: functional.cross_entropy(z.float().view(-1, z.size(-1)), targets.view(-1)),
        "classes second": lambda z: functional.cross_entropy(z.transpose(1, 2), targets, reduction="sum"),
        "smoothed": lambda z: nn.CrossEntropyLoss(label_smoothing=0.1)(z.reshape(-1, 7), targets.flatten()),
        "each": lambda z: functional.cross_entropy(
            z[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="none"
        ),
        "weighted": lambda z: functional.cross_entropy(z.flatten(0, 1), targets.flatten(), torch.arange(1.0, 8.0)),
        "soft": lambda z: functional.cross_entropy(z.flatten(0, 1), torch.full((6, 7), 1 / 7)),
        "softmax": lambda z: torch.log_softmax(z, -1)[..., 2],
        "arithmetic": lambda z: (2 * z + 1).square(),
        "in place": lambda z: z.clone().mul_(2.0),
        "words": lambda z: z[..., 3:5],
        "own function": lambda z: functional.cross_entropy(Doubled.apply(z).flatten(0, 1), targets.flatten()),
    }
    local = {"flat", "view", "classes second", "smoothed", "each"}
    proofs = DistributedModel.of(mine).proofs
    assert proofs is not None, "no proofs"
    mine(tokens)  # the proof
    for name, use in uses.items():
        results = []
        for model in (alone, mine):
            model.zero_grad()
            logits = model(tokens)
            proofs.ranks.calls.clear()
            value = use(logits)
            gathered = proofs.ranks.calls["all_gather"]
            value.sum().backward()
            results.append((value.detach(), [parameter.grad for parameter in model.parameters()]))
        assert (gathered == 0) == (name in local), f"{name}: {gathered} gatherings"
        assert type(results[1][0]) is torch.Tensor, f"{name}: {type(results[1][0])}"
        torch.testing.assert_close(results[1][0], results[0][0], msg=lambda m: f"{name}: {m}")  # noqa: B023 - called at once
        assert_parts_close(mine, alone, what=name)
    logits = mine(tokens)
    assert isinstance(logits, LazyWhole), f"{type(logits)}"
    assert logits.shape == (2, 3, 7), f"{logits.shape}"
    assert logits.argmax(-1).equal(alone(tokens).argmax(-1)), "other words are the likeliest"
    with pytest.raises(IndexError, match="out of bounds"):
        functional.cross_entropy(mine(tokens).flatten(0, 1), torch.full((6,), 7))
    with pytest.raises(IndexError, match="token 7 of 7"):
        mine(torch.tensor([[7]]))


@ranks(2)
def test_dropout_is_the_same_outside_of_regions_and_differs_inside() -> None:
    here = fd.init()
    seen: dict[str, torch.Tensor] = {}
    for by_tokens in (False, True):
        torch.manual_seed(1)
        model = Language(dropout=0.5)
        plan = fd.Plan(tensor=here.size, tensor_recipe=NAMED, sequence_parallel=by_tokens)
        fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan)
        block = model.blocks[0]
        assert isinstance(block, Block), f"{type(block)}"
        for name, module in (("inside", block.mlp[2]), ("outside", block.dropout)):
            module.register_forward_hook(
                lambda _, args, out, name=name: seen.__setitem__(name, (out == 0) & (args[0] != 0))
            )
        torch.manual_seed(5)
        loss_of(model, 0).backward()
        after = torch.rand(3)
        masks = {name: fingerprint(each) for name, each in seen.items()}
        said = all_gather_json(
            here, "test/masks", [masks, after.tolist(), 0.3 < float(seen["inside"].float().mean()) < 0.7]
        )
        assert all(each[2] for each in said), "half of the elements are not dropped"
        assert said[0][1] == said[1][1], "the generators differ after the step"
        assert said[0][0]["inside"] != said[1][0]["inside"], "ranks drop the same of different features"
        assert (said[0][0]["outside"] == said[1][0]["outside"]) == (not by_tokens), (
            f"by tokens {by_tokens}: {said}"
        )


class _OfSamples(nn.Module):
    """Leaves a branch out in some samples (Huang et al. 2016, "Deep Networks with Stochastic Depth")."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.new_empty(len(x), 1, 1).bernoulli_(0.5) if self.training else x


class _OfInput(Attention):
    """Drops elements of what its layers by columns get."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(functional.dropout(x, 0.5, self.training))


@pytest.mark.gate_cases("samples", "neither")
@ranks(2)
@takes(30)
@pytest.mark.parametrize("kind", ["samples", "input", "neither"])
def test_what_all_ranks_must_draw_alike_is_refused_where_each_draws_its_own(kind: str) -> None:
    """Where tokens are divided the whole block is a region: see [Note: seeds of a region]."""
    fd.init()
    torch.manual_seed(1)
    for by_tokens in (False, True):
        model = Language(dropout=0.5)
        for block in model.blocks:
            assert isinstance(block, Block), f"{type(block)}"
            if kind == "samples":
                block.dropout = nn.Sequential(_OfSamples(), nn.Dropout(0.5))  # type: ignore[assignment]
            elif kind == "input":
                block.attention = _OfInput()
        recompute = "blocks" if kind == "neither" else "none"  # the proof is no part of what is computed again
        apply(model, tensor_recipe=NAMED, sequence_parallel=by_tokens, recompute=recompute)
        before = torch.get_rng_state()
        if by_tokens and kind != "neither":
            with pytest.raises(
                fd.PlanError, match=r"draws random numbers of shape \[.*\], which all ranks need alike"
            ):
                loss_of(model, 0)
            assert torch.equal(torch.get_rng_state(), before), "the proof draws of the loop's numbers"
        else:
            loss_of(model, 0).backward()


@pytest.mark.full("further")
@ranks(2)
def test_states_that_an_optimizer_has_already_are_divided_too() -> None:
    size = fd.init().size
    torch.manual_seed(1)
    mine = Language()
    optimizer = torch.optim.Adam(mine.parameters(), 1e-3, eps=1e-5)
    train(mine, optimizer, 2)
    alone = copy.deepcopy(mine)
    reference = torch.optim.Adam(alone.parameters(), 1e-3, eps=1e-5)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.zero_grad()
    fd.distribute(mine, optimizer, fd.Plan(tensor=size, tensor_recipe=NAMED))
    for parameter in mine.parameters():
        state = optimizer.state[parameter]["exp_avg"]
        assert state.shape == parameter.shape, f"a state of {state.shape} for a part of {parameter.shape}"
    assert train(mine, optimizer, 3) == pytest.approx(train(alone, reference, 3), rel=1e-5)
    assert_parts_close(mine, alone, rtol=3e-5)


@ranks(2)
def test_copies_stay_divided_and_files_are_refused() -> None:
    size = fd.init().size
    torch.manual_seed(1)
    model = Language()
    fd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), fd.Plan(tensor=size, tensor_recipe=NAMED))
    loss = loss_of(model, 0)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(loss_of(twin, 0), loss)
    assert split_of(twin.get_parameter("words.weight")) is not None, "the copy does not know what it has a part of"
    with pytest.raises(fd.ConfigError, match="the head's weight is split over ranks"):
        fd.chunked_cross_entropy(torch.ones(2, WIDTH), model.get_parameter("head.weight"), torch.zeros(2).long())
    with pytest.raises(fd.ConfigError, match=r"is one rank's part.*farandole\.save"):
        pickle.dumps(model)
    with torch.no_grad():
        assert model.eval()(batch(0)[0]).argmax(-1).shape == (4, 16), "no logits in evaluation"


class Wrong(nn.Module):
    """Not what the recipe says, if it is "mixed": features are mixed between both layers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, width)."""
        hidden = torch.softmax(self.up(x), -1) if self.how == "mixed" else torch.relu(self.up(x))
        out: torch.Tensor = self.down(hidden)
        return out


class Elsewhere(nn.Module):
    """A weight is used outside of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Wrong("")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, width)."""
        out: torch.Tensor = self.inner(x)
        return out + self.inner.up.weight.sum()


PAIR = {"up": "columns", "down": "rows"}


def three_heads() -> nn.Module:
    model = Language()
    for block in model.blocks:
        vars(block.get_submodule("attention"))["heads"] = 3
    return model


def normalised() -> nn.Module:
    model = Wrong("")
    nn.utils.parametrizations.weight_norm(model.up)
    return model


def adapted() -> nn.Module:
    model = Wrong("")
    fd.low_rank_adapters(model, "up", rank=2)
    return model


def apply(model: nn.Module, *, optimizer: Any = torch.optim.SGD, **plan: Any) -> nn.Module:
    fd.distribute(model, optimizer(model.parameters(), lr=0.1), fd.Plan(tensor=2, **plan))
    return model


REFUSED: list[tuple[Any, Any, str]] = [
    (Language, {"*.q_porj": "columns"}, "matches no layer.*did you mean '..q_proj'"),
    (Language, {"blocks.0.norms.0": "columns"}, "matches 'blocks.0.norms.0', a LayerNorm, expected a Linear"),
    (Language, {"*.haeds": "divide"}, "no whole number.*mean '..heads'"),
    (Language, {"*": "colums"}, "expected one of columns.*did you mean 'columns'"),
    (three_heads, NAMED, "does not divide the 3 heads of 'blocks.0.attention'"),
    (lambda: llama(num_key_value_heads=1), {}, "does not divide the 1 heads of 'model.layers.0.self_attn.k_proj'"),
    (lambda: nn.ModuleDict({"up": nn.Linear(8, 63), "down": nn.Linear(63, 8)}), PAIR,
     "tensor = 2 does not divide up: output features = 63"),
    (lambda: nn.LayerNorm(4), {}, "no layer of this LayerNorm is recognised"),
    (normalised, PAIR, "'up' cannot be split: its weight is a parametrization"),
    (adapted, PAIR, "'up' cannot be split: it has low-rank adapters"),
]  # fmt: skip


class Tied(nn.Module):
    """An output layer with the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.down(torch.relu(self.up(self.words(tokens)))))
        return found


@ranks(2)
def test_a_tied_weight_is_split_in_one_way_or_nothing_is_changed() -> None:
    fd.init()
    pair = {"up": "columns", "down": "rows"}
    tokens = torch.tensor([[1, 2, 3]])
    for words, head in (
        ("columns", "vocabulary"),
        ("vocabulary", "whole"),
        ("whole", "columns"),
        ("vocabulary", "rows"),
    ):
        torch.manual_seed(1)
        model = Tied()
        before = model(tokens).detach()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(fd.PlanError, match=r"one parameter would be 'words.weight' .* and 'head.weight'"):
            fd.distribute(
                model, optimizer, fd.Plan(tensor=2, tensor_recipe={**pair, "words": words, "head": head})
            )
        assert type(model.words) is nn.Embedding
        assert model.words.weight.shape == (8, 8)
        assert torch.equal(model(tokens), before)
    torch.manual_seed(1)
    model = Tied()
    fd.distribute(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        fd.Plan(tensor=2, tensor_recipe={**pair, "words": "vocabulary", "head": "vocabulary"}),
    )
    torch.testing.assert_close(model(tokens), before, rtol=1e-5, atol=1e-6)


@ranks(2)
@takes(60)
def test_bad_input_is_refused_by_name_on_all_ranks() -> None:
    here = fd.init()
    for make, recipe, words in REFUSED:
        torch.manual_seed(here.rank)
        model = make()
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        with pytest.raises(fd.PlanError, match=words):
            apply(model, tensor_recipe=recipe)
        assert all(torch.equal(each, before[name]) for name, each in model.named_parameters()), "the rank's own"
    packed = TensorRecipe({"up": LayerPart("columns", "a test", packed=3)})
    with pytest.raises(fd.PlanError, match="'up' is packed, and no layer split by rows follows it"):
        check_cuts(nn.ModuleDict({"up": nn.Linear(8, 24)}), packed, {"up"}, 2)
    with pytest.raises(fd.ConfigError, match="Adafactor cannot update parts of parameters"):
        apply(Wrong(""), optimizer=torch.optim.Adafactor)
    with pytest.raises(fd.PlanError, match="no repeated block of this model has a split layer"):
        apply(Wrong(""), sequence_parallel=True)
    for plan in ({"tensor_recipe": PAIR}, {"sequence_parallel": True}):
        with pytest.raises(fd.PlanError, match="with tensor = 1, which divides no layer"):
            fd.Plan(**plan)
    x = torch.ones(3, WIDTH)
    model = apply(Wrong("mixed"), tensor_recipe=PAIR)
    with pytest.raises(fd.PlanError, match="the split 'model', a Wrong, returns other values than the plain one"):
        model(x)
    model = apply(Elsewhere(), tensor_recipe={"*.up": "columns", "*.down": "rows"})
    with pytest.raises(fd.PlanError, match=r"'inner.up.weight', of which each rank has a part, goes to 'sum'"):
        model(x)
    model = apply(Wrong(""), tensor_recipe=PAIR)
    with pytest.raises(fd.PlanError, match="give 'the model' different inputs"):
        model(x + here.rank)
    model = apply(Language(), tensor_recipe=NAMED, sequence_parallel=True)
    with pytest.raises(fd.ConfigError, match=r"shape \[2, 15, 32\].*tokens that tensor = 2 divides"):
        model(batch(0)[0][:, :15])


class OfSomeSamples(nn.Module):
    """Does something else on each call for samples above 50: one of the groups has such."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).relu()
        if bool((x > 50).any()):
            hidden = hidden + torch.rand(()) * hidden.shape[-1]
        out: torch.Tensor = x + self.down(hidden)
        return out


@pytest.mark.gate_cases("one group")
@ranks(4)
@pytest.mark.parametrize("above", [{1}, {0, 1}], ids=["one group", "both groups"])
def test_what_one_tensor_group_refuses_is_refused_on_all_ranks(above: set[int]) -> None:
    """The other group waits for it in the first exchange of gradients."""
    here = fd.init()
    plan = fd.Plan(tensor=2, tensor_recipe={"*.up": "columns", "*.down": "rows"})
    model = nn.Sequential(OfSomeSamples(), nn.Linear(8, 1))
    model, _ = fd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    batch = torch.ones(4, 8) * (100 if here.sample_rank in above else 1)
    time.sleep(0.5 * here.sample_rank)  # the first group, whose rank 0 serves the store, does not leave before
    begin = time.monotonic()
    with pytest.raises(fd.PlanError, match="the split '0', a OfSomeSamples, returns other values than the plain"):
        model(batch).mean().backward()
    assert time.monotonic() - begin < 8
    if above == {0, 1}:
        assert all_gather_json(here, "they go on", 1) == [1] * 4

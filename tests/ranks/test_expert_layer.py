"""A layer whose experts are divided: its output, gradients and traffic, beside one process on the joined batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import farandole as fd
import farandole.backend
from farandole.core.vocabulary.errors import ConfigError, Mismatch
from farandole.parallel.expert.expert_ranks import ROW_CODECS, ExpertRanks
from farandole.parallel.expert.layer import MixtureOfExperts
from tests.ranks.pool import ranks

HIDDEN = 12


def layer(**keys: object) -> MixtureOfExperts:
    """Return a small layer, the same on all ranks."""
    torch.manual_seed(3)
    return MixtureOfExperts(HIDDEN, 20, **{"num_experts": 8, "top_k": 2, "shared_size": 6, **keys})  # type: ignore[arg-type]


class _Groups(list[dist.ProcessGroup]):
    """The group of a test's world."""


def divided(whole: MixtureOfExperts, codec: str = "none") -> MixtureOfExperts:
    """Return a copy of `whole` whose experts are divided over the world."""
    world, made = fd.world(), copy.deepcopy(whole)
    group = world.session.keep(_Groups, lambda: _Groups([world.new_group(backend="farandole")]))[0]  # type: ignore[list-item]
    made.last.ranks = ExpertRanks(world, group, group, tuple(range(world.size)), world.rank, ROW_CODECS[codec])
    for parameter in made.experts.parameters():
        parameter.data = parameter.data.chunk(world.size)[world.rank].clone()
    return made


def batches(counts: list[int]) -> list[torch.Tensor]:
    """Return each rank's tokens, `counts` of them."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(count, HIDDEN, generator=generator) for count in counts]


def check(whole: MixtureOfExperts, counts: list[int]) -> None:
    """Compare output, losses, load and gradients of a pass with those of one process on the joined batch."""
    world, mine = fd.world(), divided(whole)
    inputs = [each.requires_grad_() for each in batches(counts)]
    joined = torch.cat(inputs)
    # The loss of each rank is a mean over its tokens, that of all of them the mean over ranks.
    expected = whole(joined)
    parts = [part.square().sum() / max(1, part.shape[0]) for part in expected.split(counts)]
    torch.stack(parts).mean().backward()
    tokens = batches(counts)[world.rank].requires_grad_()
    out = mine(tokens)
    (out.square().sum() / max(1, out.shape[0])).backward()
    torch.testing.assert_close(out, expected.split(counts)[world.rank], rtol=1e-5, atol=1e-6)
    grad = inputs[world.rank].grad
    assert grad is not None, "a backward pass was made"
    assert tokens.grad is not None, "the same"
    assert mine.last.load is not None, "a forward pass was made"
    torch.testing.assert_close(tokens.grad / world.size, grad, rtol=1e-5, atol=1e-7)
    assert whole.last.load is not None, "a forward pass was made"
    for mine_load, whole_load in zip(mine.last.load[:2], whole.last.load[:2], strict=True):
        assert torch.equal(mine_load, whole_load), f"{mine_load} for {whole_load}"
    for own, reference in zip(mine.experts.parameters(), whole.experts.parameters(), strict=True):
        assert own.grad is not None, "experts without tokens have gradients too"
        assert reference.grad is not None, "the same"
        part = reference.grad.chunk(world.size)[world.rank]
        torch.testing.assert_close(own.grad, part, rtol=1e-5, atol=1e-7)
    for own, reference in zip(mine.router.parameters(), whole.router.parameters(), strict=True):
        assert own.grad is not None, "the router has a gradient"
        dist.all_reduce(own.grad)
        torch.testing.assert_close(own.grad / world.size, reference.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.gate_cases("2")
@ranks(2, 4)
def test_a_pass_is_that_of_one_process() -> None:
    fd.init()
    size = fd.world().size
    for counts in ([6] * size, [3 + 2 * rank for rank in range(size)], [0, *[5] * (size - 1)]):
        for keys in ({}, {"top_k": 1}, {"capacity_factor": 0.6}, {"activation": "gelu", "shared_size": 0}):
            check(layer(**keys), counts)


class _Traffic:
    """Counts calls and bytes of all-to-alls to other ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = self.sent_bytes = self.counts = 0
        self._plain, self._gather = dist.all_to_all, dist.all_gather
        monkeypatch.setattr(dist, "all_to_all", self)
        monkeypatch.setattr(dist, "all_gather", self.gather)

    def gather(self, *arguments: Any, **keys: Any) -> Any:
        self.counts += 1
        return self._gather(*arguments, **keys)

    def __call__(self, rooms: list[torch.Tensor], pieces: list[torch.Tensor], **keys: Any) -> Any:
        self.calls += 1
        self.sent_bytes += sum(piece.nbytes for piece in pieces)
        return self._plain(rooms, pieces, **keys)


@ranks(2)
def test_four_all_to_alls_of_the_formulas_bytes() -> None:
    fd.init()
    for codec in ROW_CODECS:
        count_traffic(codec)


def count_traffic(codec: str) -> None:
    """Compare what a pass sends, and what it gives, with the formula and with one process."""
    here, whole = fd.world(), layer()
    mine = divided(whole, codec)
    counts = [7, 4]
    tokens = batches(counts)[here.rank].requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        traffic = _Traffic(patch)
        out = mine(tokens)
        out.square().sum().backward()
    assert traffic.calls == 4, "tokens and outputs, and the gradients of both"
    assert traffic.counts == 1, "and the counts of all ranks before them"
    # By the router alone: which rows are for experts of the other rank.
    rows = [whole.router(each).topk(2, -1).indices // (whole.routing.num_experts // 2) for each in batches(counts)]
    leave, arrive = (rows[here.rank] != here.rank).sum(), (rows[1 - here.rank] == here.rank).sum()
    expected = 2 * int(leave + arrive) * {"none": 4 * HIDDEN, "bf16": 2 * HIDDEN, "int8": HIDDEN + 4}[codec]
    assert traffic.sent_bytes == expected, f"{leave} rows leave and {arrive} arrive"
    plain = whole(torch.cat(batches(counts)))
    bound = {"none": 1e-5, "bf16": 0.02, "int8": 0.03}[codec]
    error = (out - plain.split(counts)[here.rank]).abs().max() / plain.abs().max()
    assert error <= bound, f"{codec} loses {error:.3g}"
    assert codec == "none" or error > 1e-6, f"{codec} packed nothing"


@ranks(2)
def test_what_ranks_do_differently_is_an_error_on_all() -> None:
    here, whole = fd.init(), layer()
    mine = divided(whole)
    tokens = batches([5, 5])[here.rank]
    with pytest.raises(Mismatch, match="whether the tokens take gradients"):
        mine(tokens.requires_grad_(here.rank == 0))
    assert mine.last.ranks is not None, "the layer is divided"
    facts, counts = [("the width of a token", 12 + 2 * here.rank)], torch.zeros(3, dtype=torch.int64)
    with pytest.raises(Mismatch, match=r"width of a token is 12 on rank 0, 14 on rank 1"):
        mine.last.ranks.gather_counts("the layer", counts, facts)
    broken = tokens.detach().clone()
    if here.rank == 1:
        broken[2:4] = torch.nan
    with pytest.raises(ConfigError, match="gave NaN or infinity for 2 tokens on rank 1"):
        mine(broken)
    check(layer(), [4, 2])
    with pytest.raises(ConfigError, match="copy of a layer that was divided"):
        copy.deepcopy(mine)(tokens)

"""Attention over divided sequences is torch's function over whole ones; what it sends is what the formula says."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional

import farandole as fd
from farandole.core.vocabulary.errors import ConfigError
from farandole.core.vocabulary.spec import Plan
from farandole.parallel.context import ring
from farandole.parallel.context.attention import AttentionCall, DividedAttention, Kind
from farandole.parallel.context.group import ContextGroup, cut
from farandole.parallel.mesh import make_mesh
from tests.ranks.pool import ranks

plain = functional.scaled_dot_product_attention
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.03}


def context_group() -> ContextGroup:
    here = fd.init()
    mesh = make_mesh(here, Plan(context=here.size))
    group = mesh.group("context")
    assert group is not None, "several ranks have a group"
    return ContextGroup(here, group, mesh.rank("context"), here.size, mesh.ranks("context"))


class Case:
    """One call of attention, drawn at random, and what one process computes."""

    def __init__(self, draw: random.Random, size: int) -> None:
        batch, groups, times = draw.randint(1, 3), draw.choice([1, 2, 4]), draw.choice([1, 2, 3])
        width = draw.choice([4, 8])
        self.length = length = 2 * size * draw.randint(1, 9)
        self.dtype = draw.choice(list(TOLERANCE))
        self.is_causal = draw.random() < 0.5
        of_values = draw.choice([width, width, 6])
        heads = groups * times
        self.operands = [
            torch.randn(batch, count, length, numbers).to(self.dtype)
            for count, numbers in ((heads, width), (groups, width), (groups, of_values))
        ]
        self.grad = torch.randn(batch, heads, length, of_values).to(self.dtype)
        self.padding = self.mask = None
        form = draw.choice(["none", "padding", "shared", "rows", "added"])
        hidden = torch.rand(batch, length) < 0.7
        hidden[0] = torch.arange(length) >= length // 2
        if form == "padding" or (form != "none" and self.is_causal):
            self.padding = hidden
        elif form == "shared":
            self.mask = hidden[:, None, None]
        elif form == "rows":
            self.mask = torch.rand(1, draw.choice([1, heads]), length, length) < 0.6
        elif form == "added":
            self.mask = torch.randn(length, length).to(self.dtype)
        self.said = (
            f"{form}, causal {self.is_causal}, {self.dtype}, {[tuple(each.shape) for each in self.operands]}"
        )

    def expected(self) -> list[torch.Tensor]:
        mask = self.mask if self.padding is None else self.padding[:, None, None]
        if self.is_causal:
            lower = torch.ones(self.length, self.length, dtype=torch.bool).tril()
            mask = lower if mask is None else mask & lower
        operands = [each.clone().requires_grad_() for each in self.operands]
        output = plain(operands[0], operands[1], operands[2], attn_mask=mask, enable_gqa=True)
        return [output.detach(), *torch.autograd.grad(output, operands, self.grad)]

    def found(self, attention: DividedAttention) -> list[torch.Tensor]:
        group = attention.group

        def part(tensor: Any, dim: int) -> Any:
            return None if tensor is None else cut(tensor, dim, group.rank, group.size)

        operands = [part(each, 2).requires_grad_() for each in self.operands]
        mask = self.mask
        if mask is not None:
            mask = part(mask, -1 if mask.shape[-2] == 1 else -2)
        call = AttentionCall(operands[0], operands[1], operands[2], mask, 0.0, self.is_causal, enable_gqa=True)
        output = attention.attend(call, part(self.padding, 1))
        return [output.detach(), *torch.autograd.grad(output, operands, part(self.grad, 2))]


@pytest.mark.gate_cases("2")
@ranks(2, 3, 4)
def test_generated_calls_are_those_of_one_process() -> None:
    group = context_group()
    before = ring.SLICE_BYTES
    ring.SLICE_BYTES = 2048  # so that products go by several slices
    for seed in range(16):
        torch.manual_seed(seed)
        case = Case(random.Random(seed), group.size)
        expected = case.expected()
        for kind in ("ring", "auto"):
            found = case.found(DividedAttention(group, kind, plain))
            for mine, whole in zip(found, expected, strict=True):
                other = cut(whole, 2, group.rank, group.size)
                error = float((mine - other).abs().max() / whole.abs().max())
                assert error <= TOLERANCE[case.dtype], f"{seed}, {kind}: {error}: {case.said}"
    ring.SLICE_BYTES = before


@pytest.mark.gate_cases("4-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ranks(2, 4)
def test_messages_and_bytes_are_the_formula(dtype: torch.dtype) -> None:
    group = context_group()
    size, batch, heads, keys, tokens, width = group.size, 2, 8, 4, 6, 4
    operands = [
        torch.randn(batch, count, tokens, width).to(dtype).requires_grad_() for count in (heads, keys, keys)
    ]
    one = batch * tokens * width
    item, wide = dtype.itemsize, 4
    by_heads = (2, (size - 1) * (2 * heads + 2 * keys) * one * item // size)
    forms: dict[Kind, tuple[tuple[int, int], tuple[int, int]]] = {
        "ring": (
            (size - 1, 2 * (size - 1) * keys * one * item),
            (2 * (size - 1), 2 * (size - 1) * keys * one * (item + wide)),
        ),
        "heads": (by_heads, by_heads),
    }
    for kind, (forward, backward) in forms.items():
        attention = DividedAttention(group, kind, plain)
        group.traffic.messages = group.traffic.sent_bytes = 0
        output = attention.attend(
            AttentionCall(operands[0], operands[1], operands[2], is_causal=True, enable_gqa=True)
        )
        assert (group.traffic.messages, group.traffic.sent_bytes) == forward, f"{kind} forward: {group.traffic}"
        group.traffic.messages = group.traffic.sent_bytes = 0
        output.sum().backward()
        assert (group.traffic.messages, group.traffic.sent_bytes) == backward, f"{kind} backward: {group.traffic}"


@ranks(2)
def test_calls_that_cannot_be_exact_are_refused() -> None:
    group = context_group()
    ring, heads, auto = (DividedAttention(group, kind, plain) for kind in ("ring", "heads", "auto"))
    x, odd, single = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 1, 4, 8)
    square = torch.ones(4, 4, dtype=torch.bool).tril()
    cases = [
        (ring, AttentionCall(x, x, x, square), "says nothing of the other ranks' tokens: this rank holds 4 of 8"),
        (ring, AttentionCall(x, x, x, torch.zeros(4, 8, requires_grad=True)), "the mask of an attention trains"),
        (ring, AttentionCall(x, x, x, dropout_p=0.1), "dropout 0.1, which the form ring does not have"),
        (auto, AttentionCall(single, single, single, dropout_p=0.1), "ring, since 1 heads do not divide by 2"),
        (heads, AttentionCall(single, single, single), "has 1 heads of queries and 1 of keys"),
        (ring, AttentionCall(x, x, x, square, is_causal=True), "with both attn_mask and is_causal"),
        (ring, AttentionCall(x, odd, odd), "between sequences of different lengths"),
        (ring, AttentionCall(odd, odd, odd), "over 3 tokens of this rank, which are not two chunks"),
        (ring, AttentionCall(x, single, single), "heads of keys must divide"),
        (ring, AttentionCall(x[None], x[None], x[None]), "expected 2 to 4 dimensions"),
    ]
    for attention, call, text in cases:
        with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
            attention.attend(call)


@ranks(2)
def test_dropout_by_heads_drops_and_autocast_casts() -> None:
    group = context_group()
    heads = DividedAttention(group, "heads", plain)
    x = torch.randn(1, 4, 4, 8)
    padding = torch.tensor([[True, True, True, False]])
    for call, pad in (
        (AttentionCall(x, x, x, dropout_p=0.5), None),
        (AttentionCall(x, x, x, dropout_p=0.5, is_causal=True), padding),
    ):
        assert not torch.equal(heads.attend(call, pad), heads.attend(call, pad)), "random zeros"
    with torch.autocast("cpu", torch.bfloat16):
        for kind in ("ring", "heads"):
            output = DividedAttention(group, kind, plain).attend(AttentionCall(x, x, x))
            assert output.dtype == torch.bfloat16, f"{kind}: {output.dtype}"
    for shape in ((4, 8), (3, 4, 8)):  # without heads, without batch
        y = torch.randn(shape)
        whole = torch.cat([y[..., :2, :], y[..., :2, :], y[..., 2:, :], y[..., 2:, :]], -2)
        found = DividedAttention(group, "auto", plain).attend(AttentionCall(y, y, y))
        torch.testing.assert_close(found, cut(plain(whole, whole, whole), len(shape) - 2, 0, 2))

"""The native loops beside the eager code, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.comm.codecs import quantize as fused_module
from farandole.comm.codecs.codec import FeedbackState, leaves
from farandole.comm.codecs.quantize import NativeQuantize
from farandole.comm.codecs.registry import CodecInstance, make_codec
from farandole.comm.messages import Encoded, Encoding, GroupRank, Message, as_encoding, simulate
from farandole.comm.native import build
from farandole.comm.native.build import Kernels, loops
from farandole.core.vocabulary.codec_spec import CodecSpec
from tests.native import needs_compiler

pytestmark = needs_compiler

TEXTS = ["int8", "int8:block=16", "int8:block=1024", "int4", "int4:block=16", "int4:block=1024", "bf16", "fp16"]
SPECIAL = [
    0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, -1.17549435e-38, 1.2e-35, 1.27e-35, 1.26999e-35, 7e-37, 1.0, -1.0,
    127.0, 63.5, 62.5, 65504.0, 65519.9, 65520.0, 6.1e-5, 5.96e-8, 2.98e-8, 3.4028235e38, -3.4028235e38, 1.7e38,
]  # fmt: skip
ENDLESS = [float("inf"), float("-inf"), float("nan")]
KINDS = ["normal", "mixed", "ties", "special", "endless", "zero", "tiny", "huge"]


def numbers(kind: str, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, generator=generator)

    def chosen(table: list[float]) -> torch.Tensor:
        return torch.tensor(table)[torch.randint(len(table), (count,), generator=generator)]

    if kind == "mixed":
        return drawn * 10.0 ** (torch.rand(count, generator=generator) * 80 - 44)
    if kind == "ties":  # halves of a step, where the largest is 127, or 7
        top = 127 if seed % 2 else 7
        return (torch.randint(-2 * top, 2 * top + 1, (count,), generator=generator) / 2).to(torch.float32)
    if kind == "special":
        return chosen(SPECIAL)
    if kind == "endless":
        return torch.where(torch.rand(count, generator=generator) < 0.002, chosen(ENDLESS), drawn)
    return drawn * {"normal": 1.0, "zero": 0.0, "tiny": 1e-38, "huge": 1e38}[kind]


def by_loops(made: CodecInstance) -> CodecInstance:
    """Return a codec whose `codec` is the loops alone."""
    native = made.native
    assert native is not None, "these tests need a C compiler"
    return replace(made, codec=Loops(native))


@dataclass
class Loops:
    """The loops as a codec."""

    native: NativeQuantize

    def init(self, grad: torch.Tensor, group: GroupRank) -> FeedbackState:
        return FeedbackState(torch.zeros_like(grad), torch.zeros_like(grad), None)

    def encode(self, grad: torch.Tensor, state: FeedbackState, group: GroupRank) -> Encoding:
        assert self.native.fits(grad, state, group)
        _, state = yield from self.native.exchange(grad, state, group)
        return Encoded(grad, grad, state)


def with_residual(residual: torch.Tensor) -> FeedbackState:
    """Return a state with `residual`."""
    return FeedbackState(residual.clone(), torch.zeros_like(residual), None)


class Heard:
    """Drives codecs and keeps what each rank sends to others."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def listen(self, encoding: Encoding, seat: GroupRank) -> Encoding:
        answer: torch.Tensor | None = None
        while True:
            try:
                message: Message = next(encoding) if answer is None else encoding.send(answer)
            except StopIteration as end:
                result: Encoded = end.value
                return result
            others = [row for row in range(seat.size) if row != seat.rank]
            self.rows.append(
                message.tensor[others] if message.operation == "all_to_all" else message.tensor.clone()
            )
            answer = yield message


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits, with one NaN for all."""
    if not tensor.is_floating_point():
        return tensor
    return torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor).view(torch.uint8)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    assert ours.shape == theirs.shape, what
    different = (settled(ours) != settled(theirs)).nonzero()
    assert different.numel() == 0, f"{what}: {different[:3].tolist()}"


def assert_same_packed(how: str, block: int, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Compare packed pieces: codes to the bit, scales and floats where NaN is NaN."""
    for one, other in zip(ours.view(-1, ours.shape[-1]), theirs.view(-1, theirs.shape[-1]), strict=True):
        bits = {"int8": 8, "int4": 4, "bf16": 16, "fp16": 16}[how]
        scales = 0 if how == "bf16" else 4 * (one.numel() // (block * bits // 8 + 4))
        assert_same(one[:scales].view(torch.float32), other[:scales].view(torch.float32), "scales")
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(how, torch.uint8)
        assert_same(one[scales:].view(kind), other[scales:].view(kind), "numbers")


@pytest.mark.gate_cases("int4:block=1024", "bf16")
@pytest.mark.parametrize("text", TEXTS)
@settings(max_examples=30)
@given(
    size=st.integers(1, 5),
    blocks=st.integers(1, 5),
    kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=2),
    seed=st.integers(0, 2**20),
)
def test_the_loops_send_decode_and_keep_the_bits_of_the_eager_code(
    text: str, size: int, blocks: int, kinds: list[str], seed: int
) -> None:
    """Two steps, so that the second one adds what the first one left."""
    made = make_codec(CodecSpec.parse(text))
    native = by_loops(made)
    assert made.native is not None
    count = size * blocks * made.native.block
    residuals = [numbers(kinds[0], count, seed + rank) for rank in range(size)]
    states = [[with_residual(each) for each in residuals] for _ in range(2)]
    for turn in range(2):
        grads = [numbers(kinds[1], count, seed + 100 * (turn + 1) + rank) for rank in range(size)]
        heard = [Heard(), Heard()]
        together = [
            simulate(
                [
                    heard[way].listen(
                        codec.encode(grads[rank].clone(), states[way][rank], GroupRank(rank, size)),
                        GroupRank(rank, size),
                    )
                    for rank in range(size)
                ]
            )
            for way, codec in enumerate((native.codec, made.codec))
        ]
        states = [each.states for each in together]
        for ours, theirs in zip(heard[0].rows, heard[1].rows, strict=True):
            assert_same_packed(made.native.how, made.native.block, ours, theirs)
        for rank in range(size):
            assert_same(together[0].means[rank], together[1].means[rank], f"mean of rank {rank}")
            assert_same(states[0][rank].residual, states[1][rank].residual, f"residual of rank {rank}")


@pytest.mark.parametrize("text", ["int8", "int4", "bf16", "fp16"])
def test_ranks_with_and_without_loops_meet(text: str) -> None:
    made = make_codec(CodecSpec.parse(text))
    codecs = [by_loops(made).codec, made.codec, by_loops(made).codec]
    count = 3 * 2 * 1024
    states, alike = ([with_residual(torch.zeros(count)) for _ in codecs] for _ in range(2))
    for turn in range(3):
        grads = [numbers("mixed", count, 10 * turn + rank) for rank in range(3)]
        mixed = simulate(
            [
                c.encode(g.clone(), s, GroupRank(r, 3))
                for r, (c, g, s) in enumerate(zip(codecs, grads, states, strict=True))
            ]
        )
        eager = simulate(
            [
                made.codec.encode(g.clone(), s, GroupRank(r, 3))
                for r, (g, s) in enumerate(zip(grads, alike, strict=True))
            ]
        )
        states, alike = mixed.states, eager.states
        for rank in range(3):
            assert_same(mixed.means[rank], eager.means[rank], "mean")
            assert_same(states[rank].residual, alike[rank].residual, "residual")


@pytest.mark.parametrize(
    "text", ["int8", "fp16", "int8:feedback=false", "int4:rounding=stochastic", "sign", "topk:0.1"]
)
@pytest.mark.parametrize("count", [6144, 6143])
def test_an_exchange_leaves_the_mean_in_the_gradients_place(text: str, count: int) -> None:
    """Whatever runs it: whole blocks and others, with loops and without."""
    made = make_codec(CodecSpec.parse(text))
    grads = [numbers("normal", count, rank) for rank in range(2)]
    units = [grad.clone() for grad in grads]
    groups = [GroupRank(rank, 2) for rank in range(2)]
    states = [made.init(grads[0], group) for group in groups]
    run = simulate(
        [
            as_encoding(made.exchange(units[each.rank], states[each.rank], each), units[each.rank])
            for each in groups
        ]
    )
    states = [made.init(grads[0], group) for group in groups]
    eager = simulate([made.encode(grads[each.rank], states[each.rank], each) for each in groups])
    for rank in range(2):
        assert_same(units[rank], eager.means[rank], "mean")
        kept, expected = leaves(run.states[rank]), leaves(eager.states[rank])
        assert kept.keys() == expected.keys()
        for key, value in kept.items():
            assert_same(torch.as_tensor(value), torch.as_tensor(expected[key]), key)


def test_an_exchange_that_fails_leaves_the_residual_as_it_was() -> None:
    native = make_codec(CodecSpec.parse("int8")).native
    assert native is not None
    before = numbers("normal", 4096, 1)
    state = with_residual(before)
    talk = native.exchange(numbers("normal", 4096, 2), state, GroupRank(0, 2))
    pieces = next(talk).tensor
    talk.send(pieces[[1, 1]])  # and the second round never comes
    talk.close()
    assert torch.equal(state.residual, before)


def test_what_does_not_fit_the_loops() -> None:
    native = make_codec(CodecSpec.parse("int8")).native
    assert native is not None
    seat, whole = GroupRank(0, 2), torch.zeros(1024)
    assert native.fits(whole, with_residual(whole), seat)
    assert not native.fits(whole[:1000], with_residual(whole[:1000]), seat)
    assert not native.fits(whole[:768], with_residual(whole[:768]), seat), "whole blocks, but not for each rank"
    assert not native.fits(whole[:0], with_residual(whole[:0]), seat)
    assert not native.fits(torch.zeros(2048)[::2], with_residual(whole), seat)
    assert not native.fits(whole.double(), with_residual(whole), seat)
    assert not native.fits(whole, FeedbackState(torch.zeros(2048)[::2], whole, None), seat)


@pytest.mark.parametrize(
    "text", ["int8:rounding=stochastic", "int8:feedback=false", "int8:block=2048", "fp8", "sign", "topk:0.1"]
)
def test_codecs_without_loops(text: str) -> None:
    assert make_codec(CodecSpec.parse(text)).native is None


@given(
    rows=st.integers(2, 5), count=st.integers(0, 3000), kind=st.sampled_from(KINDS), seed=st.integers(0, 999),
    first_only=st.booleans(),
)  # fmt: skip
@settings(max_examples=60)
def test_sums_of_rows(rows: int, count: int, kind: str, seed: int, first_only: bool) -> None:
    native = loops()
    assert native is not None, "these tests need a C compiler"
    parts = [numbers(kind, count, seed + row) for row in range(rows)]
    wanted = parts[0].clone()
    for other in parts[1:]:
        wanted.add_(other)
    before = [part.clone() for part in parts]
    native.row_sum(parts)(1 if first_only else rows)
    assert_same(parts[0], wanted, "sum")
    for part, old in zip(parts[1:], before[1:], strict=True):
        assert_same(part, old if first_only else wanted, "others")


# -- what loops refuse: they would write beyond its end ------------------------------------------------

ONES = torch.ones(512, dtype=torch.float32)
WRONG_FLOATS = {
    "bfloat16": ONES.bfloat16(),
    "float64": ONES.double(),
    "strided": torch.ones(1024, dtype=torch.float32)[::2],
    "short": ONES[:256],
    "empty": ONES[:0],
    "one number": torch.ones((), dtype=torch.float32),
    "elsewhere": torch.ones(512, dtype=torch.float32, device="meta"),
    "sparse": ONES.to_sparse(),
}


@pytest.mark.parametrize("how", ["int8", "int4", "bf16", "fp16"])
@pytest.mark.parametrize("wrong", WRONG_FLOATS)
def test_loops_refuse_what_is_not_contiguous_float32_on_the_processor(how: str, wrong: str) -> None:
    native, seat, other = make_codec(CodecSpec.parse(f"{how}")).native, GroupRank(0, 1), WRONG_FLOATS[wrong]
    assert native is not None, "these tests need a C compiler"
    native = replace(native, block=256)
    assert native.fits(ONES, FeedbackState(ONES, ONES, None), seat)
    for place in range(3):
        unit, residual, spare = (other if i == place else ONES.clone() for i in range(3))
        state = FeedbackState(residual, spare, None)
        assert not native.fits(unit, state, seat)
        with pytest.raises(ValueError, match=r"native loops: .* expected"):
            next(native.exchange(unit, state, seat))
        assert next(native.exchange_or(lambda *_: iter([3]), unit, state, seat)) == 3  # type: ignore[arg-type,comparison-overlap]
    for pair in ((ONES.clone(), other), (other, ONES.clone())):
        with pytest.raises(ValueError, match=r"native loops: .* expected"):
            native.kernels.row_sum(pair)


@pytest.mark.parametrize("how", ["int8", "int4", "bf16", "fp16"])
@pytest.mark.parametrize("turn", [0, 1])
def test_loops_refuse_messages_of_another_size(how: str, turn: int) -> None:
    native, seat, count = make_codec(CodecSpec.parse(how)).native, GroupRank(0, 2), 2048
    assert native is not None
    for wrong in (lambda rows: rows[:, :-4], lambda rows: rows[:1], lambda rows: rows.float()):
        unit, state = torch.ones(count), with_residual(torch.zeros(count))
        talk = native.exchange(unit, state, seat)
        good = next(talk).tensor
        if turn:
            talk.send(good)
        before = unit.clone(), state.residual.clone(), state.spare.clone()
        with pytest.raises(ValueError, match=r"native loops: received .*, expected torch.uint8 of shape \(2, "):
            talk.send(wrong(good))
        assert all(map(torch.equal, before, (unit, state.residual, state.spare))), "nothing was touched"


def test_sums_of_rows_refuse_other_numbers_of_rows() -> None:
    native = loops()
    assert native is not None
    with pytest.raises(ValueError, match="the sum of 2 rows into 3"):
        native.row_sum([ONES.clone(), ONES.clone()])(3)
    with pytest.raises(ValueError, match="the sum of 1 rows: expected two or more"):
        native.row_sum([ONES.clone()])


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
def test_loops_are_tried_with_float32_whatever_the_default_is(default: torch.dtype) -> None:
    """Two bytes a number where four are written was an overflow of the heap."""
    fused_module._tried.cache_clear()
    torch.set_default_dtype(default)
    try:
        for text in ("int8", "int4", "bf16", "fp16"):
            assert make_codec(CodecSpec.parse(text)).native is not None
    finally:
        torch.set_default_dtype(torch.float32)


# -- loops that compute something else ---------------------------------------------------------------


@pytest.mark.gate_cases("step_of(largest, 127.0f)-step_of(largest, 126.0f)")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("step_of(largest, 127.0f)", "step_of(largest, 126.0f)"),
        ("memcpy(residual + at, values + at,", "memcpy(residual + at, residual + at,"),
    ],
)
def test_loops_with_other_bits_are_not_used(
    right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(build.__file__).with_name("kernels.c").read_text()
    assert right in source
    changed = tmp_path / "kernels.c"
    changed.write_text(source.replace(right, wrong))
    monkeypatch.setattr(build, "_own_directory", lambda: None)
    broken = Kernels(build.load_library(changed))
    monkeypatch.setattr(fused_module, "loops", lambda: broken)
    assert make_codec(CodecSpec.parse("int8")).native is None

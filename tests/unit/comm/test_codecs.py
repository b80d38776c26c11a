"""Codecs, each driven for several pretend ranks: what travels, and that nothing is lost unnoticed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.comm.codecs.codec import Codec, ErrorFeedback, leaves
from farandole.comm.codecs.registry import bare_codec, make_codec
from farandole.comm.codecs.sparse_low_rank import Positions, PowerSGD, exact_top, sampled_top
from farandole.comm.codecs.units import fuse
from farandole.comm.messages import (
    Encoded,
    Encoding,
    GroupRank,
    Message,
    Rounds,
    SimulationResult,
    recursive_doubling,
    reduce_scatter_all_gather,
    simulate,
)
from farandole.core.link import doubling_rounds
from farandole.core.vocabulary.codec_spec import OPTIONS, CodecSpec, low_rank_pays
from farandole.core.vocabulary.errors import PlanError

EPS = 2.0**-23

FLAT = [
    "fp16", "bf16", "int8", "int8:block=64", "int8:rounding=stochastic", "fp8", "fp8:block=64", "int4",
    "int4:block=16", "int4:rounding=stochastic,block=1024", "sign", "sign:block=32", "topk:0.1",
    "topk:0.01,exact=true", "topk:0.05,warmup_steps=3", "topk:0.1,momentum=0.9",
    "topk:0.1,momentum=0.5,clip_norm=1.0", "threshold:0.5", "threshold:1e-6", "randomk:0.1", "randomk:1.0",
    "randomk:0.1,momentum=0.9",
]  # fmt: skip
MATRIX = ["powersgd:1", "powersgd:4", "powersgd:rank=64"]
ALL = [*FLAT, *MATRIX]


def test_every_codec_is_tested() -> None:
    assert {CodecSpec.parse(text).name for text in ALL} == set(OPTIONS) - {"none"}


# -- gradients -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Gradients of `size` ranks."""

    size: int
    count: int
    kind: str
    seed: int

    def gradients(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        each = [torch.randn(self.count, generator=generator) for _ in range(self.size)]
        if self.kind == "mixed":
            powers = [torch.rand(self.count, generator=generator) * 60 - 30 for _ in each]
            return [values * 10.0**power for values, power in zip(each, powers, strict=True)]
        if self.kind == "some zeros":
            return [values * (torch.rand(self.count, generator=generator) < 0.2) for values in each]
        scales = {"normal": 1.0, "tiny": 1e-30, "huge": 1e30, "zero": 0.0}
        if self.kind in scales:
            return [values * scales[self.kind] for values in each]
        assert self.kind == "constant"
        return [torch.full((self.count,), 0.1 * (rank + 1)) for rank in range(self.size)]


KINDS = ["normal", "mixed", "tiny", "huge", "zero", "constant", "some zeros"]
COUNTS = st.one_of(st.sampled_from([0, 1, 2, 255, 257, 1024, 2049]), st.integers(1, 6000))
CASES = st.builds(Case, st.integers(1, 8), COUNTS, st.sampled_from(KINDS), st.integers(0, 999))
MATRICES = st.tuples(st.integers(1, 40), st.integers(1, 40))


def seats(size: int) -> list[GroupRank]:
    return [GroupRank(rank, size) for rank in range(size)]


def run(codec: Codec[Any], gradients: list[torch.Tensor], states: list[Any] | None = None) -> SimulationResult:
    """Drive one step; the gradients are left as they are, and `states`, empty at first, become the next step's."""
    groups = seats(len(gradients))
    kept = states or begin(codec, gradients)
    together = simulate(
        [
            codec.encode(grad.clone(), state, group)
            for grad, state, group in zip(gradients, kept, groups, strict=True)
        ]
    )
    if states is not None:
        states[:] = together.states
    return together


def begin(codec: Codec[Any], gradients: list[torch.Tensor]) -> list[Any]:
    """Return the ranks' first states."""
    return [codec.init(grad, group) for grad, group in zip(gradients, seats(len(gradients)), strict=True)]


def kept_by(state: Any) -> dict[str, Any]:
    return leaves(state)


def shaped(text: str, case: Case, shape: tuple[int, int]) -> list[torch.Tensor]:
    """Return the gradients a codec is given: flat ones, or matrices of `shape`."""
    if not text.startswith("powersgd"):
        return case.gradients()
    rows, columns = shape
    return [g.view(rows, columns) for g in Case(case.size, rows * columns, case.kind, case.seed).gradients()]


def same_bits(tensors: list[torch.Tensor]) -> bool:
    return all(torch.equal(tensor.view(torch.int32), tensors[0].view(torch.int32)) for tensor in tensors)


def mean64(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).mean(0)


def span(text: str) -> int:
    """Return how many neighbours share a scale, and so a rounding error."""
    spec = CodecSpec.parse(text)
    return int({"fp16": 1024, "bf16": 1}.get(spec.name, spec.options.get("block", 1)))


def largest_around(values: torch.Tensor, length: int) -> torch.Tensor:
    """Return for each element the largest magnitude of its block of `length`."""
    count = values.numel()
    padded = torch.nn.functional.pad(values.abs(), (0, -count % length))
    return padded.view(-1, length).amax(1).repeat_interleave(length)[:count]


def room(text: str, asked: list[torch.Tensor]) -> torch.Tensor:
    """Return how much rounding in float32 may move the mean of `asked`, element by element.

    A handful of additions for each rank, each of them relative to the largest number that takes part: the
    element itself in sparse codecs, its block in quantised ones (whose rounding errors are that large), and
    everything in PowerSGD, whose entries are sums over rows and columns.
    """
    sizes = torch.stack([tensor.double().abs() for tensor in asked]).sum(0)
    if text.startswith("powersgd"):
        return torch.full_like(sizes, float(sizes.norm()) * 50 * EPS)
    around = sizes if sizes.numel() == 0 else largest_around(sizes, span(text))
    return around * 8 * EPS + 2.0**-126  # and numbers below float32's normal ones


# -- what holds for all ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ALL)
@settings(max_examples=8)
@given(case=CASES, shape=MATRICES)
def test_all_have_the_same_mean_and_nothing_is_lost(text: str, case: Case, shape: tuple[int, int]) -> None:
    """Two steps, so that the second one carries a residual."""
    gradients = shaped(text, case, shape)
    codec = make_codec(CodecSpec.parse(text)).codec
    states = begin(codec, gradients)
    for _ in range(2):
        before = copy.deepcopy(states)
        together = run(codec, gradients, states)
        assert same_bits(together.means)
        assert bool(torch.isfinite(together.means[0]).all())
        assert all(tensor.shape == gradients[0].shape for tensor in (*together.means, *together.owns))
        asked = [
            asked_of(CodecSpec.parse(text), grad, state, case.size)
            for grad, state in zip(gradients, before, strict=True)
        ]
        for wanted, own, state in zip(asked, together.owns, states, strict=True):
            assert torch.equal(wanted - own, kept_by(state)["residual"]), "what was not sent is kept, to the bit"
        difference = (mean64(together.owns) - together.means[0].double()).abs()
        allowed = room(text, asked)
        assert bool((difference <= allowed).all()), float((difference / allowed).max())


def asked_of(spec: CodecSpec, grad: torch.Tensor, state: Any, size: int) -> torch.Tensor:
    """Return what a codec with feedback was asked to send."""
    residual: torch.Tensor = kept_by(state)["residual"]
    velocity: torch.Tensor = kept_by(state).get("velocity", torch.zeros_like(grad))
    momentum, clip_norm = spec.options.get("momentum", 0.0), spec.options.get("clip_norm", 0.0)
    if not (momentum or clip_norm):
        return grad + residual
    if clip_norm:
        grad = grad * (clip_norm / size**0.5 / (grad.norm() + 1e-12)).clamp(max=1.0)
    return residual + torch.add(grad, velocity, alpha=momentum)


@pytest.mark.parametrize("text", ALL)
@settings(max_examples=8)
@given(case=CASES, shape=MATRICES)
def test_the_bytes_are_those_of_the_formula(text: str, case: Case, shape: tuple[int, int]) -> None:
    gradients = shaped(text, case, shape)
    together = run(make_codec(CodecSpec.parse(text)).codec, gradients)
    assert together.sent_bytes == [expected_bytes(text, gradients, case.size)] * case.size


def expected_bytes(text: str, gradients: list[torch.Tensor], size: int) -> int:
    """Return the bytes a rank sends in its first step."""
    spec, count = CodecSpec.parse(text), gradients[0].numel()
    others = size - 1
    if spec.name == "powersgd":
        rows, columns = gradients[0].shape
        rank = min(spec.options["rank"], rows, columns)
        return sum_bytes(rank * rows, size) + sum_bytes(rank * columns, size)
    if spec.name in ("topk", "randomk"):
        density = (
            0.25 * (spec.options["density"] / 0.25) ** (1 / 3) if "warmup" in text else spec.options["density"]
        )
        kept = min(count, math.ceil(count * density))
        if count == 0:
            return 0
        return others * (position_bytes(count, kept) + 4 * kept) if spec.name == "topk" else sum_bytes(kept, size)
    if spec.name == "threshold":
        longest = max(int((grad.abs() >= spec.options["value"]).sum()) for grad in gradients)
        return others * (8 + (position_bytes(count, longest) + 4 * longest if longest else 0))
    block = span(text)
    piece = max(1, math.ceil(count / (block * size))) * block
    bits = {"fp16": 16, "bf16": 16, "int8": 8, "fp8": 8, "int4": 4, "sign": 1}[spec.name]
    scales = 0 if spec.name == "bf16" else 4 * piece // block
    return 2 * others * 4 * math.ceil((piece * bits // 8 + scales) / 4)  # in whole words


def sum_bytes(numbers: int, size: int) -> int:
    """A sum of float32: everybody to everybody up to 16 KiB in all, else halves of a ring."""
    if 4 * numbers * size <= 16384:
        return (size - 1) * 4 * numbers
    return 2 * (size - 1) * 4 * math.ceil(numbers / size)


def position_bytes(count: int, kept: int) -> int:
    """One bit an element, or 16 bits a position and 4 bytes for every 65,536 elements, in whole words."""
    shorter = min(math.ceil(count / 8), 2 * kept + 4 * max(1, math.ceil(count / 65536)))
    return 4 * math.ceil(shorter / 4)


@pytest.mark.parametrize("text", [*ALL, "int8:feedback=false", "topk:0.1,feedback=false"])
def test_a_run_continues_from_saved_state_bit_for_bit(text: str) -> None:
    codec = make_codec(CodecSpec.parse(text)).codec
    # 20,000 elements, because the sample of top-k is not taken from fewer than 16,384.
    steps = [shaped(text, Case(3, 20_000, "normal", seed), (50, 40)) for seed in range(5)]
    states: list[Any] = []
    for gradients in steps[:3]:
        run(codec, gradients, states)
    saved = copy.deepcopy(states)
    again = make_codec(CodecSpec.parse(text)).codec
    for gradients in steps[3:]:
        first, second = run(codec, gradients, states), run(again, gradients, saved)
        assert same_bits([first.means[0], *second.means])
        assert all(same_bits(list(pair)) for pair in zip(first.owns, second.owns, strict=True))


@pytest.mark.parametrize("text", [text for text in ALL if "momentum" not in text])
def test_feedback_sends_in_time_what_it_did_not_send_at_once(text: str) -> None:
    """The sum of the means and the residual's mean are the sum of what was asked for: nothing drifts away."""
    codec = make_codec(CodecSpec.parse(text)).codec
    states: list[Any] = []
    gradients = shaped(text, Case(4, 3000, "normal", 5), (30, 20))
    steps = 60
    total = torch.zeros_like(gradients[0], dtype=torch.float64)
    for _ in range(steps):
        total += run(codec, gradients, states).means[0].double()
    left = mean64([kept_by(state)["residual"] for state in states])
    wanted = steps * mean64(gradients)
    torch.testing.assert_close(total + left, wanted, rtol=1e-4, atol=2e-3)
    if "0.01" not in text:  # in which an entry's turn comes every 100 steps
        assert float(left.norm()) < steps / 2 * float(mean64(gradients).norm()), "it does not grow without end"


@pytest.mark.parametrize("text", ALL)
def test_only_float32_is_taken(text: str) -> None:
    spec = CodecSpec.parse(text)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64):
        with pytest.raises(TypeError) as caught:
            make_codec(spec).encode(torch.ones(4, 4, dtype=dtype), None, GroupRank(0, 2))
        name = str(dtype).removeprefix("torch.")
        assert str(caught.value) == f"codec {spec.to_text()}: got a gradient of {name}, expected float32"


@pytest.mark.parametrize("text", ["int8", "topk:0.1", "randomk:0.1", "sign"])
def test_without_feedback_nothing_is_kept(text: str) -> None:
    gradients = Case(2, 500, "normal", 1).gradients()
    states: list[Any] = []
    word = "," if ":" in text else ":"
    together = run(make_codec(CodecSpec.parse(f"{text}{word}feedback=false")).codec, gradients, states)
    bare = run(bare_codec(CodecSpec.parse(text)), gradients)
    assert "residual" not in kept_by(states[0])
    assert same_bits([together.means[0], bare.means[0]])


# -- the error of one step -------------------------------------------------------------------------

UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8}


def bound(text: str, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the largest error of each element after one step without feedback.

    Quantised codecs round twice: every rank's part, then the mean. Floats err by half a unit in their last
    place, integers by half a step of their block (a whole one if rounded at random).
    """
    spec = CodecSpec.parse(text)
    sizes = mean64([grad.abs() for grad in gradients])
    if spec.name in UNIT:
        # A number far below the largest of its block is subnormal in fp16: 2**-24 of a step of max / 2**13.
        unit = UNIT[spec.name]
        floor = largest_around(sizes, 1024) * 2.0**-36 if spec.name == "fp16" else 2.0**-126
        return sizes * (2 * unit + unit**2) * 1.001 + floor
    if spec.name in ("int8", "int4"):
        top = 127 if spec.name == "int8" else 7
        part = (1.0 if "stochastic" in text else 0.5) / top
        around = mean64([largest_around(grad, span(text)) for grad in gradients])
        return around * (2 * part + part**2) * 1.001 + 1e-35  # steps below 1e-37 are not sent
    if spec.name == "fp8":
        # Numbers far below the largest of their block, which is 448 steps, are multiples of 2**-9 of a step.
        unit, around = 2.0**-4, mean64([largest_around(grad, span(text)) for grad in gradients])
        return sizes * (2 * unit + unit**2) * 1.001 + around * 2.2 * 2.0**-10 / 448 + 1e-34
    assert spec.name == "threshold"
    return torch.full_like(sizes, spec.options["value"])


@pytest.mark.parametrize(
    "text", [t for t in FLAT if CodecSpec.parse(t).name in (*UNIT, "int8", "fp8", "int4", "threshold")]
)
@settings(max_examples=10)
@given(case=CASES.filter(lambda case: case.count > 0))
def test_the_error_of_each_element_is_bounded(text: str, case: Case) -> None:
    gradients = case.gradients()
    mean = run(bare_codec(CodecSpec.parse(text)), gradients).means[0].double()
    exact = mean64(gradients)
    allowed = bound(text, gradients) + room(text, gradients)
    error = (mean - exact).abs()
    assert bool((error <= allowed).all()), float((error / allowed).max())


@pytest.mark.parametrize(
    "text", ["sign", "sign:block=32", "topk:0.1", "topk:0.01,exact=true", "randomk:0.1", *MATRIX]
)
@settings(max_examples=10)
@given(case=CASES.filter(lambda case: case.count > 0), shape=MATRICES)
def test_the_error_of_the_whole_is_bounded(text: str, case: Case, shape: tuple[int, int]) -> None:
    """These send a projection of what they are asked for, which is never further from it than zero is.

    Signs are projected twice: every rank's part, then the mean.
    """
    gradients = shaped(text, case, shape)
    mean = run(bare_codec(CodecSpec.parse(text)), gradients).means[0].double()
    error = float((mean - mean64(gradients)).norm())
    sizes = sum(float(grad.double().norm()) for grad in gradients) / case.size
    share = 1.0
    if "exact" in text:
        share = math.sqrt(1 - math.ceil(0.01 * case.count) / case.count)
    if text.startswith("sign"):
        share = 2.0
    if text.startswith("powersgd"):
        sizes = float(mean64(gradients).norm()) + 1e-4 * sizes
    assert error <= sizes * (share + 1e-4) + 1e-36


@pytest.mark.parametrize("text", ["int8:rounding=stochastic", "int4:rounding=stochastic"])
def test_stochastic_rounding_has_no_bias(text: str) -> None:
    """The mean error of many draws is a small part of one draw's; of nearest rounding it stays what it is."""
    gradients = [torch.linspace(-1, 1, 512) * (1 + 0.1 * rank) for rank in range(2)]
    exact = mean64(gradients)
    draws = 200
    states: list[Any] = []
    codec = make_codec(CodecSpec.parse(text + ",feedback=false")).codec
    means = torch.stack([run(codec, gradients, states).means[0].double() for _ in range(draws)])
    step = 1.1 / (127 if "int8" in text else 7)
    # Two roundings, each with a deviation of at most half a step: six deviations of the mean of the draws.
    assert float((means.mean(0) - exact).abs().max()) < 6 * step / math.sqrt(2 * draws)
    # Over the elements too; the table of noise has a mean of its own, within 1/1000 of a half.
    assert abs(float((means.mean(0) - exact).mean())) < 2e-3 * step + 6 * step / math.sqrt(2 * draws * 512)
    nearest = run(bare_codec(CodecSpec.parse(text.partition(":")[0])), gradients).means[0].double()
    assert float((nearest - exact).abs().max()) > 6 * step / math.sqrt(2 * draws)


def test_ranks_round_by_draws_of_their_own() -> None:
    """Equal gradients on 8 ranks: independent errors partly cancel, those of common draws would not."""
    gradients = [torch.rand(8 * 256, generator=torch.Generator().manual_seed(3))] * 8
    codec = make_codec(CodecSpec.parse("int4:rounding=stochastic,feedback=false")).codec
    states: list[Any] = []
    together = run(codec, gradients, states)
    assert len({state.seed for state in states}) == 8
    # Rank 1 adds this piece up; any two of the others.
    errors = [own[256:512] - gradients[0][256:512] for rank, own in enumerate(together.owns) if rank != 1]
    correlations = torch.corrcoef(torch.stack(errors)) - torch.eye(7)
    assert float(correlations.abs().max()) < 0.4


# -- sparse ----------------------------------------------------------------------------------------


@given(st.integers(1, 200_000), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=60)
def test_positions_come_back_and_the_shorter_coding_is_used(count: int, density: float, seed: int) -> None:
    kept = min(count, math.ceil(count * density))
    positions = np.sort(np.random.default_rng(seed).permutation(count)[:kept])
    coding = Positions(count, kept)
    coded = coding.encode(positions)
    assert coded.dtype == np.uint8
    assert coded.size == coding.nbytes == position_bytes(count, kept)
    assert coding.coding == ("bits" if math.ceil(count / 8) <= 2 * kept + 4 * coding.spans else "words")
    np.testing.assert_array_equal(coding.decode(coded), positions)


@pytest.mark.parametrize("count", [1, 7, 8, 65535, 65536, 65537, 131072])
def test_positions_at_the_edges(count: int) -> None:
    for chosen in ([], [0], [count - 1], sorted({0, count - 1}), range(count)):
        positions = np.array(chosen, np.int64)
        coding = Positions(count, positions.size)
        np.testing.assert_array_equal(coding.decode(coding.encode(positions)), positions)


def test_top_k_takes_the_largest() -> None:
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(0)).numpy()
    exact = exact_top(values, 500, 1)
    assert np.abs(values[exact]).min() >= np.sort(np.abs(values))[-500]
    for turn in range(5):
        sampled = sampled_top(values, 500, turn)
        assert np.unique(sampled).size == 500
        assert (np.diff(sampled) > 0).all()
        assert np.linalg.norm(values[sampled]) > 0.9 * np.linalg.norm(values[exact])


@pytest.mark.parametrize("values", [np.zeros(40_000, np.float32), np.ones(40_000, np.float32)])
def test_sampled_top_k_of_equals_takes_turns(values: np.ndarray) -> None:
    """With a threshold that everything passes, the part that is taken rotates."""
    taken = [set(sampled_top(values, 400, turn).tolist()) for turn in range(5)]
    assert all(len(part) == 400 for part in taken)
    assert len(set.union(*taken)) > 1000


@pytest.mark.parametrize("turn", [0, 1_000_003])
@pytest.mark.parametrize("kept", [1, 3, 40_000])
def test_sampled_top_k_takes_as_many_as_asked_for_however_few_and_late(kept: int, turn: int) -> None:
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(0)).numpy()
    assert sampled_top(values, kept, turn + 1).size == kept


@pytest.mark.parametrize(("text", "rotates"), [("topk:0.01", True), ("topk:0.01,exact=true", False)])
def test_top_k_samples_unless_it_is_to_be_exact(text: str, rotates: bool) -> None:
    codec, states = bare_codec(CodecSpec.parse(text)), list[Any]()
    chosen = [run(codec, [torch.ones(40_000)], states).owns[0] for _ in range(2)]
    assert torch.equal(*chosen) is not rotates


def test_the_warm_up_ends_at_the_density() -> None:
    codec = bare_codec(CodecSpec.parse("topk:0.01,warmup_steps=4"))
    states: list[Any] = []
    sent = []
    for seed in range(6):
        together = run(codec, Case(2, 10_000, "normal", seed).gradients(), states)
        sent.append(int((together.owns[0] != 0).sum()))
    # From a quarter to a hundredth of 10,000 in four equal ratios.
    assert sent == [math.ceil(2500 * 0.04 ** (step / 4)) for step in range(1, 4)] + [100, 100, 100]


@settings(max_examples=40)
@given(st.integers(1, 3000), st.floats(0.001, 1), st.integers(1, 5))
def test_random_k_draws_one_of_each_stratum_alike_on_all_ranks(count: int, density: float, size: int) -> None:
    codec = bare_codec(CodecSpec.parse(f"randomk:{density!r}"))
    states: list[Any] = []
    gradients = [torch.rand(count) + 1 for _ in range(size)]
    kept = min(count, math.ceil(count * density))
    together = run(codec, gradients, states)
    places = [own.nonzero().view(-1) for own in together.owns]
    assert all(torch.equal(place, places[0]) for place in places)
    assert places[0].numel() == kept
    torch.testing.assert_close(
        together.means[0][places[0]].double(), mean64(gradients)[places[0]], rtol=1e-6, atol=0
    )


def test_random_k_visits_everything() -> None:
    codec = bare_codec(CodecSpec.parse("randomk:0.1"))
    states: list[Any] = []
    seen = torch.zeros(200)
    for _ in range(100):
        seen += run(codec, [torch.ones(200)], states).owns[0]
    assert int(seen.min()) >= 1
    assert int(seen.max()) <= 30


def test_threshold_sends_what_reaches_it_and_nothing_else() -> None:
    gradients = [torch.tensor([0.5, -0.5, 0.4, 0.0, 3.0]), torch.tensor([0.1, 0.2, 0.3, 0.4, -1.0])]
    together = run(bare_codec(CodecSpec.parse("threshold:0.5")), gradients)
    assert together.owns[0].tolist() == [0.5, -0.5, 0.0, 0.0, 3.0]
    assert together.owns[1].tolist() == [0.0, 0.0, 0.0, 0.0, -1.0]
    assert together.means[0].tolist() == [0.25, -0.25, 0.0, 0.0, 1.0]


def test_momentum_correction_is_that_of_its_paper() -> None:
    """By hand: velocity and residual grow, what is sent is cleared from both."""
    codec = make_codec(CodecSpec.parse("topk:0.5,exact=true,momentum=0.5")).codec
    states = begin(codec, [torch.zeros(2)])
    first = run(codec, [torch.tensor([1.0, 4.0])], states).means[0]
    assert first.tolist() == [0, 4]
    assert (states[0].velocity.tolist(), states[0].feedback.residual.tolist()) == ([1, 0], [1, 0])
    second = run(codec, [torch.tensor([1.0, 1.0])], states).means[0]
    assert second.tolist() == [2.5, 0]  # residual 1 + velocity 1.5
    assert (states[0].velocity.tolist(), states[0].feedback.residual.tolist()) == ([0, 1], [0, 1])


@pytest.mark.parametrize("text", ["topk:1.0,clip_norm=1.0", "topk:1.0,momentum=0.9,clip_norm=1.0"])
def test_clip_norm_clips_each_ranks_gradient(text: str) -> None:
    together = run(make_codec(CodecSpec.parse(text)).codec, [torch.tensor([30.0, 40.0])] * 4)
    torch.testing.assert_close(together.means[0], torch.tensor([0.3, 0.4]))  # of norm 1 / sqrt(4)


# -- low rank --------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    true_rank=st.integers(1, 4), more=st.integers(0, 3), rows=st.integers(5, 60), columns=st.integers(5, 60),
    size=st.integers(1, 5), exponent=st.integers(-30, 30), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_matrix_of_low_rank_is_found_within_two_steps(
    true_rank: int, more: int, rows: int, columns: int, size: int, exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(n, true_rank, generator=generator) for n in (rows, columns))
    matrix = (left @ right.t()) * 10.0**exponent
    # Ranks that differ, with this matrix as their mean.
    spread = [torch.randn(rows, columns, generator=generator) * 10.0**exponent for _ in range(size)]
    gradients = [matrix + (each - torch.stack(spread).mean(0)) for each in spread]
    codec = PowerSGD(true_rank + more)
    states: list[Any] = []
    for _ in range(2):
        mean = run(codec, gradients, states).means[0]
    assert float((mean.double() - matrix.double()).norm()) <= 1e-4 * float(matrix.double().norm())


def test_low_rank_of_zeros_is_zeros_and_finds_what_comes_after() -> None:
    codec = PowerSGD(1)
    states: list[Any] = []
    mean = run(codec, [torch.zeros(6, 5)] * 2, states).means[0]
    assert not mean.any()
    matrix = torch.zeros(6, 5)
    matrix[4] = torch.arange(5.0)  # a row that the first directions after a zero do not see
    for _ in range(2):
        mean = run(codec, [matrix] * 2, states).means[0]
    torch.testing.assert_close(mean, matrix)


def test_more_steps_come_nearer_to_the_best_low_rank_matrix() -> None:
    matrix = torch.randn(40, 30, generator=torch.Generator().manual_seed(2))
    u, s, v = torch.linalg.svd(matrix)
    best = float((matrix - u[:, :4] @ torch.diag(s[:4]) @ v[:4]).norm())
    states: list[Any] = []
    codec = PowerSGD(4)
    errors = [float((run(codec, [matrix] * 2, states).means[0] - matrix).norm()) for _ in range(40)]
    assert errors[-1] < 1.02 * best < errors[0]


def test_low_rank_pays_only_if_it_halves() -> None:
    assert low_rank_pays(64, 64, 16)
    assert not low_rank_pays(64, 64, 17)
    assert not low_rank_pays(2, 100_000, 3)


# -- together --------------------------------------------------------------------------------------


def test_fused_matrices_are_those_of_each_alone_in_as_few_rounds() -> None:
    shapes = [(12, 7), (3, 40), (9, 9)]
    codec = ErrorFeedback(PowerSGD(2))
    gradients = [[torch.randn(shape) for shape in shapes] for _ in range(3)]
    alone = [run(codec, [mine[i] for mine in gradients]).means[0] for i in range(len(shapes))]

    def together(rank: int) -> Encoding:
        seat = GroupRank(rank, 3)
        results = yield from fuse(
            [codec.encode(grad.clone(), codec.init(grad, seat), seat) for grad in gradients[rank]]
        )
        joined = torch.cat([mean.reshape(-1) for mean, _, _ in results])
        return Encoded(joined, joined)

    driven = simulate([together(rank) for rank in range(3)])
    assert same_bits(driven.means)
    assert driven.rounds == 2
    torch.testing.assert_close(driven.means[0], torch.cat([mean.reshape(-1) for mean in alone]))


def test_fuse_refuses_other_operations() -> None:
    with pytest.raises(ValueError, match="expected only 'all_reduce'"):
        next(fuse([say("all_gather", torch.ones(3))]))


def say(operation: Any, tensor: torch.Tensor, times: int = 1) -> Encoding:
    for _ in range(times):
        yield Message(tensor, operation)
    return Encoded(tensor, tensor)


@pytest.mark.parametrize(
    ("encodings", "text"),
    [
        (
            lambda: [say("all_reduce", torch.ones(3)), say("all_gather", torch.ones(3))],
            "rank 1 yields all_gather of .*rank 0 all_reduce",
        ),
        (
            lambda: [say("all_reduce", torch.ones(3)), say("all_reduce", torch.ones(4))],
            r"rank 1 yields all_reduce of \(4,\)",
        ),
        (lambda: [say("all_reduce", torch.ones(3)), say("all_reduce", torch.ones(3).half())], "float16"),
        (
            lambda: [say("all_gather", torch.ones(3), 2), say("all_gather", torch.ones(3))],
            "1 of 2 ranks have finished",
        ),
        (lambda: [say("all_to_all", torch.ones(3, 2)) for _ in range(2)], "expected 2 rows"),
        (lambda: [say("all_to_all", torch.tensor(1.0)) for _ in range(2)], "expected 2 rows"),
        (
            lambda: [say("all_reduce", torch.ones(3, dtype=torch.int32)) for _ in range(2)],
            "expected a floating-point tensor",
        ),
        (
            lambda: [say("average", torch.ones(3)) for _ in range(2)],
            "expected one of all_reduce, all_gather, all_to_all",
        ),
    ],
)
def test_ranks_that_disagree_are_told(encodings: Callable[[], list[Encoding]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        simulate(encodings())


def test_what_the_driver_carries() -> None:
    """The three operations by hand, with their bytes."""

    def talk(rank: int) -> Encoding:
        mine = torch.tensor([float(rank), 10.0 * rank])
        total = yield Message(mine, "all_reduce")
        assert total.tolist() == [3.0, 30.0]
        everyone = yield Message(mine, "all_gather")
        assert everyone.tolist() == [[0, 0], [1, 10], [2, 20]]
        received = yield Message(torch.tensor([[rank], [rank + 10], [rank + 20]]), "all_to_all")
        assert received.view(-1).tolist() == [10 * rank, 10 * rank + 1, 10 * rank + 2]
        return Encoded(total, mine)

    together = simulate([talk(rank) for rank in range(3)])
    assert together.rounds == 3
    assert together.sent_bytes == [2 * 8 + 2 * 8 + 2 * 8] * 3


@given(st.integers(0, 9000), st.integers(1, 8))
@settings(max_examples=25)
def test_a_sum_has_the_same_bits_everywhere(count: int, size: int) -> None:
    tensors = [torch.randn(count) for _ in range(size)]
    together = simulate(
        [reduce_scatter_all_gather(tensor, seat) for tensor, seat in zip(tensors, seats(size), strict=True)]
    )
    assert same_bits(together.results)
    torch.testing.assert_close(together.results[0], torch.stack(tensors).sum(0))
    assert together.sent_bytes == [sum_bytes(count, size)] * size


# -- a person's own --------------------------------------------------------------------------------


def half(grad: torch.Tensor, group: GroupRank) -> Rounds:
    """As in the documentation; overwrites its gradient, which it may."""
    packed = grad.to(torch.bfloat16)
    grad.zero_()
    everyone = yield Message(packed, "all_gather")
    return everyone.float().mean(0), packed.float()


def no_generator(grad: torch.Tensor, group: GroupRank) -> tuple[torch.Tensor, torch.Tensor]:
    return grad, grad


def wrong_shape(grad: torch.Tensor, group: GroupRank) -> Rounds:
    everyone = yield Message(grad, "all_gather")
    return everyone, grad


def test_a_codec_of_ones_own() -> None:
    made = make_codec(CodecSpec.parse(f"{__name__}.half"))
    assert made.granularity == "segment"
    gradients = Case(3, 100, "normal", 1).gradients()
    states = begin(made, gradients)
    together = run(made, gradients, states)
    assert same_bits(together.means)
    for grad, own, state in zip(gradients, together.owns, states, strict=True):
        assert torch.equal(grad - own, state.residual)
    torch.testing.assert_close(together.means[0].double(), mean64(gradients), rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("no_generator", TypeError, "returned tuple, expected a generator"),
        ("wrong_shape", ValueError, r"returned a mean of shape \(2, 5\), expected \(5,\)"),
    ],
)
def test_a_codec_of_ones_own_that_is_wrong(name: str, error: type[Exception], text: str) -> None:
    codec = make_codec(CodecSpec.parse(f"{__name__}.{name}")).codec
    with pytest.raises(error, match=text):
        run(codec, [torch.ones(5)] * 2)


def of_the_old_kind(grad: torch.Tensor, state: dict[str, Any], group: GroupRank) -> None:
    """What a codec's signature was before states were values."""


class WithoutInit:
    @staticmethod
    def encode(grad: torch.Tensor, state: Any, group: GroupRank) -> None: ...


class FewArguments:
    @staticmethod
    def init(grad: torch.Tensor, group: GroupRank) -> None: ...

    @staticmethod
    def encode(grad: torch.Tensor) -> None: ...


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_module.codec", "PYTHONPATH"),
        (f"{__name__}.missing", "has no function 'missing'"),
        (f"{__name__}.EPS", "has no function 'EPS'"),
        (f"{__name__}.of_the_old_kind", r"of_the_old_kind\(grad.* cannot be called with 2 arguments; expected"),
        (f"{__name__}.WithoutInit", r"has encode\(grad, state, group\), but no init"),
        (f"{__name__}.FewArguments", "encode.* cannot be called with 3 arguments"),
        ("auto", "none was chosen"),
    ],
)
def test_a_codec_that_cannot_be_made(name: str, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        make_codec(CodecSpec.parse(name))


@pytest.mark.parametrize("block", [16, 32, 1024])
def test_signs_carry_the_mean_magnitude_of_their_block(block: int) -> None:
    """Also of the smallest block, whose signs are half a word."""
    mine = torch.cat([torch.full((block,), size) for size in (1.0, -2.0, 0.5, -4.0, 8.0)])
    theirs = -mine  # block by block other signs: each rank's part must be read with its own
    together = run(bare_codec(CodecSpec.parse(f"sign:block={block}")), [mine, 3 * theirs])
    assert torch.equal(together.means[0], -mine), "of 1 and -3 times the same magnitudes"
    assert same_bits(together.means)


# -- sums in few messages --------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(2, 9))
def test_a_recursive_doubling_has_the_same_bits_everywhere(size: int) -> None:
    tensors = [torch.randn(50) * 10.0 ** (rank % 5) for rank in range(size)]
    before = [tensor.clone() for tensor in tensors]
    together = simulate(
        [recursive_doubling(tensor, seat) for tensor, seat in zip(tensors, seats(size), strict=True)]
    )
    assert same_bits(together.results)
    torch.testing.assert_close(
        together.results[0].double(), torch.stack(tensors).double().sum(0), rtol=1e-5, atol=1e-3
    )
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True)), "the tensors are the caller's"
    rounds = {2: 1, 3: 3, 4: 2, 5: 4, 6: 4, 7: 4, 8: 3}[size]
    assert together.rounds == doubling_rounds(size) == rounds
    assert max(together.sent_bytes) == 4 * 50 * rounds


@pytest.mark.parametrize("size", [3, 4, 7])
def test_a_recursive_doubling_adds_narrow_floats_in_float32(size: int) -> None:
    tensors = [torch.tensor([1.0 if rank == 0 else 2.0**-8], dtype=torch.bfloat16) for rank in range(size)]
    together = simulate(
        [recursive_doubling(tensor, seat) for tensor, seat in zip(tensors, seats(size), strict=True)]
    )
    exact_sum = torch.stack(tensors).double().sum(0).bfloat16()
    assert all(torch.equal(total, exact_sum) for total in together.results)
    assert exact_sum > 1


def test_swaps_that_do_not_meet_are_refused() -> None:
    def talk(peer: int | None) -> Encoding:
        received = yield Message(torch.zeros(1), "sendrecv", peer=peer)
        return Encoded(received, received)

    with pytest.raises(
        ValueError, match=r"sendrecv between ranks that do not name each other: their peers are \[1, 2, 0\]"
    ):
        simulate([talk(1), talk(2), talk(0)])
    with pytest.raises(ValueError, match="sendrecv with None: expected a peer of 0 to 1"):
        simulate([talk(None), talk(0)])

"""Triton's kernels for int8 and int4 beside the eager codec, bit by bit, run by Triton's interpreter on the CPU.

They skip where Triton is not installed. The interpreter is chosen when Triton is imported, so the ranks are new
processes with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib.util
import io
import os
import random
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from farandole.comm.codecs import device_quantize as product
from farandole.comm.codecs.codec import FeedbackState
from farandole.comm.codecs.device_quantize import DeviceQuantize
from farandole.comm.codecs.quantize import NativeQuantize, eager_exchange
from farandole.comm.codecs.registry import make_codec
from farandole.comm.device import block_launches
from farandole.comm.device.block_launches import BlockKernels, can_run, load_kernels
from farandole.comm.device.streams import simulate_device
from farandole.comm.messages import Exchange, GroupRank, as_encoding, simulate
from farandole.core.env import NATIVE
from farandole.core.vocabulary.codec_spec import CodecSpec
from tests.ranks.pool import fresh, ranks, takes
from tests.simulated_device import SimulatedDevice
from tests.unit.comm.test_native_loops import KINDS, Heard, assert_same, assert_same_packed, numbers

CPU = torch.device("cpu")
TEXTS = ["int8", "int4", "int8:block=64", "int4:block=64", "int8:block=16", "int4:block=512", "int8:block=4096"]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton (pip install triton)"
)
pytestmark = [needs_triton, pytest.mark.full("slow")]
Way = Callable[[torch.Tensor, FeedbackState, GroupRank], Exchange]


@contextmanager
def accelerator() -> Generator[None, None, None]:
    """Take the CPU for an accelerator on which no loops in C run."""
    simulate_device(CPU, SimulatedDevice())
    try:
        with (
            np.errstate(all="ignore"),  # the interpreter computes with NumPy
            patch.object(NativeQuantize, "exchange_or", lambda _, otherwise, *exchanged: otherwise(*exchanged)),
            patch.object(product, "_trials", product._Trials()),
        ):
            yield
    finally:
        simulate_device(CPU, None)


@contextmanager
def launches() -> Generator[list[str], None, None]:
    """Note which kernels are launched."""
    calls: list[str] = []

    def noted(name: str) -> Any:
        original = getattr(BlockKernels, name)

        def launch(self: BlockKernels, *arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return original(self, *arguments, **options)

        return patch.object(BlockKernels, name, launch)

    with noted("encode"), noted("add_up"), noted("land"):
        yield calls


def kernels_of(text: str) -> DeviceQuantize:
    made = make_codec(CodecSpec.parse(text)).on_device
    assert made is not None
    return made


def compare(text: str, ways: list[Way], count: int, kinds: tuple[str, str], seed: int, *, steps: int = 2) -> None:
    """Let `ways`, one for each rank, and the eager codec exchange the same; the first step adds a residual."""
    made, size = kernels_of(text), len(ways)
    groups = [GroupRank(rank, size) for rank in range(size)]
    eager = eager_exchange(made.packer)
    residuals = [numbers(kinds[0], count, seed + rank) for rank in range(size)]
    states = [[FeedbackState(each.clone(), each * 0 - 1, None) for each in residuals] for _ in range(2)]
    for step in range(steps):
        grads = [numbers(kinds[1], count, seed + 100 * (step + 1) + rank) for rank in range(size)]
        rows, means, flags = [], [], []
        for way, exchanges in enumerate((ways, [eager] * size)):
            units, heard = [grad.clone() for grad in grads], Heard()
            results = simulate(
                [
                    heard.listen(as_encoding(exchange(unit, state, group), unit), group)
                    for exchange, unit, state, group in zip(exchanges, units, states[way], groups, strict=True)
                ]
            )
            states[way] = results.states
            rows.append(heard.rows)
            means.append(units)
            flags.append([bool(torch.isfinite(unit).all()) for unit in units])
        for ours, theirs in zip(*rows, strict=True):
            assert_same_packed(f"int{made.packer.bits}", made.packer.block, ours, theirs)
        assert flags[0] == flags[1]
        for rank in range(size):
            assert_same(means[0][rank], means[1][rank], f"{text}: mean of rank {rank} of {size}, {count} elements")
            assert_same(states[0][rank].residual, states[1][rank].residual, f"{text}: residual of rank {rank}")


def random_case(number: int) -> None:
    """Compare kernels of a random format, group, length and kind of numbers."""
    draw = random.Random(number)
    text, size = TEXTS[number % len(TEXTS)], draw.randint(1, 4) if number % 50 else 18
    made = kernels_of(text)
    count = size * made.packer.block * made.kernels.halves * draw.randint(1, 5)
    if draw.random() < 0.3:
        count -= draw.randint(1, made.packer.block - 1)
    compare(text, [made.exchange] * size, count, (draw.choice(KINDS), draw.choice(KINDS)), number)


@ranks(1, TRITON_INTERPRET="1")
@fresh
@takes(120)
def test_kernels_send_decode_and_keep_the_bits_of_the_eager_codec() -> None:
    assert can_run(CPU)
    with accelerator():
        for number in range(14):
            random_case(number)
        made = kernels_of("int8")
        mixed: list[Way] = [made.exchange, eager_exchange(made.packer), made.exchange]
        compare("int8", mixed, 3 * 1024, ("mixed", "normal"), 1)
        fitting(made)
        first_use()


@pytest.mark.parametrize("part", range(20))
@ranks(1, TRITON_INTERPRET="1")
@fresh
@takes(300)
def test_kernels_in_a_thousand_random_exchanges(part: int) -> None:
    with accelerator():
        for number in range(14 + 52 * part, 14 + 52 * (part + 1)):
            random_case(number)


def fitting(made: DeviceQuantize) -> None:
    """Ask what fits, and give what arrives in another size."""
    group, whole = GroupRank(0, 2), torch.zeros(1024)

    def fits(unit: torch.Tensor, codec: str = "int8", residual: torch.Tensor | None = None) -> bool:
        kept = torch.zeros_like(unit) if residual is None else residual
        return kernels_of(codec).fits(unit, FeedbackState(kept, torch.zeros_like(unit), None), group)

    assert fits(whole)
    assert fits(whole[:1000])
    assert fits(whole, "int4")
    assert not fits(whole[:512], "int4"), "a piece of one block has no two halves"
    assert not fits(whole[:0])
    assert not fits(whole.double())
    assert not fits(torch.zeros(2048)[::2])
    assert not fits(whole, residual=whole[:512])
    assert not fits(whole, residual=whole.bfloat16())
    with patch.object(product, "MOST_BYTES", 1000):
        assert not fits(whole)
    for text in ("int8:rounding=stochastic", "int8:feedback=false", "int8:block=8192", "bf16", "topk:0.1"):
        assert make_codec(CodecSpec.parse(text)).on_device is None, text
    for turn in range(2):
        state = FeedbackState(torch.ones(1024), torch.zeros(1024), None)
        rounds = made.exchange(torch.ones(1024), state, group)
        rows = next(rounds).tensor
        if turn:
            rounds.send(rows)
        with pytest.raises(
            ValueError, match=r"Triton kernels: received .*, expected torch.uint8 of shape \(2, 520\)"
        ):
            rounds.send(rows[:, :-4])
        assert torch.equal(state.residual, torch.ones(1024)), (
            "an exchange that fails leaves the residual as it was"
        )


def run_alone(text: str) -> torch.Tensor:
    """Exchange a unit among two ranks by whatever the registry chooses; return the mean."""
    made, groups = make_codec(CodecSpec.parse(text)), [GroupRank(rank, 2) for rank in range(2)]
    units = [numbers("normal", 2048, rank) for rank in range(2)]
    states = [made.init(units[0], group) for group in groups]
    simulate(
        [
            as_encoding(made.exchange(units[each.rank], states[each.rank], each), units[each.rank])
            for each in groups
        ]
    )
    return units[0]


def first_use() -> None:
    """Use kernels on an accelerator alone, and not where they are not wanted."""
    expected = {}
    with patch.object(product, "streams_of", lambda _: None), launches() as calls:
        for text in ("int8", "int4"):
            expected[text] = run_alone(text)
    assert calls == [], "on the CPU the eager codec, or loops in C"
    for text in ("int8", "int4"):
        with launches() as calls:
            assert_same(run_alone(text), expected[text], text)
        assert calls[-6:] == ["encode"] * 2 + ["add_up"] * 2 + ["land"] * 2
        with launches() as calls:
            run_alone(text)
        assert len(calls) == 6, "tried once"
    with patch.dict("os.environ", {NATIVE: "0"}), patch.object(product, "_trials", product._Trials()):
        with launches() as calls:
            assert_same(run_alone("int8"), expected["int8"], "without kernels")
        assert calls == []


FAULTS = [
    ("tl.div_rn(largest, top)", "tl.div_rn(largest, top - 1.0)"),
    ("tl.div_rn(largest, top)", "largest * (1.0 / top)"),
    ("(values * inverse + ROUNDER) - ROUNDER", "tl.floor(values * inverse + 0.5)"),
    (
        "(values * inverse + ROUNDER) - ROUNDER",
        "tl.floor(tl.abs(values * inverse)) * tl.where(values < 0, -1.0, 1.0)",
    ),
    ("step < LEAST_STEP, 0.0, step", "step < 0.0, 0.0, step"),
    ("values - numbers * step", "values * 1.0"),
    ("values - numbers * step", "values - (numbers + 1.0e-7) * step"),
    ("sums + _numbers_of(packed, half, halves) * step", "sums - _numbers_of(packed, half, halves) * step"),
    ("asked - (asked - rest * (1.0 * ranks))", "rest * (1.0 * ranks)"),
    ("sums * (1.0 / ranks)", "sums * (0.999999 / ranks)"),
    ("tl.store(is_finite + number * 0, 0,", "tl.store(is_finite + number * 0, 1,"),
    (
        "mask=exists & (where < total))\n        largest",
        "mask=exists & (where < total - 1))\n        largest",
    ),
    ("tl.max(magnitudes, 1).to", "tl.no_such_function(magnitudes, 1).to"),
]
INT4_FAULTS = [
    ("(codes << (28 - 4 * half)) >> 28", "(codes >> (4 * half)) & 15"),
    ("(codes & 15) << (4 * half)", "(codes & 15) << (4 * (1 - half))"),
]


def changed(right: str, wrong: str, directory: Path) -> ModuleType:
    """Return the kernels with one expression changed."""
    source = Path(block_launches.__file__).with_name("block_kernels.py").read_text()
    assert right in source, right
    path = directory / "changed_kernels.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(f"changed_{abs(hash(wrong))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@ranks(1, TRITON_INTERPRET="1")
@fresh
@takes(120)
def test_kernels_with_other_bits_are_not_used(tmp_path: str) -> None:
    assert load_kernels() is not None
    with accelerator():
        expected = {text: run_alone(text) for text in ("int8", "int4")}
    cases = [("int8", *fault) for fault in FAULTS] + [("int4", *fault) for fault in INT4_FAULTS]
    for number, (text, right, wrong) in enumerate(cases):
        directory = Path(tmp_path) / str(number)
        directory.mkdir()
        kernels = changed(right, wrong, directory)
        other = {"int8": "int4", "int4": "int8"}[text]
        notice = io.StringIO()
        with accelerator(), patch.object(block_launches, "load_kernels", lambda found=kernels: found):
            with redirect_stderr(notice):
                assert_same(run_alone(text), expected[text], text)
            with launches() as calls, redirect_stderr(notice):
                run_alone(text)
                assert_same(run_alone(other), expected[other], "the other format is off, too")
            assert calls == [], f"{wrong}: not found"
        lines = notice.getvalue().splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith(f"farandole: Triton kernels of codec {text} are not used on cpu"), lines
        assert ("no_such_function" if "no_such" in wrong else "results differ from the codec's") in lines[0], lines


POINTERS = {"codes": "*i8", "piece_codes": "*i8", "is_finite": "*i8"}
SIZES = ("piece", "total", "row_words", "row_bytes")
NUMBERS = (*SIZES, "own_row")


@ranks(1)
@fresh
@takes(300)
def test_kernels_compile_for_an_h100_and_round_each_product(tmp_path: str) -> None:
    """Without a GPU: division is exact, no product is fused with a sum, denormals are kept, no register spills."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.tools.disasm import get_sass

    kernels = load_kernels()
    assert kernels is not None
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path)
    for bits, size in ((8, 2), (4, 2), (8, 18), (4, 8)):
        launcher = BlockKernels(bits, 256)
        for name in ("encode", "add_up", "land"):
            kernel = getattr(kernels, name)
            constants: dict[str, Any] = {**launcher._format, "top": launcher._top}
            if name == "add_up":
                constants["ranks"] = size
            names = kernel.arg_names
            kinds = {
                each: "constexpr"
                if each in constants
                else "i32"
                if each in NUMBERS
                else POINTERS.get(each, "*fp32")
                for each in names
            }
            # What the launcher finds out: addresses and lengths are multiples of 16.
            divisible = {
                (place,): [["tt.divisibility", 16]]
                for place, each in enumerate(names)
                if kinds[each].startswith("*") or each in SIZES
            }
            source = ASTSource(
                kernel, kinds, {(names.index(key),): value for key, value in constants.items()}, divisible
            )
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
            assembly = made.asm["ptx"]
            assert not re.search(r"\bfma\.|div\.(full|approx)|rcp\.approx|\.ftz", assembly), (bits, name)
            assert ("div.rn.f32" in assembly) == (name != "land")
            assert made.metadata.shared < 48 * 1024
            assert not re.search(r"\b(LDL|STL)\b", get_sass(made.asm["cubin"])), "registers in local memory"

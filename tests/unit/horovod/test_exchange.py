"""What front ends for other frameworks share: buckets, layouts, groups, arrays; without those frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from farandole.horovod.common.compression import CodecCompressor, CompressionNames, NoneCompressor, codec_of
from farandole.horovod.common.exceptions import HorovodMismatchError
from farandole.horovod.common.reductions import Average, Sum
from farandole.horovod.exchange.layouts import GradientPart, Layouts, Place, layout_text, plan_buckets
from farandole.horovod.exchange.names import MadeObjects, as_array, as_torch
from farandole.horovod.exchange.settings import check_groups, group_numbers, make_settings


def part(index: int, *shape: int, dtype: str = "float32", itemsize: int = 4, **others: object) -> GradientPart:
    return GradientPart(index, shape, dtype, itemsize, **others)  # type: ignore[arg-type]


def indices(parts: list[GradientPart], bucket_bytes: int = 10_000) -> list[list[int]]:
    return [[each.index for each in bucket.parts] for bucket in plan_buckets(parts, bucket_bytes)]


def test_parts_take_up_multiples_of_64_bytes() -> None:
    assert [part(0, n).padded for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert part(0, 3, dtype="float64", itemsize=8).padded == 8
    assert part(0).elements == 1
    assert part(0, dtype="complex128", itemsize=16).padded == 4


def test_buckets_are_filled_from_the_end_and_hold_one_type() -> None:
    assert indices([part(i, 100) for i in range(4)]) == [[0, 1, 2, 3]]
    assert indices([part(i, 100) for i in range(4)], 800) == [[2, 3], [0, 1]]
    assert indices([part(i, 100) for i in range(3)], 1) == [[2], [1], [0]]
    mixed = [part(0, 4), part(1, 4, dtype="float16", itemsize=2), part(2, 4), part(3, 4, codec="int8")]
    assert indices(mixed) == [[3], [0, 2], [1]]
    assert indices([]) == []


def test_groups_and_matrices_are_buckets_of_their_own() -> None:
    assert indices([part(0, 9, group=1), part(1, 9), part(2, 900, group=1), part(3, 9)], 100) == [[1, 3], [0, 2]]
    buckets = plan_buckets([part(0, 9), part(1, 8, 8, alone=True, codec="powersgd:rank=4"), part(2, 9)], 10_000)
    assert [(bucket.is_whole, bucket.codec) for bucket in buckets] == [(False, "none"), (True, "powersgd:rank=4")]


def test_layouts_are_compared_once_and_differences_are_named() -> None:
    here = [Place("dense/kernel", (3, 4), "float32"), Place("dense/bias", (4,), "float32")]
    known, text = Layouts(), layout_text(here)
    question = known.question("allreduce.a.0", text)
    assert question is not None
    assert question.tensor is not None
    told = bytes(question.tensor.numpy())
    known.compare("allreduce.a.0", text, torch.frombuffer(bytearray(told * 3), dtype=torch.uint8))
    assert known.question("allreduce.a.0", text) is None
    assert known.question("allreduce.a.1", text) is not None
    for other, message in (
        ([here[0]], r"gradient 1 \(dense/bias\) is there on rank 0, but not on rank 1"),
        (
            [here[1], here[0]],
            r"gradient 0 is float32\[3, 4\] of dense/kernel on rank 0, but float32\[4\] of dense/bias",
        ),
        ([here[0], Place("dense/bias", (), "")], "no gradient of dense/bias on rank 1"),
    ):
        both = bytearray(told + layout_text(other).encode() + b"\n")
        with pytest.raises(HorovodMismatchError, match=message):
            Layouts().compare("x", text, torch.frombuffer(both, dtype=torch.uint8))
    known.clear()
    assert known.question("allreduce.a.0", text) is not None


def test_groups_by_identity() -> None:
    a, b, c = (np.zeros(1) for _ in range(3))
    assert group_numbers(None, [a, b]) == {}
    assert group_numbers(2, [a, b, c]) == {0: 0, 1: 0, 2: 1}
    assert group_numbers(9, [a, b]) == {0: 0, 1: 1}
    assert group_numbers([[c, a]], [a, b, c]) == {2: 0, 0: 0}
    with pytest.raises(ValueError, match="twice"):
        group_numbers([[a], [a]], [a, b])
    with pytest.raises(ValueError, match="no variable of this optimizer"):
        group_numbers([[c]], [a, b])
    for wrong in (-1, True, "ab", [a]):
        with pytest.raises(ValueError, match="groups should be"):
            check_groups(wrong, 0)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        assert check_groups(None, 3) == 3


def test_settings_are_checked() -> None:
    plain: dict[str, Any] = {"op": Average, "predivide_factor": 1.0, "groups": None}
    made = make_settings(CompressionNames.none, **plain)
    assert (made.passes, made.op) == (1, Average)
    for changes, message in (
        ({"op": Sum, "predivide_factor": 2.0}, "predivide"),
        ({"op": 7}, "op currently only supports"),
        ({"passes": 0}, "backward_passes_per_step"),
        ({"passes": 1.5}, "backward_passes_per_step"),
        ({"passes": True}, "backward_passes_per_step"),
    ):
        with pytest.raises(ValueError, match=message):
            make_settings(CompressionNames.none, **{**plain, **changes})
    with pytest.raises(ValueError, match="compression=3"):
        make_settings(3, **plain)


def test_codecs_of_compressions() -> None:
    assert codec_of(NoneCompressor) == "none"
    assert codec_of(CodecCompressor("int8")) == "int8"

    class Own(NoneCompressor):
        pass

    assert codec_of(Own) is None  # it may compress by code of its own
    assert codec_of(object()) is None


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "bool", "float16"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_arrays_go_to_the_engine_and_back(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape)), dtype="int64").reshape(shape).astype(dtype)
    tensor = as_torch(array, "hvd.allreduce")
    assert tuple(tensor.shape) == shape
    back = as_array(tensor, array.dtype)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)


def test_arrays_that_cannot_travel() -> None:
    with pytest.raises(ValueError, match=r"hvd\.allreduce: Tensor type <U1 is not supported\. Types"):
        as_torch(np.array(["a"]), "hvd.allreduce")


def test_a_rank_whose_layout_changed_says_so() -> None:
    here = [Place("dense/kernel", (3, 4), "float32"), Place("dense/bias", (4,), "float32")]
    known, text = Layouts(), layout_text(here)
    known.compare("x", text, torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8))
    problem = HorovodMismatchError("Mismatched operations")
    now = layout_text([here[0], Place("dense/bias", (), "")])
    said = str(known.explained(problem, "x", now))
    assert "gradient 1 is float32[4] of dense/bias before, but no gradient of dense/bias now" in said
    assert "before" not in str(known.explained(problem, "x", text))
    other = ValueError("another")
    assert known.explained(other, "x", now) is other


def test_names_can_be_made_again() -> None:
    made = MadeObjects()
    first = made.next_name("Adam")
    marked = made.mark()
    inside = [made.next_name("Adam"), made.next_name("SGD")]
    made.go_back(marked)
    assert [made.next_name("Adam"), made.next_name("SGD")] == inside
    assert [first, *inside] == ["Adam.0", "Adam.1", "SGD.0"]

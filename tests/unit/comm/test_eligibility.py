"""Which parameter travels by which codec: large float32 matrices by the plan's, all others uncompressed."""

from __future__ import annotations

import pytest
import torch

from farandole.comm.codecs.registry import (
    LEAST_ELEMENTS,
    can_have,
    choose_codec,
    pattern_for,
    refuse_impossible,
    why_useless,
)
from farandole.core.vocabulary.codec_spec import CodecSpec
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.spec import Plan

INT8, NONE = CodecSpec.parse("int8"), CodecSpec.parse("none")


@pytest.mark.parametrize(
    ("shape", "dtype", "codec", "reason"),
    [
        ((64, 64), torch.float32, "int8", ""),
        ((64, 63), torch.float32, "int8", r"has shape \(64, 63\): codecs are for matrices of at least 4096"),
        ((4096,), torch.float32, "int8", r"has shape \(4096,\)"),
        ((64, 64), torch.bfloat16, "int8", "is bfloat16, and codecs take float32"),
        ((2, 2, 1024), torch.float32, "int8", ""),
        ((64, 64), torch.float32, "powersgd:16", ""),
        ((64, 64), torch.float32, "powersgd:17", "is a 64 x 64 matrix: rank 17 would not halve it"),
        ((2, 4096), torch.float32, "powersgd:3", "is a 2 x 4096 matrix, whose rank is below 3"),
        ((64, 8, 8), torch.float32, "powersgd:16", ""),
        ((2, 8), torch.float16, "none", ""),
    ],
)
def test_what_a_parameter_can_have(shape: tuple[int, ...], dtype: torch.dtype, codec: str, reason: str) -> None:
    parameter, spec = torch.zeros(shape, dtype=dtype), CodecSpec.parse(codec)
    assert can_have(parameter, spec) is (not reason)
    assert choose_codec("w", parameter, Plan(codec=codec)) == (NONE if reason else spec)
    if not reason:
        refuse_impossible("w", parameter, spec)
        assert choose_codec("w", parameter, Plan(codec_for={"w": codec})) == spec
        return
    with pytest.raises(PlanError, match=reason):
        refuse_impossible("w", parameter, spec)
    with pytest.raises(PlanError, match=f"codec_for.w = .*{reason}"):
        choose_codec("w", parameter, Plan(codec_for={"w": codec}))
    assert choose_codec("w", parameter, Plan(codec_for={"*": codec})) == NONE, "all that can"


def test_the_last_pattern_that_fits_decides() -> None:
    plan = Plan(codec="int8", codec_for={"*.weight": "int4", "head.*": "none", "body.*": "bf16"})
    big = torch.zeros(64, LEAST_ELEMENTS // 64)
    names = ("head.weight", "body.weight", "tail.weight", "tail.bias")
    assert [pattern_for(name, plan) for name in names] == ["head.*", "body.*", "*.weight", None]
    assert [choose_codec(name, big, plan).name for name in names] == ["none", "bf16", "int4", "int8"]
    assert choose_codec("w", big, Plan(codec="auto")) == NONE, "auto begins with none"


def test_a_codec_that_no_parameter_can_have_is_useless_and_no_other() -> None:
    chosen = {"a": NONE, "b": NONE}
    text = why_useless(Plan(codec="int8"), chosen)
    assert text.startswith(
        "codec = 'int8' changes nothing here, and gradients stay exact: none of the 2 parameters"
    )
    assert why_useless(Plan(codec="powersgd:4"), chosen).endswith("that it would halve; a lower rank may")
    assert why_useless(Plan(codec="int8"), {**chosen, "c": INT8}) == ""
    assert why_useless(Plan(codec="int8"), {}) == ""
    assert why_useless(Plan(codec="none"), chosen) == ""
    assert why_useless(Plan(codec="auto"), chosen) == ""

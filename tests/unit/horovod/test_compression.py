"""Compressors change a tensor and change it back; codecs name what the engine does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.horovod.common.compression import check_compression
from farandole.horovod.torch.compression import (
    CodecCompressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
    codec_for,
)


def test_none_leaves_everything_alone() -> None:
    tensor = torch.randn(3)
    compressed, context = Compression.none.compress(tensor)
    assert compressed is tensor
    assert Compression.none.decompress(compressed, context) is tensor
    assert Compression.none is NoneCompressor


@pytest.mark.parametrize(
    ("compressor", "small"), [(Compression.fp16, torch.float16), (Compression.bf16, torch.bfloat16)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_casts(compressor: Any, small: torch.dtype, dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, -0.5, 2.0], dtype=dtype)
    compressed, context = compressor.compress(tensor)
    assert compressed.dtype == small
    back = compressor.decompress(compressed, context)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)
    assert Compression.fp16 is FP16Compressor


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("compressor", [Compression.fp16, Compression.bf16])
def test_other_types_are_not_cast(compressor: Any, dtype: torch.dtype) -> None:
    tensor = torch.ones(3, dtype=dtype)
    compressed, context = compressor.compress(tensor)
    assert compressed is tensor
    assert compressor.decompress(compressed, context) is tensor


def test_codecs_are_named_as_in_a_plan() -> None:
    found = [
        Compression.int8,
        Compression.int4,
        Compression.fp8,
        Compression.sign,
        Compression.topk(0.05),
        Compression.powersgd(2),
    ]
    assert [codec.text for codec in found] == [
        CodecCompressor(text).text for text in ("int8", "int4", "fp8", "sign", "topk:0.05", "powersgd:2")
    ]
    tensor = torch.randn(4)
    for codec in found:
        assert isinstance(codec, Compressor)
        assert codec.compress(tensor) == (tensor, None)
        assert codec.decompress(tensor, None) is tensor
        assert codec_for(codec, tensor) == codec.text
        assert codec_for(codec, tensor.int()) == "none"
    assert codec_for(Compression.fp16, tensor) == "none"
    assert Compression.topk(0.05) == CodecCompressor("topk:0.05") != Compression.topk(0.1)
    assert len({Compression.topk(0.05), CodecCompressor("topk:0.05")}) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CodecCompressor("int9"), "unknown codec 'int9'"),
        (lambda: Compression.topk(1.5), "expected a share above 0"),
        (lambda: Compression.powersgd(0), "expected a whole number of at least 1"),
        (lambda: check_compression("fp16"), r"compression='fp16': expected one of Compression"),
        (lambda: check_compression(None), "compression=None: expected one of Compression"),
    ],
)
def test_unknown_compression(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_an_unknown_name_of_compression() -> None:
    with pytest.raises(AttributeError, match=r"no Compression\.fp61; did you mean 'fp16'"):
        Compression.fp61  # noqa: B018
    assert not hasattr(Compression, "gzip")


def test_a_compressor_of_ones_own() -> None:
    class Halves:
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, float]:
            return tensor / 2, 2.0

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: float) -> torch.Tensor:
            return tensor * ctx

    assert check_compression(Halves) is Halves
    assert codec_for(Halves, torch.ones(1)) == "none"

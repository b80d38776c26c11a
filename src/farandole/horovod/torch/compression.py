"""How gradients travel: Horovod's compressors for torch tensors, and the codecs of the reducer."""

from __future__ import annotations

from typing import Any

import torch

from ...core.vocabulary.codec_spec import NONE
from ..common.compression import CodecCompressor, CompressionNames, Compressor, NoneCompressor


class _CastCompressor(Compressor):
    """Sends floating point as `_sent_dtype`; other types as they are."""

    _sent_dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor as it is sent, and its type; None for one that is not cast."""
        return (tensor.to(cls._sent_dtype), tensor.dtype) if tensor.dtype.is_floating_point else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its type."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Sends floating point as float16; other types as they are."""

    codec = "fp16"
    _sent_dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floating point as bfloat16, which has the range of float32; other types as they are."""

    codec = "bf16"
    _sent_dtype = torch.bfloat16


class Compression(CompressionNames):
    """The values of ``compression=``: none, fp16, bf16, and codecs with error feedback."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor


def codec_for(compression: Any, tensor: torch.Tensor) -> str:
    """Return what an allreduce of `tensor` says to the reducer: the codec, for floating point."""
    return (
        compression.text if isinstance(compression, CodecCompressor) and tensor.dtype.is_floating_point else NONE
    )


__all__ = [
    "BF16Compressor",
    "CodecCompressor",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "NoneCompressor",
    "codec_for",
]

"""How gradients travel: Horovod's compressors for TensorFlow's tensors, and the codecs of the reducer."""

from __future__ import annotations

from typing import Any

from ..common.compression import CompressionNames, Compressor, NoneCompressor
from .installed import tf


class TensorFlowCast(Compressor):
    """Sends floating point as `sent_dtype`; other types as they are."""

    sent_dtype: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor as it is sent, and its type."""
        dtype = tensor.dtype
        return (tf.cast(tensor, cls.sent_dtype) if dtype.is_floating else tensor), dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its type."""
        return tf.cast(tensor, ctx) if ctx.is_floating else tensor


def _cast(name: str, codec: str, dtype: Any) -> Any:
    text = f"Sends floating point as {dtype.name}; other types as they are."
    members = {"codec": codec, "sent_dtype": dtype, "__doc__": text, "__module__": __name__}
    return type(name, (TensorFlowCast,), members)


FP16Compressor = _cast("FP16Compressor", "fp16", tf.float16)
BF16Compressor = _cast("BF16Compressor", "bf16", tf.bfloat16)


class TensorFlowCompression(CompressionNames):
    """The values of ``compression=``: none, fp16, bf16, and codecs with error feedback."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor


Compression = TensorFlowCompression

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

"""What ``compression=`` may be in every front end: Horovod's interface, and the codecs of the reducer.

A `Compressor` changes a tensor before the exchange and back after it. A `CodecCompressor` leaves the tensor alone
and names the reducer's codec, with error feedback: ``Compression.int8``, ``int4``, ``fp8``, ``sign``,
``topk(0.01)``, ``powersgd(4)``. The casts are each front end's own.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ...core.vocabulary.codec_spec import NONE, CodecSpec
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.text import did_you_mean


class Compressor:
    """Changes a tensor before the exchange and back after it. The interface of Horovod."""

    codec: ClassVar[str | None] = None
    """The same in the spelling of a plan; None when only its own code knows."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what travels, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the result in the form of the tensor that `compress` was given."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    codec = NONE

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor."""
        return tensor


class CodecCompressor(NoneCompressor):
    """A codec of the reducer, as a plan names it: ``CodecCompressor("topk:0.01")``. ValueError for others."""

    def __init__(self, text: str) -> None:
        try:
            self.spec = CodecSpec.parse(text, where="compression")
        except PlanError as problem:
            raise ValueError(str(problem)) from None

    @property
    def text(self) -> str:
        """The codec in the spelling of a plan."""
        return self.spec.to_text()

    def __repr__(self) -> str:
        return f"CodecCompressor({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CodecCompressor) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        known = [key for each in cls.__mro__ for key in vars(each) if not key.startswith("_")]
        raise AttributeError(f"there is no Compression.{name}; {did_you_mean(name, known)}")


class CompressionNames(metaclass=_Names):
    """The values of ``compression=`` that all front ends have. Each adds its own fp16 and bf16."""

    none = NoneCompressor
    int8 = CodecCompressor("int8")
    int4 = CodecCompressor("int4")
    fp8 = CodecCompressor("fp8")
    sign = CodecCompressor("sign")

    @staticmethod
    def topk(ratio: float = 0.01) -> CodecCompressor:
        """Send the largest elements, a fraction `ratio` of them."""
        return CodecCompressor(f"topk:{ratio!r}")

    @staticmethod
    def powersgd(rank: int = 4) -> CodecCompressor:
        """Send two factors of `rank` columns instead of each matrix."""
        return CodecCompressor(f"powersgd:{rank!r}")


def check_compression(compression: Any) -> Any:
    """Return `compression` when it can compress; raise ValueError for anything else."""
    if not (
        callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))
    ):
        raise ValueError(
            f"compression={compression!r}: expected one of Compression (for example Compression.fp16 or "
            "Compression.int8), or a class with compress and decompress"
        )
    return compression


def codec_of(compression: Any) -> str | None:
    """Return the codec of a compression, in the spelling of a plan; None when only its own code knows.

    A subclass of one of ours may compress by code of its own, so only ours themselves have one.
    """
    if type(compression) is CodecCompressor:
        return compression.text
    kind: Any = compression if isinstance(compression, type) else type(compression)
    own = vars(kind).get("codec") if issubclass(kind, Compressor) else None
    return own if isinstance(own, str) else None


def name_of(compression: Any) -> str:
    """Return the name of a compression for messages."""
    return getattr(compression, "__name__", type(compression).__name__)

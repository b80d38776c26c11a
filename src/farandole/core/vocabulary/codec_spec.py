"""Codecs by name: what a plan may say, checked before anything starts and without torch.

Written ``name``, ``name:value`` or ``name:key=value,key=value``; a name with a dot is a user-defined codec,
``module.function``.

>>> CodecSpec.parse("topk:0.01").to_text()
'topk:density=0.01'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from .errors import PlanError
from .text import did_you_mean


@dataclass(frozen=True)
class CodecOption:
    """One option of a codec: its default and what it may be."""

    default: Any
    expected: str
    fits: Callable[[Any], bool]


def _density(default: float) -> CodecOption:
    return CodecOption(default, "a share above 0 and at most 1", lambda value: 0 < value <= 1)


_FEEDBACK = CodecOption(True, "true or false", lambda value: True)
_BLOCK = CodecOption(256, "a power of two from 16 to 65536", lambda n: 16 <= n <= 65536 and n & (n - 1) == 0)
_ROUNDING = CodecOption("nearest", "nearest or stochastic", lambda value: value in ("nearest", "stochastic"))
_MOMENTUM = CodecOption(0.0, "at least 0 and below 1", lambda value: 0 <= value < 1)
_CLIP = CodecOption(0.0, "at least 0 (0: no clipping)", lambda value: 0 <= value < math.inf)
_STEPS = CodecOption(0, "at least 0", lambda value: value >= 0)
_SPARSE = {"momentum": _MOMENTUM, "clip_norm": _CLIP, "feedback": _FEEDBACK}

NONE = "none"
"""The codec that sends gradients as they are."""

OPTIONS: Mapping[str, Mapping[str, CodecOption]] = {
    NONE: {},
    "fp16": {"feedback": _FEEDBACK},
    "bf16": {"feedback": _FEEDBACK},
    "int8": {"rounding": _ROUNDING, "block": _BLOCK, "feedback": _FEEDBACK},
    "int4": {"rounding": _ROUNDING, "block": _BLOCK, "feedback": _FEEDBACK},
    "fp8": {"block": _BLOCK, "feedback": _FEEDBACK},
    "sign": {
        "block": CodecOption(512, _BLOCK.expected, _BLOCK.fits),
        "feedback": _FEEDBACK,
    },
    "topk": {
        "density": _density(0.01),
        "exact": CodecOption(False, "true or false", lambda value: True),
        "warmup_steps": _STEPS,
        **_SPARSE,
    },
    "threshold": {
        "value": CodecOption(1e-3, "a positive number", lambda value: 0 < value < math.inf),
        **_SPARSE,
    },
    "randomk": {"density": _density(0.01), **_SPARSE},
    "powersgd": {
        "rank": CodecOption(4, "a whole number of at least 1", lambda value: value >= 1),
        "feedback": _FEEDBACK,
    },
}
"""Options of each codec by name; the first one may be given alone, as in ``topk:0.01``."""

LOSSLESS = (NONE,)
AUTO = "auto"
Granularity = Literal["segment", "matrix"]
"""What a codec is given: 1-D segments of a bucket, or the 2-D gradient of one parameter."""


@dataclass(frozen=True)
class PackedFormat:
    """How a quantized codec writes numbers: `bits` each, and one float32 scale a block where it `has_scales`."""

    bits: int
    block: int
    has_scales: bool = True

    def packed_bytes(self, count: int) -> int:
        """Return the bytes of `count` numbers, whole blocks.

        >>> PackedFormat(bits=8, block=256).packed_bytes(1024)
        1040
        """
        return count * self.bits // 8 + (4 * (count // self.block) if self.has_scales else 0)


BFLOAT16, FLOAT16 = PackedFormat(16, 1, has_scales=False), PackedFormat(16, 1024)
_PACKED_BITS = {"int8": 8, "int4": 4, "fp8": 8, "sign": 1}


@dataclass(frozen=True)
class CodecSpec:
    """A codec and its options. `options` has every option of a known codec."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def is_exact(self) -> bool:
        """Whether nothing is lost."""
        return self.name in LOSSLESS

    @property
    def is_own(self) -> bool:
        """Whether this names a user-defined codec, ``module.function``."""
        return "." in self.name

    @property
    def is_auto(self) -> bool:
        """Whether codecs are chosen while training."""
        return self.name == AUTO

    @property
    def is_applied(self) -> bool:
        """Whether this names one codec that changes what is sent: neither ``none`` nor ``auto``."""
        return not self.is_exact and not self.is_auto

    @property
    def packed_format(self) -> PackedFormat | None:
        """How numbers are written by a quantized codec; None for the others."""
        if self.name in _PACKED_BITS:
            return PackedFormat(_PACKED_BITS[self.name], self.options["block"])
        return {"bf16": BFLOAT16, "fp16": FLOAT16}.get(self.name)

    @property
    def is_quantized(self) -> bool:
        """Whether every element is sent, in fewer bits."""
        return self.packed_format is not None

    @property
    def works_on_shards(self) -> bool:
        """Whether gradients that are summed where they stay may travel by it: exactly, or a byte or more each."""
        return self.is_exact or (self.packed_format is not None and self.packed_format.bits >= 8)

    @property
    def preserves_norm(self) -> bool:
        """Whether the norm of a mean stays what it was, to 1e-4: sent exactly, or with 7 bits or more of each."""
        return self.works_on_shards and self.name != "fp8"  # 4 bits of each: 4e-4

    @property
    def is_low_rank(self) -> bool:
        """Whether matrices are sent as two factors."""
        return self.name == "powersgd"

    @property
    def is_gathered(self) -> bool:
        """Whether each rank sends its entries to all others, so that the bytes grow with the number of ranks."""
        return self.name in ("topk", "threshold")

    @property
    def rank(self) -> int:
        """Rank of the factors of a low-rank codec."""
        return int(self.options["rank"])

    @property
    def granularity(self) -> Granularity:
        """What the codec is given; a user-defined one says so itself, see `codecs.registry`."""
        return "matrix" if self.is_low_rank else "segment"

    @property
    def rounds(self) -> int:
        """Rounds of messages of one exchange that are waited for one after the other."""
        return {"topk": 1, "powersgd": 4}.get(self.name, 2)

    def bytes_per_element(self, rows: float, columns: float = 1.0, *, ranks: int = 2) -> float | None:
        """Return what stands for one float32 of a gradient, in bytes: 4 for ``none``.

        A rank sends 2 (N - 1) / N times as much for each element, N being `ranks`. What each rank sends to all
        others (`is_gathered`) is counted as N / 2 times its bytes, so that the rule holds for it. None where the
        bytes depend on values, or the codec is user-defined.
        """
        packed = self.packed_format
        if packed is not None:
            return packed.bits / 8 + (4 / packed.block if packed.has_scales else 0.0)
        if self.is_low_rank:
            return 4 * self.rank * (rows + columns) / (rows * columns)
        if "density" in self.options:
            density = float(self.options["density"])
            return density * 4 if not self.is_gathered else (4 * density + min(2 * density, 1 / 8)) * ranks / 2
        return 4.0 if self.is_exact else None

    @classmethod
    def parse(cls, text: str, *, where: str = "codec") -> CodecSpec:
        """Read a spec; raise `PlanError` naming the value, what was expected and the nearest name."""
        if not isinstance(text, str):
            raise PlanError(f"{where} = {text!r}: expected the name of a codec")
        name, _, rest = text.strip().partition(":")
        if "." in name:
            if rest or not all(part.isidentifier() for part in name.split(".")):
                raise PlanError(f"{where} = {text!r}: expected module.function for a user-defined codec")
            return cls(name)
        if name == AUTO:
            if rest:
                raise PlanError(f"{where} = {text!r}: {AUTO} has no options")
            return cls(AUTO)
        if name not in OPTIONS:
            raise PlanError(
                f"{where} = {text!r}: unknown codec {name!r}", remedy=did_you_mean(name, [*OPTIONS, AUTO])
            )
        given = _read_options(name, rest, f"{where} = {text!r}")
        options = {**{key: option.default for key, option in OPTIONS[name].items()}, **given}
        if not options.get("feedback", True) and (options.get("momentum") or options.get("clip_norm")):
            raise PlanError(
                f"{where} = {text!r}: momentum and clip_norm keep what was not sent, feedback=false forgets it",
                remedy="leave one of them out",
            )
        return cls(name, options)

    def to_text(self) -> str:
        """Return the shortest text that `parse` reads back as this spec."""
        known = OPTIONS.get(self.name, {})
        changed = [
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for position, (key, value) in enumerate(self.options.items())
            if value != known[key].default
            or (position == 0 and isinstance(value, (int, float)) and key != "feedback")
        ]
        return self.name + (":" + ",".join(changed) if changed else "")


EXACT = CodecSpec(NONE)


def low_rank_pays(rows: int, columns: int, rank: int) -> bool:
    """Return whether the factors are smaller than half of the matrix.

    >>> low_rank_pays(512, 512, 4)
    True
    """
    return rank <= min(rows, columns) and 2 * rank * (rows + columns) <= rows * columns


def _read_options(name: str, rest: str, where: str) -> dict[str, Any]:
    """Return the options that were written behind the colon."""
    known = OPTIONS[name]
    given: dict[str, Any] = {}
    for position, word in enumerate(filter(None, (word.strip() for word in rest.split(",")))):
        if not known:
            raise PlanError(f"{where}: {name} has no options")
        key, equals, value = word.partition("=")
        if not equals:
            if position:
                raise PlanError(f"{where}: expected key=value, got {word!r}")
            key, value = next(iter(known)), word
        key = key.strip()
        if key not in known:
            raise PlanError(f"{where}: {name} has no option {key!r}", remedy=did_you_mean(key, known))
        if key in given:
            raise PlanError(f"{where}: {key} is given twice")
        given[key] = _convert(value.strip(), known[key], f"{where}: {key}")
    return given


def _convert(text: str, option: CodecOption, where: str) -> Any:
    value: Any
    try:
        if isinstance(option.default, bool):
            value = {"true": True, "false": False}[text.lower()]
        else:
            value = type(option.default)(text)
    except (ValueError, KeyError):
        raise PlanError(f"{where} = {text!r}, expected {option.expected}") from None
    if not option.fits(value):
        raise PlanError(f"{where} = {text}, expected {option.expected}")
    return value

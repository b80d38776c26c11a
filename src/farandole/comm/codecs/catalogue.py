"""From a `CodecSpec` to the codec it names."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Literal

from ...core.codec_spec import CodecSpec
from ...core.errors import PlanError
from .feedback import error_feedback, momentum_correction
from .low_rank import power_sgd
from .message import Codec
from .packers import BFloat16, Float16, Integers, Signs
from .quantise import quantised
from .sparse import exact_top, random_k, sampled_top, threshold, top_k, warm_up

Unit = Literal["segment", "matrix"]


@dataclass(frozen=True)
class Made:
    """A codec ready for use, and what it is given: segments of a bucket, or one parameter's matrix."""

    spec: CodecSpec
    codec: Codec
    unit: Unit


def make_codec(spec: CodecSpec) -> Made:
    """Return the codec of `spec`, with error feedback unless it says otherwise.

    Raises `PlanError` for a person's own codec that cannot be found.
    """
    if spec.is_own:
        own = _import(spec.name)
        return Made(
            spec, error_feedback(own), "matrix" if getattr(own, "unit", "segment") == "matrix" else "segment"
        )
    options = dict(spec.options)
    codec = _bare(spec)
    if options.get("momentum"):
        codec = momentum_correction(codec, options["momentum"], options["clip_norm"] or None)
    elif options.get("feedback"):
        codec = error_feedback(codec)
    return Made(spec, codec, "matrix" if spec.name == "powersgd" else "segment")


def bare_codec(spec: CodecSpec) -> Codec:
    """Return the codec of `spec` without feedback, for tests and measurements."""
    return _import(spec.name) if spec.is_own else _bare(spec)


def _bare(spec: CodecSpec) -> Codec:
    options = spec.options
    stochastic = options.get("rounding") == "stochastic"
    if spec.name in ("int8", "int4"):
        return quantised(Integers(int(spec.name[3:]), options["block"], stochastic))
    if spec.name == "topk":
        choose = exact_top if options["exact"] else sampled_top
        return top_k(warm_up(options["density"], options["warmup_steps"]), choose)
    simple = {
        "fp16": lambda: quantised(Float16()),
        "bf16": lambda: quantised(BFloat16()),
        "sign": lambda: quantised(Signs(options["block"])),
        "threshold": lambda: threshold(options["value"]),
        "randomk": lambda: random_k(options["density"]),
        "powersgd": lambda: power_sgd(options["rank"]),
    }
    return simple[spec.name]()


def _import(name: str) -> Codec:
    module_name, _, function = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as problem:
        raise PlanError(
            f"codec {name!r}: {problem}", remedy="is its file on the PYTHONPATH of all ranks?"
        ) from None
    found = getattr(module, function, None)
    if not callable(found):
        raise PlanError(f"codec {name!r}: module {module_name} has no function {function!r}")
    codec: Codec = found
    return codec

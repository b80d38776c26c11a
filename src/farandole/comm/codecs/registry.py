"""From a `CodecSpec` to the codec it names."""

from __future__ import annotations

import importlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

import torch

from ...core.vocabulary.codec_spec import AUTO, CodecSpec
from ...core.vocabulary.errors import PlanError
from ..messages.message import Codec, Encoding, Exchange, GroupRank, State, exact
from .error_feedback import error_feedback, momentum_correction
from .finite import is_finite
from .native_quantize import Fused, fused
from .packing import BFloat16, Float16, Integers, Signs
from .powersgd import power_sgd
from .quantize import Packer, quantised
from .topk import exact_top, random_k, sampled_top, threshold, top_k, warm_up

Granularity = Literal["segment", "matrix"]


@dataclass(frozen=True)
class CodecInstance:
    """A codec ready for use, and what it is given: segments of a bucket, or one parameter's matrix."""

    spec: CodecSpec
    codec: Codec
    unit: Granularity
    has_feedback: bool = False
    """Whether it keeps what was not sent."""
    fused: Fused | None = None
    """The same by native loops, where there are any."""
    leaves_out: bool = False
    """Whether it may send nothing of an element: what is kept of it may overflow while every mean is finite."""

    def exchange(self, grad: torch.Tensor, state: State, seat: GroupRank) -> Exchange:
        """Do what `codec` does, and leave the mean in `grad`: what the engine runs.

        Return whether the mean is finite; of an exact one, which keeps nothing, nobody need know.
        """
        if self.fused is not None and self.fused.fits(grad, state, seat):
            return (yield from self.fused(grad, state, seat))
        mean, _ = yield from self.codec(grad, state, seat)
        grad.copy_(mean)
        return self.spec.is_exact or is_finite(mean)


def make_codec(spec: CodecSpec) -> CodecInstance:
    """Return the codec of `spec`, with error feedback unless it says otherwise.

    It raises `TypeError` for a gradient that is not float32. Raises `PlanError` for a person's own codec that
    cannot be found, and for ``auto``, which is no codec but a wish for one.
    """
    if spec.is_own:
        own = _import(spec.name)
        unit: Granularity = "matrix" if getattr(own, "unit", "segment") == "matrix" else "segment"
        return CodecInstance(
            spec, _float32_only(error_feedback(_guarded(own, spec.name)), spec), unit, True, None, True
        )
    if spec.is_exact:
        return CodecInstance(spec, exact, "segment")
    if spec.name == AUTO:
        raise PlanError(f"codec {AUTO!r}: none was chosen in its place", remedy="name a codec, or none")
    options = spec.options
    codec = _bare(spec)
    corrects = bool(options.get("momentum") or options.get("clip_norm"))
    by_loops = None
    if corrects:
        codec = momentum_correction(codec, options["momentum"], options["clip_norm"] or None)
    elif options.get("feedback"):
        codec = error_feedback(codec)
        packer = _packer(spec)
        by_loops = None if packer is None else fused(packer)
    unit = "matrix" if spec.name == "powersgd" else "segment"
    has_feedback = corrects or bool(options.get("feedback"))
    leaves_out = has_feedback and _packer(spec) is None
    return CodecInstance(spec, _float32_only(codec, spec), unit, has_feedback, by_loops, leaves_out)


def bare_codec(spec: CodecSpec) -> Codec:
    """Return the codec of `spec` without feedback, for tests and measurements."""
    return _import(spec.name) if spec.is_own else _bare(spec)


def _float32_only(codec: Codec, spec: CodecSpec) -> Codec:
    """Refuse other gradients before anything of them is used, and give each rank its own random numbers."""
    stochastic = spec.options.get("rounding") == "stochastic"

    def begin(grad: torch.Tensor, state: State, seat: GroupRank) -> Encoding:
        if grad.dtype != torch.float32:
            found = str(grad.dtype).removeprefix("torch.")
            raise TypeError(f"codec {spec.to_text()}: got a gradient of {found}, expected float32")
        if stochastic:
            # Ranks that rounded by the same draws would err alike, and their mean as much as each of them.
            state.setdefault("seed", seat.rank + 1)
        return codec(grad, state, seat)

    return begin


def _guarded(codec: Codec, name: str) -> Codec:
    """Give a person's own codec a copy that it may overwrite, and check what it returns."""

    def guarded(grad: torch.Tensor, state: State, seat: GroupRank) -> Encoding:
        encoding = codec(grad.clone(), state, seat)
        if not isinstance(encoding, Generator):
            raise TypeError(f"codec {name} returned {type(encoding).__name__}, expected a generator of messages")
        mean, own = yield from encoding
        for what, tensor in (("mean", mean), ("own contribution", own)):
            if tensor.shape != grad.shape:
                raise ValueError(
                    f"codec {name} returned a {what} of shape {tuple(tensor.shape)}, expected {tuple(grad.shape)}"
                )
        return mean, own

    return guarded


def _bare(spec: CodecSpec) -> Codec:
    packer = _packer(spec)
    if packer is not None:
        return quantised(packer)
    options = spec.options
    if spec.name == "topk":
        choose = exact_top if options["exact"] else sampled_top
        return top_k(warm_up(options["density"], options["warmup_steps"]), choose)
    simple = {
        "threshold": lambda: threshold(options["value"]),
        "randomk": lambda: random_k(options["density"]),
        "powersgd": lambda: power_sgd(options["rank"]),
    }
    return simple[spec.name]()


def _packer(spec: CodecSpec) -> Packer | None:
    """Return how the numbers of a quantised codec are packed; None for the other codecs."""
    options = spec.options
    if spec.name in ("int8", "int4"):
        return Integers(int(spec.name[3:]), options["block"], options["rounding"] == "stochastic")
    if spec.name == "sign":
        return Signs(options["block"])
    floats: dict[str, Packer] = {"fp16": Float16(), "bf16": BFloat16()}
    return floats.get(spec.name)


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

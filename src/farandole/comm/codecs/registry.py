"""From a `CodecSpec` to the codec it names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any

import torch

from ...core.vocabulary.codec_spec import EXACT, CodecSpec, Granularity, low_rank_pays
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.spec import Plan, RouteName
from ..messages import (
    Encoded,
    Encoding,
    Exchange,
    Exchanged,
    GroupRank,
    Message,
    accumulates_in_fp32,
    reduce_scatter_all_gather,
)
from .codec import Codec, ErrorFeedback, MomentumCorrection, finite_flag, leaves
from .device_quantize import DeviceQuantize, device_quantize
from .packing import BFloat16, Float8, Float16, Integers, Signs
from .quantize import NativeQuantize, Packer, Quantized, native_quantize
from .sparse_low_rank import PowerSGD, RandomK, Threshold, TopK, exact_top, sampled_top


@dataclass(frozen=True)
class CodecInstance:
    """A codec ready for use, which may overwrite the gradients it is given. A `Codec` of its own."""

    spec: CodecSpec
    codec: Codec[Any]
    granularity: Granularity = "segment"
    has_feedback: bool = False
    """Whether it keeps what was not sent."""
    native: NativeQuantize | None = None
    """The same by native loops on the CPU, where there are any."""
    on_device: DeviceQuantize | None = None
    """The same by kernels on an accelerator, where there are any."""
    leaves_out: bool = False
    """Whether it may send nothing of an element: what is kept of it may overflow while every mean is finite."""

    def init(self, grad: torch.Tensor, group: GroupRank) -> Any:
        """See `Codec`."""
        if self.on_device is not None:
            self.on_device.prepare(grad.device, group)
        return self.codec.init(grad, group)

    def encode(self, grad: torch.Tensor, state: Any, group: GroupRank) -> Encoding:
        """See `Codec`. Raises `TypeError` for a gradient that is not float32, unless the codec is exact."""
        if grad.dtype != torch.float32 and not self.spec.is_exact:
            dtype = str(grad.dtype).removeprefix("torch.")
            raise TypeError(f"codec {self.spec.to_text()}: got a gradient of {dtype}, expected float32")
        return self.codec.encode(grad, state, group)

    @cached_property
    def exchange(self) -> Callable[[torch.Tensor, Any, GroupRank], Exchange]:
        """Exchanges a gradient and leaves the mean in its place: what the reducer runs."""
        exchange: Callable[[torch.Tensor, Any, GroupRank], Exchange] = self._exchange
        for kernels in (self.on_device, self.native):
            if kernels is not None:
                exchange = partial(kernels.exchange_or, exchange)
        return exchange

    def _exchange(self, grad: torch.Tensor, state: Any, group: GroupRank) -> Exchange:
        mean, _, new_state = yield from self.encode(grad, state, group)
        grad.copy_(mean)
        return Exchanged(self.spec.is_exact or finite_flag(mean), new_state)


def make_codec(spec: CodecSpec) -> CodecInstance:
    """Return the codec of `spec`, with error feedback unless it says otherwise.

    Raises:
        PlanError: a user-defined codec cannot be found, or the spec is ``auto``, which names no codec.
    """
    if spec.is_exact:
        return CodecInstance(spec, Exact())
    if spec.is_auto:
        raise PlanError(f"codec {spec.name!r}: none was chosen in its place", remedy="name a codec, or none")
    if spec.is_own:
        user_defined = UserDefined(spec.name, import_codec(spec.name))
        codec = ErrorFeedback(user_defined)
        return CodecInstance(spec, codec, user_defined.granularity, has_feedback=True, leaves_out=True)
    options, bare = spec.options, bare_codec(spec)
    momentum, clip_norm = options.get("momentum", 0.0), options.get("clip_norm", 0.0)
    if not options["feedback"]:
        return CodecInstance(spec, bare, spec.granularity)
    packer = packer_of(spec)
    with_feedback: Codec[Any] = ErrorFeedback(bare)
    if momentum or clip_norm:
        with_feedback = MomentumCorrection(ErrorFeedback(bare), momentum, clip_norm or None)
    native = None if packer is None else native_quantize(packer)
    on_device = None if packer is None else device_quantize(packer)
    return CodecInstance(spec, with_feedback, spec.granularity, True, native, on_device, leaves_out=packer is None)


def runs_on_devices(spec: CodecSpec) -> bool:
    """Return whether a codec exchanges tensors of an accelerator, and asks for no number of them."""
    return not (spec.is_own or spec.is_auto or spec.name == "threshold")


def bare_codec(spec: CodecSpec) -> Codec[Any]:
    """Return the codec of `spec` without feedback, for tests and measurements."""
    packer = packer_of(spec)
    if packer is not None:
        return Quantized(packer)
    if spec.is_own:
        return UserDefined(spec.name, import_codec(spec.name))
    options = spec.options
    if spec.name == "topk":
        choose = exact_top if options["exact"] else sampled_top
        return TopK(options["density"], options["warmup_steps"], choose)
    if spec.name == "threshold":
        return Threshold(options["value"])
    return RandomK(options["density"]) if spec.name == "randomk" else PowerSGD(spec.rank)


def require_packer(spec: CodecSpec) -> Packer:
    """Return how the numbers of a quantised codec are packed."""
    packer = packer_of(spec)
    assert packer is not None, f"{spec.name} packs no numbers"
    return packer


def packer_of(spec: CodecSpec) -> Packer | None:
    """Return how the numbers of a quantized codec are packed; None for the other codecs."""
    packed = spec.packed_format
    if packed is None:
        return None
    if packed.bits == 16:
        return Float16() if packed.has_scales else BFloat16()
    if packed.bits == 1:
        return Signs(packed.block)
    if spec.name == "fp8":
        return Float8(packed.block)
    return Integers(packed.bits, packed.block, spec.options["rounding"] == "stochastic")


# The mean without loss: codec ``none``.


class Exact:
    """The codec ``none``. Takes any floating dtype."""

    def init(self, grad: torch.Tensor, group: GroupRank) -> None:
        """See `Codec`."""

    def encode(self, grad: torch.Tensor, state: None, group: GroupRank) -> Encoding:
        """See `Codec`."""
        if accumulates_in_fp32(grad.dtype):  # rounded once, after the division
            mean = yield from reduce_scatter_all_gather(grad, group, group.size)
            return Encoded(mean, grad)
        mean = (yield Message(grad, "all_reduce")).div_(group.size)  # what was received is this rank's own
        return Encoded(mean, grad)


# Codecs of the user: a generator function, or an object with `init` and `encode`.


@dataclass(frozen=True)
class UserDefined:
    """Gives the user's codec a copy of the gradient, which it may overwrite, and checks what it returns.

    A function ``codec(grad, group)`` keeps nothing and returns ``mean, own``. An object with ``init(grad, group)``
    and ``encode(grad, state, group)`` is a `Codec`, and returns ``mean, own, state``.
    """

    name: str
    codec: Any

    @property
    def granularity(self) -> Granularity:
        """What the codec asks for by an attribute ``granularity``."""
        return "matrix" if getattr(self.codec, "granularity", "segment") == "matrix" else "segment"

    def init(self, grad: torch.Tensor, group: GroupRank) -> Any:
        """See `Codec`."""
        return self.codec.init(grad, group) if hasattr(self.codec, "encode") else None

    def encode(self, grad: torch.Tensor, state: Any, group: GroupRank) -> Encoding:
        """See `Codec`."""
        kept = {key: leaf for key, leaf in leaves(state).items() if isinstance(leaf, torch.Tensor)}
        versions = {key: leaf._version for key, leaf in kept.items()}
        if hasattr(self.codec, "encode"):
            rounds = self.codec.encode(grad.clone(), state, group)
        else:
            rounds = self.codec(grad.clone(), group)
        if not isinstance(rounds, Generator):
            raise TypeError(
                f"codec {self.name} returned {type(rounds).__name__}, expected a generator of messages"
            )
        result = Encoded(*(yield from rounds))
        for what, tensor in (("mean", result.mean), ("own contribution", result.own)):
            if tensor.shape != grad.shape:
                raise ValueError(
                    f"codec {self.name} returned a {what} of shape {tuple(tensor.shape)}, "
                    f"expected {tuple(grad.shape)}"
                )
        for key, leaf in kept.items():
            if leaf._version != versions[key]:
                raise ValueError(
                    f"codec {self.name} wrote into {key!r} of its state, which a dropped step restores: "
                    "return a new state"
                )
        return result


def import_codec(name: str) -> Any:
    """Return the function or object that ``module.attribute`` names; raise `PlanError` if there is none."""
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as problem:
        raise PlanError(
            f"codec {name!r}: {problem}", remedy="is its file on the PYTHONPATH of all ranks?"
        ) from None
    codec = getattr(module, attribute, None)
    if not callable(codec) and not hasattr(codec, "encode"):
        raise PlanError(f"codec {name!r}: module {module_name} has no function {attribute!r}")
    if hasattr(codec, "encode"):
        if not hasattr(codec, "init"):
            raise PlanError(f"codec {name!r} has encode(grad, state, group), but no init(grad, group)")
        _require_parameters(name, codec.init, "init(grad, group)", 2)
        _require_parameters(name, codec.encode, "encode(grad, state, group)", 3)
    else:
        _require_parameters(name, codec, f"{attribute}(grad, group)", 2)
    return codec


def _require_parameters(name: str, function: Any, expected: str, count: int) -> None:
    """Raise `PlanError` if `function` cannot be called with `count` arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a function that does not say what it takes
    try:
        signature.bind(*range(count))
    except TypeError:
        raise PlanError(
            f"codec {name!r}: {getattr(function, '__name__', 'the codec')}{signature} cannot be called "
            f"with {count} arguments",
            remedy=f"expected {expected}; one with a state has init and encode, see docs/fast/slow-networks.md",
        ) from None


# Which parameter travels by which codec.
#
# Small tensors and one-dimensional parameters (biases, norms) go uncompressed, in buckets they share: there is
# nothing to gain, and they are the ones that suffer. So do gradients that are not float32.


LEAST_ELEMENTS = 4096


def choose_codec(name: str, parameter: torch.Tensor, plan: Plan) -> CodecSpec:
    """Return the codec of one parameter.

    Raises `PlanError` when a pattern of ``codec_for`` asks for one that this parameter cannot have.
    """
    pattern = pattern_for(name, plan)
    spec = CodecSpec.parse(plan.codec if pattern is None else plan.codec_for[pattern])
    if not spec.is_applied:
        return EXACT  # auto begins with none, and measures
    reason = _why_not(parameter, spec)
    if not reason:
        return spec
    if pattern is not None and pattern.strip("*?"):
        raise PlanError(
            f"plan: codec_for.{pattern} = {spec.to_text()!r}, but parameter {name!r} {reason}",
            remedy="give it codec none",
        )
    return EXACT


def pattern_for(name: str, plan: Plan) -> str | None:
    """Return the pattern of ``codec_for`` that decides on this parameter: the last that fits, or None."""
    return next((pattern for pattern in reversed(list(plan.codec_for)) if fnmatchcase(name, pattern)), None)


def carrier_of(route: RouteName) -> CodecInstance | None:
    """Return what carries gradients without a codec; None if shared memory or the backend does."""
    return make_codec(EXACT) if route == "hierarchical" else None


def can_have(parameter: torch.Tensor, spec: CodecSpec) -> bool:
    """Return whether this parameter can travel by the codec."""
    return spec.is_exact or not _why_not(parameter, spec)


def refuse_impossible(name: str, parameter: torch.Tensor, spec: CodecSpec) -> None:
    """Raise `PlanError` when this parameter cannot have the codec."""
    reason = "" if spec.is_exact else _why_not(parameter, spec)
    if reason:
        raise PlanError(f"codec {spec.to_text()!r}: parameter {name!r} {reason}", remedy="give it codec none")


def _why_not(parameter: torch.Tensor, spec: CodecSpec) -> str:
    shape = tuple(parameter.shape)
    if parameter.dtype != torch.float32:
        return f"is {str(parameter.dtype).removeprefix('torch.')}, and codecs take float32"
    if parameter.dim() < 2 or parameter.numel() < LEAST_ELEMENTS:
        return f"has shape {shape}: codecs are for matrices of at least {LEAST_ELEMENTS} elements"
    if spec.is_low_rank:
        rows = parameter.shape[0]
        columns = parameter.numel() // rows
        rank = spec.rank
        if rank > min(rows, columns):
            return f"is a {rows} x {columns} matrix, whose rank is below {rank}"
        if not low_rank_pays(rows, columns, rank):
            return f"is a {rows} x {columns} matrix: rank {rank} would not halve it"
    return ""


def why_useless(plan: Plan, chosen: Mapping[str, CodecSpec]) -> str:
    """Return why the codec of the plan changes nothing for these parameters; empty when some parameter has it.

    The plan is for the whole run, and another model of it may be large: this one's gradients stay exact.
    """
    wanted = CodecSpec.parse(plan.codec)
    if not wanted.is_applied or not chosen or any(spec.is_applied for spec in chosen.values()):
        return ""
    count, low_rank = len(chosen), wanted.is_low_rank
    return (
        f"codec = {plan.codec!r} changes nothing here, and gradients stay exact: none of the {count} parameters "
        f"can have it; it takes float32 matrices of at least {LEAST_ELEMENTS} elements"
        + (" that it would halve; a lower rank may" if low_rank else "")
    )

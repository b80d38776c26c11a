"""Which parameter travels by which codec.

Small tensors and one-dimensional parameters (biases, norms) go uncompressed, in buckets they share: there
is nothing to gain, and they are the ones that suffer. So do gradients that are not float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch

from ...core.vocabulary.codec_spec import EXACT, CodecSpec, low_rank_pays
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.spec import Plan, RouteName
from .registry import CodecInstance, make_codec

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

"""Which gradients share a bucket: pure, on sizes, types and devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...core.step_model import bucket_plan as core_plan
from ...core.vocabulary.codec_spec import EXACT, CodecSpec


@dataclass(frozen=True)
class ParamInfo:
    """What the plan of the buckets needs to know of one parameter."""

    index: int
    nbytes: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False
    codec: CodecSpec = EXACT
    is_sharded: bool = False
    """Whether each rank gets its rows of the mean alone."""


def plan_buckets(parameters: Sequence[ParamInfo], *, first_bytes: int, limit_bytes: int) -> list[list[ParamInfo]]:
    """Divide `parameters`, given in the order in which gradients become ready, into buckets.

    By core's rule, which the step model asks too. A bucket holds one dtype on one device for one codec; sparse
    gradients are alone.
    """
    return core_plan.plan_buckets(
        parameters,
        key=lambda info: None if info.sparse else (info.dtype, info.device, info.codec.to_text(), info.is_sharded),
        first_bytes=first_bytes,
        limit_bytes=limit_bytes,
    )

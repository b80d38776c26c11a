"""A plan in one line."""

from __future__ import annotations

from ...core.vocabulary.codec_spec import NONE
from ...core.vocabulary.degrees import ORDER
from ...core.vocabulary.spec import Plan
from ..candidate import Candidate
from .refine import micro_batch_of, passes_of


def in_words(candidate: Candidate) -> str:
    """Return what a plan does, such as ``data 2 x tensor 4, ZeRO-1, 2 x 8 samples, fp32``."""
    plan = candidate.plan
    degrees = [f"{name} {getattr(plan, name)}" for name in ORDER if getattr(plan, name) != 1]
    words = [" x ".join(degrees) or "one rank"]
    if plan.sequence_parallel:
        words.append("tokens divided")
    if plan.zero:
        words.append(f"ZeRO-{plan.zero}")
    if plan.pipeline != 1:
        words.append(plan.schedule + (f" with {plan.chunks} stages a rank" if plan.chunks else ""))
    words.append(f"{passes_of(candidate)} x {micro_batch_of(candidate)} samples a rank")
    words.append("bf16 parameters" if plan.bf16_parameters else plan.precision)
    if isinstance(plan.recompute, tuple):
        words.append(f"{len(plan.recompute)} modules recomputed")
    elif plan.recompute != Plan.recompute:
        words.append(f"{plan.recompute} recomputed")
    if plan.codec != NONE:
        words.append(f"codec {plan.codec}")
    if plan.bucket_bytes:
        words.append(f"buckets of {plan.bucket_bytes / 2**20:g} MiB")
    if plan.route != "auto":
        words.append(f"route {plan.route}")
    return ", ".join(words)

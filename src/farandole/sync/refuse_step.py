"""Steps that no policy can follow."""

from __future__ import annotations

from ..core.vocabulary.errors import ConfigError


def refuse_step(sync: str, *, is_scaled: bool, is_averaged: bool) -> None:
    """Raise `ConfigError` for an optimizer's step by a `GradScaler`, or inside `fd.averaged`.

    `sync`: as the plan says it.
    """
    if is_scaled:
        raise ConfigError(
            f'plan: sync = "{sync}" with a GradScaler, which leaves out steps on some ranks alone',
            remedy='use bfloat16 (precision = "bf16"), or leave sync out',
        )
    if is_averaged:
        raise ConfigError(
            "an optimizer steps inside fd.averaged, where the model has the averaged parameters",
            remedy="leave fd.averaged before the next step",
        )

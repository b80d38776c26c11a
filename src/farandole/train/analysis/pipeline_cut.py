"""Whether a pipeline can cut a model: its code is recorded as a pipeline does it at the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...core.vocabulary.errors import PlanError
from ...parallel.pipeline.layout import starts_of_layers
from ...parallel.pipeline.trace import trace, traced_through
from ..memory.fake_pass import needs_values


def why_not_cut(model: nn.Module, batch: Any) -> str:
    """Return why a pipeline cannot cut `model`; an empty text if it can. Buffers may change."""
    arguments, named = as_call(batch)
    state = torch.get_rng_state()
    try:
        program, _ = trace(model, arguments, named, traced_through(model))
    except PlanError as error:
        return str(error)
    except Exception as error:
        if not needs_values(error):
            raise
        return f"forward of {type(model).__name__} reads values of tensors"
    finally:
        torch.set_rng_state(state)
    if not starts_of_layers(program, model):
        return f"forward of {type(model).__name__} calls one module with parameters alone"
    return ""


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and named arguments that a batch is."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return tuple(batch), {}
    return (batch,), {}

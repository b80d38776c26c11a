"""Whether a pipeline can cut a model: its code is recorded as a pipeline does it at the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.vocabulary.errors import PlanError
from ...parallel.pipeline.layout import starts_of_layers
from ...parallel.pipeline.micro_batches import as_call
from ...parallel.pipeline.trace import trace, traced_through
from ..memory.alike import NotAlikeError, foldable, skipped
from ..memory.fake_pass import needs_values


def why_not_cut(model: nn.Module, batch: Any, *, fold: bool) -> str:
    """Return why a pipeline cannot cut `model`; an empty text if it can. Buffers may change.

    With `fold` some of the blocks that are alike are not run: it is the code between blocks that is recorded.
    """
    kept, left_out = foldable(model) if fold else ([], [])
    if left_out:
        try:
            with skipped(kept[0][1], left_out, copies=True):
                return _why_not(model, batch)
        except NotAlikeError:
            pass
    return _why_not(model, batch)


def _why_not(model: nn.Module, batch: Any) -> str:
    arguments, named = as_call(batch)
    state = torch.get_rng_state()
    try:
        program, _ = trace(model, arguments, named, traced_through(model))
    except PlanError as error:
        return str(error)
    except Exception as error:
        if not needs_values(error):
            raise
        return f"forward of {type(model).__name__} does not run on tensors without values"
    finally:
        torch.set_rng_state(state)
    if not starts_of_layers(program, model):
        return f"forward of {type(model).__name__} calls one module with parameters alone"
    return ""

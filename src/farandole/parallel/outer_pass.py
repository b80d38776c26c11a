"""What surrounds the forward pass of a model's own code, told to what runs that code in pieces: a pipeline.

A model whose class was changed does something before and after its own `forward`. A pipeline calls the layers
and never the model, so it asks here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn


class OuterPass(Protocol):
    """What surrounds the passes of one model."""

    def begin(self, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Check the inputs of a pass; return those of the model's own code, a tuple or a dict."""

    def inside(self) -> AbstractContextManager[None]:
        """Return what the model's own code runs in."""

    def end(self, output: Any) -> Any:
        """Return what the model returns instead of `output`."""


OUTER_PASS = "_farandole_context"
"""The attribute of a model that has it."""


def outer_pass_of(model: nn.Module) -> OuterPass | None:
    """Return what surrounds the passes of `model`; None if nothing does."""
    found: OuterPass | None = vars(model).get(OUTER_PASS)
    return found

"""Steps of an optimizer that hooks alone do not tell: one within a step, and one that raises.

[Note: steps within steps] The hooks of an optimizer run around the `step` of every class that torch ever saw an
object of. So a subclass whose `step` calls ``super().step()`` runs them twice a step, once more inside,
but only in processes that also made an object of the base class. Code that counts steps, clips or measures
wants the outer one. A count of begun and ended steps would not do: a step that raises has no end.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any

from torch.optim import Optimizer

from ...comm.device.untraced import outside_graphs

_AROUND = getattr(Optimizer.profile_hook_step(lambda: None), "__code__", None)
"""The code that torch runs around every `step`."""


def is_nested_step(optimizer: Optimizer) -> bool:
    """Return whether the hook of `optimizer` that calls this runs inside another step of `optimizer`."""
    inner = _around(sys._getframe(1), optimizer)
    return inner is not None and _around(inner.f_back, optimizer) is not None


def _around(frame: FrameType | None, optimizer: Optimizer) -> FrameType | None:
    while frame is not None:
        if frame.f_code is _AROUND and frame.f_locals.get("self") is optimizer:
            return frame
        frame = frame.f_back
    return None


def undo_after_errors(optimizer: Optimizer, undo: Callable[[Optimizer], None]) -> None:
    """Call `undo` when `optimizer.step` raises: no hook runs after it then."""
    inner = outside_graphs(optimizer.step)  # what undoes errors changes the groups during a step

    @functools.wraps(inner)
    def undoing(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except BaseException:
            undo(optimizer)
            raise

    # A method, as the one before it: schedulers of torch take it apart.
    optimizer.step = MethodType(undoing, optimizer)  # type: ignore[method-assign]

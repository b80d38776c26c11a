"""How long a gradient engine lives, and what it must not leave behind.

[Note: who keeps an engine] Its parameters do, whoever holds them: a model, a part of it, an optimizer. When the
last of them is dropped, so is the engine, and the thread that trains closes its connections (`World.let_go`).
torch keeps hooks where Python's collector cannot see them: a hook that knew the engine would keep both for ever.
So hooks know it weakly, and it hangs on the parameter as an attribute, which the collector sees.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch

from ..routes.route import Route
from ..world.world import World

_KEPT = "_farandole_engine"
Ready = Callable[[int, torch.Tensor], None]


class Holds:
    """What an engine holds and must not leave behind; it does not know the engine."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.lines: Route | None = None

    def close_with(self, engine: object) -> weakref.finalize[..., object]:
        """Let go soon after `engine` is dropped, unless the answer is detached before."""
        when_dropped = weakref.finalize(engine, self._world.let_go_later, self.close)
        when_dropped.atexit = False
        return when_dropped

    def close(self) -> None:
        """Let go."""
        lines, self.lines = self.lines, None
        if lines is not None:
            lines.close(self._world)


def hook_parameter(
    parameter: torch.Tensor, engine: object, ready: Ready, index: int
) -> torch.utils.hooks.RemovableHandle:
    """Call ``ready(index, parameter)``, a method of `engine`, when the gradient is accumulated."""
    vars(parameter)[_KEPT] = _Kept(engine)
    told = partial(_tell, weakref.WeakMethod(ready), index)
    handle: torch.utils.hooks.RemovableHandle = parameter.register_post_accumulate_grad_hook(told)
    return handle


def unhook_parameter(parameter: torch.Tensor, handle: torch.utils.hooks.RemovableHandle) -> None:
    """Undo `hook_parameter`."""
    handle.remove()
    vars(parameter).pop(_KEPT, None)


def _tell(method: weakref.WeakMethod[Ready], index: int, parameter: torch.Tensor) -> None:
    ready = method()
    if ready is not None:
        ready(index, parameter)


class _Kept:
    """What keeps an engine alive with a parameter. Pickled as nothing: a copy of a model has no engine."""

    def __init__(self, engine: object) -> None:
        self.engine = engine

    def __reduce__(self) -> tuple[type[OrderedDict[str, str]], tuple[()]]:
        return OrderedDict, ()  # what torch reads with weights_only, too

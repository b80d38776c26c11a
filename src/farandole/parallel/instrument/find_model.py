"""The model that some parameters belong to, found when it is first called.

For front ends that are given an optimizer and no model. A hook on all modules looks at each that is called, until
one holds all the parameters: the outermost, because that is called first. Then, or after a thousand
calls, it is gone and costs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

CALLS = 1000


class ModelFinder:
    """Calls `found` with the module that holds all `parameters`, once it is called. `close` stops looking."""

    def __init__(self, parameters: Iterable[torch.Tensor], found: Callable[[nn.Module], None]) -> None:
        self._wanted = {id(parameter) for parameter in parameters}
        self._found = found
        self._others: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._calls = 0
        self._handle = register_module_forward_pre_hook(self._called) if self._wanted else None

    def close(self) -> None:
        """Take the hook off; may be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _called(self, module: nn.Module, _: Any) -> None:
        if self._handle is None:
            return
        self._calls += 1
        if module not in self._others:
            if self._wanted <= {id(parameter) for parameter in module.parameters()}:
                self.close()
                self._found(module)
                return
            self._others.add(module)
        if self._calls >= CALLS:
            self.close()

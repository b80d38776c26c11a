"""The loss of a batch that has not passed the last stage everywhere yet: a tensor that waits when it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


class LaterLoss(torch.Tensor):
    """A scalar whose value is on its way; whatever reads it waits for it. Results are plain tensors."""

    _finish: Callable[[], torch.Tensor] | None
    _value: torch.Tensor | None

    @classmethod
    def of(cls, finish: Callable[[], torch.Tensor]) -> LaterLoss:
        """Return a loss whose value `finish` waits for. It may raise, and is called once."""
        loss = torch.empty((), dtype=torch.float64).as_subclass(cls)
        loss._finish, loss._value = finish, None
        return loss

    def wait(self) -> torch.Tensor:
        """Return the value, a plain tensor."""
        if self._value is None:
            assert self._finish is not None, "no value, and nothing to wait for"
            self._value = self._finish()
            self._finish = None
        return self._value

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `function` with values."""
        args, kwargs = pytree.tree_map_only(LaterLoss, LaterLoss.wait, (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

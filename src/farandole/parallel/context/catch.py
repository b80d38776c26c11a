"""Calls of `torch.nn.functional.scaled_dot_product_attention`, led to a world's context.

[Note: the function's place] The function is replaced where models look it up, as long as the world has a context:
as torch.nn.functional's, and under the names by which the modules that define the model's classes have imported
it. A call that finds the original all the same is found by the proof at the model's first pass.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from .attention import AttentionCall
from .context import Context

_NAME = "scaled_dot_product_attention"


class AttentionCatcher:
    """What stands in the function's place. The world's session keeps one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._plain = context.attention.plain
        self._places: list[tuple[dict[str, Any], str]] = []
        attend: Any = torch.compiler.disable(self._attend)
        self._standing = attend

    def install(self, model: nn.Module) -> None:
        """Take the function's place where `model` looks it up."""
        defining = [sys.modules.get(type(module).__module__) for module in model.modules()]
        homes = [vars(home) for home in dict.fromkeys(defining) if home is not None]
        for home in [vars(functional), *homes]:
            for name, value in list(home.items()):
                if value is self._plain:
                    home[name] = self._standing
                    self._places.append((home, name))

    def remove(self) -> None:
        """Put torch's own function back."""
        for home, name in self._places:
            if home.get(name) is self._standing:
                home[name] = self._plain
        self._places.clear()

    def _attend(self, *arguments: Any, **named: Any) -> torch.Tensor:
        tensors = [each for each in (*arguments, *named.values()) if isinstance(each, torch.Tensor)]
        if has_torch_function(tensors):  # a function mode: what records the model's code sees one call, this
            found: torch.Tensor = handle_torch_function(self._standing, tensors, *arguments, **named)
            return found
        try:
            call = AttentionCall(*arguments, **named)
        except TypeError:
            return self._plain(*arguments, **named)  # torch's own error
        return self._context.attend(call)

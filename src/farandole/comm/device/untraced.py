"""What torch.compile does not look into.

[Note: torch.compile] Dynamo would trace the code of a group in Python, and fails at its attributes. It is to break
the graph there, as it does at groups in C++. It would trace hooks too: of a backward pass or a step inside of a
compiled function, and they read clocks, count, and wait for other ranks. Its import takes seconds, so it is asked
only where something has imported it, as every optimizer does: nothing is traced before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Return the function as one that breaks a graph. See [Note: torch.compile]."""

    @wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return _disabled(function)(*arguments, **named)
        return function(*arguments, **named)

    return called  # type: ignore[return-value]


def outside_graphs(call: Function) -> Function:
    """Return what a hook calls as what runs between two graphs. See [Note: torch.compile]."""
    return torch.compiler.disable(call) if "torch._dynamo" in sys.modules else call


@cache
def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch.compiler.disable(function, reason="it exchanges with other ranks")
    return disabled

"""What torch.compile does not look into.

[Note: torch.compile] Dynamo would trace the code of a group in Python, and fails at its attributes. It is to break
the graph there, as it does at groups in C++. Its import takes seconds, so it is asked only where the user has
imported it: nothing is traced before.
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


@cache
def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch.compiler.disable(
        function, reason="it belongs to a process group in Python"
    )
    return disabled

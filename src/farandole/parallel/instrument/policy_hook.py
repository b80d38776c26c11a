"""A hook of a model that tells its policy what was done to the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .phase_hooks import reduce_to_nothing


class PolicyHook:
    """A hook of a model that calls its policy. One that was copied or saved with its model does nothing."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *_: Any) -> None:
        """Tell the policy."""
        self._call()

    def __reduce__(self) -> Any:
        return reduce_to_nothing()

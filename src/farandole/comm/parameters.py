"""Facts about parameters: what ranks compare before they train, and what cannot be trained yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.errors import ConfigError


def describe_parameter(name: str, parameter: torch.nn.Parameter) -> tuple[str, list[object]]:
    """Return a name and what must be equal on all ranks, for `agree.require_same`."""
    return f"parameter {name!r}", [list(parameter.shape), str(parameter.dtype).removeprefix("torch.")]


def require_dense_parameters(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Raise `ConfigError` for a parameter that has no memory yet."""
    for name, parameter in parameters:
        if torch.nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"parameter {name!r} has no shape yet", remedy="run one batch through the model first"
            )
        if parameter.is_meta:
            raise ConfigError(
                f"parameter {name!r} is on the meta device", remedy="move the model to a real device first"
            )

"""Facts about parameters: what ranks compare before they train, and what cannot be trained yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.vocabulary.errors import ConfigError

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Lengths and strides of a gradient in its bucket."""


def layout_of(parameter: torch.Tensor) -> Layout:
    """Return how the gradient of `parameter` is to lie in memory: as the parameter does, where that is dense.

    Optimizers have fast paths only for gradients that lie in memory as their parameters do.
    """
    lengths = tuple(parameter.shape)
    strides, step = [0] * len(lengths), 1
    dense = _is_dense(parameter)
    for i in reversed(range(len(lengths))):
        strides[i] = parameter.stride(i) if dense else step
        step *= max(1, lengths[i])
    return lengths, tuple(strides)


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True


def describe_parameter(name: str, parameter: torch.nn.Parameter) -> list[tuple[str, object]]:
    """Return what must be equal on all ranks, with its name for error messages, for `require_same`.

    Strides among it, but for dimensions of one element, where they say nothing: elements are added up in the
    order in which they lie in memory.
    """
    lengths, strides = layout_of(parameter)
    strides_that_count = [stride for stride, length in zip(strides, lengths, strict=True) if length > 1]
    return [
        (f"parameter {name!r}", [list(lengths), str(parameter.dtype).removeprefix("torch.")]),
        (f"strides of parameter {name!r}", strides_that_count),
        (f"device of parameter {name!r}", parameter.device.type),
    ]


class ParameterTable:
    """The parameters of one reducer, by index: their names, and how their gradients are to lie in memory."""

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.index_of = {name: index for index, name in enumerate(self.names)}
        self.index_by_id = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.layouts = [layout_of(parameter) for parameter in self.parameters]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """All parameters with their names."""
        return list(zip(self.names, self.parameters, strict=True))

    def describe(self) -> list[tuple[str, object]]:
        """Return what must be equal on all ranks, and let gradients lie as their parameters do now, for ever."""
        self.layouts = [layout_of(parameter) for parameter in self.parameters]
        return [fact for name, parameter in self.named for fact in describe_parameter(name, parameter)]


def relink_hooks(parameter: torch.Tensor) -> None:
    """Let the hooks after a gradient's accumulation run again: `swap_tensors` leaves them to the other tensor."""
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is not None and parameter.requires_grad and parameter.is_leaf:
        parameter._post_accumulate_grad_hooks = hooks


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

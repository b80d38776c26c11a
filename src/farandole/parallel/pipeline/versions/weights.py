"""The weights that the passes of one batch use, whatever the optimizer does to the parameters meanwhile.

[Note: memory of two versions] Passes of a batch run on leaves that share the parameters' memory. When the batch
is left open, the parameters get other memory with the same numbers, which the optimizer then changes: that of the
batch before, whose passes have ended. So there are two copies of the weights, and one is copied in a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ....comm.gradients.grad_ownership import replace_grad


class WeightVersion:
    """The weights of parameters as they are now, for one batch. See [Note: memory of two versions]."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """`parameters`: those of `model` that train and are here."""
        # `data` has a version counter of its own: changes of the parameter are none of the leaf.
        self._leaves = [(parameter, nn.Parameter(parameter.data)) for parameter in parameters]
        leaf_of = {id(parameter): leaf for parameter, leaf in self._leaves}
        self._homes = [
            (module, name, parameter, leaf_of[id(parameter)])
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in leaf_of
        ]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the modules compute with these weights: forward passes, and what backward passes compute again."""
        for module, name, _, leaf in self._homes:
            _assign(module, name, leaf)
        try:
            yield
        finally:
            for module, name, parameter, _ in self._homes:
                _assign(module, name, parameter)

    @torch.no_grad()
    def part_from_parameters(self, before: WeightVersion | None) -> None:
        """Give the parameters other memory, so that an optimizer does not change these weights.

        `before`: a version whose passes have ended; its memory is used.
        """
        ended = {} if before is None else {id(parameter): leaf for parameter, leaf in before._leaves}
        for parameter, _ in self._leaves:
            memory: torch.Tensor | None = ended.get(id(parameter))
            fits = memory is not None and (memory.shape, memory.stride(), memory.dtype, memory.device) == (
                parameter.shape, parameter.stride(), parameter.dtype, parameter.device,
            )  # fmt: skip
            if memory is None or not fits or memory.data_ptr() == parameter.data_ptr():
                memory = torch.empty_like(parameter)
            parameter.data = memory.data.copy_(parameter.data)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the gradients of the passes to those of the parameters, which may have none."""
        for parameter, leaf in self._leaves:
            gradient = leaf.grad
            if gradient is None:
                continue
            replace_grad(leaf, None)
            if parameter.grad is None:
                replace_grad(parameter, gradient)
            else:
                parameter.grad.add_(gradient)


def _assign(module: nn.Module, name: str, tensor: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = tensor
    else:  # such as recurrent layers, which keep a list of their weights
        setattr(module, name, tensor)

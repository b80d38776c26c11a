"""One forward and backward pass of a model on fake tensors: its operations run without memory, and are counted.

Fake tensors are tensors of the meta device that say they are on another one. On the meta device itself some
operations are others than in a training: attention is computed by the formula there, with its whole matrix of
scores, and dropout keeps another mask.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves, tree_map

from ...plan.memory import ActivationFacts
from .live_storages import LiveStorages
from .user_code import errors_of_user
from .user_pass import Loss, forward_loss, passes_of

_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
_NO_VALUES = re.compile(r"is not supported for tensor subclasses|\bmeta (tensors?|device)\b", re.IGNORECASE)
"""What torch says of `.numpy()` and `.tolist()` of a fake tensor, and of values of a tensor on the meta device."""


def needs_values(error: BaseException) -> bool:
    """Whether code failed because it reads values of tensors, which are not there."""
    return isinstance(error, _NEEDS_VALUES) or _NO_VALUES.search(str(error)) is not None


def fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors are made without memory. Real tensors that operations meet become fake."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def make_fake(model: nn.Module, device: str, dtype: torch.dtype | None) -> None:
    """Replace the tensors of `model` by fake ones on `device`, in a fake mode that is on.

    Parameters and buffers, and tensors that are plain attributes of modules. Those of floating point get `dtype`;
    None: their own.
    """
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if id(tensor) not in made:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=kind, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: fake(tensor) for name, tensor in tensors.items()})
        for name, value in list(vars(module).items()):
            if name[:1] != "_" and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
                vars(module)[name] = tree_map(fake, value)


def run_pass(model: nn.Module, batch: Any, loss: Loss | None, *, device: str, precision: str) -> ActivationFacts:
    """Return the memory of one forward and backward pass, in a fake mode that is on.

    A gradient counts until it is accumulated: then it lies in a bucket, among gradients. Arguments are those of
    `user_pass.forward_loss`. Raises `ConfigError` with the user's file and line for what the model raises, but
    errors of `needs_values` as they are.
    """
    parameters = list(model.parameters())
    live = LiveStorages([*parameters, *model.buffers()], copied=parameters)
    trainable = [each for each in parameters if each.requires_grad]
    hooks = [each.register_post_accumulate_grad_hook(partial(_stop_counting, live)) for each in trainable]
    for tensor in tree_leaves(batch):
        if isinstance(tensor, torch.Tensor):
            live.count(tensor)
    with live, silent_logger():
        with errors_of_pass(passes_of(loss)):
            scalar = forward_loss(model, batch, loss, device=device, precision=precision)
        saved_bytes, weight_copy_bytes = live.live_bytes, live.copy_bytes
        with errors_of_pass("the backward pass"):
            scalar.backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad(set_to_none=True)
    return ActivationFacts(saved_bytes, weight_copy_bytes, live.peak_bytes)


def _stop_counting(live: LiveStorages, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None, "the hook runs after a gradient was accumulated"
    live.stop_counting(parameter.grad)


@contextlib.contextmanager
def silent_logger() -> Iterator[None]:
    """Keep torch from logging what it also raises."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def errors_of_pass(doing: str) -> Iterator[None]:
    """As `errors_of_user`, but errors of `needs_values` come as they are."""
    kept: BaseException | None = None
    with errors_of_user(doing):
        try:
            yield
        except Exception as error:
            if not needs_values(error):
                raise
            kept = error
    if kept is not None:
        raise kept

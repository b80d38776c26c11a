"""One forward pass of a user's model as a loop would make it: its call, its loss, autocast, and recomputation."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from ...core.vocabulary.errors import ConfigError
from ...parallel.blocks import repeated_blocks
from ...parallel.lower_precision import own_casts
from ...parallel.pipeline.micro_batches import as_call

Loss = Callable[[Any, Any], torch.Tensor]
"""From what a model returns, and the batch, to a scalar."""


@contextlib.contextmanager
def recomputed(model: nn.Module, recompute: str, *, draws_again: bool = False) -> Iterator[None]:
    """Apply one of `farandole.plan.memory.RECOMPUTE`: "blocks" keep their inputs, and compute the rest again.

    `draws_again`: with the same random numbers. Their state is small, and fake tensors have none.
    """
    blocks = [module for _, module in repeated_blocks(model)] if recompute == "blocks" else []
    before = [vars(block).get("forward") for block in blocks]
    try:
        for block in blocks:
            again = partial(
                checkpoint,
                block.forward,
                use_reentrant=False,
                preserve_rng_state=draws_again,
                context_fn=_contexts,
            )
            vars(block)["forward"] = again
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            if forward is None:
                vars(block).pop("forward", None)
            else:
                vars(block)["forward"] = forward


def _contexts() -> tuple[Any, Any]:
    return own_casts(), own_casts()


def weight_type(precision: str) -> torch.dtype | None:
    """Return the type that parameters and batch are converted to in a precision; None: they stay as they are."""
    return torch.bfloat16 if precision == "bf16-weights" else None


def batch_in(dtype: torch.dtype | None, batch: Any, device: torch.device | str | None = None) -> Any:
    """Return `batch` on `device`, with its floating-point tensors in `dtype`; None: as they are."""

    def move(each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        return each.to(device=device, dtype=dtype if each.is_floating_point() else None)

    return tree_map(move, batch)


def forward_loss(model: nn.Module, batch: Any, loss: Loss | None, *, device: str, precision: str) -> torch.Tensor:
    """Return the loss of one forward pass, a scalar; the backward pass is the caller's.

    Args:
        model: the model.
        batch: a tensor, a sequence of positional arguments, or a mapping of keyword arguments; with a loss also a
            pair of one of these and targets: see `inputs_and_targets`.
        loss: see `Loss`; None: the sum of what the model returns, or its ``loss``.
        device: "cpu" or "cuda", for autocast.
        precision: one of `farandole.plan.memory.PRECISIONS`.

    Raises `ConfigError` if there is no scalar, or if it depends on no trainable parameter.
    """
    autocast = torch.autocast(device, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    with autocast:
        inputs, targets = inputs_and_targets(model, batch, loss)
        arguments, named = as_call(inputs)
        scalar = scalar_loss(model(*arguments, **named), targets, loss)
    if not scalar.requires_grad:
        raise ConfigError(
            "what the model returns depends on no trainable parameter, so there is no backward pass",
            remedy="name a function of outputs and batch with --loss, or let parameters require gradients",
        )
    return scalar


def passes_of(loss: Loss | None) -> str:
    """Return what `forward_loss` runs, in words."""
    return "the forward pass" if loss is None else "the forward pass, or the loss,"


def inputs_and_targets(model: nn.Module, batch: Any, loss: Loss | None) -> tuple[Any, Any]:
    """Return what the model is called with, and what the loss gets beside its outputs: the batch is both.

    But with a loss, a pair that `forward` does not take as two arguments, or that begins with a dict, is (inputs,
    targets), as of a loader.
    """
    if loss is None or not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return batch, batch
    takes_one = isinstance(batch[0], Mapping) or (_takes(model, batch[0]) and not _takes(model, batch))
    return (batch[0], batch[1]) if takes_one else (batch, batch)


def _takes(model: nn.Module, inputs: Any) -> bool:
    arguments, named = as_call(inputs)
    try:
        inspect.signature(model.forward).bind(*arguments, **named)
    except (TypeError, ValueError):
        return False
    return True


def _check_loss(loss: Loss) -> None:
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # of no Python function
        return
    try:
        signature.bind(None, None)
    except TypeError as problem:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise ConfigError(
            f"--loss: {name}{signature} is called with two arguments, as loss(outputs, batch): {problem}",
            remedy=f"write it as: def {name}(outputs, batch): ...",
        ) from None


def scalar_loss(outputs: Any, batch: Any, loss: Loss | None) -> torch.Tensor:
    """Return the loss of what a model returned: see `forward_loss`. Raises `ConfigError` if it is no scalar."""
    if loss is not None:
        _check_loss(loss)
        scalar = loss(outputs, batch)
    elif isinstance(getattr(outputs, "loss", None), torch.Tensor):
        scalar = outputs.loss
    else:
        leaves = [each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor)]
        sums = [each.sum() for each in leaves if each.is_floating_point()]
        if not sums:
            raise ConfigError(
                f"the model returns {type(outputs).__name__} without a floating-point tensor to sum",
                remedy="name a function of outputs and batch with --loss",
            )
        scalar = torch.stack([each.float() for each in sums]).sum() if len(sums) > 1 else sums[0]
    if not isinstance(scalar, torch.Tensor) or scalar.numel() != 1:
        found = tuple(scalar.shape) if isinstance(scalar, torch.Tensor) else type(scalar).__name__
        raise ConfigError(f"--loss returned {found}, expected a tensor with one element")
    return scalar

"""A batch, divided along its first dimension into micro-batches of equal size.

[Note: shares of micro-batches] The loss of a micro-batch is a mean. With c_i of C counted targets in micro-batch i
the mean over the batch is the sum of (c_i / C) times each loss; by samples these shares are equal. A micro-batch
without a counted target has no loss (it would be 0 / 0): its passes run all the same, with gradients of zero,
because other ranks take part in them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...core.vocabulary.errors import ConfigError

LossFunction = Callable[[Any, Any], torch.Tensor]
"""Called with output and targets."""
_IGNORED = -100
"""The target that torch's losses do not count."""


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one batch. See [Note: shares of micro-batches]."""

    parts: list[tuple[Any, Any]]
    """Inputs and targets."""
    shares: list[float]
    """What each counts in the mean over the batch; they add up to 1."""

    def loss_of(self, loss_function: LossFunction, number: int, output: Any) -> torch.Tensor:
        """Return the loss of micro-batch `number`, whose `output` this is."""
        leaves = [each for each in tensors_of(output) if each.requires_grad] if not self.shares[number] else []
        if leaves:
            return torch.stack([(each.float() * 0.0).sum() for each in leaves]).sum()
        return loss_function(output, self.parts[number][1])

    def mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Return the mean over the batch of the `losses` of its micro-batches, in order, as float64."""
        total = torch.zeros((), dtype=torch.float64, device=losses[0].device)
        for loss, share in zip(losses, self.shares, strict=True):
            total += loss.double() * share if share else 0.0
        return total

    def unequal(self) -> ConfigError | None:
        """Return what is wrong if micro-batches have unequal numbers of targets of -100; None if nothing is."""
        ignored = self.ignored()
        return unequal_targets(f" ({', '.join(map(str, ignored))})") if len(set(ignored)) > 1 else None

    def ignored(self) -> list[int]:
        """Return how many targets of each micro-batch are -100; nothing if none of them can be."""
        found = [
            [(each == _IGNORED).sum() for each in tensors_of(targets) if each.dtype in (torch.int64, torch.int32)]
            for _, targets in self.parts
        ]
        if len(found) < 2 or not all(found):
            return []
        numbers: list[int] = torch.stack([torch.stack(each).sum() for each in found]).tolist()
        return numbers


def unequal_targets(where: str) -> ConfigError:
    """Return the error for micro-batches that do not count as much as each other."""
    return ConfigError(
        f"micro-batches have unequal numbers of targets of -100{where}, so the mean of their losses is not the "
        "mean over the targets that count",
        remedy="give count=lambda targets: (targets != -100).sum(); count=lambda targets: 1 if the loss is "
        "divided by the same number in each micro-batch",
    )


def whole_parts(samples: Sequence[int], most: int) -> int:
    """Return the largest number of micro-batches, at most `most`, into which batches of `samples` each divide."""
    together = math.gcd(*samples)
    return next(count for count in range(most, 0, -1) if together % count == 0)


def samples_in(inputs: Any) -> int:
    """Return the samples of a batch by its first tensor; 1 without one."""
    return next((len(each) for each in tensors_of(inputs) if each.dim()), 1)


def split_batch(inputs: Any, targets: Any, count: int) -> list[tuple[Any, Any]]:
    """Return `count` pairs of inputs and targets. Values that are no tensors, or have no dimension, stay whole.

    Raises `ConfigError` when tensors differ in their number of samples, or it is no multiple of `count`.
    """
    leaves, structure = pytree.tree_flatten((inputs, targets))
    rows = [(leaf.shape[0], leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    sizes = sorted({size for size, _ in rows})
    if count == 1:
        return [(inputs, targets)]
    if len(sizes) > 1:
        shapes = ", ".join(str(list(tensor.shape)) for _, tensor in rows[:4])
        raise ConfigError(
            f"fd.step: the tensors of the batch have {' and '.join(map(str, sizes))} samples (shapes {shapes}), "
            "and are divided along their first dimension",
            remedy="expand tensors to one entry a sample, or give numbers as plain numbers",
        )
    samples = sizes[0] if sizes else 0
    if not samples or samples % count:
        less = samples - samples % count
        remedy = f"use batches of a multiple of {count} samples" + (
            f", such as {less} or {less + count}" * bool(less)
        )
        raise ConfigError(
            f"fd.step: a batch of {samples} samples does not divide into {count} micro-batches",
            remedy=f"{remedy} (drop_last=True in the DataLoader), or set micro_batches in the plan",
        )
    size = samples // count
    parts = []
    for number in range(count):
        cut = [
            leaf[number * size : (number + 1) * size] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf
            for leaf in leaves
        ]
        parts.append(pytree.tree_unflatten(cut, structure))
    return parts


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that `inputs` are of the model: of a tuple its entries, of a dict named ones."""
    if isinstance(inputs, dict):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    if hasattr(inputs, "keys") and hasattr(inputs, "__getitem__"):  # the encoding of a tokenizer
        return (), {key: inputs[key] for key in inputs.keys()}  # noqa: SIM118 - it is no dict
    return (inputs,), {}


def tensors_of(nest: Any) -> list[torch.Tensor]:
    """Return the tensors in `nest`, in order."""
    return [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


def describe(nest: Any) -> str:
    """Return shapes, types and plain values of `nest`: equal texts, equal programs."""
    leaves, structure = pytree.tree_flatten(nest)
    texts = [
        f"{list(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else repr(leaf)[:200]
        for leaf in leaves
    ]
    return f"{texts} {structure}"


def fingerprint(inputs: Any) -> int:
    """Return a number that differs for other samples, most likely: of the first and last bytes of each tensor."""
    crc = 0
    for tensor in tensors_of(inputs)[:64]:
        flat = tensor.detach().reshape(-1)
        ends = torch.cat([flat[:16], flat[-16:]]).cpu().contiguous()
        crc = zlib.crc32(ends.view(torch.uint8).numpy().tobytes() if ends.numel() else b"", crc)
    return crc

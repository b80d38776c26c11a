"""`fd.chunked_cross_entropy`: the linear head and cross-entropy a chunk of rows at a time, logits never whole.

[Note: gradients in the forward pass] The loss is one number, so its gradients are known up to one factor as soon
as a chunk's logits are: they are taken then, and the logits dropped. Backward multiplies by the factor. This is
the idea of Liger Kernel (Hsu et al. 2024, section 3.2) and of "Cut Your Losses in Large-Vocabulary Language
Models" (Wijmans et al. 2024), here out of matrix products that torch has.

[Note: half precision] Sums, softmax and the gradient of the head are in float32. The mean's divisor and the
factor of backward come last, so that a float16 chunk holds numbers around 1, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ..core.vocabulary.errors import ConfigError
from ..parallel.split import split_of

_CHUNK_ELEMENTS = 2**24
"""Logits of a chunk by default: 64 MiB in float32. Each chunk adds to the whole gradient of the head."""
_HEADROOM = {torch.float16: 1024.0}
"""Factor of a chunk's gradients while they are float16, whose smallest numbers are 6e-8."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    chunk_rows: int | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return ``cross_entropy(linear(hidden, weight, bias), targets)`` without ever holding all logits.

    Value and gradients are those of the plain composition, in another order of summation. Instead of logits and
    their gradient (rows x classes, twice) a chunk of them is in memory. Autocast applies as to `linear`.

    Args:
        hidden: activations, ``[..., features]``, floating-point.
        weight: the head's weight, ``[classes, features]``; it may be an embedding's too.
        targets: class indices, int64, with the shape of `hidden` without its last dimension.
        bias: the head's bias, ``[classes]``.
        chunk_rows: rows of a chunk; by default so many that a chunk's logits are 64 MiB in float32.
        reduction: the mean over targets that are not ignored, or the sum.
        ignore_index: a target with this value counts for nothing.
        label_smoothing: from 0.0 to 1.0, as for `torch.nn.functional.cross_entropy`.

    Returns:
        The loss: a float32 scalar, float64 for float64 inputs.

    Raises:
        ConfigError: shapes, types or options do not fit, an input is a DTensor; or backward runs a second time
            through one call without ``retain_graph``. Second derivatives are a RuntimeError.
    """
    _refuse(hidden, weight, targets, bias)
    if reduction not in ("mean", "sum"):
        raise _wrong(
            f'reduction = {reduction!r}, expected "mean" or "sum"',
            remedy="use torch.nn.functional.cross_entropy for the loss of each row",
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise _wrong(f"label_smoothing = {label_smoothing!r}, expected a number from 0.0 to 1.0")
    if targets.device.type == "cpu":
        _refuse_classes(targets, weight.shape[0], ignore_index)
    if chunk_rows is None:
        chunk_rows = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[0]))
    if not isinstance(chunk_rows, int) or chunk_rows < 1:
        raise _wrong(f"chunk_rows = {chunk_rows!r}, expected a whole number of at least 1")
    return loss_by_chunks(
        hidden, head=weight, bias=bias, target=targets, chunk_rows=chunk_rows,
        reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing,
    )  # fmt: skip


@dataclass(frozen=True)
class _Options:
    labels: torch.Tensor
    chunk_rows: int
    is_mean: bool
    ignore_index: int
    label_smoothing: float
    with_gradients: bool


def loss_by_chunks(
    hidden: torch.Tensor, *, head: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor,
    chunk_rows: int, reduction: str, ignore_index: int, label_smoothing: float,
) -> torch.Tensor:  # fmt: skip
    """Return the loss. Verification stands in front of this function, with these names."""
    labels, is_mean = target.reshape(-1), reduction == "mean"
    options = _Options(labels, chunk_rows, is_mean, ignore_index, label_smoothing, torch.is_grad_enabled())
    loss: torch.Tensor = _ChunkedCrossEntropy.apply(hidden, head, bias, options)
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """See [Note: gradients in the forward pass]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None, options: _Options
    ) -> torch.Tensor:
        kind = hidden.device.type
        dtype = _computed_in(hidden)
        needed = tuple(ctx.needs_input_grad[:3]) if options.with_gradients else (False, False, False)
        with torch.autocast(kind, enabled=False):
            rows = hidden.reshape(-1, hidden.shape[-1])
            inputs = (rows, head.to(dtype), None if bias is None else bias.to(dtype))
            chunks = _Chunks(inputs, options, needed)
            loss = chunks.run()
        ctx.gradients = chunks.gradients
        ctx.factor = chunks.factor / _HEADROOM.get(dtype, 1.0)
        ctx.like = (hidden.shape, hidden.dtype, head.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise _wrong(
                "backward runs a second time through one call", remedy="give the first one retain_graph=True"
            )
        gradients, is_last = ctx.gradients, not torch._C._autograd._get_current_graph_task_keep_graph()
        if is_last:
            ctx.gradients = None  # multiplied where they are: a second head's worth of memory is not needed
        shape, *dtypes = ctx.like
        with torch.no_grad():
            factor = grad_output * ctx.factor
            results = [
                None if each is None else (each.mul_(factor) if is_last else each * factor).to(dtype)
                for each, dtype in zip(gradients, dtypes, strict=True)
            ]
        if results[0] is not None:
            results[0] = results[0].reshape(shape)
        return (*_refuse_second_derivative(results), None)


class _Chunks:
    """One forward pass over all chunks: the loss, and gradients of the sum times the headroom."""

    def __init__(
        self, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], options: _Options,
        needed: tuple[bool, ...],
    ) -> None:  # fmt: skip
        """`inputs`: rows, head and bias; `needed`: which of them need a gradient."""
        self._rows, self._head, self._bias = inputs
        self._options = options
        self._valid = options.labels != options.ignore_index
        self._labels = options.labels.masked_fill(~self._valid, 0)
        self._wide = torch.float64 if self._head.dtype == torch.float64 else torch.float32
        self.gradients = [
            torch.zeros_like(each, dtype=self._wide) if wanted and each is not None else None
            for each, wanted in zip(inputs, needed, strict=True)
        ]
        """Gradients of rows, head and bias, where they are needed."""
        count = self._valid.sum().to(self._wide)
        self.factor = 1.0 / count if options.is_mean else torch.ones_like(count)

    def run(self) -> torch.Tensor:
        total = torch.zeros((), dtype=self._wide, device=self._rows.device)
        for begin, end in self._bounds():
            total += self._chunk(begin, end)
        return total * self.factor

    def _bounds(self) -> Iterator[tuple[int, int]]:
        count, step = self._rows.shape[0], self._options.chunk_rows
        for begin in range(0, count, step):
            yield begin, min(count, begin + step)

    def _chunk(self, begin: int, end: int) -> torch.Tensor:
        smoothing = self._options.label_smoothing
        rows = self._rows[begin:end].to(self._head.dtype)
        labels, valid = self._labels[begin:end, None], self._valid[begin:end]
        log_p = functional.log_softmax(functional.linear(rows, self._head, self._bias), 1, dtype=self._wide)
        losses = log_p.gather(1, labels)[:, 0] * (smoothing - 1.0)
        if smoothing:
            losses -= log_p.mean(1) * smoothing
        total = losses.masked_fill_(~valid, 0.0).sum()
        if any(each is not None for each in self.gradients):
            self._add_gradients(log_p.exp_(), rows, labels, valid, begin)
        return total

    def _add_gradients(
        self, p: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor, begin: int
    ) -> None:
        """`p`: probabilities, overwritten. The gradient of a row's logits is p less what the target wants."""
        smoothing = self._options.label_smoothing
        dtype = self._head.dtype
        if smoothing:
            p -= smoothing / p.shape[1]
        p.scatter_add_(1, labels, torch.full_like(labels, smoothing - 1.0, dtype=self._wide))
        if p.device.type != "cpu" or not bool(valid.all()):  # an accelerator would be waited for
            p.masked_fill_(~valid[:, None], 0.0)
        if dtype in _HEADROOM:
            p *= _HEADROOM[dtype]
        of_logits = p.to(dtype)
        of_rows, of_head, of_bias = self.gradients
        if of_rows is not None:
            of_rows[begin : begin + len(rows)] = of_logits @ self._head
        if of_head is not None and dtype == of_head.dtype:
            of_head.addmm_(of_logits.t(), rows)
        elif of_head is not None:
            of_head += of_logits.t() @ rows
        if of_bias is not None:
            of_bias += of_logits.sum(0, dtype=self._wide)


def _refuse_second_derivative(gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """With ``create_graph``, return gradients that raise when they are differentiated: they have no graph."""
    if not torch.is_grad_enabled():
        return gradients
    error = "chunked_cross_entropy has no second derivative; use torch.nn.functional.cross_entropy"
    refuse = torch._C._functions.DelayedError(error, 1)
    return [None if each is None else refuse(each.detach().requires_grad_()) for each in gradients]


def _computed_in(hidden: torch.Tensor) -> torch.dtype:
    """Return the type in which `linear` computes: autocast's, which leaves float64 alone."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def _refuse(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: torch.Tensor | None) -> None:
    if split_of(weight) is not None:
        raise _wrong(
            f"the head's weight is split over ranks (tensor parallel): {weight.shape[0]} classes are here",
            remedy="call the output layer and torch.nn.functional.cross_entropy: logits stay split there",
        )
    for name, each in (("hidden", hidden), ("weight", weight), ("targets", targets), ("bias", bias)):
        if isinstance(each, DTensor):
            raise _wrong(f"{name} is a DTensor", remedy="give the local tensor, or use torch's cross_entropy")
        if not isinstance(each, torch.Tensor) and (name != "bias" or each is not None):
            raise _wrong(f"{name} is a {type(each).__name__}, expected a tensor")
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise _wrong(
            f"hidden has the shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}, expected "
            "[..., features] and [classes, features]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise _wrong(f"bias has the shape {tuple(bias.shape)}, expected {tuple(weight.shape[:1])}")
    if targets.dtype != torch.int64 or targets.shape != hidden.shape[:-1]:
        raise _wrong(
            f"targets are {targets.dtype} of the shape {tuple(targets.shape)}, expected class indices, "
            f"torch.int64 of the shape {tuple(hidden.shape[:-1])}"
        )
    floats = [each for each in (hidden, weight, bias) if each is not None]
    same = len({each.dtype for each in floats}) == 1 or torch.is_autocast_enabled(hidden.device.type)
    if not same or not all(each.is_floating_point() for each in floats):
        raise _wrong(f"hidden is {hidden.dtype} and weight is {weight.dtype}, expected one floating-point type")


def _refuse_classes(targets: torch.Tensor, classes: int, ignore_index: int) -> None:
    """An accelerator notices a wrong class by itself: looking would wait for it."""
    bad = targets[((targets < 0) | (targets >= classes)) & (targets != ignore_index)]
    if bad.numel():
        raise _wrong(f"target {int(bad[0])}, expected a class from 0 to {classes - 1}, or {ignore_index}")


def _wrong(what: str, *, remedy: str = "") -> ConfigError:
    return ConfigError(f"chunked_cross_entropy: {what}", remedy=remedy)

"""Run an operation where it is called: at once, or in the graph that is being made; with its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..installed import tf
from .blocking import run_now
from .call import OperationCall
from .graph import put_in_graph

Gradient = Callable[..., Any]
"""Takes the gradients of the results, returns those of the tensors."""


def run(
    call: OperationCall,
    tensors: Sequence[Any],
    gradient: Gradient,
    *,
    types: Sequence[Any] | None = None,
    shapes: Sequence[Any] | None = None,
) -> list[Any]:
    """Return the results of an operation. Their `types` and `shapes`: by default those of the tensors."""
    types = [tensor.dtype for tensor in tensors] if types is None else types
    shapes = [tensor.shape for tensor in tensors] if shapes is None else shapes

    def begin(given: Sequence[Any]) -> list[Any]:
        if tf.executing_eagerly():
            return run_now(call, given)
        return put_in_graph(call, given, types, shapes)

    if tf.executing_eagerly() and not _is_recorded():
        return begin(tensors)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*given: Any) -> tuple[list[Any], Gradient]:
        return begin(given), gradient

    return list(differentiable(*tensors))


def run_plain(call: OperationCall, tensors: Sequence[Any]) -> list[Any]:
    """Return the results of an operation without a gradient, of the types and shapes of the tensors."""
    if tf.executing_eagerly():
        return run_now(call, tensors)
    return put_in_graph(call, tensors, [each.dtype for each in tensors], [each.shape for each in tensors])


def _is_recorded() -> bool:
    """Return whether a tape may watch: without one, the tenfold cost of a gradient is saved."""
    try:
        from tensorflow.python.eager.record import could_possibly_record
    except ImportError:  # a private place of TensorFlow: it may move
        return True
    return bool(could_possibly_record())

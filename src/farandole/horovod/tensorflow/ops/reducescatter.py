"""Reducescatter: every rank gets its part of the rows of the sum or mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...common.compression import CodecCompressor, check_compression, name_of
from ...common.process_sets import ProcessSet, global_process_set
from ...common.reductions import Average, Sum, check_sum_or_average, reduction_of
from ..calls.call import OperationCall
from ..calls.run import run
from ..compression import Compression
from ..installed import tf
from .allgather import allgather
from .inputs import as_tensors, check_group, not_converted, refuse_scalar, rows_unknown, size_of


@not_converted
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce every rank's `tensor` and return this rank's rows; the first ranks get one more where it is uneven.

    Args:
        tensor: shape (rows, ...), the same on all ranks.
        device_dense: ignored; Horovod has this argument.
        compression: one of `Compression`, but no codec.
        op: Average or Sum.
        name: the same on all ranks; by default a counter makes one, in graphs the name of the tensor.
        process_set: the ranks that take part.
        ignore_name_scope: whether the name is without the scopes of the graph.
        prescale_factor: multiplied before the reduction.
        postscale_factor: multiplied after the reduction.
    """
    factors = (prescale_factor, postscale_factor)
    return _scatter([tensor], compression, op, name, process_set, ignore_name_scope, factors, grouped=False)[0]


@not_converted
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Return this rank's rows of the reductions of all `tensors`. See `reducescatter`."""
    factors = (prescale_factor, postscale_factor)
    if not check_group(tensors, "HorovodReducescatter"):
        return []
    return _scatter(tensors, compression, op, None, process_set, False, factors, grouped=True)


def _scatter(
    tensors: Sequence[Any],
    compression: Any,
    op: int,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    factors: tuple[float, float],
    *,
    grouped: bool,
) -> list[Any]:
    check_sum_or_average(op)
    compression = check_compression(compression)
    if isinstance(compression, CodecCompressor):
        raise ValueError(f"reducescatter with {name_of(compression)}: codecs carry allreduces alone")
    pairs = [compression.compress(each) for each in as_tensors(tensors, "HorovodReducescatter")]
    sent = [each for each, _ in pairs]
    for each in sent:
        refuse_scalar(each, "HorovodReducescatter")
    call = OperationCall(
        "reducescatter",
        process_set,
        name,
        ignore_name_scope=ignore_name_scope,
        grouped=grouped,
        reduction=reduction_of(op),
        prescale=factors[0],
        postscale=factors[1],
    )

    def gradient(*grads: Any) -> list[Any]:
        found = []
        for place, grad in enumerate(grads):
            own = None if name is None else f"{name}_grad_{place}"
            whole = allgather(grad, own, ignore_name_scope, process_set)
            if op == Sum:
                whole = whole * tf.cast(size_of(process_set), whole.dtype)
            found.append(whole * tf.cast(factors[0] * factors[1], whole.dtype))
        return found

    results = run(call, sent, gradient, shapes=[rows_unknown(each) for each in sent])
    return [compression.decompress(each, context) for each, (_, context) in zip(results, pairs, strict=True)]

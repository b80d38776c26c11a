"""`DistributedOptimizer` of `horovod.tensorflow`."""

from __future__ import annotations

from typing import Any

from ..common.process_sets import ProcessSet, global_process_set
from ..common.reductions import Average
from ..exchange.names import next_name
from ..exchange.settings import make_settings
from ..keras.layer.optimizer import distribute
from .compression import Compression
from .installed import tf


def DistributedOptimizer(  # noqa: N802 - the name and the arguments that scripts know
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer like `optimizer` that steps with the gradients of all ranks of `process_set`.

    Args:
        optimizer: of Keras 3 or of tf_keras.
        name: the same on all ranks; by default that of its class.
        use_locking: ignored; Horovod has this argument for optimizers of tf.compat.v1.train.
        device_dense: ignored; Horovod has this argument.
        device_sparse: ignored, as before.
        compression: one of `Compression`, or a class with ``compress`` and ``decompress``.
        sparse_as_dense: whether sparse gradients are converted to dense ones before the exchange.
        backward_passes_per_step: passes whose gradients are added up before the exchange.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: with Average, divides by this factor before and by size / factor after the sum.
        average_aggregated_gradients: whether the sum of the passes is divided by their number.
        num_groups: deprecated spelling of `groups` as a number.
        groups: variables that are exchanged as one operation, or the number of such groups.
        process_set: the ranks that take part.
        scale_local_gradients: whether gradients of local variables are divided by the number of ranks.

    Returns:
        An optimizer of a subclass of the same name.

    Raises:
        ValueError: an argument is invalid.
        NotImplementedError: an optimizer or an argument that is not supported; so are those of tf.compat.v1.train.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise NotImplementedError(
            f"DistributedOptimizer: {type(optimizer).__name__} is an optimizer of tf.compat.v1.train, whose "
            "sessions are not supported: use one of tf.keras.optimizers, or hvd.DistributedGradientTape"
        )
    settings = make_settings(
        compression,
        op=op,
        predivide_factor=gradient_predivide_factor,
        groups=groups,
        num_groups=num_groups,
        passes=backward_passes_per_step,
        averages_passes=average_aggregated_gradients,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    name = next_name(name or f"Distributed{type(optimizer).__name__}")
    return distribute(optimizer, settings, name)

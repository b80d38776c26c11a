"""`DistributedOptimizer` of `horovod.tensorflow`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ..common.process_sets import ProcessSet, global_process_set
from ..common.reductions import Average
from ..exchange.names import key_of, next_name
from ..exchange.settings import local_variables, make_settings
from ..keras.layer.optimizer import distribute
from .compression import Compression
from .gradients import FlatExchange
from .installed import tf
from .ops.inputs import not_converted


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


# `DistributedGradientTape`: a tape whose gradients are those of all ranks.


class _DistributedGradientTape:
    """What is added to a tape's class."""

    _farandole: FlatExchange

    @not_converted
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> Any:
        """Return the gradients of all ranks, in the structure of `sources`.

        Args:
            target: what is differentiated.
            sources: with respect to what: a structure of variables and tensors.
            output_gradients: gradients of each element of `target`.
            use_generic_names: ignored: gradients are named by their place.
        """
        local = super().gradient(target, sources, output_gradients)  # type: ignore[misc]
        flat = tf.nest.flatten(sources, expand_composites=False)
        exchanged = self._farandole(tf.nest.flatten(local, expand_composites=False), flat)
        return tf.nest.pack_sequence_as(sources, exchanged, expand_composites=False)

    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of `source` on this rank: it is not exchanged."""
        self._farandole.local.add(key_of(source))

    @not_converted
    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Return two lists of pairs (source, gradient): those that stay on this rank, and the other ones."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        local: list[Any] = []
        exchanged: list[Any] = []
        for source, gradient in zip(sources, gradients, strict=True):
            (local if key_of(source) in self._farandole.local else exchanged).append((source, gradient))
        return local, exchanged


def DistributedGradientTape(  # noqa: N802 - the name and the arguments that scripts know
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape like `gradtape`, whose `gradient` returns the gradients of all ranks.

    Args:
        gradtape: a `tf.GradientTape` that has recorded.
        device_dense: ignored; Horovod has this argument.
        device_sparse: ignored, as before.
        compression: one of `Compression`, or a class with ``compress`` and ``decompress``.
        sparse_as_dense: whether sparse gradients are converted to dense ones before the exchange.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: with Average, divides by this factor before and by size / factor after the sum.
        num_groups: deprecated spelling of `groups` as a number.
        groups: variables that are exchanged as one operation, or the number of such groups.
        process_set: the ranks that take part.
        scale_local_gradients: whether gradients of local sources are divided by the number of ranks.

    Raises:
        ValueError: an argument is invalid.
    """
    settings = make_settings(
        compression,
        op=op,
        predivide_factor=gradient_predivide_factor,
        groups=groups,
        num_groups=num_groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    if isinstance(gradtape, _DistributedGradientTape):
        raise ValueError("DistributedGradientTape: this tape is one already")
    if not isinstance(gradtape, tf.GradientTape):
        raise ValueError(f"DistributedGradientTape: got {gradtape!r}, expected a tf.GradientTape")
    base = type(gradtape)
    kind = type(base.__name__, (_DistributedGradientTape, base), {"__module__": base.__module__})
    made = cast(Any, object.__new__(kind))
    made.__dict__.update(vars(gradtape))  # the recording goes on in the new one
    made._farandole = FlatExchange(settings, "tape")  # a script makes a new one in each step
    return made


def PartialDistributedGradientTape(  # noqa: N802 - the name and the arguments that scripts know
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `DistributedGradientTape` that keeps the gradients of `local_layers` on this rank.

    Args:
        gradtape: a `tf.GradientTape` that has recorded.
        device_dense: ignored; Horovod has this argument.
        device_sparse: ignored, as before.
        compression: as for `DistributedGradientTape`.
        sparse_as_dense: the same.
        op: the same.
        gradient_predivide_factor: the same.
        num_groups: the same.
        groups: the same.
        process_set: the same.
        local_layers: a layer, or several.
        scale_local_gradients: whether their gradients are divided by the number of ranks.

    Raises:
        ValueError: an argument is invalid.
    """
    tape = DistributedGradientTape(
        gradtape,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in local_variables(local_layers):
        tape.register_local_source(variable)
    return tape

"""Batch normalisation with the statistics of all ranks, for Keras 3.

[Note: joined moments] Each rank gives its number of rows, and sums of its values and of their squares; mean and
variance are those of all rows, so ranks may have different numbers of rows. A variance as the difference of two
large numbers loses its digits, so the sums are in float64; the moments of each rank are computed as in Keras.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ...core.env import read_elastic_settings
from ..common.basics import basics
from ..common.reductions import Sum
from ..exchange.names import next_name
from .layer.backends import backend_name

FUSED = "SyncBatchNormalization does not support fused=True."


class JoinedMoments:
    """The moments of all ranks' rows, for one layer."""

    def __init__(self) -> None:
        self._name = next_name("sync_batch_norm")

    def join(self, ops: Any, mean: Any, variance: Any, rows: Any) -> tuple[Any, Any]:
        """Return the moments of the joined batch. See [Note: joined moments].

        Args:
            ops: `keras.ops`, or what has the same functions: cast, concatenate, maximum, where, zeros_like.
            mean: of this rank's rows, shape (channels,).
            variance: the same.
            rows: how many numbers each channel has here, shape (1,) or (channels,), the same on all ranks.
        """
        if basics.size() == 1 and read_elastic_settings() is None:
            return mean, variance
        wide, narrow = "float64", mean.dtype
        count, own_mean, own_variance = (ops.cast(each, wide) for each in (rows, mean, variance))
        has_rows = count > 0
        total, squares = own_mean * count, (own_variance + own_mean * own_mean) * count
        zeros = ops.zeros_like(total)
        given = [ops.where(has_rows, total, zeros), ops.where(has_rows, squares, zeros), count]
        everything = self._add_up(ops.concatenate(given, 0))
        channels = mean.shape[0]
        count = ops.maximum(everything[2 * channels :], 1.0)
        joined = everything[:channels] / count
        spread = ops.maximum(everything[channels : 2 * channels] / count - joined * joined, 0.0)
        return ops.cast(joined, narrow), ops.cast(spread, narrow)

    def _add_up(self, sums: Any) -> Any:
        if type(sums).__module__.partition(".")[0] == "torch":
            if sums.device.type == "meta":  # Keras asks for shapes
                return sums
            from ..torch.ops.allreduce import allreduce

            return allreduce(sums, op=Sum)
        from ..tensorflow.ops.allreduce import summed

        return summed(sums, self._name)


@cache
def sync_batch_normalization() -> type:
    """Return the layer, a class of Keras 3."""
    import keras

    @keras.saving.register_keras_serializable(package="farandole")
    class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
        """`BatchNormalization` with the statistics of all ranks' rows in training; in inference the same layer.

        Takes the arguments of `keras.layers.BatchNormalization`. All ranks must train on as many batches.
        """

        def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
            if fused or fused is None:
                raise ValueError(FUSED)
            if backend_name() not in ("tensorflow", "torch"):
                raise NotImplementedError(
                    f"SyncBatchNormalization: Keras runs on {backend_name()}, expected tensorflow or torch"
                )
            super().__init__(**kwargs)
            self._joined_moments = JoinedMoments()

        def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
            ops = keras.ops
            mean, variance = (ops.reshape(each, (-1,)) for each in super()._moments(inputs, mask))
            return self._joined_moments.join(ops, mean, variance, self._count(inputs, mask))

        def _count(self, inputs: Any, mask: Any) -> Any:
            """Return how many numbers of each channel count, shape (1,), or (channels,) with a mask."""
            ops = keras.ops
            if mask is not None:
                weights = ops.broadcast_to(ops.expand_dims(mask, axis=-1), ops.shape(inputs))
                return ops.sum(ops.cast(ops.cast(weights, "bool"), "float64"), self._reduction_axes)
            shape = ops.shape(inputs)
            count = ops.ones((1,), dtype="float64")
            for axis in self._reduction_axes:
                count = count * ops.cast(ops.convert_to_tensor(shape[axis]), "float64")
            return count

    return SyncBatchNormalization

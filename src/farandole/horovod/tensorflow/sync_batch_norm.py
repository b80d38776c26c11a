"""`SyncBatchNormalization` for `tf.keras`: batch normalisation with the statistics of all ranks.

    model.add(hvd.SyncBatchNormalization())

Ranks may have different numbers of rows. In inference nothing is exchanged.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..keras.sync_batch_norm import FUSED, JoinedMoments, sync_batch_normalization
from .installed import tf

_OPS = SimpleNamespace(
    cast=tf.cast, concatenate=tf.concat, maximum=tf.maximum, where=tf.where, zeros_like=tf.zeros_like
)


def sync_batch_normalization_of(keras: Any) -> Any:
    """Return the layer as a class of `keras`, which is tf_keras, whose `_moments` has other arguments."""

    class LegacySyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
        """`BatchNormalization` with the statistics of all ranks' rows in training; in inference the same layer.

        Takes the arguments of `tf.keras.layers.BatchNormalization`. All ranks must train on as many batches.
        """

        def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
            if fused or fused is None:
                raise ValueError(FUSED)
            super().__init__(fused=False, **kwargs)
            self._joined_moments = JoinedMoments()

        def _moments(self, inputs: Any, reduction_axes: Any, keep_dims: bool, mask: Any = None) -> tuple[Any, Any]:
            mean, variance = super()._moments(inputs, reduction_axes, keep_dims=keep_dims, mask=mask)
            if mask is None:
                lengths = tf.cast(tf.gather(tf.shape(inputs), reduction_axes), tf.float64)
                rows = tf.reshape(tf.reduce_prod(lengths), [1])
            else:
                weights = tf.cast(tf.expand_dims(mask, -1), tf.float64)
                rows = tf.reduce_sum(tf.broadcast_to(weights, tf.shape(inputs)), reduction_axes)
            own = tf.reshape(mean, [-1]), tf.reshape(variance, [-1])
            joined = self._joined_moments.join(_OPS, own[0], own[1], rows)
            return tf.reshape(joined[0], tf.shape(mean)), tf.reshape(joined[1], tf.shape(variance))

    name = "SyncBatchNormalization"  # after which Keras names its layers
    LegacySyncBatchNormalization.__name__ = LegacySyncBatchNormalization.__qualname__ = name
    return LegacySyncBatchNormalization


_IS_KERAS_3 = tf.keras.layers.Layer.__module__.partition(".")[0] == "keras"
SyncBatchNormalization: Any = sync_batch_normalization() if _IS_KERAS_3 else sync_batch_normalization_of(tf.keras)

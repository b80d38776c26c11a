"""Helpers for trainings of Keras, on any of its backends.

::

    import farandole.keras

    dataset = farandole.keras.shard(dataset)

Names are loaded when first used: importing this package imports neither Keras nor TensorFlow nor torch.
"""

import typing as _typing

if _typing.TYPE_CHECKING:
    from .sharding import shard

__all__ = ["shard"]


def __getattr__(name: str) -> _typing.Any:
    if name not in __all__:
        raise AttributeError(f"module 'farandole.keras' has no attribute {name!r}")
    from .sharding import shard

    globals()["shard"] = shard
    return shard


def __dir__() -> list[str]:
    return sorted(__all__)

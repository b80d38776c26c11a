"""`farandole.keras.shard`: this rank's share of a `tf.data.Dataset` or a `keras.utils.PyDataset`.

[Note: the job's batches] As in `fd.shard`, the job's batch i is the same for every rank: `size` batches of the
data set in a row, or with `split=True` one of them. A rank takes its contiguous part: one whole batch, as long as
they are full. The last batch of the job may be short. It is divided as evenly as it can be, so all ranks make the
same number of steps, and no sample is lost. A rank without a sample then gets one of the others' as a placeholder.

[Note: weights] Ranks whose parts differ in size would weigh their samples unequally, because gradients are
averaged over ranks. So each part gets sample weights of n * size / N (n samples of N here; 0 for a placeholder):
Keras divides a weighted loss by the number of samples, not by the sum of weights, so the mean over the ranks is
that over the N samples. Where all parts are known to be equal, elements stay as they are.
"""

from __future__ import annotations

import sys
from typing import Any

from ..comm.world.store_sync import require_same
from ..comm.world.world import world
from ..core.vocabulary.errors import ConfigError

_REMEDIES = {
    "torch.utils.data": "a loader of torch is sharded by fd.shard",
    "numpy": "use tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)",
    "builtins": "use tf.data.Dataset.from_generator(...).batch(batch_size), or a keras.utils.PyDataset",
    "tf_keras": "use a tf.data.Dataset: a Sequence of tf_keras is not supported",
}
_SAME_DATA = "make the same data set on all ranks: shard divides it"


def shard(dataset: Any, *, split: bool = False, evaluate: bool = False) -> Any:
    """Return this rank's share of the batches of `dataset`, for `fit` or `evaluate`.

    All ranks make the same number of steps, and every sample is used once. Where parts of a batch are not equal,
    elements get sample weights, so that the mean over the ranks is the mean over the samples.

    Args:
        dataset: a `tf.data.Dataset` of batches, or a `keras.utils.PyDataset`; the same on all ranks, in the same
            order. A batch is that of one rank.
        split: if True, a batch is the global batch, which is divided over the ranks.
        evaluate: if True, there are no placeholders and no weights, and numbers of batches may differ.

    Returns:
        A data set of the same kind. Each rank reads all of a `tf.data.Dataset` and keeps its share; of a
        `keras.utils.PyDataset` it asks for its own batches.

    Raises:
        ConfigError: `dataset` is of another kind, is not batched, shuffles without a seed, or needs sample weights
            that its elements have no place for.
        Mismatch: the ranks' data sets differ; raised on every rank.
    """
    here = world()
    options = [("split", split), ("evaluate", evaluate)]
    if _is_a("tensorflow", "data.Dataset", dataset):
        from .tf_data import facts_of, shard_dataset

        require_same(here, _COMPARING, [*options, *facts_of(dataset)], remedy=_SAME_DATA)
        return shard_dataset(dataset, here.rank, here.size, split=split, evaluate=evaluate)
    if _is_a("keras", "utils.PyDataset", dataset):
        from .py_dataset import shard_py_dataset

        require_same(here, _COMPARING, [*options, ("number of batches", dataset.num_batches)], remedy=_SAME_DATA)
        return shard_py_dataset(dataset, here, split=split, evaluate=evaluate)
    raise ConfigError(
        f"shard: expected a tf.data.Dataset or a keras.utils.PyDataset, got {_name_of(dataset)}",
        remedy=_remedy(dataset),
    )


_COMPARING = "comparing the data sets given to farandole.keras.shard"


def _is_a(package: str, path: str, value: Any) -> bool:
    """Return whether `value` is of a class of a package, which is loaded where there is such a value."""
    found: Any = sys.modules.get(package)
    for part in path.split("."):
        found = getattr(found, part, None)
    return isinstance(found, type) and isinstance(value, found)


def _name_of(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _remedy(value: Any) -> str:
    modules = [each.__module__ for each in type(value).__mro__]
    for begin, remedy in _REMEDIES.items():
        if any(module == begin or module.startswith(f"{begin}.") for module in modules[:-1] or modules):
            return remedy
    return _REMEDIES["builtins"]

"""What ranks of a guide's script do together and should not: write one file, and each read a whole folder.

Guides give every rank the same callbacks. Ranks that save to one HDF5 file then meet at its lock, and the one that
comes second ends with `BlockingIOError`. So a `ModelCheckpoint` whose path rank 0 has too writes on rank 0 alone.

A checkpoint says its path in the store when a training begins. Ranks look there when they save: by then each has
been through an exchange of gradients with rank 0, whose training had begun.
"""

from __future__ import annotations

import functools
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ....core.vocabulary.text import write_notice
from ...common.running import find_running
from ..variables import is_legacy
from .backends import is_distributed

_MARK = "_farandole_is_shared"
_OLD_ENDINGS = (".h5", ".hdf5")


def guard_files(keras: Any, *, is_3: bool) -> None:
    """Guard the checkpoints and the data of all trainings of a Keras, 3 or tf_keras. May be called again."""
    kind = keras.callbacks.ModelCheckpoint
    if not getattr(kind._save_model, _MARK, False):
        _guard_checkpoints(kind, is_3)
        _guard_generators(keras.Model)


def _guard_checkpoints(kind: Any, is_3: bool) -> None:
    begin, save, make = kind.set_model, kind._save_model, kind.__init__

    @functools.wraps(make)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807 - put into a class below
        try:
            make(self, *arguments, **named)
        except ValueError as problem:
            path = str(named.get("filepath", arguments[0] if arguments else ""))
            if not is_3 or not path.endswith(_OLD_ENDINGS):
                raise
            raise ValueError(f"{problem}\n{_legacy_hint(path)}") from None

    @functools.wraps(begin)
    def set_model(self: Any, model: Any) -> None:
        begin(self, model)
        store, rank = _store_of(model)
        if store is not None and rank == 0:
            with suppress(RuntimeError):  # a store that fails is found by who needs it
                store.set(_key_of(self), "1")

    @functools.wraps(save)
    def _save_model(self: Any, *arguments: Any, **named: Any) -> Any:
        return None if _is_rank_0s(self) else save(self, *arguments, **named)

    setattr(_save_model, _MARK, True)
    kind.__init__, kind.set_model, kind._save_model = __init__, set_model, _save_model


def _is_rank_0s(callback: Any) -> bool:
    """Return whether this rank leaves a file to rank 0; the first rank that does says so."""
    store, rank = _store_of(callback.model)
    if store is None or rank == 0:
        return False
    key = _key_of(callback)
    with suppress(RuntimeError):
        if not store.check([key]):
            return False
        if store.add(f"{key}/said", 1) == 1:
            write_notice(
                f"rank 0 alone writes {os.fspath(callback.filepath)}, which every rank's ModelCheckpoint was to "
                "write; give it to rank 0 only (if hvd.rank() == 0: callbacks.append(...)), or each rank its own"
            )
        return True
    return False


def _store_of(model: Any) -> tuple[dist.Store | None, int]:
    """Return the store of the ranks that train a model together, if there are several, and this rank."""
    running = find_running()
    if running is None or running.world.size == 1 or not is_distributed(model):
        return None, 0
    return running.world.store, running.world.rank


def _key_of(callback: Any) -> str:
    path = str(Path(callback.filepath).absolute())
    return f"keras/files/{hashlib.sha256(path.encode()).hexdigest()[:16]}"


def _legacy_hint(path: str) -> str:
    ending = Path(path).suffix
    root = path.removesuffix(ending)
    return (
        f'farandole: a name for Keras 3 is "{root}.weights.h5" with save_weights_only=True, and "{root}.keras" '
        f"without; to run the script as it is, with names such as *{ending}: pip install --no-deps tf_keras, and "
        "start it with TF_USE_LEGACY_KERAS=1"
    )


def _guard_generators(kind: Any) -> None:
    fit = kind.fit

    @functools.wraps(fit)
    def with_a_word(self: Any, *arguments: Any, **named: Any) -> Any:
        data = named.get("x", arguments[0] if arguments else None)
        # What flow_from_directory returns, in either Keras; one whose samples are shared out is another class.
        if hasattr(data, "directory") and hasattr(data, "class_indices"):
            _say_that_it_is_read_whole(self, data)
        return fit(self, *arguments, **named)

    kind.fit = with_a_word


def _say_that_it_is_read_whole(model: Any, data: Any) -> None:
    store, rank = _store_of(model)
    if store is None or rank:
        return
    with suppress(RuntimeError):
        if store.add(f"keras/files/{data.directory}/said", 1) > 1:
            return
    remedy = "give flow_from_directory a seed, and then train_generator = farandole.keras.shard(train_generator)"
    if is_legacy(type(model)):
        remedy = "use a tf.data.Dataset, and farandole.keras.shard(dataset)"
    write_notice(
        f"warning: every rank reads all {len(data.filenames)} images of {data.directory}, in an order of its own: "
        f"samples of an epoch are trained on several times or not at all; divide them: {remedy}"
    )

"""`fd.save` and `fd.load`: one checkpoint, at once."""

from __future__ import annotations

import operator
import os
import time
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...comm.world.world import world
from ...core.vocabulary.errors import CheckpointError
from ...core.vocabulary.events import CHECKPOINT, Phase
from .loader import load_training
from .saver import Saver, line_of
from .state import describe_saves, make_training


def save(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    **with_state_dict: Any,
) -> int:
    """Save a training to ``directory/step-...`` and return when it is on the disk. Call it on all ranks.

    Beside the objects given, it has each rank's generators of random numbers, and what its codecs keep.

    Args:
        directory: of this run's checkpoints, on a file system that all hosts share. Made if it is missing.
        model: the model.
        optimizer: its optimizer.
        step: the number of the checkpoint; by default the steps that rank 0 has done. One of that step is
            replaced.
        with_state_dict: anything else that has ``state_dict`` and ``load_state_dict``, by a name of its own:
            ``scheduler=``, ``scaler=``, ``loader=``, further models and optimizers.

    Returns:
        The step.

    Raises:
        CheckpointError: it could not be written, on every rank; the checkpoints before it are as they were.
    """
    here = world()
    number = None if step is None else require_step(step)
    begin = time.monotonic()
    training = make_training(model, optimizer, with_state_dict)
    here.session.recorder.record(describe_saves(Path(directory), training, asynchronous=False))
    saver = Saver(Path(directory), training, here)
    try:
        save = saver.begin(number)
        save.wait()
        return save.step
    finally:
        saver.close()
        here.session.recorder.record(Phase(CHECKPOINT, begin, time.monotonic()))


def load(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int | None = None,
    **with_state_dict: Any,
) -> int:
    """Load what `save` or a `Checkpointer` wrote. Call it on all ranks, after `distribute` and `shard`.

    The number of ranks may be another, and the model may be sharded otherwise. With an optimizer the training is
    resumed: random numbers and the state of codecs are loaded, too, and the next save sets checkpoints of later
    steps aside (as ``superseded-...``). Nothing changes unless all ranks can load.

    Args:
        directory: of the checkpoints.
        model: the model, with the same parameters as the saved one.
        optimizer: its optimizer; without it the model alone is loaded, for evaluation.
        step: which checkpoint; by default the last one.
        with_state_dict: the other objects, by the names they were saved with.

    Returns:
        The step of the checkpoint.

    Raises:
        CheckpointError: there is none, it is damaged (the message names the last good one), or it is of another
            model (the message names the first differences); on every rank.
    """
    number = None if step is None else require_step(step)
    here, training = world(), make_training(model, optimizer, with_state_dict)
    loaded = load_training(Path(directory), number, training, here)
    if training.optimizers:
        line_of(Path(directory), here).load(loaded)
    return loaded


def require_step(step: int) -> int:
    """Return `step`; raise `CheckpointError` if it is no number of a step."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)  # of numpy, too
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(f"step: expected an integer from 0, got {step!r}", is_input=True)
    return number

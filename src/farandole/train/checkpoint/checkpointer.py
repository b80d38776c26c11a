"""`fd.Checkpointer`: saves while a training goes on, by steps or minutes, and before a preemption."""

from __future__ import annotations

import math
import operator
import os
import time
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from ...comm.engine.redo import ask_all
from ...comm.world.store_sync import all_gather_json, require_same
from ...comm.world.world import world
from ...core.vocabulary.errors import CheckpointError, ConfigError
from ...core.vocabulary.events import CHECKPOINT, SETUP_CHECKPOINT_ALARM, Phase, Setup
from ...core.vocabulary.text import write_notice
from .. import preemption
from .agreement import find_good_step
from .loader import load_training
from .newcomers import RankEntrance, come_in
from .saver import Save, Saver, line_of
from .state import describe_saves, make_training

# `fd.save` and `fd.load`: one checkpoint, at once.


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


_ALARM_LENGTH = 300


class Checkpointer:
    """The checkpoints of one training. To be made and called by all ranks alike, after `distribute` and `shard`.

    ::

        checkpointer = fd.Checkpointer("checkpoints", model, optimizer, every_steps=500, keep=3, loader=loader)
        first = (checkpointer.load() or 0) + 1
        for step in range(first, steps + 1):
            ...
            if checkpointer.after_step(step):
                break  # preempted, and saved
        checkpointer.close()

    Args:
        directory: of this run's checkpoints, on a file system that all hosts share. Made if it is missing.
        model: the model.
        optimizer: its optimizer.
        every_steps: save after each multiple of it.
        every_minutes: save when so many minutes have passed since the last save began.
        keep: how many of the last checkpoints to keep, of those that this run has loaded or written and those
            before them; None: all.
        keep_every: keep the checkpoints of its multiples, too.
        asynchronous: write while training goes on. What optimizer steps change is copied until the next one.
        if_busy: when a save is due and the one before is not on the disk: ``"wait"`` for it, or ``"skip"``.
        with_state_dict: anything else that has ``state_dict`` and ``load_state_dict``, by a name of its own.

    Raises:
        CheckpointError: the directory cannot be written, another job writes to it, or hosts do not share it.
        ConfigError: an argument is invalid.
    """

    def __init__(  # noqa: PLR0913 - a front door: what a run decides about its checkpoints
        self,
        directory: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int | None = None,
        keep_every: int | None = None,
        asynchronous: bool = True,
        if_busy: Literal["wait", "skip"] = "wait",
        **with_state_dict: Any,
    ) -> None:
        """Lock the directory and start the process that writes."""
        every_steps = _whole("every_steps", every_steps)
        keep, keep_every = _whole("keep", keep), _whole("keep_every", keep_every)
        every_minutes = _positive("every_minutes", every_minutes)
        if if_busy not in ("wait", "skip"):
            raise ConfigError(f'if_busy: expected "wait" or "skip", got {if_busy!r}')
        self._here = world()
        self._every_steps, self._every_minutes = every_steps, every_minutes
        self._keep, self._keep_every = keep, keep_every
        self._asynchronous, self._if_busy = asynchronous, if_busy
        require_same(
            self._here, "fd.Checkpointer",
            [("every_steps", every_steps), ("every_minutes", every_minutes), ("if_busy", if_busy),
             ("asynchronous", asynchronous)],
        )  # fmt: skip
        self._training = make_training(model, optimizer, with_state_dict)
        self._here.session.recorder.record(
            describe_saves(Path(directory), self._training, asynchronous=asynchronous)
        )
        self._line = line_of(Path(directory), self._here)
        self._saver = Saver(Path(directory), self._training, self._here, self._prune)
        self._entrance = RankEntrance(self._here, self._training)
        self._under_way: Save | None = None
        self._last_step: int | None = None
        self._has_alarm = False
        self._last_seconds = time.monotonic()

    def load(self) -> int | None:
        """Load the last checkpoint that is whole; one that is damaged is passed over with an alarm.

        A rank that comes later than the others (``farandole run --spares``) waits here, and takes their state.

        Returns:
            Its step; None if there is no checkpoint, and nothing was changed.

        Raises:
            CheckpointError: the checkpoint is another model's, or all are damaged; on every rank.
        """
        self._wait()
        if self._here.is_apart:
            came_in_at = come_in(self._training, self._here)
            self._line.load(came_in_at)
            return came_in_at
        step = find_good_step(self._line.directory, self._here)
        if step is None:
            return None
        self._last_step = load_training(self._line.directory, step, self._training, self._here, self._saver.writer)
        self._line.load(step)
        if self._here.rank == 0:
            self._line.begin(None)
        return self._last_step

    def after_step(self, step: int) -> bool:
        """Save if it is time to, or if the job will end soon. Call it on all ranks after each step.

        A disk that fails is no error here: training goes on, and the alarm is in the log.

        Args:
            step: the number of the step that is done.

        Returns:
            Whether the job is preempted: it was saved, and the loop should end.
        """
        step = require_step(step)
        minutes = (time.monotonic() - self._last_seconds) / 60
        is_due = self._here.rank == 0 and self._every_minutes is not None and minutes >= self._every_minutes
        is_preempted, is_time, is_asked, is_closed = preemption.preempted_or(is_due, *self._entrance.look(step))
        if is_preempted:
            self._wait()
            if any(all_gather_json(self._here, "checkpoint/last", self._last_step != step)):
                self._save(step, wait=True)
            return True
        if self._under_way is not None and self._under_way.is_done:
            self._wait()
        if is_time or (self._every_steps is not None and step % self._every_steps == 0):
            self._save(step, wait=not self._asynchronous)
        if is_asked and not is_closed:
            begin = time.monotonic()
            self._wait()
            self._entrance.open(step)
            self._here.session.recorder.record(Phase("ranks come in", begin, time.monotonic()))
        return False

    def save(self, step: int) -> bool:
        """Save now, whatever the interval; in the background if this `Checkpointer` is asynchronous.

        Args:
            step: the number of the checkpoint.

        Returns:
            Whether a save was begun, and is on the disk if it is not in the background.
        """
        return self._save(require_step(step), wait=not self._asynchronous)

    def close(self) -> None:
        """Wait for the save under way, and let other jobs write to the directory. May be called twice."""
        self._wait()
        self._entrance.close()
        self._saver.close()

    def _save(self, step: int, *, wait: bool) -> bool:
        if self._if_busy == "skip" and not wait:
            is_busy = self._under_way is not None and not self._under_way.is_done
            if any(all_gather_json(self._here, "checkpoint/busy", is_busy)):
                return False
        begin = self._last_seconds = time.monotonic()
        self._wait()
        try:
            begun: list[Save] = []
            ask_all(self._here, lambda: begun.append(self._saver.begin(step, copy_later=not wait)))
            if not begun:
                raise CheckpointError("ranks were lost while it began")
            self._under_way = begun[-1]
            self._last_step = step
            return self._wait() if wait else True
        except CheckpointError as problem:
            if problem.exit_code == 2:
                raise
            self._alarm(step, problem)
            return False
        finally:
            self._here.session.recorder.record(Phase(CHECKPOINT, begin, time.monotonic()))

    def _wait(self) -> bool:
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return True
        try:
            under_way.wait()
        except CheckpointError as problem:
            self._last_step = None
            self._alarm(under_way.step, problem)
            return False
        if self._has_alarm:
            self._has_alarm = False
            self._here.session.recorder.record(Setup({SETUP_CHECKPOINT_ALARM: ""}))
        return True

    def _prune(self) -> None:
        self._line.prune(self._keep, self._keep_every)

    def _alarm(self, step: int, problem: Exception) -> None:
        text = f"step {step} was not saved: {problem}"
        self._has_alarm = True
        self._here.session.recorder.record(Setup({SETUP_CHECKPOINT_ALARM: text[:_ALARM_LENGTH]}))
        if self._here.rank == 0:
            write_notice(f"ALARM: {text}")


def _whole(name: str, value: int | None) -> int | None:
    """Return a positive whole number as Python's own, or None."""
    if value is None:
        return None
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)  # of numpy, too
    except TypeError:
        number = 0
    if number <= 0:
        raise ConfigError(f"Checkpointer: {name} is {value!r}, expected a positive whole number")
    return number


def _positive(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not number > 0:
        raise ConfigError(f"Checkpointer: {name} is {value!r}, expected a positive number")
    return number

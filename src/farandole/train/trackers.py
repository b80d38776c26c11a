"""`fd.log` to TensorBoard, Weights & Biases and MLflow: one adapter each.

[Note: trackers never disturb] Rank 0 alone writes. The calls are made by a thread of their own, so a slow server
costs the training nothing; a tracker that raises is left out from then on, with one notice. The end waits for what
is queued, for a bounded time.
"""

from __future__ import annotations

import importlib
import importlib.util
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ..comm.world.world import World
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.text import write_notice

_PACKAGES = {"tensorboard": ("tensorboard",), "wandb": ("wandb",), "mlflow": ("mlflow",)}
_INSTALL = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
END_SECONDS = 20.0
"""How long the end of a training waits for what is queued."""
MOST_QUEUED = 10_000

LogWith = str | Sequence[Any] | Mapping[str, Mapping[str, Any]] | None
"""What `fd.init` takes: names, objects, or names with the arguments of the tracker's own start."""


class Tracker(Protocol):
    """Where values go."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write the values of one step."""

    def close(self) -> None:
        """Write everything that is buffered; called in the thread that writes."""

    def end(self) -> None:
        """End what was begun here; called in the thread that began it."""


class TensorBoard:
    """Scalars in the run directory's folder ``tensorboard``, or a writer of the user's."""

    def __init__(self, directory: Path | None, arguments: Mapping[str, Any], writer: Any = None) -> None:
        self._is_ours = writer is None
        if writer is None:
            from torch.utils.tensorboard import SummaryWriter

            place = {} if directory is None else {"log_dir": str(directory / "tensorboard")}
            writer = SummaryWriter(**{**place, **arguments})
        self._writer = writer

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Tracker`."""
        if self._is_ours:
            self._writer.close()
        else:
            self._writer.flush()

    def end(self) -> None:
        """See `Tracker`."""


class WandB:
    """The run of this process, or one that is begun here."""

    def __init__(self, directory: Path | None, arguments: Mapping[str, Any], run: Any = None) -> None:
        self._is_ours = False
        if run is None:
            wandb = importlib.import_module("wandb")
            run = wandb.run
            if run is None or arguments:
                place = {} if directory is None else {"dir": str(directory)}
                run, self._is_ours = wandb.init(**{**place, **arguments}), True
        self._run = run

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See `Tracker`."""

    def end(self) -> None:
        """See `Tracker`."""
        if self._is_ours:
            self._run.finish()


class MLflow:
    """The active run, or one that is begun here."""

    def __init__(self, directory: Path | None, arguments: Mapping[str, Any]) -> None:
        mlflow = self._mlflow = importlib.import_module("mlflow")
        run = mlflow.active_run()
        self._is_ours = run is None or bool(arguments)
        if run is None or arguments:
            run = mlflow.start_run(**arguments)
        self._run = run.info.run_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        self._mlflow.log_metrics(dict(values), step=step, run_id=self._run)  # the active run is the thread's own

    def close(self) -> None:
        """See `Tracker`."""

    def end(self) -> None:
        """See `Tracker`."""
        active = self._mlflow.active_run()
        if self._is_ours and active is not None and active.info.run_id == self._run:
            self._mlflow.end_run()


_KINDS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


class Trackers:
    """All trackers of a session, behind one queue. See [Note: trackers never disturb]."""

    def __init__(self) -> None:
        self.trackers: list[tuple[str, Tracker]] = []
        self._queue: queue.Queue[tuple[Mapping[str, float], int] | None] = queue.Queue(MOST_QUEUED)
        self._thread: threading.Thread | None = None
        self._is_full = False
        self._has_directory = False
        self._has_said = False

    def open(self, here: World, directory: Path | None, log_with: LogWith) -> None:
        """Begin on rank 0; raise `ConfigError`, on every rank, for a tracker that is unknown or not installed."""
        wanted = list(_wanted(log_with))
        self._has_directory = directory is not None
        if here.rank or not wanted:
            return
        for name, arguments, given in wanted:
            try:
                made = _KINDS[name](directory, arguments, *([] if given is None else [given]))
            except Exception as problem:
                _give_up(name, problem)
                continue
            self.trackers.append((name, made))
        if self.trackers:
            here.session.call_on_close(self.close)
            here.session.call_in_forked_child(self.forget)
            self._thread = threading.Thread(target=self._run, name="farandole trackers", daemon=True)
            self._thread.start()

    def say_if_lost(self) -> None:
        """Say once that metrics have nowhere to go: neither a run directory nor a tracker."""
        if not (self._has_directory or self._thread or self._has_said):
            self._has_said = True
            write_notice(
                "warning: the metrics given to fd.log are written nowhere; start with farandole run, or give "
                'fd.init(run_dir="runs/name") or fd.init(log_with="tensorboard")'
            )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Queue the values of a step."""
        if self._thread is None:
            return
        try:
            self._queue.put_nowait((dict(values), step))
        except queue.Full:
            if not self._is_full:
                self._is_full = True
                write_notice(f"trackers are slower than the training: values of step {step} and more are left out")

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._each(*item)
        self._each()

    def _each(self, *item: Any) -> None:
        """Give the values of a step to all trackers; without any, close them."""
        for name, tracker in list(self.trackers):
            try:
                if item:
                    tracker.log(*item)
                else:
                    tracker.close()
            except Exception as problem:
                self.trackers.remove((name, tracker))
                _give_up(name, problem)

    def close(self) -> None:
        """Write what is queued, for a bounded time."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with suppress(queue.Full):
            self._queue.put(None, timeout=END_SECONDS)
        thread.join(END_SECONDS)
        if thread.is_alive():
            write_notice(f"trackers did not end within {END_SECONDS:g} s: their last values may be missing")
            return
        for name, tracker in self.trackers:
            try:
                tracker.end()
            except Exception as problem:
                _give_up(name, problem)

    def forget(self) -> None:
        """In a forked child: the parent writes."""
        self.trackers, self._thread = [], None


def _wanted(log_with: LogWith) -> Iterable[tuple[str, Mapping[str, Any], Any]]:
    """Yield the name of each tracker, the arguments of its start, and the user's own object."""
    if log_with is None:
        return
    if log_with == "all":
        log_with = [name for name in _KINDS if _is_installed(name)]
    is_one = isinstance(log_with, str) or not isinstance(log_with, (list, tuple, set, Mapping))
    entries: list[Any] = [log_with] if is_one else list(log_with)
    for entry in entries:
        arguments = log_with[entry] if isinstance(log_with, Mapping) else {}
        if isinstance(entry, str) and entry in _KINDS:
            if not _is_installed(entry):
                raise ConfigError(
                    f"init: log_with={entry!r}, and {entry} is not installed",
                    remedy=f"pip install {_INSTALL[entry]}",
                )
            yield entry, dict(arguments or {}), None
        elif hasattr(entry, "add_scalar"):
            yield "tensorboard", {}, entry
        elif hasattr(entry, "log") and hasattr(entry, "finish"):
            yield "wandb", {}, entry
        else:
            raise ConfigError(
                f"init: log_with has {entry!r}, expected {', '.join(map(repr, _KINDS))}, a SummaryWriter or "
                "a wandb run"
            )


def _is_installed(name: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in _PACKAGES[name])


def _give_up(name: str, problem: Exception) -> None:
    text = str(problem).strip().splitlines()
    first = text[0][:200] if text else ""
    write_notice(f"logging to {name} ends, and the training goes on: {type(problem).__name__}: {first}")

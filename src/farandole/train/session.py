"""`fd.init` and `fd.shutdown`: the world, with its recorder and an orderly end.

[Note: an orderly end] Whatever ends the process, the recorder is flushed and the groups are closed (a
gloo process that leaves without that aborts). An uncaught exception leaves its account in the run
directory, so that the launcher can print the first cause first; an error of our own is one line, not a
traceback.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..comm.world.connect import be_apart, connect, watch_forks
from ..comm.world.session import NEVER, RankChange
from ..comm.world.world import DEFAULT_TIMEOUT_SECONDS, World, has_world, world
from ..core.env import (
    RunSettings,
    read_core_shares,
    read_elastic_settings,
    read_run_settings,
    read_tune_settings,
)
from ..core.failures import is_peer_lost
from ..core.host.process_status import (
    give_back_freed_memory,
    keep_freed_memory,
    memory_limit,
    raise_descriptor_limit,
)
from ..core.host.stacks import StackWriter, end_with_code_of, hook_before, report_uncaught_errors
from ..core.job_plan import resolve_plan
from ..core.rank_variables import read_rank_variables
from ..core.vocabulary.degrees import degrees_of
from ..core.vocabulary.errors import ConfigError, FarandoleError, PeerLost, Stalled
from ..core.vocabulary.events import Started
from ..core.vocabulary.run_files import Crash
from ..core.vocabulary.text import write_notice
from ..observe.records.host_sampler import GarbageWatch, HostSampling, TrafficWatch
from ..observe.records.progress import MetricsWriter, TerminalProgress
from ..observe.records.step_recorder import EventWriter, StepRecorder, StepSink
from ..parallel.instrument.device_marks import figures_of
from ..parallel.instrument.saving_watch import watch_saving
from ..parallel.instrument.training_facts import peak_of, watch_facts
from .balance import open_balancer
from .clock_sync import ClockSync, clock_name
from .elastic import member
from .equal_models import EqualModels, UndistributedWatch
from .same_data import FirstBatch
from .stall_watcher import StallWatcher
from .trackers import LogWith, Trackers
from .tuner import OnlineTuner, open_tuner
from .verify.verification_run import VerificationRun

# The account of a process that ends by an uncaught exception, and where it stands when the launcher asks.
#
# These belong to the process and not to a world: meeting the other ranks may fail, or hang, before there is one.
# `init` opens them, `shutdown` closes them, and a forked child forgets them.


class CrashReport:
    """Writes into a run directory while it is open."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.parents_directory: Path | None = None
        """In a forked child: where the parent writes."""
        self._previous_hook: Any = None
        self._reporting = False
        """Whether an uncaught exception is being printed."""
        self.has_crashed = False
        """Whether an uncaught exception ends this process."""
        self.stacks: StackWriter | None = None

    def open(self, directory: Path | None) -> None:
        """Report uncaught exceptions, into `directory` if there is one, and answer the launcher from now on."""
        self.directory = directory
        if self._previous_hook is None:
            self._previous_hook = hook_before()
            sys.excepthook = self.crashed
        if directory is not None and self.stacks is None:
            with suppress(OSError):  # a run directory that cannot be written is reported by its events
                self.stacks = StackWriter(directory, _place()[0])

    def close(self) -> None:
        """Leave everything as it was before `open`."""
        if self.stacks is not None:
            self.stacks.close()
        self.directory = self.stacks = None
        self._release()

    def forget(self) -> None:
        """In a forked child: write nothing that is the parent's."""
        if self.directory is not None:
            self.parents_directory = self.directory
        if self.stacks is not None:
            self.stacks.forget()
        self.directory = self.stacks = None
        self._release()

    def crashed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Leave the account of an uncaught exception, then print it."""
        if self._reporting:  # the hook before ours leads to ours: other code wrapped it in an earlier world
            sys.__excepthook__(kind, error, trace)
            return
        self._reporting = self.has_crashed = True
        try:
            self._report(kind, error, trace)
        finally:
            self._reporting = False
        if sys.excepthook == self.crashed:
            end_with_code_of(error)

    def _release(self) -> None:
        if self._previous_hook is not None and sys.excepthook == self.crashed:
            sys.excepthook = self._previous_hook
        self._previous_hook = None

    def _report(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ours = isinstance(error, FarandoleError)
        if self.directory is not None and not issubclass(kind, KeyboardInterrupt):
            rank, steps, host = _place()
            if self.stacks is not None and isinstance(error, Stalled):
                self.stacks.write(error, trace)
            crash = Crash.from_exception(
                error, trace, rank=rank, host=host, step=steps, ours=ours,
                consequence=only_a_consequence(error),
                exit_code=error.exit_code if isinstance(error, FarandoleError) else 1,
            )  # fmt: skip
            replace(crash, memory_limit=memory_limit()).write(self.directory)
        if ours:
            write_notice(str(error))
        else:
            (self._previous_hook or sys.__excepthook__)(kind, error, trace)


def _place() -> tuple[int, int, str]:
    elastic = read_elastic_settings()
    if elastic is not None:  # the launcher of such a job knows processes by their number, not by a passing rank
        return elastic.worker, world().session.steps.done if has_world() else 0, socket.gethostname()
    if has_world():
        here = world()
        return here.rank, here.session.steps.done, here.host
    try:
        variables = read_rank_variables()
    except ConfigError:
        variables = None
    return (variables.rank if variables else 0), 0, socket.gethostname()


def only_a_consequence(error: BaseException) -> bool:
    """Return whether `error` says no more than that another rank is gone."""
    if isinstance(error, (PeerLost, Stalled)):
        return True
    return isinstance(error, RuntimeError) and is_peer_lost(str(error), any_origin=True)


def init(
    *,
    run_dir: str | os.PathLike[str] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    device: str | torch.device | None = None,
    backend: str | None = None,
    progress: bool = True,
    log_with: LogWith = None,
) -> World:
    """Join the job and return the `World`. Without a launcher it has one rank.

    Rank and size come from the variables of ``farandole run``, ``torchrun``, Horovod, MPI or Slurm. A further call
    returns the same world. In an elastic job the call waits for a rank in the next generation.

    Args:
        run_dir: directory for events and metrics; by default that of ``farandole run``.
        timeout_seconds: how long this rank waits for others, at the rendezvous and in torch's collectives.
        device: device of the model, such as ``"cuda:1"``; by default the GPU of the local rank, else the CPU.
        backend: of torch's groups for CPU tensors, ``"gloo"`` or ``"farandole"`` (docs/reference/backend.md);
            by default that of ``farandole run --backend``, else gloo.
        progress: whether rank 0 prints a progress line.
        log_with: where the values of `log` go live: ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, a list of them,
            ``"all"`` that are installed, a dict of names with the arguments of the tracker's own start
            (``SummaryWriter``, ``wandb.init``, ``mlflow.start_run``), a ``SummaryWriter`` or a wandb run. Rank 0
            writes; a tracker that fails does not end the training.

    Returns:
        The world: rank, size, host, device and process groups.

    Raises:
        ConfigError: variables or arguments are invalid.
        Mismatch: the ranks disagree on the world's size.
        Stalled: ranks did not arrive within `timeout_seconds`; the message names them.
        RuntimeError: this worker was removed from the elastic job.
    """
    if has_world():
        return world()
    report_uncaught_errors()
    raise_descriptor_limit()
    settings = read_run_settings()
    if run_dir is not None and settings.run_directory and Path(run_dir) != Path(settings.run_directory):
        raise ConfigError(
            f"two run directories: {os.fspath(run_dir)} in the script, {settings.run_directory} from the launcher",
            remedy="drop one of them",
        )
    directory = run_dir or settings.run_directory
    if directory is not None and _crashes.parents_directory == Path(directory):
        if run_dir is not None:
            raise ConfigError(
                f"run directory {os.fspath(directory)} is written by the process that this one was forked from",
                remedy="give another run_dir",
            )
        directory = None
    place = None if directory is None else Path(directory)
    _watch_forks()
    _crashes.open(place)
    if read_core_shares() is not None:  # torch takes the cores of a bound rank for the whole machine
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)

    def join() -> World:
        return connect(timeout_seconds=timeout_seconds, device=device, backend=backend)

    worker = member()
    if worker is None:
        here = join()
    else:
        is_first = worker.can_prepare and worker.generation == 0
        can_wait = is_first and resolve_plan(None).on_failure == "continue"
        alone = functools.partial(be_apart, worker.worker, timeout_seconds=timeout_seconds, device=device)
        here = worker.enter(join, alone=alone if can_wait else None)
        here.session.regroup = worker.regroup_of(here)
    session = here.session.keep(TrainSession, lambda: TrainSession(here, place))
    session.open(0 if worker is None else worker.generation, settings, progress=progress)
    atexit.register(shutdown)
    here.session.keep(Trackers, Trackers).open(here, place, log_with)
    return here


def shutdown() -> None:
    """Leave the job: finish the files and destroy the groups. Called at exit; `init` may follow.

    May be called twice.
    """
    atexit.unregister(shutdown)
    if has_world():
        session = world().session.kept(TrainSession)
        if session is not None:
            session.close()
        world().close()
    _crashes.close()


class TrainSession:
    """What records and watches one world, which keeps it. See [Note: an orderly end]."""

    def __init__(self, here: World, directory: Path | None) -> None:
        self._here, self._directory = here, directory
        self._recorder: StepRecorder | None = None
        self._garbage: GarbageWatch | None = None
        self._verification: VerificationRun | None = None
        self._undistributed: UndistributedWatch | None = None
        self._first_batch: FirstBatch | None = None
        self._stall: StallWatcher | None = None
        self._tuner: OnlineTuner | None = None

    def open(self, generation: int, settings: RunSettings, *, progress: bool) -> None:
        """Begin to record and to watch."""
        here = self._here
        tune = read_tune_settings()
        if tune is not None:  # closed before the recorder is
            self._tuner = open_tuner(here, tune, self._directory)
        here.session.call_on_close(self.close)
        here.session.call_in_forked_child(self.forget)
        self._record(generation, progress)
        if settings.verify_steps:
            self._verification = here.session.keep(
                VerificationRun,
                lambda: VerificationRun(here, settings.verify_steps, self._directory, settings.verify_deep),
            )
            self._verification.start()
        if here.size > 1:
            self._undistributed = UndistributedWatch(here)
        plan = resolve_plan(None)
        if plan.offload == "disk":
            give_back_freed_memory()  # before the model is made: what is kept by then has gaps
        else:
            keep_freed_memory()
        here.session.stall_seconds = plan.stall_seconds
        here.session.degrees = degrees_of(plan, here.size)
        self._stall = StallWatcher(here, self._directory, _crashes.stacks)
        self._stall.open()
        here.session.follow_change(self.follow)
        if here.is_apart:
            here.session.steps.after_step(self._refuse_step)

    def _refuse_step(self, step: int) -> int:
        if self._here.is_apart:
            raise ConfigError(
                f"worker {self._here.rank} came later than the others, and has made a step without their state",
                remedy="call load() of a farandole.Checkpointer before the first step: there it takes their state",
            )
        return NEVER

    def follow(self, change: RankChange) -> None:
        """Ranks were lost, or came in: watch those that there are."""
        self._here.session.keep(EqualModels, lambda: EqualModels(self._here, is_new=False))
        if self._stall is not None:
            self._stall.close(keep_positions=False)
        self._stall = StallWatcher(self._here, self._directory, _crashes.stacks)
        self._stall.open()

    def close(self) -> None:
        """Finish, while the groups are still there. May be called twice: other code may close the world."""
        tuner, self._tuner = self._tuner, None
        if tuner is not None:
            tuner.close()
        stall, self._stall = self._stall, None
        if stall is not None:
            stall.close(keep_positions=_crashes.has_crashed)
        verification, self._verification = self._verification, None
        if verification is not None:
            verification.stop()
        undistributed, self._undistributed = self._undistributed, None
        if undistributed is not None:
            undistributed.close()
        garbage, self._garbage = self._garbage, None
        if garbage is not None:
            garbage.close()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    def forget(self) -> None:
        """In a forked child: write nothing that is the parent's, and watch nothing any more."""
        self._recorder = None  # its files are the parent's to flush and close
        if self._garbage is not None:
            self._garbage.close()
        if self._stall is not None:
            self._stall.forget()
        self._stall = None
        if self._verification is not None:
            self._verification.forget()
        if self._undistributed is not None:
            self._undistributed.forget()
        if self._first_batch is not None:
            self._first_batch.close()
        self._garbage = self._verification = self._undistributed = self._first_batch = None

    def _record(self, generation: int, progress: bool) -> None:
        here = self._here
        sinks: list[StepSink] = []
        if self._directory is not None:
            try:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                sinks.append(EventWriter(self._directory, here.rank))
                if here.rank == 0:
                    sinks.append(MetricsWriter(self._directory))
            except OSError as problem:
                raise ConfigError(f"cannot write to run directory {self._directory}: {problem}") from None
        elif here.rank == 0 and progress:
            sinks.append(TerminalProgress(sys.stderr))
        recorder = StepRecorder(sinks, [] if self._tuner is None else [self._tuner])
        self._recorder = here.session.recorder = recorder
        name = clock_name()
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        here.session.recorder.record(
            Started(here.rank, here.size, here.host, os.getpid(), generation, time.monotonic(), now, name)
        )
        if self._directory is not None:
            watch_facts(here)
            watch_saving(here)
            recorder.add(HostSampling(recorder.record, figures_of(here), peak_bytes=peak_of(here)))
            if here.node_count > 1:
                recorder.add(TrafficWatch(recorder.record))
            self._garbage = GarbageWatch(recorder.record)
            self._garbage.open()
        if here.size > 1:
            here.session.steps.after_step(ClockSync(here, name).after_step)
            here.session.steps.after_step(functools.partial(open_balancer, here))
            self._first_batch = FirstBatch(here)
            here.session.keep(EqualModels, lambda: EqualModels(here))


_crashes = CrashReport()
"""Those of this process, which begin before there is a world: empty after `shutdown`, and in a forked child."""


@functools.cache
def _watch_forks() -> None:
    watch_forks()  # first: it takes torch's hooks off, which are around ours
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """In a forked child: leave nothing of the parent's for the end of the process."""
    atexit.unregister(shutdown)
    _crashes.forget()

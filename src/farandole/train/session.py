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
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..comm.world.connect import connect, watch_forks
from ..comm.world.world import DEFAULT_TIMEOUT_SECONDS, World, has_world, world
from ..core.environ.env import read_elastic_settings, read_run_settings
from ..core.host.stacks import StackWriter
from ..core.launchers.rank_variables import read_rank_variables
from ..core.vocabulary.backend_texts import is_peer_lost
from ..core.vocabulary.errors import CommError, ConfigError, FarandoleError, PeerLost, Stalled
from ..core.vocabulary.events import Started
from ..core.vocabulary.notice import write_notice
from ..core.vocabulary.run_files import Crash
from ..observe.record.event_writer import EventWriter
from ..observe.record.garbage import GarbageWatch
from ..observe.record.host_sampler import GpuFacts, HostSampling, find_gpu
from ..observe.record.progress import Fanout, MetricsWriter, TerminalProgress
from ..observe.record.traffic_watch import TrafficWatch
from .allocator import keep_freed_memory
from .clock_sync import ClockSync, clock_name
from .elastic.elastic_worker import member
from .guards.same_batch import FirstBatch
from .guards.undistributed import UndistributedWatch
from .verify.verification_run import VerificationRun


def init(
    *,
    run_dir: str | os.PathLike[str] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> World:
    """Join the job and return the `World`. Without a launcher it has one rank.

    Rank and size come from the variables of ``farandole run``, ``torchrun``, Horovod, MPI or Slurm. A further call
    returns the same world. In an elastic job the call waits for a rank in the next generation.

    Args:
        run_dir: directory for events and metrics; by default that of ``farandole run``.
        timeout_seconds: how long this rank waits for others, at the rendezvous and in torch's collectives.
        device: device of the model, such as ``"cuda:1"``; by default the GPU of the local rank, else the CPU.
        progress: whether rank 0 prints a progress line.

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
    settings = read_run_settings()
    if run_dir is not None and settings.run_directory and Path(run_dir) != Path(settings.run_directory):
        raise ConfigError(
            f"two run directories: {os.fspath(run_dir)} in the script, {settings.run_directory} from the launcher",
            remedy="drop one of them",
        )
    directory = run_dir or settings.run_directory
    session = _session
    if directory is not None and session.parents_directory == Path(directory):
        if run_dir is not None:
            raise ConfigError(
                f"run directory {os.fspath(directory)} is written by the process that this one was forked from",
                remedy="give another run_dir",
            )
        directory = None
    session.directory = None if directory is None else Path(directory)
    _watch_forks()
    session.catch_crashes()
    session.show_stacks()
    keep_freed_memory()

    def join() -> World:
        return connect(timeout_seconds=timeout_seconds, device=device)

    worker = member()
    here = join() if worker is None else worker.enter(join)
    session.record(here, 0 if worker is None else worker.generation, progress)
    if settings.verify_steps:
        session.verification = VerificationRun(
            here, settings.verify_steps, session.directory, settings.verify_deep
        )
        session.verification.start()
    if here.size > 1:
        session.undistributed = UndistributedWatch(here)
    atexit.register(shutdown)
    return here


def shutdown() -> None:
    """Leave the job: finish the files and destroy the groups.

    May be called twice, and `init` may follow. It is called automatically at exit.
    """
    atexit.unregister(shutdown)
    session = _session
    if session.verification is not None:
        verification, session.verification = session.verification, None
        verification.stop()
    if session.undistributed is not None:
        session.undistributed.close()
        session.undistributed = None
    if session.garbage is not None:
        session.garbage.close()
        session.garbage = None
    if session.recorder is not None:
        session.recorder.close()
        session.recorder = None
    if has_world():
        world().close()
    session.hide_stacks()
    session.release_crashes()


@dataclass
class _Session:
    directory: Path | None = None
    recorder: Fanout | None = None
    garbage: GarbageWatch | None = None
    verification: VerificationRun | None = None
    undistributed: UndistributedWatch | None = None
    previous_hook: Any = None
    reporting: bool = False
    """Whether an uncaught exception is being printed."""
    stacks: StackWriter | None = None
    first_batch: FirstBatch | None = None
    parents_directory: Path | None = None
    """In a forked child: where the parent writes."""

    def forget(self) -> None:
        """In a forked child: write nothing that is the parent's, and leave nothing for the end of the process."""
        atexit.unregister(shutdown)
        self.parents_directory, self.directory = self.directory, None
        self.recorder = None  # its files are the parent's to flush and close
        if self.garbage is not None:
            self.garbage.close()
        if self.verification is not None:
            self.verification.forget()
        if self.stacks is not None:
            self.stacks.forget()
        self.garbage = self.verification = self.stacks = self.first_batch = None
        self.release_crashes()

    def record(self, here: World, generation: int, progress: bool) -> None:
        recorders: list[Any] = []
        if self.directory is not None:
            try:
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                recorders.append(EventWriter(self.directory, here.rank))
                if here.rank == 0:
                    recorders.append(MetricsWriter(self.directory))
            except OSError as problem:
                raise ConfigError(f"cannot write to run directory {self.directory}: {problem}") from None
        elif here.rank == 0 and progress:
            recorders.append(TerminalProgress(sys.stderr))
        self.recorder = Fanout(recorders)
        here.session.recorder = self.recorder
        name = clock_name()
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        here.session.recorder.record(
            Started(here.rank, here.size, here.host, os.getpid(), generation, time.monotonic(), now, name)
        )
        if self.directory is not None:
            recorders.append(HostSampling(self.recorder.record, _gpu(here)))
            if here.node_count > 1:
                recorders.append(TrafficWatch(self.recorder.record))
            self.garbage = GarbageWatch(self.recorder.record)
            self.garbage.open()
        if here.size > 1:
            here.session.steps.after_step(ClockSync(here, name).after_step)
            self.first_batch = FirstBatch(here)

    def catch_crashes(self) -> None:
        if self.previous_hook is None:
            self.previous_hook = sys.excepthook
            sys.excepthook = self.crashed

    def release_crashes(self) -> None:
        if self.previous_hook is not None and sys.excepthook == self.crashed:
            sys.excepthook = self.previous_hook
        self.previous_hook = None

    def show_stacks(self) -> None:
        """Let the launcher ask where this rank stands, from now on: it may hang in meeting the others."""
        if self.directory is not None and self.stacks is None:
            with suppress(OSError):  # a run directory that cannot be written is reported by its events
                self.stacks = StackWriter(self.directory, _place()[0])

    def hide_stacks(self) -> None:
        if self.stacks is not None:
            self.stacks.close()
            self.stacks = None

    def crashed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Leave the account of an uncaught exception, then print it."""
        if self.reporting:  # the hook before ours leads to ours: other code wrapped it in an earlier world
            sys.__excepthook__(kind, error, trace)
            return
        self.reporting = True
        try:
            self._report(kind, error, trace)
        finally:
            self.reporting = False

    def _report(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ours = isinstance(error, FarandoleError)
        if self.directory is not None and not issubclass(kind, KeyboardInterrupt):
            rank, steps, host = _place()
            if self.stacks is not None and isinstance(error, Stalled):
                self.stacks.write(error, trace)
            Crash.from_exception(
                error, trace, rank=rank, host=host, step=steps, ours=ours,
                consequence=_only_a_consequence(error),
                exit_code=1,
            ).write(self.directory)  # fmt: skip
        if ours:
            write_notice(str(error))
        else:
            (self.previous_hook or sys.__excepthook__)(kind, error, trace)


_session = _Session()


@functools.cache
def _watch_forks() -> None:
    watch_forks()  # first: it takes torch's hooks off, which are around ours
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_session.forget)


def _gpu(here: World) -> GpuFacts | None:
    if here.device.type != "cuda":
        return None
    return find_gpu(str(getattr(torch.cuda.get_device_properties(here.device), "uuid", "")))


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


def _only_a_consequence(error: BaseException) -> bool:
    """Return whether `error` says no more than that another rank is gone."""
    if isinstance(error, (PeerLost, Stalled)):
        return True
    text = str(error)
    if isinstance(error, CommError) and "the store failed" in text:  # it lives with rank 0, which says why
        return True
    return isinstance(error, RuntimeError) and is_peer_lost(text, any_origin=True)

"""`init`, `shutdown`, rank, size, and the other queries of a program.

One `basics` a process, shared by all front ends. It holds the negotiation engine while there is one; the
operations of the front ends reach it through `basics.running`.

[Note: no MPI, no list of ranks] In Horovod `comm` of `init` picked some of the processes of MPI; here the launcher
decides who belongs to the job, as in Horovod on Gloo. A list of all ranks is fine, another one is ignored with a
warning as Horovod ignores it, and a communicator must be of all ranks in their order.
"""

from __future__ import annotations

import atexit
import importlib.util
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ...core.env import read_backend, read_elastic_settings
from ...core.job_plan import HorovodVariables, JobPlan, plan_with_requests, read_horovod_variables
from ...core.vocabulary.errors import CommError, ConfigError
from .exceptions import from_comm_error
from .process_sets import ProcessSet, register_at_start, static_process_sets
from .running import Running, find_layout, find_running, get_running, is_parents


class HorovodBasics:
    """The world as Horovod's names show it. `pkg_path` and `args` have no meaning here."""

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        self._opened_world = False
        self._watches_forks = False
        self._forget: list[Callable[[], None]] = []

    @property
    def running(self) -> Running:
        """What `init` made; raises ValueError before it and after `shutdown`."""
        return get_running()

    def call_on_shutdown(self, forget: Callable[[], None]) -> None:
        """Call `forget` at every shutdown: the front ends' handles and counters begin anew."""
        self._forget.append(forget)

    def init(
        self,
        comm: Sequence[int] | Any | None = None,
        process_sets: Sequence[ProcessSet] | str | None = None,
    ) -> None:
        """Join the job; nothing when it is joined already.

        `process_sets` are registered at once (the same list on all ranks); "dynamic" allows
        `add_process_set` later, as HOROVOD_DYNAMIC_PROCESS_SETS=1 does. Raises ValueError for sets that are
        not sets of ranks or are there twice, `ConfigError` for variables that make no sense,
        `HorovodInternalError` when the ranks do not meet.
        """
        if find_running() is not None and not is_parents():
            return
        if read_backend() == "farandole":
            raise ConfigError(
                "--backend farandole: Horovod's operations are exchanged without torch's process groups",
                remedy="start this script without --backend",
            )
        from ...train.elastic import generation_is_over

        static = static_process_sets(process_sets)
        settings = read_horovod_variables()
        plan = plan_with_requests(settings.plan)
        while True:
            try:
                self._start(settings, plan)
                running = self.running
                running.dynamic_process_sets |= process_sets == "dynamic"
                self._check_communicator(comm)
                register_at_start(running, static)
                if settings.timeline:
                    running.log.start(settings.timeline, mark_cycles=settings.timeline_mark_cycles)
                break
            except BaseException as problem:
                self.shutdown()
                if not isinstance(problem, CommError):
                    raise
                if not generation_is_over():  # a rank of an elastic job died while the others met: once more
                    raise from_comm_error(problem) from problem
        atexit.register(self.shutdown)
        self._watch_forks()

    def _watch_forks(self) -> None:
        if hasattr(os, "register_at_fork") and not self._watches_forks:
            self._watches_forks = True
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """A forked child may ask who its parent is, and no more: it is no rank."""
        atexit.unregister(self.shutdown)
        self._opened_world = False

    def _start(self, settings: HorovodVariables, plan: JobPlan) -> None:
        from ...comm.world.world import DEFAULT_TIMEOUT_SECONDS, has_world
        from ...observe.export.operation_timeline import OperationTimeline
        from ...train.elastic import member
        from ...train.session import init
        from ..named_ops.engine import NamedOpsEngine
        from ..named_ops.operations import NamedOpsSettings

        self._opened_world = not has_world()
        worker = member()
        if worker is not None:
            worker.can_prepare = False  # states of Horovod's are taken in its own way
        said_seconds = plan.plan.timeout_seconds if "timeout_seconds" in plan.sources else None
        world = init(timeout_seconds=settings.timeout_seconds or DEFAULT_TIMEOUT_SECONDS, progress=False)
        if world.rank == 0:
            for warning in settings.warnings:
                warnings.warn(f"farandole: {warning}", RuntimeWarning, stacklevel=4)
        log = OperationTimeline(world.rank, world.size)
        said_bytes = plan.plan.bucket_bytes or None
        give_up_seconds = settings.stall_shutdown_seconds or said_seconds or 0.0
        wanted = NamedOpsSettings(
            fusion_bytes=settings.fusion_bytes if said_bytes is None else said_bytes,
            cache_capacity=settings.cache_capacity,
            stall_warning_seconds=min(settings.stall_warning_seconds, give_up_seconds or math.inf),
            stall_shutdown_seconds=give_up_seconds,
            by_host=plan.plan.route != "flat",
        )
        engine = NamedOpsEngine(world, wanted, log)
        running = world.session.keep(Running, lambda: Running(world, engine, settings, log, plan))
        world.session.call_on_close(self._world_closes)
        running.layout = find_layout(world, engine)

    def _check_communicator(self, comm: Any) -> None:
        """See [Note: no MPI, no list of ranks]."""
        world = self.running.world
        if comm is None:
            return
        if hasattr(comm, "Get_rank") and hasattr(comm, "Get_size"):
            place = (comm.Get_rank(), comm.Get_size())
            if place != (world.rank, world.size):
                raise ValueError(
                    f"init(comm=...): this is rank {place[0]} of {place[1]} of the communicator, but rank "
                    f"{world.rank} of {world.size} of the job; a communicator of some ranks is not supported: "
                    "start the job with these ranks only, or use process_sets"
                )
        elif sorted(comm) != list(range(world.size)) and len(comm):
            warnings.warn(
                f"init(comm={list(comm)}) is ignored: the job has all {world.size} ranks that were started; "
                "use process_sets for some of them",
                stacklevel=3,
            )

    def shutdown(self) -> None:
        """Leave the job; operations in flight fail on all ranks. May be called twice; `init` may follow."""
        atexit.unregister(self.shutdown)
        running, was_parents = find_running(), is_parents()
        if running is not None:
            running.world.session.drop(Running)
        if was_parents:
            return
        for forget in self._forget:
            forget()
        try:
            if running is not None:
                running.engine.close()
                running.log.stop()
        finally:
            opened, self._opened_world = self._opened_world, False
            if opened:
                from ...train.session import shutdown

                shutdown()
        if running is not None:
            _warn_of_unused_plan(running)

    def _world_closes(self) -> None:
        """Called when other code (`fd.shutdown`) closes the world."""
        self._opened_world = False
        self.shutdown()

    def is_initialized(self) -> bool:
        """Return whether `init` was called and `shutdown` not since."""
        return find_running() is not None and not is_parents()

    def start_timeline(self, file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Write a timeline from now on. It needs HOROVOD_TIMELINE=DYNAMIC.

        Args:
            file_path: file of rank 0; the other ranks add ``.rank<r>`` to its stem.
            mark_cycles: whether to mark batches of operations.

        Raises:
            ValueError: the timeline is not dynamic, or the file cannot be written.
        """
        running = self.running
        if not running.settings.timeline_is_dynamic:
            raise ValueError("Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage.")
        try:
            running.log.start(file_path, mark_cycles=mark_cycles)
        except ConfigError as problem:
            raise ValueError(str(problem)) from problem

    def stop_timeline(self) -> None:
        """Finish the timeline.

        Raises:
            ValueError: HOROVOD_TIMELINE is not DYNAMIC.
        """
        running = self.running
        if not running.settings.timeline_is_dynamic:
            raise ValueError("Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage.")
        running.log.stop()

    def size(self) -> int:
        """Return the number of ranks."""
        return self.running.world.size

    def local_size(self) -> int:
        """Return the number of ranks on this host."""
        return self.running.world.local_size

    def cross_size(self) -> int:
        """Return the number of hosts that have a rank of this local rank."""
        return self.running.layout.cross_size

    def rank(self) -> int:
        """Return this rank."""
        return self.running.world.rank

    def local_rank(self) -> int:
        """Return this rank among those of its host."""
        return self.running.world.local_rank

    def cross_rank(self) -> int:
        """Return this rank among those of its local rank on all hosts."""
        return self.running.layout.cross_rank

    def is_homogeneous(self) -> bool:
        """Return whether every host has the same number of ranks."""
        return self.running.layout.is_homogeneous

    def mpi_threads_supported(self) -> bool:
        """Raise ValueError: MPI moves no bytes here."""
        self.running  # noqa: B018 - not initialised is the first thing to say
        raise ValueError("Horovod MPI is not enabled; operations travel over sockets and NCCL.")

    def mpi_enabled(self) -> bool:
        """Return False: MPI may start the ranks, but exchanges no data."""
        return False

    def mpi_built(self) -> bool:
        """Return False."""
        return False

    def gloo_enabled(self) -> bool:
        """Return True: the rendezvous and all operations use sockets."""
        return self.gloo_built()

    def gloo_built(self) -> bool:
        """Return whether torch has gloo."""
        if importlib.util.find_spec("torch") is None:
            return False
        import torch.distributed as dist

        return dist.is_available() and dist.is_gloo_available()

    def nccl_built(self) -> int:
        """Return NCCL's version as a number, 2.18.5 as 21805; 0 without it."""
        from ...comm.device.accelerator import gpu_count, nccl_version

        version = nccl_version() if gpu_count() else ()
        return sum(part * unit for part, unit in zip(version, (10_000, 100, 1), strict=False))

    def ddl_built(self) -> bool:
        """Return False."""
        return False

    def ccl_built(self) -> bool:
        """Return False."""
        return False

    def cuda_built(self) -> bool:
        """Return whether torch was built for CUDA."""
        import torch

        return torch.version.cuda is not None

    def rocm_built(self) -> bool:
        """Return whether torch was built for ROCm."""
        import torch

        return torch.version.hip is not None

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return {number: list(ranks) for number, ranks in sorted(self.running.engine.process_sets.items())}


def _warn_of_unused_plan(running: Running) -> None:
    """Say that a plan for gradients had no effect, where no optimizer was there to apply it."""
    has_begun = running.plan_is_applied or running.world.session.steps.has_begun
    if has_begun or running.world.rank or sys.exc_info()[0] is not None:
        return
    used = ("bucket_bytes", "timeout_seconds", "accumulate", "stall_seconds", "predicted")
    keys = [key for key in running.plan.changed() if key not in used]
    if keys and read_elastic_settings() is None:  # a generation of an elastic job may end before it trains
        said = ", ".join(running.plan.describe(key) for key in keys)
        warnings.warn(
            f"farandole: the plan had no effect, because no hvd.DistributedOptimizer was made: {said}; operations "
            "that a script calls itself travel as their arguments say",
            RuntimeWarning,
            stacklevel=3,
        )


basics = HorovodBasics(__file__)
"""This process's place in the job; every front end uses this one."""

"""The state of the running job between `init` and `shutdown`, in one place for all front ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...comm.named_ops.operations.request import Negotiator
    from ...comm.world.world import World
    from ...core.environ.horovod_variables import HorovodVariables
    from ...core.environ.job_plan import JobPlan
    from .layout import Layout
    from .operation_logs import SwitchedLog

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


class Running:
    """What there is between `init` and `shutdown`."""

    def __init__(
        self, world: World, engine: Negotiator, settings: HorovodVariables, log: SwitchedLog, plan: JobPlan
    ) -> None:
        self.world = world
        self.plan = plan
        self.engine = engine
        self.settings = settings
        self.log = log
        self.dynamic_process_sets = settings.dynamic_process_sets
        self.layout: Layout


class RunningJob:
    """Holds `Running` while there is one."""

    def __init__(self) -> None:
        self.running: Running | None = None

    def get(self) -> Running:
        """Return what `init` made; raise ValueError before it and after `shutdown`."""
        if self.running is None:
            raise ValueError(NOT_INITIALIZED)
        return self.running


job = RunningJob()
"""The one of this process; `basics` sets it."""

"""`FarandoleStrategy` and `FarandoleRecorder`: Lightning's Trainer, with our exchange, or only with our records.

::

    from farandole.integrations.lightning import FarandoleRecorder, FarandoleStrategy

    trainer = Trainer(strategy=FarandoleStrategy(), devices=2)  # Farandole exchanges gradients
    trainer = Trainer(strategy="ddp", devices=2, callbacks=[FarandoleRecorder()])  # DDP does, Farandole records

and ``farandole run -np 2 -- python train.py``. The data are divided by Lightning's sampler, which repeats samples
where an epoch does not divide evenly, as with its "ddp". For every sample once and exact weights, give
``use_distributed_sampler=False`` and return ``farandole.shard(loader)`` from ``train_dataloader``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..comm.world.world import has_world, world
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.events import LIGHTNING, SETUP_LOOP, Phase, Setup
from ..parallel.distribute import distribute, undistribute
from ..parallel.instrument.phase_hooks import ModelWatch, inner_optimizer, watch_model
from ..parallel.model import DistributedModel
from ..train.data.loader_watch import watch_loaders
from ..train.loop import log
from ..train.record import record
from ..train.session import init
from .shared import check_job, holding_passes, missing

try:
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as problem:
    raise missing("farandole.integrations.lightning", "lightning", problem) from None


class FarandoleEnvironment(ClusterEnvironment):  # type: ignore[misc]
    """Tells Lightning what `fd.init` knows of this rank."""

    @property
    def creates_processes_externally(self) -> bool:
        """True: ``farandole run`` started the ranks."""
        return True

    @property
    def main_address(self) -> str:
        """Where rank 0 serves the store."""
        return world().address or "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Unused: the process group is there already."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Whether there is a world."""
        return has_world()

    def world_size(self) -> int:
        """Ranks of the job."""
        return world().size

    def set_world_size(self, size: int) -> None:
        """Nothing: the launcher has set it."""

    def global_rank(self) -> int:
        """Rank of this process."""
        return world().rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing: the launcher has set it."""

    def local_rank(self) -> int:
        """Rank among those of this host."""
        return world().local_rank

    def node_rank(self) -> int:
        """Number of this host."""
        return world().node_rank


class FarandoleStrategy(DDPStrategy):  # type: ignore[misc]
    """Data parallelism by `fd.distribute`, with its codecs and routes; the module is not wrapped.

    Start the script with ``farandole run``; ``devices`` times ``num_nodes`` must be its number of ranks. The plan
    is that of ``farandole run --set`` and ``--plan``.

    Args:
        kwargs: ``accelerator``, ``precision_plugin`` and ``checkpoint_io`` of Lightning's strategies.

    Raises:
        ConfigError: an argument of DistributedDataParallel was given, ``devices`` is not the number of ranks, or
            the plan has a degree beside data, or zero.
    """

    strategy_name = "farandole"

    def __init__(self, **kwargs: Any) -> None:
        known = {"accelerator", "parallel_devices", "precision_plugin", "checkpoint_io"}
        unknown = sorted(set(kwargs) - known)
        if unknown:
            raise ConfigError(
                f"FarandoleStrategy takes no {', '.join(unknown)}",
                remedy="configure the exchange by the plan: farandole run --set codec=int8 -- python train.py",
            )
        if not has_world():
            init()
        check_job("lightning")  # its steps have closures, and its files are whole
        super().__init__(cluster_environment=FarandoleEnvironment(), **kwargs)
        self._held: Any = None
        self._inputs: tuple[Any, Any] | None = None
        """What the ``training_step`` that runs was given."""

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: the names of DDP are not ours."""

    def _configure_launcher(self) -> None:
        self._launcher = None

    def setup_environment(self) -> None:
        """Compare Lightning's number of processes with the ranks that there are."""
        asked = self.num_nodes * self.num_processes
        if asked != world().size:
            raise ConfigError(
                f"Trainer(devices={self.num_processes}, num_nodes={self.num_nodes}) wants {asked} processes, and "
                f"there are {world().size} ranks",
                remedy=f"pass devices={world().local_size}, num_nodes={world().node_count}, or start it with: "
                f"farandole run -np {asked} -- python train.py",
            )
        super().setup_environment()

    def configure_ddp(self) -> None:
        """Wrap nothing."""

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does, then distribute the module with its optimizers."""
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._let_go()
            optimizers = [each for each in map(inner_optimizer, self.optimizers) if each is not None]
            distribute(self.lightning_module, optimizers)
            watch_loaders(world())
            world().session.recorder.record(Setup({SETUP_LOOP: LIGHTNING}))
            self._held = self.lightning_module

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step``: it is the forward pass, as the module itself is not called."""
        watch = watch_model(self.lightning_module)
        self._inputs = args, kwargs
        watch.forward_begins(self.lightning_module, args, kwargs)
        output = None
        try:
            output = super().training_step(*args, **kwargs)
        finally:
            self._inputs = None
            watch.forward_ends(self.lightning_module, output)
        return output

    def pre_backward(self, closure_loss: Any) -> None:
        """With manual optimization, end the forward pass here: the whole loop is inside ``training_step``.

        So each backward pass has the weight of its own batch, though Lightning has drawn the next one already.
        """
        super().pre_backward(closure_loss)
        if self._inputs is not None:
            watch_model(self.lightning_module).forward_ends(self.lightning_module, closure_loss)

    def post_backward(self, closure_loss: Any) -> None:
        """With manual optimization, begin the forward pass of the next backward pass."""
        super().post_backward(closure_loss)
        if self._inputs is not None:
            watch_model(self.lightning_module).forward_begins(self.lightning_module, *self._inputs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients on this rank: Lightning accumulates."""
        with holding_passes():
            yield

    def teardown(self) -> None:
        """Let the module be distributed anew by another fit."""
        self._let_go()
        super().teardown()

    def _let_go(self) -> None:
        module, self._held = self._held, None
        if module is not None:
            undistribute(module)
            for each in self.optimizers:
                world().session.steps.unregister(inner_optimizer(each))


if FarandoleStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        FarandoleStrategy.strategy_name, FarandoleStrategy, description="data parallelism by Farandole"
    )


class FarandoleRecorder(Callback):  # type: ignore[misc]
    """Records a fit: phases, loss, samples, evaluations. Changes nothing and never raises.

    Args:
        run_dir: directory for the events; by default that of ``farandole run``.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None = None) -> None:
        self._run_dir = run_dir
        self._watch: ModelWatch | None = None
        self._begin_seconds: float | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Hook the model, the optimizers and the loaders."""
        model = trainer.strategy.model
        record(model, list(trainer.optimizers), run_dir=self._run_dir)
        if not has_world():
            return
        # Its training_step is called, and not the module.
        if model is pl_module and DistributedModel.of(pl_module).plan is None:
            self._watch = watch_model(pl_module)
        watch_loaders(world())
        world().session.recorder.record(Setup({SETUP_LOOP: LIGHTNING}))
        steps = trainer.estimated_stepping_batches
        if isinstance(steps, int) and steps > 0:
            log(total_steps=max(1, steps - trainer.global_step))  # those of this process

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin the forward pass."""
        if self._watch is not None:
            self._watch.forward_begins(pl_module, (batch,), {})

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """End the forward pass."""
        if self._watch is not None:
            self._watch.forward_ends(pl_module, loss)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a pass that had no backward, and report the loss."""
        if self._watch is not None:
            self._watch.forward_ends(pl_module, None)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        due = trainer.global_step % max(1, trainer.log_every_n_steps) == 0
        if has_world() and due and getattr(loss, "numel", lambda: 0)() == 1:
            log(loss=loss)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Note when the evaluation begins."""
        self._begin_seconds = time.monotonic()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the evaluation."""
        if has_world() and self._begin_seconds is not None:
            world().session.recorder.record(Phase("evaluation", self._begin_seconds, time.monotonic()))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Let the optimizer of the next fit count the steps."""
        self._watch = None
        if has_world():
            for each in trainer.optimizers:
                world().session.steps.unregister(inner_optimizer(each))

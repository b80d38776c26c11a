"""`FarandoleTrainer` and `FarandoleCallback`: Hugging Face's Trainer, with our exchange, or only with our records.

::

    from farandole.integrations.transformers import FarandoleCallback, FarandoleTrainer

    trainer = FarandoleTrainer(model=model, args=arguments, train_dataset=data)  # Farandole exchanges gradients
    trainer = Trainer(..., callbacks=[FarandoleCallback()])  # DDP exchanges them, Farandole records

A Trainer of another package gets the exchange by inheritance: ``class Mine(FarandoleMixin, SFTTrainer): pass``.

[Note: one process on the joined batch] With N ranks of ``per_device_train_batch_size`` b a step is that of one
process with N*b: the order of samples is that of one process, every sample of an epoch is used once (the last
batch is divided unevenly, where the stock Trainer repeats samples), and each batch weighs what it is of the whole:
by samples where the loss is a mean over the batch, by items (tokens) where it is given ``num_items_in_batch``.
A Trainer that makes whole batches by a batch sampler, as sentence-transformers' does, trains N of them at once, as
one process that accumulates them: a loss that compares samples sees those of its own batch. An evaluation has the
loss of one process with batches of ``per_device_eval_batch_size``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..comm.world.world import has_world, world
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.events import SETUP_LOOP, TRAINER, Phase, Setup
from ..parallel.exchange_state import exchange_state, load_exchange_state
from ..parallel.instrument.phase_hooks import inner_optimizer
from ..parallel.model import DistributedModel
from ..train.checkpoint.agreement import together
from ..train.loop import log, mean
from ..train.record import record
from ..train.session import init
from .shared import (
    check_job,
    is_divided,
    load_whole_optimizer,
    missing,
    replaced,
    taking_whole_states,
    whole_optimizer_state,
    whole_parameters,
)
from .weighed_batches import Weight, joins_rows, peek_weight, take_weight

# The checkpoints of transformers' Trainer, of a model or an optimizer that the plan divides over ranks.
#
# All ranks gather, the ranks that transformers lets write (``args.should_save``) write whole files with names and
# types of the undivided training, and no rank goes on where one has failed.


_STATE = "farandole_exchange_{}.pt"
"""What codecs keep, of one rank, in a checkpoint."""


class WholeCheckpoints:
    """Methods of a Trainer that write and read its checkpoints; to be named before the Trainer's class."""

    args: Any
    model: Any
    model_wrapped: Any
    optimizer: Any

    def _save(self, *args: Any, **kwargs: Any) -> None:
        save = partial(super()._save, *args, **kwargs)  # type: ignore[misc]
        if not is_divided(self.model):
            save()
            return
        with whole_parameters(self.model, here=bool(self.args.should_save)):
            together(world(), "save model", save)

    def _load_best_model(self) -> None:
        load = super()._load_best_model  # type: ignore[misc]
        if not is_divided(self.model):
            load()
            return
        with taking_whole_states(self.model):
            together(world(), "load best model", load)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save = partial(super()._save_optimizer_and_scheduler, output_dir)  # type: ignore[misc]
        plan, here = DistributedModel.of(self.model_wrapped).plan, world()
        if plan is None:
            save()
            return
        if plan.zero and here.size > 1:
            whole = whole_optimizer_state(self.optimizer.state_dict(), here=bool(self.args.should_save))
            with replaced(self.optimizer, "state_dict", lambda: whole):
                together(here, "save optimizer", save)
        else:
            save()
        state = exchange_state(self.model_wrapped)
        if state:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            torch.save(state, Path(output_dir) / _STATE.format(here.rank))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        load = partial(super()._load_optimizer_and_scheduler, checkpoint)  # type: ignore[misc]
        plan, here = DistributedModel.of(self.model_wrapped).plan, world()
        if checkpoint is None or plan is None:
            load()
            return
        take = partial(load_whole_optimizer, self.optimizer, self.optimizer.load_state_dict)
        with replaced(self.optimizer, "load_state_dict", take):
            together(here, "load optimizer", load)
        found: list[Path] = []
        while (path := Path(checkpoint) / _STATE.format(len(found))).exists():
            found.append(path)
        if found:
            states = [torch.load(path, weights_only=True) for path in found]
            load_exchange_state(self.model_wrapped, states[here.rank] if len(states) == here.size else states)


try:
    from accelerate.utils import recursively_apply
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_pt_utils import find_batch_size

    from .accelerate import FarandoleAccelerator
except ImportError as problem:
    raise missing("farandole.integrations.transformers", "transformers", problem) from None


class FarandoleCallback(TrainerCallback):  # type: ignore[misc]
    """Records a Trainer's run: phases, loss, samples, evaluations, checkpoints. Changes nothing and never raises.

    Args:
        run_dir: directory for the events; by default that of ``farandole run``.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None = None) -> None:
        self._run_dir = run_dir
        self._begin_seconds: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Hook the model, the optimizer and the loader."""
        found: list[Any] = [kwargs.get(name) for name in ("model", "optimizer", "train_dataloader")]
        record(*found, run_dir=self._run_dir)
        if has_world():
            world().session.recorder.record(Setup({SETUP_LOOP: TRAINER}))
        if has_world() and state.max_steps > 0:
            log(total_steps=max(1, int(state.max_steps - state.global_step)))  # those of this process

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Report the training loss."""
        loss = (logs or {}).get("loss")
        if has_world() and isinstance(loss, (int, float)):
            log(loss=float(loss))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note when an evaluation or a checkpoint may begin."""
        self._begin_seconds = time.monotonic()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note when an evaluation or a checkpoint may begin."""
        self._begin_seconds = time.monotonic()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the evaluation that has ended."""
        self._end("evaluation")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the checkpoint that was written."""
        self._end("checkpoint")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the optimizer of the next training count the steps."""
        _let_go(kwargs.get("optimizer"))

    def _end(self, name: str) -> None:
        begin, now = self._begin_seconds, time.monotonic()
        if begin is not None and has_world():
            world().session.recorder.record(Phase(name, begin, now))
            self._begin_seconds = now


class FarandoleMixin(WholeCheckpoints):
    """Makes a Trainer's gradients meet by Farandole; to be named before the Trainer's class.

    See [Note: one process on the joined batch]. The plan is that of ``farandole run --set`` and ``--plan``.

    Raises:
        ConfigError: the arguments ask for FSDP, DeepSpeed, tensor parallelism or the like, the Trainer sees
            another number of processes than Farandole (without GPU it needs ``use_cpu=True``),
            ``average_tokens_across_devices`` is off, a ``compute_loss`` of the subclass's own does not say
            whether it counts items (``loss_is_scaled_for_ga``), or the plan has a degree beside data.
    """

    accelerator: Any
    args: Any
    callback_handler: Any
    model_wrapped: Any
    optimizer: Any
    _evaluated: _Evaluated

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and let Farandole distribute what it prepares."""
        here = world() if has_world() else init()
        check_job("trainer")
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = _TrainerAccelerator
        self.accelerator._take_over()
        self.accelerator.has_only_losses = bool(self.args.prediction_loss_only)
        if self.args.world_size != here.size:
            raise ConfigError(
                f"TrainingArguments sees {self.args.world_size} processes and Farandole {here.size}",
                remedy="start it with: farandole run -np N -- python train.py; without GPU pass use_cpu=True",
            )
        if here.size > 1 and not self.args.average_tokens_across_devices:
            raise ConfigError(
                "average_tokens_across_devices=False: a mean of the ranks' means is no mean over all tokens",
                remedy="leave it True, which is the default",
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; the steps of a training that follows are counted by its own optimizer."""
        resumes = args[0] if args else kwargs.get("resume_from_checkpoint")
        if resumes:
            check_job("resume")
        handler = self.callback_handler
        if not any(isinstance(each, FarandoleCallback) for each in handler.callbacks):
            handler.add_callback(FarandoleCallback)  # loss, evaluations and checkpoints
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            _let_go(self.optimizer)

    def get_train_dataloader(self) -> Any:
        """Return this rank's part of the training batches, each with its weight."""
        self.accelerator.divides = True
        self.accelerator.joins_rows = joins_rows(getattr(self, "loss", None))
        try:
            return super().get_train_dataloader()  # type: ignore[misc]
        finally:
            self.accelerator.divides = False

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's part of the evaluation's batches."""
        self.accelerator.joins_rows = joins_rows(getattr(self, "loss", None))
        return super().get_eval_dataloader(*args, **kwargs)  # type: ignore[misc]

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's part of the batches to predict."""
        self.accelerator.joins_rows = joins_rows(getattr(self, "loss", None))
        return super().get_test_dataloader(*args, **kwargs)  # type: ignore[misc]

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count the items without those of placeholders."""
        counted = [_without_labels(batch) if _is_placeholder(batch) else batch for batch in batch_samples]
        return super()._get_num_items_in_batch(counted, device)  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Train on one batch with its weight; return the loss times that weight."""
        if num_items_in_batch is not None:
            self._refuse_unknown_loss()
        weight = take_weight(inputs)
        factor = 1.0
        if weight is not None:
            factor = float(weight.samples > 0) if self._counts_items(num_items_in_batch) else weight.share
        self.accelerator.loss_weight = factor
        try:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        finally:
            self.accelerator.loss_weight = 1.0
        return loss if factor == 1.0 else loss * factor

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Predict; the loss is the mean over this rank's batch, or in the last batches over all their samples."""
        with _counted_by_one_rank(self.args):
            step = super().prediction_step  # type: ignore[misc]
            weight = take_weight(inputs)
            if weight is not None:
                loss, *_ = step(model, inputs, True, ignore_keys=ignore_keys)
                if loss is not None:
                    self._evaluated.add(loss, weight)
                return loss, None, None
            own, samples = _own_samples(self.accelerator, inputs)
            if samples is None:
                return step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
            rest = (
                (None, None) if prediction_loss_only else step(model, inputs, False, ignore_keys=ignore_keys)[1:]
            )
            # On all ranks, also on those without samples of their own: a divided model's pass is one of all ranks.
            loss, *_ = step(model, own, True, ignore_keys=ignore_keys)
            return loss if loss is None else torch.full_like(loss, mean(loss, samples)), *rest

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate as the Trainer does; the loss over whole batches is the mean over the samples of all ranks."""
        self._evaluated = _Evaluated()
        output = super().evaluation_loop(  # type: ignore[misc]
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        if self._evaluated.batches:
            output.metrics[f"{metric_key_prefix}_loss"] = self._evaluated.mean()
        return output

    def _refuse_unknown_loss(self) -> None:
        """Raise `ConfigError` for a loss of the subclass's own that may count items, or be a mean over a batch.

        The Trainer's rule holds for one that calls ``super().compute_loss``: the model counts items if it can.
        """
        own = [vars(kind)["compute_loss"] for kind in type(self).__mro__ if "compute_loss" in vars(kind)][:-1]
        passes_on = any("compute_loss" in getattr(getattr(each, "__code__", None), "co_names", ()) for each in own)
        is_told = getattr(self, "loss_is_scaled_for_ga", None) is not None
        if not own or passes_on or is_told or world().size == 1:
            return
        if getattr(self, "model_accepts_loss_kwargs", False):
            name = type(self).__name__
            raise ConfigError(
                f"{name} has a compute_loss of its own, and the model takes num_items_in_batch: is "
                "the loss a sum over the batch by the items of all ranks, or a mean over the batch?",
                remedy=f"set {name}.loss_is_scaled_for_ga = True for the first, False for the second",
            )

    def _counts_items(self, num_items_in_batch: Any) -> bool:
        """Return whether the loss is a sum over this rank's items by the number of all ranks' items."""
        if num_items_in_batch is None:
            return False
        told = getattr(self, "loss_is_scaled_for_ga", None)
        if told is not None:
            return bool(told)
        return bool(getattr(self, "model_accepts_loss_kwargs", False) or getattr(self, "compute_loss_func", None))


class FarandoleTrainer(FarandoleMixin, Trainer):  # type: ignore[misc]
    """`transformers.Trainer` with Farandole's exchange of gradients; see `FarandoleMixin`."""


class _TrainerAccelerator(FarandoleAccelerator):
    """Divides the training loader by weighed batches, and whole batches of an evaluation that has losses only."""

    divides = False
    has_only_losses = False
    joins_rows = False

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Divide the training loader and losses over whole batches; leave others to Accelerate."""
        has_whole_batches = data_loader.batch_size is None and data_loader.batch_sampler is not None
        if not self.divides and not (has_whole_batches and self.has_only_losses):
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        return prepare_divided(self, data_loader)


class _Evaluated:
    """Losses over whole batches, added up."""

    def __init__(self) -> None:
        self.batches = 0
        self._total, self._samples = 0.0, 0

    def add(self, loss: torch.Tensor, weight: Weight) -> None:
        """Add the mean over a batch; that of a placeholder counts for nothing."""
        self.batches += 1
        if weight.samples:
            self._total += float(loss) * weight.samples
            self._samples += weight.samples

    def mean(self) -> float:
        """Return the mean over the samples of all ranks. To be called on all of them."""
        return mean(self._total / self._samples if self._samples else 0.0, self._samples)


def prepare_divided(accelerator: Any, loader: Any) -> Any:
    """Return Accelerate's loader of one process around this rank's weighed batches of `loader`."""
    from accelerate.data_loader import get_sampler, prepare_data_loader

    from .weighed_batches import divide

    alone = {
        "device": accelerator.device,
        "num_processes": 1,
        "process_index": 0,
        "put_on_device": accelerator.device_placement,
        "rng_types": [],
        "dispatch_batches": False,
        "use_seedable_sampler": accelerator.use_seedable_sampler,
        "data_seed": accelerator.dataloader_config.data_seed,
        "non_blocking": accelerator.non_blocking,
    }
    whole = prepare_data_loader(loader, **alone)  # as one process would: its sampler is seeded
    divided = divide(loader, get_sampler(whole), world(), joins_rows=accelerator.joins_rows)
    made = prepare_data_loader(divided, **alone)
    accelerator._dataloaders.append(made)
    return made


def _let_go(optimizer: Any) -> None:
    inner = inner_optimizer(optimizer)
    if inner is not None and has_world():
        world().session.steps.unregister(inner)


@contextmanager
def _counted_by_one_rank(arguments: Any) -> Iterator[None]:
    """Let a loss count the items of this rank alone: the Trainer weighs the ranks' losses by samples."""
    before, arguments.average_tokens_across_devices = arguments.average_tokens_across_devices, False
    try:
        yield
    finally:
        arguments.average_tokens_across_devices = before


def _own_samples(accelerator: Any, inputs: Any) -> tuple[Any, int | None]:
    """Return this rank's own samples of the last batches, which Accelerate fills up, and their number.

    There is one sample at least. The number is None where nothing is filled up.
    """
    state, size = accelerator.gradient_state, find_batch_size(inputs)
    remainder = state.remainder if state.end_of_dataloader and accelerator.num_processes > 1 else 0
    if remainder <= 0 or not size:
        return inputs, None
    samples = min(max(remainder - accelerator.process_index * size, 0), size)
    kept = max(samples, 1)
    return recursively_apply(lambda each: each[:kept] if each.shape[:1] == (size,) else each, inputs), samples


def _is_placeholder(batch: Any) -> bool:
    weight = peek_weight(batch)
    return weight is not None and weight.samples == 0


def _without_labels(batch: Any) -> dict[str, Any]:
    """Return the batch with labels that no loss counts."""
    ignored = {name: torch.full_like(batch[name], -100) for name in ("labels", "shift_labels") if name in batch}
    return {**batch, **ignored}

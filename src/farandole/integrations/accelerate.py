"""`FarandoleAccelerator`: Hugging Face Accelerate, with our exchange instead of DistributedDataParallel.

::

    from farandole.integrations.accelerate import FarandoleAccelerator

    accelerator = FarandoleAccelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Accelerate divides the data, places tensors, scales the loss and saves; gradients are exchanged by the engine of
`fd.distribute`, with its codecs and routes, and the model is not wrapped. To record a training that Accelerate
itself distributes, `fd.record(model, optimizer, loader)` takes what ``prepare`` returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..comm.world.world import World, has_world, world
from ..core.env import default_environment
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.rules import check
from ..core.vocabulary.spec import Plan
from ..parallel.distribute import distribute, undistribute
from ..parallel.model import DistributedModel
from ..train.data.loader_watch import watch_loaders
from ..train.session import init
from .shared import check_job, holding_passes, is_divided, missing, whole_parameters

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, DistributedType
except ImportError as problem:
    raise missing("farandole.integrations.accelerate", "accelerate", problem) from None

_PLUGINS = (
    "deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin",
    "parallelism_config",
)  # fmt: skip
_REMEDY = "use accelerate.Accelerator with it, and fd.record to record the training"


class FarandoleAccelerator(Accelerator):  # type: ignore[misc]
    """An `accelerate.Accelerator` whose models are distributed by Farandole.

    Takes the arguments of `accelerate.Accelerator`. Start it with ``farandole run``. Uneven last batches are
    Accelerate's: with ``even_batches=True``, its default, samples are repeated, as with DistributedDataParallel.

    Raises:
        ConfigError: FSDP, DeepSpeed, Megatron, tensor parallelism, fp8 or arguments of DistributedDataParallel are
            asked for, Accelerate sees another number of processes than Farandole, or the plan has a degree beside
            data.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        asked = [name for name in _PLUGINS if kwargs.get(name) is not None]
        handlers = kwargs.get("kwargs_handlers") or []
        asked += [type(each).__name__ for each in handlers if isinstance(each, DistributedDataParallelKwargs)]
        if str(kwargs.get("mixed_precision")) == "fp8":
            asked.append("mixed_precision='fp8'")
        if asked:
            raise ConfigError(f"FarandoleAccelerator does not work with {', '.join(asked)}", remedy=_REMEDY)
        here = world() if has_world() else init()
        check_job("accelerator")
        if here.device.type == "cpu":
            kwargs.setdefault("cpu", True)
        with default_environment(_place(here)):
            super().__init__(*args, **kwargs)
        self._take_over()

    def _take_over(self) -> None:
        """Begin, in an object that a constructor of Accelerate's has made."""
        self.loss_weight = 1.0
        """What the next losses are multiplied with in `backward`."""
        self._waiting: list[nn.Module] = []
        self._distributed: list[nn.Module] = []
        require_plain(self, world())

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Place the model and apply mixed precision; it is distributed together with its optimizer."""
        prepared = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        trains = not evaluation_mode and any(each.requires_grad for each in prepared.parameters())
        is_known = DistributedModel.of(prepared).plan or any(each is prepared for each in self._waiting)
        if trains and not is_known:
            self._waiting.append(prepared)
        return prepared

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as `accelerate.Accelerator` does, and distribute models with their optimizers."""
        prepared = super().prepare(*args, device_placement=device_placement)
        self._distribute()
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Wrap the optimizer as Accelerate does; refuse one that comes after its model was distributed."""
        held = _parameters_of(optimizer)
        for model in self._distributed:
            if held & {id(parameter) for parameter in model.parameters()}:
                raise ConfigError(
                    f"prepare: a {type(optimizer).__name__} has parameters of a model that is distributed already",
                    remedy="give a model and all its optimizers to one call of prepare",
                )
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Run the backward pass, as `accelerate.Accelerator` does."""
        super().backward(loss if self.loss_weight == 1.0 else loss * self.loss_weight, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep the gradients of backward passes in this context on this rank, until the first one after it."""
        with holding_passes():
            yield

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Refuse: it is a feature of DistributedDataParallel."""
        raise ConfigError(
            "FarandoleAccelerator has no join_uneven_inputs",
            remedy="use the loader of farandole.shard, which weighs uneven batches, or even_batches=True",
        )

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return the model's state; at ZeRO stage 3 the whole one, in CPU memory: call it on all ranks."""
        if not is_divided(model):
            return super().get_state_dict(model, unwrap=unwrap)
        with whole_parameters(model):
            return super().get_state_dict(model, unwrap=unwrap)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save the state as Accelerate does; refused where optimizers or models are sharded."""
        self._check_whole()
        return super().save_state(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Load what `save_state` saved; refused where optimizers or models are sharded."""
        self._check_whole()
        return super().load_state(*args, **kwargs)

    def _check_whole(self) -> None:
        plans = [DistributedModel.of(model).plan for model in self._distributed]
        for plan in plans if self.num_processes > 1 else ():
            check({**vars(plan or Plan()), "save_state": True})

    def free_memory(self, *objects: Any) -> Any:
        """Forget what was prepared; models are no longer distributed, and may be prepared anew."""
        for model in self._distributed:
            undistribute(model)
        self._distributed.clear()
        self._waiting.clear()
        return super().free_memory(*objects)

    def _distribute(self) -> None:
        """Distribute the models whose optimizers are here."""
        optimizers = [each.optimizer for each in self._optimizers]
        while True:
            group = next((found for model in self._waiting if (found := self._group(model, optimizers))[1]), None)
            if group is None:
                return
            models, theirs = group
            whole = models[0] if len(models) == 1 else nn.ModuleList(models)
            distribute(whole, theirs)
            watch_loaders(world())
            self._waiting = [each for each in self._waiting if not any(each is model for model in models)]
            self._distributed.append(whole)

    def _group(self, first: nn.Module, optimizers: list[Any]) -> tuple[list[nn.Module], list[Any]]:
        """Return the waiting models that share optimizers with `first`, and these optimizers."""
        models, theirs = [first], []
        for _ in optimizers:
            known = {id(parameter) for model in models for parameter in model.parameters()}
            theirs = [each for each in optimizers if _parameters_of(each) & known]
            held = set().union(*map(_parameters_of, theirs))
            models = [
                model for model in self._waiting if held & {id(each) for each in model.parameters()}
            ] or models
        return models, theirs


def require_plain(accelerator: Any, here: World) -> None:
    """Raise `ConfigError` unless `accelerator` is for plain data parallelism over the ranks of `here`."""
    kind = accelerator.distributed_type
    if kind not in {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}:
        raise ConfigError(f"Accelerate is set up for {kind}, which Farandole does not drive", remedy=_REMEDY)
    if accelerator.num_processes != here.size:
        raise ConfigError(
            f"Accelerate sees {accelerator.num_processes} processes and Farandole {here.size}",
            remedy="call farandole.init() before anything of Accelerate, pass use_cpu=True to TrainingArguments "
            "on hosts without GPU, and start with: farandole run -np N -- python train.py",
        )


def _place(here: World) -> dict[str, str]:
    """Return the variables by which Accelerate finds its rank."""
    if here.size == 1:
        return {}
    return {
        "RANK": str(here.rank),
        "WORLD_SIZE": str(here.size),
        "LOCAL_RANK": str(here.local_rank),
        "LOCAL_WORLD_SIZE": str(here.local_size),
    }


def _parameters_of(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

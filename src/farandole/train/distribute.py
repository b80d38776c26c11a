"""`fd.distribute` and `fd.averaged`: a model, its plan, and when its replicas agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, overload

from torch import nn
from torch.optim import Optimizer

from ..comm.autotune.autotuner import Autotuner
from ..comm.engine.parameters import ExtraTensors
from ..comm.world.world import World
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.sync_spec import MEASURED, SyncSpec
from ..parallel.distribute import distribute as distribute_model
from ..parallel.model import DistributedModel
from ..parallel.optim.elementwise import why_not_elementwise
from ..sync.local_steps import LocalSteps, MeasuredSync
from ..sync.server.dense.policy import ServerSync
from .verify.verification_run import VerificationRun

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)  # noqa: E741


@overload
def distribute(model: M, optimizer: O, plan: Plan | None = None) -> tuple[M, O]: ...
@overload
def distribute(model: M, optimizer: list[O], plan: Plan | None = None) -> tuple[M, list[O]]: ...


def distribute(model: Any, optimizer: Any, plan: Plan | None = None) -> tuple[Any, Any]:
    """Make `model` train on all ranks as one process would on the joined batch; return the same two objects.

    Parameters, buffers and optimizer state are broadcast from rank 0. After every ``backward()``,
    ``parameter.grad`` is the mean over the samples of all ranks. The model is changed in place and not wrapped.
    With the plan's key ``sync`` ranks train on their own, and meet every H steps: see `averaged` and `drain`.

    Args:
        model: the module to train, the same on all ranks.
        optimizer: its optimizer, or a list of several.
        plan: configuration of the exchange; by default the plan of ``farandole run --plan`` and ``--set``.

    Returns:
        The same two objects, `model` and `optimizer`.

    Raises:
        ConfigError: the model or the optimizer cannot be distributed.
        PlanError: `plan` contradicts the launcher's plan, or does not fit this model or world.
        Mismatch: the ranks' models differ; raised on every rank.
    """
    return distribute_model(model, optimizer, plan, make_policy=_make_policy)


@contextmanager
def averaged(model: nn.Module) -> Iterator[None]:
    """In this context `model` has the parameters that the ranks averaged at their last meeting: to evaluate it.

    ::

        with fd.averaged(model):
            loss = fd.evaluate(model, loss_function, inputs, targets)

    Nothing is sent. Afterwards the model has this rank's own parameters again, to the bit. Where ranks agree in
    every step the model's parameters are the averaged ones, and nothing changes.

    Raises:
        ConfigError: the model is not distributed.
    """
    policy = DistributedModel.require(model, "fd.averaged").policy
    if policy is None:
        yield
        return
    with policy.averaged():
        yield


def _make_policy(
    here: World,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    plan: Plan,
    *,
    buffers: ExtraTensors | None,
    end_every_step: Callable[[], None] | None,
    tuner: Callable[[], Autotuner | None],
) -> LocalSteps | MeasuredSync | ServerSync:
    if here.session.kept(VerificationRun) is not None:
        raise ConfigError(
            "farandole verify compares what ranks have after each step, and by the plan's sync they train alone",
            remedy="leave sync out for the check: gradients of a rank are torch's own then",
        )
    if SyncSpec.parse(plan.sync).is_server:
        return ServerSync(here, model, optimizers, plan, why_not=why_not_elementwise)
    if plan.sync == MEASURED:
        assert end_every_step is not None, "gradients are exchanged first"
        return MeasuredSync(
            here, model, optimizers, plan, buffers=buffers, end_every_step=end_every_step, tuner=tuner
        )
    return LocalSteps(here, model, optimizers, plan, buffers=buffers, end_every_step=end_every_step)

"""`fd.step` and `fd.evaluate`: the passes of a batch, by micro-batches, under every plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.engine.guards import CountCalls
from ..comm.world.comm_errors import translated
from ..comm.world.store_sync import all_gather_json
from ..comm.world.world import World, world
from ..core.vocabulary.errors import ConfigError, Mismatch
from ..core.vocabulary.text import name_ranks
from .context.context import Context
from .data.tuned_micro_batches import TunedMicroBatches
from .distribute import local_policies
from .expert.layer import losses_of_layers
from .instrument.phase_hooks import inner_exchange
from .mesh import Mesh
from .model import DistributedModel
from .pipeline.micro_batches import (
    MicroBatches,
    as_call,
    samples_in,
    split_batch,
    tensors_of,
    unequal_targets,
    whole_parts,
)
from .pipeline.stage import LayerLoss, require_loss
from .pipeline.without_flush import DelayedPipeline

LossFunction = Callable[[Any, Any], torch.Tensor]
CountFunction = Callable[[Any], float | torch.Tensor]


def step(
    model: nn.Module,
    loss_function: LossFunction,
    inputs: Any,
    targets: Any = None,
    *,
    count: CountFunction | None = None,
    balance: float = 0.0,
    z: float = 0.0,
) -> torch.Tensor:
    """Run forward and backward of a batch; return the mean loss over the samples of all ranks.

    Call it on all ranks. The batch is divided along its first dimension into the plan's ``micro_batches``, one
    after the other or, with a pipeline, by its ``schedule``. Gradients are those of the mean over the
    micro-batches, and then the mean over the ranks. Clip them and step the optimizer as after ``backward()``.
    Under `torch.no_grad` it is `evaluate`. With ``weight_versions = 2`` gradients are of the batch before, and
    after the first batch there are none: see `drain`.

    Args:
        model: a model that `distribute` was called with.
        loss_function: called as ``loss_function(output, targets)`` for each micro-batch, on the ranks that have
            the output; returns the mean over its samples, a tensor with one element.
        inputs: the model's input: a tensor, a tuple (positional arguments) or a dict (named ones).
        targets: what the loss function gets: a tensor, or a tuple, list or dict of tensors.
        count: called with the targets of a micro-batch; returns what its loss is a mean over, where that is not
            samples: ``lambda targets: (targets != -100).sum()``. Gradients and loss are then those of one mean
            over all that counts, in all micro-batches and on all ranks.
        balance: weight of the load-balancing losses of `MixtureOfExperts` layers, which are added to the loss.
        z: weight of their router z losses. See `router_loss`.

    Returns:
        A scalar without gradients, the same on all ranks: float32, or float64 for a model in float64. With
        ``weight_versions = 2`` it is still on its way, and reading it waits for the last stage. While ranks train
        on their own (plan key ``sync``) it is the mean over this rank's samples.

    Raises:
        ConfigError: the model is not distributed, the batch does not divide, the loss is no scalar, or unequal
            numbers of targets do not count and there is no `count`.
        PlanError: the model cannot be cut as the plan says.
        Mismatch: the ranks of one pipeline were given different batches.
        PeerLost: another rank is gone.
    """
    if not torch.is_grad_enabled():
        return evaluate(model, loss_function, inputs, targets, count=count)
    distributed, here = DistributedModel.require(model, "fd.step"), world()
    _, mesh = distributed.plan_and_mesh
    pipeline, policy = distributed.pipeline, distributed.policy
    batch, total = _counted(split_batch(inputs, targets, _micro_batches(distributed)), count)
    if isinstance(pipeline, DelayedPipeline):
        _refuse_delayed(mesh, held=here.session.holds_passes, counts=count is not None, adds=bool(balance or z))
        unequal = None if count is not None else batch.unequal()
        trained = pipeline.train(loss_function, batch, share=here.session.batch_weight.factor, is_unequal=unequal)
        _exchange_ended(distributed, trained.share)
        return trained.loss
    is_alone = policy is not None and policy.is_local
    if count is not None and not is_alone:
        weight(total)
    layer_loss = partial(losses_of_layers, balance=balance, z=z) if balance or z else None
    held = here.session.holds_passes
    tuned = here.session.kept(TunedMicroBatches)
    if tuned is None or pipeline is not None:
        loss = _passes(here, model, loss_function, batch, held=held, layer_loss=layer_loss)
    else:
        divided = _tuned(
            here, model, loss_function, tuned=tuned, batch=batch, whole=(inputs, targets), count=count,
            adds=layer_loss is not None,
        )  # fmt: skip
        with tuned.watching(model, loss_function) as watched:
            loss = _passes(here, model, watched, divided, held=held, layer_loss=layer_loss)
    if is_alone:
        return loss.detach()
    share = here.session.batch_weight
    context = here.session.kept(Context)
    within = context.count_share if context is not None and share.count_number else 1.0
    return _mean(model, mesh, loss, share.factor * within, batch if count is None else None)


def drain(model: nn.Module) -> bool:
    """Run what is still open of the last batch (``weight_versions = 2``), or meet now (``sync``).

    Call it on all ranks. With two versions of the weights the gradients of that batch are those of the parameters
    then: step the optimizer once more. To be called by all ranks after the loop, and before a checkpoint. The next
    `step` fills the pipeline anew.

    Where ranks train on their own (plan key ``sync``) they meet, over all that changed since the last meeting:
    afterwards all have the averaged parameters. Under any other plan it does nothing.

    Args:
        model: a model that `distribute` was called with.

    Returns:
        Whether there are gradients that the optimizer has not used.

    Raises:
        ConfigError: the model is not distributed, or a step of it was interrupted.
        PeerLost: another rank is gone.
    """
    distributed = DistributedModel.require(model, "fd.drain")
    if distributed.policy is not None:
        distributed.policy.drain()
    pipeline = distributed.pipeline
    share = pipeline.drain() if isinstance(pipeline, DelayedPipeline) else None
    _exchange_ended(distributed, share)
    return share is not None


def evaluate(
    model: nn.Module,
    loss_function: LossFunction,
    inputs: Any,
    targets: Any = None,
    *,
    count: CountFunction | None = None,
) -> torch.Tensor:
    """Run the forward pass of a batch, without gradients; return the mean loss over the samples of all ranks.

    Call it on all ranks. As `step`, but the batch may have any number of samples, as the last one of a loader has,
    and another one on each rank: it goes in as many micro-batches as divide it. To be called by all ranks, as
    often on each. The mode of the model stays: call ``model.eval()`` before. A loss function may return any mean,
    such as an accuracy.

    Args:
        model: a model that `distribute` was called with.
        loss_function: as in `step`.
        inputs: as in `step`.
        targets: as in `step`.
        count: as in `step`; the mean over the ranks goes by it, and by samples without it.

    Returns:
        A scalar without gradients, the same on all ranks.

    Raises:
        ConfigError: the model is not distributed, the loss is no scalar, or unequal numbers of targets do not
            count and there is no `count`.
        PlanError: the model cannot be cut as the plan says.
        Mismatch: the ranks of one pipeline were given different batches.
        PeerLost: another rank is gone.
    """
    distributed, here = DistributedModel.require(model, "fd.evaluate"), world()
    _, mesh = distributed.plan_and_mesh
    most = _micro_batches(distributed)
    with torch.no_grad():
        samples = samples_in((inputs, targets))
        size = whole_parts(_everyones(here, samples), most) if most > 1 else 1
        batch, total = _counted(split_batch(inputs, targets, size), count)
        loss = _passes(here, model, loss_function, batch, held=False)
    total = float(samples) if count is None else total
    is_placeholder = here.session.batch_weight.by_samples == 0.0
    return _mean(model, mesh, loss, 0.0 if is_placeholder else total, batch if count is None else None)


def _tuned(
    here: World, model: nn.Module, loss_function: LossFunction, *, tuned: TunedMicroBatches, batch: MicroBatches,
    whole: tuple[Any, Any], count: CountFunction | None, adds: bool,
) -> MicroBatches:  # fmt: skip
    """Return `batch`, as the plan divides it, or as a tuner does. See [Note: micro-batches of a tuned job].

    `whole`: inputs and targets. `adds`: whether layers add losses.
    """
    samples, reducer, divided = samples_in(whole), DistributedModel.of(model).reducer, batch
    weighed = here.session.batch_weight.count_number and count is None
    is_even = all(len(each) == samples for each in tensors_of(whole) if each.dim())
    problem = "balance and z are means over a whole batch" if adds else ""
    problem = problem or ("fd.weight counts, without count=" if weighed else "")
    problem = problem or ("" if is_even else "tensors of a batch have different numbers of samples")
    is_open = tuned.begin(model, reducer, samples, problem) and samples > 0
    planned = len(batch.parts)
    number = whole_parts([samples], min(tuned.number, samples)) if is_open and tuned.number else planned
    if planned not in (number, tuned.number):
        divided, _ = _counted(split_batch(*whole, number), count)
        if (count is None and divided.unequal() is not None) or not _is_same_loss(
            here, tuned, model, loss_function, (batch, divided)
        ):
            divided = batch
    if reducer is not None:
        reducer.divide_alone(len(divided.parts) - planned)
    return divided


def _is_same_loss(
    here: World,
    tuned: TunedMicroBatches,
    model: nn.Module,
    loss_function: LossFunction,
    ways: Sequence[MicroBatches],
) -> bool:
    """Return whether it is not known that the loss of a batch depends on how it is divided."""
    if not tuned.wants_check():
        return True
    with torch.no_grad():
        found = [float(_passes(here, model, loss_function, each, held=False)) for each in ways]
    if not all(map(math.isfinite, found)):
        return False
    tuned.compare(model, *found)
    return not tuned.problem


def _refuse_delayed(mesh: Mesh, *, held: bool, counts: bool, adds: bool) -> None:
    """Refuse what a step with two versions of the weights cannot do, on every rank alike."""
    weighed = mesh.here.session.batch_weight.count_number and mesh.here.size > mesh.size("pipeline")
    for is_said, what, remedy in (
        (held, "gradients that are held back (fd.accumulate)", "set micro_batches in the plan"),
        (adds, "balance and z, losses that layers add", "set weight_versions = 1"),
        (
            counts and mesh.here.size > mesh.size("pipeline"),
            "count, with several replicas: their weights would have to be agreed on in each step",
            "set weight_versions = 1, or data = 1",
        ),
        (weighed, "fd.weight", "call fd.weight(None), or set weight_versions = 1"),
    ):
        if is_said:
            raise ConfigError(f"fd.step: plan: weight_versions = 2 does not do {what}", remedy=remedy)


def _exchange_ended(distributed: DistributedModel, share: float | None) -> None:
    """Let replicas exchange the gradients of a batch that has ended; `share`: of its samples, None if none has."""
    if share is not None and distributed.reducer is not None:
        distributed.reducer.exchange(share=share)


def _micro_batches(distributed: DistributedModel) -> int:
    plan, _ = distributed.plan_and_mesh
    return (plan.micro_batches or 1) if distributed.pipeline is None else distributed.pipeline.micro_batches


def _counted(parts: list[tuple[Any, Any]], count: CountFunction | None) -> tuple[MicroBatches, float]:
    """Return micro-batches with their shares, and what all of them count on this rank."""
    equal = [1.0 / len(parts)] * len(parts)
    if count is None:
        return MicroBatches(parts, equal), 0.0
    counts = []
    for _, targets in parts:
        given = count(targets)
        number, is_valid = as_number(given)
        if not is_valid:
            raise ConfigError(f"count returned {given!r}; expected a number of at least 0")
        counts.append(number)
    total = sum(counts)
    return MicroBatches(parts, [each / total for each in counts] if total else [0.0] * len(parts)), total


def _passes(
    here: World,
    model: nn.Module,
    loss_function: LossFunction,
    batch: MicroBatches,
    *,
    held: bool,
    layer_loss: LayerLoss | None = None,
) -> torch.Tensor:
    """Run the passes of `batch`; return this rank's mean loss. `held`: its gradients are exchanged later."""
    distributed, before = DistributedModel.of(model), here.session.holds_passes
    pipeline = distributed.pipeline
    try:
        if pipeline is None:
            return _plain(here, model, loss_function, batch, held=held, layer_loss=layer_loss)
        here.session.hold_passes(True)
        loss = pipeline.step(loss_function, batch, held=held, layer_loss=layer_loss)
        here.session.hold_passes(before)
        if distributed.exchange is not None and not held and torch.is_grad_enabled():
            distributed.exchange.flush()
        return loss
    finally:
        here.session.hold_passes(before)


def _plain(
    here: World,
    model: nn.Module,
    loss_function: LossFunction,
    batch: MicroBatches,
    *,
    held: bool,
    layer_loss: LayerLoss | None,
) -> torch.Tensor:
    losses = []
    trains = torch.is_grad_enabled()
    for number, ((inputs, _), share) in enumerate(zip(batch.parts, batch.shares, strict=True)):
        here.session.hold_passes(held or number + 1 < len(batch.parts))
        arguments, named = as_call(inputs)
        output = model(*arguments, **named)
        loss = require_loss(batch.loss_of(loss_function, number, output), trains=trains)
        extra = None if layer_loss is None else layer_loss(model)
        loss = loss if extra is None else loss + extra
        if trains:
            torch.autograd.backward(loss, torch.full_like(loss, share))
        losses.append(loss.detach())
    return batch.mean(losses)


def _everyones(here: World, number: int) -> list[int]:
    if here.size == 1:
        return [number]
    mine = torch.tensor([number], device=here.device)
    gathered = [torch.empty_like(mine) for _ in range(here.size)]
    with translated(here, "samples of an evaluation"):
        dist.all_gather(gathered, mine, group=here.group)
    return [int(each) for each in gathered]


def _mean(
    model: nn.Module, mesh: Mesh, loss: torch.Tensor, share: float, uncounted: MicroBatches | None
) -> torch.Tensor:
    """Return the mean over the ranks, weighed by `share`; those of one pipeline have the same loss.

    `uncounted`: micro-batches of which it is not known what counts.
    """
    here = mesh.here
    ignored = uncounted.ignored() if uncounted is not None else []
    unequal = None if uncounted is None else uncounted.unequal()
    own = loss.detach().to(device=here.device, dtype=torch.float64)
    own = own * share if share else torch.zeros_like(own)
    rest = torch.tensor([share, float(unequal is not None)], dtype=torch.float64, device=here.device)
    sums = torch.cat([own.reshape(1), rest])
    if here.size > mesh.size("pipeline"):
        with translated(here, "mean of the loss"), inner_exchange(here, "loss", sums.nbytes):
            dist.all_reduce(sums, group=here.group)
    if ignored and float(sums[2]):
        raise unequal or unequal_targets(" on another rank")
    mean = sums[0] / sums[1]
    return mean if any(each.dtype == torch.float64 for each in model.parameters()) else mean.float()


# `fd.weight`: what this rank's loss is a mean of, where that is not samples: tokens, boxes, nodes.
#
# See [Note: weights by count] in `comm.batch_weight`.


def weight(count: float | torch.Tensor | None) -> float:
    """Weigh this rank's gradients by `count` instead of samples, in this step. Call it on all ranks.

    For a loss that is a mean over tokens: with the number of tokens of this rank's batch, the gradient is that of
    one mean over all tokens of all ranks. Call it before each ``backward()``, before or after the forward pass; it
    serves the backward passes until the next call or the optimizer's step. It costs one small exchange.

    Args:
        count: what the loss is a mean over, a number or a tensor with one element; 0 if there is nothing.
            None: weigh by samples again.

    Returns:
        The sum of the counts over the ranks; 0.0 for None.

    Raises:
        ConfigError: a count is negative or not finite, or all are 0; raised on every rank.
        Mismatch: some ranks gave None, or left the call out in this step; raised on every rank.
    """
    here = world()
    if local_policies(here):
        raise ConfigError(
            "fd.weight is not there yet while ranks train on their own (plan key sync): meetings go by samples",
            remedy="leave fd.weight or sync out; fd.step(count=...) weighs the micro-batches of a rank",
        )
    share = here.session.batch_weight
    own, is_valid = as_number(count)
    if share.by_samples == 0.0:
        own = 0.0  # a placeholder
    total, without, invalid = CountCalls.of(here).add_up(own, is_none=count is None, is_invalid=not is_valid)
    if invalid:
        _refuse(here, "count", f"{count!r}", is_valid, "expected a number of at least 0")
    if without and without < here.size:
        gathered = all_gather_json(here, "fd.weight/None", count is None)
        ranks = name_ranks([rank for rank, each in enumerate(gathered) if each])
        raise Mismatch(
            f"{ranks} gave None and the others a count", rank=here.rank, operation="fd.weight",
            remedy="give a count on all ranks, or None on all",
        )  # fmt: skip
    if without:
        share.set_by_count(None)
        return 0.0
    if total == 0.0:
        raise ConfigError(
            "weight: the count is 0 on all ranks, and a mean over nothing has no gradient",
            remedy="leave the batch out on all ranks",
        )
    context = here.session.kept(Context)
    if context is not None:
        own = context.weigh(own)
    share.set_by_count(own * here.size / total)
    return total / here.degrees.size_over(("pipeline", "tensor"))  # these ranks counted the same samples


def as_number(count: Any) -> tuple[float, bool]:
    """Return the count, 0.0 for none, and whether it is one."""
    if count is None:
        return 0.0, True
    if isinstance(count, torch.Tensor):
        if count.numel() != 1 or count.is_complex():
            return 0.0, False
        count = float(count.detach())
    if isinstance(count, bool):
        return 0.0, False
    try:
        number = float(count)
    except (TypeError, ValueError):
        return 0.0, False
    return (number, True) if math.isfinite(number) and number >= 0 else (0.0, False)


def _refuse(here: World, what: str, shown: str, is_valid: bool, expected: str) -> None:
    gathered = all_gather_json(here, f"fd.weight/{what}", "" if is_valid else shown[:80])
    wrong = [f"{text} on rank {rank}" for rank, text in enumerate(gathered) if text]
    raise ConfigError(f"weight: the {what} is {', '.join(wrong[:4])}; {expected}")

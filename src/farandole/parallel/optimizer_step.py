"""What a step of an optimizer does besides: exchange, clip, scale, count; and ranks that meet rarely."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..comm.autotune.autotuner import Autotuner
from ..comm.engine.reducer import GradientReducer
from ..comm.world.world import has_world
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.sync_spec import SyncSpec
from .data.batch_norm import BufferSync
from .data.model_changes import (
    ModelGuard,
)
from .instrument.phase_hooks import PolicyHook, end_steps_with, watch_optimizer
from .model import DistributedModel, Strategy
from .optim.one_bit_adam import OneBitAdam
from .optim.step_hooks import BeforeStep, Clipping, SyncPolicy
from .zero.sharded_step import ShardedStep


class RareMeetings(Strategy):
    """The plan's `sync`: ranks train on their own between meetings, after the plan's first steps."""

    takes_own_parameters = True

    def is_asked(self) -> bool:
        """Where ranks do not agree in every step; in a world of one where what they agree on is no plain mean."""
        sync = SyncSpec.parse(self.plan.sync)
        is_rare = not sync.is_every_step and (self.mesh.here.size > 1 or not sync.is_plain_mean)
        return self.call.make_policy is not None and is_rare

    def apply(self) -> None:
        """Let a policy have its turn in each step."""
        own, model, plan, replicas = self.distributed, self.model, self.plan, self.mesh.replicas
        assert self.call.make_policy is not None, "asked above"
        buffers = BufferSync(replicas, model) if plan.buffers == "mean" else None
        seen = weakref.ref(own)  # which keeps the policy
        end = partial(_end_every_step, seen) if SyncSpec.parse(plan.sync).exchanges_gradients else None
        policy = own.policy = self.call.make_policy(
            replicas, model, self.optimizers, plan, buffers=buffers, end_every_step=end,
            tuner=partial(_tuner_of, seen),
        )  # fmt: skip
        others = OtherOptimizers(model, self.optimizers, policy)
        own.hooks += [
            others,
            model.register_state_dict_pre_hook(PolicyHook(policy.note_state_dict)),
            model.register_load_state_dict_post_hook(PolicyHook(policy.note_loaded)),
        ]


def _end_every_step(seen: weakref.ref[DistributedModel]) -> None:
    distributed = seen()
    if distributed is not None:
        distributed.end_every_step()


def _tuner_of(seen: weakref.ref[DistributedModel]) -> Autotuner | None:
    distributed = seen()
    return None if distributed is None or distributed.reducer is None else distributed.reducer.tuner


class OptimizerSteps(Strategy):
    """Before each step gradients that did not travel yet do, and are clipped; afterwards the step is counted."""

    takes_own_parameters = True

    def is_asked(self) -> bool:
        """Always."""
        return True

    def apply(self) -> None:
        """Hook the optimizers, in the order that a step needs."""
        own, plan, here, model = self.distributed, self.plan, self.mesh.here, self.model
        listener, sharded, passes = own.listener, own.sharded, own.passes
        scale = None if passes is None else passes.scale
        if passes is not None and scale is not None and listener is not None:
            listener.call_after_exchange(passes.look_at_gradients)
            passes.stand_ins = passes.stand_ins if sharded is None else sharded.stand_ins
        guard = ModelGuard(model, None if sharded is None else sharded.stand_ins)
        if listener is not None:
            listener.before_forward = guard.check
        clipping = None
        if plan.clip_norm is not None:
            in_steps = plan.zero == 0 and scale is None and not plan.bf16_parameters
            clipping = Clipping(plan.clip_norm, self.optimizers, own.exchange, in_steps=in_steps)
            own.hooks += clipping.hooks
        steps: list[ShardedStep] = []
        for each in self.optimizers:
            if isinstance(listener, GradientReducer) and isinstance(each, OneBitAdam):
                each.attach(listener, dict(model.named_parameters()))
            watch_optimizer(each, here)
            before = BeforeStep(
                self.mesh.replicas, each, own.exchange, clipping=clipping, scale=scale, model=guard,
                models=DistributedModel.all, policy=own.policy,
            )  # fmt: skip
            own.hooks.append(each.register_step_pre_hook(before))
            if own.policy is not None:
                own.hooks.append(end_steps_with(each, before.meet))
            if clipping is not None:
                own.hooks.append(each.register_step_post_hook(clipping.after))
            if isinstance(listener, GradientReducer) and listener.mesh is not None:
                steps.append(ShardedStep(each, listener, listener.mesh))
            if scale is not None:
                own.hooks.append(each.register_step_post_hook(before.after))
        own.sharded_steps = steps


# Steps of optimizers that a model's policy does not know.
#
# [Note: other optimizers] Where gradients meet in each step any optimizer makes the same step on all ranks, one
# that was made after `farandole.distribute` too. A policy that lets ranks train on their own sees steps of the
# optimizers that it was given: what others change would stay on this rank, and be lost at the next meeting. A
# wrapper that calls one of those within its own step is no such optimizer, which is known only when its step ends.
#
# [Note: hooks of all optimizers] By a plain loop torch goes through them. One that is taken away meanwhile, by the
# finalizer of a model in the middle of an optimizer's step, ends that step in a RuntimeError. So ours stay, and
# ask those that live.


class OtherOptimizers:
    """Refuses them. See [Note: other optimizers]."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], policy: SyncPolicy) -> None:
        self._model, self._policy = weakref.ref(model), policy
        self._known = weakref.WeakSet(optimizers)
        self._steps = 0
        """Those that known ones have begun."""
        self._begun: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """What `_steps` was when the step of another one began."""
        _hook_all_optimizers()
        _watching.add(self)

    def remove(self) -> None:
        """Look no more."""
        _watching.discard(self)

    def step_begins(self, optimizer: Optimizer) -> None:
        """Any optimizer is about to step."""
        if optimizer in self._known:
            self._steps += 1
        else:
            self._begun[optimizer] = self._steps

    def step_ends(self, optimizer: Optimizer) -> None:
        """It has stepped. Raises `ConfigError`."""
        begun, model = self._begun.pop(optimizer, self._steps + 1), self._model()
        if begun != self._steps or model is None or not has_world() or not self._policy.is_local:
            return
        owned = {id(each) for each in model.parameters()}
        if any(id(each) in owned for group in optimizer.param_groups for each in group["params"]):
            raise ConfigError(
                f"a {type(optimizer).__name__} that farandole.distribute was not given has stepped over "
                "parameters of a model whose ranks train on their own: what it changes would stay on this rank",
                remedy="give all optimizers to farandole.distribute, as a list",
            )


_watching: weakref.WeakSet[OtherOptimizers] = weakref.WeakSet()


@cache
def _hook_all_optimizers() -> None:
    """See [Note: hooks of all optimizers]."""

    def begins(optimizer: Optimizer, *_: Any) -> None:
        for each in list(_watching):
            each.step_begins(optimizer)

    def ends(optimizer: Optimizer, *_: Any) -> None:
        for each in list(_watching):
            each.step_ends(optimizer)

    register_optimizer_step_pre_hook(begins)
    register_optimizer_step_post_hook(ends)

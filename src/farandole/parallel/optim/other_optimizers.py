"""Steps of optimizers that a model's policy does not know.

[Note: other optimizers] Where gradients meet in each step any optimizer makes the same step on all ranks, one that
was made after `farandole.distribute` too. A policy that lets ranks train on their own sees steps of the optimizers
that it was given: what others change would stay on this rank, and be lost at the next meeting. A wrapper that
calls one of those within its own step is no such optimizer, which is known only when its step ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...comm.world.world import has_world
from ...core.vocabulary.errors import ConfigError
from .sync_policy import SyncPolicy


class OtherOptimizers:
    """Refuses them. See [Note: other optimizers]."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], policy: SyncPolicy) -> None:
        self._model, self._policy = weakref.ref(model), policy
        self._known = weakref.WeakSet(optimizers)
        self._steps = 0
        """Those that known ones have begun."""
        self._begun: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """What `_steps` was when the step of another one began."""
        self.hooks = (
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        )
        for hook in self.hooks:
            weakref.finalize(model, hook.remove).atexit = False

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer in self._known:
            self._steps += 1
        else:
            self._begun[optimizer] = self._steps

    def _step_ends(self, optimizer: Optimizer, *_: Any) -> None:
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

"""``farandole verify``: watch a user's script for a few steps, then answer and stop it.

Used only under that command. It sees what the script does through the watch of the distributed models, torch's
global hook of optimizers and, for the loss, by standing in front of `torch.Tensor.backward`; `stop` takes all of
it back.

[Note: samples of a step] Samples count as trained on when a gradient came back to the output of their pass and an
optimizer's step followed. An evaluation, a pass that makes lazy layers, or a teacher's has neither; its samples
may be the same on all ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...comm.batch_weight import tensors_in
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.vocabulary.run_files import VERIFY, write_private
from ...core.vocabulary.text import name_ranks
from ...parallel.instrument.phase_hooks import observe_passes
from ...parallel.model import DistributedModel
from ..data.loader_watch import samples_of
from .deep_check import DeepCheck
from .joined import JoinedLoss, MeanCounts
from .replay import differentiable
from .verify import (
    Check,
    Verification,
    check_batch_norm,
    check_batches,
    check_buffers,
    check_gradients,
    check_loss,
    check_optimizer,
    check_parameters,
    check_ranks,
    check_repeats,
    check_sizes,
    fingerprint,
    row_hashes,
)


# The check of split layers: which kinds of units were proven to do what the plain modules do.
def check_tensor(here: World, model: nn.Module) -> list[Check]:
    """Say how many units of split layers were proven; nothing for a model without any."""
    proofs = DistributedModel.of(model).proofs
    mine = None if proofs is None else [len(proofs.proven), len(proofs.names), len(proofs.waiting)]
    said = [each for each in all_gather_json(here, "verify/tensor", mine) if each is not None]
    if not said:
        return []
    kinds, units, waiting = (max(each[i] for each in said) for i in range(3))
    if waiting:
        return [
            Check("split layers", None, f"{waiting} of {units} units have not run yet, so they are not proven")
        ]
    return [Check("split layers", True, f"{units} units ({kinds} kinds) do what the plain modules do")]


class FrontEnd(Protocol):
    """A training that is not torch's, and watches itself."""

    def checks(self) -> list[Check]:
        """Return what was found, the same on all ranks. Called once, by all of them."""


@dataclass(frozen=True)
class _SeenPass:
    """A forward pass of a distributed model."""

    step: int
    samples: int
    fingerprint: str
    rows: list[str]


class VerificationRun:
    """Watches `steps` optimizer steps, writes ``verify.json`` on rank 0, and ends the script with exit code 0."""

    def __init__(self, world: World, steps: int, directory: Path | None, deep: bool = False) -> None:
        self._world = world
        self.steps = steps
        self._directory = directory
        self._begun: _SeenPass | None = None
        self._pending: list[_SeenPass] = []
        """Passes that a gradient came back to, since the last step."""
        self._trained: list[_SeenPass] = []
        """Those of finished steps. See [Note: samples of a step]."""
        self._losses: list[float] = []
        self._optimizers: list[Optimizer] = []
        self._undo: list[Callable[[], None]] = []
        self._own_steps = 0
        """Steps of the first optimizer: where no model is distributed, nothing else counts them."""
        self._concluded = False
        self._front_end: FrontEnd | None = None
        self._deep = DeepCheck(world) if deep and world.size > 1 else None
        self._counts = MeanCounts(world) if self._deep is None else None
        self._joined_loss = JoinedLoss(world) if world.size > 1 else None

    def watch_also(self, front_end: FrontEnd) -> None:
        """Let a front end answer for the training instead: this one sees torch's models only."""
        self._front_end = front_end

    def follow(self, optimizer: Optimizer, names: Mapping[torch.Tensor, str], ranks: int) -> None:
        """Compare the parameters of an optimizer: a front end exchanges their gradients among `ranks` ranks."""
        followed_here(self._world).append(FrontEndOptimizer(optimizer, names, ranks))

    def finish(self) -> None:
        """Answer, and end the script; nothing when that was done."""
        if not self._concluded:
            self._conclude()
            raise SystemExit(0)

    def start(self) -> None:
        """Begin to watch."""
        self._undo = [
            observe_passes(self._world, self),
            register_optimizer_step_post_hook(self._after_step).remove,
        ]
        original = torch.Tensor.backward
        losses = self._losses

        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() == 1:
                losses.append(float(tensor.detach()))
            if self._counts is not None:
                self._counts.backward_begins()
            if self._joined_loss is not None:
                self._joined_loss.backward_begins(tensor)
            return original(tensor, *args, **kwargs)

        torch.Tensor.backward = backward  # type: ignore[method-assign, assignment]
        self._undo.append(lambda: setattr(torch.Tensor, "backward", original))
        if self._deep is not None:
            self._deep.start()
        if self._counts is not None:
            self._counts.start()

    def stop(self) -> None:
        """Stop watching; answer with what was seen when the script ended before its time."""
        if not self._concluded:
            self._conclude()
        if self._deep is not None:
            self._deep.stop()
        if self._counts is not None:
            self._counts.stop()
        if self._joined_loss is not None:
            self._joined_loss.stop()
        while self._undo:
            self._undo.pop()()

    def forget(self) -> None:
        """In a forked child: watch no more, and answer nothing."""
        self._concluded = True
        self.stop()

    def forward_begins(self, model: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """A model is given a batch, with gradients."""
        self._begun = None
        inputs = (arguments, dict(named))
        has_tensors = next(tensors_in(inputs), None) is not None
        if model.training and has_tensors and self._is_trained(model):
            samples = samples_of(arguments or inputs[1])
            self._begun = _SeenPass(
                self._world.session.steps.done + 1, samples, fingerprint(inputs), row_hashes(inputs)
            )

    def forward_ends(self, model: nn.Module, output: Any) -> None:
        """Wait for a gradient of what came out."""
        seen, self._begun = self._begun, None
        if seen is None:
            return

        def note(_: torch.Tensor) -> None:
            if not any(seen is each for each in self._pending):
                self._pending.append(seen)

        for tensor in differentiable(output):
            tensor.register_hook(note)

    def _is_trained(self, model: nn.Module) -> bool:
        followed = any(each.trains(model) for each in followed_here(self._world))
        return followed or any(model is each for each in DistributedModel.all())

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._trained += self._pending
        self._pending = []
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        self._own_steps += optimizer is self._optimizers[0]
        steps = self._world.session.steps
        done = steps.done if steps.has_begun else self._own_steps
        if done >= self.steps:
            self.finish()

    def _conclude(self) -> None:
        self._concluded = True
        here = self._world
        checks = [check_ranks(here)]
        others = all_gather_json(here, "verify/front end", self._front_end is not None)
        if self._front_end is not None and all(others):
            checks += self._front_end.checks()
        elif any(others):
            trained = [rank for rank, other in enumerate(others) if other]
            checks.append(Check("training", False, f"{name_ranks(trained)} trained, the others did not", _ALL))
        else:
            checks += self._own_checks()
        if here.rank == 0 and self._directory is not None:
            write_private(self._directory / VERIFY, json.dumps(Verification(checks).to_mapping(), indent=1))

    def _own_checks(self) -> list[Check]:
        """Return what was found of torch's models."""
        here, checks = self._world, []
        models = DistributedModel.all()
        followed = followed_here(here)
        if not models and not followed:
            checks.append(_no_model(here))
        for each in followed:
            checks += each.checks(here)
        for model in models:
            checks += [
                check_parameters(here, model, _ALIKE),
                check_buffers(here, model, _ALIKE),
                check_gradients(here, model),
                *check_batch_norm(here, model),
                *check_tensor(here, model),
            ]
            own = {id(parameter) for parameter in model.parameters()}
            for optimizer in self._optimizers:
                if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                    checks.append(check_optimizer(here, optimizer, model, _ALIKE))
        if self._deep is not None:
            checks += self._deep.checks()
        if self._counts is not None:
            checks += self._counts.checks()
        if self._joined_loss is not None:
            checks += self._joined_loss.checks()
        steps = [each.step for each in self._trained]
        checks += check_sizes(here, [each.samples for each in self._trained], steps)
        checks.append(check_batches(here, [each.fingerprint for each in self._trained], steps))
        checks += check_repeats(here, [(each.step, each.rows) for each in self._trained])
        checks.append(check_loss(here, self._losses))
        return checks


_ALL = "train on all ranks"
_NO_OPTIMIZER = (
    "no hvd.DistributedOptimizer was seen but Adasum's, and gradients that meet otherwise are not compared"
)
_OF_TORCH = "farandole.horovod.torch"
_OTHER_FRONT_ENDS = ("farandole.horovod.tensorflow", "farandole.horovod.keras")


def _no_model(here: World) -> Check:
    """Return what to say where nothing was seen to train."""
    if _OF_TORCH in sys.modules:
        return Check("model", None, _NO_OPTIMIZER)
    if not any(name in sys.modules for name in _OTHER_FRONT_ENDS):
        return Check("model", False, "no model was distributed", "call fd.distribute(model, optimizer)")
    if here.size == 1:
        return Check("model", None, "one rank exchanges no gradients", "-np 2", "not checked")
    return Check("model", False, "no gradients were exchanged", "optimizer = hvd.DistributedOptimizer(optimizer)")


_ALIKE = "change the model on all ranks alike, after fd.distribute"


# An optimizer of a front end that is given no model, Horovod's for PyTorch: its parameters are compared.


_SAME_STEP = (
    "hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step; change the model on all "
    "ranks alike"
)


@dataclass(frozen=True)
class FrontEndOptimizer:
    """One that steps with the gradients of `ranks` ranks."""

    optimizer: Optimizer
    names: Mapping[torch.Tensor, str]
    """Names of its parameters."""
    ranks: int

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters whose gradients are exchanged, as a model does."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self.names:
                    yield self.names[parameter], parameter

    def trains(self, model: nn.Module) -> bool:
        """Return whether a parameter of `model` is among them."""
        return any(parameter in self.names for parameter in model.parameters())

    def checks(self, here: World) -> list[Check]:
        """Return the answers; to be called by all ranks."""
        if self.ranks < here.size:
            why = f"gradients are exchanged within a process set of {self.ranks} ranks: verify compares all"
            return [Check("parameters", None, why)]
        return [
            check_parameters(here, self, _SAME_STEP),
            check_gradients(here, self),
            check_optimizer(here, self.optimizer, self, _SAME_STEP),
        ]


class FollowedOptimizers(list[FrontEndOptimizer]):
    """Those of one world, kept by its session."""


def followed_here(here: World) -> FollowedOptimizers:
    """Return them."""
    return here.session.keep(FollowedOptimizers, FollowedOptimizers)

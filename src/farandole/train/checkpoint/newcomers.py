"""Ranks that come in while others train: they take from these what a checkpoint would have, between two steps.

[Note: coming in] A rank that comes later runs its script by itself, as a world of one, up to `Checkpointer.load`:
until then it needs nothing of the others, who train meanwhile. There it waits. The others ask each other in
`Checkpointer.after_step` whether any of them has heard that one waits; all leave their generation after the same
step, and meet it in the next one. Rank 0 gives what `fd.distribute` does not send; then all, new ones too,
distribute their models again, which sends parameters, buffers and the states of optimizers. So they agree anew on
everything that they agreed on when they began, and `load` returns the number of that step. The residuals of codecs
are those of each rank, and nothing on one that is new. If one that came in cannot go on, it fails alone, and the
others meet again without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from ...checkpoint.manifest import decode, encode
from ...comm.codecs.saved_state import Entry, for_new_rank
from ...comm.collectives import broadcast_tensors
from ...comm.engine.redo import StepRedo
from ...comm.world.comm_errors import LOST
from ...comm.world.connect import as_if_alone, part_again
from ...comm.world.session import DividedLoops
from ...comm.world.store_sync import all_gather_json
from ...comm.world.world import World
from ...core.vocabulary.errors import CheckpointError, CommError, FarandoleError, PeerLost
from ...core.vocabulary.spec import Plan
from ...core.vocabulary.text import name_ranks, write_notice
from ...parallel.distribute import distribute_again, undistribute
from ...parallel.model import DistributedModel
from .agreement import named
from .state import Training, read_random_state, seed_new_rank
from .values import TensorsAside, restorer

_MOST_IN_VAIN = 3
"""How often a rank tries to come in."""


class _Entrances(WeakSet["RankEntrance"]):
    """Those of one world."""


class RankEntrance:
    """Lets ranks in, at the ends of steps of one training. Made by all ranks."""

    def __init__(self, here: World, training: Training) -> None:
        self._here, self._training = here, training
        self._told = ""
        self._steps = here.session.steps.done
        """Those that were done when this was called last."""
        self._all = here.session.keep(_Entrances, _Entrances)
        self._all.add(self)

    def look(self, step: int) -> tuple[bool, bool]:
        """Return whether this rank knows of others that wait, and whether it cannot let them in after `step`."""
        redo, regroup = self._here.session.kept(StepRedo), self._here.session.regroup
        before, self._steps = self._steps, self._here.session.steps.done
        if redo is None or regroup is None or not regroup.is_asked:
            return False, False
        why = redo.why_closed() or _why_models_stay(self._here)
        if not why and self._training.tables:
            why = "tables of rows are divided over the ranks"
        if not why and len(self._all) > 1:
            why = f"it can take the state of one Checkpointer, and there are {len(self._all)}"
        if not why and before == self._steps:
            return True, True  # between two backward passes of one step
        if not why:
            try:
                encode(_to_give(self._training, self._here, step), "state", TensorsAside())
            except FarandoleError as problem:
                why = problem.message
        if why and why != self._told and self._here.rank == 0:
            write_notice(f"a rank that waits cannot come in: {why}")
        self._told = why
        return True, bool(why)

    def open(self, step: int) -> None:
        """Let in those that wait; called by all ranks, after `step`."""
        here, redo = self._here, self._here.session.kept(StepRedo)
        assert redo is not None, "asked in `look`"
        models = _models_of(here)
        kept = [_ModelsOwn.of(model) for model in models]
        given = _to_give(self._training, here, step)  # on all ranks: any may be rank 0 in a moment

        def welcome(new: Sequence[int]) -> None:
            try:
                _begin_again(here, given, models, kept)
                all_gather_json(here, _OPERATION, None)
            except LOST:
                raise
            except FarandoleError as problem:
                if not new:
                    raise
                raise PeerLost(f"{name_ranks(new)} came in, and cannot go on: {problem}", rank=here.rank,
                               operation=_OPERATION) from None  # fmt: skip
            if here.rank == 0 and new:
                write_notice(f"{name_ranks(new)} came in: {here.size} go on in step {here.session.steps.done + 1}")

        redo.let_in(welcome)

    def close(self) -> None:
        """Let none in any more."""
        self._all.discard(self)


def come_in(training: Training, here: World) -> int:
    """Wait for the ranks that train, and take their state; return the number of the step after which they are.

    Raises `CommError` where they are lost, and what `training` raises that cannot take it.
    """
    regroup, models, failed = here.session.regroup, _models_of(here), 0
    assert regroup is not None, "a rank that is apart has a way to the others"
    while True:
        try:
            regroup.enter()
            if not StepRedo.meet_as_new(here):
                raise CommError("all ranks that trained are lost", rank=here.rank, operation=_OPERATION)
            step = _take(training, here, models)
            regroup.has_state()
            return step
        except BaseException as problem:
            failed += 1
            regroup.leave(str(problem) or type(problem).__name__)  # others may wait for this rank
            _be_apart_again(here, models, regroup.worker)
            if not isinstance(problem, LOST) or failed == _MOST_IN_VAIN:
                raise


def _be_apart_again(here: World, models: Sequence[nn.Module], worker: int) -> None:
    """Be alone, so that a script that catches the error makes no step with the others."""
    here.session.drop(StepRedo)
    for model in models:
        if DistributedModel.of(model).plan is not None:
            undistribute(model)
    part_again(here, worker)


_OPERATION = "coming in"


def _take(training: Training, here: World, models: Sequence[nn.Module]) -> int:
    given, loops = _begin_again(here, {}, models, []), here.session.kept(DividedLoops)
    with as_if_alone(here):
        for name, state in given["others"].items():
            with named(name, "give the same objects to the Checkpointer on all ranks"):
                training.others[name].load_state_dict(state)
        for name, state in given["modules"].items():
            training.modules[name].load_state_dict(state)
        for name, state in given["optimizers"].items():
            training.optimizers[name].load_state_dict(state)
    if (stand := [] if loops is None else loops.standing()) != given["loaders"]:
        raise CheckpointError(
            f"loaders of this rank stand at {stand}, and those of the others at {given['loaders']} (number, "
            "epoch, batches, samples, seed, digest of the data)",
            is_input=True,
            remedy="give the same data to fd.shard on all ranks, and all loaders to the Checkpointer, "
            "by names of your own: loader=loader",
        )
    here.session.steps.done = given["steps"]
    seed_new_rank(given["random"], given["steps"], here.rank)
    all_gather_json(here, _OPERATION, None)
    step: int = given["step"]
    return step


@dataclass(frozen=True)
class _ModelsOwn:
    """What is a model's, beside what `distribute` sends."""

    codecs: dict[str, Entry]
    rounded_steps: int
    seeds: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module) -> _ModelsOwn:
        """Return what this rank has."""
        own = DistributedModel.of(model)
        is_open = own.reducer is not None and own.reducer.is_open
        return cls(
            own.reducer.buckets.state() if own.reducer is not None and is_open else {},
            own.rounded_steps.done if own.rounded_steps is not None else 0,
            {} if own.seeds is None else own.seeds.state_dict(),
        )

    def put(self, model: nn.Module) -> None:
        """Let a model that was distributed again have it."""
        own = DistributedModel.of(model)
        if own.reducer is not None:
            own.reducer.load_exchange_state(dict(self.codecs))
        if own.rounded_steps is not None:
            own.rounded_steps.done = self.rounded_steps
        if own.seeds is not None and self.seeds:
            own.seeds.load_state_dict(self.seeds)


def _models_of(here: World) -> list[nn.Module]:
    """Return the models that were distributed over these ranks, in the order of all ranks."""
    found = [(model, DistributedModel.of(model).mesh) for model in DistributedModel.all()]
    return [model for model, mesh in found if mesh is not None and mesh.here is here]


def _why_models_stay(here: World) -> str:
    """Return why the models cannot be distributed over other ranks; empty: they can."""
    for own in map(DistributedModel.of, _models_of(here)):
        for key in _OF_THESE_RANKS:
            if (value := getattr(own.plan, key)) != getattr(_DEFAULTS, key):
                return f"a model with {key} = {value!r} cannot be distributed anew"
        if own.reducer is not None and own.reducer.has_codecs and own.reducer.route == "hierarchical":
            return "codecs on the hierarchical route keep slices, which other ranks would have"
    return ""


_OF_THESE_RANKS = ("sync_batch_norm", "buffers", "bf16_parameters", "frozen_codec", "offload", "train_schedule")
"""Keys of a plan by which a rank has more than what rank 0 sends."""
_DEFAULTS = Plan()


def _to_give(training: Training, here: World, step: int) -> dict[str, Any]:
    """Return what rank 0 gives. Raises `CheckpointError` for what has no form in a checkpoint."""
    models = _models_of(here)
    sent = {id(each) for model in models for each in model.parameters()}
    optimizers = {
        name: each
        for name, each in training.optimizers.items()
        if not any(id(p) in sent for group in each.param_groups for p in group["params"])
    }
    kept = [_ModelsOwn.of(model) for model in models]
    loops = here.session.kept(DividedLoops)
    return {
        "loaders": [] if loops is None else loops.standing(),
        "step": step,
        "steps": here.session.steps.done,
        "others": {name: each.state_dict() for name, each in training.others.items()},
        "modules": {
            name: dict(each.state_dict()) for name, each in training.modules.items() if each not in models
        },
        "optimizers": {name: each.state_dict() for name, each in optimizers.items()},
        "random": read_random_state(here.device),
        "models": [
            [{name: for_new_rank(entry) for name, entry in each.codecs.items()}, each.rounded_steps, each.seeds]
            for each in kept
        ],
    }


def _begin_again(
    here: World, given: Mapping[str, Any], models: Sequence[nn.Module], kept: Sequence[_ModelsOwn]
) -> dict[str, Any]:
    """Send what rank 0 gives, and distribute `models` over the ranks of now; return what was sent.

    `kept`: what this rank has of each model; empty on one that comes in.
    """
    got = _send(here, given)
    for model in models:
        distribute_again(model)
    for model, each in zip(models, kept or [_ModelsOwn(*each) for each in got["models"]], strict=True):
        each.put(model)
    return got


def _send(here: World, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return on all ranks what rank 0 gives: what a checkpoint can hold."""
    aside = TensorsAside()
    text, tensors = b"", aside.tensors
    if here.rank == 0:
        encoded = encode(dict(given), "state", aside)
        kinds = [
            [name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in tensors.items()
        ]
        text = json.dumps([encoded, kinds]).encode()
    length = all_gather_json(here, f"{_OPERATION}/state", len(text))[0]
    raw = torch.frombuffer(bytearray(text or bytes(length)), dtype=torch.uint8)
    broadcast_tensors(here, [raw])
    encoded, kinds = json.loads(raw.numpy().tobytes())
    if here.rank:
        tensors = {name: torch.empty(shape, dtype=getattr(torch, kind)) for name, kind, shape in kinds}
    broadcast_tensors(here, list(tensors.values()))
    found: dict[str, Any] = decode(encoded, restorer(tensors))
    return found

"""Says when ranks do not train one model: it was never distributed, or a loss of a rank's own has changed it.

[Note: when models are compared] After steps 8, 16, 32 and so on each rank leaves a hash of some of its parameters
and its learning rates in the store. One step later every rank has been through another exchange, so all hashes are
there, and rank 0 compares them without waiting. Where forward passes of the first step have changed parameters in
place, it is after step 1 already, and of the whole of these.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..comm.messages import bytes_of
from ..comm.world.session import NEVER
from ..comm.world.world import World
from ..core.vocabulary.text import name_ranks, write_notice
from ..parallel.instrument.phase_hooks import observe_passes
from ..parallel.model import DistributedModel
from ..parallel.split import split_of

FIRST_STEP = 8
_MOST_PARAMETERS, _MOST_ELEMENTS = 256, 1024


class ModelDigests:
    """The hashes of the ranks' models and their learning rates, in the store, until a difference was told.

    `remedy`: what to do where they differ because of a loss.
    """

    def __init__(self, here: World, topic: str, remedy: str) -> None:
        self._here, self._remedy = here, remedy
        self._keys = [f"{here.topic(topic)}/{rank}" for rank in range(here.size)]
        self._step = 0
        """Whose hashes are in the store; 0: none are."""
        self._next = FIRST_STEP
        self._is_over = False
        self._changed: Iterable[str] = ()

    def forward_changes(self, names: Iterable[str]) -> None:
        """Compare after the next step: forward passes change the parameters of these names."""
        self._next, self._changed = min(self._next, 1), names

    def after_step(self, step: int, find: Callable[[], tuple[str, list[float]] | None]) -> int:
        """Compare the hashes of an earlier step, and leave those of this one when it is time.

        Returns the step after which there is something to do again.

        Args:
            step: how many are done, the same on all ranks; it may grow by more than one.
            find: returns a hash of the model and the learning rates; None where there is no model.
        """
        store = self._here.store
        if self._is_over or store is None:
            return NEVER
        if self._step and self._here.rank == 0:
            self._compare(self._read(store))
        self._step = 0
        if step < self._next:
            return self._next
        while self._next <= step:
            self._next = max(2 * self._next, FIRST_STEP)
        found = find()
        if found is not None:
            with suppress(RuntimeError):  # a store that fails is found by who needs it
                store.set(self._keys[self._here.rank], json.dumps([step, *found]))
                self._step = step
        return step + 1 if self._step else self._next

    def _read(self, store: Any) -> list[Any]:
        """Return what all ranks left after the same step; nothing where one left none."""
        with suppress(RuntimeError):
            if store.check(self._keys):
                found = [json.loads(store.get(key)) for key in self._keys]
                return [] if any(step != self._step for step, _, _ in found) else found
        return []

    def _compare(self, found: list[Any]) -> None:
        rates, hashes = [each for _, _, each in found], [each for _, each, _ in found]
        if len({len(each) for each in rates}) == 1:
            for row in zip(*rates, strict=True):
                if len(set(row)) > 1:
                    self._tell(f"their learning rates differ: {_by_value([str(rate) for rate in row])}")
                    return
        if len(set(hashes)) > 1:
            what = f"parameters of {name_ranks(_odd(hashes))} differ from those of rank 0"
            if names := ", ".join(map(repr, islice(self._changed, 3))):
                what += f"; the forward pass changes {names}, on each rank by its own batch"
            self._tell(what)

    def _tell(self, what: str) -> None:
        self._is_over = True
        write_notice(
            f"warning: after step {self._step} the ranks no longer train one model: {what}; change models and "
            f"learning rates on all ranks alike: where a loss decides, {self._remedy}"
        )


class EqualModels:
    """Watches the distributed models of a world of several ranks. See [Note: when models are compared]."""

    def __init__(self, here: World) -> None:
        self._here = here
        self._digests = ModelDigests(here, "equal models", "use farandole.mean(loss)")
        self._versions: list[tuple[str, torch.Tensor, int]] = []
        self._changed: dict[str, torch.Tensor] = {}
        """Parameters that forward passes of the first step have changed, by name."""
        self._look_no_more: Callable[[], None] | None = observe_passes(here, self)
        here.session.steps.after_step(self._after_step)

    def forward_begins(self, model: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Note which values the parameters have, by torch's count of changes."""
        reducer = DistributedModel.of(model).reducer
        if reducer is not None and reducer.world is self._here:
            whole = [each for each in model.named_parameters() if split_of(each[1]) is None]
            self._versions = [(name, each, each._version) for name, each in whole if not each.is_inference()]

    def forward_ends(self, model: nn.Module, output: Any) -> None:
        """Find what has changed since."""
        self._changed |= {name: each for name, each, version in self._versions if each._version != version}
        self._versions = []

    def _after_step(self, step: int) -> int:
        if self._look_no_more is not None:
            self._look_no_more()
            self._look_no_more = None
            if self._changed:
                self._digests.forward_changes(tuple(self._changed))
        return self._digests.after_step(step, self._find)

    def _find(self) -> tuple[str, list[float]] | None:
        models = DistributedModel.all_of(self._here)  # those of a world that is over may still live on some ranks
        if not models:
            return None
        # Ranks with other parts of a model have other parameters: their learning rates are compared, no more.
        reducers = [(model, DistributedModel.of(model).reducer) for model in models]
        alike = [model for model, reducer in reducers if reducer is not None and reducer.world is self._here]
        changed, self._changed = self._changed, {}  # another rank may have changed none, and is compared later
        return _hash_of(alike, changed.values()), self._rates()

    def _rates(self) -> list[float]:
        found = [each for each in self._here.session.steps.optimizers() if isinstance(each, Optimizer)]
        return [float(group["lr"]) for each in found for group in each.param_groups if "lr" in group]


def _hash_of(models: Iterable[nn.Module], whole: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for parameter in whole:
        digest.update(bytes_of(parameter.detach().cpu().contiguous()).numpy().data)
    for model in models:
        whole = (parameter for parameter in model.parameters() if split_of(parameter) is None)
        for parameter in islice(whole, _MOST_PARAMETERS):
            with suppress(RuntimeError, NotImplementedError, TypeError):  # of another library, or not materialised
                part = parameter.detach().reshape(-1)[:_MOST_ELEMENTS].cpu()
                digest.update(bytes_of(part).numpy().data)
    return digest.hexdigest()


def _odd(values: list[str]) -> list[int]:
    return [rank for rank, value in enumerate(values) if value != values[0]]


def _by_value(values: list[str]) -> str:
    distinct = dict.fromkeys(values)
    ranks = {value: [rank for rank, other in enumerate(values) if other == value] for value in distinct}
    return ", ".join(f"{value} on {name_ranks(ranks[value])}" for value in distinct)


# Ranks that train while nothing that we know of exchanges their gradients: said at the first step and at the end.
#
# `fd.init` alone makes a world; a model trains in it only after `fd.distribute`, by Horovod's names, or wrapped by
# torch. Without that there are as many different models as ranks. What a loop adds up by itself cannot be seen
# from here, so this is a note and no error. A script that calls `fd.distribute` somewhere is told at the end
# alone.


_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
_HOROVOD = "farandole.horovod.common.basics"


class UndistributedWatch:
    """Looks at the first step of any optimizer of this process."""

    def __init__(self, here: World) -> None:
        self._here = here
        self._forgotten = self._has_looked = False
        self._hook = register_optimizer_step_pre_hook(self._look)

    def close(self) -> None:
        """Look no more; to be called when the world is left."""
        self._hook.remove()
        if self._forgotten and not self._here.session.steps.has_begun:
            self._say("at the end: ")

    def forget(self) -> None:
        """In a forked child: look no more, and say nothing."""
        self._hook.remove()

    def _look(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_looked, self._has_looked = self._has_looked, True
        if has_looked:
            return
        # Not at once: torch is going through all hooks of steps, and other ones may follow.
        self._here.session.let_go_later(self._hook.remove)
        if self._here.session.steps.has_begun or _has_horovod() or _is_wrapped():
            return
        self._forgotten = True
        if not _will_distribute():
            self._say("")

    def _say(self, when: str) -> None:
        if self._here.rank == 0:
            write_notice(
                f"{when}no model was distributed, so each of the {self._here.size} ranks trains one of "
                "its own, unless the script exchanges gradients by itself: call farandole.distribute(model, "
                "optimizer)"
            )
            sys.stderr.flush()


def _will_distribute() -> bool:
    """Return whether the script's file calls it: what trains before may be a model to compare with."""
    try:
        return "distribute(" in Path(sys.modules["__main__"].__file__ or "").read_text(encoding="utf-8")
    except (AttributeError, KeyError, OSError, ValueError):  # no file: a notebook, -c
        return False


def _has_horovod() -> bool:
    """Return whether the script calls Horovod's names, whose operations exchange what they are given."""
    module = sys.modules.get(_HOROVOD)
    return module is not None and bool(module.basics.is_initialized())


def _is_wrapped() -> bool:
    """Return whether torch's own wrappers exchange the gradients of some model."""
    kinds = {type(each) for each in gc.get_objects()}
    return any(base.__name__ in _WRAPPERS for kind in kinds for base in kind.__mro__)

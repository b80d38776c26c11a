"""Servers as a policy: an optimizer's step sends its gradients, and takes the parameters of all ranks' steps.

See `clocks` for the order of steps, `shard` for what becomes of gradients, `server.client` for lost connections.

[Note: a step at a server] In ``optimizer.step()`` a rank sends gradients and hyperparameters to all servers,
tells the first one that its step is done, waits until it may go on, carries the new entries to all servers, and
takes the parameters of the newest. Its own optimizer finds no gradients, so it changes nothing and keeps no
state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ....comm.engine.grad_ownership import GradsAside
from ....comm.world.world import World
from ....core.env import read_run_settings
from ....core.vocabulary.errors import ConfigError, PeerLost
from ....core.vocabulary.run_files import mark_dispensable
from ....core.vocabulary.spec import Plan
from ....core.vocabulary.sync_spec import SyncSpec
from ....core.vocabulary.text import name_ranks, write_notice
from ...local_steps import refuse_step
from .clock_service import DRAIN
from .refuse import refuse_model
from .remote_model import RemoteModel


class ServerSync:
    """The policy of one model. To be made by all ranks, with equal parameters and states."""

    has_own_states = False
    """After `drain` all ranks have the same optimizer states."""
    is_local = True
    """Gradients of a rank are its own."""

    def __init__(
        self, here: World, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan, *,
        why_not: Callable[[Optimizer], str],
    ) -> None:  # fmt: skip
        """Start the servers, and give them parameters and states. Raises `ConfigError` and `LaunchError`.

        `why_not`: says why the work of an optimizer cannot be divided by elements; an empty text if it can.
        """
        self._here, self._text, self._spec = here, plan.sync, SyncSpec.parse(plan.sync)
        refuse_model(model, optimizers, plan, why_not)
        self.remote = RemoteModel(here, model, optimizers, plan.sync)
        self._undrained = 0
        """Steps since the last `drain`."""
        self._aside: GradsAside | None = None
        self._is_loaded = self._is_averaged = self._is_closed = False
        self._has_stepped = self._is_dispensable = False
        self._loaded_optimizers: list[Optimizer] = []
        """Since the servers were given anything."""
        for each in optimizers:
            each.register_load_state_dict_post_hook(_Loaded(self))
        weakref.finalize(model, here.session.let_go_later, self.remote.servers.close).atexit = False
        here.session.call_on_close(self.close)
        here.session.call_in_forked_child(self.forget)
        self.remote.install(optimizers)

    # -- what a loop asks ------------------------------------------------------------------------

    @property
    def staleness(self) -> dict[int, int]:
        """How many pushes had been applied so many pushes after the parameters that their gradients are of.

        It counts those of all ranks, until this rank's last step or `drain`.
        """
        return dict(self.remote.staleness)

    def step_begins(self, optimizer: Optimizer, *, is_scaled: bool) -> None:
        """An optimizer is about to step; `is_scaled`: by a `GradScaler`. Raises `ConfigError`."""
        refuse_step(self._text, is_scaled=is_scaled, is_averaged=self._is_averaged)

    def gradients_ready(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """The gradients of a step are ready. See [Note: a step at a server]."""
        if has_closure:
            raise ConfigError(
                f'plan: sync = "{self._text}" with optimizer.step(closure), which evaluates the model on its own',
                remedy="call backward() before optimizer.step()",
            )
        if all(each is not optimizer for each in self.remote.optimizers()):
            return
        if self._is_closed:
            raise ConfigError(
                f'plan: sync = "{self._text}": an optimizer steps after this process has left the servers',
                remedy="train before farandole.shutdown, and in the process that called farandole.distribute",
            )
        self._mark_dispensable()
        self._install_what_was_loaded()
        self.remote.step(optimizer, self._here.session.batch_weight.factor)
        self._undrained += 1
        self._has_stepped = True
        self._aside = GradsAside([p for group in optimizer.param_groups for p in group["params"]])

    def step_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped, over no gradients: they are put back."""
        if self._aside is not None:
            self._aside.restore()
            self._aside = None

    def drain(self) -> None:
        """Take the parameters that come of all pushes of all ranks; to be called by all of them."""
        self._install_what_was_loaded()
        self.remote.gather(DRAIN)
        self.remote.take()
        self._undrained = 0

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model have the servers' parameters as they are now; afterwards its own again, to the bit."""
        if self._is_averaged or self._is_loaded:  # the servers will have what was loaded
            yield
            return
        own, sums = [each.detach().clone() for each in self.remote.parameters], self.remote.bit_sums
        self.remote.look()
        self._is_averaged = True
        try:
            yield
        finally:
            self._is_averaged = False
            with torch.no_grad():
                for each, value in zip(self.remote.parameters, own, strict=True):
                    each.copy_(value)
            self.remote.bit_sums = sums

    def close(self) -> None:
        """Leave the servers, which end when all ranks have."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._here.rank == 0 and self._spec.staleness != 0:
            counts = ", ".join(f"{stale}: {count}" for stale, count in sorted(self.remote.staleness.items()))
            write_notice(f"sync {self._text}: pushes by their staleness: {counts}")
            if self._undrained and not self._here.sockets.shut_down:
                write_notice(
                    f"{self._undrained} steps were made since farandole.drain(model), and the ranks have "
                    "parameters of other versions"
                )
        self.remote.servers.close()

    def forget(self) -> None:
        """In a forked child: use no connection, and close its copies."""
        self._is_closed = True
        self.remote.servers.forget()

    # -- state -----------------------------------------------------------------------------------

    def note_state_dict(self) -> None:
        """A state dict of the model is taken: it has what this rank has taken last."""

    def note_loaded(self) -> None:
        """The model was given other parameters, or an optimizer other states: the servers are at the next step."""
        if not self._is_averaged:
            self._is_loaded = True

    def note_loaded_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer was given other states: those of the servers do not count any more."""
        self.note_loaded()
        if self._is_loaded:
            self._loaded_optimizers.append(optimizer)

    def gather_states(self) -> None:
        """Let the optimizers have the servers' states until the next step; to be called by all ranks.

        Raises `PeerLost` where a rank is gone: a checkpoint needs all of them.
        """
        gone = sorted(set(range(self._here.size)) - set(self.remote.ranks))
        if gone:
            raise PeerLost(
                f"{name_ranks(gone)} ended before, and a checkpoint is written and read by all ranks",
                rank=self._here.job_rank,
                operation="checkpoint",
                remedy="call farandole.drain(model), and save model.state_dict() with torch.save on one rank",
            )
        self.remote.take_states()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: all is in the model and, after `gather_states`, in the optimizers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the servers what was loaded into model and optimizers; to be called by all ranks."""
        self._is_loaded = True
        self._install_what_was_loaded()

    def _mark_dispensable(self) -> None:
        """Tell the launcher, from the second step on, that this rank may die, unless the loop asks all ranks."""
        is_so = self._has_stepped and not self._here.session.asks_all_ranks
        if is_so != self._is_dispensable:
            self._is_dispensable = is_so
            mark_dispensable(read_run_settings().run_directory, self._here.job_rank, is_so=is_so)

    def _install_what_was_loaded(self) -> None:
        if self._is_loaded or self.remote.is_changed():
            self.remote.install(self._loaded_optimizers)
            self._is_loaded = False
            self._loaded_optimizers = []


class _Loaded:
    """A hook of an optimizer. One that was copied or saved with it does nothing."""

    def __init__(self, policy: ServerSync) -> None:
        self._policy = weakref.ref(policy)

    def __call__(self, optimizer: Optimizer) -> None:
        policy = self._policy()
        if policy is not None:
            policy.note_loaded_optimizer(optimizer)

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> Any:
    return lambda *_: None

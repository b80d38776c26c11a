"""What a model asks of a policy that lets its ranks train on their own: `sync.local_steps`, for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from ...comm.autotune.autotuner import Autotuner
from ...comm.reducer.options import ExtraTensors
from ...comm.world.world import World
from ...core.vocabulary.spec import Plan


class SyncPolicy(Protocol):
    """When the replicas of one model agree, where not in every step."""

    @property
    def is_local(self) -> bool:
        """Whether ranks train on their own now."""

    @property
    def has_own_states(self) -> bool:
        """Whether optimizers have other states on each rank, right after `drain`."""

    def step_begins(self, optimizer: Optimizer, *, is_scaled: bool) -> None:
        """An optimizer is about to step; `is_scaled`: by a `GradScaler`."""

    def gradients_ready(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """The gradients of the step are as the optimizer will find them; `has_closure`: a closure makes them."""

    def step_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""

    def averaged(self) -> AbstractContextManager[None]:
        """Let the model have the averaged parameters."""

    def drain(self) -> None:
        """Meet now; to be called by all ranks."""

    def close(self) -> None:
        """Close the connections."""

    def note_state_dict(self) -> None:
        """A state dict of the model is taken."""

    def note_loaded(self) -> None:
        """The model was given other parameters."""

    def gather_states(self) -> None:
        """Right after `drain`: have the optimizers' states where they are saved from."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has beside model and optimizers, right after `drain`."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; by all ranks, when model and optimizers are loaded."""


class MakePolicy(Protocol):
    """Makes the policy that a plan asks for; called by all ranks, with equal parameters."""

    def __call__(
        self,
        here: World,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        plan: Plan,
        *,
        buffers: ExtraTensors | None,
        end_every_step: Callable[[], None] | None,
        tuner: Callable[[], Autotuner | None],
    ) -> SyncPolicy:
        """`buffers`: what travels with each meeting. `end_every_step`: stops the exchange of gradients.

        `tuner`: returns what chooses the codec of that, if anything does.
        """

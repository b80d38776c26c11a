"""The checkpoints of transformers' Trainer, of a model or an optimizer that the plan divides over ranks.

All ranks gather, the ranks that transformers lets write (``args.should_save``) write whole files with names and
types of the undivided training, and no rank goes on where one has failed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..comm.world.world import world
from ..core.environ.job_plan import resolve_plan
from ..core.vocabulary.codec_spec import NONE
from ..core.vocabulary.errors import ConfigError
from ..parallel.exchange_state import exchange_state, load_exchange_state
from ..parallel.model import DistributedModel
from ..train.checkpoint.agreement import together
from .whole_state import (
    is_divided,
    load_whole_optimizer,
    replaced,
    taking_whole_states,
    whole_optimizer_state,
    whole_parameters,
)

_STATE = "farandole_exchange_{}.pt"
"""What codecs keep, of one rank, in a checkpoint."""


def refuse_inexact_resume() -> None:
    """Raise `ConfigError` for a plan whose states are not in a Trainer's checkpoint. Called by all ranks."""
    plan = resolve_plan(None)
    if not plan.zero:
        return
    asked = [f'weight_codec = "{plan.weight_codec}"'] if plan.weight_codec != NONE else []
    asked += ["bf16_parameters = true"] if plan.bf16_parameters else []
    if asked:
        raise ConfigError(
            f"resume_from_checkpoint: what {' and '.join(asked)} keeps with zero = {plan.zero} is not in a "
            "checkpoint of the Trainer",
            remedy="leave it out, or train by a loop with farandole.save and farandole.load",
        )


class WholeCheckpoints:
    """Methods of a Trainer that write and read its checkpoints; to be named before the Trainer's class."""

    args: Any
    model: Any
    model_wrapped: Any
    optimizer: Any

    def _save(self, *args: Any, **kwargs: Any) -> None:
        save = partial(super()._save, *args, **kwargs)  # type: ignore[misc]
        if not is_divided(self.model):
            save()
            return
        with whole_parameters(self.model, here=bool(self.args.should_save)):
            together(world(), "save model", save)

    def _load_best_model(self) -> None:
        load = super()._load_best_model  # type: ignore[misc]
        if not is_divided(self.model):
            load()
            return
        with taking_whole_states(self.model):
            together(world(), "load best model", load)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save = partial(super()._save_optimizer_and_scheduler, output_dir)  # type: ignore[misc]
        plan, here = DistributedModel.of(self.model_wrapped).plan, world()
        if plan is None:
            save()
            return
        if plan.zero and here.size > 1:
            whole = whole_optimizer_state(self.optimizer.state_dict(), here=bool(self.args.should_save))
            with replaced(self.optimizer, "state_dict", lambda: whole):
                together(here, "save optimizer", save)
        else:
            save()
        state = exchange_state(self.model_wrapped)
        if state:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            torch.save(state, Path(output_dir) / _STATE.format(here.rank))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        load = partial(super()._load_optimizer_and_scheduler, checkpoint)  # type: ignore[misc]
        plan, here = DistributedModel.of(self.model_wrapped).plan, world()
        if checkpoint is None or plan is None:
            load()
            return
        take = partial(load_whole_optimizer, self.optimizer, self.optimizer.load_state_dict)
        with replaced(self.optimizer, "load_state_dict", take):
            together(here, "load optimizer", load)
        found: list[Path] = []
        while (path := Path(checkpoint) / _STATE.format(len(found))).exists():
            found.append(path)
        if found:
            states = [torch.load(path, weights_only=True) for path in found]
            load_exchange_state(self.model_wrapped, states[here.rank] if len(states) == here.size else states)

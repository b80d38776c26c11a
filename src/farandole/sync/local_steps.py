"""Local steps: each rank trains on its own, and every H optimizer steps the ranks meet. What a loop sees of it.

See `core.vocabulary.sync_spec` for the names, `meetings` for what is exchanged and what becomes of it.

[Note: steps of a rank] A meeting comes after so many steps of this rank, whatever the others do: until then
nothing is sent. With several optimizers a step ends with that of the last one.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..comm.autotune.autotuner import Autotuner
from ..comm.engine.grad_ownership import GradsAside
from ..comm.engine.parameters import ExtraTensors
from ..comm.world.store_sync import all_gather_json
from ..comm.world.world import World
from ..core.vocabulary.errors import ConfigError
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.sync_spec import MEASURED_CODEC, SyncSpec
from ..core.vocabulary.text import write_notice
from ..core.vocabulary.units import format_seconds
from .meetings import Meetings

# Steps that no policy can follow.


def refuse_step(sync: str, *, is_scaled: bool, is_averaged: bool) -> None:
    """Raise `ConfigError` for an optimizer's step by a `GradScaler`, or inside `fd.averaged`.

    `sync`: as the plan says it.
    """
    if is_scaled:
        raise ConfigError(
            f'plan: sync = "{sync}" with a GradScaler, which leaves out steps on some ranks alone',
            remedy='use bfloat16 (precision = "bf16"), or leave sync out',
        )
    if is_averaged:
        raise ConfigError(
            "an optimizer steps inside fd.averaged, where the model has the averaged parameters",
            remedy="leave fd.averaged before the next step",
        )


class LocalSteps:
    """The policy of one model. To be made by all ranks, with equal parameters."""

    def __init__(
        self,
        here: World,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        plan: Plan,
        *,
        buffers: ExtraTensors | None = None,
        end_every_step: Callable[[], None] | None = None,
    ) -> None:
        """`buffers`: what travels with each meeting. `end_every_step`: stops the exchange of gradients."""
        self._here, self._text, self._spec = here, plan.sync, SyncSpec.parse(plan.sync)
        self._seen_optimizers = [weakref.ref(each) for each in optimizers]
        self._counts = [0] * len(optimizers)
        """Steps of each optimizer."""
        self._end_every_step = end_every_step
        self._first_left = 0 if end_every_step is None else self._spec.first
        self._weight = 0.0
        """What the samples of this rank's steps on its own add up to."""
        self.meetings = Meetings(here, model, optimizers, plan, buffers)
        self._aside: GradsAside | None = None
        self._is_averaged = False
        self._end = _LocalShutdown(here, self.meetings)
        # A model is often gone before the world closes: with the function that trained it.
        weakref.finalize(self, here.session.let_go_later, self._end.close).atexit = False
        here.session.call_on_close(self._end.close)
        here.session.call_in_forked_child(self._end.forget)
        self._begin()

    # -- what a loop asks ----------------------------------------------------------------------

    @property
    def is_local(self) -> bool:
        """Whether ranks train on their own now: not in the first steps, which exchange gradients."""
        return self._first_left == 0

    @property
    def steps_alone(self) -> int:
        """Steps of this rank that are in no mean yet, of some part of the model."""
        return self._end.steps_alone

    @property
    def has_own_states(self) -> bool:
        """Whether each rank has optimizer states of its own."""
        return self.is_local

    def step_begins(self, optimizer: Optimizer, *, is_scaled: bool) -> None:
        """An optimizer is about to step; `is_scaled`: by a `GradScaler`. Raises `ConfigError`."""
        if not self.is_local:
            return
        refuse_step(self._text, is_scaled=is_scaled, is_averaged=self._is_averaged)
        if self._here.session.batch_weight.factor == 0.0:  # a placeholder's gradients are of samples of others
            self._aside = GradsAside([p for group in optimizer.param_groups for p in group["params"]])

    def gradients_ready(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """The gradients of the step are ready: nothing is sent."""

    def step_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped: the ranks meet, if it is time."""
        if self._aside is not None:
            self._aside.restore()
            self._aside = None
        place = next((i for i, each in enumerate(self._seen_optimizers) if each() is optimizer), None)
        if place is None:
            return
        self._counts[place] += 1
        if place < len(self._counts) - 1:
            self._refuse_without_last(place)
            return
        if self._first_left:
            self._first_left -= 1
            if not self._first_left and self._end_every_step is not None:
                self._end_every_step()
                self._begin()
            return
        self._end.step += 1
        self._weight += self._here.session.batch_weight.factor
        if self._spec.sends(self._end.step):
            self._refuse_others()
        self.meetings.after_step(self._end.step, self._weight, self._optimizers)

    def drain(self) -> None:
        """Meet now over all that ranks have changed since they met; to be called by all of them alike."""
        if self.is_local:
            self.meetings.drain(self._end.step, self._weight, self._optimizers)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model have the averaged parameters and buffers; afterwards its own again, to the bit."""
        if not self.is_local or self._is_averaged:
            yield
            return
        self._is_averaged = True
        try:
            with self.meetings.averaged():
                yield
        finally:
            self._is_averaged = False

    def close(self) -> None:
        """Close the connections."""
        self._end.close()

    def note_state_dict(self) -> None:
        """A state dict of the model is taken: say once if it is this rank's own."""
        if self.steps_alone and not self._is_averaged:
            self._end.tell(
                f"state_dict() has what this rank alone changed in {self.steps_alone} steps since the last meeting"
            )

    def note_loaded(self) -> None:
        """The model was given other parameters: the averaged ones are these from now on."""
        if self.is_local and not self._is_averaged:
            self._begin()

    # -- state ---------------------------------------------------------------------------------

    def gather_states(self) -> None:
        """Each rank has its own."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has beside model and optimizers, right after `drain`."""
        return {"first_left": self._first_left, "step": self._end.step, **self.meetings.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; to be called by all ranks, when model and optimizers are loaded.

        An empty state begins anew.

        Raises:
            ConfigError: it is of the first steps, which are over here.
        """
        first_left = int(state.get("first_left", self._first_left))
        if first_left > self._first_left == 0:
            raise ConfigError(
                f'plan: sync = "{self._text}": the checkpoint has {first_left} steps that exchange gradients '
                "to come, and here they are over",
                remedy="load it before the first step",
            )
        if self._first_left and not first_left and self._end_every_step is not None:
            self._end_every_step()
        self._first_left, self._end.step = first_left, int(state.get("step", 0))
        self._begin()
        self.meetings.load_state_dict(state)

    def _begin(self) -> None:
        self._weight = 0.0
        self.meetings.begin(self._end.step)

    # -- what is refused -----------------------------------------------------------------------

    @property
    def _optimizers(self) -> list[Optimizer]:
        found = (each() for each in self._seen_optimizers)
        return [each for each in found if each is not None]

    def _refuse_others(self) -> None:
        """Raise `ConfigError` for parameters that train and are in no part of the model that meets."""
        known = {id(each) for part in self.meetings.fragments for each in part.parameters.values()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if any(id(p) not in known and p.requires_grad for p in group["params"]):
                    raise ConfigError(
                        f'plan: sync = "{self._text}": an optimizer has parameters that did not train when '
                        "farandole.distribute was called, and would differ between the ranks",
                        remedy="call farandole.distribute when all parameters that will train do, and are in an "
                        "optimizer",
                    )

    def _refuse_without_last(self, place: int) -> None:
        """Raise `ConfigError` where the last optimizer, whose steps count, does not step as the others do."""
        if self._counts[place] - self._counts[-1] > self._spec.steps + self._spec.first:
            raise ConfigError(
                f"optimizer {place} has stepped {self._counts[place]} times, and the last one of "
                f"farandole.distribute's list, whose steps say when ranks meet, {self._counts[-1]} times",
                remedy="give the optimizer that steps in every iteration last",
            )


class _LocalShutdown:
    """What a policy has to close and to say: it is there when the policy is not any more."""

    def __init__(self, here: World, meetings: Meetings) -> None:
        self._here, self._meetings = here, meetings
        self.step = 0
        """Steps of this rank on its own."""
        self._was_told = False

    @property
    def steps_alone(self) -> int:
        """Steps of this rank that are in no mean yet, of some part of the model."""
        return max(self.step - each.sent_at for each in self._meetings.fragments)

    def close(self) -> None:
        """Close the connections."""
        if self.steps_alone and not self._here.sockets.shut_down:
            self.tell(f"{self.steps_alone} steps of each rank were in no mean when the training ended")
        self._was_told = True
        self._meetings.close()

    def forget(self) -> None:
        """In a forked child: use no connection, and close none."""
        self._was_told = True
        self._meetings.forget()

    def tell(self, what: str) -> None:
        """Say once, on the first rank, what is in no mean, and the remedy."""
        if not self._was_told and self._here.rank == 0:
            write_notice(f"{what}: call farandole.drain(model) on all ranks before, or use farandole.averaged")
        self._was_told = True


# `sync = "auto"`: steps with an exchange by codec "auto" first, and local steps from then on if they gain enough.
#
# [Note: what is compared] Some steps after codec "auto" has measured the link and chosen, the ranks tell each
# other how long their steps take: what is above the prediction is neither computing of the model nor its exchange,
# and stays whatever is chosen. The same profile and link say what a step would take whose ranks train on their
# own. Both numbers are the same on all ranks, and so is the choice. Local steps cost something of the loss, which
# a prediction of seconds does not know, so that they must gain a quarter.


LEAST_GAIN = 1.25
TIMED_STEPS = 5
_MOST_STEPS = 50
"""After so many steps without a choice of codec "auto" there will be none: the ranks share memory, for one."""


class MeasuredSync:
    """The policy of one model whose plan leaves it open when ranks meet. To be made by all ranks."""

    def __init__(
        self,
        here: World,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        plan: Plan,
        *,
        buffers: ExtraTensors | None,
        end_every_step: Callable[[], None],
        tuner: Callable[[], Autotuner | None],
    ) -> None:
        """`end_every_step`: stops the exchange of gradients. `tuner`: what codec "auto" measures and chooses."""
        self._here, self._plan, self._buffers = here, plan, buffers
        self._seen_model, self._seen_optimizers = weakref.ref(model), [weakref.ref(each) for each in optimizers]
        self._end_every_step, self._tuner = end_every_step, tuner
        self._ends: list[float] = []
        """When steps ended, since codec "auto" has chosen."""
        self._steps = 0
        self._chosen = ""
        """Value of `sync` that was chosen; empty: not yet."""
        self._local: LocalSteps | None = None

    @property
    def is_local(self) -> bool:
        """Whether ranks train on their own now."""
        return self._local is not None

    @property
    def has_own_states(self) -> bool:
        """Whether each rank has optimizer states of its own."""
        return self.is_local

    def step_begins(self, optimizer: Optimizer, *, is_scaled: bool) -> None:
        """An optimizer is about to step; `is_scaled`: by a `GradScaler`."""
        if self._local is not None:
            self._local.step_begins(optimizer, is_scaled=is_scaled)

    def gradients_ready(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """The gradients of the step are ready: nothing is sent."""

    def step_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped: choose, when it is time."""
        if self._local is not None:
            self._local.step_ends(optimizer)
        elif not self._chosen and self._seen_optimizers[-1]() is optimizer:
            self._steps += 1
            self._choose()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model have the averaged parameters."""
        if self._local is None:
            yield
            return
        with self._local.averaged():
            yield

    def drain(self) -> None:
        """Meet now; to be called by all ranks."""
        if self._local is not None:
            self._local.drain()

    def close(self) -> None:
        """Close the connections."""
        if self._local is not None:
            self._local.close()

    def note_state_dict(self) -> None:
        """A state dict of the model is taken."""
        if self._local is not None:
            self._local.note_state_dict()

    def note_loaded(self) -> None:
        """The model was given other parameters."""
        if self._local is not None:
            self._local.note_loaded()

    def gather_states(self) -> None:
        """Each rank has its own."""

    def state_dict(self) -> dict[str, Any]:
        """Return what was chosen, and what this rank has beside model and optimizers, right after `drain`."""
        return {"chosen": self._chosen, **({} if self._local is None else self._local.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, with the same choice; to be called by all ranks."""
        chosen = str(state.get("chosen", ""))
        if self._local is None and chosen:
            self._adopt(chosen)
        if self._local is not None:
            self._local.load_state_dict({key: value for key, value in state.items() if key != "chosen"})

    # -- choosing ------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Choose if codec "auto" has, or never will. See [Note: what is compared]."""
        tuner = self._tuner()
        choice = None if tuner is None else tuner.choice
        if tuner is None or choice is None:
            if tuner is None and self._steps > 1:
                self._say("the ranks share the memory of a host, and no link is crossed")
                self._adopt(_EVERY_STEP)
            elif self._steps >= _MOST_STEPS:
                self._say(f'codec "auto" has chosen nothing in {_MOST_STEPS} steps')
                self._adopt(_EVERY_STEP)
            return
        self._ends.append(time.monotonic())
        if len(self._ends) <= TIMED_STEPS:
            return
        own = statistics.median(end - begin for begin, end in pairwise(self._ends))
        other_seconds = max(0.0, max(all_gather_json(self._here, "sync auto", own)) - choice.seconds)
        every, local = choice.seconds + other_seconds, tuner.predict_local_steps(MEASURED_CODEC, other_seconds)
        # Codec "auto" predicts what is between forward and the end of the exchange, and says so by itself.
        each = f"{format_seconds(every)} a step, {format_seconds(other_seconds)} of it beside passes and exchange"
        if local is None or local.seconds * LEAST_GAIN > every:
            alone = "" if local is None else f", and with local steps {format_seconds(local.seconds)}"
            self._say(f"each step by {choice.main_codec}: {each}{alone}")
            self._adopt(_EVERY_STEP)
            return
        # The plain mean: outer momentum needs more meetings than a training may have.
        chosen = SyncSpec.parse(f"local:H={local.steps}").to_text()
        self._say(
            f"{chosen} with {MEASURED_CODEC}: predicted {format_seconds(local.seconds)} a step, a meeting of "
            f"{format_seconds(local.meeting_seconds)} included; each step by {choice.main_codec}: "
            f"{each}"
        )
        self._adopt(chosen)

    def _adopt(self, chosen: str) -> None:
        self._chosen, model = chosen, self._seen_model()
        optimizers = [each for each in (seen() for seen in self._seen_optimizers) if each is not None]
        if chosen == _EVERY_STEP or model is None:
            return
        self._end_every_step()
        plan = replace(self._plan, sync=chosen, codec=MEASURED_CODEC)
        self._local = LocalSteps(self._here, model, optimizers, plan, buffers=self._buffers)

    def _say(self, what: str) -> None:
        model = self._seen_model()
        if self._here.rank == 0:
            write_notice(f"sync auto, {type(model).__name__}: {what}")


_EVERY_STEP = SyncSpec().name

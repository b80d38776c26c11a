"""`sync = "auto"`: steps with an exchange by codec "auto" first, and local steps from then on if they gain enough.

[Note: what is compared] Some steps after codec "auto" has measured the link and chosen, the ranks tell each other
how long their steps take: what is above the prediction is neither computing of the model nor its exchange, and
stays whatever is chosen. The same profile and link say what a step would take whose ranks train on their own. Both
numbers are the same on all ranks, and so is the choice. Local steps cost something of the loss, which a prediction
of seconds does not know, so that they must gain a quarter.
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
from ..comm.engine.options import ExtraTensors
from ..comm.world.store_sync import all_gather_json
from ..comm.world.world import World
from ..core.vocabulary.spec import Plan
from ..core.vocabulary.sync_spec import MEASURED_CODEC, SyncSpec
from ..core.vocabulary.text import write_notice
from ..core.vocabulary.units import format_seconds
from .local_steps import LocalSteps

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

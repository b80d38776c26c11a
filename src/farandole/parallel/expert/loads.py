"""The share of tokens that each expert gets, recorded: as metrics of a step, and as facts for a diagnosis.

[Note: windows of loads] A diagnosis reads facts, of which the last value stays. They are of the steps since the
last time they were noted, and are noted after steps 1, 2, 4, 8, ...: the last ones are of half of the training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...comm.world.session import next_power_of_two
from ...comm.world.world import World, has_world, world
from ...core.vocabulary import events
from ...core.vocabulary.events import Logged, Setup
from .dispatch import Load
from .expert_ranks import ExpertSeconds

PREFIX = "experts/"
"""Begins the names of metrics: ``experts/LAYER/imbalance``, ``.../dropped``, ``.../share/0``."""


@dataclass
class _LoadWindow:
    """What the experts of one layer got since the facts were noted last."""

    chosen: torch.Tensor
    taken: torch.Tensor


class ExpertLoads:
    """The loads of all layers of one world, which keeps it."""

    def __init__(self, here: World) -> None:
        self._here = here
        self._windows: dict[str, _LoadWindow] = {}
        self._seconds: list[ExpertSeconds] = []
        self._noted_step = here.session.steps.done
        here.session.steps.after_step(self.after_step)

    def add(self, layer: str, load: Load) -> None:
        """Count the load of one pass; the metrics of the first rank are of the last pass of a step."""
        window = self._windows.get(layer)
        then, now = None if window is None else window.chosen, load.chosen
        if window is None or then is None or (then.shape, then.device) != (now.shape, now.device):
            self._windows[layer] = _LoadWindow(load.chosen.clone(), load.taken.clone())
        else:
            window.chosen += load.chosen
            window.taken += load.taken
        if load.seconds is not None and load.chosen.device.type == "cpu":
            self._seconds.append(load.seconds)
        if self._here.rank == 0:
            self._here.session.recorder.record(Logged(metrics=metrics_of(layer, load.chosen, load.taken)))

    def after_step(self, step: int) -> int:
        """Note facts for a diagnosis, ever more rarely. See [Note: windows of loads]."""
        if step & (step - 1) or not self._windows:
            return next_power_of_two(step)
        steps, self._noted_step = max(1, step - self._noted_step), step
        layer = max(self._windows, key=lambda name: imbalance_of(self._windows[name].chosen))
        chosen, taken = self._windows[layer].chosen, self._windows[layer].taken
        seconds = sum(each.forward + each.backward for each in self._seconds) / steps
        self._here.session.recorder.record(
            Setup(
                {
                    events.SETUP_EXPERT_LAYER: layer,
                    events.SETUP_EXPERTS: chosen.numel(),
                    events.SETUP_EXPERT_BUSIEST: int(chosen.argmax()),
                    events.SETUP_EXPERT_IMBALANCE: round(imbalance_of(chosen), 4),
                    events.SETUP_EXPERT_DROPPED: round(dropped_of(chosen, taken), 4),
                    events.SETUP_EXPERT_SECONDS: round(seconds, 6),
                }
            )
        )
        self._windows.clear()
        self._seconds.clear()
        return next_power_of_two(step)


def imbalance_of(chosen: torch.Tensor) -> float:
    """Return how many times the mean the busiest expert gets; 1 for no tokens."""
    total = int(chosen.sum())
    return float(chosen.max()) * chosen.numel() / total if total else 1.0


def dropped_of(chosen: torch.Tensor, taken: torch.Tensor) -> float:
    """Return the share of choices that were over the capacity, 0 to 1."""
    total = int(chosen.sum())
    return 1 - int(taken.sum()) / total if total else 0.0


def metrics_of(layer: str, chosen: torch.Tensor, taken: torch.Tensor) -> dict[str, float]:
    """Return the metrics of one pass: imbalance, share of dropped choices, and each expert's share of choices."""
    shares = (chosen.to(torch.float64) / chosen.sum().clamp(min=1)).tolist()
    found = {
        f"{PREFIX}{layer}/imbalance": imbalance_of(chosen),
        f"{PREFIX}{layer}/dropped": dropped_of(chosen, taken),
    }
    return found | {f"{PREFIX}{layer}/share/{i}": round(share, 6) for i, share in enumerate(shares)}


def note_load(layer: str, load: Load) -> None:
    """Note what the experts of `layer` got in a training pass, if this process is a rank of a world."""
    if has_world():
        here = world()
        here.session.keep(ExpertLoads, lambda: ExpertLoads(here)).add(layer, load)

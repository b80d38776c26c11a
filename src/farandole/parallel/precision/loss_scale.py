"""Dynamic loss scaling: the scale of gradients inside a model with ``precision = "fp16"``.

Float16 holds no number below 6e-8, and many gradients are smaller. So they are multiplied by a scale before they
enter the model's backward pass, and divided by it where they leave it. (Micikevicius et al. 2018, "Mixed Precision
Training", section 3.2.) The constants are those of `torch.amp.GradScaler`.

[Note: one decision] A step whose gradients are not finite is left out. They are looked at after the exchange,
when they are the same bits on all ranks, so all ranks decide alike and nothing is sent for it. Where each rank has
shards of them (plan key ``zero``), it looks at its own, and the ranks agree by one small all-reduce. Several
optimizers of one model decide each for its own gradients, and change the scale once a backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ...comm.world.comm_errors import translated
from ...comm.world.world import World

INITIAL = 65536.0
GROWTH = 2.0
BACKOFF = 0.5
GOOD_STEPS = 2000
LEAST = 2.0**-16
"""A scale below 1 loses more than it saves: the gradients are not finite by themselves."""


class DynamicLossScale:
    """The scale of one model's gradients, and the steps that were skipped. The same on all ranks."""

    def __init__(self) -> None:
        self.value = INITIAL
        self.good_steps = 0
        """Steps since the scale changed."""
        self.skipped_steps = 0
        self._passes = 0
        self._round = -1
        self._is_counted = False
        self._is_backed_off = False
        self._found: dict[int, torch.Tensor] = {}
        self._decided: dict[int, bool] = {}

    def note_finite(self, key: int, finite: torch.Tensor | None) -> None:
        """Note whether the gradients of optimizer `key` are finite, a tensor () of bool; None: it has none.

        Their exchange has ended. Nothing is waited for.
        """
        self._decided.pop(key, None)
        self._found.pop(key, None)
        if finite is not None:
            self._found[key] = finite

    def pass_ends(self) -> None:
        """Note that a backward pass has brought new gradients."""
        self._passes += 1

    def is_dropped(self, key: int) -> bool:
        """Return whether the step of optimizer `key` is to be left out."""
        if key not in self._decided:
            finite = self._found.get(key)
            self._decided[key] = finite is not None and not bool(finite)
        return self._decided[key]

    def step(self, key: int) -> bool:
        """Return whether the step of optimizer `key` is left out, and let the scale follow."""
        dropped = self.is_dropped(key)
        self._found.pop(key, None)
        self._decided.pop(key, None)
        if self._round != self._passes:
            self._round, self._is_counted, self._is_backed_off = self._passes, False, False
        if dropped:
            self.good_steps = 0
            self.skipped_steps += not self._is_backed_off
            if not self._is_backed_off:
                self.value = max(self.value * BACKOFF, LEAST)
            self._is_backed_off = True
        elif not self._is_backed_off and not self._is_counted:
            self._is_counted = True
            self.good_steps += 1
            if self.good_steps >= GOOD_STEPS:
                self.value, self.good_steps = self.value * GROWTH, 0
        return dropped

    def state_dict(self) -> dict[str, float | int]:
        """Return scale and counters."""
        return {"scale": self.value, "good_steps": self.good_steps, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Take scale and counters."""
        self.value = float(state["scale"])
        self.good_steps, self.skipped_steps = int(state["good_steps"]), int(state["skipped_steps"])


def agree_finite(here: World, found: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return what `found` is on all ranks together: a flag is true if it is on each. None counts as true.

    To be called by all ranks, with as many flags.

    Raises:
        CommError: a rank is gone, or does something else.
    """
    flags = torch.tensor([each is None or bool(each) for each in found], dtype=torch.int32, device=here.device)
    with translated(here, "agreeing on finite gradients"):
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=here.group)
    return list(flags.bool())


def all_finite(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return whether no gradient holds NaN or infinity, as a tensor () of bool on the first one's device.

    A DTensor is looked at here, which is this rank's part of it.
    """
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    plain = [each.coalesce().values() if each.layout == torch.sparse_coo else each for each in local]
    norms = torch._foreach_norm([each for each in plain if each.numel()], float("inf"))
    device = plain[0].device
    if not norms:
        return torch.ones((), dtype=torch.bool, device=device)
    return torch.isfinite(torch.stack([norm.to(device, torch.float32) for norm in norms])).all()

"""Local steps in one process, which has all ranks: each trains on its own, and every H steps they meet."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from farandole.core.vocabulary.sync_spec import SyncSpec

from .data import count_of, loss_of, of_rank
from .play import Alone, rate_of
from .program import PlanProgram


class _One(Alone):
    """A rank: it has its own samples alone."""

    def __init__(self, program: PlanProgram, rank: int) -> None:
        super().__init__(program)
        self._rank = rank

    def _losses(self, step: int, number: int) -> Iterator[tuple[torch.Tensor, float]]:
        assert count_of(self.program) is None, "meetings go by samples"
        self.model.rate = rate_of(self.program, step)
        part = of_rank(self.program, self.program.first, step, number, self._rank)
        yield loss_of(self.program)(self.model(*part.inputs(self.program)), part.targets), 1.0


class Replicas:
    """All ranks of a program whose plan has `sync`, by the rule of docs/fast/rarely-meeting.md."""

    def __init__(self, program: PlanProgram) -> None:
        self.program, self.spec = program, SyncSpec.parse(program.first.sync)
        self.ranks = [_One(program, rank) for rank in range(program.first.ranks)]
        self.outer = {name: each.detach().clone() for name, each in self._parameters(self.ranks[0]).items()}
        self.velocity = {name: torch.zeros_like(each) for name, each in self.outer.items()}
        self.sent: tuple[int, list[dict[str, torch.Tensor]]] | None = None

    def train(self) -> None:
        """Make all steps."""
        for step in range(self.program.steps):
            for each in self.ranks:
                each.step(step)
            if self.sent is not None and step + 1 - self.sent[0] >= self.spec.overlap:
                self._apply(is_now=False)
            if (step + 1) % self.spec.steps == 0:
                self._send(step + 1)
                if not self.spec.overlap:
                    self._apply(is_now=True)

    def drain(self) -> dict[str, torch.Tensor]:
        """Meet once more; return what all ranks have then."""
        if self.sent is not None:
            self._apply(is_now=False)
        self._send(self.program.steps)
        self._apply(is_now=True)
        return self.outer

    def _send(self, step: int) -> None:
        now = [{name: p.detach().clone() for name, p in self._parameters(each).items()} for each in self.ranks]
        self.sent = step, now

    @torch.no_grad()
    def _apply(self, *, is_now: bool) -> None:
        """Make the outer step of what was sent. `is_now`: ranks have made no step since."""
        assert self.sent is not None, "nothing was sent"
        sent, self.sent = self.sent[1], None
        for name, outer in self.outer.items():
            change = torch.stack([outer - each[name] for each in sent]).mean(0)
            self.velocity[name] = self.spec.momentum * self.velocity[name] + change
            step = change + self.spec.momentum * self.velocity[name] if self.spec.nesterov else self.velocity[name]
            self.outer[name] = outer - self.spec.outer_lr * step
            for each, own in zip(self.ranks, sent, strict=True):
                parameter = self._parameters(each)[name]
                parameter.copy_(self.outer[name] if is_now else parameter + self.outer[name] - own[name])

    def _parameters(self, alone: Alone) -> dict[str, torch.nn.Parameter]:
        return {name: each for name, each in alone.model.named_parameters() if each.requires_grad}

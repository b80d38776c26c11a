"""Steps that are made again when a rank is lost: by the ranks that are left, of the gradients they still have.

[Note: a step is a transaction] Buckets are summed in place, so each rank keeps its own gradients until the step
is sure. When all have arrived, one more tiny sum is the vote: it ends only where all ranks have come to it, so
only then do gradients, buffers and residuals become what the sum made of them. Who fails before waits, with the
others that are left, for the next generation of ranks, and there all say how many exchanges they have made. One
that made an exchange more had the votes of all: so those that are behind have its sums too, and take them. All
others take back what they had and exchange it again, weighted by the samples of the ranks that are left.

What the loop asks all ranks between two exchanges (`fd.mean`, `fd.preempted`, `Checkpointer.after_step`) is
counted among them: who has the answer tells it to those that are behind. Other meetings of ranks (SyncBatchNorm,
`fd.gather`) raise where they were called, as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...core.vocabulary.errors import CommError
from ...core.vocabulary.text import name_ranks, write_notice
from ..world.comm_errors import LOST, translated
from ..world.session import DividedLoops, RankChange
from ..world.store_sync import all_gather_json
from ..world.world import World, wait_while_open

if TYPE_CHECKING:
    from .passes import BackwardPasses
    from .reducer import GradientReducer


_MOST_IN_VAIN = 3
"""How often a step is made again though no rank is lost."""


@dataclass(frozen=True)
class _Standing:
    """What one rank that is left says of its exchanges."""

    rank: int
    """Its number before."""
    done: int
    """Exchanges that it has made, and questions that were answered."""
    is_pending: bool
    """Whether it is in the next one, and not on its way there."""
    answer: Any
    """To the last one, if it was a question; JSON."""
    factors: list[float]
    """By reducer of the exchange under way: its share of the samples, over the mean share."""
    loops: list[Any]
    """Where its loaders stand."""


class StepRedo:
    """One a world whose ranks may be lost. Knows the reducers whose exchanges are made again."""

    def __init__(self, here: World) -> None:
        self._here = here
        self._reducers: list[weakref.ref[GradientReducer]] = []
        self._done, self._answer = 0, None
        self._in_vain = 0
        """How often in this step no rank was lost."""
        self._known = here.rank, here.size
        """This rank, and how many there are, as those know that follow changes."""
        self._loops: list[Any] = []
        """Where the loaders stood of ranks that were further, at the last change."""
        self._problem: CommError | None = None
        """Why the exchange under way cannot end, known before its end."""

    def add(self, reducer: GradientReducer) -> None:
        """Make exchanges of `reducer` again."""
        self._reducers.append(weakref.ref(reducer))
        reducer.passes.guards.redo = self
        reducer.in_flight.own = []

    def note(self, problem: CommError) -> None:
        """An exchange has failed during a backward pass: it goes on, and ends in `finish`."""
        self._problem = self._problem or problem

    @property
    def is_broken(self) -> bool:
        """Whether nothing can be sent any more in this exchange."""
        return self._problem is not None

    def ask(self, question: Callable[[], Any]) -> Any:
        """Return what `question` returns, a JSON value, asked of the ranks that are left when some are lost."""
        while True:
            try:
                answer = question()
            except LOST as problem:
                found = self._go_on((), problem, has_arrived=True)
                if found is None:
                    continue
                answer = found.answer
            self._done, self._answer = self._done + 1, answer
            return answer

    def finish(self, reducers: Sequence[BackwardPasses]) -> None:
        """End the exchange of these reducers, on all ranks that are left, and let its means be the gradients."""
        while not self._is_sure(reducers):
            pass
        self._done, self._answer, self._in_vain = self._done + 1, None, 0
        if (loops := self._here.session.kept(DividedLoops)) is not None:
            loops.note_exchange()

    def _is_sure(self, reducers: Sequence[BackwardPasses]) -> bool:
        """Exchange; return whether it is done, and False where it is to be done again."""
        problem, self._problem = self._problem, None
        has_arrived = False
        if self._here.size == 1:
            for passes in reducers:
                passes.end_alone()
            return True
        if problem is None:
            try:
                for passes in reducers:
                    passes.launch_rest()
                for passes in reducers:
                    passes.arrive()
                has_arrived = True
                self._vote()
            except LOST as lost:
                problem = lost
        if problem is None:
            for passes in reducers:
                passes.settle()
            return True
        # In the first exchange ranks agree on much more; counts of samples (`fd.weight`) are exchanged before it.
        is_first = not all(passes.exchanges_done for passes in reducers)
        if is_first or self._here.session.batch_weight.count_number:
            raise problem
        return self._go_on(reducers, problem, has_arrived=has_arrived) is not None

    def _vote(self) -> None:
        sum_up(self._here, torch.zeros(1, dtype=torch.float32), "the vote on a step")

    def _go_on(
        self, reducers: Sequence[BackwardPasses], problem: CommError, *, has_arrived: bool
    ) -> _Standing | None:
        """Meet the ranks that are left; return what one says that is further, so that this one need not try again.

        None: no rank is, and all do again what has failed.
        """
        here, ahead = self._here, None
        while True:
            try:
                taken = None if ahead is None else ahead.answer
                said = self._meet(problem, reducers, is_pending=ahead is None, taken=taken)
                newest = max(said, key=lambda each: each.done)
                pending = [each for each in said if each.done == newest.done and each.is_pending]
                self._refuse_strange(said, pending)
                is_behind = ahead is None and self._done < newest.done
                for passes in reducers:
                    if is_behind:
                        assert has_arrived, "a rank that went on had the votes of all"
                        passes.settle()
                    elif ahead is None:
                        passes.take_back()
                ahead = newest if is_behind else ahead
                self._follow(said, pending, is_behind=ahead is not None)
                for reducer in self._alive():
                    reducer.reconnect()
            except LOST as again:  # one more is lost
                problem = again
                continue
            break
        if ahead is None and here.size > 1:
            for place, passes in enumerate(reducers):
                # Those that are on their way here have whole batches: see `_refuse_strange`.
                total = sum(each.factors[place] for each in pending) + len(said) - len(pending)
                passes.begin_again(here.size / total if total else 1.0)
        return ahead

    def _meet(
        self, problem: CommError, reducers: Sequence[BackwardPasses], *, is_pending: bool, taken: Any
    ) -> list[_Standing]:
        """Leave this generation, and return what the ranks of the next one say, by rank."""
        here, regroup = self._here, self._here.session.regroup
        assert regroup is not None, "without it no reducer is added"
        regroup.leave(str(problem))
        for reducer in self._alive():
            reducer.open_route.leave()
        regroup.enter()
        done = self._done + (not is_pending)
        factors = [passes.local.factor for passes in reducers] if is_pending else []
        places = [] if (loops := here.session.kept(DividedLoops)) is None else loops.under_way()
        answer = self._answer if is_pending else taken
        mine = [self._known[0], done, is_pending, answer, factors, places]
        return [_Standing(*each) for each in all_gather_json(here, "redoing a step", mine)]

    def _follow(self, said: Sequence[_Standing], pending: Sequence[_Standing], *, is_behind: bool) -> None:
        """Tell those that must know of the ranks that are left."""
        rank, size = self._known
        left = tuple(each.rank for each in said)
        self._loops = pending[0].loops if pending else self._loops
        self._known = self._here.rank, self._here.size
        self._here.session.ranks_change(RankChange(rank, size, left, is_behind, self._loops))
        self._tell(size, left)

    def _alive(self) -> list[GradientReducer]:
        return [found for each in self._reducers if (found := each()) is not None and found.is_open]

    def _tell(self, size: int, left: Sequence[int]) -> None:
        self._in_vain = 0 if len(left) < size else self._in_vain + 1
        if self._in_vain > _MOST_IN_VAIN:
            raise CommError(
                f"exchanges failed {self._in_vain} times, and no rank is lost",
                rank=self._here.job_rank,
                operation="redoing a step",
                remedy="farandole doctor checks the links",
            )
        if self._here.rank == 0:
            gone = sorted(set(range(size)) - set(left))
            lost = f"lost {name_ranks(gone)} of {size}" if gone else "an exchange failed, and no rank is lost"
            write_notice(f"{lost}: {self._here.size} go on in step {self._here.session.steps.done + 1}")

    def _refuse_strange(self, said: Sequence[_Standing], pending: Sequence[_Standing]) -> None:
        """Raise, on all ranks, where it is not known which samples the ranks are at."""
        text, newest = "", max(each.done for each in said)
        if len(pending) < len(said) and any(factor != 1.0 for each in pending for factor in each.factors):
            text = "a rank was lost between two exchanges, and batches are unequal"
        elif len({len(each.factors) for each in pending}) > 1 or newest > min(each.done for each in said) + 1:
            text = "ranks were at other calls than each other"
        elif pending and any(_epochs(each) != _epochs(pending[0]) for each in said):
            text = "a rank was lost between two epochs"
        elif any(each.loops != pending[0].loops for each in pending):
            text = f"ranks have drawn other numbers of batches: {[each.loops for each in pending[:8]]}"
        if text:
            raise CommError(
                text,
                rank=self._here.job_rank,
                operation="redoing a step",
                remedy="go on from the last checkpoint (farandole run --restarts 3)",
            )


def _epochs(standing: _Standing) -> list[Any]:
    return [place[:2] for place in standing.loops]


def sum_up(here: World, values: torch.Tensor, what: str, *, op: Any = dist.ReduceOp.SUM) -> None:
    """Add up `values` over the ranks, in place; raise `PeerLost` where others leave this generation meanwhile."""
    if here.session.regroup is None:
        with translated(here, what):
            dist.all_reduce(values, op=op, group=here.group)
        return
    with translated(here, what):
        work = dist.all_reduce(values, op=op, group=here.group, async_op=True)
    assert work is not None, "an asynchronous collective returns its work"
    wait_while_open(here, work)


def ask_all(here: World, question: Callable[[], Any]) -> Any:
    """Return what `question` returns, a JSON value: of the ranks that are left, where steps are made again."""
    redo = here.session.kept(StepRedo)
    return question() if redo is None else redo.ask(question)

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

[Note: ranks that come in] Between two exchanges the ranks may leave a generation that has not failed, to meet in
one with others that wait. A rank whose connection breaks just then is behind in a question, and means another
meeting: the launcher lets no rank in where not all that are left say so, and those that wanted more ranks go on as
if on their way to the exchange that the others make again.
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

    worker: int
    """The launcher's number of its process, which it keeps."""
    is_new: bool
    """Whether it comes in."""
    done: int
    """Exchanges that it has made, and questions that were answered."""
    is_pending: bool
    """Whether it is in the next one, and not on its way there."""
    answer: Any
    """To the last one, if it was a question; JSON."""
    factors: list[float]
    """By reducer of the exchange under way: its share of the samples, over the mean share."""
    loops: list[Any]
    """Where its loaders stand, or those of the ranks that it is behind."""


_MEETING = "redoing a step"


class StepRedo:
    """One a world whose ranks may be lost. Knows the reducers whose exchanges are made again."""

    def __init__(self, here: World, workers: Sequence[int] = (), done: int = 0) -> None:
        """`workers`: by rank, see `meet_as_new`; else all ranks make this together. `done`: exchanges so far."""
        self._here = here
        self._reducers: list[weakref.ref[GradientReducer]] = []
        self._done, self._answer = done, None
        self._in_vain = 0
        """How often in this step no rank was lost."""
        assert here.session.regroup is not None, "without it no step is made again"
        self._known = list(workers)
        """The workers by rank, as those know that follow changes."""
        if not workers:
            here.session.regroup.has_state()
            self._known = all_gather_json(here, "workers", here.session.regroup.worker)
        self._loops: list[Any] = []
        """Where the loaders stood of ranks that were further, at the last change."""
        self._problem: CommError | None = None
        """Why the exchange under way cannot end, known before its end."""

    def add(self, reducer: GradientReducer) -> None:
        """Make exchanges of `reducer` again."""
        self._reducers.append(weakref.ref(reducer))
        reducer.passes.guards.redo = self
        reducer.in_flight.own = []

    @classmethod
    def meet_as_new(cls, here: World) -> bool:
        """Meet the ranks of a new generation as one that comes in; return whether any was there before."""
        assert here.session.regroup is not None, "by it they are reached"
        mine: list[Any] = [here.session.regroup.worker, True, 0, False, None, [], []]
        said = [_Standing(*each) for each in all_gather_json(here, _MEETING, mine)]
        here.session.drop(cls)  # of an attempt that failed
        here.session.keep(cls, lambda: cls(here, [each.worker for each in said], max(each.done for each in said)))
        here.session.ranks_change(RankChange(1, (), []))
        return not all(each.is_new for each in said)

    def why_closed(self) -> str:
        """Return why no rank can come in now; empty: one can."""
        if any(reducer.passes_held for reducer in self._alive()):
            return "gradients are held back (fd.accumulate)"
        loops = self._here.session.kept(DividedLoops)
        if loops is not None and self._here.size == 1:
            loops.note_exchange()  # which one rank alone does not make
        return "" if loops is None else loops.why_whole()

    def let_in(self, welcome: Callable[[Sequence[int]], None]) -> None:
        """Meet in the next generation, with ranks that wait; called by all ranks, between two exchanges.

        `welcome` is called with the numbers of now of those that come in, and is to make exchanges ready for all.
        Where it fails on one of these, again without it; if it fails again and again, without any.
        See [Note: ranks that come in].
        """
        here = self._here
        regroup = here.session.regroup
        assert regroup is not None, "without it ranks cannot change"
        failed, is_begun = 0, False
        while True:
            try:
                for reducer in self._alive():
                    reducer.open_route.leave()
                regroup.enter(lets_in=failed < _MOST_IN_VAIN)
                said = self._say(self._done, (), is_pending=False, answer=self._answer, places=self._places())
                there = [each for each in said if not each.is_new]
                newest = [each for each in there if each.done == self._done]
                pending = [each for each in newest if each.is_pending] or newest
                self._refuse_strange(there, pending)
                self._follow(said, pending, has_failed=False)
                new = [rank for rank, each in enumerate(said) if each.is_new]
                is_mixed = any(each.is_pending or each.done != self._done for each in there)
                if new or (is_begun and not is_mixed):  # once it has begun, what is not open must be opened
                    is_begun = True
                    welcome(new)
                else:
                    for reducer in self._alive():
                        reducer.reconnect()
                return
            except LOST as problem:
                failed += 1
                regroup.leave(str(problem))

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
        if self._here.session.batch_weight.count_number:
            raise problem  # counts of samples (`fd.weight`) were exchanged before
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
                self._follow(said, pending or [newest], has_failed=True)
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
        regroup = self._here.session.regroup
        assert regroup is not None, "without it no reducer is added"
        regroup.leave(str(problem))
        for reducer in self._alive():
            reducer.open_route.leave()
        regroup.enter()
        if is_pending:
            return self._say(self._done, reducers, is_pending=True, answer=self._answer, places=self._places())
        return self._say(self._done + 1, (), is_pending=False, answer=taken, places=self._loops)

    def _places(self) -> list[Any]:
        return [] if (loops := self._here.session.kept(DividedLoops)) is None else loops.under_way()

    def _say(
        self, done: int, reducers: Sequence[BackwardPasses], *, is_pending: bool, answer: Any, places: list[Any]
    ) -> list[_Standing]:
        """Tell the ranks of now where this one stands; return what all say, by rank."""
        factors = [passes.local.factor for passes in reducers]
        assert self._here.session.regroup is not None, "by it they are reached"
        mine = [self._here.session.regroup.worker, False, done, is_pending, answer, factors, places]
        return [_Standing(*each) for each in all_gather_json(self._here, _MEETING, mine)]

    def _follow(self, said: Sequence[_Standing], furthest: Sequence[_Standing], *, has_failed: bool) -> None:
        """Tell those that must know of the ranks that are left."""
        before, self._known = self._known, [each.worker for each in said]
        # One that broke off in the middle of the last change knows ranks of before that.
        left = tuple(before.index(each.worker) for each in said if not each.is_new and each.worker in before)
        self._loops = furthest[0].loops
        self._here.session.ranks_change(RankChange(len(before), left, self._loops))
        if has_failed or len(left) < len(before):
            self._tell(len(before), left)

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

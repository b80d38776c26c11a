"""The search: all layouts, pruned by what they hold at least, predicted best first, and the best ones refined.

[Note: best first] Layouts are predicted in the order of the screen ([Note: bounds and screens]): those that seem
to fit by its seconds, then the rest by its bytes; the first few of every family come before, so that each family
has its best plan. A layout whose floor is over the limit of memory, or no better than the best known plan of its
family, is passed over: nothing is lost by that. Where all other layouts have been predicted the result is that of
trying all. Where there are too many, the search ends after about `SearchRequest.effort` predictions, and the
answer says so. A part of them goes to neighbours of the best plans; where nothing has fitted, as many more are
made in the order of bytes.

[Note: the simplest of near ones] Predicted times are off by more than some percent. So of the plans that are
within `NEAR` of the best the one is chosen that changes least in the script, of these the one with the fewest
kinds of parallelism, and of these the best: what more would gain is inside of the error, and each is one more
thing to go wrong. With the goal memory the least is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, NamedTuple

from ...core.cluster import Cluster
from ...core.vocabulary.degrees import ORDER, REST
from ...core.vocabulary.errors import PlanError
from ...core.vocabulary.rules import chunks_of
from ...core.vocabulary.spec import Plan
from ..candidate import Candidate, Prediction
from ..cost.stages import simulated_micro_batches
from ..profile import ModelProfile
from .bounds import Bounds, Floor
from .refine import refined
from .result import PredictedPlan, SearchRequest
from .space import TUNED, SearchLayout, Space, neighbours, settings_of

Predictor = Callable[[ModelProfile, Cluster, Candidate], Prediction]
FIRST_OF_A_FAMILY = 4
REFINED = 6
"""Plans whose split and recomputation are searched."""
EXPANDED = 6
"""Plans whose neighbours are looked at: so many of the best, and the best of so many families."""
WORTH = 2.0
"""Neighbours are predicted that seem to be no worse than so many times the best plan."""
ALMOST = 1.5
"""Neighbours that seem to be over the limit by less are predicted."""
_Ranked = tuple[SearchLayout, Floor]
_Known = tuple[float, SearchLayout, Floor, PredictedPlan]
"""A layout that was predicted, after its score."""
NEAR = 0.03
"""See [Note: the simplest of near ones]. A share of what the goal makes smallest."""
_OF_A_PIPELINE, _SIMULATED = 3.0, 150
"""The effort of a pipeline, and how many micro-batches on how many stages are simulated for one unit of effort."""
_TUNING_SHARE = 0.4
"""The part of the effort that is kept for buckets, codecs and routes."""


@dataclass
class Found:
    """What a search has predicted."""

    options: list[PredictedPlan] = field(default_factory=list)
    """That fit."""
    over: list[PredictedPlan] = field(default_factory=list)
    """That do not."""
    families: dict[str, str] = field(default_factory=dict)
    """Names of all families that there are, in the order of the enumeration; and why one has no plan."""
    layouts: int = 0
    too_large: int = 0
    """Layouts whose floor is over the limit."""
    beaten: int = 0
    """Layouts whose floor is no better than a known plan."""
    predicted: int = 0
    left: int = 0
    """Layouts that were not looked at: the effort was spent."""

    def best(self, goal: str, family: str = "") -> PredictedPlan | None:
        """Return the best plan that fits: of a family, or of all by [Note: the simplest of near ones]."""
        if not family:
            return choose(self.options, goal, lambda each: score(each, goal)[0]) if self.options else None
        fitting = [each for each in self.options if each.family == family]
        return min(fitting, key=lambda each: score(each, goal)) if fitting else None


def choose(options: Sequence[PredictedPlan], goal: str, value: Callable[[PredictedPlan], float]) -> PredictedPlan:
    """Return the best by `value`, but of near ones the simplest: see [Note: the simplest of near ones]."""
    least = min(map(value, options))
    most = least if goal == "memory" else least * (1 + NEAR)
    near = [each for each in options if value(each) <= most]
    return min(near, key=lambda each: (*simple(each.candidate), value(each), score(each, goal)))


def simple(candidate: Candidate) -> tuple[int, int]:
    """Return how simple a plan is, the simplest first: see [Note: the simplest of near ones]."""
    return candidate.script_changes, len(kinds_of(candidate))


def kinds_of(candidate: Candidate) -> list[str]:
    """Return the kinds of parallelism of a plan: its degrees above 1, and the stage of ZeRO. One rank has none."""
    plan = candidate.plan
    sizes = {name: getattr(plan, name) for name in ORDER}
    if REST in sizes.values():
        known = math.prod(size for size in sizes.values() if size != REST)
        sizes = {name: candidate.ranks // known if size == REST else size for name, size in sizes.items()}
    return [*(name for name, size in sizes.items() if size > 1), *([f"ZeRO-{plan.zero}"] if plan.zero else [])]


def score(option: PredictedPlan, goal: str) -> tuple[float, ...]:
    """Return what a goal makes smallest; of equal plans the simpler one is better."""
    prediction, candidate = option.prediction, option.candidate
    first = _score(goal, prediction.seconds, prediction.peak_bytes, candidate.ranks)
    return (first, prediction.seconds, prediction.peak_bytes, simplicity(candidate))


def _score(goal: str, seconds: float, nbytes: float, ranks: int) -> float:
    return {"memory": nbytes, "cost": ranks * seconds}.get(goal, seconds)


def simplicity(candidate: Candidate) -> int:
    """Return how many keys of the plan are not as by default."""
    plan = candidate.plan
    return sum(getattr(plan, name) != default for name, default in _DEFAULTS)


class SearchQuestion(NamedTuple):
    """What the search works on."""

    profile: ModelProfile
    cluster: Cluster
    request: SearchRequest
    predict: Predictor
    limit_bytes: int
    """Memory of a rank."""


def find(question: SearchQuestion) -> Found:
    """Return the plans of a request with their predictions. See [Note: best first].

    Raises:
        PlanError: there is no plan at all that could run: the reasons are in the message.
    """
    return _Search(question).run()


def best_of_each(options: Sequence[PredictedPlan], goal: str) -> list[PredictedPlan]:
    """Return the best of those that buckets, codecs and routes alone tell apart; the best first."""
    found: dict[str, PredictedPlan] = {}
    for each in sorted(options, key=lambda each: score(each, goal)):
        found.setdefault(repr(replace(each.candidate, plan=replace(each.candidate.plan, **_TUNED))), each)
    return list(found.values())


_DEFAULTS = tuple(Plan().to_mapping().items())
_TUNED: dict[str, Any] = {name: getattr(Plan, name) for name in TUNED}


class _Search:
    def __init__(self, question: SearchQuestion) -> None:
        self._profile, self._cluster, self._request, self._predict, self._limit_bytes = question
        self._space = Space(self._profile, self._request, self._cluster)
        self._found = Found()
        self._best: dict[str, float] = {}
        """Score by family."""
        self._known: dict[str, list[_Known]] = {}
        self._effort = float(self._request.effort)
        self._shapes: set[tuple[str, int, int, int]] = set()
        """Schedules that were built."""

    def run(self) -> Found:
        by_family = self._layouts()
        tuning = self._effort * _TUNING_SHARE
        self._look(by_family, until=tuning)
        self._descend(by_family, until=tuning / 2)
        self._tune()
        self._refine()
        return self._found

    def _layouts(self) -> dict[str, list[_Ranked]]:
        """Return the layouts of each family; of one that cannot fit the smallest."""
        bounds = Bounds(self._profile, self._cluster, self._request.fixed)
        by_family: dict[str, list[_Ranked]] = {}
        large: dict[str, list[_Ranked]] = {}
        found = self._found
        for base, layouts in self._space:
            family = base.family
            found.families.setdefault(family, "")
            kept = by_family.setdefault(family, [])
            found.layouts += len(layouts)
            for layout, floor in zip(layouts, bounds.of(base, layouts), strict=True):
                if floor.nbytes <= self._limit_bytes:
                    kept.append((layout, floor))
                    continue
                found.too_large += 1
                large.setdefault(family, []).append((layout, floor))
        if not found.layouts:
            raise PlanError(self._nothing(), remedy=self._remedy())
        for family, reasons in self._space.reasons.items():
            if not by_family.get(family) and family not in large:
                found.families[family] = max(reasons, key=lambda reason: reasons[reason])
        for family, entries in large.items():
            if not by_family[family]:
                entries.reverse()  # of equal ones the last, which divides by more
                by_family[family] = [min(entries, key=lambda entry: (entry[1].screen_bytes, entry[0].micro_batch))]
        return by_family

    def _in_order(self, entries: Iterable[_Ranked]) -> Iterator[_Ranked]:
        """Yield what most likely fits by its score, then the rest by its memory."""
        late = []
        for entry in sorted(entries, key=lambda entry: self._screened(*entry)):
            if entry[1].screen_bytes > self._limit_bytes:
                late.append(entry)
            else:
                yield entry
        yield from sorted(late, key=lambda entry: entry[1].screen_bytes)

    def _screened(self, layout: SearchLayout, floor: Floor) -> float:
        goal = self._request.goal
        return floor.screen_bytes if goal == "memory" else _score(goal, floor.screen_seconds, 0, layout.ranks)

    def _look(self, by_family: dict[str, list[_Ranked]], *, until: float) -> None:
        """Predict layouts with default buckets, until so much effort is left."""
        first = [list(islice(self._in_order(each), FIRST_OF_A_FAMILY)) for each in by_family.values()]
        for place in range(FIRST_OF_A_FAMILY):
            for entries in first:
                if place < len(entries) and (not place or self._effort > until):
                    self._consider(*entries[place])
        rest = {entry[0]: entry[1] for entries in by_family.values() for entry in entries}
        for entry in chain(*first):
            del rest[entry[0]]
        self._walk(self._in_order(rest.items()), rest, self._effort - until)
        if rest and not self._found.options:
            before = self._effort
            by_memory = sorted(rest.items(), key=lambda entry: entry[1].screen_bytes)
            self._walk(by_memory, rest, self._request.effort, until_one_fits=True)
            self._effort = before
        self._found.left = len(rest)

    def _walk(
        self, entries: Iterable[_Ranked], rest: dict[SearchLayout, Floor], effort: float, *,
        until_one_fits: bool = False,
    ) -> None:  # fmt: skip
        """Predict layouts with so much effort, and take them from the `rest`."""
        until = self._effort - effort
        for layout, floor in entries:
            if self._effort <= until or (until_one_fits and self._found.options):
                return
            del rest[layout]
            self._consider(layout, floor)

    def _descend(self, by_family: dict[str, list[_Ranked]], *, until: float) -> None:
        """Look around the best plans, until none of them has a better neighbour."""
        if not self._found.left:
            return
        floors = dict(chain(*by_family.values()))
        known = [each for of_family in self._known.values() for each in of_family]
        seen = {layout for _, layout, _, _ in known}
        expanded: set[SearchLayout] = set()
        while self._effort > until:
            fitting = [each for each in known if each[3].prediction.peak_bytes <= self._limit_bytes]
            fitting.sort(key=lambda each: each[0])
            of_families: dict[str, _Known] = {}
            for each in fitting:
                of_families.setdefault(each[1].family, each)
            best = [*fitting[:EXPANDED], *list(of_families.values())[:EXPANDED]]
            entry = next((each for each in best if each[1] not in expanded), None)
            if entry is None:
                return
            value, layout, floor, _ = entry
            expanded.add(layout)
            most = WORTH * best[0][0] * self._screened(layout, floor)
            new = {each: floors[each] for each in neighbours(layout) if each in floors and each not in seen}
            for other, near in sorted(new.items(), key=lambda each: self._screened(*each)):
                fits_almost = near.screen_bytes <= ALMOST * self._limit_bytes
                if fits_almost and value * self._screened(other, near) <= most and self._effort > until:
                    seen.add(other)
                    made = self._consider(other, near)
                    known += made
                    self._found.left -= len(made)

    def _consider(self, layout: SearchLayout, floor: Floor) -> list[_Known]:
        """Predict a layout unless it is beaten; return what is known then, if anything."""
        if self._is_beaten(layout, floor):
            self._found.beaten += 1
            return []
        option = self._try(layout)
        if option is None:
            return []
        known = score(option, self._request.goal)[0], layout, floor, option
        self._known.setdefault(layout.family, []).append(known)
        return [known]

    def _is_beaten(self, layout: SearchLayout, floor: Floor) -> bool:
        least = _score(self._request.goal, floor.seconds, floor.nbytes, layout.ranks)
        return least > self._best.get(layout.family, float("inf"))

    def _try(self, layout: SearchLayout, **tuned: object) -> PredictedPlan | None:
        """Predict one plan; return it, or None if the product refuses it."""
        try:
            candidate = layout.to_candidate(self._request.fixed, **tuned)
        except PlanError:
            return None
        return self._option(layout.family, candidate)

    def _option(self, family: str, candidate: Candidate) -> PredictedPlan | None:
        self._effort -= self._effort_of(candidate)
        try:
            prediction = self._predict(self._profile, self._cluster, candidate)
        except PlanError as problem:
            if not self._found.families.get(family):
                self._found.families[family] = problem.message
            return None
        self._found.predicted += 1
        option = PredictedPlan(family, candidate, prediction)
        if prediction.peak_bytes > self._limit_bytes:
            self._found.over.append(option)
        else:
            self._found.options.append(option)
            value = score(option, self._request.goal)[0]
            self._best[family] = min(value, self._best.get(family, value))
        return option

    def _effort_of(self, candidate: Candidate) -> float:
        """Return the effort of one prediction: a schedule is built once for all plans that have it."""
        plan = candidate.plan
        if plan.pipeline == 1:
            return 1.0
        stages = int(plan.pipeline) * chunks_of(plan.schedule, plan.chunks)
        simulated = simulated_micro_batches(int(plan.pipeline), stages, plan.micro_batches)
        shape = plan.schedule, int(plan.pipeline), simulated, plan.chunks
        effort = stages * simulated / _SIMULATED
        is_known = shape in self._shapes
        self._shapes.add(shape)
        return _OF_A_PIPELINE + effort * (1 if is_known else 2)

    def _tune(self) -> None:
        """Try buckets, codecs and routes: of the best of each family first, then of all in their order."""
        order = []
        for known in self._known.values():
            known.sort(key=lambda each: (each[3].prediction.peak_bytes > self._limit_bytes, each[0]))
            order += [(number > 0, *each[:3]) for number, each in enumerate(known)]
        order.sort(key=lambda each: each[:2])
        for _, _, layout, floor in order:
            if self._effort <= 0:
                return
            if not self._is_beaten(layout, floor):
                for tuned in settings_of(layout, self._request, self._cluster):
                    if tuned:
                        self._try(layout, **tuned)

    def _refine(self) -> None:
        """Search the split and the recomputation of the best plans, and of those that fit only almost."""
        goal = self._request.goal
        fitting = best_of_each(self._found.options, goal)[:REFINED]
        best = score(fitting[0], goal) if fitting else (math.inf,)
        better = [each for each in best_of_each(self._found.over, goal) if score(each, goal) < best]
        smallest = sorted(better, key=lambda each: each.prediction.peak_bytes)[: 2 * REFINED]
        almost = list({id(each): each for each in [*smallest, *better[:REFINED]]}.values())
        almost += self._without_recomputation(fitting)
        for option in [*fitting, *almost]:
            for candidate in refined(self._profile, self._cluster, option, self._limit_bytes, self._request.fixed):
                self._option(option.family, candidate)

    def _without_recomputation(self, options: Sequence[PredictedPlan]) -> Iterator[PredictedPlan]:
        """Yield plans that compute blocks again, as they would be without: where refining begins."""
        if "recompute" in self._request.fixed:
            return
        for option in options:
            candidate = option.candidate
            if candidate.plan.recompute == "blocks":
                plain = replace(candidate, plan=replace(candidate.plan, recompute="none"))
                made = self._option(option.family, plain)
                if made is not None:
                    yield made

    def _nothing(self) -> str:
        request = self._request
        counted: dict[str, tuple[int, int]] = {}
        for family, all_of in self._space.reasons.items():
            for why, count in all_of.items():
                simple, before = counted.get(why, (99, 0))
                counted[why] = min(simple, family.count(" x ")), before - count
        simplest = min((simple for simple, _ in counted.values()), default=0)
        reasons = sorted((why for why in counted if counted[why][0] == simplest), key=counted.__getitem__)
        keys = ", ".join(f"{key} = {value!r}" for key, value in request.choices.items())
        said = f" with {keys}" if keys else ""
        if not reasons:
            return f"no plan for {request.ranks} ranks{said}: the degrees do not divide the ranks"
        return f"no plan for {request.ranks} ranks{said}: {'; '.join(reasons[:3])}"

    def _remedy(self) -> str:
        request = self._request
        if request.global_batch % request.ranks:
            nearest = max(1, request.global_batch // request.ranks) * request.ranks
            return f"a global batch of {nearest} would divide, or fix fewer keys"
        return "fix fewer keys"

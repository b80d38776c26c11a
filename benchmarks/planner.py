"""The planner held to its figures: predicted steps beside measured ones, and its choices beside all others.

    python benchmarks/planner.py [--only data degrees pipeline ranking beats] [--out planner.json]

The machine must have nothing else to do. Clusters are measured (`farandole measure`, on emulated hosts for links),
models are analysed with measured units, each plan is predicted, written with its prediction, and trained; measured
is the median step of the run's summary.

- ``data``: data parallel on 2 emulated hosts, 3 links x 2 bucket sizes x 2 batches. Target: 10 % MAPE.
- ``degrees``: ZeRO stage 3, tensor and context parallel on 2 ranks of this machine. Target: 15 %. Three rounds,
  each with a profile of its own: units and runs are both slowed by what else the hardware does, for minutes.
  Shown is the round of each plan whose error is the middle one.
- ``pipeline``: schedules and micro-batches on 4 ranks that sleep instead of computing. Target: 10 %.
- ``ranking``: plans of one model on 4 emulated hosts with ranks that sleep. Targets: Spearman 0.9, regret of the
  first 10 %, of the best of the first three 2 %.
- ``beats``: the planner's plan beside plain data parallel on a slow link, with a memory limit that ranks enforce,
  and with a slow rank: the gain is to be what it predicted within 15 %.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from farandole.core.cluster import Cluster, Coefficient
from farandole.core.cluster_file import read_cluster
from farandole.core.vocabulary.errors import PlanError
from farandole.core.vocabulary.spec import Plan
from farandole.plan.candidate import Candidate, Prediction
from farandole.plan.cost.predict import predict
from farandole.plan.profile import ModelProfile
from farandole.plan.search.decide import search
from farandole.plan.search.result import PredictedPlan
from farandole.plan.search.result import SearchRequest as Request
from farandole.train.analysis.analyse import analyse
from farandole.train.analysis.measure import Timing, measure_units
from farandole.train.analysis.user_code import Batches
from planner_ranks import MODELS
from shared import FARANDOLE, read_options

HERE = Path(__file__).parent
KIB, MIB = 2**10, 2**20
ROUNDS = 3


@dataclass(frozen=True)
class Place:
    """Where ranks run: on emulated hosts with links of a rate, or all on this one."""

    ranks: int
    rate: str = ""
    """As `farandole emulate --rate`; empty: this machine."""

    @property
    def name(self) -> str:
        """For files."""
        return f"{self.ranks}-{self.rate or 'here'}"

    def command(self, *words: str) -> list[str]:
        """Return a farandole command on these hosts."""
        hosts = (
            ["emulate", "--hosts", str(self.ranks), "--rate", self.rate, "--", "farandole"] if self.rate else []
        )
        return [*FARANDOLE, *hosts, *words]


@dataclass(frozen=True)
class Case:
    """A plan, what was predicted of it, and what it took."""

    name: str
    predicted_seconds: float
    measured_seconds: float | None
    """None: it failed."""
    problem: str = ""

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1."""
        return self.predicted_seconds / self.measured_seconds - 1 if self.measured_seconds else None


class Bench:
    """The directory of this benchmark, with clusters and profiles that are measured once."""

    def __init__(self, directory: Path, steps: int, seconds: float) -> None:
        self.directory, self.steps, self.seconds = directory, steps, seconds
        self._profiles: dict[str, ModelProfile] = {}

    def cluster(self, place: Place, model: str) -> Cluster:
        """Return the cluster, measured unless its file is there.

        Ranks that sleep leave the cores to the exchange: then neither slows the other down.
        """
        path = self.directory / f"cluster-{place.name}.toml"
        if not path.exists():
            words = ("measure", "-np", str(place.ranks), "--seconds", str(self.seconds), "--out", str(path))
            subprocess.run(place.command(*words), check=True, stdout=subprocess.DEVNULL)
        cluster = read_cluster(path)
        if model == "virtual":
            none = Coefficient(1.0)
            cluster = dataclasses.replace(cluster, compute_slowdown=none, exchange_slowdown=none)
        return cluster

    def profile(self, model: str) -> ModelProfile:
        """Return the profile of a model, its units measured on one thread."""
        if model not in self._profiles:
            make_model, make_batch, loss_of = MODELS[model]

            def loss(output: Any, batch: Any) -> Any:
                return loss_of(output, batch if model == "language" else batch.detach())

            beside = 1 if model == "language" else 0  # all of this model's ranks are two on this machine
            timing = Timing(make_model, Batches(make_batch), loss, "cpu", threads=1, neighbours=beside)
            self._profiles[model] = measure_units(analyse(make_model, make_batch, loss=loss), timing)
        return self._profiles[model]

    def forget_profiles(self) -> None:
        """Let units be measured again."""
        self._profiles.clear()

    def run(self, place: Place, model: str, candidate: Candidate, prediction: Prediction, *words: str) -> Case:
        """Train by a plan; return predicted and measured."""
        stated = PredictedPlan("", candidate, prediction).predicted()
        inside = Path(tempfile.mkdtemp(prefix="run-", dir=self.directory))
        run, path = inside / "run", inside / "plan.toml"
        path.write_text(dataclasses.replace(candidate.plan, predicted=stated).to_toml())
        script = [sys.executable, str(HERE / "planner_ranks.py"), model, "--batch", str(candidate.global_batch)]
        options = ["--quiet", "-np", str(candidate.ranks), "--run-dir", str(run), "--plan", str(path)]
        command = place.command("run", *options, "--", *script, "--steps", str(self.steps), *words)
        # A limit is on what tensors take: large ones go back to the system one by one, not with the heap's last.
        environment = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": str(MIB)} if "--memory" in words else {})}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        name = _words_of(candidate)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            return Case(name, prediction.seconds, None, lines[-1] if lines else f"exit code {done.returncode}")
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        return Case(name, prediction.seconds, summary["step_seconds"])

    def try_plan(self, place: Place, model: str, candidate: Candidate) -> Case:
        """Predict a plan and train by it."""
        prediction = predict(self.profile(model), self.cluster(place, model), candidate)
        return self.run(place, model, candidate, prediction)


def _words_of(candidate: Candidate) -> str:
    changed = {key: values[0] for key, values in candidate.plan.differences(Plan()).items()}
    said = ", ".join(f"{key} {value}" for key, value in changed.items()) or "plain data parallel"
    return f"{said}; batch {candidate.global_batch}"


def mape(cases: Sequence[Case]) -> float | None:
    """Return the mean absolute error of those that ran."""
    errors = [abs(case.error) for case in cases if case.error is not None]
    return sum(errors) / len(errors) if errors else None


def show(title: str, cases: Sequence[Case]) -> dict[str, Any]:
    """Print a table, and return it as plain values."""
    print(f"\n{title}\n{'predicted':>12}{'measured':>12}{'error':>9}   plan", flush=True)
    for case in cases:
        measured = "failed" if case.measured_seconds is None else f"{1e3 * case.measured_seconds:.1f} ms"
        error = "" if case.error is None else f"{case.error:+.1%}"
        print(f"{1e3 * case.predicted_seconds:>9.1f} ms{measured:>12}{error:>9}   {case.name} {case.problem}")
    found = mape(cases)
    if found is not None:
        print(f"mean absolute error {found:.1%}", flush=True)
    return {"mape": found, "cases": [{**dataclasses.asdict(case), "error": case.error} for case in cases]}


def data(bench: Bench) -> dict[str, Any]:
    """Data parallel: links x buckets x batches."""
    cases = []
    for rate, bucket, batch in itertools.product(("100mbit", "300mbit", "1gbit"), (256 * KIB, 4 * MIB), (16, 64)):
        plan = Plan(bucket_bytes=bucket, first_bucket_bytes=min(bucket, MIB))
        case = bench.try_plan(Place(2, rate), "language", Candidate(plan, 2, batch))
        cases.append(dataclasses.replace(case, name=f"{rate}: {case.name}"))
    return show("data parallel, 2 hosts; target 10 %", cases)


def degrees(bench: Bench) -> dict[str, Any]:
    """ZeRO stage 3, tensor and context parallel."""
    plans = (Plan(zero=3), Plan(tensor=2), Plan(context=2))
    rounds = []
    for _ in range(ROUNDS):
        bench.forget_profiles()
        rounds.append([
            bench.try_plan(Place(2), "language", Candidate(plan, 2, batch)) for plan in plans for batch in (16, 64)
        ])  # fmt: skip
        show(f"degrees, round {len(rounds)}", rounds[-1])
    middle = [sorted(of_plan, key=_order)[ROUNDS // 2] for of_plan in zip(*rounds, strict=True)]
    found = show("degrees on 2 ranks of this machine, the middle of the rounds; target 15 %", middle)
    return found | {"rounds": [[dataclasses.asdict(case) for case in each] for each in rounds]}


def _order(case: Case) -> float:
    return float("inf") if case.error is None else case.error


def pipelines(bench: Bench) -> dict[str, Any]:
    """Return schedules on ranks that sleep."""
    cases = [
        bench.try_plan(Place(4), "virtual", Candidate(Plan(pipeline=4, schedule=name, micro_batches=count), 4, 32))
        for name in ("gpipe", "1f1b", "interleaved", "zb-h1")
        for count in (4, 8)
    ]
    return show("pipelines on 4 virtual ranks; target 10 %", cases)


def _all_plans(batch: int) -> list[Candidate]:
    plans = [
        Plan(zero=zero, bucket_bytes=bucket, accumulate=accumulate)
        for zero, bucket, accumulate in itertools.product((0, 1, 2), (MIB, 4 * MIB), (1, 2))
    ]
    plans += [Plan(zero=3, accumulate=accumulate) for accumulate in (1, 2)]
    plans += [
        Plan(pipeline=ranks, schedule=name, micro_batches=count)
        for ranks, name, count in itertools.product((2, 4), ("gpipe", "1f1b", "interleaved", "zb-h1"), (4, 8))
    ]
    return [Candidate(plan, 4, batch) for plan in plans]


def ranking(bench: Bench) -> dict[str, Any]:
    """All plans of one model on four virtual ranks."""
    place = Place(4, "200mbit")
    cases = [bench.try_plan(place, "virtual", candidate) for candidate in _all_plans(32)]
    ran = sorted((case for case in cases if case.measured_seconds), key=lambda case: case.predicted_seconds)
    measured = [case.measured_seconds or 0.0 for case in ran]
    found = show("all plans on 4 virtual ranks; targets: Spearman 0.9, regret 10 % and 2 %", cases)
    found |= {
        "spearman": spearman([case.predicted_seconds for case in ran], measured),
        "regret of the first": measured[0] / min(measured) - 1,
        "regret of the best of three": min(measured[:3]) / min(measured) - 1,
    }
    print(", ".join(f"{key} {value:.3f}" for key, value in found.items() if isinstance(value, float)), flush=True)
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the correlation of ranks; equal values have the mean of theirs.

    >>> spearman([1, 2, 3], [10, 30, 20])
    0.5
    """

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(b < a for b in values) + (sum(b == a for b in values) - 1) / 2 for a in values]

    return statistics.correlation(ranks(first), ranks(second))


def beats(bench: Bench) -> dict[str, Any]:
    """The planner's plan beside plain data parallel, where they differ."""
    slow_link, virtual = Place(2, "50mbit"), Place(4)
    slow = dataclasses.replace(bench.cluster(virtual, "virtual"), rank_speeds={3: 0.25})
    found = {
        "slow link": _beat(
            bench, slow_link, "language", bench.cluster(slow_link, "language"), Request(2, 64, allow_lossy=True)
        ),
        "memory limit": _with_memory_limit(bench),
        "slow rank": _beat(bench, virtual, "virtual", slow, Request(4, 24, goal="time"), "--slow", "3:0.25"),
    }
    for name, each in found.items():
        print(f"{name}: {each}", flush=True)
    return found


def _with_memory_limit(bench: Bench) -> dict[str, Any]:
    """Limit ranks to less than plain data parallel needs: it must fail, and is compared at the batch that fits."""
    place, batch = Place(2), 256
    cluster, profile = bench.cluster(place, "language"), bench.profile("language")
    plain = predict(profile, cluster, Candidate(Plan(), 2, batch))
    limit = round(0.6 * plain.peak_bytes)
    return _beat(bench, place, "language", cluster, Request(2, batch, memory_bytes=limit), "--memory", str(limit))


def _beat(
    bench: Bench, place: Place, model: str, cluster: Cluster, request: Request, *words: str
) -> dict[str, Any]:
    """Return by what a plan is faster than plain data parallel: predicted, and measured.

    Where plain data parallel fails for want of memory, it is compared at the largest batch with which it runs.
    """
    profile = bench.profile(model)
    answer = search(profile, cluster, request)
    if answer.best is None:
        return {"problem": "; ".join(answer.advice)}
    chosen, prediction = answer.best.candidate, answer.best.prediction
    ours = bench.run(place, model, chosen, prediction, *words)
    batch, failed = request.global_batch, []
    while True:
        plain = Candidate(Plan(), request.ranks, batch)
        theirs = bench.run(place, model, plain, predict(profile, cluster, plain), *words)
        if theirs.measured_seconds or batch <= request.ranks:
            break
        failed.append(batch)
        batch //= 2
    if ours.measured_seconds is None or theirs.measured_seconds is None:
        return {"plan": ours.name, "problem": ours.problem or theirs.problem}
    share = batch / request.global_batch
    predicted = theirs.predicted_seconds / ours.predicted_seconds / share
    measured = theirs.measured_seconds / ours.measured_seconds / share
    return {
        "plan": ours.name, "differs": chosen.plan != Plan() or chosen.ranks != request.ranks,
        "predicted gain": predicted, "measured gain": measured, "off": measured / predicted - 1,
        "plain failed with batches": failed,
    }  # fmt: skip


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "data": data, "degrees": degrees, "pipeline": pipelines, "ranking": ranking, "beats": beats,
}  # fmt: skip


def main() -> None:
    """Run the sections."""
    options = read_options(
        __doc__,
        only=(list(SECTIONS), "which sections", list(SECTIONS)),
        steps=(30, "steps of each run"),
        seconds=(60.0, "how long a cluster is measured"),
        directory=(Path, "where clusters and runs are kept (default: a new one)"),
        out=(Path, "write everything as JSON"),
    )
    directory = options.directory or Path(tempfile.mkdtemp(prefix="farandole-planner-"))
    directory.mkdir(parents=True, exist_ok=True)
    bench = Bench(directory, options.steps, options.seconds)
    found: dict[str, Any] = {"date": date.today().isoformat(), "machine": platform.platform()}
    for name in options.only:
        try:
            found[name] = SECTIONS[name](bench)
        except PlanError as problem:
            found[name] = {"problem": str(problem)}
            print(f"{name}: {problem}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

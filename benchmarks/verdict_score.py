"""Score `farandole diagnose`: faults injected in trainings of other people's models, each with a known cost.

    python -m benchmarks.verdict_score --page docs/results/verdicts.md

Needs an idle machine with two cores, root for the cases with emulated hosts, and the packages transformers,
lightning, timm and torch_geometric. Each case runs with its fault and with the first fix that the diagnosis
proposes, and, where no clock can tell the truth, healthy before. Three things are scored:

- verdict: the costliest finding is of the kind that was injected, and names the rank if one rank has the fault;
- price: its cost is within 15 % of the truth. This is what the fault took by its own clock in the steps that are
  analysed, or the difference of the mean steps of the faulty and the healthy run where no clock can tell;
- gain: the step gets shorter by at least 0.8 of what the fix promised. A fix without a promise is not counted.

A fix that only the user can make ("look at forward on rank 1") is applied by removing the fault. A healthy run may
have a finding if its fix gives 0.8 of its promise.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # for `python -m benchmarks.verdict_score`

import verdict_pages as pages
from shared import FARANDOLE

SCRIPT = Path(__file__).with_name("verdict_trainings.py")
WARM_UP = 3
BEGIN = "<!-- figures of benchmarks/verdict_score.py -->"
"""In the page: what stands before it is kept."""


@dataclass(frozen=True)
class Case:
    """A training, its fault, and what must be found."""

    training: str
    fault: str
    kinds: tuple[str, ...]
    size: float = 0.06
    steps: int = 40
    rate: str = ""
    """Of the link between two emulated hosts; empty: one host."""
    settings: tuple[str, ...] = ()
    """Of the plan, in the faulty run."""
    options: tuple[str, ...] = ()
    """Of the script, in all runs."""
    healthy_options: tuple[str, ...] = ()
    """Of the script, in the healthy run."""
    ranks: tuple[int, ...] = ()
    by_clock: bool = True
    """Whether the fault's own clock is the truth; else the healthy run is."""
    burner: bool = False
    """Whether another process burns the core of rank 1."""

    @property
    def name(self) -> str:
        """Return what identifies the case."""
        fault = "burner" if self.burner else self.kinds[0] if self.kinds and self.fault == "none" else self.fault
        return " ".join(text for text in (self.training, fault, self.rate, *self.settings[:1]) if text)


def slow_link(training: str, rate: str, *settings: str) -> Case:
    kinds = ("communication", "large-buckets", "small-buckets", "slow-link")
    return Case(training, "none", kinds, rate=rate, settings=settings, by_clock=False)


def burner(training: str) -> Case:
    return Case(training, "none", ("oversubscribed",), burner=True, by_clock=False, ranks=(1,))


def threads(training: str) -> Case:
    return Case(training, "threads", ("threads", "oversubscribed"), 8, by_clock=False)


def plain_optimizer(training: str, batch: str) -> Case:
    return Case(
        training, "none", ("optimizer",), by_clock=False, options=("--batch", batch),
        healthy_options=("--optimizer", "fused"),
    )  # fmt: skip


PLANTED: dict[tuple[str, str], dict[str, float]] = {
    ("slow_data", "input"): {
        "gpt2": 0.2, "resnet18": 0.3, "gat": 0.1, "vit": 0.15, "trainer-gpt2": 0.2, "lightning-vit": 0.15,
    },
    ("busy_data", "input"): {
        "bert": 0.1, "convnext_atto": 0.15, "mobilenetv3_small_050": 0.2, "lightning-gpt2": 0.1,
    },
    ("late_forward", "straggler"): {"gpt2": 0.06, "resnet18": 0.1, "gat": 0.04, "trainer-gpt2": 0.06},
    ("late_backward", "straggler"): {"llama": 0.06, "vit": 0.1, "convnext_atto": 0.08, "lightning-resnet18": 0.1},
    ("late_optimizer", "straggler"): {"bert": 0.06, "mobilenetv3_small_050": 0.05, "trainer-vit": 0.1},
    ("long_rows", "straggler"): {"llama": 0.06},
    ("turns", "jitter"): {"llama": 0.08, "resnet18": 0.12},
    ("gc", "gc"): {"gpt2": 0.06, "gat": 0.06, "vit": 0.12, "trainer-gpt2": 0.06},
    ("checkpoint", "pause"): {"bert": 0.06, "resnet18": 0.1, "trainer-vit": 0.1},
    ("evaluation", "pause"): {"gat": 0.05, "llama": 0.08, "lightning-vit": 0.05},
    ("silent_save", "pause"): {"resnet18": 2},
    ("irregular", "irregular"): {"gpt2": 0.06, "mobilenetv3_small_050": 0.08},
    ("own_code", "other"): {"vit": 0.06, "gat": 0.05, "trainer-llama": 0.06},
    ("own_code_after", "other"): {"llama": 0.06, "convnext_atto": 0.08, "lightning-gpt2": 0.06},
}  # fmt: skip
"""Sizes by training, under the fault and the kind that must be found. Stragglers are rank 1."""
CASES = (
    *(
        Case(training, fault, (kind,), size, ranks=(1,) if kind == "straggler" else ())
        for (fault, kind), sizes in PLANTED.items()
        for training, size in sizes.items()
    ),
    threads("bert"),
    threads("vit"),
    Case("gat", "slow_start", ("warm-up",), 0.2, steps=50),
    burner("resnet18"),
    burner("gpt2"),
    plain_optimizer("mobilenetv3_small_050", "4"),
    plain_optimizer("convnext_atto", "1"),
    slow_link("gpt2", "200mbit"),
    slow_link("llama", "200mbit"),
    slow_link("resnet18", "500mbit"),
    slow_link("vit", "100mbit"),
    slow_link("convnext_atto", "300mbit"),
    slow_link("trainer-llama", "200mbit"),
    slow_link("lightning-resnet18", "500mbit"),
    slow_link("resnet18", "1gbit", "bucket_bytes=1000000000", "first_bucket_bytes=1000000000"),
    Case("llama", "micro_batches", ("extra-exchange",), rate="200mbit", by_clock=False),
    *(Case(name, "none", ()) for name in ("gpt2", "resnet18", "gat", "vit", "trainer-gpt2", "lightning-vit")),
)
"""Those without kinds are healthy: nothing may be found that costs 10 % or more, unless its fix gains as much."""


@dataclass
class Outcome:
    """What one run came to."""

    step: float
    diagnosis: dict[str, Any]
    taken: list[dict[int, float]] = field(default_factory=list)


class Trials:
    """Runs a case in the ways that its score needs."""

    def __init__(self, directory: Path, keep: Path | None, repeat: int = 1) -> None:
        self.directory, self.keep, self.count = directory, keep, 0
        self.repeat = repeat
        """Runs of each kind, in turn; steps are their medians."""

    def run(
        self, case: Case, *, fault: str, rate: str, settings: tuple[str, ...], options: tuple[str, ...]
    ) -> Outcome:
        """Run the training once, and diagnose it."""
        self.count += 1
        where = self.directory / f"{self.count}-{case.training}-{fault}"
        where.mkdir()
        hosts = ["emulate", "--hosts", "2", "--rate", rate] if rate else ["run", "-np", "2", "--quiet"]
        command = [*FARANDOLE, *hosts, *(word for setting in settings for word in ("--set", setting))]
        command += ["--", sys.executable, str(SCRIPT), case.training, "--fault", fault, "--size", str(case.size)]
        command += ["--steps", str(case.steps), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"} if fault != "threads" else dict(os.environ)
        run, diagnosis = pages.diagnosed(command, where, environment)
        taken = [
            {int(step): seconds for step, seconds in json.loads(file.read_text()).items()}
            for file in sorted(run.glob("taken-rank*.json"))
        ]
        if self.keep:
            shutil.copytree(run, self.keep / where.name, ignore=shutil.ignore_patterns("*.pt"))
        return Outcome(float(diagnosis["step_seconds"]), diagnosis, taken)

    def healthy(self, case: Case) -> Outcome:
        """Return the run without a fault."""
        rate = "10gbit" if case.rate else ""
        options = (*case.options, *case.healthy_options)
        return self.run(case, fault="none", rate=rate, settings=(), options=options)

    def faulty(self, case: Case) -> Outcome:
        """Return the run with the fault."""
        with pages.burning(case.burner):
            return self.run(case, fault=case.fault, rate=case.rate, settings=case.settings, options=case.options)

    def fixed(self, case: Case, fix: dict[str, Any]) -> tuple[Outcome, str]:
        """Return the run with the fix, and what was done."""
        changes = dict(fix["changes"])
        options, settings, fault, done = list(case.options), case.settings, "none", "fault removed"
        flags = {"loader_workers": "--workers", "loader_batch": "--batch"}
        if changes and "threads" not in changes:
            fault = case.fault
            done = ", ".join(f"{key}={value}" for key, value in changes.items())
        if not changes and "times less often" in fix["what"]:
            fault, done = case.fault, "every 20th step"
            options += ["--every", "20"]
        for key, value in changes.items():
            if key == "gc_frozen":
                options.append("--freeze")
            elif key in flags:
                options += [flags[key], str(value)]
            elif key.startswith("optimizer_"):
                options += ["--optimizer", key.removeprefix("optimizer_")]
            elif key != "threads":
                settings = (*(each for each in settings if each.partition("=")[0] != key), f"{key}={value}")
        return self.run(case, fault=fault, rate=case.rate, settings=settings, options=tuple(options)), done


def clocked(case: Case, run: Outcome) -> float:
    """Return what the fault took a step, by its own clock.

    Of stragglers and of what all ranks do it is the longest of each step. Of turns it is the mean excess of the
    longest over the mean. What recurs every few steps is spread over all of them, a slow start over the whole run.
    """
    first = 0 if case.fault == "slow_start" else max(WARM_UP, case.steps // 10)
    rows = [[taken.get(step, 0.0) for taken in run.taken] for step in range(first, case.steps)]
    if case.kinds == ("pause",):
        rows[-1] = [0.0] * len(run.taken)  # what follows the last optimizer step is in no step
    if case.fault == "turns":
        return statistics.mean(max(row) - statistics.mean(row) for row in rows)
    return statistics.mean(max(row) for row in rows)


def judge(case: Case, trials: Trials) -> dict[str, Any]:
    """Run a case and score it."""
    begin = time.monotonic()
    compared = not case.by_clock or case.fault == "slow_start"
    healthy = trials.healthy(case) if case.kinds and compared else None
    faulty = trials.faulty(case)
    healthy_steps, faulty_steps = [healthy.step] if healthy else [], [faulty.step]
    for _ in range(1, trials.repeat if case.kinds else 1):
        if healthy:
            healthy_steps.append(trials.healthy(case).step)
            faulty_steps.append(trials.faulty(case).step)
    findings = faulty.diagnosis["findings"]
    first = findings[0] if findings else None
    row: dict[str, Any] = {
        "case": case.name, "size": case.size, "faulty": faulty.step, "healthy": healthy.step if healthy else None,
        "verdict": faulty.diagnosis["verdict"], "kind": first["kind"] if first else None,
    }  # fmt: skip
    if not case.kinds:
        row["right"] = first is None or first["share"] < pages.LITTLE
        if first and not row["right"] and first["fixes"] and first["fixes"][0]["changes"]:
            row |= gain_of(case, trials, first["fixes"][0], faulty_steps)
            row["right"] = row.get("kept", 0.0) >= pages.ENOUGH  # it was none too few
        return row
    row["right"] = pages.is_right(first, case.kinds, case.ranks)
    mine = next((f for f in findings if f["kind"] in case.kinds), None)
    if mine is None:
        return row
    truth = clocked(case, faulty)
    if not case.by_clock and healthy is not None:
        truth = statistics.median(faulty_steps) - statistics.median(healthy_steps)
    if case.fault == "slow_start" and healthy is not None:  # it adds to the start that there is without it
        truth += sum(each["seconds"] for each in healthy.diagnosis["findings"] if each["kind"] in case.kinds)
    row |= {"cost": mine["seconds"], "truth": truth, "price": mine["seconds"] / truth if truth else None}
    fix = mine["fixes"][0] if mine["fixes"] else None
    if fix is None:
        return row
    row |= gain_of(case, trials, fix, faulty_steps)
    row["wall"] = time.monotonic() - begin
    return row


def gain_of(case: Case, trials: Trials, fix: dict[str, Any], faulty_steps: list[float]) -> dict[str, Any]:
    """Run a case with the fix, in turn with the fault, and return what came of it."""
    fixed_steps, done = [], ""
    for number in range(trials.repeat):
        fixed, done = trials.fixed(case, fix)
        fixed_steps.append(fixed.step)
        if number + 1 < trials.repeat:
            faulty_steps.append(trials.faulty(case).step)
    row: dict[str, Any] = {"done": done, "fix": fix["what"], "fixed": statistics.median(fixed_steps)}
    if fix["gain"] and fix["gain"]["seconds"] > 0:
        row |= {"promised": fix["gain"]["seconds"], "gained": statistics.median(faulty_steps) - row["fixed"]}
        row["kept"] = row["gained"] / row["promised"]
    return row


ASKED = {
    "right": "verdict right in >= 95 %",
    "price": "price within 15 %",
    "kept": "first fix gives >= 0.8 of its promise in >= 90 %",
}


def main() -> int:
    arguments = pages.read_arguments(str(__doc__), repeat=1)
    cases = {case.name: case for case in CASES}
    with tempfile.TemporaryDirectory() as directory:
        trials = Trials(Path(directory), arguments.keep, arguments.repeat)
        rows, failed = pages.play(list(cases), lambda name: judge(cases[name], trials), arguments)
    parts = [pages.summarise(rows, ASKED), pages.table(rows, "fix", lambda row: row.get("done", ""))]
    pages.publish(rows, list(cases), parts, BEGIN, arguments.page)
    return failed


if __name__ == "__main__":
    sys.exit(main())

"""Make small faults in the code, one at a time, and count how many the tests notice.

For each area (codecs, reducer, transport) a seeded sample of all mutants of its files is drawn. A mutant is put
into a copy of the source tree, and those tests of the area run that execute the changed line, the fast ones first,
until one fails. Which tests these are is measured beforehand, by running all of the area's tests once with a line
tracer. A mutant that makes the tests fail, crash or hang is killed. Survivors are listed with line and change;
`tests/mutation/equivalent.py` holds those that no test could tell from the original, with the reason.

Beside the mutants the unchanged code is tried in the same way: a control that fails says how far kills can be
trusted on a busy machine.

examples:
  python benchmarks/mutants.py --page docs/results/mutants.md   # the published figures: up to 10 minutes
  python benchmarks/mutants.py --areas codecs --count 30 --seed 7
  python benchmarks/mutants.py --areas transport --file connection --count 1000   # every mutant of some files
  python benchmarks/mutants.py --areas reducer --map reducer.map   # keeps the measured lines for the next run
  python benchmarks/mutants.py --json > mutants.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.mutation.areas import AREAS
from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.line_map import LineMap, LineWatch
from tests.mutation.operators import Mutant, find_mutants
from tests.mutation.trial import Tree, Trial, start, warm_up

REPOSITORY = Path(__file__).resolve().parents[1]

BEGIN, END = "<!-- figures of benchmarks/mutants.py -->", "<!-- end of figures -->"


@dataclass
class Outcome:
    """What became of a mutant."""

    area: str
    mutant: Mutant
    result: str
    """killed, time-out, survived, equivalent or control."""
    tests: int = 0
    seconds: float = 0.0
    noticed_by: str = ""


def main() -> int:
    options = read_options()
    begin, commit = time.monotonic(), commit_of(REPOSITORY)
    warm_up()
    with tempfile.TemporaryDirectory(prefix="farandole-mutants-") as folder:
        trees = [Tree(REPOSITORY, Path(folder) / str(i)) for i in range(options.jobs)]
        lines = measure(options, trees, Path(folder))
        outcomes: list[Outcome] = []
        for name in options.areas:
            outcomes += try_area(name, options, trees, lines)
    failed_controls = [each for each in outcomes if each.result == "control" and each.noticed_by]
    outcomes = [each for each in outcomes if each.result != "control"]
    seconds = time.monotonic() - begin
    figures = page(options, outcomes, len(failed_controls), f"commit {commit}, {seconds / 60:.0f} minutes")
    if options.json:
        print(json.dumps(described(options, outcomes, len(failed_controls), seconds), indent=1))
    else:
        print(figures)
    if options.page is not None:
        write_page(options.page, figures)
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--areas", default=",".join(AREAS), help="which (default: %(default)s)")
    parser.add_argument("--count", type=int, default=100, help="mutants of each area (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (default: %(default)s)")
    parser.add_argument("--file", default="", help="only files whose path contains this")
    parser.add_argument("--jobs", type=int, default=2, help="trials at once (default: %(default)s)")
    parser.add_argument(
        "--budget", type=float, default=8.0, help="seconds of tests a mutant (default: %(default)s)"
    )
    parser.add_argument("--controls", type=int, default=3, help="unchanged trials an area (default: %(default)s)")
    parser.add_argument("--map", type=Path, help="file that keeps which test runs which line")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--page", type=Path, help="page whose figures are replaced")
    options = parser.parse_args()
    options.areas = options.areas.split(",")
    for name in options.areas:
        if name not in AREAS:
            parser.error(f"--areas {name}: expected some of {', '.join(AREAS)}")
    return options


def measure(options: argparse.Namespace, trees: Sequence[Tree], folder: Path) -> LineMap:
    """Run the tests of all areas once and note which lines each of them runs."""
    found = LineMap()
    if options.map is not None and options.map.exists():
        found.add(options.map)
        return found
    paths = sorted({path for name in options.areas for path in AREAS[name].files(trees[0].source)})
    tests = sorted({f"tests/{test}" for name in options.areas for test in AREAS[name].tests})
    written, waiting, running = [], list(reversed(tests)), dict[int, Trial]()
    while waiting or running:
        for number, tree in enumerate(trees):
            if number in running and running[number].is_over():
                trial = running.pop(number)
                if trial.exit_code not in (0, 1):
                    note(f"tests that could not be measured:\n{trial.log.read_text()[-2000:]}")
            if waiting and number not in running:
                output = folder / f"lines{len(waiting)}.json"
                written.append(output)
                watch = LineWatch(tree.source, paths, output)
                running[number] = start(tree, [waiting.pop()], 600.0, job_seconds=60.0, plugin=watch)
        time.sleep(0.05)
    for output in written:
        if output.exists():
            found.add(output)
            if options.map is not None:
                with options.map.open("a") as out:
                    out.write(output.read_text())
    note(f"{len(found.seconds)} tests measured, {sum(found.seconds.values()):.0f} s; failed: {found.failed}")
    return found


def try_area(name: str, options: argparse.Namespace, trees: Sequence[Tree], lines: LineMap) -> list[Outcome]:
    """Try the area's sample of mutants."""
    copied = trees[0].source  # the working tree may change meanwhile
    sources = {path: (copied / path).read_bytes() for path in AREAS[name].files(copied)}
    every = [m for path, text in sources.items() if options.file in path for m in find_mutants(path, text)]
    drawn = random.Random(f"{options.seed} {name}").sample(every, min(options.count, len(every)))
    note(f"{name}: {len(drawn)} of {len(every)} mutants of {len(sources)} files, seed {options.seed}")
    waiting = [Outcome(name, mutant, "") for mutant in reversed(drawn)]
    waiting += [Outcome(name, mutant, "control") for mutant in drawn[: options.controls]]
    running: dict[int, tuple[Outcome, Trial]] = {}
    done: list[Outcome] = []
    while waiting or running:
        for number, tree in enumerate(trees):
            if number in running and running[number][1].is_over():
                outcome, trial = running.pop(number)
                settle(outcome, trial)
                tree.write(outcome.mutant.path, sources[outcome.mutant.path], compiled=True)
                done.append(outcome)
                report(outcome)
            while waiting and number not in running:
                outcome = waiting.pop()
                trial_of = begin_trial(outcome, options, tree, lines, sources)
                if trial_of is None:
                    done.append(outcome)
                    report(outcome)
                else:
                    running[number] = (outcome, trial_of)
        time.sleep(0.01)
    return done


def begin_trial(
    outcome: Outcome, options: argparse.Namespace, tree: Tree, lines: LineMap, sources: dict[str, bytes]
) -> Trial | None:
    """Start the tests of a mutant; None when that is not needed."""
    mutant = outcome.mutant
    if (mutant.before, mutant.after) in EQUIVALENT:
        outcome.result = "equivalent"
        return None
    tests = lines.tests_of(
        mutant.path, range(mutant.first_line, mutant.last_line + 1), at_import=mutant.at_import,
        budget_seconds=options.budget, own={f"tests/{test}" for test in AREAS[outcome.area].tests},
    )  # fmt: skip
    outcome.tests = len(tests)
    if not tests:
        outcome.result = outcome.result or "survived"
        return None
    if outcome.result != "control":
        tree.write(mutant.path, mutant.apply(sources[mutant.path]), compiled=False)
    seconds = [lines.seconds[test] for test in tests]
    return start(tree, tests, 10.0 + 3 * sum(seconds), job_seconds=6.0 + 3 * max(seconds))


def settle(outcome: Outcome, trial: Trial) -> None:
    """Note how a trial ended."""
    outcome.seconds, outcome.noticed_by = trial.seconds, trial.first_failure()
    if outcome.result == "control":
        outcome.noticed_by = outcome.noticed_by or ("?" if trial.killed else "")
    elif not trial.killed:
        outcome.result = "survived"
    else:
        outcome.result = "time-out" if trial.timed_out else "killed"


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(outcome: Outcome) -> None:
    if outcome.result == "survived":
        note(f"survived {described_mutant(outcome)}")
    elif outcome.result == "control" and outcome.noticed_by:
        note(f"control failed: {outcome.noticed_by}")


def described_mutant(outcome: Outcome) -> str:
    mutant = outcome.mutant
    where = f"{mutant.path.removeprefix('farandole/')}:{mutant.first_line}"
    return f"{where} ({mutant.kind}, {outcome.tests} tests)\n    - {mutant.before}\n    + {mutant.after}"


def share(outcomes: Sequence[Outcome]) -> tuple[Counter[str], float]:
    """Return how many had which result, and the share killed of those that a test could tell."""
    counts = Counter(each.result for each in outcomes)
    judged = len(outcomes) - counts["equivalent"]
    return counts, (counts["killed"] + counts["time-out"]) / max(1, judged)


def described(
    options: argparse.Namespace, outcomes: Sequence[Outcome], failed_controls: int, seconds: float
) -> dict[str, object]:
    areas = {name: share([each for each in outcomes if each.area == name]) for name in options.areas}
    return {
        "seed": options.seed, "count": options.count, "seconds": round(seconds, 1),
        "failed_controls": failed_controls,
        "areas": {name: {**counts, "share": round(killed, 4)} for name, (counts, killed) in areas.items()},
        "mutants": [
            {**asdict(each), "mutant": {**asdict(each.mutant)}} for each in outcomes
        ],
    }  # fmt: skip


def commit_of(repository: Path) -> str:
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=repository, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return said.stdout.strip()


def page(options: argparse.Namespace, outcomes: Sequence[Outcome], failed_controls: int, run: str) -> str:
    """Return the figures in Markdown."""
    import torch

    lines = [
        f"{date.today()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, seed {options.seed}, {run}.",
        "",
        "| area, file | mutants | killed | timed out | equivalent | survived | share killed |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name in options.areas:
        mine = [each for each in outcomes if each.area == name]
        lines.append(row(f"**{name}**", mine))
        for path in sorted({each.mutant.path for each in mine}):
            short = path.removeprefix("farandole/")
            lines.append(row(f"`{short}`", [each for each in mine if each.mutant.path == path]))
    trials = options.controls * len(options.areas)
    lines += [
        "",
        f"Controls: the unchanged code failed in {failed_controls} of {trials} trials.",
        "",
        "Survivors:",
        "",
    ]
    for each in outcomes:
        if each.result == "survived":
            lines += ["```diff", f"  {described_mutant(each)}", "```"]
    return "\n".join(lines).replace("\n    ", "\n")


def row(title: str, outcomes: Sequence[Outcome]) -> str:
    counts, killed = share(outcomes)
    numbers = [counts[key] for key in ("killed", "time-out", "equivalent", "survived")]
    return f"| {title} | {len(outcomes)} | {' | '.join(map(str, numbers))} | {killed:.0%} |"


def write_page(path: Path, figures: str) -> None:
    """Replace the figures of a page."""
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"mutants: {path} has no lines {BEGIN!r} and {END!r}: expected both, around the figures")
    path.write_text(f"{before}{BEGIN}\n{figures}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())

"""Make small faults in the code, one at a time, by cosmic-ray, and count how many the tests notice.

For each area (codecs, reducer, transport) a seeded sample of cosmic-ray's mutations of its files is drawn. Each is
made in a clone of the commit, where the area's tests run until one fails: then the mutant is killed. Survivors are
printed as diffs, for a reader to judge: some are no faults (a hint of a size, a number in `repr`).

cosmic-ray is not among the packages of the tests: pip install cosmic-ray

examples:
  python benchmarks/mutants.py                              # 20 of each area
  python benchmarks/mutants.py --areas codecs --count 60 --seed 7
"""

from __future__ import annotations

import importlib.metadata
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from shared import ROOT, make_parser

MOST_SECONDS = 600.0
"""Of one mutant's tests: a mutant that hangs is killed too."""
SHARDS = "test_zero test_frozen_shards test_sharded_residuals test_noise_scale test_late_rows"
AREAS = {
    "codecs": (
        "comm/codecs comm/messages.py",
        "unit/comm/test_codecs unit/comm/test_messages unit/comm/test_packing unit/comm/test_eligibility "
        "unit/comm/test_reduce_rules unit/comm/test_native_loops ranks/test_codec_overflow",
    ),
    "reducer": (
        "comm/engine",
        "unit/comm/test_buckets unit/comm/test_gradients unit/comm/test_loss_scale unit/comm/test_segments "
        "unit/comm/test_units unit/comm/test_saved_state unit/comm/test_bucket_set unit/comm/test_reducer "
        "unit/comm/test_codec_session unit/comm/test_count_calls ranks/test_reducer ranks/test_reducer_exchanges "
        "ranks/test_engine ranks/test_coded_engine ranks/test_grad_ownership ranks/test_optimizer_steps "
        "ranks/test_exchange_state ranks/test_codec_overflow ranks/test_codec_session ranks/test_two_engines "
        "ranks/test_switch_codecs ranks/test_share_of_batch ranks/test_loss_scale ranks/test_auto "
        + " ".join(f"ranks/{name}" for name in SHARDS.split()),
    ),
    "transport": (
        "comm/transport",
        "unit/comm/test_comm_thread unit/comm/test_connection unit/comm/test_callers "
        "unit/comm/test_transport_pair unit/comm/test_connect ranks/test_transport ranks/test_crosswise "
        "ranks/test_named_auto",
    ),
}
"""Folders of the source, and the files of tests that must hold them, the fast ones first."""


def main() -> int:
    parser = make_parser(
        __doc__,
        areas=(list(AREAS), "which (default: all)", list(AREAS)),
        count=(20, "mutants of each area (default: %(default)s)"),
        seed=(1, "of the sample (default: %(default)s)"),
    )
    options = parser.parse_args()
    try:
        version = importlib.metadata.version("cosmic-ray")
    except importlib.metadata.PackageNotFoundError:
        parser.error("cosmic-ray is not installed: pip install cosmic-ray")
    print(f"cosmic-ray {version}, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="farandole-mutants-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
        os.environ["PYTHONPATH"] = str(tree / "src")
        os.chdir(tree)
        for name in options.areas:
            try_area(name, options.count, options.seed)
    return 0


def _files_of(place: Path) -> list[Path]:
    """Return the files of a folder of the source, or the one file; end where there is none."""
    found = [place] if place.is_file() else list(place.rglob("*.py"))
    if not found:
        raise SystemExit(f"mutants.py: {place} has no file: it has moved; see AREAS")
    return found


def try_area(name: str, count: int, seed: int) -> None:
    """Try a sample of the area's mutants; print the survivors and how many were killed."""
    from cosmic_ray.commands import init
    from cosmic_ray.mutating import mutate_and_test
    from cosmic_ray.testing import run_tests
    from cosmic_ray.work_db import WorkDB, use_db

    sources, tests = AREAS[name]
    files = sorted(path for each in sources.split() for path in _files_of(Path("src/farandole", each)))
    with use_db(f"{name}.sqlite", WorkDB.Mode.create) as session:
        init(files, session, {})
        # In an annotation, which nothing runs, `|` is no operator.
        every = [item for item in session.work_items if "Operator_BitOr_" not in item.mutations[0].operator_name]
    every.sort(key=lambda item: [(str(m.module_path), m.operator_name, m.occurrence) for m in item.mutations])
    drawn = random.Random(f"{seed} {name}").sample(every, min(count, len(every)))
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command = shlex.join([*words, *(f"tests/{test}.py" for test in tests.split())])
    outcome, said = run_tests(command, MOST_SECONDS)
    if outcome != "survived":
        raise SystemExit(f"{name}: the tests of the unchanged code fail:\n{said[-2000:]}")
    found = Counter[str]()
    for item in drawn:
        result = mutate_and_test(item.mutations, command, MOST_SECONDS)
        found[str(getattr(result.test_outcome, "value", "no-test"))] += 1
        if result.test_outcome == "survived":
            print(result.diff, flush=True)
    print(f"{name}: {dict(found)} of {len(every)} mutants of {len(files)} files", flush=True)


if __name__ == "__main__":
    sys.exit(main())

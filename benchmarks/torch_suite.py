"""torch's own tests of `torch.distributed` on the backend "farandole", as far as the installed torch has them.

::

    python benchmarks/torch_suite.py                      # on farandole, as the cases of gloo
    python benchmarks/torch_suite.py --backend gloo       # on gloo, to compare with
    python benchmarks/torch_suite.py test_all_reduce_sum  # those whose names begin so

The cases are `torch.testing._internal.distributed.distributed_test`, which is part of the wheel; they need the
package `expecttest`. Each case forks its ranks. Prints a line for each case that failed, with the last line of its
error, and how many passed, failed and were skipped for which reason. Exit code 1 when one failed.

torch's cases ask for a backend by name and skip what they do not know. So "farandole" is used instead of gloo
here (`farandole.backend.replace_gloo`), and the cases are those of gloo.
"""

from __future__ import annotations

import collections
import logging
import os
import sys
import tempfile
import time
import unittest
from typing import Any

from shared import make_parser

RANKS = 3


def make_suite(names: list[str], *, exact: bool) -> unittest.TestSuite:
    """Return the cases of these names, or whose names begin so; all of them when there are none."""
    import torch.multiprocessing
    from torch.testing._internal.distributed import distributed_test

    logging.disable(logging.ERROR)
    # Names of events in torch's profiler: this backend makes none.
    distributed_test.PROFILING_SUPPORTED_BACKENDS.clear()
    distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()
    base: Any = distributed_test.TestDistBackend

    class Suite(base, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    found = unittest.TestSuite()
    for case in unittest.defaultTestLoader.getTestCaseNames(Suite):
        if not names or (case in names if exact else case.startswith(tuple(names))):
            found.addTest(Suite(case))
    return found


class Result(unittest.TestResult):
    """Prints what failed as it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: D102, N802
        self.counts["passed"] += 1

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: D102, N802
        self.counts[f"skipped: {reason}"] += 1

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: D102, N802
        self._report(test, err)

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: D102, N802
        self._report(test, err)

    def _report(self, test: unittest.TestCase, err: Any) -> None:
        self.counts["failed"] += 1
        lines = [line for line in str(err[1]).splitlines() if line.strip()]
        told = [line for line in lines if "Error" in line or "Stalled" in line] or lines
        print(f"FAILED {test.id().rpartition('.')[2]}: {told[-1][:300] if told else err[0].__name__}", flush=True)


def main() -> int:
    parser = make_parser(
        __doc__,
        backend=("farandole", "of all cases", ("farandole", "gloo")),
        exact=(False, "the names are whole"),
    )
    parser.add_argument("names", nargs="*", help="beginnings of names of cases (default: all)")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        os.environ.update(BACKEND="gloo", WORLD_SIZE=str(RANKS), TEMP_DIR=place, OMP_NUM_THREADS="1")
        if options.backend == "farandole":
            import farandole.backend

            farandole.backend.replace_gloo()
        result = Result()
        make_suite(options.names, exact=options.exact).run(result)
    for name, count in sorted(result.counts.items()):
        print(f"{count:5} {name}")
    print(f"{time.monotonic() - begin:.0f} s, {RANKS} ranks, {options.backend}")
    return 1 if result.counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

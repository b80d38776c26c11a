"""Random host files and command lines for `farandole run`, up to where something would be started.

python benchmarks/fuzz_command_line.py --count 100000 [--seed 1]      (from the root of a checkout)

Half are host files, half are lines. It ends at the first input that makes a traceback of ours, a hang (5 s of
the processor) or an account that does not say what is wrong; otherwise it prints how often each end came, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

from shared import ROOT, read_options

sys.path.insert(0, str(ROOT))

from tests.line_fuzz import try_host_files, try_lines

PART = 2500


def main() -> None:
    options = read_options(__doc__, count=100_000, seed=1)
    begin = time.perf_counter()
    ends: Counter[str] = Counter()
    left = options.count
    for part in range(options.count):
        each = min(PART, left)
        if each <= 0:
            break
        ends += try_host_files(each - each // 2, seed=options.seed * 1_000_003 + 2 * part)
        ends += try_lines(each // 2, seed=options.seed * 1_000_003 + 2 * part + 1)
        left -= each
        print(f"{options.count - left} of {options.count}", file=sys.stderr, flush=True)
    seconds = round(time.perf_counter() - begin, 1)
    print(json.dumps({"count": options.count, "seed": options.seed, "seconds": seconds, "ends": dict(ends)}))


if __name__ == "__main__":
    main()

"""Kills `fd.save` at every one of its system calls, and damages a checkpoint at random: what is left, in figures.

    python benchmarks/checkpoint_crashes.py kills --ranks 1
    python benchmarks/checkpoint_crashes.py kills --ranks 2
    python benchmarks/checkpoint_crashes.py damage --count 10000

``kills`` needs strace. Both print one line of JSON; ``faults`` must be empty.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    """Run one of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kills", "damage"))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="kill at every N-th call only")
    parser.add_argument("--count", type=int, default=10_000, help="damages")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if options.what == "kills":
            from tests.programs import checkpoint_crashes

            checkpoint_crashes.main([directory, "--ranks", str(options.ranks), "--every", str(options.every)])
        else:
            from tests.unit.checkpoint.damages import damage

            print(json.dumps(damage(Path(directory), options.count, seed=1)))


if __name__ == "__main__":
    main()

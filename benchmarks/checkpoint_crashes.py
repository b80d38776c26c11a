"""Kills `fd.save` at every one of its system calls, and damages a checkpoint at random: what is left, in figures.

    python benchmarks/checkpoint_crashes.py kills --ranks 1
    python benchmarks/checkpoint_crashes.py kills --ranks 2
    python benchmarks/checkpoint_crashes.py damage --count 10000

``kills`` needs strace. Both print one line of JSON; ``faults`` must be empty.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from shared import ROOT, make_parser

sys.path.insert(0, str(ROOT))


def main() -> None:
    """Run one of both."""
    parser = make_parser(__doc__, ranks=1, every=(1, "kill at every N-th call only"), count=(10_000, "damages"))
    parser.add_argument("what", choices=("kills", "damage"))
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

"""``python -m tests.golden``: compare golden trainings with their records; with ``--regenerate`` record anew."""

from __future__ import annotations

import argparse
import sys

from tests.golden.records import allowed, differences, read, write
from tests.golden.trainings import TRAININGS, run
from tests.ranks.pool import close_pool


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--regenerate", action="store_true", help="replace the records by what the code gives now")
    arguments = parser.parse_args()
    found = False
    for name in TRAININGS:
        measured = run(name)
        if arguments.regenerate:
            write(name, measured)
            print(f"{name}: loss {measured.losses[0]:.4f} to {measured.losses[-1]:.4f}, recorded")
            continue
        machine, recorded = read(name)
        lines = differences(recorded, measured, tolerance=allowed(name, machine))
        print("\n".join([f"{name}: {len(lines)} differences", *lines]))
        found |= bool(lines)
    close_pool()
    return int(found)


if __name__ == "__main__":
    sys.exit(main())

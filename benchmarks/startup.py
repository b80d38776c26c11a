"""What starting costs: importing the package, and `farandole run` beside the script's own start.

python benchmarks/startup.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial

from shared import FARANDOLE, medians_ms, take_turns, timed


def main() -> None:
    python = sys.executable
    script = [python, "-c", "pass"]
    commands = {
        "python": script,
        "import farandole": [python, "-c", "import farandole"],
        "farandole run -np 2": [*FARANDOLE, "run", "-np", "2", "--quiet", "--", *script],
        "two at once": ["sh", "-c", f"{python} -c pass & {python} -c pass & wait"],
    }
    with tempfile.TemporaryDirectory() as directory:
        start = partial(subprocess.run, check=True, cwd=directory, capture_output=True)
        calls = {name: timed(partial(start, command)) for name, command in commands.items()}
        medians = medians_ms(take_turns(calls, 21, warm_up=0))
    result = {
        "median_ms": medians,
        "import_ms": round(medians["import farandole"] - medians["python"], 1),
        "run_adds_ms": round(medians["farandole run -np 2"] - medians["two at once"], 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

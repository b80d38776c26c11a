"""What starting costs: importing the package, and `farandole run` beside the script's own start.

python benchmarks/startup.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence


def seconds(command: Sequence[str], directory: str) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, cwd=directory, capture_output=True)
    return time.perf_counter() - begin


def main() -> None:
    python = sys.executable
    script = [python, "-c", "pass"]
    commands = {
        "python": script,
        "import farandole": [python, "-c", "import farandole"],
        "farandole run -np 2": [python, "-m", "farandole", "run", "-np", "2", "--quiet", "--", *script],
        "two at once": ["sh", "-c", f"{python} -c pass & {python} -c pass & wait"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(21):
            for name, command in commands.items():
                times[name].append(seconds(command, directory))
    medians = {name: round(1e3 * statistics.median(values), 1) for name, values in times.items()}
    result = {
        "median_ms": medians,
        "import_ms": round(medians["import farandole"] - medians["python"], 1),
        "run_adds_ms": round(medians["farandole run -np 2"] - medians["two at once"], 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

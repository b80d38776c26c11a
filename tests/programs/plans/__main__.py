"""Plays random programs of plans, each on forked ranks and in one process.

::

    python -m tests.programs.plans --seeds 0:40 --jobs 2
    python -m tests.programs.plans --seed 17
    python -m tests.programs.plans --seed 17 --set layers=1 first.zero=3 then=null
    python -m tests.programs.plans --seed 0 --plain --set mix=mha first.tensor=2

Prints each program that is neither right nor refused as it should be, with how to play it alone; the last line has
the figures as JSON. ``--set`` changes a program: one field after the other, until it is small.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import farandole as fd
from tests.programs.forked_ranks import import_all

from .draw import draw, settled
from .judge import GOOD, verdict
from .program import PlanProgram, changed

_NAMES = (
    "step", "evaluate", "context_shard", "MixtureOfExperts", "weight", "accumulate", "save", "load", "drain",
    "shard", "RowTable", "low_rank_adapters", "exchange_state",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Play programs; print those that fail, and a line of figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:40", help="first:end, or a,b,c (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="one seed; its program is printed")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="change the program")
    parser.add_argument("--plain", action="store_true", help="begin with the simplest program")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time (default: %(default)s)")
    parser.add_argument("--verbose", action="store_true", help="print all verdicts")
    options = parser.parse_args(arguments)
    seeds = _seeds(options.seeds) if options.seed is None else [options.seed]
    changes = dict(_read_change(each) for each in options.set)
    _import_all()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        children = [
            _worker(seeds[job :: options.jobs], changes, Path(folder) / f"{job}", options)
            for job in range(options.jobs)
        ]
        for child in children:
            os.waitpid(child, 0)
        lines = [line for file in sorted(Path(folder).iterdir()) for line in file.read_text().splitlines()]
    results = [json.loads(line) for line in lines]
    counts = Counter(each["verdict"] for each in results)
    faults = [each for each in results if each["verdict"] not in GOOD]
    seconds = round(time.monotonic() - begin, 1)
    figures = {"programs": len(seeds), **counts, "seconds": seconds, "faults": [each["seed"] for each in faults]}
    print(json.dumps(figures))
    return int(bool(faults) or len(results) < len(seeds))


def _seeds(text: str) -> list[int]:
    if ":" in text:
        first, end = (int(word) for word in text.split(":"))
        return list(range(first, end))
    return [int(word) for word in text.split(",")]


def _read_change(text: str) -> tuple[str, Any]:
    name, _, word = text.partition("=")
    try:
        return name, json.loads(word)
    except ValueError:
        return name, word


def _import_all() -> None:
    """Import what ranks do, once for all of them."""
    import_all()
    for name in _NAMES:
        getattr(fd, name)
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # ranks look for garbage among their own objects alone


def _worker(seeds: Sequence[int], changes: Mapping[str, Any], file: Path, options: argparse.Namespace) -> int:
    """Fork a process that plays `seeds` one after the other; return its id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        with file.open("w") as out:
            for seed in seeds:
                drawn = PlanProgram(seed) if options.plain else draw(seed)
                program = settled(changed(drawn, changes))
                kind, text = verdict(program)
                out.write(json.dumps({"seed": seed, "verdict": kind}) + "\n")
                out.flush()
                if options.seed is not None or options.verbose or kind not in GOOD:
                    print(_told(program, kind, text, options), flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _told(program: PlanProgram, kind: str, text: str, options: argparse.Namespace) -> str:
    words = ["python -m tests.programs.plans", f"--seed {program.seed}", *(["--plain"] if options.plain else [])]
    words += ["--set", *map(shlex.quote, options.set)] if options.set else []
    return f"{kind}: {' '.join(words)}\n    {program.changes()}\n    {text}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

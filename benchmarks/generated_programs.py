"""Play random training programs on ranks and in one process, and compare them; see `tests/programs`.

::

    python benchmarks/generated_programs.py --seeds 0:2000
    python benchmarks/generated_programs.py --seeds 17:18 --shrink

Prints a line for each program that went wrong, and at the end how many did what. ``--shrink`` sets one field after
the other to that of the simplest program as long as the program still goes wrong. Exit code 1 when one did.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from shared import ROOT, read_options

sys.path.insert(0, str(ROOT))

from tests.programs.judge import verdict
from tests.programs.program import Program, draw, sensible
from tests.ranks.pool import close_pool


def main() -> int:
    options = read_options(
        __doc__, seeds=("0:2000", "first:end, or a,b,c"), shrink=(False, "simplify what goes wrong")
    )
    seeds = read_seeds(options.seeds)
    begin, counts = time.monotonic(), Counter[str]()
    wrong: list[int] = []
    for done, seed in enumerate(seeds, start=1):
        program = draw(seed)
        text = problem_of(program)
        counts["wrong" if text else f"right, {program.ranks} ranks"] += 1
        if text:
            wrong.append(seed)
            report(program, text)
            if options.shrink:
                simplest = shrink(program)
                report(simplest, problem_of(simplest) or "(not always)")
        if done % 100 == 0:
            print(f"{done} programs, {len(wrong)} wrong, {time.monotonic() - begin:.0f} s", flush=True)
    close_pool()
    print(f"seeds {options.seeds}: {dict(counts)}; wrong seeds: {wrong or 'none'}")
    return 1 if wrong else 0


def read_seeds(text: str) -> Sequence[int]:
    """Return the seeds that ``first:end`` or ``a,b,c`` names."""
    if ":" in text:
        first, end = (int(word) for word in text.split(":"))
        return range(first, end)
    return [int(word) for word in text.split(",")]


def problem_of(program: Program) -> str:
    """Play `program` and return what went wrong; empty when nothing did."""
    # Not above: the pool's processes import this file, before they know that they are ranks.
    from tests.ranks.test_generated import play_on_ranks

    with tempfile.TemporaryDirectory() as folder:
        try:
            play_on_ranks(program, Path(folder))
        except AssertionError as problem:
            return str(problem)
        return verdict(program, Path(folder))


def shrink(program: Program) -> Program:
    """Return a simpler program that still goes wrong."""
    simplest = Program(program.seed)
    for field in dataclasses.fields(Program):
        if field.name != "seed" and getattr(program, field.name) != getattr(simplest, field.name):
            program = _simpler(program, **{field.name: getattr(simplest, field.name)})
    for block in program.blocks:
        if len(program.blocks) > 1:
            left = list(program.blocks)
            left.remove(block)
            program = _simpler(program, blocks=tuple(left))
    return program


def _simpler(program: Program, **change: object) -> Program:
    tried = sensible(dataclasses.replace(program, **change))  # type: ignore[arg-type]
    return tried if tried != program and problem_of(tried) else program


def report(program: Program, text: str) -> None:
    """Print a program and what went wrong, in two lines."""
    lines = text.strip().splitlines()
    said = lines[0][:400] if len(lines) == 1 else f"{lines[0][:200]} ... {lines[-1][:300]}"
    print(f"seed {program.seed}: {program.changes()}\n    {said}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

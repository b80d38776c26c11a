"""Random damage to a checkpoint, one bit or one cut at a time: is it found, and is the one before it offered?"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from farandole.checkpoint.listing import last_good_step, verify_checkpoint
from farandole.core.vocabulary.errors import CheckpointError
from tests.unit.checkpoint.made import files_of, save_by_hand


def damage(directory: Path, count: int, *, seed: int) -> dict[str, Any]:
    """Make checkpoints of steps 1 and 2, damage the second `count` times, and return what was not found."""
    for step in (1, 2):
        save_by_hand(directory, step)
    draw = random.Random(seed)
    files = files_of(directory, 2)
    faults: list[str] = []
    flips = 0
    for number in range(count):
        path = draw.choice(files)
        before = path.read_bytes()
        if number % 4:
            at, bit = draw.randrange(len(before)), draw.randrange(8)
            after = bytearray(before)
            after[at] ^= 1 << bit
            what = f"bit {bit} of byte {at} of {path.name}"
            flips += 1
        else:
            after = bytearray(before[: draw.randrange(len(before))])
            what = f"{path.name} cut to {len(after)} bytes"
        path.write_bytes(after)
        try:
            verify_checkpoint(directory, 2)
            faults.append(f"not found: {what}")
        except CheckpointError as problem:
            if path.name not in str(problem) or problem.exit_code != 2:
                faults.append(f"{what}: {problem}")
        if last_good_step(directory, 3) != 1:
            faults.append(f"{what}: step 1 was not offered")
        path.write_bytes(before)
    verify_checkpoint(directory, 2)
    return {"damages": count, "flips": flips, "cuts": count - flips, "faults": faults}

"""Stops a run after each of its steps and resumes it: losses, parameters and moments must be the same bits.

    farandole run -np 4 -- python -m benchmarks.resume_bitwise --directory DIR [--steps 41] [--codec int8 ...]

Prints a line for each codec, with the stop points that were bitwise. The training is that of the tests: dropout,
shuffled data, a schedule, AdamW. It has no time limit, unlike the few stop points of the tests.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from tests.ranks.test_checkpoint import Run
from tests.ranks.test_coded_engine import CODECS

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json


def main() -> None:
    """Run, resume and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=41)
    parser.add_argument("--codec", nargs="+", default=["none", *CODECS])
    options = parser.parse_args()
    here = fd.init(progress=False)
    torch.set_num_threads(1)
    for codec in options.codec:
        fd.seed(11, per_rank=True)
        directory = options.directory / "resume"
        run = Run(codec)
        checkpointer = fd.Checkpointer(directory, run.model, run.optimizer, every_steps=1, **run.others)
        run.train(1, options.steps, checkpointer)
        checkpointer.close()
        wrong = []
        for stop in range(1, options.steps):
            fd.seed(99 + stop)
            again = Run(codec, seed=2)
            fd.load(directory, again.model, again.optimizer, step=stop, **again.others)
            again.train(stop + 1, options.steps)
            if again.losses != run.losses[stop:] or again.bits != run.bits:
                wrong.append(stop)
        everywhere = sorted({stop for each in all_gather_json(here, "bench/wrong", wrong) for stop in each})
        count = options.steps - 1
        good = count - len(everywhere)
        fd.print(f"{here.size} ranks, {codec}: {good} of {count} stop points bitwise {everywhere or ''}")
        fd.barrier()
        if here.is_main:
            shutil.rmtree(directory)
        fd.barrier()


main()

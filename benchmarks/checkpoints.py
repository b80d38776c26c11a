"""Figures of checkpoints: the stall of an asynchronous save, and the rates of saving and loading.

    farandole run -np 2 -- python benchmarks/checkpoints.py --directory DIR [--megabytes 1000] [--rounds 5]

Prints one JSON line. The stall is the call, and what the next optimizer step waits for the copy; between the two
come matrix products of about 0.4 s a rank, whose time is compared with that without a save. The disk's own rates
are those of `dd` with as many bytes in the same directory, in turns with the saves: writing with ``conv=fsync``,
reading after the pages were dropped from the cache.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import farandole as fd
from farandole.comm.world.store_sync import all_gather_json
from shared import make_parser, timed


def slowest_seconds(act: Callable[[], object]) -> float:
    """Return the seconds that `act` takes on the slowest rank."""
    seconds = timed(act, before=fd.barrier)()
    return float(max(all_gather_json(fd.world(), "bench/seconds", seconds)))


def on_main(act: Callable[[], object]) -> Callable[[], None]:
    """Return a function that acts on rank 0, while the others wait."""

    def acting() -> None:
        if fd.world().is_main:
            act()
        fd.barrier()

    return acting


def dd(*words: str) -> None:
    """Copy by `dd`."""
    subprocess.run(["dd", "bs=4M", *words], check=True, capture_output=True)


def drop_pages(directory: Path) -> None:
    """Have the kernel forget the content of all files below `directory`."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def compute() -> None:
    """Stand for a forward and a backward pass."""
    a = torch.ones(512, 512)
    for _ in range(120):
        torch.mm(a, a)


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__, megabytes=1000, rounds=5)
    parser.add_argument("--directory", type=Path, required=True)
    options = parser.parse_args()
    here = fd.init(progress=False)
    torch.set_num_threads(1)
    place = options.directory / "benchmark"
    layers = max(1, options.megabytes // 20)
    model = nn.ParameterList(torch.randn(2500, 2000) for _ in range(layers))
    megabytes = layers * 20
    figures: dict[str, list[float]] = {}

    def note(name: str, act: Callable[[], object]) -> None:
        figures.setdefault(name, []).append(slowest_seconds(act))

    write = ("if=/dev/zero", f"of={place}/dd", f"count={megabytes // 4}", "conv=fsync")
    read = (f"if={place}/dd", "of=/dev/null")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # without gradients its step changes nothing
    checkpointer = fd.Checkpointer(place / "own", model, keep=1)
    for step in range(1, options.rounds + 2):  # the first is thrown away
        once = place / f"once{step}"
        note("dd write", on_main(partial(dd, *write)))
        note("matrix products alone", compute)
        note("optimizer step alone", optimizer.step)
        note("asynchronous save, the call", partial(checkpointer.save, step))
        note("matrix products meanwhile", compute)
        note("optimizer step, which waits", optimizer.step)
        note("asynchronous save, the rest", checkpointer._wait)
        note("fd.save", partial(fd.save, once, model, step=1))
        on_main(partial(drop_pages, place))()
        note("dd read", on_main(partial(dd, *read)))
        note("fd.load", partial(fd.load, once, model))
        on_main(partial(shutil.rmtree, once))()
    checkpointer.close()
    if here.is_main:
        shutil.rmtree(place)
        medians = {name: statistics.median(values[1:]) for name, values in figures.items()}
        stall = medians["asynchronous save, the call"]
        stall += medians["optimizer step, which waits"] - medians["optimizer step alone"]
        whole = stall + medians["matrix products meanwhile"] + medians["asynchronous save, the rest"]
        report = {
            "ranks": here.size,
            "megabytes": megabytes,
            "rounds": options.rounds,
            "median_seconds": {name: round(value, 4) for name, value in medians.items()},
            "all_seconds": {name: [round(value, 4) for value in values] for name, values in figures.items()},
            "stall_share_of_fd_save": round(stall / medians["fd.save"], 4),
            "products_slower": round(
                medians["matrix products meanwhile"] / medians["matrix products alone"] - 1, 3
            ),
            "save_rate_of_disk": round(medians["dd write"] / medians["fd.save"], 3),
            "checkpointer_rate_of_disk": round(medians["dd write"] / whole, 3),
            "load_rate_of_disk": round(medians["dd read"] / medians["fd.load"], 3),
        }
        fd.print(json.dumps(report))


main()

"""Rows a second that `fd.RowTable` pulls and pushes: from shards in this process, and from a server on this host.

python benchmarks/rows.py [rows of the table] [rows a batch] [numbers a row]

The server and the rank that asks are pinned to one core each where there are two. Beside it: the same rows copied
out of a tensor, which is the bound of the memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable

import numpy as np
import torch

import farandole as fd
from farandole.sync.rows import service
from farandole.sync.rows.links import LocalShards, RowServers, ServerShards
from farandole.sync.rows.store import key_of
from farandole.sync.rows.table import RowMessages
from farandole.sync.server.client import ServerClient, ServerPlace, make_directory, start_server
from farandole.sync.server.dense.connect import ServerConnections
from farandole.sync.server.loop import Limits
from shared import seconds_of

REPEATS = 7
RULES = {
    "optimizer": "adagrad:lr=0.01", "admit": 1, "expire_seconds": None, "init_std": 0.01, "key": 1,
    "dtype": "float32",
}  # fmt: skip


def rows_per_second(run: Callable[[], object], rows: int) -> str:
    """Return the median, and the slowest and fastest, in millions."""
    seconds = seconds_of(run, REPEATS)
    low, middle, high = (rows / each / 1e6 for each in (max(seconds), statistics.median(seconds), min(seconds)))
    return f"{middle:6.2f} M rows/s ({low:.2f} to {high:.2f})"


def measure(name: str, exchange: RowMessages, count: int, batch: int, dim: int) -> None:
    """Fill a table and print what it does."""
    random = np.random.default_rng(0)
    ids = np.unique(random.integers(0, 2**62, count))
    for part in np.array_split(ids, max(1, count // 200_000)):
        exchange.push(part, torch.ones(len(part), dim), np.ones(len(part), np.int64), lr=0.01, weight=1.0)
    asked = np.sort(random.choice(ids, batch, replace=False))
    grads, ones = torch.ones(batch, dim), np.ones(batch, np.int64)
    print(f"{name}: pull {rows_per_second(lambda: exchange.pull(asked), batch)}")
    print(f"{name}: push {rows_per_second(lambda: exchange.push(asked, grads, ones, lr=0.01, weight=1.0), batch)}")
    sent = exchange.pushed_bytes / (exchange.pushed_rows * (4 * dim + 8))
    print(f"{name}: pushed bytes {sent:.4f} of u (4 d + 8)")


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("rows", 1_000_000), ("batch", 200_000), ("dim", 64)):
        parser.add_argument(name, nargs="?", type=int, default=default)
    options = parser.parse_args()
    count, batch, dim = options.rows, options.batch, options.dim
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    rows, at = torch.ones(count, dim), torch.randperm(count)[:batch].sort().values
    print(f"{count} rows of {dim} floats, {batch} a batch, one core of {len(cores)}")
    print(f"copied out of a tensor: {rows_per_second(lambda: rows.index_select(0, at), batch)}")
    config = {"rules": {"dim": dim, **RULES}, "ranks": [0], "staleness": None}
    exchange = RowMessages(
        LocalShards(config, 1), key_of("t", 0), dim, torch.float32, in_rounds=False, counts_occurrences=False
    )
    measure("in this process", exchange, count, batch, dim)
    with tempfile.TemporaryDirectory() as directory:
        place = ServerPlace(
            number=0, host="here", address="127.0.0.1", directory=make_directory(directory), clients=[0],
            limits=Limits(0.0, 1.0, 60.0, 1 << 30),
            services={service.SERVICE: {"class": f"{service.__name__}:TablesService", "config": {"ranks": [0]}}},
        )  # fmt: skip
        os.sched_setaffinity(0, cores[-1:])
        place, process = start_server(place, bytes(32))
        os.sched_setaffinity(0, cores[:1])
        client = ServerClient(
            place, bytes(32), client=0, rank=0, host="here", most_kept_bytes=256 << 20, most_bytes=1 << 30
        )
        links = ServerShards(RowServers(1, ServerConnections([client])), "t", config)
        exchange = RowMessages(
            links, key_of("t", 0), dim, torch.float32, in_rounds=False, counts_occurrences=False
        )
        measure("from a server", exchange, count, batch, dim)
        client.leave()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    print(f"farandole {fd.__version__}, torch {torch.__version__}")
    main()

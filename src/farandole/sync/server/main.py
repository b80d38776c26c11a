"""The server process: ``python -m farandole.sync.server.main``, started by `client`.

Reads one line of JSON from its standard input, which has the key too, and writes one line with its port.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import socket
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...core.vocabulary.run_files import stay_while
from .loop import Limits, MakeService, ServerLoop, ServiceHost, SnapshotWriter, read_snapshot

RESTORED_SECONDS = 120.0
"""For clients to call a server that was restored: they do when they next need it, after a step of computing."""


def main() -> int:
    """Serve until all clients have left; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(
            number, signal.SIG_IGN
        )  # a job that is stopped ends its ranks, and the server ends with them
    torch.set_num_threads(1)
    config = json.loads(sys.stdin.readline())
    directory = Path(config["directory"])
    services = {name: _make(found["class"])(found["config"]) for name, found in config["services"].items()}
    host = ServiceHost(services, set(config["clients"]))
    saved = read_snapshot(directory) if config["restores"] else []
    if saved:
        host.load(saved)
    writer = SnapshotWriter(directory)
    address, port = config["address"], int(config["port"])
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family, backlog=128) as listener:
        sys.stdout.write(json.dumps({"port": listener.getsockname()[1], "process": os.getpid()}) + "\n")
        sys.stdout.flush()
        _let_go_of_output()
        limits = Limits(**{**config["limits"], "starter": 0 if config["restores"] else config["starter"]})
        if config["restores"]:
            limits = replace(limits, start_seconds=max(limits.grace_seconds, RESTORED_SECONDS))
        loop = ServerLoop(
            host, listener, key=bytes.fromhex(config["key"]), generation=config["generation"], limits=limits,
            writer=writer,
        )  # fmt: skip
        stay_while(loop.has_callers)
        loop.run(partial(shutil.rmtree, directory, ignore_errors=True))
    writer.close()
    return 0


def _make(name: str) -> MakeService:
    module, _, kind = name.partition(":")
    found: Any = getattr(importlib.import_module(module), kind)
    made: MakeService = found
    return made


def _let_go_of_output() -> None:
    """Hold no pipe open: who started us may wait for its end."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)


if __name__ == "__main__":
    sys.exit(main())

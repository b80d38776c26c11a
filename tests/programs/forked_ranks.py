"""Ranks that are children of one process, which has imported all they need: a world takes milliseconds."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import farandole as fd
from farandole.launch.supervise.process import dying_with_us


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def import_all() -> None:
    """Import what the ranks do, once for all of them."""
    for name in ("init", "distribute", "Checkpointer"):
        getattr(fd, name)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)


def forked(play: Callable[[], None], rank: int, size: int, port: int, log: Path) -> int:
    """Begin a rank, a child that ends with `play`; return its process id. `log`: what it prints is added there."""
    bind = dying_with_us()  # a run that is killed leaves no rank, and no rank leaves its writer
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        bind()
        os.setsid()
        with log.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        play()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait_for(children: Sequence[int], seconds: float) -> list[int]:
    """Return exit codes, at the latest after so long.

    Once one is killed the others are, soon: nothing is to be learned from their waiting.
    """
    codes: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[child] = os.waitstatus_to_exitcode(status)
                    if codes[child] == -signal.SIGKILL:
                        end = min(end, time.monotonic() + 1.0)
        if time.monotonic() > end:
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[child] for child in children]

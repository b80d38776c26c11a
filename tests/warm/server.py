"""A process that has imported torch: forks itself for every program it is asked for."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from .program import Pristine, Program
from .starts import close_all_but, connect_standard_streams, start_warm

_PR_SET_PDEATHSIG = 1


def import_packages(names: list[str]) -> None:
    """Import what was asked for, in the order of scripts: before torch."""
    importlib.import_module("numpy")  # its threads are begun again in every fork
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - names only
    sys.modules["pyarrow"] = None  # type: ignore[assignment] # pandas takes it if it is there: it begins threads
    for name in names:
        importlib.import_module(name)
    del sys.modules["pyarrow"]
    begun = len(os.listdir("/proc/self/task")) - threads  # noqa: PTH208
    assert not begun, f"{', '.join(names)} begin {begun} threads at import: a fork would be without them"


def import_torch() -> None:
    """Import torch, and what the first optimizer of a process imports: thousands of files."""
    import torch

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)


def main() -> None:
    """Serve the test process at the other end of the socket `argv[1]`, until it is gone. Import `argv[2:]` too."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    _die_with_our_parent()
    environment = dict(os.environ)
    import_packages(sys.argv[2:])
    import_torch()
    pristine = Pristine(environment)
    lines = connection.makefile("rb")
    connection.sendall(b'["ready"]\n')
    children: dict[int, int] = {}
    """By a descriptor that can be read once the child has ended."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while True:
        for descriptor, _ in poller.poll():
            if descriptor in children:
                poller.unregister(descriptor)
                os.close(descriptor)
                child = children.pop(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                connection.sendall(json.dumps(["ended", child, code]).encode() + b"\n")
                continue
            # One request at a time: the next is sent after the answer, so nothing of it is read too early.
            _, streams, *_ = socket.recv_fds(connection, 1, 3)
            line = lines.readline()
            if not line:
                return
            child = os.fork()
            if child == 0:
                _become(json.loads(line), streams, pristine)
            for stream in streams:
                os.close(stream)
            connection.sendall(json.dumps(["started", child]).encode() + b"\n")
            ended = os.pidfd_open(child)
            children[ended] = child
            poller.register(ended, select.POLLIN)


def _become(request: dict[str, Any], streams: list[int], pristine: Pristine) -> NoReturn:
    try:
        _die_with_our_parent()
        connect_standard_streams(*streams)
        close_all_but({0, 1, 2})
        os.chdir(request["directory"])
        os.sched_setaffinity(0, request["cores"])
    except BaseException as problem:  # nobody is there to raise it to
        os.write(2, f"{problem!r}\n".encode())
        os._exit(127)
    option, target, arguments, options = request["program"]
    program = Program(option, target, tuple(arguments), tuple(options))
    if program.is_launcher:
        start_warm(pristine)
    pristine.become(program, request["environment"])


def _die_with_our_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


if __name__ == "__main__":
    main()

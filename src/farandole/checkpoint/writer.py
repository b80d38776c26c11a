"""The writer of one rank: ``python -m farandole.checkpoint.writer DESCRIPTOR PARENT``.

It waits for files to write, in memory that it shares with the rank, and ends with the rank.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from .writer_client import receive_message, send_message, write_file

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Write files until the rank closes its end of the socket."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the rank decides when it ends
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=descriptor)
    if parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            return
    memory: mmap.mmap | None = None
    while True:
        try:
            message, descriptors = receive_message(channel)
        except (EOFError, OSError):
            return
        if descriptors:
            if memory is not None:
                memory.close()
            memory = mmap.mmap(descriptors[0], 0, prot=mmap.PROT_READ)
            os.close(descriptors[0])
        assert memory is not None, "the first message brings the memory"
        try:
            with memoryview(memory) as whole, whole[: message["nbytes"]] as content:
                hashes = write_file(
                    Path(message["path"]), content, message["ranges"], lambda: _require_rank(channel)
                )
            answer: dict[str, Any] = {"hashes": hashes}
        except OSError as problem:
            answer = {"error": f"{problem.strerror or problem}: {message['path']}", "errno": problem.errno}
        except EOFError:
            return
        try:
            send_message(channel, answer, [])
        except OSError:
            return


def _require_rank(channel: socket.socket) -> None:
    """Raise `EOFError` if the rank is gone: the file is of no use then."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    if poll.poll(0):
        raise EOFError


if __name__ == "__main__":
    main()

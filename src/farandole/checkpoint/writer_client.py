"""A rank's end of its writer: the memory that both share, and one request at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.vocabulary.errors import CheckpointError
from .directory import FILE_MODE, sync_directory
from .shard_file import ALIGNMENT_BYTES, digest

# The socket between a rank and its writer: JSON messages, with a length before each, and descriptors.

_LENGTH = struct.Struct("<I")


def send_message(channel: socket.socket, message: Any, descriptors: list[int]) -> None:
    """Send one message, and descriptors with it. Raises `OSError` if the other end is gone."""
    text = json.dumps(message).encode()
    begin = _LENGTH.pack(len(text))
    if descriptors:
        sent = socket.send_fds(channel, [begin], descriptors)
        begin = begin[sent:]
    channel.sendall(begin + text)


def receive_message(channel: socket.socket) -> tuple[Any, list[int]]:
    """Return the next message and its descriptors. Raises `EOFError` if the other end is gone."""
    begin, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, 1)
    begin += _receive(channel, _LENGTH.size - len(begin)) if begin else _end()
    return json.loads(_receive(channel, _LENGTH.unpack(begin)[0])), descriptors


def _receive(channel: socket.socket, nbytes: int) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        received += channel.recv(min(nbytes - len(received), 1 << 20)) or _end()
    return bytes(received)


def _end() -> bytes:
    raise EOFError("the other end of the writer's socket is closed")


_ROOT = Path(__file__).resolve().parents[2]
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); import farandole.checkpoint.writer as w; w.main()"
"""The package that runs here, wherever it was imported from."""


class Writer:
    """The process that writes this rank's files. It is started at the first need, and again if it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._descriptor = -1
        self._memory: mmap.mmap | None = None
        self._is_new = True

    def memory(self, nbytes: int) -> mmap.mmap:
        """Return memory of at least `nbytes`, shared with the writer; the content is undefined.

        It is valid until more is asked for. It keeps its pages between saves, so that only the first one pays for
        them.
        """
        if self._memory is None or len(self._memory) < nbytes:
            self._forget_memory()
            self._descriptor = os.memfd_create("farandole-checkpoint", os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, nbytes)
            self._memory = mmap.mmap(self._descriptor, nbytes)
            self._is_new = True
        return self._memory

    @property
    def descriptor(self) -> int:
        """The file descriptor of the memory; -1: there is none yet."""
        return self._descriptor

    def start(self) -> None:
        """Start the process, if it is not running."""
        if self._process is not None and self._process.poll() is None:
            return
        self._forget_process()
        ours, theirs = socket.socketpair()
        # PR_SET_PDEATHSIG is tied to the thread that starts the process: only the main thread lives as long as we.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(_ROOT), str(theirs.fileno()), str(parent)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._channel, self._is_new = ours, True

    def write(self, path: Path, nbytes: int, ranges: Sequence[tuple[int, int]]) -> list[str]:
        """Have the first `nbytes` of the memory written to `path`, and return the hashes of `ranges`.

        Blocks until the file is on the disk: to be called in a thread of its own. Raises `CheckpointError`.
        """
        assert self._channel is not None, "start comes first"
        descriptors = [self._descriptor] if self._is_new else []
        try:
            send_message(self._channel, {"path": str(path), "nbytes": nbytes, "ranges": ranges}, descriptors)
            self._is_new = False
            answer, _ = receive_message(self._channel)
        except (EOFError, OSError, ValueError) as problem:
            raise CheckpointError(f"the process that writes {path} ended{self._how(problem)}") from None
        if "error" in answer:
            raise CheckpointError(f"cannot write a checkpoint: {answer['error']}")
        return list(answer["hashes"])

    def close(self) -> None:
        """End the process, and free the memory."""
        self._forget_process()
        self._forget_memory()

    def forget(self) -> None:
        """In a forked child: close the parent's socket, and leave its process alone."""
        self._process = None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _how(self, problem: Exception) -> str:
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0) if self._process is not None else None
        if code is not None and code < 0:
            return f" by {signal.Signals(-code).name}"
        return f" with exit code {code}" if code is not None else f": {problem}"

    def _forget_process(self) -> None:
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if process is not None:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()  # it hangs in a disk; the kernel ends it when that lets go
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)

    def _forget_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            with suppress(BufferError):  # tensors still look at it; it goes with them
                memory.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


# Writes one file from memory: hashed meanwhile, past the page cache if possible, fsynced with its directory.


_CHUNK_BYTES = 8 << 20
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


def write_file(
    path: Path,
    memory: memoryview,
    ranges: Sequence[tuple[int, int]],
    between: Callable[[], None] = lambda: None,
) -> list[str]:
    """Write `memory` to the new file `path`, have it on the disk, and return the hashes of `ranges` of it.

    Args:
        path: must not exist. After an error it is removed, so that its space is free again.
        memory: the content; where it begins at a page, the page cache is not filled with it.
        ranges: begin and end of each range, in bytes.
        between: called between writes; what it raises ends them.

    Raises:
        OSError: a full or failing disk.
    """
    with ThreadPoolExecutor(1) as threads:  # hashlib and writing both release the GIL
        hashes = threads.submit(lambda: [digest(memory[begin:end]) for begin, end in ranges])
        descriptor, is_direct = _create(path)
        try:
            try:
                _write_all(descriptor, memory, is_direct, between)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_directory(path.parent)
            return hashes.result()
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise


def _create(path: Path) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, FILE_MODE), True
    except OSError as problem:
        if problem.errno not in _NOT_DIRECT:
            raise
    with suppress(FileNotFoundError):  # some file systems make the file before they refuse the flag
        path.unlink()
    return os.open(path, flags, FILE_MODE), False


def _write_all(descriptor: int, memory: memoryview, is_direct: bool, between: Callable[[], None]) -> None:
    at = 0
    while at < len(memory):
        between()
        end = min(at + _CHUNK_BYTES, len(memory))
        if is_direct and end - at >= ALIGNMENT_BYTES:
            end -= (end - at) % ALIGNMENT_BYTES
        elif is_direct:
            is_direct = _leave_direct(descriptor)
        try:
            at += os.write(descriptor, memory[at:end])
        except OSError as problem:
            if not is_direct or problem.errno not in _NOT_DIRECT:
                raise
            is_direct = _leave_direct(descriptor)


def _leave_direct(descriptor: int) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return False

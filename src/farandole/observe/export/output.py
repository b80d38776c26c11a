"""Writing an export: private files, written aside and renamed; errors that name the file and what to do."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import ConfigError


def write_bytes(path: Path, pieces: Iterable[bytes]) -> Path:
    """Write a file of mode 0600, through gzip when its name ends with ``.gz``; return its path.

    Raises `ConfigError` when it cannot be written; nothing is left behind then.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(21, "it is a directory")
        with contextlib.ExitStack() as stack:
            stack.callback(aside.unlink, missing_ok=True)
            # A pipe or a device is written to, not replaced.
            special = path.exists() and not path.is_file()
            descriptor = os.open(path if special else aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            file: Any = stack.enter_context(os.fdopen(descriptor, "wb"))
            if path.suffix == ".gz":
                file = stack.enter_context(gzip.GzipFile(fileobj=file, mode="wb", mtime=0))
            for piece in pieces:
                file.write(piece)
            file.flush()
            if path.suffix == ".gz":
                file.close()
            if not special:
                aside.replace(path)
    except OSError as problem:
        raise ConfigError(
            f"cannot write {path}: {problem.strerror or problem}", remedy="choose another place with -o OUT"
        ) from None
    return path


def write_trace(path: Path, head: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> Path:
    """Write a trace: an object of `head` and ``traceEvents``, one event a line; as a stream, so of any size."""
    return write_bytes(path, _trace(head, events))


def _trace(head: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> Iterable[bytes]:
    yield (json.dumps(head)[:-1] + (", " if head else "") + '"traceEvents": [').encode()
    piece, first = io.StringIO(), True
    for event in events:
        piece.write("\n" if first else ",\n")
        piece.write(json.dumps(event, allow_nan=False))
        first = False
        if piece.tell() > 1 << 16:
            yield piece.getvalue().encode()
            piece = io.StringIO()
    yield (piece.getvalue() + "\n]}\n").encode()

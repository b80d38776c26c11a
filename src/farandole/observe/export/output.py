"""Files of the formats, and the packages that write some of them."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.run_files import write_private
from ...core.vocabulary.suggestions import install_command


def write_output(path: Path, pieces: Iterable[bytes]) -> Path:
    """Write a private file, through gzip when its name ends with ``.gz``; return its path.

    Raises `ConfigError` when it cannot be written; nothing is left behind then.
    """
    try:
        write_private(path, _packed(pieces) if path.suffix == ".gz" else pieces)
    except OSError as problem:
        raise ConfigError(
            f"cannot write {path}: {problem.strerror or problem}", remedy="choose another place with -o OUT"
        ) from None
    return path


def _packed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(zlib.Z_BEST_COMPRESSION, wbits=31)  # 31: gzip's header
    yield from map(packer.compress, pieces)
    yield packer.flush()


def needed(module: str, extra: str) -> Any:
    """Import `module`, of this package's extra `extra`. Raises ConfigError, which names that, if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise ConfigError(
            f"this format needs {module.partition('.')[0]}, which cannot be imported ({problem})",
            remedy=f"install it with: {install_command(extra)}",
        ) from None

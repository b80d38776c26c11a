"""Replace a script by its changed text: all of it or nothing."""

from __future__ import annotations

import io
import os
import tokenize
from pathlib import Path

from ...core.vocabulary.errors import ConfigError


def write_script(path: Path, text: str) -> None:
    """Replace a script's text; its encoding, its mode and a link to it stay. Raises `ConfigError`."""
    real = path.resolve()
    aside = real.with_name(f".{real.name}.{os.getpid()}")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(real.read_bytes()).readline)
        mode = real.stat().st_mode
        if not os.access(real, os.W_OK):
            raise PermissionError(13, "Permission denied")
        aside.write_bytes(text.encode(encoding))
        aside.chmod(mode)
        aside.replace(real)
    except OSError as problem:
        raise ConfigError(
            f"cannot write {path}: {problem.strerror or problem}", remedy="the diff is printed without --write"
        ) from None
    finally:
        aside.unlink(missing_ok=True)

"""Packages that write some of the formats."""

from __future__ import annotations

import importlib
from typing import Any

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.suggestions import install_command


def needed(module: str, extra: str, purpose: str) -> Any:
    """Import `module`, of this package's extra `extra`. Raises ConfigError, which names that, if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise ConfigError(
            f"{purpose} needs {module.partition('.')[0]}, which cannot be imported ({problem})",
            remedy=f"install it with: {install_command(extra)}",
        ) from None

"""The error for a package that a front end needs and that is not installed."""

from __future__ import annotations

from ..core.vocabulary.suggestions import install_command


def missing(module: str, extra: str, problem: ImportError) -> ImportError:
    """Return the error for front end `module`, which needs what the extra `extra` of this package installs."""
    return ImportError(
        f"{module} needs {extra}, which cannot be imported ({problem}); install it with: {install_command(extra)}",
        name=problem.name,
    )

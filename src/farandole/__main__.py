"""``python -m farandole`` and the ``farandole`` command."""

from __future__ import annotations

import io
import sys


def main() -> int:
    """Run the command line; return its exit code."""
    from .cli.main import run

    # File names that are no text come in as surrogates, and have to go out as the bytes they are.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

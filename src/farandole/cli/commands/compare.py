"""``farandole compare``: what changed between two runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ..main import parser

_EXAMPLES = """\
  farandole compare runs/before runs/after
  farandole compare runs/before runs/after --json
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser("compare", "Say what changed between two runs, and whether it is more than noise.", _EXAMPLES)
    made.add_argument("first", metavar="A", help="run directory")
    made.add_argument("second", metavar="B", help="run directory to compare with it")
    made.add_argument("--json", action="store_true", help="print the comparison as JSON")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = make_parser().parse_args(arguments)
    from ...observe.diagnose import compare

    comparison = compare(Path(options.first), Path(options.second))
    print(json.dumps(comparison.to_mapping()) if options.json else comparison.to_text())
    return 0

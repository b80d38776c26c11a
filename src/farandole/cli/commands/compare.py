"""``farandole compare``: what changed between two runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import write_notice
from ..main import parser

_EXAMPLES = """\
  farandole compare
  farandole compare runs/before runs/after
  farandole compare runs/before runs/after --json
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser("compare", "Say what changed between two runs, and whether it is more than noise.", _EXAMPLES)
    made.add_argument("first", nargs="?", metavar="A", help="run directory (default: the newest two in runs/)")
    made.add_argument("second", nargs="?", metavar="B", help="run directory to compare with it")
    made.add_argument("--json", action="store_true", help="print the comparison as JSON")
    return made


def _runs(options: argparse.Namespace) -> tuple[Path, Path]:
    if options.second is not None:
        return Path(options.first), Path(options.second)
    if options.first is not None:
        raise ConfigError("compare: one run was given", remedy=f"farandole compare {options.first} runs/ANOTHER")
    from ...observe.records.run_reader import RUNS, runs_by_start

    newest = runs_by_start()[-2:]
    if len(newest) < 2:
        raise ConfigError(
            f"compare: no runs were given, and {RUNS}/ holds {len(newest)} of two",
            remedy="name two run directories: farandole compare runs/before runs/after",
        )
    write_notice(f"the newest two runs: {newest[0]} and {newest[1]}")
    return newest[0], newest[1]


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = make_parser().parse_args(arguments)
    from ...observe.diagnose import compare

    comparison = compare(*_runs(options))
    print(json.dumps(comparison.to_mapping()) if options.json else comparison.to_text())
    return 0

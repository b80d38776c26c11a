"""``farandole report``: the HTML report of a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ...core.vocabulary.text import write_notice
from ..main import parser
from ..options.files import NEWEST, run_or_newest

_EXAMPLES = """\
  farandole report                              # of the newest run in runs/
  farandole report runs/20260101-120000-train
  farandole report runs/20260101-120000-train --watch
  farandole report runs/first -o first.html
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser("report", "Write the HTML report of a run: one file that opens anywhere.", _EXAMPLES)
    made.add_argument("run", metavar="RUN", nargs="?", help=f"run directory {NEWEST}")
    made.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: RUN/report.html)")
    made.add_argument("--baseline", metavar="RUN", help="run of one process to compare with")
    made.add_argument("--watch", action="store_true", help="write it every few seconds until the run ends")
    made.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="with --watch: how often (5)")
    made.add_argument("--json", action="store_true", help="print where it is as JSON")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = make_parser().parse_args(arguments)
    from ...observe.report import watch_report, write_report

    output = None if options.output is None else Path(options.output)
    baseline = None if options.baseline is None else Path(options.baseline)
    run = run_or_newest(options.run)
    if options.watch:
        path = watch_report(run, output, baseline=baseline, every_seconds=options.every, say=write_notice)
    else:
        path = write_report(run, output, baseline=baseline)
    print(json.dumps({"report": str(path)}) if options.json else path)
    return 0

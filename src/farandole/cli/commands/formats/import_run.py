"""``farandole import``: a run directory of the traces of PyTorch's profiler."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ...main import parser
from ...options.import_traces import KINDS, import_with_notes

_EXAMPLES = """\
  farandole import trace-rank*.json -o runs/theirs && farandole report runs/theirs
  farandole report --from kineto trace-rank*.json.gz
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser(
        "import",
        "Make a run directory of traces that PyTorch's profiler (Kineto) wrote, one a rank;\n"
        "farandole report, export and the like read it as one of their own.",
        _EXAMPLES,
    )
    made.add_argument("files", metavar="FILE", nargs="+", help="trace of one rank; may be compressed by gzip")
    made.add_argument("-o", "--output", metavar="RUN", required=True, help="run directory to make")
    made.add_argument("--from", dest="kind", choices=KINDS, help="format of the files")
    made.add_argument("--json", action="store_true", help="print what was made as JSON")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = make_parser().parse_args(arguments)
    out = Path(options.output)
    notes = import_with_notes([Path(name) for name in options.files], out)
    print(json.dumps({"run": str(out), "ranks": len(options.files), "notes": notes}) if options.json else out)
    return 0

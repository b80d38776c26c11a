"""``farandole timeline``: work on the timelines of named operations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from ..main import parser

_EXAMPLES = """\
  farandole timeline merge timeline.json timeline.rank1.json -o all-ranks.json
  farandole timeline merge timeline*.json -o all-ranks.json
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser(
        "timeline",
        "Put the timelines of all ranks in one file that chrome://tracing and Perfetto show.",
        _EXAMPLES,
    )
    made.add_argument("action", choices=["merge"], help="what to do")
    made.add_argument("files", metavar="FILE", nargs="+", help="the timeline of one rank")
    made.add_argument("-o", "--output", metavar="OUT", required=True, help="output file")
    made.add_argument("--json", action="store_true", help="print what was written as JSON")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = make_parser().parse_args(arguments)
    from ...observe.export.operation_timeline import merge_timelines

    count = merge_timelines(options.files, options.output)
    if options.json:
        print(json.dumps({"timeline": options.output, "ranks": len(options.files), "events": count}))
    else:
        print(f"{options.output}: {count} events of {len(options.files)} ranks")
    return 0

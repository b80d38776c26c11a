"""``farandole export``: a run in the formats of other tools."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import write_notice
from ..main import parser

FORMATS = ("chrome", "tensorboard", "prometheus", "openmetrics")
_EXAMPLES = """\
  farandole export runs/first --to chrome
  farandole export runs/first --to chrome -o first.json.gz --steps 100-120
  farandole export runs/first --to tensorboard && tensorboard --logdir runs/first/tensorboard
  farandole export runs/first --to prometheus -o /var/lib/node_exporter/first.prom

chrome: all ranks on one clock, for ui.perfetto.dev and chrome://tracing. docs/check/slow.md has
each. tensorboard needs the extra of that name, the last two the extra prometheus; in Farandole's
folder: pip install -e '.[tensorboard,prometheus]'.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser("export", "Write a run in the format of another tool.", _EXAMPLES)
    made.add_argument("run", metavar="RUN", help="run directory")
    made.add_argument(
        "--to", choices=FORMATS, required=True, metavar="FORMAT", help=f"one of {', '.join(FORMATS)}"
    )
    made.add_argument("-o", "--output", metavar="OUT", help="file or folder to write (default: inside RUN)")
    made.add_argument("--steps", metavar="A-B", help="only steps A to B (default: all recorded steps)")
    made.add_argument("--json", action="store_true", help="print what was written as JSON")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = make_parser().parse_args(arguments)
    steps = None if options.steps is None else read_steps(options.steps)
    from ...observe.export.formats import export_run

    out = None if options.output is None else Path(options.output)
    done = export_run(Path(options.run), options.to, out, steps=steps)
    for note in done.notes:
        write_notice(note)
    if options.json:
        print(json.dumps({"format": options.to, "files": [str(path) for path in done.files], "notes": done.notes}))
    else:
        print("\n".join(str(path) for path in done.files))
    return 0


def read_steps(text: str) -> tuple[int, int]:
    """Read ``100-120`` or ``7``."""
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or int(first) > int(last or first):
        raise ConfigError(f"--steps {text!r}: expected a range of steps", remedy="for example: 100-120")
    return int(first), int(last or first)

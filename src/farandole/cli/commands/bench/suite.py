"""``farandole bench suite``: its options, and running it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ....bench.suite.entries import SUITES
from ....core.vocabulary.errors import ConfigError
from ....core.vocabulary.notice import write_notice
from ....core.vocabulary.units import parse_bits_per_second
from ...main import Parser, parser
from ...options.emulation_options import add_congestion_control
from ...options.output_file import check_output

_EXAMPLES = """\
  farandole bench suite -o docs/results/today.md
  farandole bench suite --suite quick --rate none -o results.md
"""


def make_suite_parser() -> Parser:
    """Return the parser of ``bench suite``."""
    made = parser(
        "bench suite",
        "Run the standard set of benchmarks and write their tables as Markdown, with the machine, the versions\n"
        "and the commands that made them; the numbers go beside it as JSON.",
        _EXAMPLES,
    )
    made.add_argument("-o", "--output", required=True, metavar="FILE", help="Markdown file to write")
    made.add_argument("--suite", choices=list(SUITES), default="standard", help="which set (default: standard)")
    made.add_argument(
        "--rate", default="1gbit", metavar="RATE", help="rate of emulated links; none: loopback (default: 1gbit)"
    )
    add_congestion_control(made)
    made.add_argument("--json", action="store_true", help="print the results as JSON on stdout")
    return made


def run_suite_command(options: argparse.Namespace) -> int:
    """Run it; return the exit code: 1 when a benchmark failed, 0 otherwise."""
    if options.rate != "none":
        try:
            parse_bits_per_second(options.rate)
        except ConfigError as problem:
            raise ConfigError(f"--rate {problem.message}", remedy=problem.remedy) from None
    from ....bench.suite.suite import numbers_beside, run_suite
    from ....launch.emulate.congestion import choose

    choose(options.congestion_control)
    out = Path(options.output)
    check_output("--output", options.output)
    numbers = numbers_beside(out)
    if numbers == out:
        raise ConfigError(
            f"--output {out}: the numbers go beside the page, into a file of this name",
            remedy=f"for example: {out.with_suffix('.md')}",
        )
    check_output("--output", str(numbers))
    result = run_suite(
        options.suite, options.rate, out, congestion_control=options.congestion_control, say=write_notice
    )
    print(json.dumps(result) if options.json else out)
    return 1 if any("failed" in entry for entry in result["entries"]) else 0

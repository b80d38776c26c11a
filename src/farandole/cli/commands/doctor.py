"""``farandole doctor``: problems of hosts and links, and the commands that fix them."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import write_notice
from ...launch.doctor.checks import judge
from ...launch.doctor.examine import examine
from ...launch.doctor.page import to_mapping, to_text
from ..main import parser
from ..options.host_options import add_cluster_options, read_cluster, read_targets

_EXAMPLES = """\
  farandole doctor
  farandole doctor -H node1:8,node2:8
  farandole doctor --hostfile hosts --json
  farandole emulate --hosts 3 --rate 1gbit --rate-between 0,1=50mbit -- farandole doctor
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser(
        "doctor",
        "Look at hosts and the links between them: interfaces, firewalls, names, clocks, versions, memory,\n"
        "limits, GPUs, latency, bandwidth. Prints the fix of each fault. Default: this host.",
        _EXAMPLES,
    )
    made.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    add_cluster_options(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code: 0 no problem, 1 problems, 2 bad usage."""
    options = make_parser().parse_args(arguments)
    if options.variables:
        raise ConfigError("-x is for commands that start ranks", remedy="doctor starts none: leave it out")
    targets = read_targets(options, read_cluster(options))
    begin = time.monotonic()
    facts = examine(targets, write_notice)
    findings = judge(facts)
    if options.json:
        print(json.dumps(to_mapping(facts, findings, time.monotonic() - begin)))
    else:
        print(to_text(facts, findings))
    return 1 if any(finding.severity == "problem" for finding in findings) else 0

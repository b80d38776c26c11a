"""``farandole init``: the lines that a training script needs, as a diff."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from ...core.vocabulary.notice import write_notice
from ..main import parser

_EXAMPLES = """\
  farandole init train.py            # print the diff
  farandole init train.py --write    # change the script
  farandole init train.py | git apply
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser(
        "init",
        "Read a training script and propose the lines that make it train on several processes, as a diff, or\n"
        "say why it cannot be done. The script is read and not run; nothing is written without --write.",
        _EXAMPLES,
    )
    made.add_argument("script", metavar="SCRIPT", help="the script that has the training loop")
    made.add_argument("--write", action="store_true", help="change the script; otherwise nothing is written")
    made.add_argument("--json", action="store_true", help="print the diff and the notes as JSON on stdout")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = make_parser().parse_args(arguments)
    from ...launch.adapt.propose import propose
    from ...launch.adapt.write import write_script

    path = Path(options.script)
    proposal = propose(path)
    if options.write:
        write_script(path, proposal.after)
    if options.json:
        print(json.dumps({**proposal.to_mapping(), "written": options.write}))
        return 0
    print(proposal.diff, end="", flush=True)
    for note in proposal.notes:
        write_notice(f"note: {note}")
    verify = f"farandole verify -np 2 -- python {shlex.quote(str(path))}"
    if options.write:
        write_notice(f"changed {path}; check it: {verify}")
    else:
        write_notice(f"nothing is written; to change {path}: farandole init {shlex.quote(str(path))} --write")
    return 0
